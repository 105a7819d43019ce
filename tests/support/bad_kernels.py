"""Two kernels that compute the same, one of which Triton compiles anew for other values of n."""

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


def launches() -> None:
    arguments, size = ("*fp32", "*fp32", "i32"), {"BLOCK": 4096}
    for n in (1, 2, 16, 17, 64):
        x = torch.zeros(n)
        for kernel in (_scale_kernel, _specialising_kernel):
            Variant("", kernel, arguments, size, 4)((1,), x, x, n)
