"""The README is true: its commands parse, its make targets exist, its code runs, and its tree lists the files."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import specker
from specker import calibrate, run
from specker.view import __main__ as view

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_are_commands() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("line", commands())
def test_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    match words:
        case ["make", target, *more]:
            assert target in targets()
            own = {"gpu": "PARTS=", "static": "TRITON="}
            assert all(word.startswith(own.get(target, "ARGS=")) for word in more)
        case ["python", "-m", "specker.run", *flags]:
            run.parse(flags)
        case ["torchrun", "--nproc-per-node", ranks, "-m", "specker.run", *flags]:
            assert int(ranks) > 1
            run.parse(flags)
        case ["python", "-m", "specker.calibrate", *flags]:
            calibrate.parse(flags)
        case ["python", "-m", "specker.view", *flags]:
            view.parse(flags)
        case ["pip", "install", "."] | ["source", ".venv/bin/activate"]:
            pass
        case _:
            pytest.fail(f"a command this test does not know: {line}")


def test_make_targets_in_the_text_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"`make ([a-z]+)`", (ROOT / page).read_text(encoding="utf-8")):
            assert target in targets(), f"{page}: make {target}"


def test_code_runs(bundled: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = specker.load
    monkeypatch.setattr("specker.load", lambda **options: load(device="cpu", **options) if options else bundled)
    for code in blocks("README.md", "python"):
        exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("True\n")


def tree_of(text: str) -> str:
    (tree,) = re.findall(r"## The tree\n\n```\n(.*?)```", text, re.DOTALL)
    return tree


def test_tree_and_links_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = tree_of(text)
    parents: list[str] = []
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        parents[len(indent) // 2 :] = [name]
        assert (ROOT / "".join(parents)).exists(), line
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def test_tree_names_every_file() -> None:
    """Except the zoo's files, which share one line."""
    tree = tree_of((ROOT / "README.md").read_text(encoding="utf-8"))
    files = {path.name for path in (ROOT / "specker").rglob("*.py") if "zoo" not in path.parts}
    named = set(re.findall(r"\w+\.py", tree))
    assert files - named == {"__init__.py", "__main__.py"}


def test_drawing_and_text_name_real_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\b([a-z0-9_]+\.(?:py|sh|md|txt|toml))\b", text))
    here = {
        path.name
        for top in ("specker", "tests", "bench", "docs", "examples", "scripts")
        for path in (ROOT / top).rglob("*")
    }
    here |= {path.name for path in ROOT.iterdir()}
    assert names <= here, names - here


def test_every_strategy_is_in_the_table() -> None:
    from specker.runtime.strategies import NAMES

    state = dict(re.findall(r"^\| `([a-z]+)` \|.*\| (\w+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert state == dict.fromkeys(NAMES, "works")
