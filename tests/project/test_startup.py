"""What happens before the first token: what a command imports, and how often it reads a checkpoint's files."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import caches
import pytest
from make_checkpoint import make

import specker
from specker.checkpoints import checkpoint
from specker.checkpoints.tokenizer import Tokens
from specker.cli import run
from specker.kernels.deferred import HAS_GPU

ROOT = Path(__file__).parents[2]


SLOW = (
    *("transformers", "huggingface_hub", "torch._dynamo", "torch._inductor", "sympy"),
    *("jinja2", "prompt_toolkit", *(() if HAS_GPU else ("triton",))),
)
HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "rich", *SLOW)
COMMAND = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sorted({{*{HEAVY!r}}} & sys.modules.keys()), file=sys.stderr)
"""


def command(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, which then names on stderr what it imported of HEAVY."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "models")))}
    return subprocess.run([sys.executable, "-c", COMMAND, *argv], cwd=ROOT, capture_output=True, text=True, env=env)


THREADS = """
import ctypes, os, tempfile, threading
from specker.cli.start import share_arenas
share_arenas()
libc, all_run = ctypes.CDLL(None), threading.Barrier(8)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def allocate():
    all_run.wait()
    libc.malloc(1000)
    all_run.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap"))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
def test_a_server_has_two_arenas_unless_the_user_says_otherwise() -> None:
    def arenas(**more: str) -> int:
        env = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | more
        done = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert arenas() <= 2 < arenas(MALLOC_ARENA_MAX="5")


def test_a_run_imports_neither_transformers_nor_the_compiler() -> None:
    """With config.json and tokenizer.json at hand. transformers takes as long to import as torch."""
    done = command(["specker.run", "--prompt", "def f(", "--max-new-tokens", "2", "--device", "cpu"])
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    imported = done.stderr.splitlines()[-1].split()[1:]
    assert {"torch", "tokenizers"} <= {*imported} and not {*SLOW} & {*imported}


QUICK = """
import gc, sys
from specker.cli import start
start.quicken()
import torch
import importlib
sample = importlib.import_module("specker.kernels.sample_rows")
assert not gc.isenabled() and "triton" not in sys.modules
start.loaded()
assert gc.isenabled() and gc.get_freeze_count() > 100_000

draw = torch.randn(3, 300), 0.8, 20, 0.9, 7, torch.arange(3)
assert torch.equal(sample.launch(*draw), sample.sample_rows_ref(*draw))
assert "triton" in sys.modules
types = [kernel.fn.__annotations__.values() for kernel in vars(sample).values() if hasattr(kernel, "fn")]
assert {*map(str, {x for each in types for x in each})} == {"<class 'triton.language.core.constexpr'>", "int64"}

from specker.kernels.sample_rows import _NONE
from specker.kernels.variant import tl, triton

@triton.jit
def later(y_ptr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N), _NONE)

later[1,](y := torch.zeros(4, dtype=torch.int32), 4)
assert y.tolist() == [2**31 - 1] * 4

assert torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [1, 1]
"""


@pytest.mark.skipif(HAS_GPU, reason="imports Triton at once")
def test_triton_is_imported_on_first_use(tmp_path: Path) -> None:
    """Kernels that were defined before Triton was imported work, and so do later ones."""
    (tmp_path / "quick.py").write_text(QUICK)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, tmp_path / "quick.py"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_text_and_notes_for_a_pipe_need_no_rich() -> None:
    """Its import takes 0.1 s of the time to the first character. Tables need it, after the text."""
    lines = (
        "from specker.cli.screen import Screen",
        "s = Screen(False); s.note('note'); s.prompt('prompt'); s.newline()",
    )
    progress = "with s.progress('x') as p: p(1, 2); logging.getLogger('specker.steps').info('step')"
    code = "; ".join(("import logging, sys", *lines, "s.reasoning('why'); s.pieces([('text', True)])"))
    code += f"\n{progress}\nassert 'rich' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("\ntext", "note\nprompt\nwhy\n\nstep\n", 0)


@pytest.mark.parametrize(
    ("code", "argv"),
    [
        (0, ["specker", "--help"]),
        (0, ["specker.run", "--help-all"]),
        (0, ["specker", "--version"]),
        (0, ["specker", "--list-strategies"]),
        (0, ["specker", "--print-completion", "bash"]),
        (0, ["specker", "drafts"]),
        (0, ["specker", "drafts", "Qwen/Qwen3-8B"]),
        (0, ["specker", "calibrate", "--help"]),
        (2, ["specker", "--nonsense"]),
        (2, ["specker", "--strategy", "nonsense"]),
        (2, ["specker", "--strategy", "easyspec", "--layer-parallel", "0"]),
        (2, ["specker", "--strategy", "del", "--tree", "2x2"]),
        (2, ["specker", "--strategy", "diffuspec", "--cps", "off", "--ngram", "x"]),
        (2, ["specker", "--strategy", "lookup", "--lookup-file", "x", "--lookup-share", "off"]),
        (2, ["specker", "--strategy", "vocabtrim", "--vocab-keep", "x"]),
        (2, ["specker", "--prompts", "missing.jsonl"]),
        (2, ["specker", "--target", "my/model", "--draft", "auto"]),
        (2, ["specker", "drafts", "my/model"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_help_and_usage_errors_import_neither_torch_nor_numpy(code: int, argv: list[str]) -> None:
    """torch alone takes more than a second to import, so these commands answer before it."""
    done = command(argv)
    *errors, imported = done.stderr.splitlines()
    assert done.returncode == code, done.stderr
    assert imported == "imported:"
    assert len(errors) == (code == 2) and all(line.startswith("specker: error: ") for line in errors)
    assert code or done.stdout.strip()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The folders whose config was parsed, and those whose tokenizer was read."""
    made: dict[str, list[Any]] = {"configs": [], "tokenizers": []}
    parse, read = checkpoint.parse_config, Tokens.tokenizer.func

    def parsed(folder: Path, *args: Any) -> Any:
        made["configs"].append(folder)
        return parse(folder, *args)

    def tokenizer(self: Tokens) -> Any:
        made["tokenizers"].append(self.folder)
        return read(self)

    monkeypatch.setattr(checkpoint, "parse_config", parsed)
    monkeypatch.setattr(Tokens.tokenizer, "func", tokenizer)
    return made


