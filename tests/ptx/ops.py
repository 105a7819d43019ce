"""Cases of the ops on floating-point numbers. Each op's first cases are small; `make test` runs them."""

import importlib
import importlib.util
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from formulas import randn
from paths import World, gates, inputs
from ptxsim import Case, Verdict
from torch import Tensor
from torch.nn import functional as F

from specker.kernels import narrow, noise
from specker.kernels.ancestors import ancestor_words, chain_words
from specker.kernels.expert_route import expert_route_ref
from specker.kernels.quant import Matrix, Quantized, as_bytes, quantised

attention = importlib.import_module("specker.kernels.tree_attention")
clusters = importlib.import_module("specker.kernels.cluster_topk")
conv = importlib.import_module("specker.kernels.conv_rows")
delta = importlib.import_module("specker.kernels.delta_rows")
experts = importlib.import_module("specker.kernels.expert_linear")
kv = importlib.import_module("specker.kernels.kv_calibrate")
kv_moves = importlib.import_module("specker.kernels.kv_commit")
linear = importlib.import_module("specker.kernels.row_linear")
project = importlib.import_module("specker.kernels.kv_project")
residual = importlib.import_module("specker.kernels.residual_merge")
sample = importlib.import_module("specker.kernels.sample_rows")
topk = importlib.import_module("specker.kernels.vocab_topk")


@cache
def ragged() -> Any:
    """The module tests/kernels/test_tree_attention.py, which makes ragged batches."""
    path = Path(__file__).parents[1] / "kernels" / "test_tree_attention.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weight(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """A matrix [.., O, E] whose products with unit rows have a variance of 1."""
    return (randn(*shape, seed=seed) / math.sqrt(shape[-1])).to(dtype)


def _order(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def residual_merge(dtype: torch.dtype) -> Iterator[Case]:
    for T, P, Q, E, last in (
        (2, 1, 1, 1023, False),
        (3, 2, 1, 4096, True),
        (5, 1, 1, 4096, False),
        (3, 1, 4, 2048, False),
        (4, 0, 1, 896, False),
        (2, 1, 0, 1023, False),
        (2, 3, 2, 1023, True),
        (2, 1, 1, 18432, False),
        (2, 2, 2, 17001, True),
        (1, 1, 1, 1, False),
    ):
        x, deltas = randn(T, E, dtype=dtype), randn(P - last, T, E, seed=1, dtype=dtype)
        norms = randn(Q, E, seed=2, dtype=dtype) if Q else None
        own = randn(T, E, seed=3, dtype=dtype) if last else None
        yield from (_merge(x, deltas, norms, own, constant=constant) for constant in ((False, True) if Q else (False,)))
    for S, E in ((4, 4096), (1, 1023)):
        x, parts = randn(3, E, dtype=dtype), randn(S, 3, E, seed=1, dtype=torch.float32)
        yield _merge(x, parts, randn(1, E, seed=2, dtype=dtype), None, split=True)


def _merge(
    x: Tensor, deltas: Tensor, norms: Tensor | None, last: Tensor | None, split: bool = False, constant: bool = False
) -> Case:
    def judge(verdict: Verdict, got: Any) -> None:
        y, parts = x.float(), deltas
        if split:
            total = torch.zeros_like(deltas[0])
            for part in deltas:
                total = total + part
            parts = total.to(x.dtype).unsqueeze(0)
        for delta in [*parts, *([] if last is None else [last])]:  # in the contract's order
            y = y + delta.float()
        verdict.same("y", got[0], y.to(x.dtype))
        if norms is not None:
            kept = got[0].double()
            scaled = kept / (kept.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            plain = residual.residual_merge_ref(x, deltas, norms, 1e-5, last, split)[1]
            verdict.near("normed", got[1], torch.stack([scaled * n.double() for n in norms]), plain)

    P, Q = len(deltas) + (last is not None), 0 if norms is None else len(norms)
    label = f"T{len(x)} P{P} Q{Q} E{x.shape[1]}{' last' * (last is not None)}{' split' * split}"
    label += " constant" * constant
    fixed = {"_residual_merge_kernel": {"weight_ptr"}} if constant else {}
    return Case(label, lambda: residual.launch(x, deltas, norms, 1e-5, last, split, constant), judge, fixed)


def row_linear(dtype: torch.dtype) -> Iterator[Case]:
    for T, O, E, epilogue, bias, G in (
        (9, 384, 512, "silu_mul", False, 1),
        (3, 70, 1100, "silu_mul", True, 1),
        (4, 96, 128, "none", True, 3),
        (1, 256, 1024, "none", False, 1),
        (65, 128, 640, "none", True, 1),
        (5, 256, 8192, "none", True, 1),
        (2, 128, 9000, "silu_mul", False, 1),
        (3, 64, 2048, "silu_mul", False, 2),
        (9, 384, 512, "gelu_tanh_mul", False, 1),
        (3, 70, 1100, "gelu_tanh_mul", True, 1),
        (3, 70, 1100, "clamped_silu_mul", True, 1),
        (4, 37, 1023, "none", True, 1),
        (2, 46, 33, "silu_mul", True, 1),
        (200, 64, 256, "none", False, 1),
        (2, 12032, 128, "none", False, 1),
        (2, 12034, 128, "silu_mul", False, 1),
        (2, 6016, 192, "none", True, 1),
        (3, 256, 1024, "float32", False, 1),
        (3, 128, 2048, "split", False, 1),
    ):
        lead = (G,) if G > 1 else ()
        x, w = randn(*lead, T, E, dtype=dtype), weight(*lead, O, E, dtype=dtype)
        label = f"T{T} {E}->{O} {epilogue}{' bias' * bias} x{G}"
        yield _linear(label, x, w, randn(*lead, O, seed=2, dtype=dtype) if bias else None, epilogue)


def quantised_linear(dtype: torch.dtype) -> Iterator[Case]:
    for T, O, E, epilogue, bias, G, kind, group, shift in (
        (9, 384, 512, "silu_mul", False, 1, "int8", None, False),
        (3, 70, 1152, "silu_mul", True, 1, "int4", 32, True),
        (9, 384, 512, "gelu_tanh_mul", False, 1, "int8", None, False),
        (4, 96, 128, "none", True, 3, "fp8", 32, False),
        (5, 256, 1024, "none", False, 1, "int4", 128, False),
        (65, 128, 640, "none", True, 1, "int4", 64, True),
        (3, 256, 8192, "none", False, 1, "int8", None, False),
        (3, 128, 2048, "split", False, 1, "int4", 32, True),
        (4, 37, 1023, "none", True, 1, "int8", None, False),
        (2, 12032, 128, "none", False, 1, "int4", 32, False),
        (2, 12032, 256, "silu_mul", False, 1, "int8", 16, False),
        (17, 100, 8224, "none", False, 1, "fp8", 32, False),
        (3, 256, 1152, "float32", False, 1, "int4", 96, True),
        (3, 256, 1152, "none", True, 1, "mxfp4", 32, False),
        (5, 384, 512, "silu_mul", False, 1, "mxfp4", 32, False),
        (3, 128, 2048, "split", False, 1, "mxfp4", 32, False),
    ):
        lead = (G,) if G > 1 else ()
        w = quantised_weight(kind, group, shift, *lead, O, E)
        label = f"T{T} {E}->{O} {epilogue}{' bias' * bias} x{G} {w.format}"
        b = randn(*lead, O, seed=2, dtype=dtype) if bias else None
        yield _linear(label, randn(*lead, T, E, dtype=dtype), w, b, epilogue)


def quantised_weight(kind: str, group: int | None, shift: bool, *shape: int) -> Quantized:
    """With scales in float32, unless the format has shifts; int4's in bfloat16, but for groups of 96 columns."""
    w = weight(*shape, dtype=torch.float32)
    if kind != "int4" and shape[-1] % 16:  # a scale a row
        scale = w.abs().amax(-1, keepdim=True) / 127
        return Quantized((w / scale).round().to(torch.int8), scale, None)
    w = quantised(w, kind, group)
    w = w if shift or kind == "mxfp4" else Quantized(w.q, w.scale.float(), None)
    return w if group == 96 else w.for_bfloat16()


