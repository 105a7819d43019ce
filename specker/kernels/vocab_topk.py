"""vocab_topk: LM head over the kept vocabulary rows: the k best tokens of each row and the log-sum-exp of all.

The kernel does not write the full logits to memory. The products are row_linear's (K in order for any T), and the
selection runs row by row in tiles of the weight that do not depend on T. A second kernel merges the tiles' candidates.
For k = 1 without lse there is one launch: the last program of a tile of rows takes the largest of each row's
candidates, one per tile of the weight. A norm is residual_merge's kernel, launched first. Otherwise every program would
need the row's scale before its first product, or would round x * weight unscaled, which can overflow float16.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.noise import (
    MIN_TEMPERATURE,
    add_gumbel_,
    check_draw,
    check_seed,
    drawn,
    gumbel_of,
    signed,
    unpack_draw,
)
from specker.kernels.quant import Format, Matrix, arguments_of, constexprs_of, format_of, streams, types_of
from specker.kernels.registry import register, takes, write
from specker.kernels.residual_merge import launch as _norm
from specker.kernels.row_linear import row_linear
from specker.kernels.sample_rows import first_argmax
from specker.kernels.stream import stream_rows
from specker.kernels.tiles import COMMON, FEW, Product, few_rows, like, stages_of, weight_left, wide_rows
from specker.kernels.tiles import tiles as product_tiles
from specker.kernels.variant import (
    AMD,
    SMS,
    TYPES,
    Variant,
    arch,
    check_within,
    counters,
    is_last,
    let_next_start,
    same_device,
    sms,
    start_after_previous,
    sum_dtype,
    tl,
    triton,
    wait_for_previous,
)

MAX_K = 64

Norm = tuple[Tensor, float]  # weight [E], eps


class Noise(NamedTuple):
    seed: int
    positions: Tensor  # [T] int64
    temperature: float
    # [4] or [B, 4] from noise.pack_draw: seed and temperature are read from it, and `temperature` above only enables
    # noise. Rows come in B equal runs, one per sequence; a temperature of 0 in memory is greedy, without noise.
    draw: Tensor | None = None


Noisy = Noise | tuple[int, Tensor, float]


def noise_of(noise: Noisy | None) -> tuple[int, Tensor | None, float, Tensor | None]:
    """seed, positions, temperature and draw; without noise the positions are None and the temperature is 0."""
    if noise is None:
        return 0, None, 0.0, None
    return noise if isinstance(noise, Noise) else Noise(*noise)


def vocab_topk(
    hidden: Tensor,
    weight: Matrix,
    token_ids: Tensor | None,
    k: int,
    norm: Norm | None = None,
    noise: Noisy | None = None,
    with_lse: bool = True,
    *,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LM head over kept vocabulary rows: each row's k best tokens and the log-sum-exp of all, without logits in memory.

    Kept row c holds token id(c) = token_ids[c], or c without token_ids. For row t:

        h      = hidden[t], or with `norm` hidden[t] * rsqrt(mean(hidden[t]^2) + eps) * norm weight
        z[c]   = h . weight[c]                                              without noise, or at temperature 0
        z[c]   = h . weight[c] / temperature + g(seed, positions[t], id(c)) with noise
        logits = the k largest z, descending, ties to the lower id(c)
        ids    = their id(c)
        lse    = log(sum_c exp(z[c]))

    exp(logits - lse) is a confidence over the kept rows, in the ranking that chose the ids. A trimmed head uses the
    whole head's noise g (kernels/noise.py), and the order of its rows does not matter. The op is batch-invariant: a
    row's bits depend on that row, weight, ids, k and the architecture alone. Memory moves the weight once. The kernel
    takes any number of rows and ids below 2^32; float64 runs in plain torch.

    Sums are in float32 and are not rounded, except that on a CPU a bfloat16 weight serves float32 rows, with the
    rounding of `row_linear`. So with k = 1, without a norm and token_ids, ids are the tokens that `sample_rows` without
    filters draws from `row_linear(hidden, weight, epilogue="float32")`, at any temperature. On a GPU this holds bit for
    bit where `draws_alike`. Without lse that is one launch, and no logits in memory.

    Args:
        hidden: [T, E].
        weight: [K, E] of hidden's dtype, or a `Quantized` matrix; on a CPU also bfloat16 beside float32.
        token_ids: [K] distinct ids, int32 or int64; None: 0..K-1.
        k: 1 to min(64, K).
        norm: (weight [E] of any floating dtype, eps) of an RMSNorm before the product.
        noise: (seed, positions [T] int64, temperature 0 or >= 1e-6), or a `Noise`, whose `draw` holds seed and
            temperature in memory.
        with_lse: False returns an empty lse [0]. On a CPU the sum costs as much as the search.
        out: [T, k] int64, any view; the ids are written there, and it is the first result. Or a pair of it and of
            contiguous memory for the logits, which is then the second result.

    Returns:
        ids [T, k] int64 in the full vocabulary, logits [T, k] and lse [T], float32 (float64 for float64).

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes, devices or ranges.

    Source: the trimmed head is VocabTrim's, arXiv 2506.22694; the noise is the Gumbel-max trick.

    Examples:
        >>> import torch
        >>> from specker.kernels import vocab_topk
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> head = torch.tensor([[1.0, 0.0], [5.0, 2.0], [0.0, 7.0]])  # the rows of tokens 10, 20 and 30
        >>> ids, logits, lse = vocab_topk(hidden, head, torch.tensor([10, 20, 30]), 2)
        >>> ids.tolist(), logits.tolist()
        ([[20, 10], [30, 20]], [[5.0, 1.0], [7.0, 2.0]])
    """
    found = _vocab_topk(hidden, weight, token_ids, k, norm, noise, with_lse, out)
    return found if out is None else write_out(found, out, hidden, k)


