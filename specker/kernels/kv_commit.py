"""kv_commit: move rows of every layer's K and V in place."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.quant import as_bytes
from specker.kernels.registry import register, takes
from specker.kernels.variant import (
    TYPES,
    Variant,
    check_contiguous,
    check_within,
    same_device,
    start_after_previous,
    tl,
    triton,
)


def kv_commit(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Move rows of every layer's K and V in place, for example an accepted path to the end of the text.

        cache[l, dst[i]] = cache[l, src[i]] for every layer l and move i, as if all were read before any is written

    Slots src and dst may overlap; equal dst must have equal src. Memory moves each row once in and once out.

    Args:
        k_cache: [L, pages, page_size, Hkv, D], of any floating-point dtype or int8.
        v_cache: as k_cache.
        src: [M] int64 slots of one layer, page * page_size + offset.
        dst: [M] int64.

    Returns:
        Nothing; the caches are written.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes, devices or layouts; on a CPU also slots beyond the caches.

    Source: the commit of a verified path, as in SpecInfer, arXiv 2305.09781.

    Examples:
        >>> import torch
        >>> from specker.kernels import kv_commit
        >>> keys = torch.arange(4.0).view(1, 1, 4, 1, 1).clone()  # slot s holds s
        >>> kv_commit(keys, keys.clone(), torch.tensor([2, 3]), torch.tensor([1, 2]))
        >>> keys.flatten().tolist()
        [0.0, 2.0, 3.0, 3.0]
    """
    _kv_commit(k_cache, v_cache, src, dst)


class Arguments(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    src: Tensor
    dst: Tensor


@takes(Arguments)
def kv_commit_ref(args: Arguments) -> None:
    for cache in (args.k_cache, args.v_cache):
        rows = as_bytes(cache).view(cache.shape[0], -1, *cache.shape[3:])
        rows.index_copy_(1, args.dst, rows.index_select(1, args.src))


@takes(Arguments)
def kv_commit_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) of one call."""
    L, _, _, Hkv, D = args.k_cache.shape
    return 4 * L * args.src.shape[0] * Hkv * D * args.k_cache.element_size(), 0


MAX_COMMIT = 256  # most rows of a window; the reference serves longer moves, and also reads all rows before it writes


@triton.jit(
    do_not_specialize=["M", "slots"],
    do_not_specialize_on_alignment=["src_ptr", "dst_ptr"],
)
def _kv_commit_kernel(
    k_cache_ptr,  # [L, slots, ROW]
    v_cache_ptr,  # [L, slots, ROW]
    src_ptr,  # [M]
    dst_ptr,  # [M]
    M,
    slots,
    ROW: tl.constexpr,  # Hkv * D
    BM: tl.constexpr,  # M rounded up to a bucket
    BC: tl.constexpr,  # columns per program
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_layer = tl.program_id(1).to(tl.int64)
    o_m, o_c = tl.arange(0, BM), tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    m_m = o_m < M
    m = m_m[:, None] & (o_c < ROW)
    first = i_layer * slots.to(tl.int64)
    o_src = (first + tl.load(src_ptr + o_m, mask=m_m, other=0).to(tl.int64))[:, None] * ROW + o_c
    o_dst = (first + tl.load(dst_ptr + o_m, mask=m_m, other=0).to(tl.int64))[:, None] * ROW + o_c
    b_k = tl.load(k_cache_ptr + o_src, mask=m)
    b_v = tl.load(v_cache_ptr + o_src, mask=m)
    tl.debug_barrier()  # a row may be another's destination, so read all before writing any
    tl.store(k_cache_ptr + o_dst, b_k, mask=m)
    tl.store(v_cache_ptr + o_dst, b_v, mask=m)


@lru_cache
def _variant(dtype: torch.dtype, ROW: int, BM: int) -> Variant:
    """A program owns some columns of all moved rows of one layer, K and V, so no other program reads what it
    overwrites. It holds 4 KiB each of K and V, or 8 x 16 bytes of each row if many rows move. For 16 rows and 32 layers
    of Hkv 8, D 128 that is 256 programs, all resident at once, each with one round trip to memory."""
    t = TYPES[dtype]
    BC = min(max(4096 // (BM * dtype.itemsize), 128 // dtype.itemsize), triton.next_power_of_2(ROW))
    return Variant(
        name=f"{t} row {ROW} M{BM}",
        kernel=_kv_commit_kernel,
        arguments=(f"*{t}", f"*{t}", "*i64", "*i64", "i32", "i32"),
        constexprs={"ROW": ROW, "BM": BM, "BC": BC},
        num_warps=4 if BM < MAX_COMMIT else 16,
        wide=ROW * dtype.itemsize % 16 == 0,
        smoke=dtype == torch.bfloat16 and ROW == 1024 and BM == 16,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any shapes."""
    for BM in (16, 64, 256):
        yield _variant(torch.bfloat16, 1024, BM)
    yield _variant(torch.bfloat16, 96, 16)
    yield _variant(torch.float32, 1024, 16)
    yield _variant(torch.int8, 1024, 16)


@takes(Arguments)
def launch(args: Arguments) -> None:
    L, pages, page_size, Hkv, D = args.k_cache.shape
    if M := args.src.shape[0]:
        bucket = next(b for b in (16, 64, MAX_COMMIT) if b >= M)
        k, v = as_bytes(args.k_cache), as_bytes(args.v_cache)
        variant = _variant(k.dtype, Hkv * D, bucket)
        grid = (-(-Hkv * D // variant.constexprs["BC"]), L)
        variant(grid, k, v, args.src.contiguous(), args.dst.contiguous(), M, pages * page_size)


def _check(args: Arguments) -> None:
    k_cache, v_cache, src, dst = args
    if k_cache.shape != v_cache.shape or k_cache.dim() != 5:
        raise ValueError(f"caches must be [L, pages, page, Hkv, D], got {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    if src.shape != dst.shape or src.dim() != 1 or not src.dtype == dst.dtype == torch.int64:
        raise ValueError(
            f"src and dst must be [M] int64, got {tuple(src.shape)} {src.dtype} and {tuple(dst.shape)} {dst.dtype}"
        )
    check_contiguous(k_cache, v_cache)
    same_device(k_cache, v_cache=v_cache, src=src, dst=dst)


def _check_slots(args: Arguments) -> None:
    for name, slots in (("src", args.src), ("dst", args.dst)):
        check_within(name, slots, args.k_cache.shape[1] * args.k_cache.shape[2])


_kv_commit = register(
    kv_commit,
    Arguments,
    check=_check,
    reference=kv_commit_ref,
    launch=launch,
    fake=lambda args: None,
    fits=lambda args: args.src.shape[0] <= MAX_COMMIT,
    mutates=("k_cache", "v_cache"),
    check_values=_check_slots,
)