def _linear(label: str, x: Tensor, w: Matrix, bias: Tensor | None, epilogue: str) -> Case:
    def judge(verdict: Verdict, got: Tensor) -> None:
        how, plain = "none" if epilogue == "split" else epilogue, dense(w, x.dtype)
        want = linear.row_linear_ref(x.double(), plain.double(), None if bias is None else bias.double(), how)
        got, most = got.sum(0) if epilogue == "split" else got, float(want.abs().max())
        last = 2e-7 * most  # torch's sums in float32, whose order depends on the processor, may happen to be exact
        verdict.near("y", got, want, linear.row_linear_ref(x, plain, bias, how), last)
        verdict.near("y, rounded once", got, want, want.to(x.dtype), 2e-6 * most)

    return Case(label, lambda: linear.launch(x, w, bias, epilogue), judge)


def expert_linear(dtype: torch.dtype) -> Iterator[Case]:
    for T, X, k, O, E, epilogue, each in (
        (5, 6, 2, 128, 192, "silu_mul", False),
        (3, 4, 2, 128, 256, "split", True),
        (3, 16, 4, 64, 128, "sum", False),
        (70, 3, 2, 64, 128, "none", True),
        (200, 2, 1, 64, 64, "silu_mul", False),
        (2, 3, 3, 37, 1023, "none", False),
        (3, 5, 2, 70, 1100, "silu_mul", False),
        (2, 3, 2, 96, 2048, "sum", True),
        (1, 128, 8, 256, 128, "split", True),
        (2, 2, 1, 46, 33, "silu_mul", False),
        (3, 2, 2, 128, 8192, "split", False),
        (2, 8, 4, 3072, 128, "silu_mul", False),
    ):
        w = weight(X, O, E, dtype=dtype)
        yield _experts(f"T{T} X{X} k{k} {E}->{O} {epilogue}{' each' * each}", T, k, w, epilogue, each, dtype)
    for T, X, k, O, E, epilogue, each in (
        (5, 6, 2, 128, 192, "clamped_silu_mul", False),
        (3, 5, 2, 70, 1100, "clamped_silu_mul", False),
        (3, 4, 2, 128, 256, "split", True),
        (3, 2, 2, 128, 8192, "split", False),
        (2, 3, 2, 96, 2048, "sum", True),
        (2, 3, 3, 37, 1023, "none", False),
    ):
        w, bias = weight(X, O, E, dtype=dtype), randn(X, O, seed=2, dtype=dtype)
        label = f"T{T} X{X} k{k} {E}->{O} {epilogue}{' each' * each} bias"
        yield _experts(label, T, k, w, epilogue, each, dtype, bias)


