"""A diffusion language model as drafter: its forward pass, the path search, and tokens equal to plain decoding."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import cases
import numpy as np
import path_search
import pytest
import torch
from make_checkpoint import byte_tokenizer, edit, exact_oracle, make, oracle, oracle_logits
from one_round import after_every_round, apart, draft, fresh, outcome, tokens

import specker
from specker.cli import run
from specker.options import Sampling
from specker.runtime.control.policy import Budget
from specker.runtime.control.stats import BlockStats, Stats
from specker.runtime.strategies.blocks import AdaptiveLength
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts, read
from specker.runtime.strategies.blocks.search import Search

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
PROMPTS = ([5, 9, 40], [1], list(range(3, 60)))
STOP = 7
DRAFTS = {"dream": {"arch": "dream"}, "qwen3": {"arch": "qwen3", "mask": 126}, "qwen2": {"arch": "qwen2", "mask": 126}}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """(target, draft with the same weights, n-gram file) for each kind of draft; ids below 128."""
    made = {}
    for name, options in DRAFTS.items():
        folder = tmp_path_factory.mktemp(name)
        arch = "qwen3" if name == "qwen3" else "qwen2"
        target = make(folder / "target", arch, layers=2, max_context=192, eos=STOP)
        draft = make(folder / "draft", layers=2, max_context=192, eos=STOP, **options)
        plain = specker.load(target, strategy="ar", dtype="float64")
        counts = NGramCounts(128)
        for seed in range(3):
            counts.add(plain.generate([seed], 120, temperature=1.0, seed=seed).tokens)
        (folder / "ngram").write_bytes(NGram.fit(counts, totals={"texts": 3}).to_bytes())
        made[name] = str(target), str(draft), str(folder / "ngram")
    return made


def load(family, name="dream", searched=True, **options):
    target, draft, ngram = family[name]
    more = {"ngram": ngram} if searched and options.get("cps") != "off" else {}
    return specker.load(target, draft, "diffuspec", dtype="float64", page_size=16, **more, **options)


SHAPES = {
    "off": {"cps": "off", "draft_tokens": 3},
    "chain": {"cps": "chain", "draft_tokens": 6},
    "tree": {"cps": "tree", "draft_tokens": 6},
    "adl": {"adl": "2-9"},
    "plus-minus-one": {"policy": "plus-minus-one"},
    "long": {"draft_tokens": 100},
}
HOW = {"greedy": {}, "T0.7": {"temperature": 0.7}, "top": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5}}
CASES = [
    ("dream", "chain", "top", "on"),
    ("dream", "plus-minus-one", "greedy", "on"),
    ("qwen3", "chain", "T0.7", "off"),  # its random guesses never match greedy tokens
]


@pytest.mark.parametrize(("name", "shape", "how", "graphs"), CASES)
def test_tokens_equal_plain_decoding(family, monkeypatch, name, shape, how, graphs):
    """With rows placed by the host, and by the device once the text is longer than the longest block."""
    fast = load(family, name, graphs=graphs, **SHAPES[shape])
    drafted = accepted = fixed = 0
    for prompt in PROMPTS:
        got = fast.generate(prompt, 24, **HOW[how])
        assert got.tokens == cases.plain(family[name][0], prompt, 24, **HOW[how])
        drafted, accepted = drafted + got.stats.drafted, accepted + got.stats.accepted
        fixed += got.stats.rounds
    assert 0 < accepted < drafted
    assert fast.loop.launched > fixed / 2 if graphs == "on" else fast.loop.launched == 0


def test_long_blocks_are_placed_by_the_host(family):
    fast = load(family, graphs="on", **SHAPES["long"])
    got = fast.generate(PROMPTS[2], 40, temperature=0.7)
    assert got.stats.drafted > 0 and fast.loop.launched == 0
    assert got.tokens == fast.generate_ar(PROMPTS[2], 40, temperature=0.7).tokens


def test_a_trimmed_head_changes_no_token(family, tmp_path):
    from specker.runtime.strategies.vocabtrim.scores import VocabScores

    scores = tmp_path / "s.safetensors"
    scores.write_bytes(VocabScores.from_counts(torch.arange(1, 129)).to_bytes())
    target, draft, ngram = family["dream"]
    how = {"vocab_scores": str(scores), "vocab_keep": "12", "vocab_text": 5, "ngram": ngram}
    fast = specker.load(target, draft, "diffuspec+vocabtrim", dtype="float64", **how)
    accepted = 0
    for prompt, temperature in itertools.product(PROMPTS, (0.0, 0.7)):
        got = fast.generate(prompt, 12, temperature=temperature)
        assert got.tokens == cases.plain(target, prompt, 12, temperature=temperature)
        accepted += got.stats.accepted
        report = fast.trim_report(got.stats)
    assert accepted > 0 and report["kept_rows"] == 12 + 5 and STOP in fast.trimmed_head.ids.tolist()
    assert report["mbsu"] > 0


def guessed(engine, committed, n):
    """Log-probabilities [n, V] of the drafter's guesses after `committed`, on a fresh cache."""
    fresh(engine)
    with torch.inference_mode():
        return engine.drafter.model.logits(engine.drafter.masked([committed], n)).log_softmax(-1)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_pass_is_the_bidirectional_model_over_text_and_masks(family, name, monkeypatch):
    """Against transformers' Qwen with an all-ones mask, in float64. Dream's row i predicts position i + 1, the others'
    row i predicts position i."""
    exact_oracle(monkeypatch)
    engine = load(family, name)
    model = oracle(Path(family[name][1]), torch.float64)
    mask = json.loads((Path(family[name][1]) / "config.json").read_text())["mask_token_id"]
    for text in ([5], [5, 9, 40, 11], list(range(3, 60))):  # up to 64 rows the catch-up is one pass
        for n in (1, 4):
            logits = oracle_logits(model, torch.tensor(text + [mask] * n), bidirectional=True)
            rows = logits[len(text) - 1 : -1] if name == "dream" else logits[len(text) :]
            assert (guessed(engine, text, n) - rows.log_softmax(-1)).abs().max() < 1e-9


