"""`specker calibrate`: the same counts after any interruption, and the commands that it refuses."""

import json
import signal
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
import warm

import specker
from specker.cli import calibrate
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts
from specker.runtime.strategies.vocabtrim import scores as vocab_scores

ROOT = Path(__file__).parents[2]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(5)))
    return str(path)


def models(pair, *more):
    return ["--target", pair[0], "--device", "cpu", "--dtype", "float64", "--max-new-tokens", "12", *more]


def refused(capsys, argv, *words):
    assert calibrate.main(argv) == 2
    *_, err = capsys.readouterr().err.splitlines()
    assert err.startswith("specker: error: "), err
    for word in words:
        assert word in err


def test_target_counts_do_not_depend_on_the_draft(pair, prompts, tmp_path):
    out = [tmp_path / f"{name}.safetensors" for name in ("alone", "drafted")]
    how = ["--prompts", prompts, "--temperature", "0.9", "--seed", "4"]
    assert calibrate.main(models(pair, *how, "--out", str(out[0]))) == 0
    assert calibrate.main(models(pair, *how, "--out", str(out[1]), "--draft", pair[1])) == 0
    assert out[0].read_bytes() == out[1].read_bytes()
    engine = specker.load(pair[0], strategy="ar", dtype="float64", device="cpu")
    want = torch.zeros(engine.target.config.vocab_size, dtype=torch.int64)
    for i in range(5):
        tokens = engine.generate(f"def f{i}(x):", 12, temperature=0.9, seed=4 + i).tokens
        want += torch.bincount(torch.tensor(tokens), minlength=len(want))
    got = vocab_scores.read(out[0])
    assert got.source == "target" and got.totals == {"texts": 5, "tokens": int(want.sum())}
    assert got.vocab_size == len(want) and got.tokenizer == vocab_scores.tokenizer_hash(engine.tokenizer)
    counts = torch.zeros_like(want)
    counts[got.ids] = got.counts
    assert torch.equal(counts, want)
    assert {path.name for path in tmp_path.iterdir()} >= {"alone.safetensors", "drafted.safetensors"}
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("together", [2, 16])
def test_counts_do_not_depend_on_the_batch(pair, prompts, tmp_path, together):
    found = []
    for n in (1, together):
        out = str(tmp_path / f"{n}.safetensors")
        command = models(pair, "--prompts", prompts, "--temperature", "0.8", "--out", out, "--batch-size", str(n))
        assert calibrate.main(command) == 0
        found.append(Path(out).read_bytes())
    assert found[0] == found[1]


