"""The decoder, one file for every architecture of checkpoint.py: embedding, layers, and hidden rows at chosen depths.

Few rows (a decoding step, a verify pass, a tree level) go through the ops; a long run of prompt tokens (`prefill`)
goes through torch's linear and SDPA in fixed chunks, the same ones whatever the strategy.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from specker.kernels.attention import gather_pages, tree_attention
from specker.kernels.kv import kv_calibrate, rope_table
from specker.kernels.linear import pack, row_linear
from specker.kernels.merge import add_norm
from specker.runtime.dist import Ranks
from specker.runtime.model.cache import KVCache, Rows, Start
from specker.runtime.model.checkpoint import Checkpoint, Layers, Weights
from specker.runtime.sampling import Draws

PREFILL_CHUNK = 512
_TIED_PACK_MAX = 1 << 24  # elements; a packed head is a second copy where the embedding is the same matrix


class LayerWeights(NamedTuple):
    """One layer's slices of `Weights`; linear weights are packed for the device."""

    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [1, D]
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    norm_in: Tensor  # [E]
    norm_post: Tensor


class Output(NamedTuple):
    hidden: Tensor  # [T, E], the residual stream after the last layer run, before the final norm
    taps: dict[int, Tensor]  # n -> the residual stream after n layers


class Model:
    """Weights ready to run, the RoPE table, and one-position index tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        packed: bool = True,
        pack_head: bool = True,
        linear: Callable[..., Tensor] = row_linear,
        ranks: Ranks | None = None,
    ):
        """Consumes the checkpoint's layer weights where they are repacked (see `_layers`), which `packed` allows.
        `linear` multiplies by the weights of the layers and the head; it is called as `row_linear` is. `ranks` hold
        the other parts of a model that is split."""
        config, weights = checkpoint.local, checkpoint.weights
        self.config, self.linear, self.ranks = config, linear, ranks
        self.embed, self.norm = weights.embed, weights.norm
        self.layers = _layers(weights, config.num_layers, packed)
        head = checkpoint.own_head
        tied = head is weights.embed and head.numel() > _TIED_PACK_MAX
        self.head = pack(head) if pack_head and not tied else head
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self.rope = rope_table(weights.inv_freq.to(self.device), weights.rope_scale, config.max_context, self.dtype)
        self.positions = torch.arange(config.max_context, device=self.device)
        self.scale = config.head_dim**-0.5

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[T] int64 -> [T, E]."""
        return torch.embedding(self.embed, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream [T, E] -> logits [T, V], float32 (float64 for float64). Of a split model the part's
        columns alone."""
        _, normed = add_norm(hidden, None, self.norm, self.config.rms_norm_eps)
        logits = self.linear(normed, self.head)
        return logits if logits.dtype == torch.float64 else logits.float()

    def draw(self, draws: Draws, logits: Tensor, positions: Tensor) -> Tensor:
        """The token after each row of `logits`, [T]."""
        if self.ranks is None:
            return draws.tokens(logits, positions)
        return self.ranks.draw(draws, logits, positions, self.config.vocab_size)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """[T, V], of all parts."""
        return logits if self.ranks is None else self.ranks.whole(logits, self.config.vocab_size)

    def summed(self, x: Tensor) -> Tensor:
        """What a linear split by its inputs gives: the sum over the parts."""
        return x if self.ranks is None else self.ranks.sum(x)


def forward(
    model: Model,
    cache: KVCache,
    rows: Rows,
    hidden: Tensor,
    layers: slice = slice(None),
    taps: tuple[int, ...] = (),
) -> Output:
    """Run `layers` over T rows whose residual stream entering the first of them is `hidden` [T, E] (the embedding
    when that is layer 0). Writes the rows' K/V in those layers. `taps`: depths n at which to keep the stream."""
    eps = model.config.rms_norm_eps
    span = range(*layers.indices(len(model.layers)))
    kept: dict[int, Tensor] = {}
    T = hidden.shape[0]
    cu_rows = sequence_bounds(T, model.device)
    delta = None  # what the last layer's feed-forward adds
    for n in span:
        w, (k, v) = model.layers[n], cache.layers[n]
        hidden, normed = add_norm(hidden, delta, w.norm_in, eps)
        if n in taps:
            kept[n] = hidden
        qkv = model.linear(normed, w.qkv, w.qkv_bias)
        q = kv_calibrate(qkv, rows.positions, rows.slots, model.rope, k, v, w.q_norm, w.k_norm, eps)
        mixed, _ = tree_attention(
            q, k, v, cache.table, rows.kv_len, rows.window, cu_rows, rows.ancestors, model.scale, with_lse=False
        )
        delta = model.summed(model.linear(mixed.reshape(T, -1), w.o, w.o_bias))
        hidden, normed = add_norm(hidden, delta, w.norm_post, eps)
        up = model.linear(normed, w.gate_up, w.gate_up_bias, epilogue="silu_mul")
        delta = model.summed(model.linear(up, w.down, w.down_bias))
    if delta is not None:
        hidden = hidden + delta
    if span.stop in taps:
        kept[span.stop] = hidden
    return Output(hidden, kept)


def chain_rows(model: Model, cache: KVCache, count: int, first: int = 0, start: Start | None = None) -> Rows:
    """Rows for `count` tokens one after another, each seeing all before it: rows first.. of the window that begins at
    column exact_len, or at `start`. Their positions are their columns."""
    if start is not None:
        return cache.place(start, first, count, None, model.config.max_context - 1)
    column = cache.exact_len + first
    return Rows(model.positions[column : column + count], *cache.chain_rows(count, first))


@torch.inference_mode()
def prefill(
    model: Model,
    cache: KVCache,
    tokens: list[int],
    taps: tuple[int, ...] = (),
    last: int = 0,
    chunk: int = PREFILL_CHUNK,
) -> dict[int, Tensor]:
    """Forward `tokens` after the cache's exact columns and make them exact, in chunks. A causal
    model's rows see what stands before them; a bidirectional one's see their whole chunk and all before it.
    Returns the residual stream at the depths `taps` of the last rows, at most `last`, of the last chunk alone."""
    kept: dict[int, Tensor] = {}
    while tokens:
        now, tokens = tokens[:chunk], tokens[chunk:]
        kept = _prefill_chunk(model, cache, torch.tensor(now, device=model.device), () if tokens else taps, last)
    return kept


def _prefill_chunk(model: Model, cache: KVCache, tokens: Tensor, taps: tuple[int, ...], last: int) -> dict[int, Tensor]:
    kept: dict[int, Tensor] = {}
    eps, T, start = model.config.rms_norm_eps, len(tokens), cache.exact_len
    end = start + T
    slots, positions = cache.slot_of[start:end], model.positions[start:end]
    mask = None
    if model.config.causal and start > 0:
        mask = after(T, end, model.device)
    h = model.embed_tokens(tokens)
    for n, (w, (k, v)) in enumerate(zip(model.layers, cache.layers, strict=True), 1):
        normed = F.rms_norm(h, h.shape[-1:], w.norm_in, eps)
        q = kv_calibrate(
            model.linear(normed, w.qkv, w.qkv_bias), positions, slots, model.rope, k, v, w.q_norm, w.k_norm, eps
        )
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            gather_pages(k, cache.block_table[0], end).transpose(0, 1).unsqueeze(0),
            gather_pages(v, cache.block_table[0], end).transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=model.config.causal and mask is None,
            scale=model.scale,
            enable_gqa=True,
        )
        h = h + model.summed(model.linear(mixed[0].transpose(0, 1).reshape(T, -1), w.o, w.o_bias))
        normed = F.rms_norm(h, h.shape[-1:], w.norm_post, eps)
        up = model.linear(normed, w.gate_up, w.gate_up_bias, epilogue="silu_mul")
        h = h + model.summed(model.linear(up, w.down, w.down_bias))
        if n in taps:
            kept[n] = h[-last:]
    cache.exact_len = end
    return kept


