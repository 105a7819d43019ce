"""One signature defines an op: its schema, its paths, and the checks before each path."""

import importlib
from inspect import signature
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from specker import kernels
from specker.kernels.registry import register, takes

went = []


def shifted(x: Tensor, by: int = 1, *, hint: bool = False) -> Tensor:
    """x [T] + by."""
    return _shifted(x, by, hint)


class Shift(NamedTuple):
    x: Tensor
    by: int = 1
    hint: bool = False


def _check(args):
    if args.by < 0:
        raise ValueError(f"by must be at least 0, got {args.by}")


def _path(name):
    @takes(Shift)
    def path(args):
        went.append(name + " with a hint" * args.hint)
        return args.x + args.by

    return path


_shifted = register(
    shifted,
    Shift,
    check=_check,
    reference=_path("reference"),
    launch=_path("launch"),
    fake=lambda args: args.x.new_empty(args.x.shape),
    fits=lambda args: len(args.x) <= 8,
)


def scaled_(x: Tensor, factors: tuple[float, bool]) -> None:
    """x [T] times the factor, unless the flag is false; schemas have no tuples."""
    _scaled_(x, factors)


class Scale(NamedTuple):
    x: Tensor
    factors: tuple[float, bool]


class Flat(NamedTuple):
    x: Tensor
    factor: float
    flag: bool = True

    @staticmethod
    def of(args):
        return args.x, *args.factors

    def nested(self):
        return Scale(self.x, (self.factor, self.flag))


def _scale(args):
    factor, flag = args.factors
    args.x.mul_(factor if flag else 1)


_scaled_ = register(
    scaled_,
    Scale,
    check=lambda args: None,
    reference=_scale,
    launch=_scale,
    fake=lambda args: None,
    mutates=("x",),
    flat=Flat,
)


@pytest.mark.parametrize("name", [n for n in kernels.__all__ if n not in ("ancestor_words", "rope_table")])
def test_an_ops_record_has_the_parameters_of_its_function(name):
    """A call fills the record by position."""
    record = importlib.import_module(f"specker.kernels.{name}").Arguments
    of, own = (signature(x).parameters.values() for x in (record, getattr(kernels, name)))
    assert [(p.name, p.annotation, p.default) for p in of] == [(p.name, p.annotation, p.default) for p in own]


@pytest.fixture(autouse=True)
def forget():
    went.clear()


def test_the_schema_comes_from_the_annotations():
    assert str(torch.ops.specker.shifted.default._schema) == "specker::shifted(Tensor x, int by=1) -> Tensor"
    assert (
        str(torch.ops.specker.scaled_.default._schema)
        == "specker::scaled_(Tensor(a0!) x, float factor, bool flag=True) -> ()"
    )


def test_every_argument_reaches_the_path_that_serves_it():
    with FakeTensorMode():
        for T, dtype in ((8, torch.float32), (9, torch.float32), (8, torch.float64)):
            shifted(torch.empty(T, dtype=dtype, device="cuda"))
    shifted(torch.zeros(2), hint=True)
    assert went == ["launch", "reference", "reference", "reference with a hint"]
    went.clear()
    assert _path("reference")(torch.zeros(2), by=2).tolist() == [2, 2]
    went.clear()
    assert torch.ops.specker.shifted(torch.zeros(2)).tolist() == [1, 1]  # the dispatcher drops the default
    assert torch.ops.specker.shifted(torch.zeros(3), by=2).tolist() == [2, 2, 2]
    assert went == ["reference", "reference"]


def test_the_checks_run_before_each_path():
    compiled = torch.compile(lambda x: shifted(x, -1), backend="aot_eager", fullgraph=True)
    for call in (lambda x: shifted(x, -1), lambda x: torch.ops.specker.shifted(x, -1), compiled):
        with pytest.raises((ValueError, RuntimeError), match="by must be at least 0, got -1"):
            call(torch.zeros(3))
    with FakeTensorMode(), pytest.raises(ValueError, match="by must be at least 0, got -1"):
        torch.ops.specker.shifted(torch.empty(3), -1)
    assert not went


def test_a_compiled_or_exported_call_is_one_op():
    torch.library.opcheck(torch.ops.specker.shifted, (torch.zeros(3), 2))
    torch.library.opcheck(torch.ops.specker.scaled_, (torch.ones(3), 2.0))

    class Both(torch.nn.Module):
        def forward(self, x):
            y = shifted(x, hint=True)
            scaled_(y, (3.0, True))
            return y

    want = torch.full((3,), 3.0)
    for strict in (True, False):
        program = torch.export.export(Both(), (torch.zeros(3),), strict=strict)
        ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert ops == [torch.ops.specker.shifted.default, torch.ops.specker.scaled_.default]
        assert torch.equal(program.module()(torch.zeros(3)), want)
    graph = torch.compile(Both(), backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(torch.zeros(3)), want)
