"""The real pair, Qwen2.5-Coder 1.5B and 0.5B in four bits: every strategy and join has the tokens of plain decoding, at
both temperatures, alone and in a batch. `make real MODEL=coder` fetches the pair; minutes, so marked slow:

    python -m pytest -m "slow and real" tests/benches/test_coder.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

import specker
from specker.zoo import real as source

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

BENCH = Path(__file__).parents[2] / "bench"
STRATEGIES = (
    *("lookup", "draft", "vocabtrim", "easyspec", "del"),
    *("draft+lookup", "vocabtrim+lookup", "easyspec+lookup", "del+lookup", "easyspec+vocabtrim"),
)
PROMPTS, NEW = 20, 24  # of each kind


@pytest.fixture(scope="module")
def pair() -> tuple[str, str]:
    target, draft = (source.CODER[name].at_hand() for name in ("target", "draft"))
    if target is None or draft is None:
        pytest.skip("python -m specker.zoo.real coder fetches the pair")
    return str(target), str(draft)


def prompts(engine: Any) -> list[list[int]]:
    """Code to complete and edit, then chats."""
    rows = [json.loads(line) for line in (BENCH / "coder_prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    code = [engine.encode(row["prompt"]) for row in rows if "prompt" in row]
    turns = [row["turns"][0] for row in rows if row["category"] == "edit"]
    code += [engine.encode_chat([{"role": "user", "content": turn}]) for turn in turns]
    asked = [json.loads(line)["turns"][0] for line in (BENCH / "spec_bench.jsonl").read_text("utf-8").splitlines()]
    chats = [engine.encode_chat([{"role": "user", "content": turn}]) for turn in sorted(asked, key=len)[:PROMPTS]]
    code += [ids[: len(ids) // 2] for ids in code]  # beginnings of the same code
    return code[:PROMPTS] + chats


@pytest.fixture(scope="module")
def plain(pair: tuple[str, str]) -> dict[float, list[list[int]]]:
    engine = specker.load(pair[0], strategy="ar", max_context=1024)
    every = prompts(engine)
    return {t: [engine.generate(p, NEW, temperature=t, seed=3).tokens for p in every] for t in (0.0, 0.7)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("together", [1, 4])
def test_tokens_equal_plain_decoding(pair: Any, plain: Any, strategy: str, together: int) -> None:
    needs = any(name in strategy for name in ("draft", "vocabtrim", "easyspec")) and "del" not in strategy
    engine = specker.load(pair[0], pair[1] if needs else None, strategy=strategy, max_context=1024, batch_size=together)
    every: Any = prompts(engine)
    for temperature, want in plain.items():
        got = engine.generate(every, NEW, temperature=temperature, seed=3)
        assert [x.tokens for x in got] == want
