"""Fine-tuning: what is trained on, that an interrupted run goes on to the same weights, and what specker reads."""

import json

import pytest
import torch
from make_checkpoint import byte_tokenizer, make
from transformers import AutoModelForCausalLM

import specker
from examples.adr import evaluate as evaluation
from examples.adr.finetune import IGNORED, Settings, Split, _row, finetune, rows
from examples.adr.index import Index
from examples.adr.records import Record

SIZES = {"vocab": 262, "hidden": 64, "layers": 2, "max_context": 2048, "tokenizer": True}
SMALL = Settings(examples=1, epochs=2, rank=4, rate=1e-2, max_length=700, batch=2, held_out="c")


def records() -> list[Record]:
    out = []
    for n in range(12):
        name, subject = "abc"[n % 3], ["queue", "disk", "token", "build"][n % 4]
        context, decision = (
            f"The {subject} of team {n} is slow and old.",
            f"Team {n} gets a new {subject} by {name}{n}.",
        )
        out.append(Record(f"{name}/{n:02}.md", name, f"About {subject} {n}", "", context, decision, ""))
    # a revision of a held-out record in another repository
    out.append(Record("a/copy.md", "a", "Copied", "", out[2].context, out[2].decision, ""))
    return out


@pytest.fixture(scope="module")
def index() -> Index:
    return Index.build(records())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make(tmp_path_factory.mktemp("base"), **SIZES)


def test_repositories_are_held_out_whole(index):
    named = Split.of(index, "c", 0)
    assert {path[0] for path in named.held_out} == {"c"} and len(named.held_out) == 4
    assert {path[0] for path in named.training} == {"a", "b"} and "a/copy.md" not in named.training
    shared = Split.of(index, "0.2", 0)
    assert len({path[0] for path in shared.held_out}) == 1
    assert not {path[0] for path in shared.held_out} & {path[0] for path in shared.training}
    assert len({tuple(Split.of(index, "0.2", seed).held_out) for seed in range(8)}) > 1
    one = Index.build([r for r in records() if r.repository == "b"])
    assert len(Split.of(one, "0.5", 0).held_out) == 2, "a single repository's records are split"
    for wrong, why in (("d", "nor one of a, b, c"), ("1.5", "between 0 and 1")):
        with pytest.raises(ValueError, match=why):
            Split.of(index, wrong, 0)


def test_labels_are_the_decision_alone():
    tokenizer, record = byte_tokenizer(), records()[0]
    row = _row(tokenizer, record, [records()[1]])
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert [label for label in row["labels"] if label != IGNORED] == trained
    assert tokenizer.decode(trained).strip() == record.decision
    assert records()[1].decision in tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize("examples", [0, 2])
def test_no_prompt_shows_a_held_out_record_or_its_own_answer(index, examples):
    split = Split.of(index, "c", 0)
    s = Settings(examples=examples, max_length=4000, held_out="c")
    tokenizer = byte_tokenizer()
    data = rows(tokenizer, index, split, s)
    assert len(data) == len(split.training)
    by_path = {r.path: r for r in index.records}
    held = [by_path[path].decision for path in split.held_out]
    for path, row in zip([r.path for r in index.records if r.path in split.training], data, strict=True):
        prompt = tokenizer.decode(
            [t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label == IGNORED]
        )
        assert not any(decision in prompt for decision in [*held, by_path[path].decision])
        assert prompt.count("assistant: ") == examples + 1


def test_long_rows_lose_their_examples_first(index):
    split, tokenizer = Split.of(index, "c", 0), byte_tokenizer()
    data = rows(tokenizer, index, split, Settings(examples=2, max_length=420, held_out="c"))
    assert data and max(len(row["input_ids"]) for row in data) <= 420
    assert any(tokenizer.decode(row["input_ids"]).count("assistant: ") < 3 for row in data)


class Interrupted(Exception):
    pass