def test_shifted_logits_selects_the_row_that_predicts_a_position(family, tmp_path):
    text = [5, 9, 40, 11]
    for name, shifted in (("dream", False), ("qwen3", True)):
        target, draft, _ = family[name]
        says = shutil.copytree(draft, tmp_path / name)
        edit(says, shifted_logits=shifted)
        a, b = (guessed(specker.load(target, str(d), "diffuspec", dtype="float64"), text, 4) for d in (draft, says))
        shift, plain = (b, a) if shifted else (a, b)
        assert torch.allclose(shift[1:], plain[:-1], atol=1e-9) and not torch.allclose(shift[0], plain[0])


def test_the_cached_prefix_equals_one_pass_over_all_rounds(family, monkeypatch):
    """Each round forwards the new tokens and the masks, then drops the masks. The oracle runs all rounds in one pass:
    a row sees the tokens of earlier rounds and its whole own round."""
    exact_oracle(monkeypatch)
    engine, n = load(family), 4
    fresh(engine)
    drafter = engine.drafter
    text, steps = list(range(3, 40)), (1, 3, 5, 2)
    runs = [text[:-1]]
    with torch.inference_mode():
        drafter.prefill(0, text)
        for count in steps:
            new = text[drafter.cache.exact_len[0] :]
            got = drafter.model.logits(drafter.masked([text], n))
            assert drafter.cache.exact_len == [len(text)]
            runs.append(new + [127] * n)
            ids, run, place, is_mask = [], [], [], []
            start = 0
            for number, one in enumerate(runs):
                ids += one
                run += [number] * len(one)
                place += range(start, start + len(one))
                masked = [False] * len(one) if number == 0 else [False] * (len(one) - n) + [True] * n
                is_mask += masked
                start += len(one) - sum(masked)
            run_, masked_ = torch.tensor(run), torch.tensor(is_mask)
            sees = (run_[:, None] == run_) | ((run_[:, None] > run_) & ~masked_)
            model = oracle(Path(family["dream"][1]), torch.float64)
            additive = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64).masked_fill(~sees, float("-inf"))
            where = torch.tensor([place])
            want = model(torch.tensor([ids]), attention_mask=additive, position_ids=where, use_cache=False).logits[0]
            assert (got - want[-n - 1 : -1]).abs().max() < 1e-9
            text = text + list(range(60, 60 + count))