def test_one_block_in_ten_is_held_out(pair, tmp_path, capsys, monkeypatch):
    """The printed held-out coverage is that of the tenth blocks, with a ranking by the other blocks."""
    monkeypatch.setattr(calibrate, "BLOCK", 100)
    out, text = tmp_path / "s.safetensors", "".join(chr(97 + i * i % 26) + "xyz"[i % 3] for i in range(1200))
    (tmp_path / "a.txt").write_text(text)
    argv = ["--target", pair[0], "--text", str(tmp_path / "a.txt"), "--out", str(out)]
    assert calibrate.main(argv) == 0
    ids = specker.load(pair[0], strategy="ar", device="cpu").tokenizer(text, add_special_tokens=False)["input_ids"]
    blocks = [ids[i : i + 100] for i in range(0, len(ids), 100)]
    held = [token for block in blocks[9::10] for token in block]
    other = [token for i, block in enumerate(blocks) if i % 10 != 9 for token in block]
    times = np.bincount(other, minlength=320)
    ranking = sorted(set(other), key=lambda i: (-times[i], i))
    got = vocab_scores.read(out)
    assert got.totals["tokens"] == len(ids) and len(held) == 200
    for rows in (1, 3, 10):
        assert got.held_out_coverage(rows) == sum(i in ranking[:rows] for i in held) / len(held)
    assert "held-out" in capsys.readouterr().out
    before = {path.name for path in tmp_path.iterdir()}
    assert calibrate.main(["--scores", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == before == {"a.txt", "s.safetensors"}


def test_counts_of_draft_continuations_and_of_plain_text(pair, prompts, tmp_path, capsys):
    out = tmp_path / "s.safetensors"
    argv = models(pair, "--prompts", prompts, "--source", "draft", "--draft", pair[1], "--out", str(out))
    assert calibrate.main(argv) == 0
    engine = specker.load(pair[1], strategy="ar", dtype="float64", device="cpu")
    tokens = [t for i in range(5) for t in engine.generate(f"def f{i}(x):", 12, seed=i).tokens]
    got = vocab_scores.read(out)
    assert got.source == "draft" and got.counts.tolist() == sorted(np.bincount(tokens)[np.unique(tokens)])[::-1]
    for name, text in (("a.txt", "def abc():\n    pass\n"), ("b.txt", "é" * 9)):
        (tmp_path / name).write_text(text)
    argv = ["--target", pair[0], "--text", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--out", str(out)]
    assert calibrate.main(argv) == 0
    ids = engine.tokenizer("def abc():\n    pass\n" + "é" * 9, add_special_tokens=False)["input_ids"]
    got = vocab_scores.read(out)
    assert got.source == "text" and got.totals == {"texts": 2, "tokens": len(ids)}
    assert sorted(got.counts.tolist()) == sorted(np.bincount(ids)[np.unique(ids)].tolist())
    assert "100.00%" in capsys.readouterr().out


def test_an_ngram_model_is_fitted_to_the_same_text(pair, prompts, tmp_path, capsys):
    """On the target's continuations, alone and together with the scores."""
    alone, beside, out = (tmp_path / f"{name}.safetensors" for name in ("alone", "beside", "out"))
    argv = models(pair, "--prompts", prompts, "--temperature", "0.9", "--ngram-least", "1")
    assert calibrate.main([*argv, "--ngram", str(alone)]) == 0
    assert calibrate.main([*argv, "--ngram", str(beside), "--out", str(out)]) == 0
    engine = specker.load(pair[0], strategy="ar", dtype="float64", device="cpu")
    counts, total = NGramCounts(320), 0
    for i in range(5):
        tokens = engine.generate(f"def f{i}(x):", 12, temperature=0.9, seed=i).tokens
        counts.add(tokens)
        total += len(tokens)
    about = {"tokenizer": vocab_scores.tokenizer_hash(engine.tokenizer), "totals": {"texts": 5, "tokens": total}}
    assert alone.read_bytes() == beside.read_bytes() == NGram.fit(counts, **about).to_bytes()
    assert vocab_scores.read(out).totals == about["totals"] and "trigrams" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.glob("*.part")) == []
    refused(capsys, [*argv[:-1], "9", "--ngram", str(alone)], "no n-gram was seen 9 times")


@pytest.mark.parametrize(("stop_at", "ngram"), cases.diagonal([0, 1, 3], [False, True]))
def test_an_interrupted_run_resumes_to_the_same_file(pair, prompts, tmp_path, monkeypatch, stop_at, ngram):
    whole, out = tmp_path / "whole.safetensors", tmp_path / "s.safetensors"
    argv = models(pair, "--prompts", prompts, "--temperature", "1", "--ngram-least", "1")
    if ngram:
        assert calibrate.main([*argv, "--out", str(whole), "--ngram", str(tmp_path / "whole-n.safetensors")]) == 0
        argv += ["--ngram", str(tmp_path / "n.safetensors")]
    else:
        assert calibrate.main([*argv, "--out", str(whole)]) == 0
    monkeypatch.setattr(calibrate, "SAVE_EVERY", 0.0)
    written = []

    class Stopping:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def generate(self, *args, **kwargs):
            if len(written) == stop_at and not out.with_suffix(".go").exists():
                raise KeyboardInterrupt
            written.append(args)
            return self.inner.generate(*args, **kwargs)

    from specker.runtime.load import load

    monkeypatch.setattr("specker.runtime.load.load", lambda *args, **kwargs: Stopping(load(*args, **kwargs)))
    assert calibrate.main([*argv, "--out", str(out)]) == 130
    assert not out.exists() and (tmp_path / "s.safetensors.part").exists() == (stop_at > 0)
    out.with_suffix(".go").touch()
    assert calibrate.main([*argv, "--out", str(out)]) == 0
    assert out.read_bytes() == whole.read_bytes()
    if ngram:
        assert (tmp_path / "n.safetensors").read_bytes() == (tmp_path / "whole-n.safetensors").read_bytes()
    assert len(written) == 5, "a text was written twice or not at all"


KILLED = """
import os, signal, sys
from specker.cli import calibrate
calibrate.SAVE_EVERY, replace, saves = -1.0, os.replace, []

def killed(source, target):
    saves.append(str(target).endswith(".part"))
    if sum(saves) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = killed
sys.exit(calibrate.main())
"""


def test_a_run_killed_while_it_saves_resumes_to_the_same_file(pair, prompts, tmp_path):
    """From its last whole save, as does one that is killed between two saves."""
    argv = models(pair, "--prompts", prompts, "--out", str(tmp_path / "s.safetensors"))
    killed = warm.run("-c", KILLED, *argv)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "s.safetensors.part").exists() and not (tmp_path / "s.safetensors").exists()
    assert calibrate.main(argv) == 0
    whole = tmp_path / "whole.safetensors"
    assert calibrate.main(models(pair, "--prompts", prompts, "--out", str(whole))) == 0
    assert (tmp_path / "s.safetensors").read_bytes() == whole.read_bytes()


def test_another_job_does_not_resume_this_one(pair, prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "s.safetensors"
    part = tmp_path / "s.safetensors.part"
    argv = models(pair, "--prompts", prompts, "--out", str(out))
    calibrate._save(part, "another", 2, *torch.zeros(2, 320, dtype=torch.int64), NGramCounts(320))
    refused(capsys, argv, "is of another job", "delete it")
    part.write_bytes(part.read_bytes()[:40])
    refused(capsys, argv, "cannot be read", "delete it")
    assert not out.exists()


def test_show(pair, tmp_path, capsys):
    text, out = tmp_path / "a.txt", tmp_path / "s.safetensors"
    text.write_text("abcabcab")
    assert calibrate.main(["--target", pair[0], "--text", str(text), "--out", str(out)]) == 0
    capsys.readouterr()
    assert calibrate.main(["--scores", str(out)]) == 0
    assert "source: text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give one of --prompts FILE, --text FILE... and --scores FILE"),
        (["--text", "a", "--prompts", "b", "--out", "s.safetensors"], "give one of"),
        (["--text", "a"], "--out must name the score file"),
        (["--text", "a", "--out", "s.json"], "ending in .safetensors"),
        (["--text", "/nowhere/a", "--out", "s.safetensors"], "/nowhere/a: No such file"),
        (["--scores", "s", "--out", "t.safetensors"], "--scores excludes --out and --ngram"),
        (["--text", "a", "--ngram", "n.json"], "ending in .safetensors"),
        (["--text", "a", "--ngram", "n.safetensors", "--out", "n.safetensors"], "two files"),
        (["--text", "a", "--ngram", "n.safetensors", "--ngram-least", "0"], "--ngram-least must be at least 1"),
        (["--scores", "s.safetensors"], "no such vocabulary score file"),
        (
            ["--prompts", "p", "--out", "s.safetensors", "--source", "me"],
            "--source must be one of target, draft",
        ),
        (["--prompts", "p", "--out", "/nowhere/s.safetensors"], "--out /nowhere/s.safetensors: cannot be written"),
        (["--prompts", "p", "--out", "s.safetensors", "--max-new-tokens", "0"], "at least 1"),
        (["--prompts", "p", "--out", "s.safetensors", "--temperature", "-1"], "--temperature"),
        (["--prompts", "p", "--out", "s.safetensors", "--dtype", "int8"], "--dtype"),
    ],
)
def test_refuses(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capsys, argv, words)
    assert list(tmp_path.iterdir()) == []


def test_empty_text_and_a_prompt_too_long(pair, tmp_path, capsys):
    empty, prompts = tmp_path / "empty.txt", tmp_path / "p.jsonl"
    empty.write_text("")
    prompts.write_text(json.dumps({"prompt": "x" * 600}) + "\n")
    out = ["--out", str(tmp_path / "s.safetensors"), "--target", pair[0]]
    refused(capsys, ["--text", str(empty), *out], "the text has no tokens")
    refused(capsys, ["--prompts", str(prompts), *out], "p.jsonl line 1: ", "the context of")
