"""Prefill: forward a prompt in long chunks and append its K/V to a sequence.

A chunk runs `run_layers` (decoder.py) with torch's attention instead of tree_attention. Its rows see the sequence's
earlier columns and one another causally, in layers with a sliding window only the last of these. A long chunk runs in
slices of the layers, between which other requests' rounds may run.

On a GPU this is flash attention, called by name (`flash`). SDPA would choose: on sm_90 and later cuDNN first, which
plans every new length of a prompt for 20 ms and more, and with a mask for grouped heads a form that writes all scores.
What flash attention does not serve (float32, wide heads, capped scores) attends by tree_attention, some rows at a time.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.tree_attention import attend
from specker.kernels.variant import reset_counters, sum_dtype
from specker.layer_weights import LayerWeights
from specker.model.cache import KVCache, Rows, sequence_bounds
from specker.model.chunks import Chunks, slices
from specker.model.config import ModelConfig
from specker.model.decoder import GroupRows, Model, Output, compiled, over_pages, run_layers
from specker.model.kv_formats import keys, widened
from specker.model.recurrent import Paths, cached_rows
from specker.model.rings import WindowRings

COMPILED_CHUNK = 256  # rows on a CPU with compiled layers: their activations stay in the caches
FLASH_DIM = 256  # most dimensions of a head that flash attention serves
PAGED_ROWS = 64  # rows that attend at once by tree_attention: its partial results are in memory
CAPPED_ROWS = 128  # rows that attend at once where scores have a soft cap: all their scores are in memory
DENSE_ROWS = 256  # on a GPU, a chunk with more rows uses cuBLAS, which is faster there but not batch-invariant


@torch.inference_mode()
def prefill(
    model: Model,
    cache: KVCache,
    tokens: list[int],
    aux_layers: tuple[int, ...] = (),
    last: int = 0,
    chunk: int | None = None,
    slot: int = 0,
) -> dict[int, Tensor]:
    """Forward `tokens` in chunks and append them to the exact columns of the sequence in `slot`. Rows of a causal model
    see earlier columns; rows of a bidirectional model also see their whole chunk. Returns, for each depth in
    `aux_layers`, the residual stream [last, E] of the last `last` rows. `chunk`: default as in `Chunks`."""
    kept: list[dict[int, Tensor]] = []
    chunks, most = Chunks.of(model.config), most_rows(model, cache)
    while tokens:
        count = min(chunk or chunks.rows(cache.exact_len[slot]), most)
        now, tokens = tokens[:count], tokens[count:]
        rows = max(0, last - len(tokens))  # of this chunk
        *_, out = prefill_chunk(model, cache, Part(slot, now), aux_layers if rows else ())
        kept += [{n: x[-rows:] for n, x in out.items()}] if rows else []
    return kept[0] if len(kept) == 1 else {n: torch.cat([out[n] for out in kept]) for n in aux_layers if kept}


class Part(NamedTuple):
    """Rows of a prompt that a pass forwards: a sequence's columns after its exact ones."""

    slot: int
    tokens: list[int]  # at least one


@torch.inference_mode()
def prefill_parts(
    model: Model,
    cache: KVCache,
    parts: Sequence[Part],
    aux_layers: tuple[int, ...] = (),
    beside: tuple[Rows, Tensor] | None = None,
) -> tuple[Output, list[dict[int, Tensor]]]:
    """Forward parts of the prompts of several sequences in one pass of the compiled CPU layers, whose rows have the
    same bits in any company, and append them to the sequences' exact columns. A part has at most `most_rows`.
    `beside`: rows of other sequences that join the pass, chains, and their input [T, E]. Returns these rows' output,
    and of each part its residual stream [rows, E] at the depths `aux_layers`. The pass has at most
    `Stack.most` rows."""
    spans = [(slot, cache.exact_len[slot], cache.exact_len[slot] + len(tokens)) for slot, tokens in parts]
    rows = cache.chains(spans)
    tokens = [token for part in parts for token in part.tokens]
    hidden = model.embed_tokens(torch.tensor(tokens, dtype=torch.int64, device="cpu"))
    first = 0 if beside is None else len(beside[1])
    if beside is not None:
        rows, hidden = beside[0].beside(rows), torch.cat((beside[1], hidden))
    out = compiled(model, cache, rows, hidden, range(len(model.layers) + 1), aux_layers)
    for slot, _, end in spans:
        cache.exact_len[slot] = end
    sizes = [first, *(len(part.tokens) for part in parts)]
    own, *rest = zip(*(x.split(sizes) for x in (out.hidden, *out.aux_hidden_states.values())), strict=True)
    each = [dict(zip(out.aux_hidden_states, part[1:], strict=True)) for part in rest]
    return Output(own[0], dict(zip(out.aux_hidden_states, own[1:], strict=True))), each