@pytest.mark.parametrize("name", ["dream", "qwen3"])
def test_a_block_of_fixed_shape_is_the_model_over_its_window(family, name, monkeypatch):
    """The last tokens run again together with the masks. They all see each other and the earlier columns, which the
    prefill wrote."""
    exact_oracle(monkeypatch)
    k, text = 4, list(range(3, 40))
    engine = load(family, name, cps="off", draft_tokens=k)
    mask = engine.draft.config.mask_token_id
    r = draft(engine.drafter, text, Budget(k, k), fixed=True)
    again, known = engine.drafter.repeated, len(text) - 1
    assert again == k + 1
    before = len(text) - again
    ids, place = text[:-1] + text[-again:] + [mask] * k, [*range(known), *range(before, len(text) + k)]
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    sees[:known, :known] = sees[known:, known:] = sees[known:, :before] = True
    additive = torch.zeros(1, 1, *sees.shape, dtype=torch.float64).masked_fill(~sees, float("-inf"))
    model = oracle(Path(family[name][1]), torch.float64)
    out = model(torch.tensor([ids]), attention_mask=additive, position_ids=torch.tensor([place]), use_cache=False)
    rows = out.logits[0, -k - 1 : -1] if name == "dream" else out.logits[0, -k:]
    assert tokens(r) == rows.argmax(-1).tolist() and r.draft.depth == k


def test_a_round_forwards_only_new_tokens_and_masks(family, monkeypatch):
    from specker.runtime.strategies.diffuspec import diffusion_drafter as diffuspec

    rows = []
    real = diffuspec.forward
    monkeypatch.setattr(diffuspec, "forward", lambda *a: rows.append(a[3].shape[0]) or real(*a))
    fast = load(family, draft_tokens=5)
    committed, new, want = 3, 1, []  # after prefill only the root is new
    for chunk in fast.stream([5, 9, 40], 40):
        room = 43 - committed - 1
        if room:
            want.append(new + min(5, room))
        new = len(chunk.tokens)
        committed += new
    assert rows == want


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_search_ranks_by_both_models_and_the_noise(family, temperature):
    """The drafted chain maximises lambda log p + (1 - lambda) log p_ngram / T + g over all paths."""
    from specker.kernels.noise import gumbel

    engine = load(family, cps="chain", draft_tokens=3)
    drafter = engine.drafter
    drafter.search = replace(drafter.search, paths=64, candidates=4, mass=1.0, weight=0.3)
    text = [5, 9, 40, 11]
    log_p = guessed(engine, text, 3) if not temperature else None
    if temperature:
        log_p = (guessed(engine, text, 3) / temperature).log_softmax(-1)
    noise = gumbel(4, torch.arange(3, 6), 128).double() if temperature else torch.zeros(3, 128, dtype=torch.float64)
    ngram = read(family["dream"][2])
    best, candidates = {}, (log_p + noise).topk(4).indices.tolist()
    candidates = [list(dict.fromkeys([*c, STOP])) for c in candidates]
    for path in itertools.product(*candidates):
        if STOP in path:
            continue
        score, tail = 0.0, text
        for i, token in enumerate(path):
            second = path_search.log_p(ngram, np.array([tail[-2:]]), np.array([token]))[0, 0] / (temperature or 1)
            weight = 0.3 if i else 1.0  # the diffusion model alone scores the first position
            score += weight * log_p[i, token] + (1 - weight) * second + noise[i, token]
            tail = [*tail, token]
        best[path] = float(score)
    fresh(engine)
    drafter._missing = lambda slot, text, fixed: 0  # the pass over the masks forwards the text, too
    r = draft(drafter, text, Budget(255, 3), Sampling(temperature=temperature, seed=4))
    assert STOP not in tokens(r), "a stop token won: choose another text for this test"
    assert tuple(tokens(r)) == max(best, key=best.get)
    if not temperature:  # otherwise scores are known only up to a constant per position
        score = r.batch.memory.get("search", 1)[0, 2]
        assert float(score) == pytest.approx(max(best.values()) / 3, rel=1e-5)


