"""bench/e2e.py: its rows, and configurations that fail or decode wrong tokens."""

import json

import cases
import pytest

import specker
from bench import batches, decoding, e2e
from bench.papers import models
from specker.runtime.engine import Engine


@pytest.fixture
def run(results, monkeypatch, command_line):
    """Runs the bench with a few configurations on two short texts; returns its rows."""
    monkeypatch.setattr(e2e, "SHAPES", {name: e2e.SHAPES[name] for name in ("ar", "draft chain 2", "del")})
    args = "bench/e2e.py --prompts 2 --rounds 1 --max_new_tokens 6 --temperatures 0,0.7 --transformers false --save"
    command_line(args.split())

    def rows(failed=None):
        if failed is None:
            e2e.main()
        else:
            with pytest.raises(SystemExit, match=f"^bench: failed: {failed}$"):
                e2e.main()
        return results()

    return rows


def test_a_row_for_each_configuration_and_temperature(run, capsys):
    rows = run()
    assert [(r["way"], r["temperature"]) for r in rows] == [
        (way, t) for t in (0.0, 0.7) for way in ("ar", "draft chain 2", "del")
    ]
    assert all(r["tokens"] == 12 and r["rounds"] == 1 and r["tokens_per_second"] > 0 for r in rows)
    assert [r["over_ar"] for r in rows if r["way"] == "ar"] == [1, 1]
    assert all(r["acceptance_length"] > 1 for r in rows if r["way"] == "draft chain 2")  # DEL's depends on the clock
    assert all(r["acceptance_length"] >= 1 and r["differing_within_rounding"] == 0 for r in rows if r["way"] != "ar")
    assert "draft chain 2" in capsys.readouterr().out


@pytest.mark.parametrize("graphs", [pytest.param("off", marks=pytest.mark.slow), "on"])
def test_engines_that_share_a_target_decode_what_they_decode_alone(cheap, kv_buckets, graphs):
    """They take turns over one cache, with texts in several KV buckets."""
    kv_buckets((48, 96))
    how = {"device": "cpu", "dtype": "float64", "graphs": graphs, "page_size": 16}
    shapes = [("diffuspec", {"draft_tokens": 100}), ("draft", {"draft_tokens": 3}), ("del", {})]
    engines = [specker.load(strategy=name, **how, **more) for name, more in shapes]
    plain = specker.load(strategy="ar", **how)
    decoding.share_target([plain, *engines])
    for length in (4, 90, 7):
        prompt = [n % 500 for n in range(length)]
        want = cases.plain(specker.zoo.path("code-target"), prompt, 10, temperature=0.7)
        for engine in (*engines, plain):
            assert engine.cache is plain.cache is engine.loop.cache and engine.loop.target is plain.model
            assert engine.generate(prompt, 10, temperature=0.7).tokens == want
    launched = [engine.loop.launched > 10 for engine in (*engines, plain)]
    assert launched == [False, *[graphs == "on"] * 3], "long blocks are never of fixed shape"


def test_batches(results, command_line):
    """bench/batches.py"""
    few = ["--prompts", "1", "--max_new_tokens", "6", "--rounds", "1", "--sizes", "1,2", "--transformers", "false"]
    command_line(["x", *few, "--save"])
    batches.main()
    rows = results()
    assert {row["way"] for row in rows} >= {"ar", "draft"}
    assert all(row["tokens"] == 6 and row["tokens_per_second"] > 0 for row in rows)


def test_a_failed_or_wrong_configuration_has_no_times(run, monkeypatch, capsys):
    generate = Engine.generate

    def other(self, prompt, count, **how):
        if self.strategy == "del":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        outs = generate(self, prompt, count, **how)
        if self.options.draft_tokens == 2 and how["temperature"] == 0:
            outs[0].tokens[5] ^= 1
        return outs

    monkeypatch.setattr(Engine, "generate", other)
    rows = {(r["way"], r["temperature"]): r for r in run(failed="del, draft chain 2")}
    assert rows["ar", 0.0]["over_ar"] == 1 and rows["draft chain 2", 0.7]["over_ar"] > 0
    assert "no timing of a wrong answer" in rows["draft chain 2", 0.0]["reason"]
    for t in (0.0, 0.7):
        assert rows["del", t]["reason"] == "RuntimeError: operation not permitted when stream is capturing"
    assert all(("reason" in row) != ("median" in row) for row in rows.values())
    captured = capsys.readouterr()
    assert "Traceback" in captured.err and "operation not permitted" in captured.out


