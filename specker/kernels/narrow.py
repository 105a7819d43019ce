"""narrow: K and V in eight bits, in the ops that write and read a cache.

    k = k8 * k_scale[g, h],  v = v8 * v_scale[g, h]      of KV head h in layer g of the call

k8 is int8, or fp8 (e4m3: sign, four bits of exponent with bias 7, three of mantissa; 448 is the largest). The writer
rounds a head to the dtype of the activations, as a plain cache would hold it, divides by the scale, and rounds to the
nearest, ties to even; larger values become the largest. The reader multiplies scores and sums with the scale: k8 and v8
themselves are exact in bfloat16 and float16. The scales are the caller's, as in vLLM's `k_scale` and `v_scale`: the
largest |k| of a head over 448 or 127 uses the whole range.

Kernels take fp8 as bytes and convert in integers, so it serves on every device; e4m3's own instructions need sm_89.
"""

import torch
from torch import Tensor

from specker.kernels.quant import KINDS, LARGEST
from specker.kernels.variant import same_device, tl, triton

NARROW = {KINDS[kind]: kind for kind in LARGEST}  # the dtype of a cache: KV of the kernels


def kind_of(cache: Tensor) -> str:
    """The KV constexpr of a kernel that reads or writes `cache`."""
    return NARROW.get(cache.dtype, "plain")


def cache_types(dtype: str, kind: str) -> tuple[str | None, ...]:
    """The Triton types of K, V and their scales in caches of `kind`, beside activations of type `dtype`."""
    return (f"*{dtype}", f"*{dtype}", None, None) if kind == "plain" else ("*i8", "*i8", "*fp32", "*fp32")


def named(kind: str) -> str:
    """What a variant's name says of its caches."""
    return "" if kind == "plain" else f" {kind} cache"


def narrowed(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows x [T, Hkv, D] in G equal runs, scale [G, Hkv] float32 -> [T, Hkv, D] of `dtype`, int8 or float8_e4m3fn."""
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = x.to(wide).unflatten(0, (len(scale), -1)) / scale[:, None, :, None]
    most = LARGEST[NARROW[dtype]]
    numbers = numbers.flatten(0, 1).clamp_(-most, most)
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype)


def check_cache(x: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise ValueError unless the caches have x's dtype, or eight bits and scales [G, Hkv] of one shape."""
    own = x.is_floating_point() and k_cache.dtype in (x.dtype, *NARROW)
    if k_cache.dtype != v_cache.dtype or not own:
        raise ValueError(
            "the caches must both have the floating dtype of the input, int8 or float8_e4m3fn: "
            f"{k_cache.dtype}, {v_cache.dtype}, {x.dtype}"
        )
    narrow = k_cache.dtype in NARROW
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != narrow:
            raise ValueError(
                f"{name} belongs to a cache in eight bits, got {k_cache.dtype} {'without' if narrow else 'with'} it"
            )
        if scale is not None and (scale.dim() != 2 or scale.shape[1] != k_cache.shape[-2] or not len(scale)):
            raise ValueError(f"{name} must be [G, {k_cache.shape[-2]}], got {tuple(scale.shape)}")
        if scale is not None and (scale.dtype != torch.float32 or not scale.is_contiguous()):
            raise ValueError(f"{name} must be contiguous float32, got {scale.dtype} with strides {scale.stride()}")
    if k_scale is not None and v_scale is not None and k_scale.shape != v_scale.shape:
        raise ValueError(f"k_scale and v_scale must have one shape, got {tuple(k_scale.shape)}, {tuple(v_scale.shape)}")
    same_device(x, k_scale=k_scale, v_scale=v_scale)


@triton.jit
def widen(b, dtype: tl.constexpr, KV: tl.constexpr):
    """A tile of a cache as numbers of dtype, without their scale. Bits are moved to their places in a number of 16 bits
    as in `fp8_of`. An int8 plus 128 becomes the last bits of 1024 in float16, because instructions that convert
    integers run at a quarter of the others' rate."""
    if KV == "fp8":
        if dtype == tl.bfloat16:
            b = ((b.to(tl.int16) << 4) & -0x7810).to(dtype, bitcast=True) * tl.full([], 2.0**120, dtype)
        elif dtype == tl.float16:
            b = ((b.to(tl.int16) << 7) & -0x4080).to(dtype, bitcast=True) * tl.full([], 256.0, dtype)
        else:
            b = fp8_of(b).to(dtype)
    elif KV == "int8":
        if dtype == tl.float16:
            b_bits = ((b.to(tl.int16) & 0xFF) ^ 0x80) | 0x6400
            b = b_bits.to(dtype, bitcast=True) - tl.full([], 1152.0, dtype)
        else:
            b = b.to(tl.float32).to(dtype)
    return b


@triton.jit
def fp8_of(b):
    """e4m3 in int8 -> float32. Its bits, moved to their places in a float32, give the number times 2^-120, also for
    subnormal numbers."""
    return ((b.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def narrow(b, b_scale, KV: tl.constexpr):
    """float32 numbers over their scale -> int8, or the bits of e4m3 in int8."""
    b = tl.div_rn(b, b_scale)
    if KV == "int8":
        b = tl.minimum(tl.maximum(b, -127.0), 127.0)
        b_bits = (b + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2^23, whose last bit is 1
    else:
        sign = (b.to(tl.int32, bitcast=True) >> 24) & 0x80
        b = tl.minimum(tl.abs(b), 448.0)
        i = b.to(tl.int32, bitcast=True)
        b_small = (b + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2^-9, the last bit of 2^14
        b_bits = tl.where(b < 0.015625, b_small, ((i + 0x7FFFF + ((i >> 20) & 1)) >> 20) - 960) | sign
    return b_bits.to(tl.int8)
