"""Weights move to huge pages, and no token changes."""

import mmap
from pathlib import Path

import pytest
import torch
from make_checkpoint import make
from make_gguf import write

import specker
from specker.cpu import available, pages
from specker.cpu.pages import HUGE, LINE, HugePages, Place, mapped_files, offered

PROMPT = [5, 9, 40, 7]
SIZES = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96, "layers": 3}
linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are Linux's")


@pytest.fixture(autouse=True)
def always_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made, whatever this machine's kernel says of huge pages."""
    monkeypatch.setattr(pages, "offered", lambda: hasattr(mmap, "MADV_HUGEPAGE"))


def mapped(path: Path, size: int) -> torch.Tensor:
    """[size] uint8 that a file of random bytes holds."""
    path.write_bytes(bytes(torch.randint(256, (size,), dtype=torch.uint8).tolist()))
    return torch.from_file(str(path), size=size, dtype=torch.uint8)


@linux
def test_parts_of_a_file_are_copied_one_after_another(tmp_path):
    """A reader is moved once all of its weights are copied. Memory that no file fills stays where it is."""
    sizes = [HUGE + 100, 100, 3 * HUGE]
    tensors = [mapped(tmp_path / str(n), size) for n, size in enumerate(sizes)]
    own = torch.randint(256, (2 * HUGE,), dtype=torch.uint8)
    before, moved = own.clone(), {}
    places = [Place(x.data_ptr(), x.nbytes, lambda copy, n=n: moved.update({n: copy})) for n, x in enumerate(tensors)]
    places.append(Place(own.data_ptr(), own.nbytes, lambda copy: moved.update(own=copy)))
    moving = HugePages(places)
    moving.some(0)
    assert not moved and not moving.done, "the first file has two parts"
    moving.some(0)
    moving.some(0)
    assert list(moved) == [0]
    moving.all()
    assert moving.done and list(moved) == [0, 1, 2] and torch.equal(own, before)
    in_file = mapped_files()
    for x, copy in zip(tensors, moved.values(), strict=True):
        assert torch.equal(x, copy) and in_file(x.data_ptr()) and not in_file(copy.data_ptr())
        assert copy.data_ptr() % LINE == 0
    assert moved[0].data_ptr() % HUGE == 0, "the copies begin with a page"


def resident(x: torch.Tensor) -> int:
    """Pages of a tensor's memory that count as this process's."""
    pages_of = Path("/proc/self/pagemap")
    first, count = x.data_ptr() // mmap.PAGESIZE, x.nbytes // mmap.PAGESIZE
    with pages_of.open("rb") as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.uint8)
    return int((entries[7::8] >= 128).sum())  # its highest bit


@linux
@pytest.mark.parametrize("writes", [False, True])
def test_pages_of_files_are_let_go(tmp_path, writes):
    """Unless the process has written to a mapping, whose pages then differ from the file's."""
    x, kept = mapped(tmp_path / "x", HUGE), []
    before = x.clone()
    if writes:
        x[5 * mmap.PAGESIZE] += 1
        before[5 * mmap.PAGESIZE] += 1
    assert resident(x) > 0
    HugePages([Place(x.data_ptr(), x.nbytes, kept.append)]).all()
    assert (resident(x) == 0) != writes
    assert torch.equal(kept[0], before) and torch.equal(x, before)


@linux
def test_a_short_text_moves_nothing(tmp_path, monkeypatch):
    x, moved = mapped(tmp_path / "x", 2 * HUGE), []
    moving = HugePages([Place(x.data_ptr(), x.nbytes, moved.append)])
    monkeypatch.setattr(pages, "SECONDS", 4)
    monkeypatch.setattr(moving, "some", moved.append)
    for _ in range(4):
        moving.after(1.0)
    assert not moved
    moving.after(1.0)
    assert moved == [pages.MOVING]


