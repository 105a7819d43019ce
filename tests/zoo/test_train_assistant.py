"""train/head --kind assistant: a tiny assistant learns from a tiny target, and drafts in the engine as in training."""

import cases
import pytest
import torch
import transformers
from heads import hidden, traced
from make_assistant import load
from make_checkpoint import make

import specker
from specker.checkpoints.checkpoint import opened
from specker.checkpoints.checkpoint import read as read_checkpoint
from train import corpus
from train.head import __main__ as command
from train.head import fit, taps
from train.head.assistant import Reader
from train.head.export import export_reader
from train.head.fit import Recipe, Training

STEPS, SOURCE = 3, 2
SIZES = {"tokens": 400, "visits": 600, "length": 32, "batch": 64, "rows": 100, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("target") / "chatty", tokenizer=True, tied=True, layers=3, max_context=256)


@pytest.fixture(scope="module")
def learnt(target, tmp_path_factory):
    """(a finished training of an assistant of two layers with its best weights; its agreement before; its folder)"""
    made = tmp_path_factory.mktemp("lessons")
    engine = specker.load(target, strategy="ar", dtype="float32", device="cpu", batch_size=16)
    prompts = [[n, 7 * n % 256] for n in range(48)]
    texts = engine.generate(prompts, 90, temperature=[0.7 * (n % 3 == 0) for n in range(48)], seed=[*range(48)])
    (made / "answers").mkdir()
    corpus.save(made / "answers", {n: ([*prompts[n], *texts[n].tokens], 2) for n in range(48)})
    shards = sorted((made / "answers").glob("*.npz"))
    taps.write(shards, made / "taps", opened(target), (SOURCE,), torch.float32)
    lessons = taps.Lessons(shards, made / "taps", 64, STEPS)
    dense = read_checkpoint(target, dtype=torch.float32, device="cpu", pack=False)
    ids = fit.kept_ids(made / "none", lessons.counts(dense.config.vocab_size), 200)
    training = Training(
        Reader(dense, ids, STEPS), lessons, Recipe(16_000, batch=512, length=64, muon=0.012), made / "own"
    )
    training.folder.mkdir()
    before = training.judge()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "EVERY", 16)
        training.fit()
    training.net.load_state_dict(torch.load(training.folder / "best.pt", weights_only=True))
    export_reader(training.net, target, dense.weights.head, made / "assistant")
    return training, before, made / "assistant"


def test_an_assistant_learns(learnt):
    training, before, _ = learnt
    assert fit.expected(training.judge()) > fit.expected(before) + 0.4
    assert training.log[-1]["kl"] < 0.8 * training.log[0]["kl"]


def test_the_engine_drafts_as_in_training(learnt, target):
    """Each token of a chain is the one that the net in float64 makes of the target's rows."""
    training, _, folder = learnt
    engine = load(target, folder)
    whole = read_checkpoint(target, dtype=torch.float64, device="cpu", pack=False)
    net = Reader(whole, training.net.ids, STEPS)
    net.load_state_dict({name: x.to(torch.bfloat16).double() for name, x in training.net.state_dict().items()})
    head = whole.weights.head.to(torch.bfloat16).double()
    checked = accepted = 0
    for prompt in ([3, 21], [9, 63, 4, 5]):
        out, rows = traced(engine, prompt, 40)
        text = prompt + out.tokens
        assert out.tokens == cases.plain(target, prompt, 40)
        before, last = hidden(engine.model, text, (SOURCE, 3))
        last = torch.nn.functional.rms_norm(last, (64,), engine.model.norm, engine.model.config.rms_norm_eps)
        for row in rows:
            at, draft = row["position"], row["draft"]
            if not draft:
                continue
            T, tokens = at - 1, torch.tensor([(text[:at] + draft)[1:]])
            places, same = torch.arange(T)[None], torch.zeros(1, T, dtype=torch.int64)
            with torch.no_grad():
                chains = net.chains(before[None, :T], last[None, :T], tokens, places, same, len(draft))
            assert [int((head @ final[0, -1]).argmax()) for final in chains] == draft
            checked += len(draft)
        accepted += out.stats.accepted
    assert checked > 60 and accepted > 8


