"""train/: a tiny chat model writes text, and a draft distilled from it drafts for it."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cases
import numpy as np
import pytest
import torch
from make_checkpoint import make

import specker
from specker.runtime.strategies.blocks import ngram
from specker.runtime.strategies.vocabtrim.scores import read

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"train_{name}", ROOT / "train" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


corpus = script("corpus")
draft = script("draft")
scores = script("scores")
prompts = script("code_prompts")


@pytest.fixture
def main(command_line: Callable[[list[object]], None]) -> Callable[..., None]:
    def run(module: ModuleType, *argv: object) -> None:
        threads = torch.get_num_threads()
        limit = () if module in (scores, prompts) else ("--threads", "1")
        command_line([module.__name__, *argv, *limit])
        module.main()
        torch.set_num_threads(threads)

    return run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("target") / "chatty", tokenizer=True, tied=True, max_context=256)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two questions to train on and a held-out one."""
    held = json.loads((ROOT / "bench" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()[0])
    rows = [{"question_id": -n, "turns": [f"What is {n}?", "Why?"]} for n in (1, 2)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (held, *rows)))
    return path


def test_text_is_written_and_goes_on_where_it_stopped(target, questions, tmp_path, monkeypatch, main):
    """Conversation k is the same whatever was decoded beside it, and none is written twice."""
    asked = []
    chat = corpus.Writer.chat
    monkeypatch.setattr(corpus.Writer, "chat", lambda self, text: asked.append(text) or chat(self, text))
    monkeypatch.setattr(corpus, "SHARD", 4)
    how = ["--target", target, "--questions", questions, "--max_new_tokens", 12, "--max_context", 256]
    main(corpus, *how, "--out", tmp_path / "a", "--tokens", 60, "--batch_size", 3)
    first = {k: tuple(ids) for k, ids, _ in corpus.read(tmp_path / "a")}
    main(corpus, *how, "--out", tmp_path / "a", "--tokens", 160, "--batch_size", 3)
    both = corpus.read(tmp_path / "a")
    assert len({k for k, _, _ in both}) == len(both) > len(first) >= 4
    assert first.items() <= {k: tuple(ids) for k, ids, _ in both}.items()
    main(corpus, *how, "--out", tmp_path / "b", "--tokens", 60, "--batch_size", 1)
    alone = {k: tuple(ids) for k, ids, _ in corpus.read(tmp_path / "b")}
    same = alone.keys() & first.keys()
    assert len(same) > 2 and all(alone[k] == first[k] for k in same)
    assert "What is 1?" in asked and not any("Hawaii" in text for text in asked), "a held-out question was used"
    for _, ids, start in both:
        assert 0 < start < len(ids) <= start + 12


@pytest.fixture(scope="module")
def texts(target: Path) -> list[list[int]]:
    engine = specker.load(target, strategy="ar", dtype="float64", device="cpu", batch_size=24)
    made = engine.generate([[n + 3] for n in range(24)], 80, temperature=0.7, seed=[*range(24)])
    return [each.tokens for each in made]


@pytest.mark.parametrize("strategy", ["draft", "diffuspec"])
def test_a_draft_is_distilled_and_drafts(target, texts, tmp_path, monkeypatch, main, strategy):
    """On random text of the target: the loss falls, a killed run goes on, and the draft shares the embedding."""
    shards = tmp_path / "corpus"
    shards.mkdir()
    corpus.save(shards, {n: ([n + 3, *text], 1) for n, text in enumerate(texts)})
    how = ["--target", target, "--corpus", shards, "--out", tmp_path / "thin", "--layers", "0,2", "--heads", 2]
    how += ["--ffn", 32, "--batch", 128, "--length", 64]
    if strategy == "diffuspec":
        how += ["--mask_token_id", 7]
        monkeypatch.setattr(draft, "LEAD", 16)
    monkeypatch.setattr(draft, "BEST", 16)
    main(draft, *how, "--tokens", 3000)
    state = torch.load(tmp_path / "thin.pt", weights_only=True)
    assert state["done"] >= 3000 and len(state["log"]) == 1
    main(draft, *how, "--tokens", 15000)
    log = torch.load(tmp_path / "thin.pt", weights_only=True)["log"]
    assert log[0] == state["log"][0] and log[-1]["kl"] < 0.8 * log[0]["kl"] and log[-1]["agreement"] > 0
    fast = specker.load(target, tmp_path / "thin", strategy=strategy, dtype="float64", device="cpu")
    assert fast.draft.config.num_layers == 2 and fast.draft.weights.embed is fast.target.weights.embed
    out = fast.generate([9], 60, temperature=0.7)
    assert out.tokens == cases.plain(target, [9], 60, temperature=0.7)
    fixed = specker.load(target, tmp_path / "thin", strategy=strategy, dtype="float64", device="cpu", policy="fixed")
    out = fixed.generate([9], 60, temperature=0.7)
    assert out.tokens == cases.plain(target, [9], 60, temperature=0.7) and out.stats.accepted > 0


