"""The form of a case: what to launch, and how to judge its results."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptxsim.driver import Constants, Simulation


@dataclass
class Verdict:
    """What a case's results were compared with, and what was wrong."""

    wrong: list[str] = field(default_factory=list)
    error: float = 0.0  # the largest of the values
    benign: int = 0  # oddities that cannot change a result

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
    constant: Constants = field(default_factory=dict)  # the parameters of each kernel that no kernel writes

    def verdict(self, simulation: AbstractContextManager[Simulation]) -> Verdict:
        """What is wrong with the results of a simulation of the case, or with its launches."""
        with simulation as seen:
            got = self.work()
        verdict = Verdict(benign=seen.benign())
        self.judge(verdict, got)
        verdict.wrong += [f"{n} x {text}" for text, n in seen.problems().items()]
        return verdict