def quantised_experts(dtype: torch.dtype) -> Iterator[Case]:
    for T, X, k, O, E, epilogue, kind, group, shift in (
        (5, 6, 2, 128, 256, "silu_mul", "int8", None, False),
        (3, 4, 2, 128, 256, "split", "int4", 32, True),
        (3, 4, 2, 64, 128, "sum", "fp8", 32, False),
        (2, 2, 2, 100, 8224, "split", "int8", 32, False),
        (70, 3, 2, 256, 128, "silu_mul", "int4", 32, True),
        (2, 3, 2, 70, 1152, "none", "int4", 128, False),
        (2, 8, 4, 3072, 128, "silu_mul", "int4", 32, False),
        (3, 4, 2, 128, 288, "split", "mxfp4", 32, False),
        (2, 8, 4, 70, 128, "none", "mxfp4", 32, False),
    ):
        w = quantised_weight(kind, group, shift, X, O, E)
        yield _experts(f"T{T} X{X} k{k} {E}->{O} {epilogue} {w.format}", T, k, w, epilogue, False, dtype)
    w, bias = quantised_weight("int4", 32, True, 6, 128, 256), randn(6, 128, seed=2, dtype=dtype)
    yield _experts(
        f"T5 X6 k2 256->128 clamped_silu_mul {w.format} bias", 5, 2, w, "clamped_silu_mul", False, dtype, bias
    )