def test_a_stop_token_in_the_lattice_ends_path_and_text(family):
    """If the drafter guesses a stop token, the path ends there: a chain repeats it, a tree has nothing behind it. So
    does the text if the target agrees."""
    fast = load(family)
    free = fast.generate_ar([5, 9, 40], 40).tokens
    stop = free[6]
    cut = free[: free.index(stop) + 1]
    for shape in ("off", "chain", "tree", "adl"):
        target, draft, ngram = family["dream"]
        more = {} if shape == "off" else {"ngram": ngram, "cps_tau": 1.0}
        engine = specker.load(target, draft, "diffuspec", dtype="float64", **SHAPES[shape], **more)
        object.__setattr__(engine.target.config, "eos_ids", (stop,))
        engine = type(engine)(engine.recipe, engine.target, engine.draft)
        seen = []
        engine.trace = seen.append
        got = engine.generate([5, 9, 40], 40)
        assert got.tokens == cut and got.finished == "stop"
        for row in seen if shape != "off" else ():
            nodes = zip(row["draft"], row["parents"], strict=True)
            behind = {token for token, up in nodes if up and row["draft"][up - 1] == stop}
            assert behind <= (set() if shape == "tree" else {stop})


def test_adaptive_length_follows_the_formula():
    rule = AdaptiveLength(20, 30)
    assert rule.budget() == Budget(30, 30)
    gen = acc = 0.0
    rng = np.random.default_rng(0)
    for _ in range(60):
        generated, accepted = int(rng.integers(0, 31)), int(rng.integers(0, 31))
        rule.observe(outcome(30, accepted, note=BlockStats(generated)))
        gen, acc = 0.5 * gen + 0.5 * generated, 0.5 * acc + 0.5 * accepted
        assert rule.budget().depth == min(max(int(np.floor(gen)) + 10 * (acc >= gen), 20), 30)
    rule.observe(outcome(0, 0, note=BlockStats(9)))  # a round without a draft changes nothing
    assert rule.generated == pytest.approx(gen)
    assert AdaptiveLength(2, 9).budget().depth == 9