def test_transformers_reads_the_exported_assistant(learnt):
    model, info = transformers.Gemma4AssistantForCausalLM.from_pretrained(learnt[2], output_loading_info=True)
    assert not any(info.get(name) for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.backbone_hidden_size == 64 and len(model.model.layers) == 2


def test_chains_of_two_texts_do_not_see_each_other(learnt, target):
    net, texts = learnt[0].net, ([7, 49, 5, 60, 61], [3, 3, 9, 14])
    rows = [torch.stack(hidden(learnt_model(target), [*text, 0], (SOURCE, 3))).float() for text in texts]
    places = torch.tensor([[*range(5), *range(4)]])
    own, ids = torch.tensor([[0] * 5 + [1] * 4]), torch.tensor([[*texts[0], *texts[1], 0, 0, 0]])
    both = torch.cat(rows, 1)[:, None]
    with torch.no_grad():
        joined = net.chains(both[0], both[1], ids[:, 1:], places, own, STEPS)
        alone = net.chains(*rows[1][:, None], ids[:, 6:], places[:, 5:], own[:, 5:], STEPS)
    for a, b in zip(joined, alone, strict=True):
        torch.testing.assert_close(a[:, 5:], b, rtol=1e-4, atol=1e-5)


def learnt_model(target):
    return specker.load(target, strategy="ar", device="cpu", dtype="float64").model


def test_the_command(target, tmp_path, short_answers, command_line, capsys):
    sizes = [word for name, n in {**SIZES, "max_context": 256, "batch_size": 6}.items() for word in (f"--{name}", n)]
    usual = ["--target", target, "--out", tmp_path, *sizes, "--threads", 1, "--kind", "assistant"]

    def main(*argv):
        command_line(["train.head", *map(str, [*usual, *argv])])
        return command.main()

    assert main() == 0
    assert "the head is in" in capsys.readouterr().out and not (tmp_path / "taps").exists()
    engine = load(target, tmp_path / "assistant" / "head")
    assert engine.generate([9, 4], 20).tokens == engine.generate_ar([9, 4], 20).tokens
    for argv, says in (
        (("--layout", "speculators"), "--layout speculators is for --kind eagle3"),
        (("--taps", 1), "--taps does not apply to --kind assistant"),
        (("--layers", 9, "--stages", "train"), "an assistant of 9 layers cannot start as the target's, which has 3"),
        (("--layers", 1, "--stages", "train"), "state.pt is of a head with other sizes: give the settings it began"),
        (("--layers", 1, "--stages", "export"), "best.pt is of a head with other sizes"),
    ):
        assert main(*argv) == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_other_families(arch, tmp_path):
    """K and V are the target's own, with its biases and norms."""
    target = make(tmp_path / "target", arch, max_context=256)
    dense = read_checkpoint(target, dtype=torch.float64, device="cpu", pack=False)
    net = Reader(dense, torch.arange(9))
    engine = specker.load(target, strategy="ar", device="cpu", dtype="float64")
    text = [5, 9, 40, 77, 3, 8]
    (before,) = hidden(engine.model, [*text, 0], (SOURCE,))
    engine.generate(text, 2)
    with torch.no_grad():
        k, v = net._target(before[None], torch.arange(6)[None])
    for own, cached in zip((k, v), engine.cache.layers[SOURCE], strict=True):
        want = cached.flatten(0, 1)[:6].repeat_interleave(2, 1).transpose(0, 1)
        torch.testing.assert_close(own[0], want, rtol=1e-5, atol=1e-6)


def test_a_target_without_full_attention_is_refused(tmp_path):
    target = make(tmp_path / "target", "mistral", sliding_window=8)
    dense = read_checkpoint(target, dtype=torch.float32, device="cpu", pack=False)
    with pytest.raises(ValueError, match="an assistant cannot read the K and V of MistralForCausalLM"):
        Reader(dense, torch.arange(9))
