"""noise: Gumbel noise that is a pure function of (seed, position, token id).

Contract. The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), as in Triton's `tl.philox`:

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (id // 4, position & 0xffffffff, position >> 32, STREAM)
    x       = philox(counter, key)[id % 4]                 32 bits
    u       = min((x + 0.5) * 2^-32, 1 - 2^-24)            fp32, from 2^-33
    g       = -log(-log1p(-u))                             fp32, in [-2.82, 22.88]

An id's noise does not depend on the size of the vocabulary, nor on the other positions in the call or their order. The
largest g win, and come from the smallest u. There x + 0.5 is exact in fp32 (x < 2^23) and log1p keeps the relative
precision. The tail is discrete: u has a spacing of 2^-32, so g has steps of 5e-6 at 10 and 0.1 at 20, and its topmost
values are 22.87, 21.78, 21.26. Probabilities are right to about 2^-32; a token 25.7 nats below another never wins.

The integers are the same on every machine; the two logarithms are the platform's own. Traffic: the noise, written once;
none in a kernel that computes it where it is used.

`gumbel_of` and `gumbel_run` are device functions for kernels that add noise to logits they hold. Their integers and u
are the same to the bit. Both logarithms are polynomials in FMAs (`_log_near`): near 1 the hardware's logarithm has an
absolute error of 2^-22, but log1p must keep the relative precision there. Errors against float64, over the whole range
of u: log1p(-u) 2e-7, relative; g 2.5e-7, relative, or absolute where |g| < 1 (torch on a CPU: 1.2e-7). The compiled CPU
form (specker/cpu) uses the same polynomials.
"""

import math
import operator
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.kernels.cpu import native
from specker.kernels.variant import Variant, start_after_previous, tl, triton

STREAM = 0x73706563  # the fourth counter word, "spec": distinct from any other use of Philox under the same seed
MASK = 0xFFFFFFFF
U_MAX = 1 - 2.0**-24  # the largest fp32 below 1

MIN_TEMPERATURE = 1e-6  # a smaller one could overflow logits / temperature; this one is greedy in effect
MOST_IDS = 1 << 20  # the noise of larger ids is computed for them alone, not for all ids up to them
BLOCK_ELEMENTS = 1 << 17  # 512 KiB of noise at a time
TILE = 1 << 13  # counters at a time: 64 KiB of scratch per array stays in cache, and malloc maps no new pages
CACHED_BLOCKS = 64  # 32 MiB of noise; 1024 positions of a vocabulary of 8192
CACHED_ROWS = 256  # a call with more positions is not a decoding step and bypasses the cache


def gumbel(seed: int, positions: Tensor, vocab_size: int) -> Tensor:
    """positions [T] int64 -> standard Gumbel noise [T, V] fp32 on their device. Read-only: it may be a view of a cache.

    seed is any integer in [0, 2^64). Raises ValueError or TypeError on anything else.
    """
    seed = _check(seed, positions, vocab_size)
    if positions.is_cuda:
        return gumbel_ref(seed, positions, vocab_size)
    wanted: list[int] = positions.tolist()
    padded = _padded(vocab_size)
    if len(wanted) > CACHED_ROWS:
        return _rows(seed, positions.numpy(), padded)[:, :vocab_size]
    size = _block_rows(padded)
    slices = []
    i = 0
    while i < len(wanted):  # one slice for each run of consecutive positions within a block
        block, row = divmod(wanted[i], size)
        n = 1
        while i + n < len(wanted) and row + n < size and wanted[i + n] == wanted[i] + n:
            n += 1
        slices.append(_block(seed, block, padded)[row : row + n, :vocab_size])
        i += n
    if len(slices) == 1:
        return slices[0]
    return torch.cat(slices) if slices else torch.empty(0, vocab_size, dtype=torch.float32, device=positions.device)


