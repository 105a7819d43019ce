"""What an op says to a wrong argument: one sentence of its own, never an error of torch or numpy."""

import importlib
import re
import traceback
import typing
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from op_calls import BF16, CALLS, F32, attention, calibration, ints
from torch import Tensor

from specker import kernels
from specker.kernels.quant import Quantized

# What serves although it is listed as wrong: a sequence's bounds that are not read; any vector; a set of numbers; one
# split of a router's logits.
SERVES = {("cu_rows", "meta"), ("inv_freq", "two"), ("inv_freq", "meta"), ("draw", "rank")}
SERVES |= {("expert_route.logits", "rank"), ("delta_rows.a_log", "two"), ("delta_rows.dt_bias", "two")}


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
        ("expert_linear", {"following": torch.ones(3, 8, 32)}, "following must be [4, .., ..], got [3, 8, 32]"),
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

    monkeypatch.setattr(importlib.import_module("specker.kernels.row_linear"), "row_linear_ref", full)
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