def test_each_config_is_parsed_once_and_equal_tokenizers_are_read_once(
    pair: tuple[str, str], calls: dict[str, list[Any]]
) -> None:
    target, draft = map(Path, pair)
    engine = specker.load(target, draft, "draft", device="cpu", max_context=100)
    assert calls == {"configs": [target, draft], "tokenizers": []}
    engine.generate("hello", 4)
    engine.encode_chat([{"role": "user", "content": "hi"}])
    assert engine.has_tokenizer and calls["tokenizers"] == [target]
    assert engine.draft is not None and engine.draft.tokenizer is engine.tokenizer


def test_tokenizers_in_unequal_files_are_compared_by_their_tokens(
    pair: tuple[str, str], tmp_path: Path, calls: dict[str, list[Any]]
) -> None:
    target, draft = Path(pair[0]), Path(shutil.copytree(pair[1], tmp_path / "draft"))
    file = draft / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    specker.load(target, draft, device="cpu", dtype="float64")
    assert sorted(calls["tokenizers"]) == sorted([target, draft])
    file.write_text(file.read_text().replace('"<|mask|>"', '"<|hidden|>"'))
    (draft / "tokenizer_config.json").unlink()
    engine = specker.load(target, draft, device="cpu", dtype="float64")
    assert engine.remarks["draft_tokens"].endswith("258 of its 259 tokens are the target's, too")


def test_a_draft_that_is_missing_is_refused_before_the_target_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(checkpoint, "_read_weights", lambda *args: read.append(args))
    with pytest.raises(ValueError, match="there is no folder"):
        specker.load(make(tmp_path / "target"), tmp_path / "missing", device="cpu")
    assert not read


LOADED = """
import sys
import specker
from specker import run
slow = ["torch._dynamo", "torch._inductor", "sympy", "gguf", "accelerate", "transformers", "huggingface_hub"]
for target in sys.argv[2:]:
    engine = specker.load(target, sys.argv[1], device="cpu", max_context=64)
    engine.encode("hello")
    print("imported:", *(name for name in slow if name in sys.modules))
"""


def test_loading_a_converted_file_imports_neither_transformers_nor_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what converts it."""
    pytest.importorskip("gguf")
    from make_gguf import write

    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    names = "draft", "target", "unconverted"
    files = [write(tmp_path / f"{name}.gguf", make(tmp_path / name, seed=n)) for n, name in enumerate(names)]
    specker.load(files[1], files[0], device="cpu", max_context=64)  # converts them
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "models")))}
    command = [sys.executable, "-c", LOADED, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=True)
    converted, unconverted = done.stdout.splitlines()
    assert converted == "imported:" and "gguf" in unconverted


def test_long_steps_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing and converting a GGUF file, the first time only; as notes on stderr where there is no terminal."""
    pytest.importorskip("gguf")
    from make_gguf import write

    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source"))
    argv = ["--target", str(file), "--strategy", "ar", "--prompt", "ab", "--max-new-tokens", "2", "--device", "cpu"]
    said = []
    for _ in range(2):
        assert run.main(argv) == 0
        told = [line for line in capsys.readouterr().err.splitlines() if " tiny.gguf" in line]
        said.append([line for line in told if line.startswith(("computing", "converting"))])
    assert said[0][0] == "computing the SHA-256 of tiny.gguf, once"
    assert said[0][1].startswith(f"converting tiny.gguf once into {tmp_path / 'cache' / 'gguf'}") and not said[1]
    assert 2 < len(said[0][2:]) < 10
    assert all(re.fullmatch(r"converting tiny\.gguf: \d\d%", line) for line in said[0][2:])
