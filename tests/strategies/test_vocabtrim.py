"""A trimmed draft head never changes the tokens, whatever it keeps, and reports its cost."""

import json

import cases
import pytest
import torch
from make_checkpoint import make
from pairs import perturbed
from safetensors.torch import save_file

import specker
from specker.checkpoints.checkpoint import read_config
from specker.cli import run
from specker.runtime.strategies.vocabtrim.scores import VocabScores

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
SHAPES = {"chain": {"draft_tokens": 5}, "tree": {"tree": "3x4"}}
PROMPTS = ([5, 9, 40], [1], list(range(3, 90)))
COUNT = 10


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """(target, draft, score file counted on the target's text), with untied and tied heads."""
    made = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp(f"tied-{tied}")
        target = make(folder / "target", layers=2, max_context=192, tied=tied)
        draft = perturbed(target, folder / "draft")
        plain = specker.load(target, strategy="ar", dtype="float64", batch_size=8)
        texts = plain.generate([[seed] for seed in range(8)], 75, temperature=1.0, seed=[*range(8)])
        tokens = [t for text in texts for t in text.tokens]
        counts = torch.bincount(torch.tensor(tokens), minlength=plain.target.config.vocab_size)
        path = folder / "scores.safetensors"
        path.write_bytes(VocabScores.from_counts(counts, source="target").to_bytes())
        made[tied] = str(target), str(draft), str(path)
    return made


def load(family, keep, tied=False, **options):
    target, draft, path = family[tied]
    how = {"strategy": "vocabtrim", "vocab_scores": path, "vocab_keep": str(keep), "vocab_text": 0, **options}
    return specker.load(target, draft, dtype="float64", page_size=16, **how)


@pytest.mark.parametrize(("shape", "tied"), cases.one_in(2, SHAPES, [False, True]))
def test_only_kept_tokens_are_drafted_and_keeping_all_trims_nothing(family, tied, shape):
    drafted = set()
    trimmed = load(family, 24, tied, **SHAPES[shape])
    trimmed.trace = lambda row: drafted.update(row["draft"])
    kept = set(trimmed.trimmed_head.ids.tolist())
    for prompt in PROMPTS:
        trimmed.generate(prompt, COUNT, temperature=0.7)
    assert len(kept) == 24 and len(drafted) > 5 and drafted <= kept

    target, draft, _ = family[tied]
    whole, full = (
        load(family, 128, tied, **SHAPES[shape]),
        specker.load(target, draft, "draft", dtype="float64", page_size=16, **SHAPES[shape]),
    )
    for prompt in PROMPTS:
        a, b = (engine.generate(prompt, COUNT, temperature=0.7).stats for engine in (whole, full))
        assert (a.rounds, a.drafted, a.accepted, a.hits) == (b.rounds, b.drafted, b.accepted, b.hits)
        assert a.lost == 0 and a.kept == a.tokens


def test_the_head_is_the_kept_rows_and_the_embedding_stays_whole(family):
    engine = load(family, 24)
    full = specker.load(*family[False][:2], "draft", dtype="float64")
    assert engine.trimmed_head.weight.shape == (24, 64)
    assert torch.equal(engine.trimmed_head.weight, full.draft.weights.head[engine.trimmed_head.ids])
    assert torch.equal(engine.drafter.model.embed, full.drafter.model.embed)


def test_rounds_cut_short_by_trimming_are_counted(family):
    """Recounted from the rounds: those that end before the whole draft, at a token that is not kept."""
    engine = load(family, 24, draft_tokens=3)
    kept = set(engine.trimmed_head.ids.tolist())
    lost = emitted = within = 0
    for prompt in PROMPTS:
        for chunk in engine.stream(prompt, 36, temperature=0.7):
            emitted += len(chunk.tokens)
            within += sum(t in kept for t in chunk.tokens)
            budget = min(3, 36 - chunk.stats.tokens + len(chunk.tokens) - 1)
            lost += chunk.accepted < budget and chunk.tokens[-1] not in kept
    stats = sum((engine.generate(p, 36, temperature=0.7).stats for p in PROMPTS), specker.runtime.control.stats.Stats())
    assert (stats.tokens, stats.kept, stats.lost) == (emitted, within, lost) and lost > 0
    report = engine.trim_report(stats)
    assert report["kept_rows"] == 24 and report["coverage"] == within / emitted and report["rounds_lost"] == lost
    assert report["head_bytes_per_draft_step"] == 24 * 64 * 8
    layers = 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)  # of both models: E 64, D 16, heads 4/2, F 96
    c, gamma = (layers + 24 * 64) / (layers + 128 * 64), stats.drafted / stats.rounds
    assert report["mbsu"] == pytest.approx(stats.acceptance_length / (c * gamma + 1))
    assert load(family, 24, tree="3x4").trim_report(stats)["mbsu"] == pytest.approx(
        stats.acceptance_length / (c * 4 + 1)
    )


