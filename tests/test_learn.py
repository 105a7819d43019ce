"""`--learn`: an engine starts from what earlier runs kept, and no content of the file changes a token."""

import gc
import json
import logging

import caches
import pytest

import specker
from specker.cli.cache import main
from specker.runtime.control import memo
from specker.runtime.control.choose import OPENING

PROMPTS = ([5, 9, 40], list(range(3, 40)))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    return tmp_path / "cache" / "learnt"


def load(pair, strategy="draft+lookup", learn="on", **options):
    models = pair[:1] if strategy in ("ar", "del") else pair
    return specker.load(*models, strategy=strategy, dtype="float64", device="cpu", learn=learn, **options)


def tokens(engine):
    return [engine.generate(prompt, 16).tokens for prompt in PROMPTS]


def run(pair, folder, **how):
    """One run: its tokens, and the file that it leaves."""
    engine = load(pair, **how)
    made = tokens(engine)
    del engine
    gc.collect()
    (path,) = folder.iterdir()
    return made, path


@pytest.mark.parametrize("strategy", ["draft+lookup", "del"])
def test_a_run_starts_from_the_one_before(pair, folder, strategy):
    plain = tokens(load(pair, "ar"))
    made, path = run(pair, folder, strategy=strategy)
    assert made == plain
    kept = json.loads(path.read_text())
    learnt = kept["learnt"]
    assert learnt["costs"]["verify"] and (learnt["exits"] is not None) == (strategy == "del")
    engine = load(pair, strategy)
    history, chooser = engine.policies.history, engine.loop.runner.chooser
    assert history.costs.kept() == load_costs(learnt) and chooser.kept()["opening"] == kept["chooser"]["opening"]
    each = mean(learnt["drafts"]["tokens"][0])
    assert mean(history.drafts.tokens.kept()) == pytest.approx(each)
    assert strategy == "draft+lookup" or history.exits.tolist() == learnt["exits"]
    engine.warmup()
    assert mean(history.drafts.tokens.kept()) == pytest.approx(each), "a warm-up's texts do not count"
    assert tokens(engine) == plain and "learn" not in engine.remarks
    assert chooser.kept()["opening"] < OPENING


def load_costs(learnt):
    """As the engine holds them."""
    costs = learnt["costs"]
    return {
        **{name: [[*c[:-1], [tuple(ratio) for ratio in c[-1]]] for c in costs[name]] for name in ("verify", "draft")},
        "prefill": costs["prefill"],
    }


def mean(share):
    return share[0] / max(share[1], 1e-9)


def broken(path):
    """What may lie where the file should: (content, what the remark says)."""
    good = json.loads(path.read_text())

    def changed(change):
        copy = json.loads(json.dumps(good))
        change(copy)
        return json.dumps(copy).encode()

    costs, drafts = (lambda c: c["learnt"]["costs"]), (lambda c: c["learnt"]["drafts"])
    yield b"", "it is damaged"
    yield b"\xff\x00garbage", "it is damaged"
    yield path.read_bytes()[:-40], "it is damaged"
    yield b"[" * 100_000, "it is damaged"
    yield b"[1, 2]", "it is damaged"
    yield b"{}", "it is damaged"
    yield changed(lambda c: c.update(specker=0)), "it was written for another engine"
    yield changed(lambda c: c["about"].update(dtype="int1")), "it was written for another engine"
    yield changed(lambda c: costs(c)["verify"][0].__setitem__(2, float("nan"))), "nan is not a number within its range"
    yield changed(lambda c: costs(c)["verify"][0].__setitem__(2, -1.0)), "-1.0 is not a number within its range"
    yield changed(lambda c: costs(c).update(verify=[[1, 0, 1.0, [[10**9, 1.0]]]])), "1000000000 is not a size"
    yield changed(lambda c: costs(c).update(draft=[[1, 0, 1.0, []]])), "a cost is not that of a stage"
    yield changed(lambda c: drafts(c).update(compared=[[3.0, 2.0]])), "an agreement is above 1"
    yield changed(lambda c: drafts(c).update(buckets=[])), "a mean is missing"
    yield changed(lambda c: drafts(c).update(tokens=[[1e6, 1.0]])), "a mean is out of range"
    yield changed(lambda c: c["chooser"].update(credit="much")), "'much' is not a number within its range"


