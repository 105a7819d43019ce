"""The compiled CPU kernels under sanitizers: support/sanitized.py has a run for every C file, and each is clean."""

import shutil
from pathlib import Path

import pytest
import sanitized

needs_gcc = pytest.mark.skipif(sanitized.runtime() is None, reason="gcc's libasan.so is missing")


def test_every_c_file_has_a_run() -> None:
    assert sanitized.RUNS.keys() == {path.name for path in sanitized.SOURCES.glob("*.c")}


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert sanitized.main([]) == 2
    assert capsys.readouterr().out == (
        "the sanitizers need gcc and its libasan.so; on Debian and Ubuntu: apt-get install gcc\n"
    )
    assert sanitized.main(["other.c"]) == 2
    assert capsys.readouterr().out.startswith("no C file is named other.c: there are adjust.c, ")


@needs_gcc
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sanitized.RUNS)
def test_no_findings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitized.main([name]) == 0, capsys.readouterr().out


@needs_gcc
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_read_beyond_the_end_is_found(tmp_path: Path) -> None:
    """The sanitizer fails a library that does not check where a text's ids point."""
    sources = tmp_path / "csrc"
    shutil.copytree(sanitized.SOURCES, sources)
    text = (sources / "adjust.c").read_text()
    check = "if (!within(text[i], V)) return 0;"
    assert check in text
    (sources / "adjust.c").write_text(text.replace(check, ""))
    found = sanitized.run("odd calls adjust_rows", sanitized.levels()[0], sources)
    assert found.returncode == 99 and "AddressSanitizer" in found.stderr and "adjust.c" in found.stderr