@pytest.mark.parametrize(("tied", "shape", "temperature"), cases.one_in(2, [False, True], SHAPES, [0.0, 0.7]))
def test_rows_that_follow_the_text_hold_its_own_tokens(family, tied, shape, temperature):
    """The tokens equal plain decoding. The rows are recounted from the text and equal the whole head's. A new request
    starts from the loaded rows, so it gives the same result."""
    engine = load(family, 16, tied, vocab_text=6, **SHAPES[shape])
    whole = specker.load(*family[tied][:2], "draft", dtype="float64").draft.weights.head
    head, loaded = engine.drafter.head, engine.trimmed_head.ids.tolist()
    assert len(loaded) == 22 and engine.trimmed_head.text == 6
    runs = []
    for prompt in (*PROMPTS, PROMPTS[0]):
        looked_at = list(prompt)
        slots = loaded[16:]  # oldest first
        for chunk in engine.stream(prompt, COUNT, temperature=temperature):
            for token in looked_at:
                if token in slots or token not in loaded[:16]:
                    slots.remove(token if token in slots else slots[0])
                    slots.append(token)
            looked_at = chunk.tokens
            if (
                chunk.stats.lengths.get(0) or chunk.finished
            ):  # the last round had no room to draft, or the head is reset
                break
            assert head.draftable == {*loaded[:16], *slots} == set(head.token_ids.tolist())
            assert torch.equal(head.weight, whole[head.token_ids])
        runs.append(engine.generate(prompt, COUNT, temperature=temperature))
        assert runs[-1].tokens == cases.plain(family[tied][0], prompt, COUNT, temperature=temperature)
    assert runs[0].tokens == runs[-1].tokens and runs[0].stats.hits == runs[-1].stats.hits


def test_rows_that_follow_the_text_find_what_the_scores_left_out(family):
    """Tokens without a score are drafted after they have appeared in the text."""
    for options in ({}, {"draft_tokens": 3}):
        fixed, follows = (load(family, 16, vocab_text=n, **options) for n in (0, 24))
        stats = []
        for engine in (fixed, follows):
            runs = [engine.generate(p, 24, temperature=0.7).stats for p in PROMPTS]
            stats.append(sum(runs, specker.runtime.control.stats.Stats()))
        assert stats[1].kept > stats[0].kept and stats[1].accepted > stats[0].accepted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "draft", "vocab_keep": "16"}, "vocab_keep is for strategy vocabtrim"),
        ({"strategy": "draft", "vocab_scores": "f"}, "vocab_scores is for strategy vocabtrim"),
        ({"strategy": "ar+vocabtrim"}, "ar drafts nothing"),
        ({"strategy": "vocabtrim+vocabtrim"}, "do not compose"),
        ({"strategy": "draft", "vocab_text": 4}, "vocab_text is for strategy vocabtrim"),
        ({"strategy": "vocabtrim", "vocab_text": -1}, "vocab_text must be at least 0, got -1"),
        ({"strategy": "vocabtrim", "vocab_keep": "some"}, "vocab_keep must be rows"),
        ({"strategy": "vocabtrim", "tree": "40x2", "vocab_keep": "16", "vocab_text": 0}, "wider than the 16 rows"),
        (
            {"strategy": "vocabtrim", "vocab_scores": None, "vocab_keep": "coverage:0.9"},
            "vocab_keep='coverage:X' needs a score file",
        ),
        ({"strategy": "vocabtrim", "vocab_scores": "/nowhere.safetensors"}, "no such vocabulary score file"),
    ],
)
def test_refuses(family, options, words):
    target, draft, path = family[False]
    if options["strategy"] == "vocabtrim":
        options = {"vocab_scores": path, **options}
    with pytest.raises(ValueError, match=words):
        specker.load(target, draft, dtype="float64", **options)


def test_scores_of_another_vocabulary_are_refused(family, pair):
    _, _, path = family[False]
    with pytest.raises(ValueError, match="ranks a vocabulary of 128 ids, the target's has 320"):
        specker.load(*pair, strategy="vocabtrim", vocab_scores=path, device="cpu")
    scores = VocabScores.from_counts(torch.arange(320), tokenizer="of another")
    other = family[False][2] + ".other.safetensors"
    with open(other, "wb") as file:
        file.write(scores.to_bytes())
    with pytest.raises(ValueError, match="counted with another tokenizer"):
        specker.load(*pair, strategy="vocabtrim", vocab_scores=other, device="cpu")


def test_specials_and_stop_ids_are_always_kept(pair, tmp_path):
    from make_checkpoint import byte_tokenizer

    path = tmp_path / "s.safetensors"
    path.write_bytes(VocabScores.from_counts(torch.arange(320)).to_bytes())
    engine = specker.load(
        *pair, strategy="vocabtrim", vocab_scores=str(path), vocab_keep="9", vocab_text=0, device="cpu"
    )
    special = {*byte_tokenizer().all_special_ids, *engine.target.config.eos_ids}
    assert special and special <= set(engine.trimmed_head.ids.tolist()) and len(engine.trimmed_head.ids) == 9
    assert 319 in engine.trimmed_head.ids.tolist()


def test_a_file_without_counts_keeps_its_ids(family, tmp_path):
    ids = torch.tensor(sorted({2, 5, 9, 40, *read_config(family[False][0]).eos_ids}))
    save_file({"d2t": ids - torch.arange(len(ids))}, path := tmp_path / "eagle.safetensors")
    engine = load(family, None, vocab_scores=str(path), vocab_keep=None)
    assert torch.equal(engine.trimmed_head.ids, ids)


@pytest.mark.parametrize("strategy", ["vocabtrim", "draft+vocabtrim"])
def test_from_the_command_line(family, strategy, capsys, tmp_path):
    from specker import zoo

    assert zoo.CODE.vocab_scores.is_file()
    out = tmp_path / "o.json"
    argv = ["--strategy", strategy, "--prompt", "def f(", "--max-new-tokens", "20", "--device", "cpu", "--check"]
    assert run.main([*argv, "--vocab-keep", "2048", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["strategy"] == strategy and told["total"]["identical"]
    assert (told["vocabulary"]["kept_rows"], told["vocabulary"]["text_rows"]) == (2048 + 256, 256)
    assert 0 < told["vocabulary"]["coverage"] <= 1
    shown = capsys.readouterr().err
    assert "2304 of 8192" in shown and "rounds cut by trimming" in shown
    assert told["vocabulary"]["ranking"] == "vocab_scores.safetensors" and "vocab_scores.safetensors" in shown
