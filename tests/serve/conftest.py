"""What servers' models say, how they spell a conversation, and what holds their work up."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from specker import grammar
from specker.runtime.engine import Engine
from specker.serve.app import Server


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every server's model say a text or, of a form, a text of that grammar, whatever a request asks for."""

    def answer(text: str = "", form: str = "") -> None:
        wanted = form or grammar.lark("start: " + json.dumps(text))
        monkeypatch.setattr(Server, "_form", lambda *_: wanted)

    return answer


@pytest.fixture
def chat_template(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine, Any], None]:
    """Gives an engine's tokenizer another chat template."""
    return lambda engine, template: monkeypatch.setattr(engine.tokenizer, "chat_template", template)


@pytest.fixture
def before_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine, Callable[[], Any]], None]:
    """Has something happen before each round of an engine."""

    def run(engine: Engine, does: Callable[[], Any]) -> None:
        step = engine.loop.step
        monkeypatch.setattr(engine.loop, "step", lambda: (does(), step())[1])

    return run