def test_an_interrupted_run_ends_with_the_same_weights(index, base, tmp_path):
    def stop(step, steps, loss):
        if step == 5:
            raise Interrupted

    whole = finetune(index, str(base), tmp_path / "whole", SMALL, save_steps=2)
    with pytest.raises(Interrupted):
        finetune(index, str(base), tmp_path / "again", SMALL, stop, save_steps=2)
    assert not (tmp_path / "again").exists()
    with pytest.raises(ValueError, match="other settings"):
        finetune(index, str(base), tmp_path / "again", Settings(rank=8, held_out="c"), save_steps=2)
    steps = []
    finetune(index, str(base), tmp_path / "again", SMALL, lambda *at: steps.append(at[0]), save_steps=2)
    assert steps[0] == 5, "it went on from the checkpoint of step 4"
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "again"))
    start = AutoModelForCausalLM.from_pretrained(base)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)
    moved = [not torch.equal(x, y) for x, y in zip(a.parameters(), start.parameters(), strict=True)]
    assert any(moved)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "whole"]
    assert json.loads((tmp_path / "whole" / "split.json").read_text())["held_out"] == whole.held_out
    with pytest.raises(ValueError, match="exists already"):
        finetune(index, str(base), tmp_path / "whole", SMALL)

    # specker reads the merged folder and decodes transformers' tokens.
    engine = specker.load(tmp_path / "whole", strategy="lookup", dtype="float64", device="cpu")
    ids = engine.encode("user: The queue of team 3 is slow and old.\nassistant: ")
    want = a.double().generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert engine.generate(ids, 20).tokens == want[0, len(ids) :].tolist()

    # evaluate: all five approaches, on the split of the checkpoint.
    split = evaluation.split_of(index, [str(tmp_path / "whole"), str(tmp_path / "again")], "a", 1)
    assert split == whole
    chosen = evaluation.approaches(str(base), str(tmp_path / "whole"), str(tmp_path / "again"))

    def load(target):
        return specker.load(target, strategy="lookup", dtype="float64", device="cpu")

    table = list(evaluation.evaluate(index, split, chosen, load, 1, 12, count=3))
    assert [row["approach"] for row in table] == [
        "zero-shot",
        "few-shot",
        "retrieval few-shot",
        "fine-tuned",
        "DRAFT",
    ]
    for row in table:
        assert row["records"] == 3 == len(row["each"]) and row["tokens_per_second"] > 0
        assert row["rougeL_interval"][0] <= row["rougeL"] <= row["rougeL_interval"][1]
        assert {one["path"] for one in row["each"]} == set(split.held_out[:3])
    evaluation.save(tmp_path / "rows.jsonl", table)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == table


def test_scores_of_known_texts():
    same = evaluation.scores(["We use a queue of messages."] * 2, ["We use a queue of messages."] * 2)
    assert same["rouge1"] == same["rougeL"] == 100 and same["bleu"] > 99 and same["rougeL_interval"] == [100, 100]
    half = evaluation.scores(["one two"], ["one three"])
    assert half["rouge1"] == half["rougeL"] == 50
    swapped = evaluation.scores(["two one"], ["one two"])
    assert swapped["rouge1"] == 100 and swapped["rougeL"] == 50


def test_held_out_examples_come_from_the_training_records(index):
    split = Split.of(index, "c", 0)
    held = [r for r in index.records if r.path in split.held_out]
    tokenizer = byte_tokenizer()
    for approach in evaluation.approaches("base", None, None):
        for ids in evaluation.prompts(approach, tokenizer, index, split, held, 2, 10**6, 0):
            text = tokenizer.decode(ids)
            shown = {"none": 0, "fixed": 2, "retrieved": 2}[approach.examples]
            assert text.count("assistant: ") == shown + 1
            assert not any(r.decision in text for r in held)


def test_checkpoints_that_were_not_tuned_here(index, base, tmp_path):
    with pytest.raises(ValueError, match=r"writes split.json"):
        evaluation.split_of(index, [str(base)], "0.2", 0)
    for name, training in (("x", ["a/00.md"]), ("y", ["a/03.md"]), ("z", ["other.md"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "split.json").write_text(json.dumps({"training": training, "held_out": ["c/02.md"]}))
    with pytest.raises(ValueError, match="different records"):
        evaluation.split_of(index, [str(tmp_path / "x"), str(tmp_path / "y")], "0.2", 0)
    with pytest.raises(ValueError, match="the index lacks"):
        evaluation.split_of(index, [None, str(tmp_path / "z")], "0.2", 0)
