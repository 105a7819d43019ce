"""A layer that mixes columns by a recurrent state: a gated delta net or a gated short convolution (config.Mixer)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specker.cpu import CachedRows, Records
from specker.kernels.conv_rows import conv_rows
from specker.kernels.delta_rows import BLOCK, delta_rows
from specker.layer_weights import LayerWeights
from specker.model.cache import KVCache, Rows, sequence_bounds
from specker.model.config import DeltaNet, Mixer
from specker.model.states import AHEAD, Memory


class Paths(NamedTuple):
    """T rows of n sequences, and the columns that each reads along its path; see `delta_rows`."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, rows of the records
    table: Tensor  # [n, P] int32, pages of the records
    states: Tensor  # [n] int64, each sequence's states
    kv_len: Tensor  # [n] int32
    window: Tensor  # [n] int32
    cu_rows: Tensor  # [n + 1] int32
    ancestors: Tensor | None  # [T, W] int64; None: a chain after all columns before it


def paths(rows: Rows) -> Paths | None:
    """The paths of rows; None if the model has no recurrent states."""
    ring = rows.ring_rows
    if ring is None or ring.states is None:
        return None
    return Paths(
        rows.positions, ring.slots, ring.table, ring.states, rows.kv_len, rows.window, rows.cu_rows, rows.ancestors
    )


def cached_rows(cache: KVCache, rows: Rows, full: bool = False) -> CachedRows:
    """The rows for the compiled CPU layers. `full`: without words, a row sees all of its sequence."""
    in_rings, records, ring = None, None, rows.ring_rows
    if ring is not None and ring.states is not None and cache.memory is not None:
        records = Records(*cache.memory, ring.slots, ring.table, ring.states)
    elif ring is not None:
        in_rings = ring.slots, ring.table
    words = rows.ancestors if rows.ancestors.shape[1] else None
    return CachedRows(
        cache.kv,
        rows.positions,
        rows.slots,
        rows.cu_rows,
        rows.kv_len,
        rows.window,
        words,
        rows.table,
        full,
        in_rings,
        records,
    )


def mix(
    mixer: Mixer, w: LayerWeights, memory: Memory, x: Tensor, rows: Paths, linear: Callable[..., Tensor], eps: float
) -> Tensor:
    """The inputs of the out-projection [T, values] for the layer's inputs x [T, E]. Writes the rows' records, and moves
    the layer's states on.

        q, k, v = silu(conv(qkv x)),  z, b, a = z x, b x, a x;  norm(delta_rule(q, k, v, a, b)) * silu(z)
        b, c, h = qkv x;  c * conv(b * h)                                                        (short convolution)
    """
    projected, gates = linear(x, w.qkv), None if w.gates is None else linear(x, w.gates)
    if rows.ancestors is not None or len(x) <= AHEAD:
        return _mixed(mixer, w, memory, projected, gates, rows, eps)
    # A ring holds so many rows of a prompt's chunk.
    out = []
    for start in range(0, len(x), AHEAD):
        at = slice(start, min(start + AHEAD, len(x)))
        bounds = sequence_bounds(at.stop - start, x.device)
        part = rows._replace(positions=rows.positions[at], slots=rows.slots[at], cu_rows=bounds)
        part = part._replace(kv_len=rows.kv_len - (len(x) - at.stop))
        out.append(_mixed(mixer, w, memory, projected[at], None if gates is None else gates[at], part, eps))
    return torch.cat(out)


def _mixed(
    mixer: Mixer, w: LayerWeights, memory: Memory, projected: Tensor, gates: Tensor | None, rows: Paths, eps: float
) -> Tensor:
    """`mix`, after the projections."""
    assert w.conv is not None
    convolved = partial(
        conv_rows,
        weight=w.conv,
        bias=None,
        inputs=memory.inputs,
        slots=rows.slots,
        block_table=rows.table,
        kv_len=rows.kv_len,
        window=rows.window,
        cu_rows=rows.cu_rows,
        ancestors=rows.ancestors,
    )
    if not isinstance(mixer, DeltaNet):
        before, after, inner = projected.chunk(3, -1)
        return convolved(inner, activation="none", before=before, after=after)
    C, keys = mixer.channels, mixer.key_heads * mixer.key_dim
    mixed = convolved(projected[:, :C])
    q, k, v = mixed.split([keys, keys, mixer.values], -1)
    q, k = (part.unflatten(1, (-1, mixer.key_dim)) for part in (q, k))
    v, z = (part.unflatten(1, (-1, mixer.value_dim)) for part in (v, projected[:, C : C + mixer.values]))
    b, a = (projected[:, C + mixer.values :] if gates is None else gates).chunk(2, -1)
    assert w.a_log is not None and w.dt_bias is not None
    _, k_records, u_records, g_records, states, anchors = memory
    assert k_records is not None and u_records is not None and g_records is not None
    assert states is not None and anchors is not None
    out = delta_rows(
        q,
        k,
        v,
        a,
        b,
        w.a_log,
        w.dt_bias,
        states,
        rows.states,
        anchors,
        k_records,
        u_records,
        g_records,
        rows.positions,
        rows.slots,
        rows.table,
        rows.kv_len,
        rows.window,
        rows.cu_rows,
        rows.ancestors,
        BLOCK,
        z,
        w.norm_mix,
        eps,
    )
    if mixer.tiled:
        out = out.unflatten(1, (mixer.key_heads, -1)).transpose(1, 2)
    return out.flatten(1)
