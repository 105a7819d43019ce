"""bench/README.md lists every script and every result, and nothing else."""

import re
import shlex
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
TEXT = (BENCH / "README.md").read_text(encoding="utf-8")
NAMED = {Path(name).name for name in re.findall(r"`((?:bench/|kernels/|gpu/)?[\w./-]+\.(?:py|sh|jsonl|md|svg))`", TEXT)}
COMMANDS = re.findall(r"`((?:python|torchrun) [^`]*)`", TEXT)


def test_every_script_is_listed() -> None:
    scripts = {path.name for pattern in ("*.py", "*.sh", "kernels/*.py", "gpu/*.py") for path in BENCH.glob(pattern)}
    scripts.remove("__init__.py")
    named = NAMED | {Path(word).name for line in COMMANDS for word in line.split() if word.endswith(".py")}
    assert scripts <= named, scripts - named
    assert {name for name in named if name.endswith((".py", ".sh"))} <= scripts


def test_every_result_is_listed() -> None:
    results = {path.name for path in (BENCH / "results").rglob("*.*") if path.is_file()}
    named = {name for name in NAMED if name.endswith((".jsonl", ".svg", ".md"))} - {
        "spec_bench.jsonl",
        "coder_prompts.jsonl",
    }
    assert results == named, results ^ named


def test_every_machine_is_listed() -> None:
    machines = {path.name for path in (BENCH / "results").iterdir() if path.is_dir()}
    assert machines <= set(re.findall(r"`([\w.-]+)`", TEXT))


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_names_a_script(line: str) -> None:
    words = shlex.split(line)
    if words[:2] == ["python", "-m"]:
        module = BENCH.parent / words[2].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        return
    script = next(word for word in words if word.endswith(".py"))
    code = (BENCH.parent / script).read_text(encoding="utf-8")
    for flag in (word for word in words[words.index(script) :] if word.startswith("--")):
        assert flag.removeprefix("--") in code, flag