def test_no_content_of_the_file_changes_a_token(pair, folder):
    """What is not specker's is ignored with one remark, and replaced when the run ends; what is valid but wrong is
    believed only until it is measured."""
    plain, path = run(pair, folder)
    engine = load(pair)
    own, parts = engine.loop.memo, (engine.policies.history, engine.loop.runner.chooser, ())
    for content, reason in [*broken(path)]:
        path.write_bytes(content)
        memo.Memo(own.about, *parts, notes := {}, writes=False)
        assert notes == {"learn": f"{path} is ignored, and this run measures anew: {reason}"}
    engine = load(pair)
    assert tokens(engine) == plain and "measures anew" in engine.remarks["learn"]
    engine.loop.memo.save()
    memo.checked(json.loads(path.read_text()), own.about)
    own.pause()
    for strategy in ("draft+lookup", "del"):
        path.unlink()
        _, path = run(pair, folder, strategy=strategy)
        good = json.loads(path.read_text())
        for factor, share, credit in ((1e-9, [0.0, 50.0], 0.0), (1e3, [50.0, 50.0], 12.0), (1.0, [0.0, 0.0], -99.0)):
            drafts, costs = good["learnt"]["drafts"], good["learnt"]["costs"]
            good["learnt"]["drafts"] = {name: [share] * max(1, len(shares)) for name, shares in drafts.items()}
            good["learnt"]["matches"] = [[n, *share] for n in range(9)]
            for curve in (*costs["verify"], *costs["draft"]):
                curve[-2] = factor
            good["chooser"] = {"credit": credit, "lost": 500, "opening": 900}
            if good["learnt"]["exits"] is not None:
                good["learnt"]["exits"] = [[share] * len(good["layers"])] * 2
            path.write_text(json.dumps(good))
            engine = load(pair, strategy)
            assert "learn" not in engine.remarks and tokens(engine) == plain
            del engine
            gc.collect()


def test_what_is_kept_apart_and_what_is_not_kept(pair, folder, monkeypatch, tmp_path, caplog):
    run(pair, folder)
    for how in ({"strategy": "draft"}, {"batch_size": 4}, {"quantize": "int8"}):
        tokens(load(pair, **how))
        gc.collect()
    assert len([*folder.iterdir()]) == 4
    for how in (
        {"max_context": 256, "batch_size": 3, "learn": None},
        {"learn": "off"},
        {"acceptance": "synthetic:0.8", "strategy": "draft"},
        {"draft_tokens": 3, "strategy": "draft"},
    ):
        with monkeypatch.context() as m:
            m.setenv("SPECKER_LEARN", "on")
            tokens(load(pair, **how))
        gc.collect()
        assert len([*folder.iterdir()]) == 4, how
    monkeypatch.setenv("SPECKER_LEARN", "off")
    engine = load(pair, learn=None)
    assert engine.loop.memo is None
    engine = load(pair)
    before = [path.read_bytes() for path in folder.iterdir()]
    engine.warmup()
    del engine
    gc.collect()
    assert [path.read_bytes() for path in folder.iterdir()] == before, "no text ended"
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    engine = load(pair)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokens(engine)
            engine.loop.memo.save()
    assert caplog.text.count("cannot be written (Not a directory), so the next run measures anew") == 1


def test_a_server_writes_now_and_then_beside_the_steps(pair, folder, monkeypatch):
    written = []
    monkeypatch.setattr(memo, "write_cached", lambda path, data: written.append(memo.threading.current_thread()))
    engine = load(pair)
    tokens(engine)
    assert not written, "only every few minutes"
    engine.loop.memo._due = 0.0
    tokens(engine)
    for thread in written:
        thread.join()
    assert len(written) == 1 and written[0] is not memo.threading.main_thread()


def test_the_cache_lists_and_removes_it(pair, folder, capsys):
    run(pair, folder)
    assert main([]) == 0 and "costs of rounds and acceptance that runs measured" in capsys.readouterr().out
    assert main(["--clear", "learnt"]) == 0 and not folder.exists()
    assert "removed 1" in capsys.readouterr().out


def test_bad_values_of_the_option(pair):
    with pytest.raises(ValueError, match="learn must be one of on, off, got 'maybe'"):
        load(pair, learn="maybe")
