"""The `index` and `draft` commands, and the files they write."""

import json
import re
from datetime import date
from pathlib import Path

import pytest
from make_checkpoint import make
from typer.testing import CliRunner

import specker
from examples.adr import drafting
from examples.adr.__main__ import app
from examples.adr.index import Index
from examples.adr.prompts import encode, fit, messages
from examples.adr.records import Record, parse, read

SIZES = {"vocab": 262, "hidden": 64, "layers": 2, "max_context": 2048, "tokenizer": True}
CONTEXT = "Builds are slow."


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture
def folder(tmp_path) -> Path:
    out = tmp_path / "adr"
    for n in (1, 2, 9):
        drafting.write(out, f"Decision {n}", f"Context {n} of builds.", f"We decide {n}.", date(2024, 1, n))
    return out


def run(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_files_are_numbered_and_never_overwritten(tmp_path):
    (tmp_path / "0007-old.md").write_text("old")
    path = drafting.write(
        tmp_path, "Use a: Queue!", CONTEXT, "## Decision\n\nWe will.\n\n# Why\n\nFast.", date(2024, 5, 6)
    )
    assert path.name == "0008-use-a-queue.md"
    text = path.read_text()
    assert text.startswith("# 8. Use a: Queue!\n\nDate: 2024-05-06\n\n## Status\n\nProposed\n\n## Context\n")
    record = parse(text, path.name, "r")
    assert (record.title, record.context) == ("Use a: Queue!", CONTEXT)
    assert record.decision == "We will.\n\n### Why\n\nFast."
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0007-old.md", "0008-use-a-queue.md"]


@pytest.mark.parametrize(
    ("decision", "title"),
    [
        ("We will use **RabbitMQ**. It is known.", "Use RabbitMQ"),
        ("Chosen option: a queue, because one two three four five", "A queue, because one two three four five"),
        ("", "Decision"),
    ],
)
def test_a_title_comes_from_the_decision(decision, title):
    assert drafting.title_of(decision) == title


def test_examples_give_way_to_the_context(model):
    tokenizer = specker.load(model, strategy="ar", device="cpu").tokenizer
    records = [Record(f"{n}.md", "r", f"T{n}", "", "context " * 8, "decision " * 8, "") for n in range(3)]
    whole, most = fit(tokenizer, CONTEXT, records, 10**6)
    assert most == 3 and whole == encode(tokenizer, messages(CONTEXT, records))
    assert [m["role"] for m in messages(CONTEXT, records)] == ["system", *["user", "assistant"] * 3, "user"]
    assert messages(CONTEXT, records)[-2]["content"] == records[0].decision, "the best example is the last"
    ids, kept = fit(tokenizer, CONTEXT, records, len(whole) - 1)
    assert kept == 2 and ids == encode(tokenizer, messages(CONTEXT, records[:2]))
    alone = len(encode(tokenizer, messages(CONTEXT, [])))
    with pytest.raises(ValueError, match=f"takes {alone} tokens with its instructions, but the model has room for 20"):
        fit(tokenizer, CONTEXT, records, 20)


@pytest.mark.parametrize("strategy", ["ar", "lookup"])
def test_a_context_becomes_the_next_record(folder, model, tmp_path, strategy):
    index = tmp_path / "i.npz"
    done = run("index", folder, "--out", index)
    assert done.exit_code == 0 and f"3 records of 3 Markdown files in {index}" in done.output
    drafted = run(
        *("draft", "--index", index, "--target", model, "--strategy", strategy, "--dtype", "float64"),
        *("--context", CONTEXT, "--title", "Cache builds", "--out", folder, "--max-new-tokens", 24, "--examples", 1),
    )
    assert drafted.exit_code == 0, drafted.output
    assert re.search(r"[\d.]+ tokens/s, acceptance length [\d.]+", drafted.output)
    assert drafted.output.count("example: ") == 1
    path = folder / "0004-cache-builds.md"
    assert f"wrote {path}" in drafted.output
    written = read(folder)[0][-1]
    assert (written.path, written.status, written.context) == (path.name, "Proposed", CONTEXT)
    engine = specker.load(model, strategy="ar", dtype="float64", device="cpu")
    own = Index.load(index)
    want = drafting.draft(engine, own, CONTEXT, "Cache builds", 1, 24)
    assert drafting._below(want.decision) == written.decision, "the tokens are those of plain decoding"


def test_prompts_of_all_records(folder, tmp_path):
    index, out = tmp_path / "i.npz", tmp_path / "prompts.jsonl"
    run("index", folder, "--out", index)
    assert "3 prompts in" in run("prompts", out, "--index", index, "--examples", 1).output
    for line, record in zip(out.read_text().splitlines(), read(folder)[0], strict=True):
        said = json.loads(line)["messages"]
        assert [m["role"] for m in said] == ["system", "user", "assistant", "user"]
        assert record.context in said[-1]["content"] and record.decision not in line


def test_bad_input_is_one_sentence(folder, model, tmp_path):
    index = tmp_path / "i.npz"
    assert run("index", folder, "--out", index).exit_code == 0
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.md").write_text(" \n")
    (tmp_path / "latin.md").write_bytes("Ä".encode("latin-1"))
    bare = make(tmp_path / "bare", **SIZES)
    (bare / "chat_template.jinja").unlink()
    common = ("draft", "--index", index, "--target", model, "--strategy", "ar")
    for args, why in (
        (("index", tmp_path / "empty"), "none of its 0 Markdown files"),
        (("index", tmp_path / "none"), "no such folder"),
        (("draft", "--index", tmp_path / "none", "--context", CONTEXT), "no such index"),
        ((*common, "--context", tmp_path / "blank.md"), "the context is empty"),
        ((*common, "--context", tmp_path / "latin.md"), "not UTF-8"),
        ((*common, "--context", "word " * 4000), "but the model has room for"),
        ((*common, "--context", CONTEXT, "--max-new-tokens", 10**6), "the model's context is"),
        ((*common[:3], "--target", bare, "--strategy", "ar", "--context", CONTEXT), "no chat template"),
        ((*common[:-1], "none", "--context", CONTEXT), "none"),
        ((*common[:3], "--target", tmp_path / "no-model", "--strategy", "ar", "--context", CONTEXT), "no-model"),
    ):
        done = run(*args)
        assert done.exit_code == 2 and why in done.output, (args, done.output)
        assert done.output.count("error: ") == 1 and "Traceback" not in done.output
