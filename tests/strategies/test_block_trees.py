"""Searched blocks change no token: every scorer, with and without noise, alone and in a batch, over attention and
recurrent layers, with and without a trace, placed by the host and by the device."""

import functools

import cases
import pytest
from heads import BLOCK, DOMINO, DSPINE, LILICORR, SPARK, TEXT, ZLAB2, made
from make_checkpoint import QWEN3_5, make

import specker
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts

SCORERS = {
    "none": BLOCK,
    "an n-gram model": BLOCK,
    "a Markov head": SPARK,
    "a GRU": DOMINO,
    "a selector": ZLAB2,
    "transitions": DSPINE,
    "a corrector": LILICORR,
    "diffusion": None,
    "diffusion, an n-gram model": None,
}
LAYERS = {"attention": {"layers": 4}, "recurrent": QWEN3_5}
PROMPTS = [TEXT, TEXT[:9], TEXT[3:], [5]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The target, the drafter and the n-gram file for a kind of layers and a scorer."""

    @functools.cache
    def target(layers):
        return make(tmp_path_factory.mktemp(layers), max_context=192, **LAYERS[layers])

    @functools.cache
    def found(layers, scorer):
        folder, counts = tmp_path_factory.mktemp("drafter"), NGramCounts(128)
        counts.add([*TEXT, *range(128), *TEXT])
        (folder / "ngram").write_bytes(NGram.fit(counts).to_bytes())
        if SCORERS[scorer] is None:
            return target(layers), make(folder / "draft", "dream", layers=2, max_context=192), folder / "ngram"
        head = made(folder / "head", "dflash", target(layers), layer_ids=[0, 1], **SCORERS[scorer])
        return head.target, head.folder, folder / "ngram"

    return found


@pytest.mark.parametrize(
    ("scorer", "temperature", "batch", "layers", "trace", "graphs", "cps"),
    cases.diagonal(SCORERS, [0.0, 0.7], [1, 4], LAYERS, [False, True], ["off", "on"], ["tree", "tree, auto", "chain"]),
)
def test_searched_blocks_change_no_token(models, cheap, scorer, temperature, batch, layers, trace, graphs, cps):
    target, draft, ngram = models(layers, scorer)
    own = scorer in ("a Markov head", "a GRU", "a selector", "transitions", "a corrector")  # they choose chains alone
    how = {"cps": "off" if own and cps == "chain" else cps.split(",")[0], "graphs": graphs, "batch_size": batch}
    how |= {"ngram": str(ngram)} if "n-gram" in scorer else {}
    how |= {"policy": "auto"} if cps == "tree, auto" else {"policy": "fixed", "draft_tokens": 3}
    strategy = "diffuspec" if SCORERS[scorer] is None else "dflash"
    engine = specker.load(str(target), str(draft), strategy, dtype="float64", **how)
    engine.trace = (rows := []).append if trace else None
    got = engine.generate(PROMPTS[:batch], 24, temperature=temperature, seed=5)
    assert sum(out.stats.drafted for out in got) > 24 and bool(rows if trace else True)
    for prompt, out in zip(PROMPTS, got, strict=False):
        assert out.tokens == cases.plain(target, prompt, 24, temperature=temperature, seed=5)