def choices(T: int, X: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What expert_route returns for random logits, of which the first experts' are larger."""
    return expert_route_ref(randn(T, X, seed=seed, dtype=torch.float32) - torch.arange(X) / 2, k)


def _experts(
    label: str,
    T: int,
    k: int,
    w: Matrix,
    epilogue: str,
    each: bool,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Case:
    (X, _, E), weighted = w.shape, epilogue in ("sum", "split")
    chosen, scores, *places = choices(T, X, k)
    x = randn(*((T, k, E) if each else (T, E)), dtype=dtype)
    rows, own = (chosen, *places), scores if weighted else None
    if isinstance(w, Tensor):
        w[sorted(set(range(X)) - set(chosen.flatten().tolist()))] = math.nan

    def judge(verdict: Verdict, got: Tensor) -> None:
        how, plain = "sum" if epilogue == "split" else epilogue, dense(w, dtype)
        exact = scores.double() if weighted else None
        wide = None if bias is None else bias.double()
        want = experts.expert_linear_ref(x.double(), plain.double(), *rows, how, exact, wide)
        got = got.sum(0) if epilogue == "split" else got
        verdict.near("y", got, want, experts.expert_linear_ref(x, plain, *rows, how, own, bias))
        verdict.near("y, rounded once", got, want, want.to(dtype), 2e-6 * float(want.abs().max()))

    return Case(label, lambda: experts.launch(x, w, *rows, epilogue, own, bias), judge)


def dense(w: Matrix, dtype: torch.dtype) -> Tensor:
    return w.dequantised(dtype) if isinstance(w, Quantized) else w


def scoring(w: Matrix, dtype: torch.dtype) -> Tensor:
    """The weights of an LM head, whose sums are not rounded, in float64."""
    return w.widened(dtype, torch.float64) if isinstance(w, Quantized) else w.double()


def tree_attention(dtype: torch.dtype) -> Iterator[Case]:
    for name, D, Hq, Hkv, page, lengths, relation in (
        ("ragged forest", 64, 8, 2, 16, ((70, 12), (0, 0), (5, 40)), "forest"),
        ("3 heads, page 5", 128, 3, 1, 5, ((140, 3), (64, 0)), "forest"),
        ("ragged forest", 128, 8, 2, 16, ((40, 9), (0, 3), (21, 30)), "forest"),
        ("3 splits, page 256", 128, 4, 1, 256, ((300, 30),), "forest"),
        ("5 splits, page 64, dag", 64, 4, 2, 64, ((600, 20),), "dag"),
        ("32/8 heads, 2 splits", 128, 32, 8, 256, ((290, 6),), "forest"),
        ("window of 256", 64, 2, 1, 32, ((30, 255), (0, 70)), "forest"),
        ("all ones, one query head each", 64, 2, 2, 8, ((130, 2), (0, 66)), "ones"),
        ("14/2 heads", 64, 14, 2, 16, ((63, 1), (64, 0), (127, 7)), "forest"),
        ("D 96", 96, 2, 1, 16, ((40, 5),), "forest"),
        ("D 256", 256, 2, 1, 16, ((140, 5),), "forest"),
        ("D 512", 512, 2, 1, 16, ((140, 5),), "forest"),
        ("18 sequences", 64, 2, 1, 16, tuple((7 * i % 50, i % 5) for i in range(18)), "forest"),
    ):
        how = {"Hq": Hq, "Hkv": Hkv, "D": D, "page": page, "lengths": lengths, "relation": relation}
        yield _attention(f"D{D} {name}", *ragged().ragged(len(name) + D, dtype, **how))
    for reach, lengths in ((64, ((620, 30), (3, 5))), (128, ((90, 70), (0, 100)))):
        how = {"Hq": 2, "Hkv": 1, "D": 128, "page": 16, "lengths": lengths, "reach": reach}
        yield _attention(f"D128 reach {reach}", *ragged().ragged(reach, dtype, **how))
    many, two = ((300, 30),), ((140, 3), (64, 0))
    for name, D, Hq, Hkv, page, lengths, more in (
        ("sinks", 64, 8, 1, 64, many, {"sinks": True, "reach": 128}),
        ("soft cap", 256, 2, 1, 16, two, {"cap": 5.0}),
        ("int8", 128, 4, 1, 256, many, {"kind": torch.int8}),
        ("fp8", 128, 4, 1, 256, many, {"kind": torch.float8_e4m3fn}),
        ("fp8 of two sequences", 64, 4, 2, 16, two, {"kind": torch.float8_e4m3fn}),
        ("fp8, page 5, sinks, soft cap", 128, 3, 1, 5, two, {"kind": torch.float8_e4m3fn, "sinks": True, "cap": 5.0}),
        ("int8", 256, 2, 1, 16, two, {"kind": torch.int8}),
    ):
        how = {"Hq": Hq, "Hkv": Hkv, "D": D, "page": page, "lengths": lengths, **more}
        yield _attention(f"D{D} {name}", *ragged().ragged(len(name) + D, dtype, **how))


def _attention(label: str, args: dict[str, Any], out: Tensor, lse: Tensor) -> Case:
    def judge(verdict: Verdict, got: Any) -> None:
        plain = attention.tree_attention_ref(**args)
        verdict.near("out", got[0], out, plain[0], 1e-6)
        verdict.near("lse", got[1], lse, lse.float(), 4e-6)

    return Case(label, lambda: attention.launch(**args), judge)


def vocab_topk(dtype: torch.dtype) -> Iterator[Case]:
    for T, E, K, k, mapped, noisy, drawn, norm, lse in (
        (3, 256, 1000, 10, torch.int64, True, False, True, True),
        (2, 64, 12032, 10, torch.int32, True, False, False, True),
        (1, 512, 2048, 1, None, True, True, False, False),
        (9, 128, 700, 64, torch.int32, False, False, False, True),
        (65, 64, 300, 3, None, False, False, False, True),
        (2, 1023, 333, 5, torch.int64, True, True, False, True),
        (2, 256, 65, 16, None, False, False, True, True),
        (2, 64, 12000, 33, None, False, False, False, False),
    ):
        h, w = randn(T, E, dtype=dtype), weight(K, E, dtype=dtype)
        ids = None if mapped is None else _order(3 * K, K)[:K].to(mapped)
        seed, temperature = (1 << 64) - 5, 0.8
        held = noise.pack_draw(seed, temperature) if drawn else None
        noisily = topk.Noise(seed, torch.arange(T) + (1 << 32) - T // 2, temperature, held) if noisy else None
        given = f"{' ids' * (ids is not None)}{' noise' * noisy}{' drawn' * drawn}{' norm' * norm}"
        normed = (randn(E, seed=2, dtype=dtype), 1e-5) if norm else None
        yield _topk(f"T{T} E{E} K{K} k{k}{given}", h, w, ids, k, normed, noisily, lse)
    for kind, group in (("int8", None), ("fp8", 32), ("int4", 32), ("mxfp4", 32)):
        w = quantised_weight(kind, group, kind == "int4", 1000, 256)
        yield _topk(f"T3 E256 K1000 k3 {w.format}", randn(3, 256, dtype=dtype), w, None, 3, None, None, True)


def _topk(label: str, h: Tensor, w: Matrix, ids: Tensor | None, k: int, norm: Any, noisy: Any, lse: bool) -> Case:
    K = len(w)
    token = torch.arange(K) if ids is None else ids.long()
    slack = 2e-5 if norm is None else 0.02  # the reference rounds the norm differently

    def scores() -> Tensor:
        x = h if norm is None else F.rms_norm(h.float(), h.shape[1:], norm[0].float(), norm[1]).to(h.dtype)
        z = x.double() @ scoring(w, x.dtype).T
        if noisy is None:
            return z
        return (
            z / noisy.temperature + noise.gumbel(noisy.seed, noisy.positions, int(token.max()) + 1)[:, token].double()
        )

    def judge(verdict: Verdict, got: Any) -> None:
        z = scores()
        best = z.topk(k).values
        verdict.near("logits", got[1], best, best.float(), slack)
        column = torch.full((3 * K,), -1)
        column[token] = torch.arange(K)
        verdict.near("chosen", z.gather(1, column[got[0]]), best, best, slack)
        verdict.same("distinct ids", torch.tensor([len(set(row)) for row in got[0].tolist()]), torch.full((len(h),), k))
        if lse:
            verdict.near("lse", got[2], z.logsumexp(-1), z.logsumexp(-1).float(), slack)

    return Case(label, lambda: topk.launch(h, w, ids, k, norm, noisy, lse), judge)


def cluster_topk(dtype: torch.dtype) -> Iterator[Case]:
    for T, E, C, R, chosen, k, noisy, drawn, lse in (
        (2, 64, 150, 32, 9, 4, True, True, True),
        (3, 256, 100, 77, 20, 10, True, False, True),
        (66, 64, 70, 3, 4, 1, True, False, False),
        (1, 1023, 40, 16, 40, 33, False, False, True),
        (2, 128, 2048, 5, 32, 1, False, False, True),
    ):
        (h, centres), w = (_integers(n, E, dtype) for n in (T, C)), weight(C * R, E, dtype=dtype)
        held = noise.pack_draw(7, 0.8) if drawn else None
        noisily = topk.Noise(7, torch.arange(T) + (1 << 32) - T // 2, 0.8, held) if noisy else None
        given = f"T{T} E{E} {chosen} of {C}x{R} k{k}{' noise' * noisy}{' drawn' * drawn}"
        yield _clusters(given, h, w, centres, R, chosen, k, noisily, lse)
    for kind, group in (("int8", None), ("int4", 32), ("mxfp4", 32)):
        w = quantised_weight(kind, group, kind == "int4", 600, 256)
        h, centres = (_integers(n, 256, dtype) for n in (2, 30))
        yield _clusters(f"T2 E256 4 of 30x20 k3 {w.format}", h, w, centres, 20, 4, 3, None, True)


def _integers(n: int, E: int, dtype: torch.dtype) -> Tensor:
    """Rows whose products with one another are exact, so that rounding swaps no two clusters."""
    return torch.randint(-2, 3, (n, E), generator=torch.Generator().manual_seed(n)).to(dtype)


def _clusters(
    label: str, h: Tensor, w: Matrix, centres: Tensor, R: int, chosen: int, k: int, noisy: Any, lse: bool
) -> Case:
    C, slack = len(centres), 2e-5
    ids = _order(2 * C * R, C)[: C * R].view(C, R)

    def judge(verdict: Verdict, got: Any) -> None:
        order = (h.double() @ centres.double().T).sort(dim=1, descending=True, stable=True).indices
        rows = (order[:, :chosen, None] * R + torch.arange(R)).flatten(1)  # [T, chosen R]
        z = (h.double() @ scoring(w, h.dtype).T).gather(1, rows)
        token = ids.flatten()[rows]
        if noisy is not None:
            z = z / noisy.temperature + noise.gumbel_at(noisy.seed, noisy.positions, token).double()
        best = z.topk(k).values
        verdict.near("logits", got[1], best, best.float(), slack)
        at = (token[:, None, :] == got[0][:, :, None]).int()
        verdict.same("ids of the clusters", at.sum(2), torch.ones_like(got[0], dtype=at.dtype))
        verdict.near("chosen", z.gather(1, at.argmax(2)), best, best, slack)
        if lse:
            verdict.near("lse", got[2], z.logsumexp(-1), z.logsumexp(-1).float(), slack)

    return Case(label, lambda: clusters.launch(h, w, centres, ids, chosen, k, None, noisy, lse), judge)


def drawn_tokens(dtype: torch.dtype) -> Iterator[Case]:
    """The tokens of verify rows from `vocab_topk`, in one launch, and from `sample_rows` of row_linear's logits."""
    for T, E, K, numbers in (
        (3, 512, 2048, ((3, 0.8), (4, 0.0), (5, 1.3))),
        (2, 64, 12032, ((3, 0.0),)),
        (1, 1023, 333, ((3, 1.0),)),
        (66, 64, 200, ((3, 0.7), ((1 << 64) - 5, 2.0))),
    ):
        yield _drawn(f"T{T} E{E} K{K}", randn(T, E, dtype=dtype), weight(K, E, dtype=dtype), numbers)
    w = quantised_weight("int4", 32, True, 12032, 128)
    yield _drawn(f"T2 E128 K12032 {w.format}", randn(2, 128, dtype=dtype), w, ((9, 0.9), (8, 0.0)))


def _drawn(label: str, h: Tensor, w: Matrix, numbers: tuple[tuple[int, float], ...]) -> Case:
    """`numbers`: seed and temperature of each sequence."""
    positions, held = torch.arange(len(h)) + (1 << 32) - 1, torch.stack([noise.pack_draw(*each) for each in numbers])

    def launched() -> Any:
        z = linear.launch(h, w, None, "float32")
        ids, best, _ = topk.launch(h, w, None, 1, None, topk.Noise(0, positions, 1.0, held), False)
        return ids[:, 0], best[:, 0], z, sample.launch(z, 1.0, 0, 1.0, 0, positions, held)

    def judge(verdict: Verdict, got: Any) -> None:
        ids, best, z, tokens = got
        run = len(h) // len(numbers)
        warm = torch.tensor([t for _, t in numbers]).repeat_interleave(run)[:, None]
        g = torch.cat([noise.gumbel(seed, positions[i * run :][:run], len(w)) for i, (seed, _) in enumerate(numbers)])
        scores = torch.where(warm == 0, z, z.double() / warm.clamp(min=1e-6) + g).amax(1)
        verdict.same("token", ids, tokens)
        verdict.near("best", best, scores, scores.float(), 2e-5)

    return Case(f"{label}, {len(numbers)} sequences", launched, judge)


def sample_rows(dtype: torch.dtype) -> Iterator[Case]:
    for T, V, temperature, top_k, top_p, drawn, scale in (
        (3, 5000, 0.0, 0, 1.0, False, 3),
        (2, 777, 0.8, 0, 1.0, True, 3),
        (2, 333, 0.6, 7, 0.6, False, 2),
        (3, 5000, 0.8, 0, 1.0, False, 3),
        (3, 9000, 0.7, 40, 1.0, False, 3),
        (3, 9000, 0.7, 0, 0.9, False, 3),
        (2, 9000, 1.3, 50, 0.95, True, 3),
        (2, 4097, 1.0, 5000, 0.5, True, 1),
        (2, 32000, 1.0, 0, 0.97, False, 1),
    ):
        z = randn(T, V).mul(scale).to(dtype)
        z[0, 5:9] = -math.inf
        label = f"T{T} V{V} t{temperature} k{top_k} p{top_p}{' drawn' * drawn}"
        yield _sample(label, z, temperature, top_k, top_p, drawn)


def _sample(label: str, z: Tensor, temperature: float, top_k: int, top_p: float, drawn: bool) -> Case:
    seed, positions = 12345678901234567, torch.arange(len(z)) + (1 << 32) - 1
    args = z, temperature, top_k, top_p, seed, positions
    draw = noise.pack_draw(seed, temperature, top_k, top_p) if drawn else None

    def judge(verdict: Verdict, got: Tensor) -> None:
        verdict.same("token", got, sample.sample_rows_ref(*args))

    return Case(label, lambda: sample.launch(*args, draw), judge)


def delta_rows(dtype: torch.dtype) -> Iterator[Case]:
    """A pass after a text of `length` tokens: a tree, decoding, a chain, and a chunk of a prompt, with norms or not."""
    for length, rows, tree, Hk, Hv, D in (
        (33, 5, True, 1, 2, 32),
        (40, 1, True, 2, 2, 64),
        (62, 20, False, 1, 1, 128),
        (0, 50, False, 1, 2, 32),
    ):
        given = inputs(length + rows, Hk, Hv, D, D, dtype)
        yield _delta(f"{rows} rows after {length} tokens {Hk}/{Hv} D{D}{' tree' * tree}", given, length, rows, tree)


def _delta(label: str, given: tuple[Tensor, ...], length: int, rows: int, tree: bool) -> Case:
    positions, words = torch.arange(length, length + rows), None
    if tree:
        parents = torch.tensor([max(0, n - n % 2) for n in range(rows - 1)], dtype=torch.int64)
        words = ancestor_words(parents) if rows > 1 else chain_words(1)
        positions = length + torch.tensor([bin(int(word)).count("1") - 1 for word in words[:, 0]])

    def run(op: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gate = gates(length + rows, *given[2].shape[1:], given[2].dtype)
        world = World(delta.delta_rows_ref, given, gate=gate if rows > 1 else None)
        if length:
            world.run(list(range(length)), 0, torch.arange(length), None)
        world.op = op
        out = world.run(list(range(length, length + rows)), length, positions, words)
        return out, *(x.flatten(0, 1)[world.slots[: length + rows]] for x in world.records)

    def judge(verdict: Verdict, got: Any) -> None:
        exact, plain = run(delta.delta_rows_ref, tuple(x.double() for x in given)), run(delta.delta_rows_ref, given)
        for name, x, want, ours in zip(("out", "k", "u", "g"), got, exact, plain, strict=True):
            verdict.near(name, x, want, ours, 2e-6)

    return Case(label, lambda: run(delta.launch, given), judge)


def conv_rows(dtype: torch.dtype) -> Iterator[Case]:
    """A pass after a text of `length` tokens: a tree, decoding, and a chunk of a prompt, with gates and without."""
    for length, rows, tree, K, gated in ((9, 5, True, 4, False), (1, 1, True, 3, True), (20, 40, False, 4, True)):
        x, weight = randn(rows, 3 * 70, dtype=dtype), randn(70, K, seed=1, dtype=torch.float32)
        inner, *both = x.split(70, 1)
        parents = torch.tensor([max(0, n - n % 2) for n in range(rows - 1)], dtype=torch.int64)
        words = (ancestor_words(parents) if rows > 1 else chain_words(1)) if tree else None
        cache = randn(8, 8, 70, seed=2, dtype=dtype)
        table = torch.tensor([[3, 5, 0, 7, 1, 6, 2, 4]], dtype=torch.int32)
        slots = (table[0].long()[:, None] * 8 + torch.arange(8)).flatten()[length : length + rows]
        ints = [torch.tensor(n, dtype=torch.int32) for n in ([length + rows], [rows if tree else 0], [0, rows])]
        rest = slots, table, *ints, words, "none" if gated else "silu", *(both if gated else (None, None))
        label = f"{rows} rows after {length} tokens K{K}{' tree' * tree}{' gates' * gated}"
        yield _conv(label, (inner, weight, None, cache, *rest))


def _conv(label: str, given: tuple[Any, ...]) -> Case:
    def run(op: Any, wide: bool = False) -> tuple[Tensor, Tensor]:
        own = [x.double() if wide and isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
        own[3] = own[3].clone()
        return op(*own), own[3]

    def judge(verdict: Verdict, got: Any) -> None:
        exact, plain = run(conv.conv_rows_ref, True), run(conv.conv_rows_ref)
        for name, x, want, ours in zip(("out", "inputs"), got, exact, plain, strict=True):
            verdict.near(name, x, want, ours, 2e-6)

    return Case(label, lambda: run(conv.launch), judge)


def kv_calibrate(dtype: torch.dtype) -> Iterator[Case]:
    for T, Hq, Hkv, D, G in (
        (6, 8, 2, 64, 3),
        (5, 14, 2, 64, 0),
        (7, 32, 8, 128, 1),
        (7, 32, 8, 128, 0),
        (3, 6, 3, 96, 1),
        (1, 32, 32, 128, 0),
        (2, 8, 1, 256, 1),
        (3, 4, 2, 20, 1),
        (6, 0, 2, 64, 3),
    ):
        qkv = randn(T, (Hq + 2 * Hkv) * D, dtype=dtype)
        table = kv.rope_table(1e4 ** -(torch.arange(0, D, 2).float() / D), 1.0, 64, dtype)
        rows = qkv, _order(64, T)[:T], _order(64, D)[:T], table
        norms = [randn(G, D, seed=seed, dtype=dtype) for seed in (3, 4)] if G else [None, None]
        yield _calibrate(f"T{T} {Hq}/{Hkv} D{D} G{G}", rows, (4, 16, Hkv, D), norms)
        if D == 64 or (D, G) == (128, 1):
            given = (*rows, *norms, 1e-6)
            yield from _in_eight_bits(f"T{T} {Hq}/{Hkv} D{D} G{G}", kv.launch, given, 4, (4, 16, Hkv, D), G)


def _in_eight_bits(
    label: str, launch: Any, given: tuple[Any, ...], at: int, cache: tuple[int, ...], G: int
) -> Iterator[Case]:
    """Caches in eight bits take what the same kernel writes to plain ones. `given` leaves out the caches, at `at`."""
    scales = (randn(2, max(G, 1), cache[2], dtype=torch.float32).abs() / 40 + 0.01).unbind()
    for kind, name in narrow.NARROW.items():

        def run(kind: torch.dtype = kind) -> tuple[Tensor, ...]:
            plain = [torch.zeros(cache, dtype=given[0].dtype) for _ in "kv"]
            bytes_ = [torch.zeros(cache, dtype=torch.int8) for _ in "kv"]
            q = launch(*given[:at], *plain, *given[at:])
            own = launch(*given[:at], *(b.view(kind) for b in bytes_), *given[at:], *scales)
            return q, own, *plain, *bytes_

        def judge(verdict: Verdict, got: Any, kind: torch.dtype = kind) -> None:
            q, own, *caches = got
            verdict.same("q", own, q)
            slots = given[at - 2]
            for name, plain, own, scale in zip("kv", caches[:2], caches[2:], scales, strict=True):
                rows = narrow.narrowed(plain.flatten(0, 1)[slots], scale, kind)
                verdict.same(name, own.flatten(0, 1)[slots], as_bytes(rows))

        yield Case(f"{label} {name} cache", run, judge)


def _calibrate(label: str, rows: tuple[Tensor, ...], cache: tuple[int, ...], norms: Any) -> Case:
    qkv, positions, slots, table = rows

    def into_caches(op: Any, dtype: torch.dtype, table: Tensor) -> tuple[Tensor, ...]:
        """q, and the caches, which are NaN where nothing was written."""
        k, v = (torch.full(cache, math.nan, dtype=dtype) for _ in "kv")
        given = [None if x is None else x.to(dtype) for x in norms]
        return op(qkv.to(dtype), positions, slots, table, k, v, *given, 1e-6), k, v

    def judge(verdict: Verdict, got: Any) -> None:
        plain = into_caches(kv.kv_calibrate_ref, qkv.dtype, table)
        want = into_caches(kv.kv_calibrate_ref, torch.float64, table.double())
        for name, x, y, z in zip(("q", "k", "v"), got, want, plain, strict=True):
            verdict.same(f"{name} where written", x.isnan(), y.isnan())
            verdict.near(name, x.nan_to_num(0), y.nan_to_num(0), z.nan_to_num(0))

    return Case(label, lambda: into_caches(kv.launch, qkv.dtype, table), judge)


def kv_project(dtype: torch.dtype) -> Iterator[Case]:
    for T, Hq, Hkv, D, E, G, norm, bias in (
        (5, 4, 2, 64, 1600, 1, False, False),
        (3, 4, 1, 128, 1100, 1, True, True),
        (66, 2, 1, 64, 256, 1, False, True),
        (4, 2, 1, 64, 576, 3, True, False),
        (2, 3, 1, 96, 1024, 1, True, False),
        (2, 2, 1, 256, 640, 1, False, False),
        (3, 2, 1, 20, 1023, 1, True, True),
    ):
        lead, O, rows = (G,) if G > 1 else (), (Hq + 2 * Hkv) * D, G * T
        x, w = randn(*lead, T, E, dtype=dtype), weight(*lead, O, E, dtype=dtype)
        b = randn(*lead, O, seed=2, dtype=dtype) if bias else None
        table = kv.rope_table(1e4 ** -(torch.arange(0, D, 2).float() / D), 1.0, 128, dtype)
        places = _order(128, T)[:rows], _order(128, D)[:rows], table
        norms = [randn(G, D, seed=seed, dtype=dtype) for seed in (3, 4)] if norm else [None, None]
        label = f"T{T} {E}->{Hq}/{Hkv} D{D} x{G}{' norm' * norm}{' bias' * bias}"
        if bias:
            given = (x, w, b, *places, *norms, 1e-6)
            yield from _in_eight_bits(label, project.launch, given, 6, (8, 16, Hkv, D), G)
        yield _project(label, (x, w, b), places, (8, 16, Hkv, D), norms)
        if E == 576:
            for kind in ("int8", "int4", "mxfp4"):
                q = quantised_weight(kind, 32, kind == "int4", *lead, O, E)
                yield _project(f"{label} {q.format}", (x, q, b), places, (8, 16, Hkv, D), norms)


def _project(
    label: str, product: tuple[Any, ...], places: tuple[Tensor, ...], cache: tuple[int, ...], norms: Any
) -> Case:
    """Against kv_calibrate's formula of the projection, rounded as the contract says; that projection may be rounded to
    a neighbour, so the bound has a unit in the last place of the largest value."""
    positions, slots, table = places
    x, w, b = product
    matrix = dense(w, x.dtype)

    def into_caches(work: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        k, v = (torch.full(cache, math.nan, dtype=dtype) for _ in "kv")
        return work(positions, slots, table.to(torch.promote_types(dtype, torch.float32)), k, v), k, v

    def judge(verdict: Verdict, got: Any) -> None:
        exact = linear.row_linear_ref(x.double(), matrix.double(), None if b is None else b.double()).flatten(0, -2)
        wide = [None if n is None else n.double() for n in norms]
        want = into_caches(lambda *at: kv.kv_calibrate_ref(exact, *at, *wide, 1e-6), torch.float64)
        plain = into_caches(lambda *at: kv.kv_calibrate_ref(exact.to(x.dtype), *at, *norms, 1e-6), x.dtype)
        slack = float(torch.finfo(x.dtype).eps * max(t.nan_to_num(0).abs().max() for t in want))
        for name, a, e, p in zip(("q", "k", "v"), got, want, plain, strict=True):
            verdict.same(f"{name} where written", a.isnan(), e.isnan())
            verdict.near(name, a.nan_to_num(0), e.nan_to_num(0), p.nan_to_num(0), slack)

    return Case(label, lambda: into_caches(lambda *at: project.launch(x, w, b, *at, *norms, 1e-6), x.dtype), judge)


def kv_commit(dtype: torch.dtype) -> Iterator[Case]:
    for L, Hkv, D, M in ((2, 3, 20, 16), (3, 8, 128, 5), (2, 2, 64, 40), (2, 1, 64, 200), (1, 8, 128, 256)):
        caches = [randn(L, 24, 16, Hkv, D, seed=seed, dtype=dtype) for seed in (0, 1)]
        dst = _order(24 * 16, M)[:M]
        yield _commit(f"L{L} row {Hkv * D} M{M}", caches, dst[_order(M, M + 1)], dst)  # every row is read and written
    caches = [torch.randint(-128, 127, (2, 24, 16, 2, 64), dtype=torch.int8) for _ in "kv"]
    yield _commit("L2 row 128 M16 in eight bits", caches, _order(24 * 16, 3)[:16], _order(24 * 16, 4)[:16])


def _commit(label: str, caches: list[Tensor], src: Tensor, dst: Tensor) -> Case:
    def moved(op: Any) -> list[Tensor]:
        mine = [c.clone() for c in caches]
        op(*mine, src, dst)
        return mine

    def judge(verdict: Verdict, got: Any) -> None:
        for name, x, y in zip("kv", got, moved(kv_moves.kv_commit_ref), strict=True):
            verdict.same(name, x, y)

    return Case(label, lambda: moved(kv_moves.launch), judge)


OPS = (
    residual_merge,
    row_linear,
    quantised_linear,
    expert_linear,
    quantised_experts,
    tree_attention,
    vocab_topk,
    cluster_topk,
    drawn_tokens,
    sample_rows,
    conv_rows,
    delta_rows,
    kv_calibrate,
    kv_project,
    kv_commit,
)
