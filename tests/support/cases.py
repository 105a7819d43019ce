"""Products of test cases, and the plain texts that strategies are compared with."""

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import specker


def one_in(of: int, *axes: Iterable[Any]) -> list[Any]:
    """The product of `axes` as parameters. One case in `of` runs in `make test`, such that each value meets as many
    others as possible; the rest is marked slow."""
    return _product(axes, lambda indices: sum(indices) % of == 0)


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """The product of `axes` as parameters. In `make test` each value of every axis runs, in as many cases as the
    longest axis has values; the rest is marked slow."""
    axes = tuple(map(tuple, axes))
    run = {
        tuple((n + turn * (n // len(axis))) % len(axis) for turn, axis in enumerate(axes))
        for n in range(max(map(len, axes)))
    }
    return _product(axes, run.__contains__)


def _product(axes: Iterable[Iterable[Any]], runs: Callable[[tuple[int, ...]], bool]) -> list[Any]:
    cases = []
    for indexed in itertools.product(*map(enumerate, axes)):
        values = [value for _, value in indexed]
        name = "-".join(str(v) for v in values) if all(isinstance(v, str | int | float) for v in values) else None
        runs_always = runs(tuple(i for i, _ in indexed))
        cases.append(pytest.param(*values, id=name, marks=[] if runs_always else [pytest.mark.slow]))
    return cases


def plain(target: str | Path, prompt: Iterable[int], count: int, **sampling: Any) -> list[int]:
    """The tokens of plain decoding in float64, decoded once for all tests that ask for them or for fewer."""
    known = _texts.setdefault((str(target), tuple(prompt), tuple(sampling.items())), [0, []])
    if known[0] < count:
        known[:] = count, _engine(str(target)).generate(list(prompt), count, **sampling).tokens
    return known[1][:count]


_texts: dict[tuple[Any, ...], list[Any]] = {}  # by target, prompt and sampling: the count asked for, and the tokens


@functools.lru_cache(2)
def _engine(target: str) -> Any:
    return specker.load(target, strategy="ar", dtype="float64", device="cpu", page_size=16)
