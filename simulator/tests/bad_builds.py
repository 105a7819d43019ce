"""Kernels with one fault each, for static.py's checks to find."""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from ptxsim import Build


@triton.jit
def _specialising_kernel(
    x_ptr,  # [n]
    y_ptr,  # [n]
    n,
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n) * 2, mask=o < n)


@triton.jit
def _copy_kernel(
    x_ptr,  # [BLOCK]
    y_ptr,  # [BLOCK]
    BLOCK: tl.constexpr,
):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o))


@triton.jit
def _strided_kernel(
    x_ptr,  # [3 * BLOCK]
    y_ptr,  # [BLOCK]
    BLOCK: tl.constexpr,
):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + 3 * o))


@triton.jit
def _dot_kernel(
    x_ptr,  # [N, N]
    y_ptr,  # [N, N]
    N: tl.constexpr,
):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_x = tl.load(x_ptr + o)
    tl.store(y_ptr + o, tl.dot(b_x, b_x, input_precision="ieee").to(y_ptr.dtype.element_ty))


def _one(name: str, kernel: Any, arguments: tuple[str, ...], size: int = 4096, **fields: Any) -> Build:
    return Build(name, kernel, arguments, {kernel.arg_names[-1]: size}, 80, **fields)


def specialising() -> Build:
    return _one("specialising", _specialising_kernel, ("*fp32", "*fp32", "i32"))


def builds() -> Iterator[Build]:
    two = ("*fp32", "*fp32")
    yield _one("good", _copy_kernel, two, wide=True)
    yield _one("spilling", _dot_kernel, two, 64, options={"maxnreg": 32})
    yield _one("float32 dot", _dot_kernel, two, 16, dot=True)
    yield _one("bfloat16 dot", _dot_kernel, ("*bf16", "*bf16"), 64, dot=True, wide=True)
    yield _one("narrow", _strided_kernel, two, wide=True)
