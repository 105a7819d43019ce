"""vocabtrim without a score file: the tokens are those of plain decoding, and a run ranks ids by the runs before it."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import cases
import pytest
import torch
from make_checkpoint import make
from pairs import perturbed

import specker
from specker import zoo
from specker.checkpoints.checkpoint import read_config, read_tokenizer
from specker.cli import run
from specker.integrations.drafts import Drafts
from specker.runtime.control.stats import Stats
from specker.runtime.strategies.vocabtrim import counts as vocab_counts
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.runtime.strategies.vocabtrim.counts import VocabCounts
from specker.runtime.strategies.vocabtrim.scores import VocabScores

SHAPES = {"chain": {"draft_tokens": 5}, "tree": {"tree": "3x4"}}
PROMPTS = ([5, 9, 40], [1], list(range(3, 90)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target with the byte tokenizer, and a draft."""
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", layers=2, max_context=256, tokenizer=True)
    return str(target), str(perturbed(target, folder / "draft"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECKER_VOCAB_LEARN", "on")
    return tmp_path / "cache" / "vocab"


def load(models, **options):
    how = {"strategy": "vocabtrim", "vocab_keep": "40", "vocab_text": 0, **options}
    return specker.load(*models, dtype="float64", device="cpu", page_size=16, **how)


def counted(models):
    """What is on the disk for the models' tokenizer, id -> count."""
    return VocabCounts(vocab_scores.tokenizer_hash(read_tokenizer(models[0])), {}).earlier


@pytest.mark.parametrize(("shape", "temperature"), cases.one_in(2, SHAPES, [0.0, 0.7]))
def test_tokens_equal_plain_decoding_and_the_second_run_covers_more(models, shape, temperature):
    runs = []
    for ranking in ("the tokenizer's order", "72 tokens of earlier runs", "144 tokens of earlier runs"):
        engine = load(models, **SHAPES[shape])
        assert engine.trimmed_head.ranking == ranking and len(engine.trimmed_head.ids) == 40
        made = [engine.generate(prompt, 24, temperature=temperature) for prompt in PROMPTS]
        for prompt, got in zip(PROMPTS, made, strict=True):
            assert got.tokens == cases.plain(models[0], prompt, 24, temperature=temperature)
        runs.append(sum((got.stats for got in made), Stats()))
        engine.trimmed_head.counts.save()
    assert runs[0].tokens == runs[1].tokens == 72
    assert runs[1].kept > runs[0].kept and runs[1].accepted > runs[0].accepted


def test_a_run_keeps_what_earlier_ones_wrote_most_then_the_tokenizers_order(models):
    first = load(models, vocab_keep="300")
    special = {*read_tokenizer(models[0]).all_special_ids, *first.target.config.eos_ids}
    tokens = first.generate([1], 60, temperature=1.0).tokens
    often = torch.tensor(tokens).bincount(minlength=320)
    kept = set(load(models, vocab_keep=str(len(special) + 10)).trimmed_head.ids.tolist())
    assert special <= kept
    least = min(int(often[i]) for i in kept - special)
    assert all(i in kept for i in set(tokens) - special if often[i] > least)
    ascii_ids = [i for t, i in read_tokenizer(models[0]).get_vocab().items() if len(t) == 1 and t.isascii()]
    rest = sorted(i for i in ascii_ids if i not in tokens)
    more = len(special | set(tokens)) + 5
    kept = set(load(models, vocab_keep=str(more)).trimmed_head.ids.tolist())
    assert kept == special | set(tokens) | set(rest[:5])


def test_what_is_counted(models):
    """The tokens that were emitted while drafting, once: no prompt, no plain decoding, no warm-up."""
    engine = load(models, batch_size=2)
    engine.warmup()
    assert not counted(models)
    texts = [out.tokens for out in engine.generate([[7], [8, 9, 10], [11] * 30], [20, 33, 7], temperature=1.0)]
    engine.generate_ar([7], 50)
    for chunk in engine.stream([1], 40):  # abandoned: the next request counts what was emitted
        texts.append(chunk.tokens)
        break
    texts.append(engine.generate([2], 5).tokens)
    engine.trimmed_head.counts.save()
    want = torch.tensor([t for text in texts for t in text]).bincount(minlength=320)
    assert {i: n for i, n in enumerate(want.tolist()) if n} == counted(models)


def test_other_engines_drafts_count_what_the_texts_grow_by(models):
    drafts = Drafts(*models, strategy="vocabtrim", device="cpu", dtype="float64", vocab_keep="40")
    drafts.warm_up(4)
    text = [5, 6, 7]
    for new in ([9, 9], [3], [4, 4, 4]):
        drafts.draft([text], 4)
        text = text + new
    drafts.draft([text], 4)
    drafts.drafter.head.counts.save()
    assert counted(models) == {9: 2, 3: 1, 4: 3}


def test_it_can_be_turned_off(models, cache, monkeypatch):
    load(models).generate([1], 60, temperature=1.0)
    before = (file := next(cache.glob("*.safetensors"))).read_bytes()
    monkeypatch.setenv("SPECKER_VOCAB_LEARN", "off")
    engine = load(models)
    assert engine.trimmed_head.ranking == "the tokenizer's order" and engine.trimmed_head.counts is None
    engine.generate([1], 60, temperature=1.0)
    assert file.read_bytes() == before
    monkeypatch.setenv("SPECKER_VOCAB_LEARN", "maybe")
    with pytest.raises(ValueError, match="variable SPECKER_VOCAB_LEARN must be on or off, got 'maybe'"):
        load(models)


@pytest.mark.parametrize("options", [{"load": "dummy"}, {"scores": True}], ids=str)
def test_what_learns_nothing(models, cache, options, tmp_path):
    """Stand-ins for real models, and a target with a score file."""
    options = dict(options)
    if options.pop("scores", False):
        (tmp_path / "s.safetensors").write_bytes(VocabScores.from_counts(torch.arange(320)).to_bytes())
        options["vocab_scores"] = str(tmp_path / "s.safetensors")
    load(models, **options).generate([1], 20)
    assert not cache.exists()


def test_without_a_tokenizer_the_lowest_ids_are_kept(tmp_path, cache):
    target = make(tmp_path / "target", layers=2, max_context=192)
    engine = load((target, perturbed(target, tmp_path / "draft")), vocab_keep=None)
    assert (
        engine.trimmed_head.ids.tolist() == list(range(32)) and engine.trimmed_head.ranking == "id"
    )  # a quarter of 128
    assert engine.generate([1], 20).tokens == engine.generate_ar([1], 20).tokens and not cache.exists()


def test_from_the_command_line(models, tmp_path, capsys, monkeypatch):
    """A cache that cannot be written is a remark, and the run goes on."""
    out = tmp_path / "o.json"
    argv = ["--target", models[0], "--draft", models[1], "--strategy", "vocabtrim", "--vocab-keep", "40", "--prompt"]
    argv += ["hello", "--max-new-tokens", "20", "--device", "cpu", "--json", str(out)]
    for ranking in ("the tokenizer's order", "20 tokens of earlier runs"):
        assert run.main(argv) == 0
        assert json.loads(out.read_text())["vocabulary"]["ranking"] == ranking
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "file"))
    assert run.main(argv) == 0
    assert "cannot be written (Not a directory), so the tokens of this run are not counted" in capsys.readouterr().err