def test_the_answers_are_counted(target, tmp_path, main):
    """Prompts are not: a draft's head drafts answers."""
    corpus.save(tmp_path, {k: ([7, 7, 40 + k, 30, 31, 30, 31], 2) for k in range(12)})
    main(scores, "--target", target, "--corpus", tmp_path, "--out", tmp_path / "own", "--ngram_least", 2)
    counted = read(tmp_path / "own-vocab_scores.safetensors")
    assert counted.ids[:2].tolist() == [30, 31] and counted.counts[:2].tolist() == [24, 24]
    assert 7 not in counted.ids and counted.totals == {"texts": 12, "tokens": 60}
    assert counted.held_out is not None and counted.held_out_coverage(2) == pytest.approx(0.8)
    trimmed = specker.load(
        target,
        target,
        "vocabtrim",
        device="cpu",
        dtype="float64",
        vocab_scores=str(tmp_path / "own-vocab_scores.safetensors"),
    )
    assert {30, 31} <= set(trimmed.trimmed_head.ids.tolist())
    assert len(ngram.read(str(tmp_path / "own-ngram.safetensors")).trigrams) == 2


def test_the_loss_is_the_divergence_from_the_target(monkeypatch):
    """With every row scored it is exact; with a sample of the rows its mean is."""
    g = torch.Generator().manual_seed(0)
    V, n = 300, 40
    hidden, embed = torch.randn(n, 8, generator=g), 0.5 * torch.randn(V, 8, generator=g)
    logits, best = torch.randn(n, V, generator=g).topk(12)
    weight = torch.rand(n, generator=g)
    p = (logits / 0.7).softmax(-1).double()
    q = (hidden @ embed.T / 0.7).double().log_softmax(-1).gather(1, best)
    want = ((p * (p.log() - q)).sum(-1) * weight).sum() / weight.sum()
    column = torch.arange(V)
    every = draft.Rows(column, torch.zeros(V), column)
    exact = draft.loss_of(hidden, embed, best, logits, weight, 0.7, every)
    assert exact == pytest.approx(float(want), rel=1e-5)
    monkeypatch.setattr(draft, "SAMPLED", 60)  # of 250 ids
    torch.manual_seed(0)
    sampled = [
        float(draft.loss_of(hidden, embed, best, logits, weight, 0.7, draft.Rows.of(column[:50], column[50:], V)))
        for _ in range(60)
    ]
    assert np.mean(sampled) == pytest.approx(float(want), rel=0.03)


def test_prompts_for_a_code_model(tmp_path, monkeypatch, main):
    """Every third is a general question, none is of the benches, and the same file comes again. A twelfth of the
    standard library is enough for that, with a module of known functions and one that is held out."""
    *rest, files = prompts.library_files(only_stdlib=True)["python"]
    known = [(rel, path) for rel, path in files if rel in ("xml/sax/saxutils.py", "textwrap.py")]
    assert len(known) == 2
    some = {"python": (*rest, list(dict.fromkeys([*files[::12], *known])))}
    monkeypatch.setattr(prompts, "library_files", lambda only_stdlib: some)
    for name in ("a", "b"):
        main(prompts, "--out", tmp_path / name, "--count", 90)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "a").read_text().splitlines()]
    assert len(set(texts)) == 90
    topics = [any(topic in text for topic in prompts.TOPICS) for text in texts[2::3]]
    assert all(topics) and not any("```" in text for text in texts[2::3])
    code = [text for n, text in enumerate(texts) if n % 3 < 2]
    for request in prompts.REQUESTS:
        assert sum(text.startswith(request.split("{")[0]) for text in code) >= 60 // len(prompts.REQUESTS)
    bench = [json.loads(x)["turns"] for x in (ROOT / "bench" / "spec_bench.jsonl").read_text("utf-8").splitlines()]
    assert not {turn for turns in bench for turn in turns} & set(texts)
    names = {name for name, *_ in prompts.functions()}
    assert "quoteattr" in names and not {"fill", "indent", "dedent"} & names  # of textwrap, which is held out
