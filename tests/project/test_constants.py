"""A module gives each of its constants a line, with its unit or reason: none assigns to more than two names at once."""

import ast
from pathlib import Path

import pytest

from specker import zoo

ROOT = Path(zoo.__file__).parents[2]
FOLDERS = "specker", "simulator", "bench", "tests", "scripts", "train", "examples"


def packs(source: str) -> list[str]:
    """`line: names` of each module-level assignment to more than two names."""
    return [
        f"{node.lineno}: {ast.unparse(target)}"
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if sum(isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) for part in ast.walk(target)) > 2
    ]


def test_each_constant_has_a_line() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 400
    assert {str(path.relative_to(ROOT)): found for path in paths if (found := packs(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("A, B = 1, 2\nC = D = E = 3\ndef f():\n    a, b, c = 1, 2, 3", []),
        ("A, B, C = 1, 2, 3", ["1: (A, B, C)"]),
        ("(A, B), (C, D) = pairs", ["1: ((A, B), (C, D))"]),
        ("A = 1\n[B, *C, D] = names", ["2: [B, *C, D]"]),
        ("x.a, x.b, x.c = 1, 2, 3", []),
    ],
)
def test_the_check_finds_packs(source: str, found: list[str]) -> None:
    assert packs(source) == found
