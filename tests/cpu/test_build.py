"""The compiled library: when it is compiled, by what, and what happens where it cannot be."""

import ctypes
import errno
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from make_checkpoint import make

import specker
from specker import cpu
from specker.cli import run
from specker.cpu import build, library, packed
from specker.kernels.cpu import native, use

linear = importlib.import_module("specker.kernels.row_linear")

ROOT = Path(__file__).parents[2]
ONE = 'int answer(void) { return 42; } // "one source": a compiler runs twice, to compile and to link\n'


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache and a program of one small source, compiled by a script that counts its runs."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.c").write_text(ONE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    real = build.compiler()
    assert real is not None, "these tests need a C compiler"
    counts_runs(tmp_path, monkeypatch, f'exec {" ".join(real)} "$@"')
    return tmp_path


def counts_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    script = folder / "counting-cc"
    script.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{then}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """No compiler on the path and none of Python's; returns the folder that is the path."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    return tmp_path / "bin"


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines()) if (folder / "runs").exists() else 0


def test_it_is_compiled_once(fresh, monkeypatch):
    told = []
    path = build.library(told.append)
    assert path.is_file() and path.parent == fresh / "cache" / "cpu"
    assert told == [f"compiling the CPU kernels ({build.level()}): some seconds, once on this machine"]
    assert build.library(told.append) == path and len(told) == 1 and runs(fresh) == 2
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.stem}.sha256", "lock"}
    monkeypatch.setenv("CC", "/nonexistent")
    assert build.library() == path  # what is compiled needs no compiler
    monkeypatch.delenv("CC")
    (build.SOURCES / "one.c").write_text(ONE.replace("42", "43"))
    assert build.library() != path  # other sources, another library


def test_processes_that_start_at_once_compile_once(fresh):
    """They wait for the one that was first."""
    there = multiprocessing.get_context("fork")
    started = there.Barrier(3)

    def work():
        started.wait(60)
        os._exit(0 if build.library().is_file() else 1)

    processes = [there.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert runs(fresh) == 2


def test_a_cache_that_cannot_be_written(fresh, monkeypatch):
    (fresh / "file").touch()
    monkeypatch.setenv("SPECKER_CACHE", str(fresh / "file"))  # root may write to any folder, but not below a file
    told = []
    path = build.library(told.append)
    assert path.is_file() and fresh not in path.parents
    assert told == [
        f"compiling the CPU kernels ({build.level()}): some seconds, at each start, because {fresh}/file/cpu cannot be "
        "written (Not a directory): set SPECKER_CACHE to another folder"
    ]


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_a_file_system_without_locks(fresh, monkeypatch, error):
    class Lock(build.FileLock):
        def __enter__(self):
            if fresh in Path(self.lock_file).parents:
                raise error
            return super().__enter__()

    monkeypatch.setattr(build, "FileLock", Lock)
    told = []
    assert fresh not in build.library(told.append).parents
    why = f"{fresh}/cache/cpu cannot be locked ({getattr(error, 'strerror', error)})"
    assert f"at each start, because {why}: set SPECKER_CACHE to another folder" in told[0]


@pytest.mark.parametrize("size", [0, 1000, None])
def test_a_damaged_library_is_compiled_again(fresh, size):
    """Empty, cut in its middle, or whole with other bytes. Without its SHA-256 it is compiled again, too."""
    path = build.library()
    whole = path.read_bytes()
    path.write_bytes(whole[:size] if size is not None else whole[:-9] + b"x" * 9)
    assert build.library() == path and runs(fresh) == 4 and ctypes.CDLL(str(path)).answer() == 42
    path.with_suffix(".sha256").unlink()
    assert build.library() == path and runs(fresh) == 6


def test_a_library_that_others_may_have_written_is_compiled_again(fresh, monkeypatch):
    before = os.umask(0)  # the compiler makes files that everyone may write to
    path = build.library()
    os.umask(before)
    assert build.library() == path and runs(fresh) == 2
    for file in (path, path.with_suffix(".sha256")):
        file.chmod(0o664)
        build.library()
    assert runs(fresh) == 6 and not path.stat().st_mode & 0o022
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # root's files are for all
    assert build.library() == path and runs(fresh) == 6


@pytest.mark.parametrize("foreign", ["belongs to another user", "may write to"])
def test_nothing_in_a_folder_of_others_is_loaded(fresh, monkeypatch, request, foreign):
    folder = build.library().parent
    if foreign == "may write to":
        folder.chmod(0o775)
        why = f"other users may write to {folder}"
    else:
        real = Path.stat
        owner = os.stat_result((*real(folder)[:4], 12345, *real(folder)[5:]))
        monkeypatch.setattr(Path, "stat", lambda path, **how: owner if path == folder else real(path, **how))
        why = f"{folder} belongs to another user"
    told = []
    path = build.library(told.append)
    assert path.is_file() and fresh not in path.parents
    assert f"at each start, because {why}: set SPECKER_CACHE" in told[0]
    request.getfixturevalue("no_compiler")
    with pytest.raises(build.Unavailable) as error:
        build.library()
    assert str(error.value) == f"there is no C compiler, and {why}: install gcc or clang, or pip install ziglang"


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    counts_runs(fresh, monkeypatch, 'echo "In file included" >&2; echo "one.c:1:5: error: no such thing" >&2; exit 1')
    with pytest.raises(build.Unavailable) as error:
        build.library()
    assert str(error.value) == (
        f"{fresh}/counting-cc fails (one.c:1:5: error: no such thing): set CC to another compiler, such as clang, or "
        "'python -m ziglang cc' after pip install ziglang"
    )
    assert [file.name for file in (fresh / "cache" / "cpu").iterdir()] == ["lock"]
    counts_runs(fresh, monkeypatch, "exit 1")
    with pytest.raises(build.Unavailable, match=r"fails \(no message\)"):
        build.library()


@pytest.mark.parametrize("command", ["/nonexistent", "gcc '"])
def test_a_cc_that_is_no_command_is_named(fresh, no_compiler, monkeypatch, command):
    monkeypatch.setenv("CC", command)
    with pytest.raises(build.Unavailable) as error:
        build.library()
    assert str(error.value) == f"CC is {command!r}, which is no command: unset CC, or set it to a C compiler"


def test_which_compiler_is_taken(no_compiler, monkeypatch):
    assert build.compiler() is None
    monkeypatch.setattr(build, "find_spec", lambda name: name if name == "ziglang" else None)
    assert build.compiler() == [sys.executable, "-m", "ziglang", "cc"]
    for name in ("clang", "gcc", "cc", "other"):
        (no_compiler / name).write_text("#!/bin/sh\n")
        (no_compiler / name).chmod(0o755)
        if name != "other":
            assert build.compiler() == [str(no_compiler / name)]
    monkeypatch.setenv("CC", "other -m64")
    assert build.compiler() == [str(no_compiler / "other"), "-m64"]


def test_levels(monkeypatch):
    """The best of the processor; one that it lacks would end the process with an illegal instruction."""
    monkeypatch.delenv("SPECKER_CPU", raising=False)
    for has, want in (
        (build.LEVELS["amx"][0], "amx"),
        (build.LEVELS["avx512bf16"][0] | {"amx_tile"}, "avx512bf16"),
        (build.LEVELS["avx512vnni"][0], "avx512vnni"),
        (build.V4, "avx512"),
        (build.V3 | {"avx_vnni"}, "avxvnni"),
        (build.V3, "avx2"),
        ({"asimddp", "neon"}, "dotprod"),
        ({"sse2"}, "portable"),
    ):
        monkeypatch.setattr(build, "_features", lambda has=has: has)
        assert build.level() == want
    monkeypatch.setenv("SPECKER_CPU", "portable")
    assert build.level() == "portable"
    monkeypatch.setenv("SPECKER_CPU", "avx2")
    with pytest.raises(ValueError, match="SPECKER_CPU=avx2 needs a processor with avx2, bmi2, f16c, fma"):
        build.level()
    monkeypatch.setenv("SPECKER_CPU", "nonsense")
    with pytest.raises(ValueError, match=r"SPECKER_CPU must be one of amx, .*, portable, got 'nonsense'"):
        build.level()


def as_in_a_new_process():
    library._loaded.cache_clear()


@pytest.fixture
def uncompiled(tmp_path, monkeypatch, no_compiler):
    """A process without a C compiler."""
    as_in_a_new_process()
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    yield
    as_in_a_new_process()


SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96}


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_without_a_compiler_the_reference_operators_decode(uncompiled, tmp_path, quantize):
    target = make(tmp_path / "target", tokenizer=True, **SIZES)
    engine = specker.load(target, strategy="lookup", device="cpu", quantize=quantize)
    why = "there is no C compiler: install gcc or clang, or pip install ziglang"
    assert engine.remarks["cpu"] == f"decoding is slow, because {why}"
    assert engine.model.stack is None and engine.dtype == torch.float32
    prompt = [5, 17, 80, 3, 41]
    assert engine.check(prompt, engine.generate(prompt, 12), 12).ok
    with pytest.raises(RuntimeError, match="the CPU kernels are not compiled: there is no C compiler"):
        cpu.product(torch.zeros(1, 32), torch.zeros(1, 32))


def test_a_library_that_the_system_does_not_load(uncompiled, tmp_path, monkeypatch):
    path = tmp_path / "kernels.so"
    path.touch()
    monkeypatch.setattr(build, "library", lambda on_progress: path)
    said = f"the system does not load {path} ({path}: file too short): set SPECKER_CACHE to another folder"
    assert (cpu.available(), cpu.problem()) == (False, said)


def test_without_a_compiler_packed_weights_are_restored(uncompiled):
    torch.manual_seed(0)
    codes = torch.randint(0, 64, (20, 256), dtype=torch.uint8)
    scale, d = torch.randint(-128, 128, (20, 16)).to(torch.int8), torch.rand(20, 1).half()
    whole = packed.pack(packed.Numbers("int6 sixteen", codes, scale, None, d))
    want = (codes.double() - 32) * scale.double().repeat_interleave(16, 1) * d.double()
    torch.testing.assert_close(whole.dequantised(torch.float32), want.float(), rtol=2**-23, atol=0)


def test_a_compiled_engine_has_no_remark(tmp_path):
    engine = specker.load(make(tmp_path, **SIZES), strategy="lookup", device="cpu")
    assert "cpu" not in engine.remarks and engine.model.stack is not None


ONLY_OPS = """
import sys, torch
from specker.kernels import row_linear
assert not {"specker.cpu", "specker.runtime"} & sys.modules.keys()
x, weight = torch.ones(1, 256), torch.ones(1024, 256)
row_linear(x, weight)
print("specker.cpu" in sys.modules, "specker.runtime" in sys.modules)
from specker.cpu.library import _loaded
print(_loaded.cache_info().currsize)
"""


def test_ops_alone_use_the_compiled_kernels():
    """A program that imports nothing else of the package imports the backend with its first call on a CPU."""
    done = warm.run("-c", ONLY_OPS)
    assert done.stdout.split() == ["True", "False", "1"]


def test_the_ops_use_the_backend_that_registered_itself():
    class Twos:
        def __getattr__(self, name):
            return lambda *args: True

        def product(self, x, weight, activations):
            return x.new_full((len(x), len(weight)), 2.0)

    x, weight = torch.ones(1, 256), torch.ones(1024, 256)
    own, usual = native(), linear.row_linear(x, weight)
    assert own is not None and usual.eq(256).all()
    use(Twos())
    try:
        assert linear.row_linear(x, weight).eq(2).all()
    finally:
        use(own)
    assert linear.row_linear(x, weight).equal(usual)


@pytest.fixture
def unloaded(tmp_path, monkeypatch):
    """An empty cache, no library in use, and a compiler that is quick: it copies what was compiled before."""
    before = build.library()
    as_in_a_new_process()
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_compile", lambda command, name, path: shutil.copy(before, path))
    yield
    as_in_a_new_process()


ARGV = ["--device", "cpu", "--strategy", "ar", "--max-new-tokens", "2"]


def test_the_command_line_says_so_once(unloaded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said, found = f"compiling the CPU kernels ({build.level()}): some seconds, once on this machine", []
    for _ in range(2):
        assert run.main(ARGV) == 0
        found.append(capsys.readouterr())
        as_in_a_new_process()
    first, second = found
    assert first.err.count(said) == 1 and said not in first.out
    assert said not in second.err and second.out == first.out


def test_the_command_line_refuses_an_unknown_level(unloaded, capsys, monkeypatch):
    monkeypatch.setenv("SPECKER_CPU", "nonsense")
    assert run.main(ARGV) == 2
    assert "specker: error: SPECKER_CPU must be one of" in capsys.readouterr().err


def test_every_process_finds_the_same_library():
    """The name must not depend on the order of a set, which differs by process."""
    code = "import runpy; print(runpy.run_path('specker/cpu/build.py')['library']().name)"
    names = set()
    for seed in "0", "1":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=True)
        names.add(done.stdout)
    assert len(names) == 1
