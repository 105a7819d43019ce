"""examples/speculate.py has the tokens of plain decoding, in fewer passes than tokens."""

import pytest
import torch

import specker
from examples import speculate as example
from specker.checkpoints.checkpoint import read


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_loop_has_the_tokens_of_plain_decoding(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr(example, "TEMPERATURE", temperature)
    folders = [specker.zoo.path(name) for name in ("code-target", "code-draft")]
    target, draft = (example.Reader(read(folder, dtype=torch.float64, device="cpu")) for folder in folders)
    plain = specker.load(folders[0], strategy="ar", dtype="float64", device="cpu")
    prompt = plain.encode(specker.zoo.PROMPTS[0])
    text, passes = example.speculate(target, draft, prompt, 20)
    assert text == prompt + plain.generate(prompt, len(text) - len(prompt), temperature=temperature).tokens
    assert len(text) >= len(prompt) + 20 and passes < 15
