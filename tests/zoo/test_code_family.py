"""train/code_family: exports load in transformers, training survives a kill, the corpus excludes held-out files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import warm

import specker
from train.code_family import corpus, distill, sample
from train.code_family.export import export, hf_state, load
from train.code_family.fit import FitOptions, Windows
from train.code_family.net import LinearLoss, Net, NetConfig, _head_chunk, _head_chunk_kl

ROOT = Path(__file__).parents[2]
CAUSAL = NetConfig(48, 3, 4, 2, 80, vocab=320, head_dim=16, context=64)
DIFFUSION = NetConfig(48, 2, 3, 1, 80, vocab=320, head_dim=16, context=64, diffusion=True, eps=1e-6)


def random_net(c: NetConfig, seed: int = 0) -> Net:
    """All weights random, including norms and biases, so that each of them matters."""
    net = Net(c)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3) + (p.ndim == 1))
    return net


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    texts = [Path(f).read_text() for f in (corpus.__file__, distill.__file__, sample.__file__)]
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    corpus.train_tokenizer(texts, 320).save(str(path))
    return path


def run(*args: object) -> str:
    done = warm.run("-m", "train.code_family.train", "--preset", "tiny", *map(str, args))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_llama_export_gives_the_same_logits_in_transformers(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    net = random_net(CAUSAL)
    export(net, tokenizer, tmp_path, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(model) is LlamaForCausalLM
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(net.logits(net(ids)), model(ids).logits, atol=2e-4, rtol=1e-4)


def test_dream_export_is_a_bidirectional_qwen2(tmp_path, tokenizer):
    from safetensors.torch import load_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    net = random_net(DIFFUSION)
    export(net, tokenizer, tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    want = {
        "model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": 1, "vocab_size": 320,
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
        "rope_theta": 10000.0, "intermediate_size": 80,
        "tie_word_embeddings": True, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert {k: config[k] for k in want} == want
    qwen = Qwen2Config(**{k: v for k, v in config.items() if k not in ("model_type", "architectures", "mask_token_id")})
    model = Qwen2ForCausalLM(qwen).eval()
    state = load_file(tmp_path / "model.safetensors")
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected and "model.layers.1.self_attn.q_proj.bias" in state
    ids = torch.randint(0, 320, (2, 30), generator=torch.Generator().manual_seed(1))
    all_seen = torch.zeros(1, 1, 30, 30)
    with torch.no_grad():
        theirs = model(ids, attention_mask=all_seen).logits
        torch.testing.assert_close(net.logits(net(ids)), theirs, atol=2e-4, rtol=1e-4)
        assert not torch.allclose(net.logits(net(ids)), model(ids).logits, atol=1e-2)  # causal attention differs


def test_load_is_the_inverse_of_export(tmp_path, tokenizer):
    for i, c in enumerate((CAUSAL, DIFFUSION)):
        net = random_net(c)
        export(net, tokenizer, tmp_path / str(i), torch.float32)
        again = load(tmp_path / str(i))
        assert again.c == c
        for name, w in hf_state(net).items():
            assert torch.equal(hf_state(again)[name], w), name


def test_tokenizer_round_trip_and_folder(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    export(random_net(CAUSAL), tokenizer, tmp_path)
    tok = AutoTokenizer.from_pretrained(tmp_path)
    assert [tok.convert_tokens_to_ids(t) for t in (corpus.EOS, corpus.MASK, corpus.PAD)] == [0, 1, 2]
    assert tok.eos_token_id == 0 and tok.mask_token_id == 1 and tok.pad_token_id == 2 and len(tok) == 320
    for text in ("def f(a, b):\n    return a  +  b\n\n\n", "x = 1\t# ünï → 漢字 \r\n", " ' , ' n't . \n \n", ""):
        ids = tok(text)["input_ids"]
        assert tok.decode(ids) == text and 0 not in ids
    assert len(tok("a\n        b")["input_ids"]) <= 3  # newline and indentation are one token


def test_cached_generation_is_the_plain_forward():
    net, ids = random_net(CAUSAL), torch.randint(3, 320, (3, 7))
    for t in (0.0, 0.7):
        out = sample.generate(net, ids, 20, t, seed=3)
        assert torch.equal(out[:, :7], ids)
        assert sample.draft_right(net, out, 7, t, seed=3).all()  # a model drafts its own text correctly
        assert not sample.draft_right(random_net(CAUSAL, 1), out, 7, t, seed=3).all()


def test_acceptance_counts_rounds():
    right = np.array([[1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1]], dtype=bool)
    # rounds of at most 4 + 1: 1111+1, 0, 11+0, 1111+1; the rest is shorter than a round
    assert sample.acceptance(right, 4) == (5 + 1 + 3 + 5) / 4


def test_rounds_in_one_forward_are_the_rounds_one_by_one():
    """A row of the layout equals the same row in decoding, after the K/V of the earlier rounds."""
    net, layout = random_net(DIFFUSION), distill.Rounds(lead=5, step=2, block=4, count=3)
    positions, sees, is_mask = layout.rows()
    predicts, where = layout.predicts()
    ids = torch.randint(3, 320, (1, layout.tokens))
    assert int(where.max()) == layout.tokens - 2  # the last token is the last one predicted
    with torch.no_grad():
        got = net(ids[:, positions].masked_fill(is_mask, 1), mask=sees, rows=positions)[0, predicts]
        for j in range(layout.count):
            # one by one: the text so far, each committed run with the masks after it
            runs = [torch.arange(5)] + [5 + 2 * i + torch.arange(6) for i in range(j + 1)]
            at, run = torch.cat(runs), torch.cat([torch.full_like(r, n) for n, r in enumerate(runs)])
            masked = torch.cat([torch.zeros(5, dtype=torch.bool)] + [torch.arange(6) >= 2] * (j + 1))
            mask = (run[:, None] == run) | ((run[:, None] > run) & ~masked)
            want = net(ids[:, at].masked_fill(masked, 1), mask=mask, rows=at)[0, -5:-1]
            torch.testing.assert_close(got[4 * j : 4 * j + 4], want, atol=1e-5, rtol=1e-5)
            assert where[4 * j : 4 * j + 4].tolist() == [5 + 2 * j + 1 + i for i in range(4)]


@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_linear_loss_has_autograds_gradients(heat):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(13, 8, generator=g), torch.randn(50, 8, generator=g)
    teacher = (torch.randn(13, 6, generator=g), torch.randn(50, 6, generator=g))
    label, scale = torch.randint(0, 50, (13,), generator=g), torch.rand(13, generator=g)
    for soft, hard in ((None, 0.0), (teacher, 0.3)):
        h, w = (x.double().requires_grad_() for x in (hidden, weight))
        if soft is None:
            want = (torch.nn.functional.cross_entropy(h @ w.T, label, reduction="none") * scale).sum()
        else:
            p = (teacher[0] @ teacher[1].T / heat).double().softmax(-1)
            logq = (h @ w.T / heat).log_softmax(-1)
            kl = (p * (p.log() - logq)).sum(-1)
            want = (((1 - hard) * kl - hard * logq.gather(1, label[:, None])[:, 0]) * scale).sum()
        want.backward()
        a, b = (x.clone().requires_grad_() for x in (hidden, weight))
        ops = (_head_chunk, _head_chunk_kl)
        got, _ = LinearLoss.apply(a, b, label, scale, soft, hard, torch.tensor(heat), ops, 5)
        (2 * got).backward()
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(a.grad.double(), 2 * h.grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(b.grad.double(), 2 * w.grad, atol=1e-5, rtol=1e-4)


def test_windows_are_a_function_of_the_step():
    data = np.arange(2000, dtype=np.uint16)
    first, second = Windows(data, 0, "cpu"), Windows(data, 0, "cpu")
    batches = [first.batch(i, 4, 16) for i in range(60)]  # two epochs
    assert torch.equal(second.batch(37, 4, 16), batches[37])
    starts = {int(b) for batch in batches[:31] for b in batch[:, 0]}
    assert len(starts) == 31 * 4  # no window twice in one epoch
    assert torch.equal(batches[5][:, 1:], batches[5][:, :-1] + 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, str]:
    """A whole family, trained without interruption."""
    work = tmp_path_factory.mktemp("zoo")
    return work, run("--work", work)


@pytest.mark.slow
def test_the_corpus_leaves_out_the_held_out(tiny):
    texts = json.loads((tiny[0] / "texts.json").read_text())
    record = json.loads((tiny[0] / "corpus.json").read_text())
    assert record["held_out"] == list(corpus.HELD_OUT) and record["distributions"][0]["licence"] == "PSF-2.0"
    held = dict(texts["held"])
    assert {"argparse.py", "json/decoder.py", "statistics.py"} <= set(held)
    assert "class ArgumentParser(" in held["argparse.py"]
    assert not any("class ArgumentParser(" in t or "class JSONDecoder(" in t for t in texts["train"])
    assert len(texts["train"]) > 5
    assert corpus.is_held_out("pip/_vendor/rich/table.py") and not corpus.is_held_out("rich/text.py")


@pytest.mark.slow
def test_prompts_come_from_held_out_modules(tiny):
    rows = [json.loads(x) for x in (tiny[0] / "export" / "heldout.jsonl").read_text().splitlines()]
    texts = dict(json.loads((tiny[0] / "texts.json").read_text())["held"])
    assert len(rows) == 96 and len({r["source"] for r in rows}) == 96
    for r in rows:
        module, line = r["source"].rsplit(":", 1)
        assert "\n".join(texts[module].split("\n")[int(line) - 1 :]).startswith(r["prompt"])
        assert r["licence"]


@pytest.mark.slow
def test_kill_and_resume_give_the_uninterrupted_weights(tiny, tmp_path):
    for name in ("texts.json", "corpus.json", "tokenizer.json", "train.npy", "held.npy", "heldout.jsonl"):
        (tmp_path / name).write_bytes((tiny[0] / name).read_bytes())
    assert "stopped within target" in run("--work", tmp_path, "--stop-after", 9)
    assert not (tmp_path / "draft.pt").exists()
    run("--work", tmp_path)
    whole, resumed = (torch.load(w / "target.pt", weights_only=True) for w in (tiny[0], tmp_path))
    assert whole["step"] == resumed["step"] == 32
    for model in ("target", "draft", "draft-deep", "diffusion"):
        a, b = ((w / "export" / f"code-{model}" / "model.safetensors").read_bytes() for w in (tiny[0], tmp_path))
        assert a == b, model
    assert whole["log"][-1]["loss"] < whole["log"][0]["loss"]


def test_a_hybrid_resumes_and_decodes_with_its_own_head(tokenizer, tmp_path, monkeypatch):
    """A run that was stopped ends with the weights of one that was not, and its export is a checkpoint with an MTP
    head."""
    from train.code_family import hybrid

    teacher = random_net(NetConfig(48, 3, 4, 2, 80, vocab=320, head_dim=16, context=640))
    small = hybrid.config_of(teacher, hidden=32, layers=4, ffn=48)
    monkeypatch.setattr(hybrid, "config_of", lambda teacher: small)
    ids = torch.randint(3, 320, (4000,), generator=torch.Generator().manual_seed(0)).numpy()
    windows = Windows(ids, 0, "cpu")
    folders, threads = [tmp_path / name for name in ("whole", "resumed")], torch.get_num_threads()
    nets = []
    for folder, stops in zip(folders, ([None], [1, None]), strict=True):
        folder.mkdir()
        for stop in stops:
            o = FitOptions(tokens=1536, batch=512, lr=4e-3, micro=2, eval_every=9, stop_after=stop)
            net = hybrid.train(teacher, windows, windows, o, folder, compiled=False)
            assert (net is None) == (stop is not None)
        nets.append(net)
    torch.set_num_threads(threads)
    for name, w in nets[0].state_dict().items():
        assert torch.equal(w, nets[1].state_dict()[name]), name
    log = json.loads((folders[0] / "hybrid_losses.json").read_text())
    assert {"kl", "mtp1", "mtp2"} < set(log[0]) and {"held_out", "draft1", "draft2"} < set(log[-1])

    export(teacher, tokenizer, tmp_path / "teacher")
    hybrid.export(nets[0], tmp_path / "teacher", tmp_path / "hybrid")
    engine = specker.load(tmp_path / "hybrid", strategy="mtp", device="cpu", dtype="float32")
    prompt = ids[:9].tolist()
    out = engine.generate(prompt, 12)
    assert out.tokens == engine.generate_ar(prompt, 12).tokens and out.stats.drafted > 0
    with torch.no_grad():
        rows = nets[0](torch.tensor([prompt + out.tokens[:-1]]))[0, len(prompt) - 1 :]
        best = (rows @ nets[0].embed.T).argmax(-1).tolist()
    assert sum(a == b for a, b in zip(best, out.tokens, strict=True)) >= 10  # the export is rounded to bfloat16
