"""The pages are true: commands parse, make targets and links exist, code runs, and design.md lists the files."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specker
from specker import calibrate, run
from specker.view import __main__ as view
from specker.zoo import real

ROOT = Path(__file__).parent.parent
DESIGN = ROOT / "docs" / "design.md"
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
LINES = 180  # of README.md: three screens


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


def test_there_are_commands() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("line", commands())
def test_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    match words:
        case ["make", target, *more]:
            assert target in targets()
            own = {"gpu": "PARTS=", "static": "TRITON=", "real": "MODEL="}
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
        case ["python", "-m", "specker.zoo.real", *flags]:
            real.parse(flags)
        case ["specker" | "specker-calibrate" as name, *flags]:
            module = {"specker": run, "specker-calibrate": calibrate}[name]
            with pytest.raises(SystemExit) as stop:  # cli.md shows only flags that print
                module.parse(flags)
            assert not stop.value.code
        case ["python", script, *_] if script != "-m":
            assert (ROOT / script).exists()  # tests of these scripts parse their flags
        case ["vllm", "serve", *_]:  # tests/integrations/test_vllm.py runs it
            pass
        case ["pip", "install", ".", "./models"] | ["source", ".venv/bin/activate"]:
            pass
        case _:
            pytest.fail(f"a command this test does not know: {line}")


def test_make_targets_in_the_text_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"`make ([a-z]+)`", (ROOT / page).read_text(encoding="utf-8")):
            assert target in targets(), f"{page}: make {target}"


@pytest.mark.parametrize("page", ["README.md", "docs/decoding.md"])
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


def test_the_example_of_load_is_true() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(specker.load, "load", globs={})
    assert not doctest.DocTestRunner().run(test).failed


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LINES


def tree_of(text: str) -> str:
    (tree,) = re.findall(r"## The files\n\n```\n(.*?)```", text, re.DOTALL)
    return tree


def test_ratios_of_engines_in_the_text() -> None:
    """Those of docs/results.md, from the rows of its table."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    speed = {
        name: float(own)
        for name, own in re.findall(r"^\| ([\w.+ ]+) \| [\w.]+ \| ([\d.]+) \|(?: [\d.]+ \|){3}", text, re.M)
    }
    (found,) = re.findall(r"the same (Q4_0) file `ar` decodes ([\d.]+) times .* the (Q4_1) file ([\d.]+) times", text)
    for kind, ratio in (found[:2], found[2:]):
        assert ratio == f"{speed[f'specker ar {kind}'] / speed[f'llama.cpp {kind}']:.1f}"


def test_tree_exists() -> None:
    parents: list[str] = []
    for line in tree_of(DESIGN.read_text(encoding="utf-8")).splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        parents[len(indent) // 2 :] = [name]
        assert (ROOT / "".join(parents)).exists(), line


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page: str) -> None:
    """Files and, in them, headings."""
    for link, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", (ROOT / page).read_text(encoding="utf-8")
    ):
        path = (ROOT / page).parent / link if link else ROOT / page
        assert path.exists(), link
        if anchor and not anchor.startswith("specker."):
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings], (
                f"{link}#{anchor}"
            )


def test_tree_names_every_file() -> None:
    """Except the zoo's files, which share one line."""
    tree = tree_of(DESIGN.read_text(encoding="utf-8"))
    files = {path.name for path in (ROOT / "specker").rglob("*.py") if "zoo" not in path.parts}
    named = set(re.findall(r"\w+\.py", tree))
    assert files - named == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_real_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w/.-])`?([a-z0-9_]+\.(?:py|sh|toml))\b", text))
    tops = ("specker", "tests", "bench", "docs", "examples", "models", "scripts", "train")
    here = {path.name for top in tops for path in (ROOT / top).rglob("*")} | {path.name for path in ROOT.iterdir()}
    assert names - {"build.toml"} <= here, names - here  # build.toml: of a Hugging Face kernel


@pytest.mark.parametrize("page", ["README.md", "docs/strategies.md"])
def test_every_strategy_is_in_the_table(page: str) -> None:
    from specker.runtime.strategies import NAMES

    named = re.findall(r"^\| `([a-z]+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert set(NAMES) - {"ar"} <= set(named) <= set(NAMES) | {"peers"}


def test_every_flag_is_on_its_page() -> None:
    """docs/cli.md lists the groups of --help-all."""
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z][^|`]+) \| (`--[^|]+) \|", text, re.MULTILINE)
    listed = {title: re.findall(r"--[a-z-]+", cell) for title, cell in rows}
    groups = re.findall(r"^(\w.*):\n((?:(?:  .*)?\n)+)", run.parser().format_help(), re.MULTILINE)
    helped = {title: re.findall(r"^  (--[a-z-]+)", group, re.MULTILINE) for title, group in groups}
    assert listed == {title: flags for title, flags in helped.items() if flags and title != "more help"}


def test_every_op_is_in_the_reference() -> None:
    from specker import kernels

    text = (ROOT / "docs/ops.md").read_text(encoding="utf-8")
    assert re.findall(r"^::: specker\.kernels\.(\w+)$", text, re.MULTILINE) == re.findall(
        r"\(#specker\.kernels\.(\w+)\)", text
    )
    assert set(re.findall(r"^::: specker\.kernels\.(\w+)$", text, re.MULTILINE)) == set(kernels.__all__)


def test_site_builds(tmp_path: Path) -> None:
    """Strictly: a page outside the navigation, a dead link or a name that the reference lacks is an error."""
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "ops.html").read_text(encoding="utf-8")
    assert 'id="specker.kernels.tree_attention"' in page
    assert "<code>layer_parallel</code>" in (tmp_path / "api.html").read_text(encoding="utf-8")
    assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://[^"]+\.(?:js|css)', page)  # works offline
