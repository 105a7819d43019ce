"""expert_linear and expert_route against torch's grouped products, on the experts of Qwen3-30B-A3B and of Mixtral.

The limit is one read of each chosen expert's matrix: at 1, 8 and 64 random rows 8, 51 and 126 of Qwen3's 128 experts,
and 2, 7 and 8 of Mixtral's 8. At an H200's 4.3 TB/s Qwen3's gate and up (6.3 MB an expert) take 12, 75 and 184 us, its
down half of that. "feed-forward" is all of it: the router's choice, gate and up, down, and the weighted sum.

The baseline gathers each expert's rows, multiplies them with `torch.nn.functional.grouped_mm` and puts the results
back. The fused_moe_kernel of vLLM and SGLang moves the same weights: an expert's matrix once for each block of 16 to 64
of its rows. Besides, their fused_experts writes gate and up and reads them back for SiLU, 12 F bytes per choice with
its result, then 4 E for the terms of the sum in bfloat16. Ours is 4 F, because SiLU is in the product, and 8 E, because
the terms are float32: for Qwen3 17 and 19 KB beside the 9.4 MB of an expert. They launch six or seven kernels (top k,
alignment of blocks, two products, SiLU, sum), we five, or four if residual_merge adds up the terms.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.expert_linear import expert_linear, expert_linear_cost, expert_linear_ref
from specker.kernels.expert_route import expert_route, expert_route_cost, expert_route_ref
from specker.kernels.quant import quantised

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# Experts, chosen ones, columns of a row, and of an expert's hidden row.
LARGE = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral": (8, 2, 4096, 14336)}
MODELS = LARGE if DEVICE == "cuda" else {"small": (8, 2, 64, 96)}
Routing = tuple[Tensor, Tensor, Tensor, Tensor]


def weights(X: int, O: int, E: int) -> Tensor:
    return torch.randn(X, O, E, dtype=DTYPE, device=DEVICE) / E**0.5


def grouped(x: Tensor, weight: Tensor, route: Routing, epilogue: str) -> Tensor:
    """The op by torch's grouped product of sorted rows."""
    experts, scores, order, starts = route
    T, k = experts.shape
    rows = x[order // k] if x.dim() == 2 else x.flatten(0, 1)[order]
    y = F.grouped_mm(rows, weight.mT, offs=starts[1:])
    if epilogue == "silu_mul":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    back = torch.empty_like(y)
    back[order] = y
    y = back.view(T, k, -1)
    return (y * scores.unsqueeze(-1)).sum(1).to(x.dtype) if epilogue == "sum" else y


def verify(run: Callable[[slice], Tensor], theirs: Tensor, exact: Tensor, T: int) -> None:
    ours = run(slice(None))
    error, own = (ours - exact).abs().max(), (theirs - exact).abs().max()
    assert error <= 3 * own + 1e-6, f"error {error:.2e}, torch's is {own:.2e}"
    for rows in (slice(0, 1), slice(T // 2, T)):
        assert DEVICE == "cpu" or torch.equal(run(rows), ours[rows]), "a row's bits depend on the others"


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def build(model: str, T: int, epilogue: str, kind: str | None = None) -> Built:
    """One product: gate and up with SiLU, or down with the weighted sum."""
    X, k, E, wide = MODELS[model]
    logits = torch.randn(T, X, device=DEVICE)
    route = expert_route(logits, k)
    plain = weights(X, 2 * wide, E) if epilogue == "silu_mul" else weights(X, E, wide)
    x = torch.randn(*((T, E) if epilogue == "silu_mul" else (T, k, wide)), dtype=DTYPE, device=DEVICE)
    weight = quantised(plain, kind).for_bfloat16() if kind else plain

    def ours(rows: slice = slice(None)) -> Tensor:
        experts, scores, *places = route if rows == slice(None) else expert_route(logits[rows], k)
        return expert_linear(x[rows], weight, experts, *places, epilogue, scores if epilogue == "sum" else None)

    def reference(x: Tensor, weight: Tensor, experts: Tensor, scores: Tensor, *places: Tensor) -> Tensor:
        return expert_linear_ref(x, weight, experts, *places, epilogue, scores if epilogue == "sum" else None)

    def check() -> None:
        dense = weight if isinstance(weight, Tensor) else weight.dequantised(DTYPE)
        verify(ours, reference(x, dense, *route), reference(*doubled(x, dense, *route)), T)

    ways: dict[str, Callable[[], Any]] = {"specker": ours}
    if kind:
        experts, scores, *places = route
        own = scores if epilogue == "sum" else None
        ways["bfloat16"] = lambda: expert_linear(x, plain, experts, *places, epilogue, own)
    else:
        ways["torch grouped_mm"] = lambda: grouped(x, plain, route, epilogue)
    experts, scores, *places = route
    cost = expert_linear_cost(x, weight, experts, *places, epilogue, scores if epilogue == "sum" else None)
    return Built(ways, check, cost)


def build_all(model: str, T: int) -> Built:
    """The router's choice and both products."""
    X, k, E, wide = MODELS[model]
    x, logits = torch.randn(T, E, dtype=DTYPE, device=DEVICE), torch.randn(T, X, device=DEVICE)
    gate_up, down = weights(X, 2 * wide, E), weights(X, E, wide)

    def ours(rows: slice = slice(None)) -> Tensor:
        experts, scores, *places = expert_route(logits[rows], k)
        up = expert_linear(x[rows], gate_up, experts, *places, "silu_mul")
        return expert_linear(up, down, experts, *places, "sum", scores)

    def theirs() -> Tensor:
        scores, experts = logits.softmax(-1).topk(k)
        scores = scores / scores.sum(-1, keepdim=True)
        by_expert, order = experts.flatten().sort(stable=True)
        starts = torch.searchsorted(by_expert, torch.arange(X + 1, device=DEVICE), out_int32=True)
        route = experts, scores, order, starts
        return grouped(grouped(x, gate_up, route, "silu_mul"), down, route, "sum")

    def reference(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor) -> Tensor:
        experts, scores, *places = expert_route_ref(logits, k)
        up = expert_linear_ref(x, gate_up, experts, *places, "silu_mul")
        return expert_linear_ref(up, down, experts, *places, "sum", scores)

    def check() -> None:
        verify(ours, reference(x, gate_up, down, logits), reference(*doubled(x, gate_up, down, logits)), T)

    experts, scores, *places = expert_route(logits, k)
    costs = [
        expert_route_cost(logits, k),
        expert_linear_cost(x, gate_up, experts, *places, "silu_mul"),
        expert_linear_cost(x.new_empty(T, k, wide), down, experts, *places, "sum", scores),
    ]
    ways = {"specker": ours, "torch grouped_mm": theirs}
    return Built(ways, check, (sum(c[0] for c in costs), sum(c[1] for c in costs)))


def cases() -> Iterator[Case]:
    goal = Goal(over=(("torch grouped_mm", 1.0),)) if DEVICE == "cuda" else Goal()
    for model in MODELS:
        for T in (1, 8, 64):
            yield Case(f"{model} feed-forward, T {T}", lambda m=model, T=T: build_all(m, T), goal)
            for what, epilogue in (("gate, up", "silu_mul"), ("down", "sum")):
                yield Case(f"{model} {what}, T {T}", lambda m=model, T=T, e=epilogue: build(m, T, e), goal)
    for model in MODELS:
        for kind in ("int8", "fp8", "int4"):
            for T in (1, 8):
                name = f"{model} gate, up {kind}, T {T}"
                yield Case(name, lambda m=model, T=T, kind=kind: build(m, T, "silu_mul", kind))


test_expert_linear = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("expert_linear", cases())
