"""The pages are true: commands parse, make targets and links exist, code runs, and generated parts are current."""

import doctest
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

import specker
from scripts import pages
from specker.cli import calibrate, drafts, serve, view
from specker.cli import flags as cli_flags
from specker.extras import EXTRAS
from specker.options import Params, Sampling
from specker.serve.api import Chat
from specker.zoo import real
from train.head import __main__ as head

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def commands() -> list[str]:
    lines = [
        line for page in PAGES for block in blocks(page, "bash") for line in block.replace("\\\n", "").splitlines()
    ]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_first_block_sets_everything_up(tmp_path: Path) -> None:
    """README begins with the commands that run and test a fresh clone, and each of them installs what it needs."""
    lines = [shlex.split(line, comments=True) for line in blocks("README.md", "bash")[0].splitlines()]
    assert lines == [["make", "run"], ["make", "test"]]
    around = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for line in lines:
        argv = [*line, "--dry-run", f"VENV={tmp_path / 'new'}"]
        done = subprocess.run(argv, cwd=ROOT, env=around, capture_output=True, text=True, check=True)
        assert f"-m venv {tmp_path / 'new'}" in done.stdout and "-m pip install" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", commands())
def test_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    match words:
        case ["make", target, *more]:
            assert target in targets()
            own = {"gpu": ("PARTS=", "SHORT="), "static": "TRITON=", "ptx": ("ARGS=", "TRITON="), "real": "MODEL="}
            assert all(word.startswith(own.get(target, "ARGS=")) for word in more)
        case ["python", "-m", "specker.run", *flags]:
            cli_flags.parse(flags)
        case ["torchrun", "--nproc-per-node", ranks, "-m", "specker.run", *flags]:
            assert int(ranks) > 1
            cli_flags.parse(flags)
        case [_, "torchrun", "--nproc-per-node", _, "--no-python", "bash", "-c", _, "specker", *flags]:
            cli_flags.parse(flags)
        case ["specker", "calibrate", *flags] if "--help" not in flags:
            calibrate.parse(flags)
        case ["specker", "view", *flags]:
            view.parse(flags)
        case ["python", "-m", "specker.zoo.real", *flags]:
            real.parse(flags)
        case ["python", "-m", "train.head", *flags]:
            HfArgumentParser(head.Args).parse_args_into_dataclasses(flags)
        case ["specker", "drafts", *flags]:
            drafts.parser().parse_args(flags)
        case ["specker", "serve", *flags]:
            serve.parse(flags)
        case ["curl", "localhost:8000/v1/chat/completions", "-H", "content-type: application/json", "-d", body]:
            assert Chat.model_validate_json(body).messages
        case ["specker-calibrate", "--print-completion", _]:
            pass
        case ["specker", *flags]:
            module = calibrate if flags[:1] == ["calibrate"] else cli_flags
            try:
                module.parse(flags[module is calibrate :])
            except SystemExit as stop:  # a flag that prints
                assert not stop.code
        case ["python", script, *_] if script != "-m":
            assert (ROOT / script).exists()  # tests of these scripts parse their flags
        case ["vllm", "serve", *_]:  # tests/integrations/test_vllm.py runs it
            pass
        case ["pip", "install", "-e", ".[serve]"] | ["pip", "install", "-e", ".[gguf,serve]", "-e", "./models"]:
            assert {"gguf", "serve"} <= set(EXTRAS)
        case ["source", ".venv/bin/activate"]:
            pass
        case _:
            pytest.fail(f"a command this test does not know: {line}")


def test_make_targets_in_the_text_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"`make ([a-z]+)`", (ROOT / page).read_text(encoding="utf-8")):
            assert target in targets(), f"{page}: make {target}"


@pytest.mark.parametrize("page", ["README.md", "docs/decoding.md", "docs/api.md"])
def test_code_runs(
    bundled: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: str
) -> None:
    load = specker.load
    monkeypatch.setattr("specker.load", lambda **options: load(device="cpu", **options) if options else bundled)
    code = blocks(page, "python")
    assert code
    for block in code:
        exec(compile(block, page, "exec"), {})
    out = capsys.readouterr().out
    assert page != "README.md" or "\nTrue\n" in out


@pytest.mark.parametrize("function", [specker.load, specker.Engine.generate])
def test_examples_are_true(function: Any) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={})
    assert test.examples and not doctest.DocTestRunner().run(test).failed


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page: str) -> None:
    """Files and, in them, headings."""
    for link, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", (ROOT / page).read_text(encoding="utf-8")
    ):
        path = (ROOT / page).parent / link if link else ROOT / page
        assert path.exists(), link
        if anchor and not anchor.startswith("specker.") and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings], (
                f"{link}#{anchor}"
            )


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_real_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w/.-])`?([a-z0-9_]+\.(?:py|sh|toml))\b", text))
    tops = ("specker", "simulator", "tests", "bench", "docs", "examples", "models", "scripts", "train")
    here = {path.name for top in tops for path in (ROOT / top).rglob("*")} | {path.name for path in ROOT.iterdir()}
    assert names - {"build.toml"} <= here, names - here  # build.toml: of a Hugging Face kernel


def test_a_generated_part_is_replaced() -> None:
    text = "a\n<!-- generated options lookup -->\nold\n<!-- end -->\nb\n"
    assert pages.filled(text) == text.replace("old", pages.options("lookup")) != text
    with pytest.raises(ValueError, match=r"a page asks for 'nothing'; scripts/pages\.py has only drafts, "):
        pages.filled("<!-- generated nothing -->\n<!-- end -->")


def test_a_line_is_found_by_its_text() -> None:
    name, number = "scripts/pages.py", inspect.getsourcelines(pages.line)[1]
    text = f"<!-- generated line {name}: def line(where -->{{}}<!-- end -->"
    assert pages.filled(text.format("")) == text.format(f"[pages.py:{number}](../{name}#L{number})")
    for other in ("import ", "no line has this"):
        with pytest.raises(ValueError, match=rf"the line of {name} with '{other}', which \d+ lines have"):
            pages.line(f"{name}: {other}")


def test_every_option_of_a_request_is_described() -> None:
    """Where `help(specker.Engine.generate)` shows it."""
    named = {f.name for cls in (Params, Sampling) for f in fields(cls)} - {"sampling"}
    assert all(f"\n    {name}: " in f"\n{inspect.getdoc(specker.Engine.generate)}" for name in named)


def test_every_flag_has_help() -> None:
    for module in (cli_flags, calibrate):
        for action in module.parser()._actions:
            assert action.help and len(action.help) > 5, action


def test_documented_fields_of_a_trace_exist() -> None:
    _, section = (ROOT / "docs" / "view.md").read_text(encoding="utf-8").split("\n## The trace\n")
    named = set(re.findall(r"^\* `(\w+)`", section, re.MULTILINE)) | set(re.findall(r"and `(\w+)`, the", section))
    documented = (ROOT / "specker" / "view" / "trace.py").read_text(encoding="utf-8")
    assert {"probability", "outside"} <= named and named <= set(re.findall(r"\w+", documented))


def test_site_builds(tmp_path: Path) -> None:
    """Strictly: a page outside the navigation, a dead link or a name that the reference lacks is an error."""
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "ops.html").read_text(encoding="utf-8")
    assert 'id="tree_attention"' in page
    assert "<code>layer_parallel</code>" in (tmp_path / "api.html").read_text(encoding="utf-8")
    assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://[^"]+\.(?:js|css)', page)  # works offline
