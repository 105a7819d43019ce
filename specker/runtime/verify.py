"""One target forward over the root and the draft: the target's logits after each of them."""

import torch
from torch import Tensor

from specker.kernels.attention import ancestor_words
from specker.runtime.draft import Draft, Resume
from specker.runtime.model.cache import KVCache, Rows, Start
from specker.runtime.model.decoder import Model, chain_rows, forward


def verify(
    model: Model, cache: KVCache, root: int, draft: Draft, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """-> logits [N + 1, V] (row 0 follows the root), the rows' absolute positions [N + 1] int64, and for each depth of
    `taps` the residual stream [N + 1, E].

    Row r's K/V stands at column exact_len + r until the cache commits a path.
    """
    if draft.resume is not None:
        return _resumed(model, cache, draft, draft.resume, taps)
    tokens = torch.tensor([root], device=model.device)
    if len(draft):
        tokens = torch.cat((tokens, draft.tokens))
    if draft.is_chain:
        rows = chain_rows(model, cache, len(tokens))
    else:
        start, end = cache.exact_len, cache.exact_len + len(tokens)
        depths = torch.tensor(draft.depths(), device=model.device)
        rows = Rows(
            positions=depths + start,
            slots=cache.slot_of[start:end],
            kv_len=cache.lengths[end : end + 1],
            window=cache.lengths[len(tokens) : len(tokens) + 1],
            ancestors=ancestor_words(draft.parents),
        )
    out = forward(model, cache, rows, model.embed_tokens(tokens), taps=taps)
    return model.logits(out.hidden), rows.positions, out.taps


def verify_static(
    model: Model, cache: KVCache, window: Tensor, parents: Tensor | None, start: Start, logits: Tensor
) -> Tensor:
    """`verify` without a number on the host: window [N + 1] are the root and the draft, parents [N] a tree's (None: a
    chain), the root stands at `start`. Writes logits [N + 1, V]; returns the rows' positions."""
    rows = cache.place(start, 0, len(window), parents, model.config.max_context - 1)
    out = forward(model, cache, rows, model.embed_tokens(window))
    model.logits(out.hidden, logits)
    return rows.positions


def resume_static(model: Model, cache: KVCache, window: Tensor, resume: Resume, start: Start, logits: Tensor) -> Tensor:
    """`verify_static` of a self-drafted chain, window [N + 1]; resume.hidden are its first N rows."""
    N, E = len(window) - 1, resume.layer
    last = chain_rows(model, cache, 1, N, start)
    hidden = forward(model, cache, last, model.embed_tokens(window[N:]), slice(E)).hidden
    rows = chain_rows(model, cache, N + 1, start=start)
    out = forward(model, cache, rows, torch.cat((resume.hidden, hidden)), slice(E, None))
    model.logits(out.hidden, logits)
    return rows.positions


def _resumed(
    model: Model, cache: KVCache, draft: Draft, resume: Resume, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Of a self-drafted chain: its own layers on the last row, which they have not seen, the others on all rows."""
    N, E = len(draft), resume.layer
    below = tuple(n for n in taps if n < E)
    last = forward(
        model, cache, chain_rows(model, cache, 1, first=N), model.embed_tokens(draft.tokens[-1:]), slice(E), below
    )
    hidden = torch.cat((resume.hidden, last.hidden))
    rows = chain_rows(model, cache, N + 1)
    out = forward(model, cache, rows, hidden, slice(E, None), tuple(n for n in taps if n >= E))
    tapped = {n: torch.cat((resume.taps[n], last.taps[n])) if n < E else out.taps[n] for n in taps}
    return model.logits(out.hidden), rows.positions, tapped