class Arguments(NamedTuple):
    hidden: Tensor
    weight: Matrix
    token_ids: Tensor | None
    k: int
    norm: Norm | None = None
    noise: Noisy | None = None
    with_lse: bool = True
    out: Tensor | tuple[Tensor, Tensor] | None = None


def draws_alike(hidden: Tensor, weight: Matrix) -> bool:
    """Whether rows like `hidden` are on a GPU, and `vocab_topk` with k = 1 draws bit for bit the tokens that
    `sample_rows` draws from row_linear's float32 logits."""
    if not hidden.is_cuda or hidden.dtype == torch.float64 or not streams(weight):
        return False
    (K, E), on = weight.shape, hidden.device
    return _sums_alike(hidden.dtype, K, E, arch(on), sms(on), format_of(weight))


@lru_cache(maxsize=256)
def _sums_alike(dtype: torch.dtype, K: int, E: int, arch: int, sms: int, form: Format | None) -> bool:
    """Whether both kernels add a logit's products in the same order. row_linear splits the sums of a small weight, the
    order of products in four bits depends on a tile's columns, and AMD's compiler chooses instructions by the tile."""
    _, n, block, _, splits = product_tiles(Product(dtype, K, E, arch, sms=sms, form=form))
    _, own, columns, _ = tiles(dtype, K, E, arch, sms, form)
    if arch in AMD or splits > 1:
        return False
    same = block == columns and weight_left(n, arch, form) == weight_left(own, arch, form)
    return form is None or not form.four_bits or same


