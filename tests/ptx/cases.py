"""The form of a case: what to launch, and how to judge its results."""

import importlib.util
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class Verdict:
    """What a case's results were compared with, and what was wrong."""

    wrong: list[str] = field(default_factory=list)
    error: float = 0.0  # the largest of the values

    def near(self, name: str, got: Tensor, want: Tensor, plain: Tensor, slack: float = 0.0) -> None:
        """At most twice as far from `want` (float64) as `plain`, torch's result in the working dtype, is."""
        if not got.numel() and got.shape == want.shape:
            return
        error, own = (float((x.double() - want.double()).abs().max()) for x in (got, plain))
        self.error = max(self.error, error)
        if not error <= 2 * own + slack or got.shape != want.shape:  # NaN is wrong, too
            self.wrong.append(f"{name}: error {error:.3g}, torch has {own:.3g}")

    def same(self, name: str, got: Tensor, want: Tensor) -> None:
        if got.shape != want.shape:
            self.wrong.append(f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        elif not torch.equal(got, want):
            self.wrong.append(f"{name}: {int((got != want).sum())} of {got.numel()} differ")


@dataclass(frozen=True)
class Case:
    label: str
    work: Callable[[], Any]  # launches; this is simulated
    judge: Callable[[Verdict, Any], None]  # compares what `work` returned
    constant: Mapping[str, Collection[str]] = field(default_factory=dict)  # parameters besides `ops.CONSTANT`


def attention_tests() -> Any:
    """The module tests/kernels/test_tree_attention.py, which makes ragged batches."""
    path = Path(__file__).parents[1] / "kernels" / "test_tree_attention.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weight(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """A matrix [.., O, E] whose products with unit rows have a variance of 1."""
    from formulas import randn

    return (randn(*shape, seed=seed) / math.sqrt(shape[-1])).to(dtype)