def most_rows(model: Model, cache: KVCache) -> int:
    """The most rows of one sequence that a pass of a prefill has."""
    most = COMPILED_CHUNK if prompt_chunks(model) is None else 1 << 30
    if isinstance(cache.rings, WindowRings) or (cache.rings is not None and model.stack is not None):
        most = min(most, cache.rings.ahead)
    return most


def prompt_chunks(model: Model) -> Chunks | None:
    """The chunks in which a text's columns have the same bits in every request. None: rows have the same bits in chunks
    of up to COMPILED_CHUNK rows, and in rounds."""
    compiled = model.stack is not None and model.stack.most >= COMPILED_CHUNK and model.config.causal
    return None if compiled else Chunks.of(model.config)


@torch.inference_mode()
def prefill_chunk(
    model: Model, cache: KVCache, part: Part, aux_layers: tuple[int, ...] = ()
) -> Iterator[dict[int, Tensor]]:
    """Forward a chunk of at most `most_rows` and append it to the sequence's exact columns. Yields after each slice of
    the layers: the residual streams [rows, E] at the depths in `aux_layers` that it has reached. The columns are exact
    after the last one."""
    reset_counters(model.device)
    slot, tokens = part.slot, torch.tensor(part.tokens, dtype=torch.int64, device=model.device)
    T, start = len(tokens), cache.exact_len[slot]
    end, windows = start + T, set(model.config.layer.sliding_windows) - {0}
    causal, hidden = model.config.causal, model.embed_tokens(tokens)
    flashes = runs_flash(model, hidden)
    if model.stack is not None and model.stack.most >= T:
        kept = _compiled_chunk(model, cache, slot, hidden, start, aux_layers)
        cache.exact_len[slot] = end
        yield kept
        return
    # the columns that a layer sees, by its sliding window (0: none)
    spans: dict[int, slice | Tensor] = dict.fromkeys((0, *windows), cache.span(end, slot))
    if isinstance(cache.rings, WindowRings):
        spans |= {w: cache.rings.slots[cache.slots(slot, max(0, start - w + 1), end)] for w in windows}
    later, cap = causal and start > 0, model.config.layer.cap
    paged: list[Rows] = []
    if causal and attends_pages(hidden) and not (flashes and model.config.widest <= FLASH_DIM):
        columns = -(-end // cache.page_size)
        for first in range(start, end, PAGED_ROWS):
            rows = cache.after([first], [min(PAGED_ROWS, end - first)], slot=slot)
            paged.append(rows._replace(table=rows.table[:, :columns]))
    bands = {w: band(T, end, w, model.device) for w in windows if w < end and not flashes and not paged}

    def attended(q: Tensor, k: Tensor, v: Tensor, sliding_window: int, w: LayerWeights) -> Tensor:
        if paged and not (flashes and q.shape[-1] <= FLASH_DIM):
            parts = zip(paged, q.split(PAGED_ROWS), strict=True)
            return torch.cat([over_pages(model, rows)(own, k, v, sliding_window, w) for rows, own in parts])
        k, v = (x.flatten(0, 1)[spans[sliding_window]] for x in (k, v))
        k, v = keys(k, q.dtype), widened(v, q.dtype)
        if cap:
            return attend_capped(q, k, v, causal, sliding_window, model.scale, cap)
        if flashes and q.shape[-1] <= FLASH_DIM:
            return flash(q, k, v, causal, sliding_window, model.scale, w.sinks)
        if w.sinks is not None:
            return attend_with_sinks(q, k, v, sliding_window, model.scale, w.sinks)
        k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
        if (seen := bands.get(sliding_window)) is not None:
            k, v = (x[:, :, -seen.shape[1] :] for x in (k, v))
        elif later:
            return attend_split(q, k, v, start, model.scale)
        return F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=seen,
            is_causal=causal and seen is None,
            scale=model.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)

    slots, own = cache.slots(slot, start, end), slice(slot, slot + 1)
    positions, ring_rows = model.positions[start:end], cache.ring_rows(slots, own)
    batch = GroupRows(positions, slots, attended, model.joined, ring_rows)
    if ring_rows is not None and ring_rows.states is not None:
        paths = Paths(
            positions,
            ring_rows.slots,
            ring_rows.table,
            ring_rows.states,
            kv_len=cache.lengths[end : end + 1],
            window=cache.lengths[:1],
            cu_rows=sequence_bounds(T, cache.device),
            ancestors=None,
        )
        batch = batch._replace(paths=paths)
    kept, layers = {}, len(model.layers)
    count = min(slices(T), max(1, layers))
    for first, after in pairwise(layers * i // count for i in range(count + 1)):
        steps = zip(model.layers[first:after], cache.layers[first:after], repeat(batch), strict=False)
        out = run_layers(model, steps, hidden, first, aux_layers, dense=hidden.is_cuda and T > DENSE_ROWS)
        kept |= out.aux_hidden_states
        if after < layers:
            hidden = model.entering(out.hidden, tokens)
        else:
            cache.exact_len[slot] = end
        yield kept


def _compiled_chunk(
    model: Model, cache: KVCache, slot: int, hidden: Tensor, start: int, aux_layers: tuple[int, ...]
) -> dict[int, Tensor]:
    """A chunk of a prompt by the compiled CPU kernels: the residual stream [T, E] at the depths `aux_layers`."""
    assert model.stack is not None
    T, own = len(hidden), slice(slot, slot + 1)
    end, slots = cache.lengths[start + T : start + T + 1], cache.slots(slot, start, start + T)
    rows = Rows(
        model.positions[start : start + T],
        slots,
        end,
        end,
        slots.new_empty(T, 0),
        sequence_bounds(T, cache.device),
        cache.block_table[own],
        ring_rows=cache.ring_rows(slots, own, whole=True),
    )
    layers = range(len(model.layers) + 1)
    out, _ = model.stack.run(hidden, cached_rows(cache, rows, full=not model.config.causal), layers, aux_layers)
    return dict(zip(aux_layers, out[1:].unbind(0), strict=True))


def attends_pages(hidden: Tensor) -> bool:
    """Whether layers that flash attention does not serve attend by tree_attention."""
    return hidden.is_cuda


def attend_split(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of the last rows of a text on a CPU: all rows see the columns before `start`, then one another
    causally. q [T, Hq, D]; k, v [1, Hkv, start + T, D] -> [T, Hq, D]. The parts are merged by their log-sum-exps. This
    way torch skips the columns that a row does not see; with a dense mask it would compute them."""
    T, heads, D = q.shape
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q = q.transpose(0, 1)
    ahead = q.reshape(1, k.shape[1], -1, D)  # query heads of a KV head as rows of one head: no mask is needed
    before, total = attention(ahead, k[:, :, :start], v[:, :, :start], scale=scale)
    before, total = before.reshape(heads, T, D), total.reshape(heads, T)
    group = heads // k.shape[1]
    k, v = (x[:, :, start:].repeat_interleave(group, 1) for x in (k, v))
    own, sums = attention(q.unsqueeze(0), k, v, is_causal=True, scale=scale)
    weight = torch.sigmoid(total - sums.view(heads, T)).unsqueeze(-1)
    return torch.lerp(own[0], before, weight).transpose(0, 1)


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, sliding_window: int, scale: float, cap: float
) -> Tensor:
    """`flash` with a soft cap of the scores, which torch's attention lacks; on a CPU, for some rows at a time."""
    outs, S = [], len(k)
    for i in range(0, len(q), CAPPED_ROWS):
        rows = q[i : i + CAPPED_ROWS]
        last = S - len(q) + i + len(rows) if causal else S  # columns from here on are not seen
        first = max(0, last - len(rows) - sliding_window + 1) if sliding_window else 0
        row = torch.arange(last - len(rows), last, dtype=torch.int64, device=q.device)[:, None]
        column = torch.arange(first, last, dtype=torch.int64, device=q.device)
        hidden = (column > row) & causal
        if sliding_window:
            hidden |= column <= row - sliding_window
        mask = torch.zeros(hidden.shape, dtype=sum_dtype(q.dtype), device=q.device).masked_fill_(hidden, -math.inf)
        outs.append(attend(rows, k[first:last], v[first:last], mask, scale, cap)[0])
    return torch.cat(outs)


def serves_flash(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether `flash` serves a model's layers, on a GPU; of unlike heads, those up to FLASH_DIM."""
    half = dtype in (torch.float16, torch.bfloat16) and not config.layer.cap
    return half and config.head_dim % 8 == 0 and config.head_dim <= FLASH_DIM


def runs_flash(model: Model, hidden: Tensor) -> bool:
    """Whether a chunk's rows attend by `flash`."""
    return hidden.is_cuda and serves_flash(model.config, model.dtype)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    sliding_window: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last rows of a text on a GPU: q [T, Hq, D]; k, v [S, Hkv, D] -> [T, Hq, D]. With `causal`, row t
    sees the columns up to S - T + t, of which with a sliding window only the last so many. `sinks` [1, Hq]."""
    past = sliding_window - 1 if sliding_window else -1
    rows, columns = len(q), len(k)
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    how: dict[str, Any] = {"scale": scale, "window_size_left": past, "window_size_right": 0 if causal else -1}
    out, total, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, rows, columns, 0.0, causal, False, **how
    )
    if sinks is None:
        return out[0]  # type: ignore[no-any-return]
    share = torch.sigmoid(total[0] - sinks.float().T)  # of the columns in the softmax, [Hq, T]
    return (out[0] * share.T.unsqueeze(-1)).to(q.dtype)


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sliding_window: int, scale: float, sinks: Tensor) -> Tensor:
    """Causal attention of the last rows of a text, with a sink [1, Hq] of each query head in the softmax: q [T, Hq, D];
    k, v [S, Hkv, D] -> [T, Hq, D]. With a sliding window, row t sees only the last so many columns."""
    T, S, group = len(q), len(k), q.shape[1] // k.shape[1]
    seen = band(T, S, sliding_window or S, q.device)
    k, v = (x[-seen.shape[1] :] for x in (k, v))
    wide, out = torch.promote_types(q.dtype, torch.float32), torch.empty_like(q)
    for h in range(k.shape[1]):  # one KV head at a time, because all scores at once could take much memory
        own = slice(h * group, (h + 1) * group)
        scores = torch.einsum("tgd,sd->gts", q[:, own].to(wide), k[:, h].to(wide)) * scale
        scores.masked_fill_(~seen, -torch.inf)
        sink = sinks[0, own].to(wide)[:, None, None].expand(-1, T, 1)
        shares = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        out[:, own] = torch.einsum("gts,sd->tgd", shares, v[:, h].to(wide)).to(q.dtype)
    return out


def band(rows: int, end: int, sliding_window: int, device: torch.device) -> Tensor:
    """The mask [rows, S] bool of the last `rows` rows of a prompt of `end` tokens: each row sees the last
    `sliding_window` columns up to its own. The S columns leave out the first ones, which no row sees."""
    row = torch.arange(end - rows, end, dtype=torch.int64, device=device)[:, None]
    column = torch.arange(max(0, end - rows - sliding_window + 1), end, dtype=torch.int64, device=device)
    return (column <= row) & (column > row - sliding_window)