@linux
def test_too_little_memory_leaves_the_files(tmp_path, monkeypatch):
    x = mapped(tmp_path / "x", HUGE)
    place = Place(x.data_ptr(), x.nbytes, pytest.fail)
    HugePages([place], most=HUGE - 1).all()

    def fails(size):
        raise OSError("no memory")

    monkeypatch.setattr(pages, "allocated", fails)
    moving = HugePages([place])
    moving.all()
    assert moving.done


@pytest.mark.parametrize("said", [None, "always madvise [never]\n"])
def test_where_linux_has_no_huge_pages_nothing_moves(tmp_path, monkeypatch, said):
    file = tmp_path / "enabled"
    if said is not None:
        file.write_text(said)
    monkeypatch.setattr(pages, "ENABLED", file)
    assert not offered()
    file.write_text("always [madvise] never\n")
    assert offered() == hasattr(mmap, "MADV_HUGEPAGE")


@linux
@pytest.mark.skipif(not available(), reason="no compiler")
@pytest.mark.parametrize("tied", [True, False])
def test_no_token_changes_while_weights_move(tmp_path, monkeypatch, tied):
    """The weights of a GGUF file are mapped. They move while a text is decoded, for a target and for its draft."""
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pages, "SECONDS", 0)
    monkeypatch.setattr(pages, "MOVING", 0)  # a part after each step
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", tied=tied, **SIZES), "Q8_0")
    stays, moves = (specker.load(file, file, strategy="draft", device="cpu", huge_pages=on) for on in ("off", "on"))
    places = [*moves.model.places, *moves.drafters[0].model.places]
    in_file = mapped_files()
    assert len(places) > 20 and all(in_file(place.address) for place in places), "all of them are mapped"
    stream = moves.stream(PROMPT, 40)
    tokens = list(next(stream).tokens)
    assert not moves.loop.pages.done
    for event in stream:
        tokens += event.tokens
    assert tokens == stays.generate(PROMPT, 40).tokens and stays.loop.pages.done
    moves.loop.pages.all()
    assert moves.generate(PROMPT, 40).tokens == tokens
    segments = [part for layer in moves.model.stack._layers for part in (*layer.qkv.parts, *layer.down.parts)]
    in_file = mapped_files()
    assert not any(in_file(part.data) for part in segments if part.data)
    assert not in_file(moves.model.head.runs[0].data.data_ptr())
    other = specker.load(file, file, strategy="draft", device="cpu")
    other.warmup()
    assert other.loop.pages.done, "a warm-up moves all at once"
    assert other.generate(PROMPT, 40).tokens == tokens


@linux
@pytest.mark.skipif(not available(), reason="no compiler")
def test_copies_outlive_the_engine_that_made_them(tmp_path, monkeypatch):
    """Engines may share a target's compiled layers."""
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", **SIZES), "Q8_0")
    engine = specker.load(file, strategy="ar", device="cpu")
    engine.loop.pages.all()
    stack = engine.model.stack
    addresses = [layer.qkv.parts[0].data for layer in stack._layers]
    engine.close()
    del engine
    lines = [line.split()[0].split("-") for line in pages.MAPS.read_text().splitlines()]
    assert all(any(int(a, 16) <= at < int(b, 16) for a, b in lines) for at in addresses)


@linux
@pytest.mark.skipif(not available(), reason="no compiler")
@pytest.mark.parametrize(("processes", "copies"), [(1, True), (4, False)])
def test_the_processes_of_a_job_share_the_memory_for_copies(tmp_path, monkeypatch, processes, copies):
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", **SIZES), "Q8_0")
    size = sum(place.size for place in specker.load(file, strategy="ar", device="cpu").model.places)
    monkeypatch.setattr("specker.runtime.engine.free", lambda device: 4 * size)
    engine = specker.load(file, strategy="ar", device="cpu", max_context=1, kv_dtype="int8")
    engine.loop.pages.all()
    data = engine.model.stack._layers[0].qkv.parts[0].data
    assert mapped_files()(data) != copies
