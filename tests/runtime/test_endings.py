"""How a text ends: at its limit, where the context is full, or where the logits are no numbers."""

import json

import pytest
import torch
from make_checkpoint import make
from pairs import perturbed
from safetensors.torch import load_file, save_file

import specker
from specker.cli.run import main


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), layers=2, tokenizer=True)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def broken(folder, name, row):
    """A checkpoint of which one number is NaN."""
    make(folder, layers=2, tokenizer=True)
    weights = load_file(folder / "model.safetensors")
    weights[name][row, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_full_context_is_a_reason_of_its_own(pair):
    engine = specker.load(*pair, max_context=20, strategy="draft")
    full, exact, short = engine.generate([1] * 12, 50), engine.generate([1] * 12, 8), engine.generate([1] * 12, 7)
    assert [len(x.tokens) for x in (full, exact, short)] == [8, 8, 7]
    assert [x.finished for x in (full, exact, short)] == ["context", "length", "length"]


def test_a_full_context_is_said(pair, tmp_path, capsys):
    out = tmp_path / "out.json"
    command = ["--target", str(pair[0]), "--strategy", "ar", "--max-context", "20", "--max-new-tokens", "50"]
    assert main([*command, "--prompt", "a prompt", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["prompts"][0]["finish_reason"] == "context"
    assert "the text ends before --max-new-tokens: the context of 20 tokens is full" in capsys.readouterr().err
    (tmp_path / "prompts").write_text('{"prompt": "a"}\n{"prompt": "a prompt of 15"}\n')
    assert main([*command[:-1], "12", "--prompts", str(tmp_path / "prompts")]) == 0
    assert "1 of 2 texts end before --max-new-tokens: the context of 20 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"strategy": "ar"}, {"draft_tokens": 3}, {"tree": "2x2"}, {"strategy": "lookup"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_a_text(pair, tmp_path, options, temperature):
    target = broken(tmp_path, "model.layers.1.mlp.down_proj.weight", 3)
    draft = pair[1] if "draft_tokens" in options or "tree" in options else None
    options = {"strategy": "draft", **options}
    got = specker.load(target, draft, **options).generate([1, 2, 3], 20, temperature=temperature)
    assert (got.tokens, got.text, got.finished) == ([], "", "not finite")


def test_only_the_request_that_meets_them_ends(tmp_path):
    """Token 7 has a NaN in its embedding."""
    target = broken(tmp_path, "model.embed_tokens.weight", 7)
    for batch in (1, 2):
        engine = specker.load(target, strategy="lookup", batch_size=batch)
        sound, early = engine.generate([[1, 2, 3], [1, 7, 3]], 20, seed=1, temperature=1.0)
        assert (early.tokens, early.finished) == ([], "not finite")
        assert sound.finished == "not finite" if 7 in sound.tokens else len(sound.tokens) == 20


def test_a_broken_model_is_exit_code_1(tmp_path, capsys):
    target = broken(tmp_path, "model.layers.0.self_attn.o_proj.weight", 0)
    assert main(["--target", str(target), "--prompt", "a prompt", "--max-new-tokens", "5", "--check"]) == 1
    assert "its logits are not finite; the weights may be damaged" in capsys.readouterr().err
