"""sample_rows: the target's own token after each verify row.

Sampling is greedy decoding of perturbed logits. The kernels find the k-th largest exactly. They sum masses as integers,
in units of 2^-40 of the largest, so the order of the sum does not matter; each mass is a float32 exponential. z equals
the CPU reference's bit for bit, g up to its last bits. Filters read the logits three times, twice from the cache if
they fit; each tile issues one atomic for each histogram bin that has logits of the tile.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.kernels.cpu import eager, native
from specker.kernels.noise import (
    MIN_TEMPERATURE,
    add_gumbel_,
    check_draw,
    check_seed,
    drawn,
    gumbel_of,
    gumbel_run,
    signed,
    unpack_draw,
)
from specker.kernels.registry import register, takes
from specker.kernels.variant import TYPES, Variant, counters, is_last, same_device, start_after_previous, tl, triton


def sample_rows(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    positions: Tensor,
    draw: Tensor | None = None,
) -> Tensor:
    """The token after each row, drawn from its logits with noise that depends on seed, position and id alone.

        z     = logits / temperature                                       temperature > 0
        top_k keeps the ids with z >= the k-th largest z
        top_p keeps, with p the softmax over those, the ids whose z is at least that of the token
              at which the descending cumulative mass first reaches top_p
        token = argmax over the kept ids of z + g(seed, positions[t], id)  g: kernels/noise.py

    This is an exact draw from p, whatever was drafted. Temperature 0 is the argmax of the logits. Ties at a boundary
    are kept; the argmax gives a tie to the lower id. z is float32 for float16 and bfloat16 logits. Rows are
    independent. Where the cumulative mass is within 2^-20 of top_p, the kernel's boundary may differ from the float64
    reference's by one token. Memory moves the logits once without a filter, otherwise three times.

    Args:
        logits: [T, V], any floating dtype; -inf is allowed. A row of NaN gives id 0, or an error in the reference.
        temperature: 0, or at least 1e-6.
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        seed: in [0, 2^64).
        positions: [T] int64, the absolute position of each row.
        draw: [4] or [B, 4] (`noise.pack_draw`, on the logits' device): the four numbers are read from memory, and the
            arguments only enable noise and filters. With [B, 4] rows come in B equal runs, one per sequence, so greedy,
            sampled and filtered sequences share a launch.

    Returns:
        [T] int64.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes, devices or ranges.

    Source: the Gumbel-max trick; the random numbers are Philox4x32-10's (Salmon et al., 2011).

    Examples:
        >>> import torch
        >>> from specker.kernels import sample_rows
        >>> logits = torch.tensor([[0.0, 5.0, 1.0]])
        >>> sample_rows(logits, 0.0, 0, 1.0, 7, torch.tensor([3])).tolist()
        [1]
        >>> draws = [sample_rows(logits, 1.5, 2, 1.0, 7, torch.tensor([n])).item() for n in range(50)]
        >>> sorted(set(draws))  # top_k 2 never draws token 0
        [1, 2]
    """
    return _sample_rows(logits, temperature, top_k, top_p, seed, positions, draw)


class Arguments(NamedTuple):
    logits: Tensor
    temperature: float
    top_k: int
    top_p: float
    seed: int
    positions: Tensor
    draw: Tensor | None = None


class Splits(NamedTuple):
    """The best id in each of the S parts of T rows of perturbed logits. A row's token is the id of its largest value;
    ties go to the lower id."""

    value: Tensor  # [T, S] fp32
    id: Tensor  # [T, S] int32; 2^31 - 1 in a part of NaN

    def tokens(self) -> Tensor:
        """[T] int64; 0 for a row of NaN."""
        ids = torch.where(self.value == self.value.amax(1, keepdim=True), self.id, _NONE.value).amin(1)
        return torch.where(ids == _NONE.value, 0, ids).long()


@takes(Arguments)
def sample_splits(args: Arguments) -> Tensor | Splits:
    """`sample_rows` for a caller whose next kernel merges the parts of a row itself, which saves a launch. Returns the
    `Splits` of T rows, or the tokens [T] int64 if there is no launch to save (on a CPU, float64, with a filter, with a
    small vocabulary)."""
    if not args.logits.is_cuda or args.logits.dtype == torch.float64:
        return sample_rows(*args)
    _check(args)
    return _launch(args, merged=False)


def sample_rows_ref(
    logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, positions: Tensor
) -> Tensor:
    if temperature == 0:
        return first_argmax(logits)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    dropped = None
    if 0 < top_k < z.shape[1]:
        dropped = z < z.topk(top_k).values[:, -1:]
    if top_p < 1:
        top = (z if dropped is None else z.masked_fill(dropped, -math.inf)).sort(-1, descending=True).values
        mass = (top - top[:, :1]).exp_().cumsum(-1, dtype=torch.float64)
        reached = (mass < top_p * mass[:, -1:]).sum(-1, keepdim=True)
        dropped = z < top.gather(1, reached)
    add_gumbel_(z, seed, positions)
    return first_argmax(z if dropped is None else z.masked_fill_(dropped, -math.inf))


def first_argmax(z: Tensor) -> Tensor:
    """z [T, V] -> the column of each row's largest value, ties to the lowest column. [T] int64."""
    if z.is_cuda:
        return z.max(-1).indices
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    return torch.from_numpy(z.detach().numpy().argmax(-1))  # 0.5 us for a row of 8192, where torch.max takes 4


def _sample_runs(args: Arguments) -> Tensor:
    """The path without a Triton kernel (CPU or float64). Each sequence's run of rows has its own numbers."""
    logits, temperature, top_k, top_p, seed, positions, draw = args
    if temperature == 0:
        return first_argmax(logits)
    draws, run = [(temperature, top_k, top_p, seed)], max(1, len(logits))
    if draw is not None:
        run, draws = check_draw(draw, logits.shape[0]), []
        for numbers in draw.view(-1, 4):
            seed, warm, k, p = unpack_draw(numbers)
            draws.append((warm, k if top_k else 0, p if top_p < 1 else 1.0, seed))
    if logits.dtype == torch.float32 and eager(logits) and (kernels := native()) is not None:
        return kernels.sample(logits, draws, positions, run)
    rows = zip(logits.split(run), draws, positions.split(run), strict=False)
    return torch.cat([sample_rows_ref(z, t, k, p, seed, at) for z, (t, k, p, seed), at in rows])


@takes(Arguments)
def sample_rows_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) of one call: logits and positions in, ids out; one value of noise takes 32 operations."""
    return args.logits.nbytes + 16 * len(args.logits), args.logits.numel() * (1 if args.temperature == 0 else 35)


TILE = 4096  # logits per program
FINISH = 2048  # listed ids read at a time
BINS = 2048
_BINS = tl.constexpr(BINS)
_LINEAR = tl.constexpr(1024)  # bins of 1/64 nat cover 16 nats below the row's largest z; then 64 bins per octave
_LINEAR_BITS = tl.constexpr(0x44800000)  # the bits of 1024.0
_UNIT = tl.constexpr(2.0**40)  # a mass of 1; an int64 holds the sum of 2^22 of them
_NONE = tl.constexpr(2**31 - 1)  # no id
_KEEP_ALL = tl.constexpr(2**31 - 1)  # a top_k that no row reaches
_LEAST = tl.constexpr(-(2**31))  # the least key
_MARGIN = tl.constexpr(2.0**-16)  # relative margin above the error of an fp32 exponential and a few fp32 products


@triton.jit
def _scaled(
    logits_ptr,  # [T, V]
    temperature,
    i_t,
    i_s,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z of a tile; -inf beyond the row's end."""
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(logits_ptr + i_t * V + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
    b_x = tl.div_rn(b_x, tl.where(temperature == 0, 1.0, temperature))  # a temperature of 0 in memory is greedy
    return b_x + 0.0  # turns -0 into 0, so that their keys are equal


@triton.jit
def _key(z):
    """An int32 that orders like z."""
    i = z.to(tl.int32, bitcast=True)
    return i ^ ((i >> 31) & 0x7FFFFFFF)


@triton.jit
def _z(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _below(z, peak):
    """How far z lies below the row's largest; 0 if both are infinite: the maximum drops the NaN."""
    return tl.maximum(peak - z, 0.0)


@triton.jit
def _bin(below):
    """The bin of a z that is `below` under the peak. It never decreases as z falls: each step rounds monotonically."""
    x = below * 64.0
    octaves = (x.to(tl.int32, bitcast=True) - _LINEAR_BITS) >> 17
    return tl.where(x < _LINEAR, tl.minimum(x, _LINEAR).to(tl.int32), tl.minimum(_LINEAR + octaves, _BINS - 1))


@triton.jit
def _mass(below):
    return (tl.exp(-below) * _UNIT).to(tl.int64)


@triton.jit
def _share(mass, top_p):
    """The least integer that is at least top_p * mass."""
    x = mass.to(tl.float64) * top_p
    down = x.to(tl.int64)
    return down + (down.to(tl.float64) < x).to(tl.int64)


@triton.jit
def _best(b_v, o_id, m):
    """The largest value where m is set, and the lowest id that has it."""
    b_v = tl.where(m, b_v, float("-inf"))
    best = tl.max(b_v, axis=0)
    return best, tl.min(tl.where(m & (b_v == best), o_id, _NONE), axis=0)


@triton.jit(do_not_specialize=["run", "seed"], do_not_specialize_on_alignment=["positions_ptr", "draw_ptr"])
def _sample_argmax_kernel(
    logits_ptr,  # [T, V]
    positions_ptr,  # [T]
    draw_ptr,  # [B, 4]: one set per run of rows
    value_ptr,  # [T, S] fp32: each split's largest
    id_ptr,  # [T, S] int32: its id
    out_ptr,  # [T] int64, written only if S is 1
    temperature,
    seed: tl.int64,
    run,  # rows per set of the draw's numbers
    V: tl.constexpr,
    S: tl.constexpr,  # splits of a row
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    DRAWN: tl.constexpr,  # the draw's numbers are in memory
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, temperature, _ = drawn(draw_ptr + i_t // run * 4, seed, temperature, 1.0, DRAWN)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    b_z = _scaled(logits_ptr, temperature, i_t, i_s, V, BLOCK)
    if NOISE:  # noqa: SIM102 (the compiler's `and` of a constant and a number does not short-circuit)
        if temperature != 0:
            b_z += gumbel_run(i_s * BLOCK, tl.load(positions_ptr + i_t), seed, BLOCK)
    best, i_best = _best(b_z, o_v, o_v < V)
    if S == 1:
        tl.store(out_ptr + i_t, tl.where(i_best == _NONE, 0, i_best).to(tl.int64))  # a row of NaN gives id 0
    else:
        tl.store(value_ptr + i_t * S + i_s, best)
        tl.store(id_ptr + i_t * S + i_s, i_best)


@triton.jit
def _sample_merge_kernel(
    value_ptr,  # [T, S] fp32
    id_ptr,  # [T, S] int32
    out_ptr,  # [T] int64
    S: tl.constexpr,
    S_PAD: tl.constexpr,  # a power of two
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, S_PAD)
    b_v = tl.load(value_ptr + i_t * S + o_s, mask=o_s < S, other=float("-inf"))
    b_id = tl.load(id_ptr + i_t * S + o_s, mask=o_s < S, other=_NONE)
    i_best = _best(b_v, b_id, o_s < S)[1]
    tl.store(out_ptr + i_t, tl.where(i_best == _NONE, 0, i_best).to(tl.int64))


@triton.jit(do_not_specialize=["run"], do_not_specialize_on_alignment=["draw_ptr"])
def _sample_peak_kernel(
    logits_ptr,  # [T, V]
    draw_ptr,  # [B, 4]: one set per run of rows
    peak_ptr,  # [T, S] fp32
    hist_ptr,  # [T, 2048] int32; zeroed here
    listed_ptr,  # [T] int32: length of the row's list; zeroed here
    temperature,
    run,  # rows per set of the draw's numbers
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO: tl.constexpr,  # numbers of the histogram that a split zeroes
    DRAWN: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, temperature, _ = drawn(draw_ptr + i_t // run * 4, 0, temperature, 1.0, DRAWN)
    tl.store(peak_ptr + i_t * S + i_s, tl.max(_scaled(logits_ptr, temperature, i_t, i_s, V, BLOCK), axis=0))
    o = i_s * ZERO + tl.arange(0, ZERO)
    tl.store(hist_ptr + i_t * _BINS + o, tl.zeros([ZERO], tl.int32), mask=o < _BINS)
    if i_s == 0:
        tl.store(listed_ptr + i_t, 0)


@triton.jit
def _peak(peak_ptr, i_t, S: tl.constexpr, S_PAD: tl.constexpr):
    o_s = tl.arange(0, S_PAD)
    return tl.max(tl.load(peak_ptr + i_t * S + o_s, mask=o_s < S, other=float("-inf")), axis=0)


@triton.jit
def _start(o_bin):
    """The least `below` of a bin, exactly; infinity for the bin after the last."""
    octaves = (((o_bin - _LINEAR) << 17) + _LINEAR_BITS).to(tl.float32, bitcast=True)
    least = tl.where(o_bin < _LINEAR, o_bin.to(tl.float32), octaves) * (1 / 64)
    return tl.where(o_bin < _BINS, least, float("inf"))


@triton.jit
def _edges(b_count, top_k, top_p, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """Counts of a row's bins -> (bin_k, first, last, want_k). Bin bin_k holds the k-th largest z, which is the
    want_k-th largest of that bin; bin_k is 2048 if all ids are kept. The edge of top_p lies in bins first..last,
    whatever the exact masses are."""
    o_bin = tl.arange(0, _BINS)
    bin_k, want_k = tl.full([], _BINS, tl.int32), tl.full([], 0, tl.int32)
    if TOP_K:
        bin_k = tl.sum((tl.cumsum(b_count, axis=0) < top_k).to(tl.int32), axis=0)
        want_k = top_k - tl.sum(tl.where(o_bin < bin_k, b_count, 0), axis=0)
    first, last = bin_k, bin_k
    if TOP_P:
        # Bounds of each bin's mass after top_k. The bounds of one id's mass cover the error of an fp32 exponential.
        b_least = (tl.exp(-_start(o_bin + 1)) * (1 - _MARGIN) * _UNIT).to(tl.int64)
        b_most = (tl.exp(-_start(o_bin)) * (1 + _MARGIN) * _UNIT).to(tl.int64)
        b_least *= tl.where(o_bin < bin_k, b_count, tl.where(o_bin == bin_k, want_k, 0))
        b_most *= tl.where(o_bin <= bin_k, b_count, 0)
        b_cum_least, b_cum_most = tl.cumsum(b_least, axis=0), tl.cumsum(b_most, axis=0)
        b_rest_least, b_rest_most = tl.sum(b_least, axis=0) - b_cum_least, tl.sum(b_most, axis=0) - b_cum_most
        # A bin has reached the edge if cum >= p * (cum + rest): cum is the mass up to it, rest the mass after it. Both
        # sides of (1 - p) * cum >= p * rest have independent bounds; those of the first form would list p / 64 of the
        # row. The margin covers the errors of fp32 here and of float64 in _share; 2 covers _share's rounding up.
        low, high = (1 - top_p) * (1 - _MARGIN), (1 - top_p) * (1 + _MARGIN)
        b_not = high * b_cum_most.to(tl.float32) < top_p * b_rest_least.to(tl.float32)
        b_reached = low * b_cum_least.to(tl.float32) >= top_p * b_rest_most.to(tl.float32) + 2
        first = tl.sum((b_not & (o_bin < bin_k)).to(tl.int32), axis=0)
        last = tl.sum((~b_reached & (o_bin < bin_k)).to(tl.int32), axis=0)
        first, last = tl.where(top_p < 1, first, bin_k), tl.where(top_p < 1, last, bin_k)  # top_p 1: no filter
    return bin_k, first, last, want_k


@triton.jit(do_not_specialize=["run", "top_k"], do_not_specialize_on_alignment=["draw_ptr"])
def _sample_histogram_kernel(
    logits_ptr,  # [T, V]
    draw_ptr,  # [B, 4]: one set per run of rows
    peak_ptr,  # [T, S] fp32
    hist_ptr,  # [T, 2048] int32
    edge_ptr,  # [T, 4] int32: bin_k, first, last, want_k
    count_ptr,  # [T] int32: programs that have arrived
    temperature,
    top_k,
    top_p,
    run,  # rows per set of the draw's numbers
    V: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    DRAWN: tl.constexpr,
    PDL: tl.constexpr,
    ON_AMD: tl.constexpr,
):
    start_after_previous(PDL)
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_draw = draw_ptr + i_t // run * 4
    _, temperature, top_p = drawn(p_draw, 0, temperature, top_p, DRAWN)
    if DRAWN and TOP_K:
        k = tl.load(p_draw + 1)
        top_k = tl.where((k <= 0) | (k >= V) | (temperature == 0), _KEEP_ALL, k).to(tl.int32)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    b_z = _scaled(logits_ptr, temperature, i_t, i_s, V, BLOCK)
    b_below = tl.where(o_v < V, _below(b_z, _peak(peak_ptr, i_t, S, S_PAD)), float("inf"))
    # Ids masked out with -inf would all contend for one bin. They are never an edge: with fewer than k others, bin_k is
    # after the last bin.
    b_count = tl.histogram(_bin(b_below), _BINS, mask=b_below < float("inf"))
    if S > 1:
        p_bin = hist_ptr + i_t * _BINS + tl.arange(0, _BINS)
        tl.atomic_add(p_bin, b_count, mask=b_count > 0, sem="relaxed")
        if not is_last(count_ptr + i_t, S, ON_AMD):
            return
        b_count = tl.load(p_bin)
    bin_k, first, last, want_k = _edges(b_count, top_k, top_p, TOP_K, TOP_P)
    p_edge = edge_ptr + i_t * 4
    tl.store(p_edge, bin_k)
    tl.store(p_edge + 1, first)
    tl.store(p_edge + 2, last)
    tl.store(p_edge + 3, want_k)


@triton.jit
def _entries(p_list, i, n, FINISH: tl.constexpr):
    """Keys and ids of entries i..i + FINISH - 1 of a row's list; unspecified past its end."""
    o_list = i + tl.arange(0, FINISH)
    b_entry = tl.load(p_list + o_list, mask=o_list < n, other=0)
    return (b_entry >> 32).to(tl.int32), b_entry.to(tl.int32)


@triton.jit
def _listed(p_list, i, n, b_key, b_mass, peak, MASS: tl.constexpr, FINISH: tl.constexpr):
    """Keys and, with MASS, masses of entries i..i + FINISH - 1 of a row's list, and whether each exists. b_key and
    b_mass hold the first FINISH entries, usually all."""
    if i > 0:
        b_key = _entries(p_list, i, n, FINISH)[0]
        if MASS:
            b_mass = _mass(_below(_z(b_key), peak))
    return b_key, b_mass, i + tl.arange(0, FINISH) < n


@triton.jit
def _weight(p_list, n, b_key, b_mass, peak, low, high, MASS: tl.constexpr, FINISH: tl.constexpr):
    """The mass (MASS) or the number of the listed ids with keys in low..high."""
    total = tl.full([], 0, tl.int64)
    for i in tl.range(0, n, FINISH):
        b_k, b_m, m = _listed(p_list, i, n, b_key, b_mass, peak, MASS, FINISH)
        m = m & (b_k >= low) & (b_k <= high)
        if MASS:
            total += tl.sum(tl.where(m, b_m, 0), axis=0)
        else:
            total += tl.sum(m.to(tl.int32), axis=0)
    return total


@triton.jit
def _edge(p_list, n, b_key, b_mass, peak, first, last, least, want, MASS: tl.constexpr, FINISH: tl.constexpr):
    """Among the listed ids in bins first..last with keys of at least `least`: the largest key such that the ids with at
    least that key weigh at least `want`, and the largest key of all."""
    low, high = tl.full([], 2**31 - 1, tl.int32), tl.full([], _LEAST, tl.int32)
    for i in tl.range(0, n, FINISH):
        b_k, _, m = _listed(p_list, i, n, b_key, b_mass, peak, False, FINISH)
        b_bin = _bin(_below(_z(b_k), peak))
        m = m & (b_bin >= first) & (b_bin <= last) & (b_k >= least)
        low = tl.minimum(low, tl.min(tl.where(m, b_k, 2**31 - 1), axis=0))
        high = tl.maximum(high, tl.max(tl.where(m, b_k, _LEAST), axis=0))
    # No other listed key lies between, because bins and keys have the same order. 64 bits hold the sum of two keys.
    least_kept, most_kept = low.to(tl.int64), high.to(tl.int64)
    while least_kept < most_kept:
        middle = (least_kept + most_kept + 1) >> 1
        if _weight(p_list, n, b_key, b_mass, peak, middle, high, MASS, FINISH) >= want:
            least_kept = middle
        else:
            most_kept = middle - 1
    return least_kept.to(tl.int32), high


@triton.jit
def _least_key(
    p_list,
    n,
    b_key,
    b_mass,
    peak,
    p_edge,
    p_mass,
    top_p,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    FINISH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
):
    """The least key that a row's filters keep of its list."""
    bin_k, first, last, want_k = tl.load(p_edge), tl.load(p_edge + 1), tl.load(p_edge + 2), tl.load(p_edge + 3)
    least = tl.full([], _LEAST, tl.int32)
    in_bin_k = tl.full([], 0, tl.int64)  # the mass in bin_k that top_k keeps
    if TOP_K:
        edge, most = _edge(p_list, n, b_key, b_mass, peak, bin_k, bin_k, least, want_k, False, FINISH)
        least = tl.where(bin_k < _BINS, edge, least)
        if TOP_P:
            in_bin_k = _weight(p_list, n, b_key, b_mass, peak, least, most, True, FINISH)
    if TOP_P:  # noqa: SIM102 (the compiler's `and` of a constant and a number does not short-circuit)
        if top_p < 1:
            o_s = tl.arange(0, S_PAD)
            b_before = tl.load(p_mass + o_s * 2, mask=o_s < S, other=0)
            b_surely = tl.load(p_mass + o_s * 2 + 1, mask=o_s < S, other=0)
            want = _share(in_bin_k + tl.sum(b_surely, axis=0), top_p) - tl.sum(b_before, axis=0)
            least = _edge(p_list, n, b_key, b_mass, peak, first, last, least, want, True, FINISH)[0]
    return least


@triton.jit(do_not_specialize=["run", "seed"], do_not_specialize_on_alignment=["positions_ptr", "draw_ptr"])
def _sample_select_kernel(
    logits_ptr,  # [T, V]
    positions_ptr,  # [T]
    draw_ptr,  # [B, 4]: one set per run of rows
    peak_ptr,  # [T, S] fp32
    edge_ptr,  # [T, 4] int32
    value_ptr,  # [T, S] fp32
    id_ptr,  # [T, S] int32
    mass_ptr,  # [T, S, 2] int64: of the bins before first, and of those before bin_k
    list_ptr,  # [T, V] int64: key << 32 | id for ids that may be at an edge, in any order
    listed_ptr,  # [T] int32
    count_ptr,  # [T] int32: programs that have arrived
    out_ptr,  # [T] int64
    temperature,
    top_p,
    seed: tl.int64,
    run,  # rows per set of the draw's numbers
    V: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FINISH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    DRAWN: tl.constexpr,
    PDL: tl.constexpr,
    ON_AMD: tl.constexpr,
):
    start_after_previous(PDL)
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_draw = draw_ptr + i_t // run * 4
    _, temperature, top_p = drawn(p_draw, seed, temperature, top_p, DRAWN)
    p_edge = edge_ptr + i_t * 4
    bin_k, first, last = tl.load(p_edge), tl.load(p_edge + 1), tl.load(p_edge + 2)
    peak = _peak(peak_ptr, i_t, S, S_PAD)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    b_z = _scaled(logits_ptr, temperature, i_t, i_s, V, BLOCK)
    b_below = tl.where(o_v < V, _below(b_z, peak), float("inf"))
    # Comparing with a bin's start takes fewer registers than computing bins. It keeps -inf only in a row of -inf.
    m_kept = b_below < _start(first)
    if TOP_P:
        b_mass = _mass(b_below)
        p_mass = mass_ptr + (i_t * S + i_s) * 2
        tl.store(p_mass, tl.sum(tl.where(m_kept, b_mass, 0), axis=0))
        tl.store(p_mass + 1, tl.sum(tl.where(b_below < _start(bin_k), b_mass, 0), axis=0))
    best, i_best = float("-inf"), tl.full([], _NONE, tl.int32)
    if tl.sum(m_kept.to(tl.int32), axis=0) > 0:
        if DRAWN:
            seed = tl.load(p_draw)  # loaded late, to save registers
        b_perturbed = b_z
        if temperature != 0:
            b_perturbed += gumbel_run(i_s * BLOCK, tl.load(positions_ptr + i_t), seed, BLOCK)
        best, i_best = _best(b_perturbed, o_v, m_kept)
    tl.store(value_ptr + i_t * S + i_s, best)
    tl.store(id_ptr + i_t * S + i_s, i_best)
    m_listed = (b_below >= _start(bin_k)) & (b_below < _start(bin_k + 1))
    if TOP_P:
        m_listed = m_listed | ((b_below >= _start(first)) & (b_below < _start(last + 1)))
    listed = tl.sum(m_listed.to(tl.int32), axis=0)
    if listed > 0:
        place = tl.atomic_add(listed_ptr + i_t, listed, sem="relaxed")
        o_list = i_t * V + place + tl.cumsum(m_listed.to(tl.int32), axis=0) - 1
        tl.store(list_ptr + o_list, (_key(b_z).to(tl.int64) << 32) | o_v.to(tl.int64), mask=m_listed)
    if S > 1:
        if not is_last(count_ptr + i_t, S, ON_AMD):
            return
    else:
        tl.debug_barrier()

    p_list, n = list_ptr + i_t * V, tl.load(listed_ptr + i_t)
    b_key, b_id = _entries(p_list, 0, n, FINISH)
    b_mass = _mass(_below(_z(b_key), peak))
    p_mass = mass_ptr + i_t * S * 2
    least = _least_key(p_list, n, b_key, b_mass, peak, p_edge, p_mass, top_p, S, S_PAD, FINISH, TOP_K, TOP_P)
    o_s = tl.arange(0, S_PAD)
    b_v = tl.load(value_ptr + i_t * S + o_s, mask=o_s < S, other=float("-inf"))
    b_i = tl.load(id_ptr + i_t * S + o_s, mask=o_s < S, other=_NONE)
    best, i_best = _best(b_v, b_i, o_s < S)
    position = tl.load(positions_ptr + i_t)
    if DRAWN:
        seed = tl.load(p_draw)
    for i in tl.range(0, n, FINISH):
        if i > 0:
            b_key, b_id = _entries(p_list, i, n, FINISH)
        b_value = _z(b_key)
        if temperature != 0:
            b_value += gumbel_of(b_id, position, seed)
        value, i_value = _best(b_value, b_id, (i + tl.arange(0, FINISH) < n) & (b_key >= least))
        better = (value > best) | ((value == best) & (i_value < i_best))
        best, i_best = tl.where(better, value, best), tl.where(better, i_value, i_best)
    tl.store(out_ptr + i_t, tl.where(i_best == _NONE, 0, i_best).to(tl.int64))  # a row of NaN gives id 0


@lru_cache
def _sample_variants(
    dtype: torch.dtype, V: int, noise: bool, top_k: bool, top_p: bool, drawn: bool = False
) -> tuple[Variant, ...]:
    """The launches of a call: argmax and, for several splits, merge; with a filter: peak, histogram, select.

    histogram counts ids by bins of z, in shared memory. From a row's counts the last program to finish finds the few
    bins that may hold its edges. select takes the best of the ids above them, sums exact masses and lists the ids at
    the edges; its last program searches that list. The result does not depend on which program is last.

    A program holds one tile for any T: 16 logits per thread, two 16-byte loads of 2-byte logits. V 128,256 makes 32
    splits, so 8 rows are 256 programs, two per SM. The splits also share the work of Philox, which takes one SM 40 us
    per row. All architectures use the same tiles.
    """
    block = min(TILE, max(128, triton.next_power_of_2(V)))
    S = -(-V // block)
    t, warps, filters = TYPES[dtype], max(block // 512, 1), top_k or top_p
    row, pad = {"V": V, "S": S}, {"S_PAD": triton.next_power_of_2(S)}
    held = {"DRAWN": drawn}
    flags = {"TOP_K": top_k, "TOP_P": top_p, **held}
    # Besides 16-byte loads of logits there are two or three scalar ones; small and odd rows load narrowly.
    fixed = {"wide": block >= 1024 and V * dtype.itemsize % 16 == 0, "num_warps": warps}
    smoke = dtype == torch.bfloat16 and V == 128256
    name = f"{t} V{V}" + (" noise" if noise else "") + (" top-k" if top_k else "") + (" top-p" if top_p else "")
    name += " drawn" if drawn else ""
    if not filters:
        argmax = Variant(
            name,
            _sample_argmax_kernel,
            (f"*{t}", "*i64", "*i64", "*fp32", "*i32", "*i64", "fp32", "i64", "i32"),
            {**row, "BLOCK": block, "NOISE": noise, **held},
            smoke=smoke and noise,
            **fixed,
        )
        merge = Variant(
            name + " merge",
            _sample_merge_kernel,
            ("*fp32", "*i32", "*i64"),
            {"S": S, **pad},
            num_warps=1,
            wide=False,
        )
        return (argmax, merge) if S > 1 else (argmax,)
    peak = Variant(
        name + " peak",
        _sample_peak_kernel,
        (f"*{t}", "*i64", "*fp32", "*i32", "*i32", "fp32", "i32"),
        {**row, "BLOCK": block, "ZERO": triton.next_power_of_2(-(-BINS // S)), **held},
        **fixed,
    )
    histogram = Variant(
        name + " histogram",
        _sample_histogram_kernel,
        (f"*{t}", "*i64", "*fp32", "*i32", "*i32", "*i32", "fp32", "i32", "fp32", "i32"),
        {**row, **pad, "BLOCK": block, **flags},
        num_warps=8,  # for 2,048 bins, however small the tile is
        wide=fixed["wide"] and warps == 8,
        smoke=smoke and top_k and top_p,
    )
    select = Variant(
        name + " select",
        _sample_select_kernel,
        (f"*{t}", "*i64", "*i64", "*fp32", "*i32", "*fp32", "*i32", "*i64", "*i64", "*i32", "*i32", "*i64")
        + ("fp32", "fp32", "i64", "i32"),
        {**row, **pad, "BLOCK": block, "FINISH": min(FINISH, block), **flags},
        num_warps=warps,
        wide=False,  # the list's entries are read one by one
        # Two blocks per SM, except for unaligned rows: reading single elements makes the list's scan large.
        options={"maxnreg": 128 if fixed["wide"] else 255},
        smoke=smoke and top_k and top_p,
    )
    return peak, histogram, select


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any V and T."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for V in (128256, 32000, 8192, 151936, 262144):
        yield from _sample_variants(bf16, V, True, False, True)
    for dtype in (bf16, fp32):
        yield from _sample_variants(dtype, 128256, False, False, False)
        yield from _sample_variants(dtype, 128256, True, False, False)
        yield from _sample_variants(dtype, 128256, True, True, False)
        yield from _sample_variants(dtype, 128256, True, True, True)
    yield from _sample_variants(fp32, 128256, True, False, True)
    yield from _sample_variants(bf16, 50257, True, True, True)
    yield from _sample_variants(fp32, 128256, True, False, False, drawn=True)
    yield from _sample_variants(fp32, 128256, True, True, True, drawn=True)


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    return _launch(args, merged=True)


def _launch(args: Arguments, merged: bool) -> Any:
    """The tokens [T] int64, or `Splits` if not `merged` and a row has several parts."""
    logits, temperature, top_k, top_p, seed, positions, draw = args
    logits, positions = logits.contiguous(), positions.contiguous()
    T, V = logits.shape
    out = positions.new_empty(T)
    if T == 0:
        return out
    temperature, top_p = float(temperature), float(top_p)  # they may be numpy's numbers
    noise = temperature != 0
    held = noise and draw is not None
    by_k, by_p = noise and top_k > 0 and (top_k < V or held), noise and top_p < 1  # memory may hold any top_k
    launches = _sample_variants(logits.dtype, V, noise, by_k, by_p, drawn=held)
    numbers = draw.contiguous() if held and draw is not None else positions  # not read unless held
    run = check_draw(draw, T)
    S = launches[0].constexprs["S"]
    scale, key = temperature if noise else 1.0, signed(seed)
    value = logits.new_empty((T, S), dtype=torch.float32)
    ids = logits.new_empty((T, S), dtype=torch.int32)
    if not (by_k or by_p):
        launches[0]((T, S), logits, positions, numbers, value, ids, out, scale, key, run)
        if S > 1 and not merged:
            return Splits(value, ids)
        if S > 1:
            launches[1]((T,), value, ids, out)
        return out
    peak, histogram, select = launches
    peaks = torch.empty_like(value)
    hist, edges = ids.new_empty(T, BINS), ids.new_empty(T, 4)
    masses, entries, listed = positions.new_empty(T, S, 2), positions.new_empty(T, V), ids.new_empty(T)
    count = counters(logits.device, T)
    peak((T, S), logits, numbers, peaks, hist, listed, scale, run)
    k = top_k if by_k else 0
    histogram((T, S), logits, numbers, peaks, hist, edges, count, scale, k, top_p, run)
    rows = logits, positions, numbers, peaks, edges, value, ids, masses, entries, listed, count, out
    select((T, S), *rows, scale, top_p, key, run)
    return out


def _check(args: Arguments) -> None:
    logits, temperature, top_k, top_p, seed, positions, draw = args
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point() or logits.dtype.itemsize == 1:
        raise ValueError(f"logits must be [T, V >= 1] floating point, got {tuple(logits.shape)} {logits.dtype}")
    if positions.shape != logits.shape[:1] or positions.dtype != torch.int64:
        raise ValueError(f"positions must be [{logits.shape[0]}] int64, got {tuple(positions.shape)} {positions.dtype}")
    same_device(logits, positions=positions, draw=draw)
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"temperature must be 0 or in [{MIN_TEMPERATURE}, inf), got {temperature}")
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k must be an integer >= 0 (0 keeps every token), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    check_seed(seed)
    check_draw(draw, logits.shape[0])


class Flat(Arguments):
    """The arguments of the registered op: a schema's integers are signed."""

    @staticmethod
    def of(args: Arguments) -> tuple[Any, ...]:
        return *args[:4], signed(check_seed(args.seed)), *args[5:]

    def nested(self) -> Arguments:
        return Arguments(*self[:4], self.seed % (1 << 64), *self[5:])


_sample_rows = register(
    sample_rows,
    Arguments,
    check=_check,
    reference=_sample_runs,
    launch=launch,
    fake=lambda args: args.positions.new_empty(args.positions.shape),
    flat=Flat,
)
