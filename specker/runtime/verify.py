"""One target forward over the root and the draft: the target's logits after each of them."""

import torch
from torch import Tensor

from specker.kernels.tree_attention import ancestor_words
from specker.runtime.cache import KVCache
from specker.runtime.draft import Draft
from specker.runtime.model import Model, Rows, chain_rows, forward


def verify(model: Model, cache: KVCache, root: int, draft: Draft) -> tuple[Tensor, Tensor]:
    """-> logits [N + 1, V] (row 0 follows the root) and the rows' absolute positions [N + 1] int64.

    Row r's K/V stands at column exact_len + r until the cache commits a path.
    """
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
    hidden = forward(model, cache, rows, model.embed_tokens(tokens)).hidden
    return model.logits(hidden), rows.positions