@takes(Arguments)
def vocab_topk_ref(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, token_ids, k, norm, noise, with_lse, _ = args
    if norm is not None:
        hidden = F.rms_norm(hidden, hidden.shape[-1:], norm[0], norm[1])
    return largest_of(row_linear(hidden, weight, epilogue="float32"), token_ids, k, noise, with_lse)


def largest_of(
    z: Tensor, token_ids: Tensor | None, k: int, noise: Noisy | None = None, with_lse: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """`vocab_topk` for given logits z [T, K] float32 or float64. Overwrites z."""
    seed, positions, temperature, draw = noise_of(noise)
    if positions is not None and temperature > 0:
        if draw is None:
            add_gumbel_(z.div_(temperature), seed, positions, token_ids)
        else:
            run = check_draw(draw, z.shape[0])
            for numbers, rows, at in zip(draw.view(-1, 4), z.split(run), positions.split(run), strict=False):
                seed, temperature, _, _ = unpack_draw(numbers)
                if temperature > 0 and len(rows):
                    add_gumbel_(rows.div_(temperature), seed, at, token_ids)
    values, columns = largest(z, token_ids, k)
    ids = columns if token_ids is None else token_ids.take(columns).long()
    return ids, values, z.logsumexp(-1) if with_lse else z.new_empty(0)


def largest(z: Tensor, token_ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of z [T, K] and their columns, descending, ties to the lower id: [T, k] both."""
    return (_largest if z.is_cuda else _select)(z, token_ids, k)


def _largest(z: Tensor, token_ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their columns, ties to the lower id. Sorts everything, without a host read."""
    by_id = torch.arange(z.shape[1], dtype=torch.int64, device=z.device) if token_ids is None else token_ids.argsort()
    values, order = z[:, by_id].sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), by_id[order[:, :k]]


def _select(z: Tensor, token_ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """`_largest` on a CPU: selects, and orders by id only if there is a tie (torch.topk orders ties arbitrarily)."""
    if k == 1:
        columns = first_argmax(z)[:, None]
        values = z.gather(1, columns)
        if token_ids is None or _count_equal(z, values) == z.shape[0]:  # no tie
            return values, columns
    m = min(k + 1, z.shape[1])  # one more, to detect a tie at the edge
    values, columns = z.topk(m)
    rows = values.tolist()
    values, columns = values[:, :k].contiguous(), columns[:, :k].contiguous()
    for t, row in enumerate(rows):
        if len(set(row)) < m:
            at = (~(z[t] < values[t, -1])).nonzero()[:, 0]  # every candidate, including NaN, as in topk
            if token_ids is not None:
                at = at[token_ids[at].argsort()]
            values[t], order = (x[:k] for x in z[t, at].sort(descending=True, stable=True))
            columns[t] = at[order]
    return values, columns


def _count_equal(z: Tensor, values: Tensor) -> int:
    """How many elements of z [T, K] on a CPU equal their row's value, values [T, 1]."""
    return int(np.count_nonzero(z.detach().numpy() == values.detach().numpy()))


@takes(Arguments)
def vocab_topk_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) that any implementation needs: weight, hidden, ids and norm read once, the results written; two
    flops per weight and row."""
    hidden, weight, token_ids, k, norm, noise, with_lse, _ = args
    (T, E), K = hidden.shape, weight.shape[0]
    read = weight.nbytes + (T * E + (E if norm is not None else 0)) * hidden.element_size()
    if token_ids is not None:
        read += K * token_ids.element_size()
    if noise is not None:
        read += 8 * T
    size = 8 if hidden.dtype == torch.float64 else 4
    return read + T * k * (8 + size) + T * size * with_lse, 2 * T * K * E


NO_KEY = tl.constexpr(-(1 << 63))  # no candidate: below every key
_LOW = tl.constexpr((1 << 32) - 1)


@triton.jit
def _order(z):
    """z's bits as an integer that orders as z does."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_key(z, ids):
    """One integer that orders by z, then by the lower id: `_order` above the complement of the id."""
    return (_order(z).to(tl.int64) << 32) | (~ids & _LOW)


@triton.jit
def _largest_key(z, ids, exists):
    """The largest `rank_key` of each row of z [R, N] among the columns that exist [N], with these ids [N]: [R]. Both
    reductions are of 32 bits, for which a warp has an instruction."""
    order = tl.where(exists[None, :], _order(z), -(1 << 31))
    best = tl.max(order, axis=1)
    mine = (order == best[:, None]) & exists[None, :]
    least = tl.min(tl.where(mine, ids[None, :], _LOW).to(tl.uint32), axis=1)
    return (best.to(tl.int64) << 32) | (~least.to(tl.int64) & _LOW)


@triton.jit
def id_of(key):
    return ~key & _LOW


@triton.jit
def value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def take_best(key, R: tl.constexpr, TOP: tl.constexpr, C: tl.constexpr):
    """key [R, n] -> the TOP <= C largest of each row, descending, in [R, C]; the rest is unspecified. A small TOP takes
    them out one by one, a large one sorts. Keys must differ."""
    if C <= 16:
        o_c = tl.arange(0, C)[None, :]
        b_top = tl.full([R, C], NO_KEY, tl.int64)
        for i in tl.range(TOP):
            b_best = tl.max(key, axis=1)[:, None]
            b_top = tl.where(o_c == i, b_best, b_top)
            key = tl.where(key == b_best, NO_KEY, key)
    else:
        b_top = tl.topk(key, C)
    return b_top


@triton.jit
def _power(z, top):
    """exp(z - top); 1 if they are equal, infinities included."""
    return tl.where(z == top, 1.0, tl.exp(z - top))


@triton.jit(
    do_not_specialize=["T", "temperature", "seed", "run", "apart", "stride"],
    do_not_specialize_on_alignment=["ids_ptr", "positions_ptr", "draw_ptr", "best_ptr", "logits_ptr"],
)
def _vocab_topk_kernel(
    x_ptr,  # [T, E]
    w_ptr,  # [K, E]; four bits: int16 [K, E / 4]
    scale_ptr,  # [K, E / GROUP], or None
    shift_ptr,  # [K, E / GROUP], or None
    ids_ptr,  # [K]
    positions_ptr,  # [T], `apart` elements from one to the next
    draw_ptr,  # [B, 4]: one set per run of rows
    keys_ptr,  # [T, tiles, C]: the tile's largest, descending
    stats_ptr,  # [2, T, tiles]: the tile's maximum, and its sum of exp(z - maximum)
    best_ptr,  # [T] ids, `stride` elements from one to the next; written only if LAST
    logits_ptr,  # [T], written only if LAST
    count_ptr,  # [row tiles] zeros, to find the last program; None unless LAST
    T,
    temperature,
    seed: tl.int64,
    run,  # rows per set of the draw's numbers
    apart,
    stride,
    K: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,  # rows of x per program
    N: tl.constexpr,  # rows of the weight per program
    BLOCK_E: tl.constexpr,
    R: tl.constexpr,  # rows per selection; divides M
    TOP: tl.constexpr,  # k
    C: tl.constexpr,  # candidates per tile; a power of two, at least k
    MAPPED: tl.constexpr,
    NOISE: tl.constexpr,
    DRAWN: tl.constexpr,
    LSE: tl.constexpr,
    LAST: tl.constexpr,  # the last program merges the tiles; C is 1
    SOME: tl.constexpr,  # candidates of a row that it holds at a time
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    ON_AMD: tl.constexpr,
    SM: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(C <= N and M % R == 0 and N * E < 2**31 and M * E < 2**31)
    # Whether rows may all be without noise: then they take one search. With ids in memory, both ways together spill.
    GREEDY: tl.constexpr = LAST and (not NOISE or (DRAWN and ids_ptr is None))
    i_tile = tl.program_id(1)
    o_m = tl.program_id(0) * M + tl.arange(0, M)  # programs of one weight tile are adjacent
    o_n = i_tile * N + tl.arange(0, N)
    m_n = o_n < K
    ROW: tl.constexpr = E // 4 if w_ptr.dtype.element_ty == tl.int16 else E  # elements of a row of the weight
    w_ptr += i_tile.to(tl.int64) * N * ROW
    wait_for_previous(PDL)
    if MAPPED:  # loaded early, to overlap with the stream
        b_id = tl.load(ids_ptr + o_n, mask=m_n, other=0).to(tl.int64)
    else:
        b_id = o_n.to(tl.int64)
    rows = tl.minimum(T - tl.program_id(0) * M, M)
    in_turn = rows  # those that are searched R at a time
    if GREEDY and DRAWN:
        b_warm = tl.load(draw_ptr + tl.minimum(o_m, T - 1) // run * 4 + 2)  # the bits of temperatures
        in_turn = tl.where(tl.max(b_warm, axis=0) > 0, rows, 0)
    elif GREEDY:
        in_turn = 0 * rows
    b_all = stream_rows(
        x_ptr + tl.program_id(0).to(tl.int64) * (M * E),
        w_ptr,
        scale_ptr,
        shift_ptr,
        i_tile * N,
        tl.arange(0, M),
        o_m < T,
        tl.arange(0, N),
        m_n,
        0,
        E,
        E,
        M,
        N,
        BLOCK_E,
        E % BLOCK_E == 0,
        K % N == 0,
        KIND,
        GROUP,
        LEFT,
        SM,
    )
    let_next_start(PDL)
    tiles = tl.num_programs(1)
    b_groups = tl.reshape(b_all, (M // R, R, N))
    o_group = tl.arange(0, M // R)[:, None, None]
    for i_r in tl.range(0, in_turn, R):
        # Extract R rows; summing with zeros is exact. The compiler would keep each row in every fourth warp, and those
        # warps would all repeat the selection. A load that reads nothing sets a layout that uses all threads.
        b_z = tl.sum(tl.where(o_group * R == i_r, b_groups, 0.0), axis=0)
        o_spread = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
        b_z += tl.load(stats_ptr + o_spread, mask=o_spread + T < 0, other=0.0)
        o_r = tl.program_id(0) * M + i_r + tl.arange(0, R)
        m_r = o_r < T
        if NOISE:
            b_position = tl.load(positions_ptr + o_r.to(tl.int64) * apart, mask=m_r, other=0)
            if DRAWN:
                p_draw = draw_ptr + tl.minimum(o_r, T - 1) // run * 4
                b_seed, b_t, _top_p = drawn(p_draw[:, None], seed, temperature, 1.0, DRAWN)
                if tl.max(tl.max(b_t, axis=1), axis=0) > 0:  # greedy rows spend nothing on noise
                    b_hot = tl.where(b_t == 0, 1.0, b_t)
                    b_noisy = tl.div_rn(b_z, b_hot) + gumbel_of(b_id[None, :], b_position[:, None], b_seed)
                    b_z = tl.where(b_t == 0, b_z, b_noisy)
            else:
                b_z = tl.div_rn(b_z, temperature) + gumbel_of(b_id[None, :], b_position[:, None], seed)
        o_tile = o_r.to(tl.int64) * tiles + i_tile
        if LSE:
            b_z = tl.where(m_n[None, :], b_z, float("-inf"))
            b_max = tl.max(b_z, axis=1)
            b_power = tl.where(m_n[None, :], _power(b_z, b_max[:, None]), 0.0)
            tl.store(stats_ptr + o_tile, b_max, mask=m_r)
            tl.store(stats_ptr + T.to(tl.int64) * tiles + o_tile, tl.sum(b_power, axis=1), mask=m_r)
        b_key = tl.where(m_n[None, :], rank_key(b_z, b_id[None, :]), NO_KEY)
        if C == 1:
            tl.store(keys_ptr + o_tile, tl.max(b_key, axis=1), mask=m_r)
        else:
            o_c = o_tile[:, None] * C + tl.arange(0, C)[None, :]
            tl.store(keys_ptr + o_c, take_best(b_key, R, TOP, C), mask=m_r[:, None])
    if LAST:
        if GREEDY and in_turn == 0:
            p_keys = keys_ptr + o_m.to(tl.int64) * tiles + i_tile
            tl.store(p_keys, _largest_key(b_all, b_id, m_n), mask=o_m < T)
        TILES: tl.constexpr = (K + N - 1) // N  # a constant, for loads of 16 bytes
        if not is_last(count_ptr + tl.program_id(0), TILES, ON_AMD):
            return
        for i_r in tl.range(0, rows, R):
            o_r = (tl.program_id(0) * M + i_r + tl.arange(0, R)).to(tl.int64)
            m_r = o_r < T
            b_best = tl.full([R, SOME], NO_KEY, tl.int64)
            for i in tl.range(0, TILES, SOME):
                o_tile = i + tl.arange(0, SOME)[None, :]
                m_tile = m_r[:, None] & (o_tile < TILES)
                b_key = tl.load(keys_ptr + o_r[:, None] * TILES + o_tile, mask=m_tile, other=NO_KEY)
                b_best = tl.maximum(b_best, b_key)
            b_key = tl.max(b_best, axis=1)
            tl.store(best_ptr + o_r * stride, id_of(b_key), mask=m_r)
            tl.store(logits_ptr + o_r, value_of(b_key), mask=m_r)


@triton.jit
def _larger(key, p_all, N: tl.constexpr):
    """How many of the N keys at p_all are larger: key [n] -> int32 [n]. Each thread reads them all, by independent
    loads from L1: no step waits for another one, and threads exchange nothing. Counts in float32: the compiler packs
    small integers in pairs of 16 bits, which takes more instructions."""
    b_larger = tl.zeros_like(key).to(tl.float32)
    for i in tl.static_range(N):
        b_larger += tl.where(tl.load(p_all + i) > key, 1.0, 0.0)
    return b_larger.to(tl.int32)


@triton.jit(do_not_specialize=["T", "ids_stride", "id_stride"], do_not_specialize_on_alignment=["ids_ptr"])
def _vocab_topk_merge_kernel(
    keys_ptr,  # [T, TILES, C]
    stats_ptr,  # [2, T, TILES]
    work_ptr,  # [T, 2 SLOTS + C + TILES_PAD / GROUP]: work space
    ids_ptr,  # [T, TOP], of any strides
    logits_ptr,  # [T, TOP]
    lse_ptr,  # [T]
    T,
    ids_stride,  # from one row's ids to the next row's
    id_stride,  # from one id of a row to the next
    TOP: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,  # a power of two, at least 2
    C: tl.constexpr,
    GROUP: tl.constexpr,  # tiles compared with one another; divides TILES_PAD
    SLOTS: tl.constexpr,  # a power of two, at least TOP (TOP + 1) / 2; 0 to sort
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. The C largest keys can only lie in the C tiles with the largest maxima, and in the r-th of
    these (from 0) only among the first C - r: any later key has C larger ones, in its tile and the maxima before. The
    same holds for the largest maxima, in groups of tiles. So both are among TRIANGLE = TOP (TOP + 1) / 2 slots: slot d
    (d + 1) / 2 + c takes number c of the group, or of the tile, with the (d - c)-th largest maximum. A few dozen keys
    are ranked by counting the larger ones."""
    start_after_previous(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_tile = tl.arange(0, TILES_PAD)
    m_tile = o_tile < TILES
    p_keys = keys_ptr + i_t * TILES * C
    b_first = tl.load(p_keys + o_tile * C, mask=m_tile, other=NO_KEY)
    if LSE:
        b_max = tl.load(stats_ptr + i_t * TILES + o_tile, mask=m_tile, other=float("-inf"))
        b_sum = tl.load(stats_ptr + (T.to(tl.int64) + i_t) * TILES + o_tile, mask=m_tile, other=0.0)
        top = tl.max(b_max, axis=0)
        total = tl.sum(b_sum * _power(b_max, top), axis=0)
        tl.store(lse_ptr + i_t, top + tl.log(total))
    p_ids, p_logits = ids_ptr + i_t * ids_stride, logits_ptr + i_t * TOP
    if C == 1:
        best = tl.max(b_first, axis=0)
        tl.store(p_ids, id_of(best))
        tl.store(p_logits, value_of(best))
    elif SLOTS > 0:
        TRIANGLE: tl.constexpr = TOP * (TOP + 1) // 2
        GROUPS: tl.constexpr = (TILES + GROUP - 1) // GROUP
        p_work = work_ptr + i_t * (2 * SLOTS + C + TILES_PAD // GROUP)
        p_number, p_order, p_top = p_work + SLOTS, p_work + 2 * SLOTS, p_work + 2 * SLOTS + C
        o_slot = tl.arange(0, SLOTS)
        tl.store(p_work + o_slot, tl.full([SLOTS], NO_KEY, tl.int64))  # a small group leaves slots empty

        o_group = o_tile // GROUP
        b_in = tl.zeros([TILES_PAD], tl.float32)  # number of larger maxima in the tile's group
        for i in tl.static_range(GROUP):
            o_other = o_group * GROUP + i
            b_other = tl.load(p_keys + o_other * C, mask=o_other < TILES, other=NO_KEY)
            b_in += tl.where(b_other > b_first, 1.0, 0.0)
        b_in = b_in.to(tl.int32)
        tl.store(p_top + o_group, b_first, mask=m_tile & (b_in == 0))
        tl.debug_barrier()
        b_top = tl.load(p_top + o_group, mask=m_tile, other=NO_KEY)
        b_least = b_in + _larger(b_top, p_top, GROUPS)  # lower bound of the number of larger maxima
        m_first = m_tile & (b_least < TOP)
        o_first = b_least * (b_least + 1) // 2 + b_in
        tl.store(p_work + o_first, b_first, mask=m_first)
        tl.store(p_number + o_first, o_tile.to(tl.int64), mask=m_first)
        tl.debug_barrier()
        b_first = tl.load(p_work + o_slot)
        b_rank = _larger(b_first, p_work, TRIANGLE)
        m_first = (b_first != NO_KEY) & (b_rank < TOP)
        tl.store(p_order + b_rank, tl.load(p_number + o_slot, mask=m_first, other=0), mask=m_first)
        tl.debug_barrier()

        o_d = tl.zeros([SLOTS], tl.int32)
        for d in tl.static_range(1, TOP):
            o_d += (o_slot >= d * (d + 1) // 2).to(tl.int32)
        o_c = o_slot - o_d * (o_d + 1) // 2
        o_rank = o_d - o_c
        m_key = (o_slot < TRIANGLE) & (o_rank < TILES)
        b_tile = tl.load(p_order + o_rank, mask=m_key, other=0)
        b_key = tl.load(p_keys + b_tile * C + o_c, mask=m_key, other=NO_KEY)
        tl.store(p_work + o_slot, b_key)
        tl.debug_barrier()
        b_rank = _larger(b_key, p_work, TRIANGLE)
        m_key = (b_key != NO_KEY) & (b_rank < TOP)
        tl.store(p_ids + b_rank * id_stride, id_of(b_key), mask=m_key)
        tl.store(p_logits + b_rank, value_of(b_key), mask=m_key)
    else:
        SOME: tl.constexpr = min(TILES_PAD, 256)
        RANKS: tl.constexpr = min(C, TILES_PAD)
        b_rank = tl.topk(b_first, RANKS)
        b_tile = tl.zeros([RANKS], tl.int32)
        for i_tile in tl.range(0, TILES, SOME):  # all at once would not fit in registers
            o_some = i_tile + tl.arange(0, SOME)
            b_all = tl.load(p_keys + o_some * C, mask=o_some < TILES, other=NO_KEY)
            same = (b_rank[:, None] == b_all[None, :]) & (o_some < TILES)[None, :]
            b_tile += tl.sum(tl.where(same, o_some[None, :], 0), axis=1)
        o_rank, o_c = tl.arange(0, RANKS)[:, None], tl.arange(0, C)[None, :]
        m_c = (o_rank < TILES) & (o_rank + o_c < TOP)
        b_key = tl.load(p_keys + b_tile[:, None] * C + o_c, mask=m_c, other=NO_KEY)
        b_key = tl.topk(tl.reshape(b_key, (RANKS * C,)), C)
        o_k = tl.arange(0, C)
        tl.store(p_ids + o_k * id_stride, id_of(b_key), mask=o_k < TOP)
        tl.store(p_logits + o_k, value_of(b_key), mask=o_k < TOP)


def tiles(
    dtype: torch.dtype, K: int, E: int, arch: int, sms: int = 0, form: Format | None = None, few: bool = False
) -> tuple[int, int, int, int]:
    """The tile table: rows of x, rows of the weight, columns, stages. `_variants` gives the reasons. `sms`: the
    device's number of SMs; 0: the architecture's usual number. `form`: the format of a quantised weight. `few`: see
    `few_rows`."""
    row = E * dtype.itemsize if form is None else form.size(E)
    if dtype == torch.float32 or row % 16:
        return 16 if dtype == torch.float32 else 64, 64, 32 if form is None else form.block(32, E), 2
    count = -(-K // 128)
    n = (
        128
        if 10 * count >= 7 * (sms or SMS[arch]) and (form is None or not form.four_bits or arch in (90, 100))
        else 64
    )
    if form is not None or few:
        left = weight_left(n, arch, form)
        m, block = FEW if few and left else 64, 128 if left else 64
        block = block if form is None else form.block(block, E)
        return m, n, block, stages_of(m, n, block, False, arch, form)
    room = {80: 48, 942: 32, 950: 80}.get(arch, 96)  # KiB
    synchronous = arch == 80 or arch in AMD  # synchronous matrix instructions need one buffer fewer
    return 64, n, 64, room * 1024 // ((64 + n) * 64 * dtype.itemsize) + synchronous


class Search(NamedTuple):
    """What the kernels of an LM head are compiled for, besides the sizes of the head."""

    dtype: torch.dtype
    E: int
    k: int
    ids: torch.dtype | None  # of token_ids
    noise: bool
    held: bool  # seed and temperature are in memory
    lse: bool
    arch: int
    sms: int = 0
    form: Format | None = None

    @classmethod
    def of(cls, args: Any) -> "Search":
        """`args`: the Arguments of `vocab_topk` or `cluster_topk`."""
        hidden, ids, k, lse, on = args.hidden, args.token_ids, args.k, args.with_lse, args.hidden.device
        _, positions, temperature, draw = noise_of(args.noise)
        noisy = positions is not None and float(temperature) > 0  # numpy's numbers compare to numpy's truth values
        mapped, held, form = None if ids is None else ids.dtype, noisy and draw is not None, format_of(args.weight)
        return cls(hidden.dtype, hidden.shape[1], k, mapped, noisy, held, lse, arch(on), sms(on), form)


@lru_cache(maxsize=256)
def _variants(search: Search, K: int, few: bool = False) -> tuple[Variant, Variant | None]:
    """The kernel, and its merge, which k = 1 without lse does not need. The stream is row_linear's, but each tile ends
    in a selection, during which its program reads nothing.

    K 32,768: an H200 holds 264 blocks at once (two of 96 KiB per SM, 96 KiB in flight). 256 programs of 128 rows run in
    one wave, with one selection each; tiles of 64 would need two waves and read x twice as often. 8 warps halve the
    selection. Up to 16 rows on sm_90 (`few_rows`) have the weight as the left operand; with four warps the sums of
    exp(z) would have another order than those of more rows have. The selection takes 8 rows at a time and loops over
    the rows that exist. (16 at a time spill 8 to 32 bytes at the 128 registers per thread that two blocks allow.) For k
    = 1 without lse, where no row has noise, it takes all at once: 64 rows take about a third of the instructions and a
    seventh of the barriers (counted). The merge reads the tiles' maxima, then at most C tiles. Its time is latency,
    mostly at barriers. So it ranks up to 16 keys by counting, with four barriers, and sorts more. float32 and odd E use
    small tiles, for correctness only. Quantised weights have row_linear's stages. Four bits as the right operand has
    tiles of 64 rows: 128 need 149 registers per thread. As the left operand (`weight_left`) it has tiles of 128 rows
    and four warps: with eight it takes 6.2 instead of 5.1 instructions per weight.
    """
    dtype, E, k, ids, noise, held, lse, arch, sms, form = search
    m, n, block, stages = tiles(dtype, K, E, arch, sms, form, few)
    t, count = TYPES[dtype], -(-K // n)
    C = triton.next_power_of_2(k)
    half = dtype != torch.float32
    left = half and (form is not None or m == FEW) and weight_left(n, arch, form)
    decodes = left and form is not None  # the weight goes to the products from registers
    name = f"{t} {E}->{K} k{k}" + (f" ids {TYPES[ids]}" if ids else "")
    name += " noise" * noise + " drawn" * held + " lse" * lse
    name += ("" if form is None else f" {form}") + " few" * few
    last = k == 1 and not lse
    smoke = dtype == torch.bfloat16 and K == 32768 and form is None
    smoke = smoke and (k, noise, held) in ((10, True, False), (64, False, False), (1, True, True))
    stream = Variant(
        name=name,
        kernel=_vocab_topk_kernel,
        arguments=(
            *(f"*{t}", *types_of(t, form), f"*{TYPES[ids]}" if ids else f"*{t}"),
            *(("*i64" if there else f"*{t}") for there in (noise, held)),
            *("*i64", "*fp32", "*i64", "*fp32", "*i32" if last else None, "i32", "fp32", "i64", "i32", "i32", "i32"),
        ),
        constexprs={
            "K": K,
            "E": E,
            "M": m,
            "N": n,
            "BLOCK_E": block,
            "R": 8,
            "TOP": k,
            "C": C,
            "MAPPED": ids is not None,
            "NOISE": noise,
            "DRAWN": held,
            "LSE": lse,
            "LAST": last,
            "SOME": min(triton.next_power_of_2(count), 512),
            **constexprs_of(form),
            "LEFT": left,
        },
        num_warps=8 if half and not decodes else 4,
        num_stages=stages,
        dot=half,
        left=decodes,
        wide=half and wide_rows(dtype, E, arch, form),
        smoke=smoke,
        options={"maxnreg": 255 if decodes else 128} if half else {},  # two blocks per SM
    )
    if last:
        return stream, None
    pad = max(2, triton.next_power_of_2(count))
    slots = triton.next_power_of_2(k * (k + 1) // 2) if 1 < k <= 16 else 0
    merge = Variant(
        name=name + " merge",
        kernel=_vocab_topk_merge_kernel,
        arguments=("*i64", "*fp32", "*i64", "*i64", "*fp32", "*fp32", "i32", "i32", "i32"),
        constexprs={
            "TOP": k,
            "TILES": count,
            "TILES_PAD": pad,
            "C": C,
            "GROUP": min(16, pad),
            "SLOTS": slots,
            "LSE": lse,
        },
        num_warps=4 if C <= 16 and count <= 256 else 8,
        wide=False,  # for the tiles' maxima it reads one key in C
        smoke=smoke and C <= 16,  # the sort takes 5 to 13 s to compile
    )
    return stream, merge


def _work(merge: Variant) -> int:
    """Elements of the merge's work space per row."""
    sizes = merge.constexprs
    return 2 * sizes["SLOTS"] + sizes["C"] + sizes["TILES_PAD"] // sizes["GROUP"]


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any K, E and k up to 64."""
    bf16, i32, i64 = torch.bfloat16, torch.int32, torch.int64
    for dtype, K, E, k, ids, noise, held, lse in (
        (bf16, 32768, 4096, 1, i64, True, False, False),
        (bf16, 32768, 4096, 1, i64, True, True, False),
        (bf16, 128256, 4096, 1, None, True, True, False),  # the tokens of verify rows
        (bf16, 128256, 4096, 10, None, True, True, True),
        (bf16, 32768, 4096, 10, i64, False, False, True),
        (bf16, 32768, 4096, 10, i32, True, False, True),
        (bf16, 32768, 4096, 64, i64, False, False, True),
        (bf16, 128256, 4096, 10, None, False, False, True),
        (bf16, 262144, 4096, 10, None, True, False, True),
        (bf16, 8192, 896, 10, i64, True, False, True),
        (bf16, 1000, 1023, 10, i64, True, False, True),
        (torch.float16, 32768, 4096, 10, i64, False, False, True),
        (torch.float32, 32768, 4096, 10, i64, True, False, True),
    ):
        search = Search(dtype, E, k, ids, noise, held, lse, arch)
        yield from (v for v in _variants(search, K) if v is not None)
    for form in COMMON:
        yield _variants(Search(bf16, 4096, 10, i64, False, False, True, arch, form=form), 32768)[0]
    yield _variants(Search(torch.float16, 896, 10, i64, True, True, True, arch, form=COMMON[3]), 8192)[0]
    yield _variants(Search(torch.float32, 4096, 1, None, False, False, False, arch, form=COMMON[0]), 32768)[0]
    if arch == 90:
        for each in (None, COMMON[0], COMMON[1], COMMON[3]):
            yield _variants(Search(bf16, 4096, 10, None, False, False, False, 90, form=each), 32768, few=True)[0]
        yield _variants(Search(bf16, 4096, 1, None, True, True, False, 90), 128256, few=True)[0]


def results_of(args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for ids, logits and lse, or `out`; `args`: the Arguments of `vocab_topk` or `cluster_topk`."""
    hidden, k, dtype = args.hidden, args.k, sum_dtype(args.hidden.dtype)
    ids, logits = (None, None) if args.out is None else check_out(args.out, hidden, k)
    ids = hidden.new_empty((len(hidden), k), dtype=torch.int64) if ids is None else ids
    logits = hidden.new_empty((len(hidden), k), dtype=dtype) if logits is None else logits
    return ids, logits, hidden.new_empty(len(hidden) if args.with_lse else 0, dtype=dtype)


def normed(hidden: Tensor, norm: Norm | None) -> Tensor:
    """hidden [T, E], contiguous, after the norm if there is one."""
    if norm is None:
        return hidden.contiguous()
    weight, eps = norm
    return _norm(hidden, hidden.new_empty(0, *hidden.shape), weight.to(hidden.dtype).unsqueeze(0), eps)[1][0]


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    weight, token_ids, T, K = args.weight, args.token_ids, len(args.hidden), args.weight.shape[0]
    ids, logits, lse = found = results_of(args)
    if T == 0:
        return found
    search = Search.of(args)
    stream, merge = _variants(search, K, few_rows(T, search.arch))
    hidden, (w, scale, shift) = normed(args.hidden, args.norm), arguments_of(weight)
    seed, positions, temperature, draw = noise_of(args.noise)
    sizes = stream.constexprs
    grid = -(-T // sizes["M"]), -(-K // sizes["N"])
    keys = hidden.new_empty((T, grid[1], sizes["C"]), dtype=torch.int64)
    stats = hidden.new_empty((2, T, grid[1]) if args.with_lse else 0, dtype=torch.float32)
    stream(
        grid,
        hidden,
        w,
        scale,
        shift,
        hidden if token_ids is None else token_ids.contiguous(),  # hidden is a dummy for absent tensors
        positions if search.noise and positions is not None else hidden,
        draw.contiguous() if search.held and draw is not None else hidden,
        keys,
        stats,
        ids,
        logits,
        None if merge is not None else counters(hidden.device, grid[0]),
        T,
        float(temperature),
        signed(seed),
        check_draw(draw, T),
        1 if positions is None else positions.stride(0),
        ids.stride(0),
    )
    if merge is not None:
        work = hidden.new_empty((T, _work(merge)), dtype=torch.int64)
        merge((T,), keys, stats, work, ids, logits, lse, T, *ids.stride())
    return found


def _check(args: Arguments) -> None:
    hidden, weight, token_ids, k, norm, noise, _, _ = args
    check_head(hidden, weight, norm, noise)
    K = weight.shape[0]
    if not 1 <= k <= min(MAX_K, K):
        raise ValueError(f"k must be in 1..min({MAX_K}, K = {K}), got {k}")
    if token_ids is not None and (token_ids.shape != (K,) or token_ids.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"token_ids must be [{K}] int32 or int64, got {tuple(token_ids.shape)} {token_ids.dtype}")
    same_device(hidden, token_ids=token_ids)


def check_ids(args: Any) -> None:
    """Raise ValueError for token ids that the noise is not defined for; reads them on the host."""
    if args.token_ids is not None:
        check_within("token_ids", args.token_ids, 1 << 32)


def check_head(hidden: Tensor, weight: Matrix, norm: Norm | None, noise: Noisy | None) -> None:
    """Raise ValueError unless rows, weight, norm and noise of an LM head fit together."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [T, E] and weight [K, E]: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
        )
    if not hidden.is_floating_point() or not like(hidden, weight):
        raise ValueError(
            f"hidden and weight must be of one floating dtype and device: hidden {hidden.dtype} {hidden.device}, "
            f"weight {weight.dtype} {weight.device}"
        )
    T = hidden.shape[0]
    if norm is not None:
        by, eps = norm
        if by.shape != hidden.shape[1:] or not by.is_floating_point() or by.dtype.itemsize == 1:
            raise ValueError(f"norm weight must be [{hidden.shape[1]}] floating, got {tuple(by.shape)} {by.dtype}")
        if not eps >= 0:
            raise ValueError(f"norm eps must be at least 0, got {eps}")
        same_device(hidden, norm_weight=by)
    if noise is not None:
        seed, positions, temperature, draw = Noise(*noise)
        check_seed(seed)
        check_draw(draw, T)
        if positions.shape != (T,) or positions.dtype != torch.int64:
            raise ValueError(f"noise positions must be [{T}] int64, got {tuple(positions.shape)} {positions.dtype}")
        if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
            raise ValueError(f"noise temperature must be 0 or in [{MIN_TEMPERATURE}, inf), got {temperature}")
        same_device(hidden, positions=positions, draw=draw)


def check_out(out: Tensor | tuple[Tensor, Tensor], hidden: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """The memory for ids and logits. Raises TypeError or ValueError if it does not fit the results."""
    given = out if isinstance(out, tuple) and len(out) == 2 else (out,)
    if not all(isinstance(x, Tensor) for x in given):
        raise TypeError(f"out must be Tensor | tuple[Tensor, Tensor] | None, got {type(out).__name__}")
    ids, logits = given if len(given) == 2 else (*given, None)
    if ids.shape != (len(hidden), k) or ids.dtype != torch.int64:
        raise ValueError(f"out must be [{len(hidden)}, {k}] int64, got {tuple(ids.shape)} {ids.dtype}")
    same_device(hidden, out=ids)
    if logits is not None:
        dtype = sum_dtype(hidden.dtype)
        if logits.shape != ids.shape or logits.dtype != dtype or not logits.is_contiguous():
            raise ValueError(
                f"out's logits must be contiguous {list(ids.shape)} {dtype}, got {tuple(logits.shape)} {logits.dtype}"
            )
        same_device(hidden, logits_out=logits)
    return ids, logits


def write_out(
    found: tuple[Tensor, Tensor, Tensor], out: Tensor | tuple[Tensor, Tensor], hidden: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The op's results, with ids and logits in `out`. Raises TypeError or ValueError if they do not fit."""
    ids, logits, lse = found
    if ids is (out[0] if isinstance(out, tuple) and out else out):  # the kernel has written it
        return found
    best, values = check_out(out, hidden, k)
    return write(best, ids), logits if values is None else write(values, logits), lse


class Flat(NamedTuple):
    """The arguments of the registered op."""

    hidden: Tensor
    weight: Matrix
    token_ids: Tensor | None
    k: int
    norm_weight: Tensor | None
    eps: float
    seed: int  # signed
    positions: Tensor | None
    temperature: float
    draw: Tensor | None
    with_lse: bool

    @staticmethod
    def of(args: Arguments) -> tuple[Any, ...]:
        return *args[:4], *flat_noise(args.norm, args.noise), args.with_lse  # from hidden to k

    def nested(self) -> Arguments:
        return Arguments(*self[:4], *nested_noise(self), self.with_lse)


def flat_noise(
    norm: Norm | None, noise: Noisy | None
) -> tuple[Tensor | None, float, int, Tensor | None, float, Tensor | None]:
    """norm and noise as arguments of a registered op, which has no tuples and signed integers."""
    (weight, eps), (seed, positions, temperature, draw) = norm or (None, 0.0), noise_of(noise)
    return weight, eps, signed(check_seed(seed)), positions, temperature, draw


def nested_noise(args: Any) -> tuple[Norm | None, Noise | None]:
    """norm and noise from the arguments of a registered op."""
    seed, positions = args.seed % (1 << 64), args.positions
    noise = None if positions is None else Noise(seed, positions, args.temperature, args.draw)
    return None if args.norm_weight is None else (args.norm_weight, args.eps), noise


_vocab_topk = register(
    vocab_topk,
    Arguments,
    check=_check,
    reference=vocab_topk_ref,
    launch=launch,
    fake=results_of,
    fits=lambda args: streams(args.weight),
    check_values=check_ids,
    flat=Flat,
)
