"""A request's prediction: strategy `lookup` copies from it first, and the tokens stay those of plain decoding."""

import json

import cases
import pytest
from make_checkpoint import make

import specker
from specker.cli import run
from specker.options import Params
from specker.runtime.strategies import copier

PROMPTS = [[60, 5, 9, 40, 77, 8], [3, 50, 20, 31, 8, 8]]
FORM = {"type": "content", "content": "ab cd"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("target"), layers=2, tokenizer=True)


def load(target, strategy="lookup", **options):
    draft = target if "draft" in strategy else None
    options = {"lookup_share": "off", "max_context": 256, **options} if "lookup" in strategy else options
    return specker.load(target, draft, strategy=strategy, dtype="float64", device="cpu", **options)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 5}])
@pytest.mark.parametrize("options", [{"draft_tokens": 8}, {"tree": "2x8"}])
def test_a_right_prediction_is_copied_from_its_beginning(target, options, sampling):
    want = cases.plain(target, PROMPTS[0], 25, **sampling)
    engine, rows = load(target, **options), []
    engine.trace = rows.append
    out = engine.generate(PROMPTS[0], 25, prediction=want, **sampling)
    assert out.tokens == want and out.stats.rounds == 3
    assert [row["source"] for row in rows] == ["prediction"] * 3 and rows[0]["draft"][:8] == want[:8]
    assert out.stats.sources == {"prediction": 3}
    assert (out.stats.predicted, out.stats.predicted_right) == (out.stats.drafted, out.stats.accepted)
    assert out.stats.to_json()["predicted_right"] == out.stats.accepted == 22


def test_it_goes_on_behind_what_the_answer_has_otherwise(target):
    """Three tokens are wrong, and one is left out; the counts are those of the drafts from the prediction."""
    want = cases.plain(target, PROMPTS[0], 40)
    wrong = [*want[:10], 1, 2, 3, *want[13:25], *want[26:]]
    out = load(target, draft_tokens=6).generate(PROMPTS[0], 40, prediction=wrong)
    assert out.tokens == want and out.stats.rounds < 20
    assert 20 < out.stats.predicted_right < out.stats.predicted <= out.stats.drafted


def test_drafts_do_not_come_from_the_prompt_before_it(target):
    """Its last tokens stand before the prediction, so that the prediction's beginning is found."""
    engine = load(target, draft_tokens=4)
    request = engine.session.request([5, 9, 40, 77], Params(prediction=(1, 2, 9, 3)))
    offered = []
    for token in (1, 9, 40):
        [matches] = copier(engine.drafters).prepare([request]).matches
        offered.append([(match.source, match.matched, match.available) for match in matches])
        request.token_ids.append(token)
    assert offered[0] == [("prediction", 4, 4), ("text", 0, 0)]
    assert offered[1] == [("prediction", 5, 3), ("text", 0, 0)]
    assert offered[2] == [("prediction", 1, 1), ("text", 1, 4)]
    [matches] = copier(engine.drafters).prepare([request]).matches
    assert [match.source for match in matches] == ["text"]


@pytest.mark.parametrize("strategy", ["lookup", "draft+lookup"])
def test_each_request_of_a_batch_has_its_own(target, strategy):
    engine = load(target, strategy, batch_size=2)
    wants = [cases.plain(target, prompt, 24) for prompt in PROMPTS]
    for prediction in (wants, [None, wants[1]], [wants[1], wants[0]]):
        out = engine.generate(PROMPTS, 24, prediction=prediction)
        assert [o.tokens for o in out] == wants
        copied = [o.stats.predicted_right > 0 for o in out]
        assert strategy != "lookup" or copied == [given == want for given, want in zip(prediction, wants, strict=True)]


def test_a_text_and_openais_form_are_the_same(target):
    engine = load(target, draft_tokens=4)
    want = engine.generate("ab", 20)
    parts = {"type": "content", "content": [{"type": "text", "text": text} for text in (want.text[:3], want.text[3:])]}
    for prediction in (want.text, {"type": "content", "content": want.text}, parts):
        assert Params(prediction=prediction).prediction == want.text
        out = engine.generate("ab", 20, prediction=prediction)
        assert out.tokens == want.tokens and out.stats.predicted > 0
    assert engine.generate("ab", 20, prediction="").stats.predicted == 0
    streamed = [token for event in engine.stream("ab", 20, prediction=want.text) for token in event.tokens]
    assert streamed == want.tokens


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        {},
        {"type": "content"},
        {"type": "text", "content": "a"},
        {"content": "a"},
        {"type": "content", "content": 7},
        {"type": "content", "content": ["a"]},
        {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
        {"type": "content", "content": [{"type": "text"}]},
        FORM | {"more": 1},
    ],
)
def test_another_form_is_refused(wrong):
    with pytest.raises(ValueError, match="prediction must be a text, token ids or"):
        Params(prediction=wrong)


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ([-1], "a token id of the prediction must be a whole number of at least 0, got -1"),
        ([99999], "prediction must be of ids below"),
        ([1] * 300, "prediction has 300 tokens, but the context of .* is 256"),
    ],
)
def test_ids_that_cannot_be_tokens_of_the_answer_are_refused(target, prediction, said):
    with pytest.raises(ValueError, match=said):
        load(target).generate([1, 2], 4, prediction=prediction)


def test_it_needs_lookup(target):
    """But plain decoding takes it as it takes every option, and a request that asks for no drafts does, too."""
    for strategy in ("ar", "draft"):
        engine = load(target, strategy)
        with pytest.raises(ValueError, match=r"prediction needs strategy lookup, alone or joined"):
            engine.generate([1, 2], 4, prediction="ab")
        want = cases.plain(target, [1, 2], 4)
        assert engine.generate_ar([1, 2], 4, prediction="ab").tokens == want
        assert engine.generate([1, 2], 4, prediction="ab", policy="off").tokens == want


def test_the_command_lines_file_holds_for_every_text(target, tmp_path, capsys):
    """A file that is missing or empty, and a strategy that copies nothing, are mistakes of the user."""
    flags = ["--target", str(target), "--dtype", "float64", "--device", "cpu", "--lookup-share", "off", "ab"]
    argv = [*flags, "--max-new-tokens", "20", "--draft-tokens", "4", "--json", "-"]
    assert run.main(argv) == 0
    [plain] = json.loads(capsys.readouterr().out)["prompts"]
    file = tmp_path / "answer.txt"
    file.write_text(plain["text"])
    assert run.main([*argv, "--check", "--prediction", str(file)]) == 0
    [copied] = json.loads(capsys.readouterr().out)["prompts"]
    assert copied["tokens"] == plain["tokens"] and copied["identical"]
    assert copied["predicted"] >= copied["predicted_right"] > 0 and "predicted" not in plain
    assert run.main([*argv, "--prediction", str(tmp_path / "none.txt")]) == 2
    file.write_text("")
    assert run.main([*argv, "--prediction", str(file)]) == 2
    assert "answer.txt: the prediction is empty" in capsys.readouterr().err
    file.write_text("ab")
    assert run.main(["--target", str(target), "--strategy", "ar", "--prediction", str(file), "ab"]) == 2
    assert "--prediction needs strategy lookup" in capsys.readouterr().err
