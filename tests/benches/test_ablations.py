"""Drafters with one idea taken out, as the benches measure them: other drafts, the tokens of plain decoding."""

import cases
import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from bench.ablations import ExactPrefix, Uncalibrated, drafting_as

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
KINDS = {
    Uncalibrated: {"strategy": "easyspec", "layer_parallel": "3", "draft_tokens": 4},
    ExactPrefix: {"strategy": "diffuspec", "draft_tokens": 3},
}
PROMPTS = ([5, 9, 40], [1], list(range(3, 90)), [7, 8], [2, 3, 5, 8])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablations")
    target = make(folder / "target", "qwen2", layers=5, max_context=192)
    dream = make(folder / "dream", "dream", layers=5, max_context=192)
    return target, {"easyspec": perturbed(target, folder / "draft", amount=0.05), "diffuspec": dream}


def load(models, kind, **more):
    target, drafts = models
    options = {**KINDS[kind], **more}
    with drafting_as(kind):
        engine = specker.load(target, drafts[options["strategy"]], dtype="float64", page_size=16, **options)
    assert type(engine.drafter) is kind
    return engine


@pytest.mark.parametrize(("kind", "size"), cases.one_in(2, KINDS, [1, 3]))
def test_tokens_equal_plain_decoding(models, kind, size):
    """Also in a batch, whose sequences end at different times and change slots."""
    counts, engine = (16, 6, 10, 5, 8), load(models, kind, batch_size=size, graphs="on")
    drafted = accepted = 0
    for temperature in (0.0, 0.7):
        done = engine.generate(list(PROMPTS), list(counts), temperature=temperature)
        for prompt, count, out in zip(PROMPTS, counts, done, strict=True):
            assert out.tokens == cases.plain(models[0], prompt, count, temperature=temperature)
            drafted, accepted = drafted + out.stats.drafted, accepted + out.stats.accepted
    assert 0 < accepted < drafted
    assert engine.loop.launched == 0 and not engine.drafter.keeps_prefix


def test_the_usual_drafter_is_back_afterwards(models):
    target, drafts = models
    load(models, Uncalibrated)
    assert not isinstance(specker.load(target, drafts["easyspec"], strategy="easyspec").drafter, Uncalibrated)
