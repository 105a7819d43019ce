"""GGUF's block formats as packed matrices (cpu/packed.py), without rounding.

Source: the structs and the dequantisation of ggml (ggml-common.h, ggml-quants.c).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from specker.cpu.packed import Numbers

SUPER = 256  # weights in a block of the K formats
Value = Tensor | Numbers  # a tensor of a file: in float32, or the numbers of its blocks as a matrix [O, E]


def _halves(x: Tensor) -> Tensor:
    """Bytes [.., 2 n] -> float16 [.., n]."""
    return x.contiguous().view(torch.float16).flatten(-2)


def _fours(x: Tensor) -> Tensor:
    """Bytes [.., n] -> four-bit numbers [.., 2 n]: all low halves, then all high halves."""
    return torch.cat((x & 15, x >> 4), -1)


def _fifth(x: Tensor) -> Tensor:
    """Bytes [.., 4], the little-endian bits of 32 numbers -> the bits [.., 32] times 16."""
    return (x.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).flatten(-2) << 4


def _q8_0(blocks: Tensor) -> Numbers:
    """float16 d, 32 int8 q: w = d q."""
    return Numbers("int8", (blocks[..., 2:] ^ 128).flatten(-2), _halves(blocks[..., :2]))


def _q4_0(blocks: Tensor) -> Numbers:
    """float16 d, 32 four-bit q: w = d (q - 8)."""
    return Numbers("int4", _fours(blocks[..., 2:]).flatten(-2), _halves(blocks[..., :2]))


def _q4_1(blocks: Tensor) -> Numbers:
    """float16 d and m, 32 four-bit q: w = d q + m."""
    scale, shift = (_halves(blocks[..., i : i + 2]) for i in (0, 2))
    return Numbers("int4 shift", _fours(blocks[..., 4:]).flatten(-2), scale, shift)


def _q5_0(blocks: Tensor) -> Numbers:
    """float16 d, the fifth bits of 32 q, their other bits: w = d (q - 16)."""
    q = _fours(blocks[..., 6:]) | _fifth(blocks[..., 2:6])
    return Numbers("int5", q.flatten(-2), _halves(blocks[..., :2]))


def _q5_1(blocks: Tensor) -> Numbers:
    """float16 d and m, the fifth bits of 32 q, their other bits: w = d q + m."""
    q = _fours(blocks[..., 8:]) | _fifth(blocks[..., 4:8])
    return Numbers("int5 shift", q.flatten(-2), *(_halves(blocks[..., i : i + 2]) for i in (0, 2)))


def _six_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes [.., 12] -> 8 six-bit s and 8 six-bit t."""
    a, b, c = x.unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), -1)
    return s.flatten(-2), torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), -1).flatten(-2)


def _q4_k(blocks: Tensor) -> Numbers:
    """float16 d and m, 8 six-bit s and 8 six-bit t, 256 four-bit q: w = d s q - m t in each 32. Each 64 weights take 32
    bytes: the low four bits hold the first 32 weights, the high four bits the others."""
    q = _fours(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-3)
    return Numbers("int4 super", q, *_six_bits(blocks[..., 4:16]), *(_halves(blocks[..., i : i + 2]) for i in (0, 2)))


def _q5_k(blocks: Tensor) -> Numbers:
    """Like Q4_K, with 32 bytes of fifth bits: bit i of byte j belongs to weight 32 i + j."""
    q = _fours(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = (blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8, device="cpu").unsqueeze(1) & 1) << 4
    q = (q | high).flatten(-3)
    return Numbers("int5 super", q, *_six_bits(blocks[..., 4:16]), *(_halves(blocks[..., i : i + 2]) for i in (0, 2)))


def _q6_k(blocks: Tensor) -> Numbers:
    """128 bytes with the low four bits of q and 64 with the high two, 16 int8 s, float16 d: w = d s (q - 32) in each
    16. Each 128 weights take 64 bytes, whose low halves hold the first 64 weights and whose high halves the others, and
    32 bytes, each with two bits of four weights."""
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
    twos = torch.stack([(high >> i) & 3 for i in (0, 2, 4, 6)], -2).flatten(-2)
    q = (_fours(low) | twos << 4).flatten(-3)
    s = blocks[..., 192:208].contiguous().view(torch.int8).flatten(-2)
    return Numbers("int6 sixteen", q, s, None, _halves(blocks[..., 208:]))


def _mxfp4(blocks: Tensor) -> Numbers:
    """A byte b, 32 four-bit q: w = e2m1(q) 2^(b - 127). 255 is NaN."""
    if bool((blocks[..., 0] == 255).any()):
        raise ValueError("a scale in MXFP4 is NaN")
    return Numbers("mxfp4", _fours(blocks[..., 1:]).flatten(-2), blocks[..., 0])


class Block(NamedTuple):
    """A format of GGUF."""

    weights: int  # in a block
    size: int  # bytes of a block
    format: str  # the packed format that the reader returns
    read: Callable[[Tensor], Numbers]


BLOCKS = {
    "Q8_0": Block(32, 34, "int8", _q8_0),
    "Q4_0": Block(32, 18, "int4", _q4_0),
    "Q4_1": Block(32, 20, "int4 shift", _q4_1),
    "Q5_0": Block(32, 22, "int5", _q5_0),
    "Q5_1": Block(32, 24, "int5 shift", _q5_1),
    "Q4_K": Block(SUPER, 144, "int4 super", _q4_k),
    "Q5_K": Block(SUPER, 176, "int5 super", _q5_k),
    "Q6_K": Block(SUPER, 210, "int6 sixteen", _q6_k),
    "MXFP4": Block(32, 17, "mxfp4", _mxfp4),
}


def read(kind: str, data: Tensor) -> Numbers:
    """The matrix [O, E] whose rows are blocks of `kind`, a key of BLOCKS: data [O, bytes of a row] uint8."""
    block = BLOCKS[kind]
    return block.read(data.unflatten(-1, (-1, block.size)))


def rows(x: Value, order: Tensor) -> Value:
    """The rows of x in this order."""
    return _each(x, lambda y: y[order])


def moved(x: Value, order: Tensor) -> Value:
    """x [O, E], whose columns are as many equal parts as `order` has entries, with these parts in this order. Blocks
    must not cross parts."""
    return _each(x, lambda y: y.unflatten(1, (len(order), -1))[:, order].flatten(1))


def _each(x: Value, change: Callable[[Tensor], Tensor]) -> Value:
    if isinstance(x, Tensor):
        return change(x)
    fields: Iterable[Tensor | None] = x[1:]  # type: ignore[assignment]
    return Numbers(x.format, *(None if y is None else change(y) for y in fields))  # type: ignore[arg-type]
