"""On a CPU an op takes an argument of another floating dtype than its other ones only where its contract says so, and
then its result is that of float64 up to the rounding that the contract allows."""

import importlib
import inspect
import re
import traceback
from typing import Any

import pytest
import torch
from defaults import calls
from torch import Tensor

linear = importlib.import_module("specker.kernels.row_linear")

HALF, DOUBLE = (torch.float16, torch.bfloat16), torch.float64
ANY = (*HALF, torch.float32, DOUBLE)
MATRICES = ("cluster_topk", "expert_linear", "kv_project", "row_linear", "vocab_topk")
# What may differ from the other arguments: op and argument -> its dtypes.
TAKES: dict[tuple[str, str], tuple[torch.dtype, ...]] = {
    **{(op, "weight"): (torch.bfloat16,) for op in MATRICES},
    ("cluster_topk", "centroids"): (torch.bfloat16,),
    **{(op, "norm"): ANY for op in ("cluster_topk", "vocab_topk")},
    ("tree_attention", "sinks"): ANY,
}
# Rows that no other argument of a floating dtype accompanies, so the op takes several dtypes.
ALONE = {("adjust_rows", "logits"), ("expert_route", "logits"), ("sample_rows", "logits"), ("rope_table", "inv_freq")}
QUANTISED = {("expert_linear", "x"), ("row_linear", "x"), ("tree_attention", "q"), ("vocab_topk", "hidden")}
CALLS = [(name, op, inspect.signature(op).bind(*given, **named).arguments) for name, op, given, named in calls()]


def copied(x: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of x; its floating point tensors in `dtype`."""
    if isinstance(x, tuple):
        return tuple(copied(part, dtype) for part in x)
    if not isinstance(x, Tensor):
        return x
    return x.to(dtype, copy=True) if dtype is not None and x.is_floating_point() else x.clone()


def dtype_of(x: Any) -> torch.dtype | None:
    """The floating dtype of a tensor, or of the first entry of a tuple."""
    x = x[0] if isinstance(x, tuple) else x
    return x.dtype if isinstance(x, Tensor) and x.is_floating_point() else None


def numbers(x: Any) -> list[Tensor]:
    return [each for each in (x if isinstance(x, tuple) else (x,)) if dtype_of(each) is not None and each.numel()]


@pytest.mark.parametrize("n", range(len(CALLS)), ids=[name for name, *_ in CALLS])
def test_another_dtype_is_refused_or_stated(n: int) -> None:
    refused_or_exact(*CALLS[n][1:])


@pytest.mark.parametrize("rounds", [False, True])
def test_products_of_processors_with_and_without_bfloat16(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: rounds)
    for _, op, given in CALLS:
        if op.__name__ in MATRICES:
            refused_or_exact(op, given, ("weight", "centroids"))


def refused_or_exact(op: Any, given: dict[str, Any], arguments: tuple[str, ...] = ()) -> None:
    for argument in arguments or given:
        value = given.get(argument)
        own, key = dtype_of(value), (op.__name__, argument)
        for dtype in ANY:
            if own is None or dtype == own or key in ALONE | QUANTISED:
                continue
            mixed = {**{name: copied(x) for name, x in given.items()}, argument: copied(value, dtype)}
            if dtype in TAKES.get(key, ()) and own == torch.float32:
                got = numbers(op(**mixed))
                exact = {name: copied(x, DOUBLE) for name, x in {**given, argument: mixed[argument]}.items()}
                exact |= {name: x for name, x in given.items() if name in ("k_scale", "v_scale")}
                for a, b in zip(got, numbers(op(**exact)), strict=True):
                    assert float((a - b).abs().max()) <= 2**-6 * float(b.abs().max()), (argument, dtype)
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                op(**mixed)
                pytest.fail(f"{argument}: {dtype} was taken")
            where = traceback.extract_tb(caught.value.__traceback__)[-1]
            assert "/specker/kernels/" in where.filename and (where.line or "").startswith("raise "), argument


@pytest.mark.parametrize(("op", "argument"), TAKES)
def test_the_contract_says_so(op: str, argument: str) -> None:
    text = next(inspect.getdoc(each) for name, each, _ in CALLS if each.__name__ == op)
    [said] = re.findall(rf"^    {argument}: (.*(?:\n     .*)*)", text or "", re.M)
    assert ("any floating dtype" if TAKES[op, argument] == ANY else "bfloat16") in said