def test_a_request_does_not_depend_on_the_one_before(family):
    fast = load(family, policy="adl", adl="2-9")
    runs = [fast.generate(PROMPTS[0], 40, temperature=0.7) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens and runs[0].stats.lengths == runs[1].stats.lengths


def test_at_the_drafters_limit_nothing_is_drafted(family, tmp_path):
    """With a shorter draft context, the text goes on without drafts."""
    target, draft, ngram = family["dream"]
    short = shutil.copytree(draft, tmp_path / "short")
    edit(short, max_position_embeddings=40)
    fast = specker.load(target, str(short), "diffuspec", dtype="float64", page_size=16, ngram=ngram)
    for prompt in ([5, 9, 40], list(range(3, 90))):
        got = fast.generate(prompt, 50)
        assert got.tokens == cases.plain(target, prompt, 50)
        assert (got.stats.drafted > 0) == (len(prompt) < 40)
    fast, prompt = load(family, draft_tokens=100), [n % 100 for n in range(140)]
    got = fast.generate(prompt, 52)  # to the end of both contexts
    assert got.tokens == cases.plain(target, prompt, 52) and got.stats.drafted > 52


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_caches_are_sound_after_every_round(family, monkeypatch, graphs):
    """The target's cache equals a fresh pass over the text; the drafter's has at most one column per token."""

    def sound(batch, r):
        text, own = r.requests[0].token_ids, batch.drafter.cache
        batch.cache.check(committed=len(text))
        own.check()
        assert own.exact_len[0] <= len(text) and apart(batch.target, batch.cache, text, len(text) - 1) < 1e-12

    for more in ({"adl": "2-5", "cps": "tree"}, {"draft_tokens": 3, "cps": "tree"}):
        with after_every_round(monkeypatch, sound) as sizes:
            load(family, graphs=graphs, **more).generate([5, 9, 40], 40, temperature=0.7)
        assert len(sizes) > 5 and max(sizes) > 3


# --- vocabularies


def with_tokenizer(folder, extra=()):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
    tokenizer.save_pretrained(folder)


def test_the_drafters_own_tokens_are_never_drafted(tmp_path):
    """A drafter with extra tokens, including the mask, and a padded vocabulary: like Dream for Qwen2.5."""
    target = make(tmp_path / "t", vocab=320, eos=256)
    draft = make(tmp_path / "d", "dream", vocab=352, mask=262)
    with_tokenizer(target)
    with_tokenizer(draft, [f"<own {n}>" for n in range(5)])  # 259..263
    fast = specker.load(target, draft, "diffuspec", dtype="float64", cps="off")
    assert fast.draft.weights.head.shape[0] == 259 and fast.draft.weights.embed.shape[0] == 352
    seen = []
    fast.trace = lambda row: seen.extend(row["draft"])
    got = fast.generate([5, 9], 60, temperature=1.0)
    assert got.tokens == fast.generate_ar([5, 9], 60, temperature=1.0).tokens
    assert len(seen) > 60 and max(seen) < 259


def test_a_drafter_with_a_smaller_vocabulary_changes_no_token(tmp_path):
    target = make(tmp_path / "t", vocab=400)
    draft = make(tmp_path / "d", "dream", vocab=320)
    for folder in (target, draft):
        with_tokenizer(folder)
    fast = specker.load(target, draft, "diffuspec", dtype="float64", cps="off")
    got = fast.generate([5, 390, 9], 60, temperature=1.0)
    assert got.tokens == fast.generate_ar([5, 390, 9], 60, temperature=1.0).tokens
    assert any(t >= 320 for t in got.tokens)


def test_another_tokenizer_is_refused(tmp_path):
    target, draft = make(tmp_path / "t", vocab=320), make(tmp_path / "d", "dream", vocab=320)
    with_tokenizer(target, ["<ours>"])
    with_tokenizer(draft, ["<theirs>"])
    with pytest.raises(ValueError, match="different tokenizers"):
        specker.load(target, draft, "diffuspec", cps="off")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "draft", "cps": "chain"}, "cps is for strategy dflash or diffuspec, not 'draft'"),
        ({"strategy": "draft", "policy": "adl"}, "policy='adl' is for strategy dflash or diffuspec, not 'draft'"),
        ({"strategy": "del", "policy": "adl"}, "policy='adl' is for strategy dflash or diffuspec, not 'del'"),
        ({"cps": "all"}, "cps must be one of off, chain, tree, got 'all'"),
        ({"tree": "2x2"}, "tree does not apply, but cps='tree' does"),
        ({"policy": "draft-and-verify"}, "policy='draft-and-verify' ends a draft token by token"),
        ({"policy": "del"}, "policy='del' is for strategy del"),
        ({"policy": "adl", "draft_tokens": 5}, "adl bounds it, draft_tokens does not apply"),
        ({"adl": "20-30", "policy": "fixed"}, "adl is for policy='adl'"),
        ({"policy": "adl", "adl": "30-20"}, "adl must be SHORTEST-LONGEST within 1-255"),
        ({"policy": "adl", "adl": "8"}, "adl must be SHORTEST-LONGEST within 1-255"),
        ({"policy": "adl", "adl": "8-300"}, "within 1-255"),
        ({"cps": "off", "ngram": "x"}, "cps='off' disables the search"),
        ({"cps": "tree", "policy": "plus-minus-one"}, "policy='plus-minus-one' is for chains"),
        ({"cps": "chain", "ngram": "/nowhere"}, "no such n-gram file"),
        ({"strategy": "diffuspec+easyspec"}, "do not compose"),
    ],
)
def test_refuses(family, options, words):
    target, draft, _ = family["dream"]
    with pytest.raises(ValueError, match=words):
        specker.load(
            *([target, draft][: 1 if options.get("strategy") == "del" else 2]), **{"strategy": "diffuspec", **options}
        )