def after(rows: int, end: int, device: torch.device) -> Tensor:
    """Which of `end` columns each of the last `rows` sees: itself and all before it. On a GPU it is torch's own bias,
    which its flash attention knows; it takes no mask of numbers, and what does holds all scores in float32."""
    if device.type == "cuda":
        return causal_lower_right(rows, end)
    return torch.ones(rows, end, dtype=torch.bool, device=device).tril(end - rows)


@cache
def sequence_bounds(rows: int, device: torch.device, sequences: int = 1) -> Tensor:
    """Where each of so many sequences of as many rows begins and ends, [sequences + 1] int32. Graphs hold its address:
    it is never let go, and made from the host, which a graph that is being captured would refuse."""
    return torch.tensor([rows * i for i in range(sequences + 1)], dtype=torch.int32, device=device)


def _layers(weights: Weights, count: int, packed: bool) -> list[LayerWeights]:
    """Each layer's weights; the linear ones are packed one at a time, in place of what `weights` held."""
    for stack in (weights.qkv, weights.o, weights.gate_up, weights.down):
        if packed and isinstance(stack, list):
            stack[:] = [pack(stack.pop(0)) for _ in range(len(stack))]

    def at(stack: Layers | None, n: int) -> Tensor | None:
        return None if stack is None else stack[n]

    def row(stack: Layers | None, n: int) -> Tensor | None:
        return None if stack is None else stack[n].unsqueeze(0)

    return [
        LayerWeights(
            qkv=weights.qkv[n],
            qkv_bias=at(weights.qkv_bias, n),
            q_norm=row(weights.q_norm, n),
            k_norm=row(weights.k_norm, n),
            o=weights.o[n],
            o_bias=at(weights.o_bias, n),
            gate_up=weights.gate_up[n],
            gate_up_bias=at(weights.gate_up_bias, n),
            down=weights.down[n],
            down_bias=at(weights.down_bias, n),
            norm_in=weights.norm_in[n],
            norm_post=weights.norm_post[n],
        )
        for n in range(count)
    ]