def gumbel_at(seed: int | Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The noise of a few ids at each position: positions [T], ids [T, K], both int64 -> [T, K] fp32. seed: also [T, 1]
    int64, the bits of each position's own (`pack_draw`), without a host read.

    Raises as `gumbel` does."""
    if isinstance(seed, Tensor):
        return launch_at(seed, positions, ids) if ids.is_cuda else _gumbel_at(seed, positions, ids)
    seed = _check(seed, positions, 1)
    if positions.is_cuda or not ids.numel() or (most := int(ids.max())) >= MOST_IDS:
        return _gumbel_at(seed, positions, ids)
    return gumbel(seed, positions, most + 1).gather(1, ids)


def gumbel_ref(seed: int, positions: Tensor, vocab_size: int) -> Tensor:
    """`gumbel` without the cache, on any device, without a host read. Equal up to the logarithms' last bits."""
    return _gumbel_at(seed, positions, torch.arange(vocab_size, dtype=torch.int64, device=positions.device))


def add_gumbel_(z: Tensor, seed: int, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Add noise to z [T, K] in place. Column c gets the noise of token c, or of token_ids[c], whatever K is."""
    if token_ids is None:
        return z.add_(gumbel(seed, positions, z.shape[1]))
    if z.is_cuda or not token_ids.numel() or (most := int(token_ids.max())) >= MOST_IDS:
        return z.add_(_gumbel_at(_check(seed, positions, 1), positions, token_ids))
    return z.add_(gumbel(seed, positions, most + 1).index_select(1, token_ids))


def pack_draw(seed: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """A draw's parameters for kernels that read them from memory, [4] int64 on the CPU: seed, top_k, and the float64
    bits of temperature and top_p. A CUDA graph holds only the address, so a new request needs no new graph. Stack the
    numbers of several sequences to [B, 4]."""
    numbers = struct.unpack("4q", struct.pack("Qqdd", check_seed(seed), top_k, temperature, top_p))
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def unpack_draw(draw: Tensor) -> tuple[int, float, int, float]:
    """(seed, temperature, top_k, top_p) of one sequence's `pack_draw`; reads them on the host. Raises ValueError for
    others."""
    seed, top_k, temperature, top_p = struct.unpack("Qqdd", struct.pack("4q", *draw.tolist()))
    if temperature != 0 and not (MIN_TEMPERATURE <= temperature < math.inf and top_k >= 0 and 0 < top_p <= 1):
        raise ValueError(
            f"draw must hold a temperature of 0 or in [{MIN_TEMPERATURE}, inf), a top_k of at least 0 and a top_p in "
            f"(0, 1], from pack_draw; got {temperature}, {top_k}, {top_p}"
        )
    return seed, temperature, top_k, top_p


def check_draw(draw: Tensor | None, rows: int) -> int:
    """How many rows share one set of the draw's numbers: `rows` for [4] or None, rows / B for [B, 4]. Raises ValueError
    on other shapes and dtypes."""
    if draw is None:
        return max(rows, 1)
    if draw.dtype != torch.int64 or not 1 <= draw.dim() <= 2 or draw.shape[-1] != 4 or not draw.numel():
        raise ValueError(f"draw must be [4] or [B, 4] int64, from pack_draw; got {tuple(draw.shape)} {draw.dtype}")
    sets = draw.shape[0] if draw.dim() == 2 else 1
    if rows % sets:
        raise ValueError(f"{rows} rows cannot be shared evenly by the {sets} sets of numbers of draw")
    return max(rows // sets, 1)


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox on broadcastable counter words held in 64-bit lanes: numpy uint64 or torch int64. `seed`: an
    integer, or broadcastable too.

    Words that depend only on the id or only on the position are not broadcast in the first rounds.
    """
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        # c1 and c3 carry garbage above bit 31; the masks on c0 and c2 remove it before the next product.
        c0 = (b >> 32) ^ c1
        c0 ^= k0
        c0 &= MASK
        c2 = (a >> 32) ^ c3
        c2 ^= k1
        c2 &= MASK
        c1, c3 = b, a
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def _counter(blocks: Any, positions: Any) -> tuple[Any, Any, Any, Any]:
    """Counter words for id // 4 = blocks [n] or [T, n] at positions [T], as [1, n] or [T, n], and [T, 1]."""
    p = positions[:, None]
    return blocks if blocks.ndim == 2 else blocks[None], p & MASK, (p >> 32) & MASK, p * 0 + STREAM


def _gumbel_at(seed: int | Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Noise [T, K] of any ids, [K] or [T, K]; computes four words for each."""
    ids = ids.long()
    words = torch.stack(philox4x32(*_counter(ids >> 2, positions), seed))  # [4, T, K]
    lane = (ids & 3).expand(1, positions.shape[0], -1)
    return _from_bits(words.gather(0, lane)[0].float())


def _from_bits(x: Tensor) -> Tensor:
    """32-bit integers, rounded to fp32, -> Gumbel noise, in place."""
    minus_u = x.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-U_MAX)
    return minus_u.log1p_().neg_().log_().neg_()


def _rows(seed: int, positions: Any, padded: int) -> Tensor:
    """Noise [T, padded] of a numpy array of positions. Without compiled kernels numpy computes it: it multiplies 64-bit
    integers twice as fast as torch."""
    if (kernels := native()) is not None:
        return kernels.gumbel(seed, torch.from_numpy(positions.astype(np.int64)), padded)
    out: Any = np.empty((len(positions), padded // 4, 4), np.float32)
    positions = positions.astype(np.uint64)
    blocks: Any = np.arange(padded // 4, dtype=np.uint64)
    rows = max(1, TILE // len(blocks))
    for i in range(0, len(positions), rows):
        for j in range(0, len(blocks), TILE):
            words = philox4x32(*_counter(blocks[j : j + TILE], positions[i : i + rows]), seed)
            for lane, word in enumerate(words):
                out[i : i + rows, j : j + TILE, lane] = word
    return _from_bits(torch.from_numpy(out).view(len(positions), padded))


@lru_cache(CACHED_BLOCKS)
def _block(seed: int, block: int, padded: int) -> Tensor:
    """Noise of one aligned block of positions, [rows, padded]; cached, since drafter and target need the same ones."""
    size = _block_rows(padded)
    with torch.inference_mode(False):  # the cache outlives the caller's mode
        first = np.uint64(block * size % (1 << 64))  # the last block ends at 2^63, which is no int64
        return _rows(seed, first + np.arange(size, dtype=np.uint64), padded)


def _block_rows(padded: int) -> int:
    return min(16, max(1, BLOCK_ELEMENTS // padded))


def _padded(vocab_size: int) -> int:
    """Round up to a power of two, or beyond 8192 to a multiple of it, so that a trimmed head uses the full head's
    blocks."""
    return max(4, 1 << (vocab_size - 1).bit_length()) if vocab_size <= 8192 else -(-vocab_size // 8192) * 8192


_STREAM = tl.constexpr(STREAM)
_U_MAX = tl.constexpr(U_MAX)


@triton.jit
def drawn(draw_ptr, seed, temperature, top_p, DRAWN: tl.constexpr):
    """(seed, temperature, top_p): the arguments, or with DRAWN the numbers at draw_ptr (`pack_draw`), which may be one
    pointer or a tensor of them. At temperature 0 there is no noise and no filter: top_p is 1."""
    if DRAWN:
        seed = tl.load(draw_ptr)
        temperature = tl.load(draw_ptr + 2).to(tl.float64, bitcast=True).to(tl.float32)
        top_p = tl.load(draw_ptr + 3).to(tl.float64, bitcast=True).to(tl.float32)
        top_p = tl.where(temperature == 0, 1.0, top_p)
    return seed, temperature, top_p


@triton.jit
def gumbel_of(
    ids,  # token ids, int32 or int64, of any shape
    position,  # int64, broadcast with ids
    seed,  # int64: the 64 bits of the seed
):
    """The noise of each id, fp32. Runs one Philox per id, so ids may come in any order."""
    x0, x1, x2, x3 = _philox(ids >> 2, position, seed)
    lane = ids & 3
    return _gumbel_from(tl.where(lane < 2, tl.where(lane == 0, x0, x1), tl.where(lane == 2, x2, x3)))


@triton.jit(
    do_not_specialize=["K", "seed_stride"], do_not_specialize_on_alignment=["ids_ptr", "seed_ptr", "positions_ptr"]
)
def _gumbel_at_kernel(
    ids_ptr,  # [T, K]
    positions_ptr,  # [T]
    seed_ptr,  # [T]
    out_ptr,  # [T, K]
    K,
    seed_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < K
    b_ids = tl.load(ids_ptr + i_t * K + o, mask=m, other=0)
    b_noise = gumbel_of(b_ids, tl.load(positions_ptr + i_t), tl.load(seed_ptr + i_t * seed_stride))
    tl.store(out_ptr + i_t * K + o, b_noise, mask=m)


@lru_cache
def _at_variant() -> Variant:
    """A row's candidates are few: one warp."""
    return Variant(
        name="at",
        kernel=_gumbel_at_kernel,
        arguments=("*i64", "*i64", "*i64", "*fp32", "i32", "i32"),
        constexprs={"BLOCK": 32},
        num_warps=1,
        wide=False,
        smoke=True,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variant that the compile-only checks compile for sm_`arch`."""
    yield _at_variant()


def launch_at(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """`gumbel_at` in one launch: seed [T, 1], positions [T] and ids [T, K], all int64."""
    (T, K), variant = ids.shape, _at_variant()
    out = torch.empty((T, K), dtype=torch.float32, device=ids.device)
    if out.numel():
        grid = T, -(-K // variant.constexprs["BLOCK"])
        variant(grid, ids.contiguous(), positions.contiguous(), seed, out, K, seed.stride(0))
    return out


@triton.jit
def gumbel_run(
    first,  # a multiple of 4
    position,  # int64 scalar
    seed,  # int64: the 64 bits of the seed
    N: tl.constexpr,  # a power of two, at least 4
):
    """The noise of ids first..first + N - 1, fp32 [N]. Runs one Philox per four ids."""
    x0, x1, x2, x3 = _philox((first >> 2) + tl.arange(0, N // 4), position, seed)
    return _gumbel_from(tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3)))


@triton.jit
def _philox(block, position, seed):
    """The four words of each block of four ids. A scalar position stays a scalar for the first rounds."""
    p = tl.cast(position, tl.int64)
    stream = tl.full([], _STREAM, tl.uint32)
    return tl.philox(tl.cast(seed, tl.int64), block.to(tl.uint32), p.to(tl.uint32), (p >> 32).to(tl.uint32), stream)


@triton.jit
def _gumbel_from(x):
    """32-bit words -> noise."""
    u = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _U_MAX)  # 2^-32
    return -_log(-_log1m(u))


@triton.jit
def _log1m(u):
    """log(1 - u) for 2^-33 <= u < 1. For 1 - u near 1 the series uses -u itself, since rounding 1 - u loses bits."""
    v = 1.0 - u
    m, e = _parts(v)
    return _log_near(tl.where(e == 0, -u, m), e)


@triton.jit
def _log(x):
    """The natural logarithm of a normal x > 0, to about one ulp."""
    m, e = _parts(x)
    return _log_near(m, e)


@triton.jit
def _parts(x):
    """x = 2^e (1 + m) with 1 + m in [sqrt(1/2), sqrt(2)); e as a float."""
    i = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # sqrt(1/2)
    e = i >> 23
    m = ((i & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    return m, e.to(tl.float32)


@triton.jit
def _log_near(m, e):
    """log(2^e (1 + m)) by the minimax polynomial of Cephes' logf. ln 2 is in two parts; e times the first is exact."""
    y = tl.fma(m, 7.0376836292e-2, -1.1514610310e-1)
    y = tl.fma(y, m, 1.1676998740e-1)
    y = tl.fma(y, m, -1.2420140846e-1)
    y = tl.fma(y, m, 1.4249322787e-1)
    y = tl.fma(y, m, -1.6668057665e-1)
    y = tl.fma(y, m, 2.0000714765e-1)
    y = tl.fma(y, m, -2.4999993993e-1)
    y = tl.fma(y, m, 3.3333331174e-1)
    square = m * m
    y = tl.fma(e, -2.12194440e-4, y * m * square)
    y = tl.fma(square, -0.5, y)
    return tl.fma(e, 0.693359375, m + y)


def check_seed(seed: int) -> int:
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, got {type(seed).__name__}") from None
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return seed


def signed(seed: int) -> int:
    """The int64 with the bits of a seed in [0, 2^64), which may be one of numpy's integers."""
    seed = operator.index(seed)
    return seed - (seed >> 63 << 64)


def _check(seed: int, positions: Tensor, vocab_size: int) -> int:
    if positions.dim() != 1 or positions.dtype != torch.int64:
        raise ValueError(f"positions must be [T] int64, got {tuple(positions.shape)} {positions.dtype}")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    return check_seed(seed)