def test_a_disk_that_fills_up_does_not_end_a_run(models, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vocab_counts, "write_cached", full)
    argv = ["--target", models[0], "--draft", models[1], "--strategy", "vocabtrim", "--prompt", "hello", "--prompt"]
    argv += ["hello", "--max-new-tokens", "8", "--device", "cpu", "--samples", "2"]
    assert run.main(argv) == 0
    assert capsys.readouterr().err.count("No space left on device") == 1


# --- bundled score files


def test_a_bundled_score_file_serves_every_target_with_its_tokenizer(tmp_path):
    """The tokenizer of the bundled pair, in a model of other sizes and with a padded vocabulary."""
    target = make(tmp_path / "target", layers=1, vocab=8200, max_context=128)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(zoo.path("code-target") / name, target)
    engine = load((target, perturbed(target, tmp_path / "draft")), vocab_keep="500")
    assert (
        engine.recipe.family is None
        and engine.trimmed_head.ranking == "vocab_scores.safetensors"
        and not engine.trimmed_head.counts
    )
    scores = vocab_scores.read(zoo.CODE.vocab_scores)
    always = {*engine.target.config.eos_ids, *vocab_scores.special_ids(engine.tokenizer)}
    assert engine.trimmed_head.ids.tolist() == scores.kept(vocab_scores.VocabKeep(rows=500), always, 8200).tolist()
    other = make(tmp_path / "other", layers=1, vocab=8200, max_context=128, tokenizer=True)
    assert load((other, perturbed(other, tmp_path / "draft2"))).trimmed_head.ranking == "the tokenizer's order"


