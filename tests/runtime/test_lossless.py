"""With the same seed every strategy emits the tokens of plain decoding, at temperature 0 and above."""

import itertools

import cases
import pytest
from make_checkpoint import FULL, GEMMA4_MIXED, GPT_OSS, GRANITE, PHI4, QWEN3_MOE, SLIDING, make
from one_round import after_every_round, apart
from pairs import perturbed

import specker

DRAFTS = {"chain-1": {"draft_tokens": 1}, "chain-5": {"draft_tokens": 5}, "tree-3x4": {"tree": "3x4"}}
CAPPED = {"tree-4x3-cap-7": {"tree": "4x3", "draft_tokens": 7}, "wide": {"tree": "8x1"}, "deep": {"tree": "22x3"}}
SAMPLING = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1": {"temperature": 1.0, "seed": 3},
    "T1-top": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5},
}
SHAPES = {**DRAFTS, **CAPPED}
ARCHITECTURES = {arch: {"arch": arch} for arch in ("llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3")}
ARCHITECTURES |= {"granite": GRANITE, "phi4-mini": PHI4, "qwen3-moe": QWEN3_MOE}
ARCHITECTURES |= {"gpt-oss": {**GPT_OSS, "layer_types": [SLIDING, FULL]}}
ARCHITECTURES |= {"gemma4": {**GEMMA4_MIXED, "layer_types": [SLIDING, FULL], "tied": False}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """arch -> (target, draft)."""
    made = {}
    for arch, options in ARCHITECTURES.items():
        target = make(tmp_path_factory.mktemp(arch), **{**options, "layers": 2, "max_context": 192})
        made[arch] = target, perturbed(target, tmp_path_factory.mktemp(arch + "-draft"))
    return made


def engines(pair, **options):
    return specker.load(pair[0], strategy="ar", dtype="float64", page_size=16), drafting(pair, **options)


def drafting(pair, **options):
    return specker.load(*pair, strategy="draft", dtype="float64", page_size=16, **options)


WAYS = itertools.cycle([("chain-5", "greedy"), ("tree-3x4", "T0.7"), ("chain-5", "T0.7"), ("tree-3x4", "greedy")])
CASES = [
    *cases.one_in(3, ["llama"], SHAPES, SAMPLING),
    *((arch, *way) for arch, way in zip([*ARCHITECTURES][1:], WAYS, strict=False)),
]


@pytest.mark.parametrize(("arch", "shape", "how"), CASES)
def test_tokens_equal_plain_decoding(pairs, arch, shape, how):
    fast = drafting(pairs[arch], **SHAPES[shape])
    accepted = 0
    for prompt in ([5, 9, 40], [1], list(range(3, 90))):
        got = fast.generate(prompt, max_new_tokens=20, **SAMPLING[how])
        assert got.tokens == cases.plain(pairs[arch][0], prompt, 20, **SAMPLING[how])
        assert got.stats.tokens == len(got.tokens) == got.stats.accepted + got.stats.rounds
        accepted += got.stats.accepted
        assert got.stats.accepted < got.stats.drafted, "the draft never erred: this proves little"
    assert accepted > 0, "nothing was ever accepted: this proves little"


@pytest.mark.parametrize("shape", [{"tree": "3x4"}, {"tree": "2x4", "draft_tokens": 3}, {"draft_tokens": 4}])
def test_caches_are_sound_after_every_round(pairs, monkeypatch, shape):
    """The target's cache holds all committed tokens but the root; the drafter's exact columns equal a sequential pass
    over the committed tokens."""
    fast = drafting(pairs["llama"], **shape)

    def sound(batch, r):
        [sequence] = r.requests
        batch.cache.check(committed=len(sequence.token_ids))
        batch.drafter.cache.check()
        for model, cache in ((batch.target, batch.cache), (batch.drafter.model, batch.drafter.cache)):
            [length] = cache.exact_len
            assert length <= len(sequence.token_ids) and apart(model, cache, sequence.token_ids, length) < 1e-12

    with after_every_round(monkeypatch, sound) as sizes:
        fast.generate([5, 9, 40], max_new_tokens=40)
        fast.generate([5, 9, 40], max_new_tokens=40, temperature=0.7)
    assert len(sizes) > 20 and max(sizes) > 2


def test_stop_id_inside_an_accepted_path_ends_the_text(pairs):
    plain, fast = engines(pairs["llama"], draft_tokens=5)
    free = plain.generate([5, 9, 40], max_new_tokens=12).tokens
    for stop in dict.fromkeys(free[3:12]):
        expected, got = (engine.generate([5, 9, 40], max_new_tokens=30, stop_ids=[stop]) for engine in (plain, fast))
        assert expected.tokens == free[: free.index(stop) + 1] == got.tokens
        assert expected.finished == got.finished == "stop"


def test_max_new_tokens_in_mid_draft(pairs):
    fast, whole = drafting(pairs["llama"], draft_tokens=5), cases.plain(pairs["llama"][0], [5, 9, 40], 13)
    for count in range(1, 14):
        got = fast.generate([5, 9, 40], max_new_tokens=count)
        assert got.tokens == whole[:count] and len(got.tokens) == count and got.finished == "length"


@pytest.mark.parametrize("shape", [*DRAFTS, "deep"])
def test_the_context_ends_decoding(pairs, shape):
    plain, fast = engines(pairs["llama"], **SHAPES[shape])
    prompt = [k % 100 for k in range(170)]
    expected = plain.generate(prompt, max_new_tokens=500)
    assert fast.generate(prompt, max_new_tokens=500).tokens == expected.tokens
    assert len(expected.tokens) == 192 - 170


def test_a_draft_with_a_shorter_context_stops_drafting(pairs, tmp_path):
    target, _ = pairs["llama"]
    short = make(tmp_path, "llama", layers=1, max_context=32)
    plain = specker.load(target, strategy="ar", dtype="float64")
    for shape in ({"draft_tokens": 4}, {"tree": "2x4"}):
        fast = specker.load(target, short, strategy="draft", dtype="float64", **shape)
        for prompt, count in (([5, 9, 40], 40), (list(range(40)), 9), (list(range(100)), 9)):
            got = fast.generate(prompt, max_new_tokens=count)
            assert got.tokens == plain.generate(prompt, max_new_tokens=count).tokens
        assert got.stats.drafted == 0  # the last prompt alone is longer than the draft's context
