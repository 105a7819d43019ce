"""Rounds of static shape: the tokens of plain decoding on a CPU, without graphs; what they launch; what they read."""

import itertools

import pytest
from make_checkpoint import make
from pairs import perturbed

import specker

SHAPES = {
    "chain-1": {"draft_tokens": 1},
    "chain-5": {"draft_tokens": 5},
    "tree-3x4": {"tree": "3x4"},
    "tree-4x3-cap-7": {"tree": "4x3", "draft_tokens": 7},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "2"},
    "easyspec-tree": {"strategy": "easyspec", "layer_parallel": "2", "tree": "3x3"},
    "plus-minus-one": {"policy": "plus-minus-one"},
    "draft-and-verify": {"policy": "draft-and-verify"},
}
SAMPLING = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1-top": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5},
    "T1-top-p": {"temperature": 1.0, "top_p": 0.7, "seed": (1 << 64) - 3},
}
PROMPTS = ([5, 9, 40], [1], list(range(3, 90)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), "llama", layers=4, max_context=192)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def load(pair, **options):
    return specker.load(*pair, dtype="float64", page_size=16, **options)


@pytest.fixture(scope="module")
def plain(pairs):
    return load(pairs[:1], strategy="ar")


@pytest.mark.parametrize(("shape", "how"), list(itertools.product(SHAPES, SAMPLING)))
def test_tokens_equal_plain_decoding(pairs, plain, shape, how):
    fast = load(pairs, graphs="on", **SHAPES[shape])
    accepted = 0
    for prompt in PROMPTS:
        want = plain.generate(prompt, 60, **SAMPLING[how])
        got = fast.generate(prompt, 60, **SAMPLING[how])
        assert got.tokens == want.tokens
        assert got.stats.tokens == len(got.tokens) == got.stats.accepted + got.stats.rounds
        accepted += got.stats.accepted
    assert accepted > 20, "hardly anything was accepted: this proves little"
