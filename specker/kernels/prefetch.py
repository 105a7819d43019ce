"""prefetch: small kernels that start to read the next product's weights into the L2 cache, an experiment that is off.

While a norm or the attention over a short text runs, the memory is almost idle. With SPECKER_PREFETCH=N, programs that
such a launch has besides its own prefetch up to N MiB of the matrix that the next product reads, the same part of each
row, since a product reads all rows at once. They read no value, so no bit of a result changes, and they do not wait for
the kernels before: a prefetch reads the memory as it is then, and the caches stay coherent.

Which matrices a mixture of experts reads is known after its router, whose kernel is too small to prefetch them (one
warp) and is followed by the product with their gate and up at once. So the programs of that product, which leaves some
of the bandwidth to others, prefetch the experts' down matrices, each a share of its own expert's, N MiB together. No
GPU has measured any of it.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.quant import Matrix, Quantized
from specker.kernels.variant import launched_on, sms, tl, triton

LINE = 128  # bytes that a prefetch reads; prefetch_share has this number too


def _mebibytes(number: str) -> int:
    if not number.isdecimal():
        raise ValueError(f"SPECKER_PREFETCH must be a number of MiB, got {number!r}")
    return int(number)


MEBIBYTES = _mebibytes(os.environ.get("SPECKER_PREFETCH", "0"))


class Prefetch(NamedTuple):
    """What the programs prefetch: up to `lines` lines of each of a matrix's `rows` rows of `pitch` bytes."""

    programs: int = 0
    rows: int = 0
    pitch: int = 0
    lines: int = 0


NONE = Prefetch()


def prefetch_of(weight: Matrix | None, experts: bool = False) -> tuple[Tensor | None, Prefetch]:
    """The bytes of `weight` and what to prefetch of it, or with `experts` of one of its matrices [X, O, E]; nothing
    where it is off or the device is no NVIDIA GPU."""
    w = weight.q if isinstance(weight, Quantized) else weight
    if not MEBIBYTES or w is None or not w.numel() or launched_on(w.device) not in (80, 90, 100):
        return None, NONE
    pitch, rows = w.shape[-1] * w.element_size(), w.numel() // w.shape[-1] // (len(w) if experts else 1)
    lines = (MEBIBYTES << 20) // rows // LINE
    return (w.view(torch.uint8), Prefetch(sms(w.device), rows, pitch, lines)) if lines else (None, NONE)


@triton.jit
def prefetch_share(w_ptr, i_program, WHAT: tl.constexpr, matrices=1):
    """Program i_program's share of what WHAT, a `Prefetch`, says of the matrix at w_ptr, one of `matrices`."""
    STEP: tl.constexpr = 1024  # lines at a time
    lines = tl.minimum(WHAT[3] // matrices, (WHAT[2] + 127) // 128)
    for i in tl.range(i_program * STEP, WHAT[1] * lines, WHAT[0] * STEP):
        o = tl.minimum(i + tl.arange(0, STEP), WHAT[1] * lines - 1)
        o_w = (o // lines).to(tl.int64) * WHAT[2] + o % lines * 128
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        address = w_ptr.to(tl.int64, bitcast=True) + o_w
        tl.inline_asm_elementwise(asm, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)
