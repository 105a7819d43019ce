"""`specker cache`: what lies in the cache, and how it is removed."""

from pathlib import Path

import pytest

from specker.cli.cache import main


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path))
    for name, size in {"gguf/a-1-packed/x": 2_000_000, "gguf/b-2/y": 3_000, "vocab/z": 10, "model.gguf": 500}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    return tmp_path


def test_the_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "gguf" / "link").symlink_to("/")
    assert main([]) == 0
    lines = capsys.readouterr().out
    for part in ("gguf/a-1-packed", "converted GGUF files", "2.0 MB", "gguf/b-2", "3.0 kB", "model.gguf", "500 B"):
        assert part in lines
    assert "counts of the tokens that targets wrote" in lines


def test_entries_are_removed_by_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "gguf" / "link").symlink_to(root / "vocab")
    assert main(["--clear", "gguf/a-1-packed", "model.gguf", "gguf/link"]) == 0
    assert "removed 3" in capsys.readouterr().out
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == ["y", "z"]
    assert main(["--clear", "all"]) == 0
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_an_unknown_name_removes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--clear", "model.gguf", "../other"]) == 2
    assert "the cache has no ../other; it has gguf/a-1-packed, " in capsys.readouterr().err
    assert (root / "model.gguf").exists()


def test_verify_and_clear_exclude_each_other(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--verify", "--clear", "all"]) == 2 and (root / "model.gguf").exists()
    assert "--verify and --clear exclude each other" in capsys.readouterr().err
    assert main(["--verify"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in said] == [
        f"gguf/{name}: damaged, converted.json cannot be read (No such file or directory)"
        for name in ("a-1-packed", "b-2")
    ]


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "none"))
    assert main([]) == 0 and "0 B" in capsys.readouterr().out
    assert main(["--clear", "x"]) == 2 and "it has nothing" in capsys.readouterr().err