def test_the_coder_family_is_known_by_its_sizes():
    sizes = {"hidden_size": 1536, "num_layers": 28, "num_heads": 12, "intermediate_size": 8960, "vocab_size": 151936}
    assert zoo.family_of(SimpleNamespace(**sizes)) is zoo.CODER
    assert zoo.family_of(SimpleNamespace(**{**sizes, "num_layers": 24})) is None
    assert zoo.CODER.vocab_scores.name == "qwen2.5-coder-vocab_scores.safetensors"


@pytest.fixture
def coder(models, tmp_path, monkeypatch):
    """A family that has a score file and no drafts, with the sizes of the tiny target. The file does not exist yet."""
    config = read_config(models[0])
    sizes = {name: getattr(config, name) for name in zoo.CODER.sizes}
    family = replace(zoo.CODER, sizes=sizes, vocab_scores=tmp_path / "scores.safetensors")
    monkeypatch.setattr(zoo, "FAMILIES", (family,))
    return family


def test_a_family_without_drafts_works_with_and_without_its_file(models, coder):
    assert load(models).trimmed_head.ranking == "the tokenizer's order"
    digest = vocab_scores.tokenizer_hash(read_tokenizer(models[0]))
    coder.vocab_scores.write_bytes(VocabScores.from_counts(torch.arange(320), tokenizer=digest).to_bytes())
    engine = load(models, vocab_keep=None)
    assert (
        engine.recipe.family is coder
        and engine.trimmed_head.ranking == "scores.safetensors"
        and len(engine.trimmed_head.ids) == 40
    )
    assert engine.generate([1], 20).tokens == engine.generate_ar([1], 20).tokens
    assert Drafts(*models, strategy="vocabtrim", device="cpu").drafter.head.ranking == "scores.safetensors"
    coder.vocab_scores.write_bytes(VocabScores.from_counts(torch.arange(320), tokenizer="another").to_bytes())
    assert load(models).trimmed_head.ranking == "the tokenizer's order"


@pytest.mark.parametrize("installed", [True, False])
def test_a_family_without_drafts_asks_for_the_users(models, coder, installed, monkeypatch, tmp_path):
    if not installed:
        monkeypatch.setattr(zoo, "FOLDER", tmp_path / "absent")
    for strategy in ("draft", "vocabtrim", "easyspec", "diffuspec"):
        with pytest.raises(ValueError, match=r"needs a draft checkpoint for .*target: pass draft"):
            specker.load(models[0], strategy=strategy, device="cpu")
    with pytest.raises(ValueError, match=r"needs a draft checkpoint for .*target: pass draft"):
        Drafts(models[0], device="cpu")
    assert specker.load(*models, device="cpu").generate([1], 8).tokens
