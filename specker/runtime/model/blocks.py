"""GGUF's block formats as `Quantized` matrices (kernels/quant.py), without rounding.

| GGUF | bits | here | bits |
|---|---|---|---|
| Q8_0 | 8.5 | int8, groups of 32, float16 scales | 8.5 |
| Q4_0 | 4.5 | int4, groups of 32, float16 scales | 4.5 |
| Q4_1 | 5 | int4, groups of 32, float16 scales and shifts | 5 |
| Q4_K | 4.5 | int4, groups of 32, float32 scales and shifts | 6 |
| Q6_K | 6.6 | int8, groups of 16, float32 scales | 10 |

The K formats multiply a block's float16 by a small integer of each group; the product needs float32. Source: the
structs and the dequantisation of ggml (ggml-common.h, ggml-quants.c).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specker.kernels.quant import Quantized, packed

SUPER = 256  # weights in a block of the K formats


def _halves(x: Tensor) -> Tensor:
    """Bytes [.., 2 n] -> float16 [.., n]."""
    return x.contiguous().view(torch.float16)


def _q8_0(blocks: Tensor) -> Quantized:
    """float16 d, 32 int8 q: w = d q."""
    return Quantized(
        blocks[..., 2:].contiguous().view(torch.int8).flatten(-2), _halves(blocks[..., :2]).flatten(-2), None
    )


def _q4_0(blocks: Tensor) -> Quantized:
    """float16 d, 32 four-bit q: w = d (q - 8)."""
    return Quantized(blocks[..., 2:].flatten(-2), _halves(blocks[..., :2]).flatten(-2), None)


def _q4_1(blocks: Tensor) -> Quantized:
    """float16 d and m, 32 four-bit q: w = d q + m."""
    scale, shift = (_halves(blocks[..., i : i + 2]).flatten(-2) for i in (0, 2))
    return Quantized(blocks[..., 4:].flatten(-2), scale, shift)


def _q4_k(blocks: Tensor) -> Quantized:
    """float16 d and m, 12 bytes with 8 six-bit s and 8 six-bit t, 256 four-bit q: w = d s q - m t in each 32. Of each
    64 weights the low four bits of 32 bytes hold the first 32 and the high four the others."""
    d, m = (_halves(blocks[..., i : i + 2]).float() for i in (0, 2))
    a, b, c = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), -1)
    t = torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), -1)
    both = blocks[..., 16:].unflatten(-1, (-1, 32))
    q = torch.stack((both & 15, both >> 4), -2).flatten(-3)
    return Quantized(packed(q.flatten(-2)), (d * s).flatten(-2), (m * t).neg_().flatten(-2))


def _q6_k(blocks: Tensor) -> Quantized:
    """128 bytes with the low four bits of q and 64 with the high two, 16 int8 s, float16 d: w = d s (q - 32) in each
    16. Of each 128 weights, 64 bytes hold 64 low and 64 high halves, and 32 bytes two bits of four weights."""
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
    fours = torch.stack((low & 15, low >> 4), -2).flatten(-2)
    twos = torch.stack([(high >> i) & 3 for i in (0, 2, 4, 6)], -2).flatten(-2)
    q = (fours | twos << 4).to(torch.int8) - 32
    s, d = blocks[..., 192:208].contiguous().view(torch.int8), _halves(blocks[..., 208:]).float()
    return Quantized(q.flatten(-3), (d * s).flatten(-2), None)


READERS: dict[str, tuple[int, int, Callable[[Tensor], Quantized]]] = {  # weights and bytes of a block, its reader
    "Q8_0": (32, 34, _q8_0),
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q4_K": (SUPER, 144, _q4_k),
    "Q6_K": (SUPER, 210, _q6_k),
}


def read(kind: str, data: Tensor) -> Quantized:
    """The matrix [O, E] whose rows are blocks of `kind`, a key of READERS: data [O, bytes of a row] uint8."""
    _, size, reader = READERS[kind]
    return reader(data.unflatten(-1, (-1, size)))
