"""Begin a forward pass: place its rows and look up their embeddings. That is one launch if the device places them."""

import torch
from torch import Tensor

from specker.kernels.round.place_rows import Window
from specker.kernels.round.start_rows import start_rows
from specker.model.cache import KVCache, Lengths, Rows
from specker.model.decoder import Model


def begin(
    model: Model,
    cache: KVCache,
    lengths: Lengths,
    back: int,
    first: int,
    tokens: Tensor,
    parents: Tensor | None = None,
    *,
    positions: Tensor | None = None,
) -> tuple[Rows, Tensor]:
    """Place rows first, first + 1, .. of each sequence's window, as `KVCache.place` does, one for each of its tokens
    [n, count] int64. Returns the rows and their embeddings [n * count, E]. `positions` [n * count] int64: memory for
    the positions, used if the device places the rows."""
    count = tokens.shape[1]
    if not isinstance(lengths, Tensor):
        return cache.place(lengths, back, first, count, parents), model.embed_tokens(tokens.reshape(-1))
    return _started(model, cache, cache.window(lengths, back, first, count, parents), tokens, positions=positions)


def begin_text(model: Model, cache: KVCache, texts: Tensor, lengths: Tensor, count: int) -> tuple[Rows, Tensor]:
    """`begin` for the last `count` tokens of each of the texts [n, C] int64 with `lengths` [n] int64."""
    return _started(model, cache, cache.window(lengths, count, 0, count), texts, text=True)


def begin_step(model: Model, cache: KVCache, window: Tensor, lengths: Tensor, step: Tensor) -> tuple[Rows, Tensor]:
    """`begin` for token number `step` [1] int64 of each window [n, R] int64, whose token 0 is the root. It places the
    next row of a draft whose length only the device knows."""
    return _started(model, cache, cache.window(lengths, 1, 0, 1), window, ahead=step)


def _started(
    model: Model,
    cache: KVCache,
    window: Window,
    tokens: Tensor,
    text: bool = False,
    positions: Tensor | None = None,
    ahead: Tensor | None = None,
) -> tuple[Rows, Tensor]:
    plain = isinstance(model.embed, Tensor) and model.ple is None
    embed: Tensor = model.embed  # type: ignore[assignment]
    if not plain:
        embed = torch.arange(len(embed), dtype=torch.int64, device=cache.device).unsqueeze(1)
    hidden, positions, slots, kv_len, words = start_rows(embed, tokens, text, window, positions, ahead=ahead)
    if not plain:  # `hidden` holds the ids
        hidden = model.embed_tokens(hidden[:, 0])
    else:
        hidden = model.scaled(hidden)
    return cache.rows_of(window, positions, slots, kv_len, words), hidden