def test_models_that_cannot_diffuse_are_refused(family, tmp_path, pair):
    target, draft, _ = family["dream"]
    llama = make(tmp_path / "llama", "llama")
    for source, words in (
        (llama, "LlamaForCausalLM cannot be bidirectional"),
        (make(tmp_path / "q", "qwen2"), "needs mask_token_id in config.json"),
    ):
        with pytest.raises(ValueError, match=words):
            specker.load(target, str(source), "diffuspec")
    with pytest.raises(ValueError, match="is a bidirectional drafter"):
        specker.load(target, draft, "draft")
    with pytest.raises(ValueError, match="vocabulary of 128 ids, the target's has 320"):
        specker.load(pair[0], make(tmp_path / "d", "dream", tokenizer=True), "diffuspec", ngram=family["dream"][2])


def test_an_ngram_model_is_optional(family):
    assert load(family, searched=False).drafter.search is None
    assert load(family, searched=False, cps="chain").drafter.search == Search()
    assert load(family).drafter.search.ngram is not None
    bundled = specker.load(strategy="diffuspec", cps="chain", device="cpu")  # has a model of its own
    assert bundled.drafter.search.ngram is not None
    assert specker.load(strategy="diffuspec", device="cpu").drafter.search is None


# --- reports


def test_stats_are_recounted_from_the_trace(family):
    fast = load(family, cps="tree", draft_tokens=5)
    rows = []
    fast.trace = rows.append
    total = Stats()
    for prompt in PROMPTS:
        total += fast.generate(prompt, 40, temperature=0.7).stats
    found = [row for row in rows if "diffusion" in row]
    told = total.diffusion
    assert len(found) == total.found["rounds"]
    assert told["L_gen"] == pytest.approx(np.mean([r["diffusion"]["generated"] for r in found]))
    assert told["L_acc"] == pytest.approx(np.mean([len(r["path"]) - 1 for r in found]))
    assert told["lattice_width"] == pytest.approx(np.mean([r["diffusion"]["width"] for r in found]))
    assert told["path_score"] == pytest.approx(np.mean([r["diffusion"]["score"] for r in found]))
    assert total.to_json()["diffusion"] == told


def test_from_the_command_line(capsys, tmp_path):
    out, trace = tmp_path / "o.json", tmp_path / "t.jsonl"
    argv = ["--strategy", "diffuspec", "--prompt", "def f(", "--max-new-tokens", "20", "--device", "cpu", "--check"]
    argv += ["--draft-tokens", "8"]  # a fixed length, so that it drafts on any machine
    assert run.main([*argv, "--json", str(out), "--trace", str(trace)]) == 0
    total = json.loads(out.read_text())["total"]
    assert total["identical"] and total["diffusion"]["k"] > 0
    assert {"L_gen", "L_acc", "k", "lattice_width", "path_score"} == set(total["diffusion"])
    assert "tokens per block" in capsys.readouterr().err
    assert any("diffusion" in json.loads(line) for line in trace.read_text().splitlines())
