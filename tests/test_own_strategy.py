"""The smallest strategy, as docs/strategies.md shows it, and the interface of drafters."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import make

import specker
from specker.runtime import strategies
from specker.runtime.control.policy import Budget
from specker.runtime.round.drafter import Drafter, Wrapper

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").split("## Your own")[1], re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    monkeypatch.setitem(strategies.STRATEGIES, "repeat", names["Repeat"]())
    monkeypatch.setattr(strategies, "NAMES", (*strategies.NAMES, "repeat"))


@pytest.mark.parametrize("strategy", ["repeat", "repeat+lookup"])
@pytest.mark.usefixtures("repeat")
def test_the_smallest_strategy_drafts_and_changes_no_token(tmp_path: Path, strategy: str) -> None:
    target = make(tmp_path, "llama", layers=2)
    engine = specker.load(target, strategy=strategy, device="cpu", dtype="float64", policy="fixed", batch_size=2)
    prompts, drafted = [[5, 9], [7, 7, 7]], []
    engine.trace = lambda row: drafted.append((row["prompt"], row["draft"]))
    out = engine.generate(prompts, 24)
    assert [each.tokens for each in out] == [each.tokens for each in engine.generate_ar(prompts, 24)]
    assert ((0, [5] * 4) in drafted and (1, [7] * 4) in drafted) or strategy != "repeat"
    assert engine.generate([8, 8], 24, temperature=0.7).tokens == engine.generate_ar([8, 8], 24, temperature=0.7).tokens


def test_a_wrapper_passes_everything_on() -> None:
    """A drafter that wraps another one declares the same and forwards every method."""
    calls: list[str] = []
    public = [name for name in vars(Drafter) if not name.startswith("_")]

    class Inner(Drafter):
        keeps_prefix, synchronous, aux_layers, tokens_ahead = False, True, (3, 5), 7

    def noted(name: str) -> Any:
        return lambda self, *args, **how: calls.append(name)

    methods = [name for name in public if inspect.isfunction(getattr(Drafter, name))]
    for name in methods:
        setattr(Inner, name, noted(name))
    outer = Wrapper(Inner())
    for name in methods:
        count = len(inspect.signature(getattr(Drafter, name)).parameters) - 1
        getattr(outer, name)(*[Budget(1, 1)] * count)
    assert calls == methods and len(methods) == 11
    for name in set(public) - set(methods):
        assert getattr(outer, name) == getattr(outer.inner, name), name