def test_the_family_in_a_real_models_shape(run, tmp_path_factory, monkeypatch, command_line):
    """In eight bits on a CPU, several prompts at once."""
    monkeypatch.setattr(models, "cache_root", lambda: tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(e2e, "SHAPES", e2e.SHAPES | {"lookup": {"strategy": "lookup"}})
    how = "bench/e2e.py --shape quick --prompts 2 --rounds 1 --max_new_tokens 6 --temperatures 0 --save"
    command_line([*how.split(), "--batch_size", "2", "--transformers", "false"])
    rows = run()
    assert [(row["way"], row["target"], row["batch_size"]) for row in rows] == [
        (way, "code-target as quick", 2) for way in ("ar", "draft chain 2", "del", "lookup")
    ]
    assert rows[1]["acceptance_length"] > 1 and all(row["warmup_seconds"] >= 0 for row in rows)
    assert all(row["differing_within_rounding"] == 0 for row in rows[1:])


def test_a_target_with_a_head_of_its_own_in_a_real_models_shape(results, tmp_path_factory, monkeypatch, command_line):
    monkeypatch.setattr(models, "cache_root", lambda: tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(e2e, "SHAPES", e2e.SHAPES | {"mtp": {"strategy": "mtp", "draft_tokens": 1}})
    how = "x --shape quick --target hybrid-target --ways mtp --prompts 1 --rounds 1 --max_new_tokens 8 --temperatures 0"
    command_line([*how.split(), "--transformers", "false", "--save"])
    e2e.main()
    assert [(row["way"], row["target"]) for row in results()] == [
        (way, "hybrid-target as quick") for way in ("ar", "mtp")
    ]
    assert results()[1]["acceptance_length"] > 1 and results()[1]["differing_within_rounding"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape 2b --transformers false", "no shape is called '2b'; there are 0.5b"),
        ("--shape 1b", "--shape takes no --target but hybrid-target, and --transformers false"),
        ("--shape 1b --transformers false --target x", "--shape takes no --target but hybrid-target"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(command_line, flags, message):
    command_line(["bench/e2e.py", *flags.split()])
    with pytest.raises(SystemExit, match=f"^bench: {message}"):
        e2e.main()


def test_any_pair_answers_questions(run, pair, tmp_path, monkeypatch, command_line):
    """Questions of the chosen category, through the chat template; only strategies whose draft is given."""
    questions = tmp_path / "questions.jsonl"
    rows = [{"category": c, "turns": [f"What is {n}?", "Why?"]} for n, c in enumerate(("qa", "rag", "qa", "qa"))]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2?"}]
    rows[2] = {"category": "qa", "messages": said}
    rows[3] = {"category": "qa", "prompt": "What is 3"}
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        e2e, "SHAPES", {n: {"strategy": n} for n in ("ar", "draft", "vocabtrim", "diffuspec", "lookup")}
    )
    args = f"bench/e2e.py --target {pair[0]} --draft {pair[1]} --questions {questions} --categories qa,stem"
    args += " --rounds 1 --prompts 3 --max_new_tokens 6 --temperatures 0 --save"
    command_line(args.split())
    asked, continued = [], []
    monkeypatch.setattr(Engine, "encode", lambda self, text, f=Engine.encode: continued.append(text) or f(self, text))
    monkeypatch.setattr(
        Engine, "encode_chat", lambda self, chat, f=Engine.encode_chat: asked.append(chat) or f(self, chat)
    )
    rows = run()
    assert asked == [[{"role": "user", "content": "What is 0?"}], said] and continued == ["What is 3"]
    assert [r["way"] for r in rows] == ["ar", "draft", "vocabtrim", "lookup", *decoding.HF]
    assert all(r["target"] == "tiny-target" and r["categories"] == "qa,stem" and r["tokens"] > 2 for r in rows)
    assert rows[1]["acceptance_length"] >= 1 and rows[1]["differing_within_rounding"] == 0
