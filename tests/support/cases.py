"""Products of test cases, and the plain texts that strategies are compared with."""

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import specker


def one_in(of: int, *axes: Iterable[Any]) -> list[Any]:
    """The product of `axes` as parameters. One case in `of` runs in `make test`, such that each value meets as many
    others as possible; the rest is marked slow."""
    cases = []
    for indexed in itertools.product(*map(enumerate, axes)):
        left_out = sum(i for i, _ in indexed) % of
        values = [value for _, value in indexed]
        name = "-".join(str(v) for v in values) if all(isinstance(v, str | int | float) for v in values) else None
        cases.append(pytest.param(*values, id=name, marks=[pytest.mark.slow] if left_out else []))
    return cases


def plain(target: str | Path, prompt: Iterable[int], count: int, **sampling: Any) -> list[int]:
    """The tokens of plain decoding in float64, decoded once for all tests that ask for them."""
    return list(_plain(str(target), tuple(prompt), count, tuple(sampling.items())))


@functools.cache
def _plain(target: str, prompt: tuple[int, ...], count: int, sampling: tuple) -> tuple[int, ...]:
    return tuple(_engine(target).generate(list(prompt), count, **dict(sampling)).tokens)


@functools.lru_cache(2)
def _engine(target: str) -> Any:
    return specker.load(target, strategy="ar", dtype="float64", device="cpu", page_size=16)
