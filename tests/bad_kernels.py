"""Kernels with one fault each, for the compile-only checks to find."""

from collections.abc import Iterator
from typing import Any

import torch

from specker.kernels.variant import Variant, tl, triton


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(
    x_ptr,  # [n]
    y_ptr,  # [n]
    n,
    BLOCK: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n) * 2, mask=o < n)


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


def _one(name: str, kernel: Any, arguments: tuple[str, ...], size: int = 4096, **fields: Any) -> Variant:
    return Variant(name, kernel, arguments, {kernel.arg_names[-1]: size}, 4, **fields)


def specialising() -> Variant:
    return _one("specialising", _specialising_kernel, ("*fp32", "*fp32", "i32"))


def variants() -> Iterator[Variant]:
    two = ("*fp32", "*fp32")
    yield _one("good", _copy_kernel, two)
    yield _one("spilling", _dot_kernel, two, 64, options={"maxnreg": 32}, wide=False)
    yield _one("float32 dot", _dot_kernel, two, 16, dot=True, wide=False)
    yield _one("bfloat16 dot", _dot_kernel, ("*bf16", "*bf16"), 64, dot=True)
    yield _one("narrow", _strided_kernel, two)


def launches() -> None:
    for n in (1, 2, 16, 17, 64):
        x = torch.zeros(n)
        for kernel in (_scale_kernel, _specialising_kernel):
            _one("", kernel, ("*fp32", "*fp32", "i32"))((1,), x, x, n)
