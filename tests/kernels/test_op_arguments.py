"""What an op says to a wrong argument: one sentence of its own, never an error of torch or numpy."""

import re
import traceback
import typing
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from specker import kernels
from specker.kernels.noise import pack_draw
from specker.kernels.quant import Quantized, quantised

F32, BF16 = torch.float32, torch.bfloat16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(T: int, dtype: torch.dtype, B: int = 1) -> dict[str, Any]:
    n = T // B
    return {
        "q": torch.ones(T, 2, 32, dtype=dtype),
        "k_cache": torch.ones(8, 16, 1, 32, dtype=dtype),
        "v_cache": torch.ones(8, 16, 1, 32, dtype=dtype),
        "block_table": torch.arange(8, dtype=torch.int32).view(B, -1),
        "kv_len": ints(*[n + 3] * B),
        "window": ints(*[n] * B),
        "cu_rows": ints(*range(0, T + 1, n)),
        "ancestors": torch.full((T, 2), -1),
        "scale": 0.5,
    }


def eight_bits(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The arguments with caches in eight bits."""
    caches = {name: given[name].to(torch.int8) for name in ("k_cache", "v_cache")}
    scale = torch.ones(1, caches["k_cache"].shape[2])
    return {**given, **caches, **more, "k_scale": scale, "v_scale": scale}


def calibration(T: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "qkv": torch.ones(T, 8 * 32, dtype=dtype),
        "positions": torch.arange(T),
        "slots": torch.arange(T),
        "rope": kernels.rope_table(torch.ones(16), 1.0, 128, dtype),
        "k_cache": torch.zeros(8, 16, 2, 32, dtype=dtype),
        "v_cache": torch.zeros(8, 16, 2, 32, dtype=dtype),
        "q_norm": torch.ones(1, 32, dtype=dtype),
        "k_norm": torch.ones(1, 32, dtype=dtype),
        "eps": 1e-6,
    }


def projection(T: int, dtype: torch.dtype, kind: str | None = None) -> dict[str, Any]:
    weight, rest = torch.ones(256, 64, dtype=dtype), calibration(T, dtype)
    del rest["qkv"]
    own = {"x": torch.ones(T, 64, dtype=dtype), "weight": quantised(weight, kind) if kind else weight}
    return {**own, "bias": torch.ones(256, dtype=dtype), **rest}


def walk(*shape: int) -> dict[str, Any]:
    tokens, rows = torch.ones(shape, dtype=torch.int64), (*shape[:-1], shape[-1] + 1)
    return {"tokens": tokens, "parents": tokens * 0, "target": torch.ones(rows, dtype=torch.int64)}


def commit() -> dict[str, Any]:
    cache, slots = torch.ones(2, 4, 4, 1, 8), torch.tensor([1, 2])
    return {"k_cache": cache, "v_cache": cache, "src": slots, "dst": slots}


def linear(*shape: int, **more: Any) -> dict[str, Any]:
    *layers, T, O, E = shape
    return {"x": torch.ones(*layers, T, E), "weight": torch.ones(*layers, O, E), **more}


def merge(T: int, **more: Any) -> dict[str, Any]:
    x = torch.ones(T, 16)
    return {"x": x, "deltas": torch.ones(2, T, 16), "norm_weight": torch.ones(2, 16), "eps": 1e-6, **more}


def sample(**more: Any) -> dict[str, Any]:
    numbers = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}
    return {"logits": torch.ones(4, 50), **numbers, "positions": torch.arange(4), **more}


def adjusted(T: int, **more: Any) -> dict[str, Any]:
    lengths = {"prompt": torch.tensor([1, 2]), "length": torch.tensor([4, 5])}
    texts = {"text": torch.ones(2, 6, dtype=torch.int64), **lengths, "window": torch.ones(2, 2, dtype=torch.int64)}
    biases = {"bias_ids": torch.tensor([[1, 2], [3, -1]]), "bias": torch.ones(2, 2)}
    parents = torch.zeros(2, 1, dtype=torch.int64)
    return {"logits": torch.ones(T, 50), **texts, "numbers": torch.ones(2, 4), "parents": parents, **biases, **more}


def head(weight: Any, **more: Any) -> dict[str, Any]:
    return {"hidden": torch.ones(3, 32), "weight": weight, "token_ids": torch.arange(40), "k": 3, **more}


def experts(T: int, *shape: int, **more: Any) -> dict[str, Any]:
    chosen, scores, order, starts = kernels.expert_route(torch.arange(4.0).expand(T, 4), 2)
    rows = {"experts": chosen, "order": order, "starts": starts}
    x, weight = torch.ones(*shape, 64), torch.ones(4, 32, 64)
    return {"x": x, "weight": weight, **rows, **({"scores": scores} if "epilogue" in more else {}), **more}


def clusters(weight: Any, **more: Any) -> dict[str, Any]:
    ids = {"centroids": torch.ones(8, 32), "token_ids": torch.arange(40).view(8, 5), "clusters": 2}
    return {"hidden": torch.ones(3, 32), "weight": weight, **ids, "k": 3, **more}


NORM, NOISE = (torch.ones(32), 0.0), (7, torch.arange(3), 0.5)
# Few rows (numpy), many rows and bfloat16 (torch) take different paths.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("accept_walk", walk(2, 3)),
    ("accept_walk", walk(3)),
    ("accept_walk", {**walk(3), "target": torch.arange(5), "cu_drafts": ints(0, 2, 3)}),
    ("adjust_rows", adjusted(4)),
    ("adjust_rows", adjusted(3, places=torch.tensor([0, 2, 3]), floors=True)),
    ("ancestor_words", {"parents": torch.tensor([0, 0, 1])}),
    ("cluster_topk", clusters(torch.ones(40, 32), norm=NORM, noise=NOISE, out=torch.zeros(3, 3, dtype=torch.int64))),
    ("cluster_topk", clusters(quantised(torch.ones(40, 32), "int4"))),
    ("expert_linear", experts(3, 3)),
    ("expert_linear", experts(3, 3, 2, epilogue="sum")),
    ("expert_linear", {**experts(3, 3), "weight": quantised(torch.ones(4, 32, 64), "int4")}),
    ("expert_route", {"logits": torch.ones(3, 4), "chosen": 2}),
    (
        "expert_route",
        {
            "logits": torch.ones(3, 4),
            "chosen": 2,
            "scoring": "sigmoid",
            "bias": torch.ones(4),
            "scale": 2.0,
            "eps": 0.1,
        },
    ),
    *(("kv_calibrate", calibration(*how)) for how in ((3, F32), (100, F32), (3, BF16))),
    ("kv_commit", commit()),
    *(("kv_project", projection(*how)) for how in ((3, F32), (100, F32), (3, BF16), (3, F32, "int8"))),
    *(("residual_merge", merge(T, last=torch.ones(T, 16))) for T in (3, 100)),
    ("residual_merge", merge(3, split=True)),
    ("rope_table", {"inv_freq": torch.ones(16), "scale": 1.0, "length": 20, "dtype": F32}),
    ("row_linear", linear(3, 32, 64)),
    ("row_linear", linear(3, 32, 64, bias=torch.ones(32), epilogue="silu_mul")),
    ("row_linear", linear(3, 32, 64, epilogue="split", out=torch.zeros(1, 3, 32))),
    ("row_linear", linear(3, 512, 1024, bias=torch.ones(512))),
    ("row_linear", linear(2, 3, 32, 64, bias=torch.ones(2, 32), epilogue="float32")),
    ("row_linear", {"x": torch.ones(3, 64), "weight": quantised(torch.ones(32, 64), "int4")}),
    ("sample_rows", sample(draw=pack_draw(7, 0.5))),
    *(("tree_attention", attention(*how)) for how in ((3, F32), (100, F32), (3, BF16), (4, F32, 2), (4, BF16, 2))),
    ("tree_attention", eight_bits(attention(3, F32), reach=9, cap=2.0, sinks=torch.ones(1, 2))),
    ("kv_calibrate", eight_bits(calibration(3, F32))),
    ("kv_project", eight_bits(projection(3, BF16))),
    ("vocab_topk", head(torch.ones(40, 32), norm=NORM, noise=NOISE, out=torch.zeros(3, 3, dtype=torch.int64))),
    ("vocab_topk", head(quantised(torch.ones(40, 32), "int4"))),
]
# What serves although it is listed as wrong: a sequence's bounds that are not read; any vector; a set of numbers; one
# split of a router's logits.
SERVES = {("cu_rows", "meta"), ("inv_freq", "two"), ("inv_freq", "meta"), ("draw", "rank")}
SERVES |= {("expert_route.logits", "rank")}


def wrong(value: Any, optional: bool) -> Iterator[tuple[str, Any]]:
    """Values that cannot stand for this one: another type, number of dimensions, dtype, size or device."""
    yield from (("str", "x"), ("list", [1, 2]), ("dict", {}), ("object", object()), ("two", torch.ones(2)))
    if not optional:
        yield "None", None
    if isinstance(value, Tensor):
        yield from (("int", 5), ("numpy", value.numpy if value.dtype == BF16 else value.numpy()))
        yield from (("rank", value.unsqueeze(0)), ("number", value.flatten()[0]), ("meta", value.to("meta")))
        yield from (("bool", value.bool()), ("complex", value.to(torch.complex64)))
    elif isinstance(value, tuple):
        yield from (("empty", ()), ("short", value[:-1]))
        for n, part in enumerate(value):
            yield from ((name, (*value[:n], other, *value[n + 1 :])) for name, other in wrong(part, False))
    elif isinstance(value, Quantized):
        yield from (("codes", value.q), ("meta", value.to("meta")))
        yield "scales", Quantized(value.q, value.scale[:-1], value.shift)


def call(name: str, given: dict[str, Any]) -> None:
    """The op with copies of what it writes."""
    getattr(kernels, name)(**{k: v.clone() if type(v) is Tensor else v for k, v in given.items()})


@pytest.mark.parametrize("n", range(len(CALLS)), ids=[f"{name}-{n}" for n, (name, _) in enumerate(CALLS)])
def test_every_argument(n: int) -> None:
    name, given = CALLS[n]
    call(name, given)
    for argument, value in given.items():
        kind = signature(getattr(kernels, name)).parameters[argument].annotation
        if kind is bool:
            continue
        for what, other in wrong(value, type(None) in typing.get_args(kind)):
            if SERVES & {(argument, what), (f"{name}.{argument}", what)} or (
                what == "meta" and len(given) < 3
            ):  # no second tensor to compare with
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                call(name, {**given, argument: other})
                pytest.fail(f"{argument}: {what} was taken")
            where = traceback.extract_tb(caught.value.__traceback__)[-1]
            said = f"{argument}, {what}: {caught.value}"
            assert "/specker/kernels/" in where.filename and (where.line or "").startswith("raise "), said
            assert caught.value.__suppress_context__ or caught.value.__context__ is None, said


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("tree_attention", {"scale": None}, "scale must be float, got None"),
        ("tree_attention", {"kv_len": [6]}, "kv_len must be Tensor, got list"),
        (
            "tree_attention",
            {"kv_len": ints(1, 2)},
            "expected block_table [B, P], kv_len [B], window [B], cu_rows [B + 1]: (1, 8), (2,), (1,), (2,)",
        ),
        ("tree_attention", {"v_cache": torch.ones(8, 16, 1, 32, device="meta")}, "v_cache must be on cpu, got meta"),
        ("ancestor_words", {"parents": torch.tensor([[0, 0]])}, "parents must be [N] integers, got (1, 2) torch.int64"),
        ("ancestor_words", {"parents": torch.zeros(3)}, "parents must be [N] integers, got (3,) torch.float32"),
        ("ancestor_words", {"parents": [0, 1]}, "parents must be a Tensor, got list"),
        ("accept_walk", {"parents": [0, 1]}, "parents must be Tensor | None, got list"),
        ("accept_walk", {"parents": ints(0)}, "parents must be [2, 3] int64 like tokens, got (1,) torch.int32"),
        ("expert_linear", {"bias": torch.ones(4, 31)}, "bias must be [4, 32] torch.float32, got [4, 31] torch.float32"),
        ("expert_linear", {"bias": torch.ones(4, 32).double()}, "float32, got [4, 32] torch.float64"),
        ("expert_linear", {"epilogue": "sum"}, "scores belong to sum and split, got 'sum' without them"),
        ("expert_linear", {"scores": torch.ones(3, 2)}, "scores belong to sum and split, got 'none' with them"),
        ("expert_linear", {"order": torch.arange(6)}, "order must be [6] int32, got [6] torch.int64"),
        ("expert_linear", {"starts": ints(0, 1, 2)}, "starts must be [5] int32, got [3] torch.int32"),
        ("expert_linear", {"experts": torch.ones(3, 2)}, "experts must be [3, 2] int32, got [3, 2] torch.float32"),
        ("expert_linear", {"weight": torch.ones(4, 0, 64)}, "expected experts and weights: experts [3, 2], weight"),
        ("expert_linear", {"weight": torch.ones(4, 32, 64).double()}, "weight must be like x: x torch.float32 cpu"),
        (
            "expert_linear",
            {"epilogue": "gelu"},
            "epilogue must be one of ('none', 'silu_mul', 'gelu_tanh_mul', 'clamped_silu_mul', 'sum', 'split'), got",
        ),
        (
            "expert_linear",
            {"epilogue": "silu_mul", "weight": torch.ones(4, 31, 64)},
            "silu_mul needs an even number of weight rows, got 31",
        ),
        (
            "expert_linear",
            {"x": torch.ones(3, 1, 64)},
            "expected x [T, E] or [T, k, E], weight [X, O, E], experts [T, k]: x (3, 1, 64), weight (4, 32, 64)",
        ),
        (
            "expert_linear",
            {"epilogue": "sum", "scores": torch.ones(3, 2).double()},
            "scores must be [3, 2] torch.float32, got [3, 2] torch.float64",
        ),
        ("expert_route", {"chosen": 5}, "chosen must be in 1..4, the number of experts, got 5"),
        ("expert_route", {"idle": torch.zeros(2, dtype=torch.bool)}, "idle must be [B] bool, and B divide 3 rows, got"),
        ("expert_route", {"scoring": "relu"}, "scoring must be one of ('softmax', 'sigmoid'), got 'relu'"),
        (
            "expert_route",
            {"scoring": "sigmoid", "bias": torch.ones(3)},
            "bias must be [4] torch.float32, got [3] torch.float32",
        ),
        (
            "expert_route",
            {"scoring": "sigmoid", "bias": torch.ones(4).double()},
            "bias must be [4] torch.float32, got [4] torch.float64",
        ),
        (
            "expert_route",
            {"scoring": "sigmoid", "eps": -1.0},
            "scale must be above 0 and eps at least 0, got 1.0 and -1",
        ),
        ("expert_route", {"scale": 0.0}, "scale must be above 0 and eps at least 0, got 0.0 and 0.0"),
        ("expert_route", {"eps": 1e-6}, "eps belongs to sigmoid, got 'softmax' with it"),
        (
            "expert_route",
            {"logits": torch.ones(3, 4).half()},
            "logits must be [T, X] or [S, T, X], float32 or float64, got [3, 4]",
        ),
        ("kv_calibrate", {"positions": torch.tensor([0, 1, 128])}, "positions must be in 0..127, got 0..128"),
        ("kv_calibrate", {"slots": torch.tensor([0, 1, 999])}, "slots must be in 0..127, got 0..999"),
        ("kv_project", {"slots": torch.tensor([0, 1, 999])}, "slots must be in 0..127, got 0..999"),
        ("kv_calibrate", {"eps": None}, "eps must be float, got None"),
        ("kv_calibrate", {"rope": torch.ones(9, 2, 32).int()}, "rope must be [C, 2, 32] torch.float32, got (9, 2, 32)"),
        ("kv_commit", {"dst": torch.tensor([2, 99])}, "dst must be in 0..15, got 2..99"),
        ("kv_commit", {"dst": ints(1, 2)}, "src and dst must be [M] int64, got (2,) torch.int64 and (2,) torch.int32"),
        ("kv_commit", {"k_cache": torch.ones(4, 2, 4, 1, 8).transpose(0, 1)}, "the caches must be contiguous"),
        ("residual_merge", {"eps": -1.0, "split": True}, "eps must be at least 0, got -1.0"),
        ("row_linear", {"out": torch.zeros(1, 3, 32)}, "out must be contiguous [3, 32] torch.float32, got [1, 3, 32]"),
        ("row_linear", {"out": torch.zeros(3, 32).double()}, "torch.float32, got [3, 32] torch.float64"),
        ("row_linear", {"epilogue": "split", "weight": torch.ones(0, 64)}, "split needs a weight with elements"),
        ("vocab_topk", {"norm": (torch.ones(32), None)}, "norm must be tuple[Tensor, float] | None, got tuple"),
        ("vocab_topk", {"norm": (torch.ones(32), -1.0)}, "norm eps must be at least 0, got -1.0"),
        ("vocab_topk", {"k": "3"}, "k must be int, got str"),
        ("vocab_topk", {"out": torch.tensor([1])}, "out must be [3, 3] int64, got (1,) torch.int64"),
        ("rope_table", {"inv_freq": torch.ones(1, 16)}, "inv_freq must be [D / 2] floating point, got (1, 16)"),
        ("rope_table", {"scale": torch.ones(2)}, "scale must be a number or [16], got [2]"),
        ("rope_table", {"length": -1}, "length must be at least 0, got -1"),
        ("sample_rows", {"temperature": "hot"}, "temperature must be float, got str"),
    ],
)
def test_sentences(name: str, changed: dict[str, Any], said: str) -> None:
    given = next(given for op, given in CALLS if op == name)
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        call(name, {**given, **changed})


def test_another_failure_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("specker.kernels.linear.row_linear_ref", full)
    with pytest.raises(MemoryError, match="no room"):
        kernels.row_linear(torch.ones(3, 64), torch.ones(32, 64))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_registered_op_says_the_same(dtype: torch.dtype) -> None:
    given = {**attention(3, dtype), "kv_len": ints(1, 2)}
    with pytest.raises(ValueError, match=r"expected block_table \[B, P\], kv_len \[B\]"):
        torch.ops.specker.tree_attention(**given)
    table = {**calibration(3, dtype), "slots": torch.tensor([0, 1, 999])}
    with pytest.raises(ValueError, match=r"slots must be in 0\.\.127, got 0\.\.999"):
        torch.ops.specker.kv_calibrate(**table)
