"""Whether the kernels of a decoder's layer fit on an SM beside the next kernel, in bfloat16 on sm_90 and sm_100.

With programmatic dependent launch a kernel starts before the previous one has ended, but only where a block of it finds
room: shared memory (the system takes 1 KiB of each block), registers and, on sm_100, tensor memory. Without room it
starts late. A norm is small and waits for the kernel before it; the kernel after it
starts meanwhile. So the kernels on both sides of a norm must also fit together. bench/static.py reports what does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from ptxsim import StaticReport, side_by_side, static_report

from bench.builds import build
from specker.kernels.kv_project import Shape as ProjectShape
from specker.kernels.kv_project import _variant as kv_project_variant
from specker.kernels.residual_merge import _variant as residual_merge_variant
from specker.kernels.row_linear import _variants as row_linear_variants
from specker.kernels.tiles import Product
from specker.kernels.tree_attention import Shape as AttentionShape
from specker.kernels.tree_attention import _variant as tree_attention_variant

ARCHES = (90, 100)  # with programmatic dependent launch
BF16 = torch.bfloat16
PAGE = 256  # columns of a K/V page


@dataclass(frozen=True)
class Model:
    """The sizes that determine a layer's kernels."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    qk_norm: bool = False


MODELS = {
    "Llama-3-8B": Model(4096, 32, 8, 128, 14336),
    "Llama-3.2-1B": Model(2048, 32, 8, 64, 8192),
    "Qwen3-8B": Model(4096, 32, 8, 128, 12288, qk_norm=True),
}


def layer(m: Model, arch: int) -> list[tuple[str, Any]]:
    """(name, variant) of a layer's kernels for few rows, in order, and the next layer's first two."""
    cache = m.kv_heads * m.head_dim
    o = row_linear_variants(Product(BF16, m.hidden, m.heads * m.head_dim, arch), "split")[0]
    down = row_linear_variants(Product(BF16, m.hidden, m.inner, arch), "split")[0]

    def norm(product: Any) -> tuple[str, Any]:
        return "norm", residual_merge_variant(BF16, product.constexprs["SPLITS"], 1, m.hidden, split=True)

    project = ProjectShape(BF16, 1, m.heads, m.kv_heads, m.head_dim, m.hidden, m.qk_norm)
    strides = PAGE * cache, cache, m.head_dim
    attention = AttentionShape(BF16, 1, m.heads, m.kv_heads, m.head_dim, PAGE, strides)
    first = [norm(down), ("kv_project", kv_project_variant(project, arch))]
    return [
        *first,
        ("attention", tree_attention_variant(attention, arch)),
        ("o", o),
        norm(o),
        ("gate_up", row_linear_variants(Product(BF16, 2 * m.inner, m.hidden, arch), "silu_mul")[0]),
        ("down", down),
        *first,
    ]


def neighbours(kernels: list[tuple[str, StaticReport]]) -> Iterator[list[tuple[str, StaticReport]]]:
    """The groups of consecutive kernels that should be on an SM together: each two, and three with a norm between."""
    yield from (list(two) for two in pairwise(kernels[:-1]))  # the last two repeat the first
    for n, (name, _) in enumerate(kernels[1:-1], 1):
        if name == "norm":
            yield kernels[n - 1 : n + 2]


@dataclass(frozen=True)
class Group:
    """Kernels that should be on an SM together."""

    model: str
    arch: int
    kernels: str
    shared: int  # bytes of shared memory that one block of each takes
    problems: list[str]


def groups(arch: int) -> Iterator[Group]:
    """The groups of each model's layer."""
    for name, model in MODELS.items():
        kernels = [(kernel, static_report(build(variant, arch))) for kernel, variant in layer(model, arch)]
        for group in neighbours(kernels):
            of = [each for _, each in group]
            names = ", ".join(kernel for kernel, _ in group)
            yield Group(name, arch, names, sum(k.shared + 1024 for k in of), side_by_side(of))
