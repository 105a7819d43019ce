"""Session: requests of several threads in one batch, cancelling, stop ids, log-probabilities, chunked prompts. Whatever
else happens, a request's tokens are its own."""

import collections
import math
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cases
import pytest
import torch
import warm
from make_checkpoint import exact_oracle, make, oracle
from pairs import perturbed
from safetensors.torch import load_file

import specker
from specker.model import prefill
from specker.options import Params
from specker.runtime import loop as loops
from specker.runtime.session import Snapshot

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
WAYS = {
    "ar": {"strategy": "ar"},
    "draft": {"draft_tokens": 4},
    "auto+lookup": {"strategy": "draft+lookup"},
    "tree": {"tree": "3x3"},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "[[0],[1,2]]"},
    "del": {"strategy": "del"},
    "diffuspec": {"strategy": "diffuspec", "cps": "off", "adl": "2-4"},
    "lookup": {"strategy": "lookup"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=3, max_context=400, tokenizer=True)
    draft = perturbed(target, folder / "draft", amount=0.05)
    return {"target": target, "draft": draft, "dream": make(folder / "dream", "dream", tokenizer=True)}


def load(models, way, **more):
    options = {"strategy": "draft", **WAYS[way], **more}
    drafts = {"ar": [], "del": [], "lookup": [], "diffuspec": [models["dream"]]}
    side = drafts.get(options["strategy"], [models["draft"]])
    return specker.load(models["target"], *side, **{"dtype": "float64", "device": "cpu", "page_size": 16, **options})


def free(engine):
    """Whether no request holds a page, and the cache's own records agree."""
    for cache in engine.loop.slots.caches:
        cache.check()
    return all(cache.free_pages == cache.spare for cache in engine.loop.slots.caches) and not engine.loop.busy


# --- threads


@pytest.mark.parametrize("size", [1, 3])
def test_threads_share_an_engine_and_have_their_own_texts(models, size):
    engine = load(models, "draft", batch_size=size)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [12] * 30, [3, 1]]
    want = [engine.generate_ar(p, 14, temperature=1.0, seed=3).tokens for p in prompts]
    submitted, sizes, step = threading.Barrier(len(prompts)), [], engine.loop.step

    def watched():
        events = step()
        sizes.append(len({id(event.request) for event in events}))
        return events

    engine.loop.step = watched

    def work(n):
        found = []
        for turn in range(3):
            if turn and (n + turn) % 2:
                found.append(engine.generate(prompts[n], 14, temperature=1.0, seed=3).tokens)
            else:
                stream = engine.stream(prompts[n], 14, temperature=1.0, seed=3)
                if not turn:
                    submitted.wait()  # nobody steps before all have submitted, however slow a thread starts
                found.append([token for event in stream for token in event.tokens])
        return found

    with ThreadPoolExecutor(len(prompts)) as pool:
        for n, found in enumerate(pool.map(work, range(len(prompts)))):
            assert found == [want[n]] * 3
    assert free(engine)
    assert min(size, 2) <= max(sizes) <= size, "threads decode one after another"


def test_a_stream_that_nobody_reads_holds_up_nobody(models):
    """Its thread is gone, and the batch has one slot. The rest of its events waits for whoever reads them."""
    engine, left = load(models, "draft"), []
    want = engine.generate_ar([1, 2, 3], 40).tokens

    def begin():
        left.append(engine.stream([1, 2, 3], 40))
        left.append(next(left[0]).tokens)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert engine.generate([4], 20).tokens == engine.generate_ar([4], 20).tokens
    stream, tokens = left
    assert tokens + [token for event in stream for token in event.tokens] == want and free(engine)


EXIT = """
import ctypes, os, sys, threading, time, specker
engine = specker.load({target!r}, strategy="ar", device="cpu", dtype="float64")
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
    def work():
        while True:
            engine.generate([1, 2, 3], 20)
    threading.Thread(target=work, daemon=True).start()
    while not engine.loop.finished:
        time.sleep(0.001)
else:
    stream = engine.stream([1, 2, 3], 20)
    next(stream)
ctypes.pythonapi.Py_Exit(3)  # the end of an interpreter, which `warm` leaves out
"""


def test_a_process_may_end_while_something_decodes(models):
    """With an open stream, as the child, or a daemon thread in the middle of a step."""
    code = EXIT.format(target=str(models["target"]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "3\n")


FORK = """
import os, sys, threading, specker
from specker.options import Params
engine = specker.load({target!r}, strategy="ar", device="cpu", dtype="float64")
want, running, go_on = engine.generate([1, 2], 5).tokens, threading.Event(), threading.Event()
if {step}:
    deliver = lambda entry: (running.set(), go_on.wait())
    request = engine.session.submit([1, 2, 3], Params(max_new_tokens=20), deliver=deliver)
    thread = threading.Thread(target=engine.session.step)
    thread.start()
    running.wait()
if (child := os.fork()) == 0:
    try:
        assert engine.generate([1, 2], 5).tokens == want
    except RuntimeError as error:
        print(error, file=sys.stderr)
    sys.exit(0)  # and does not wait at the end, either
print(os.waitpid(child, 0)[1], file=sys.stderr)
go_on.set()
if {step}:
    thread.join()
assert engine.generate([1, 2], 5).tokens == want
"""


@pytest.mark.parametrize("step", [False, True])
def test_a_process_that_was_forked_in_a_step_says_so(models, step):
    """Between steps a fork has an engine of its own."""
    done = warm.run("-c", FORK.format(target=str(models["target"]), step=step))
    said = (
        "this process was forked while a step of the engine ran, whose thread is not here: load an engine in this "
        "process, or start it with multiprocessing's method spawn\n"
    )
    assert (done.returncode, done.stderr) == (0, (said if step else "") + "0\n")


def test_a_trace_cannot_begin_a_request(models):
    engine = load(models, "draft")
    engine.trace = lambda row: engine.generate([1], 2)
    with pytest.raises(RuntimeError, match="began another request"):
        engine.generate([1, 2], 5)
    engine.trace = None
    assert len(engine.generate([1, 2], 5).tokens) == 5 and free(engine)


def test_a_failed_step_ends_its_requests_and_not_the_session(models, monkeypatch):
    """Another thread's request gets the error too; the next request finds every page free."""
    engine, failed = load(models, "draft", batch_size=2), []
    stream = engine.stream([1, 2, 3], 40)
    next(stream)

    def broken(*_):
        raise ValueError("no memory")

    monkeypatch.setattr(loops, "launch", broken)

    def other():
        try:
            engine.generate([4], 20)
        except ValueError as error:
            failed.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with pytest.raises(ValueError, match="no memory"):
        next(stream)
    assert failed == ["no memory"] and free(engine)
    monkeypatch.undo()
    assert engine.generate([4], 20).tokens == engine.generate_ar([4], 20).tokens


def test_steps_by_hand(models):
    """`submit` and `step`, as a server uses them."""
    engine = load(models, "draft", batch_size=2)
    session, prompts = engine.session, [[1, 2], [3], [4, 5, 6]]
    requests = [session.submit(prompt, Params(max_new_tokens=9)) for prompt in prompts]
    tokens = {request: [] for request in requests}
    assert session.busy and session.wait(0)
    while session.busy:
        for event in session.step():
            tokens[event.request] += event.tokens
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.finished == "length"
        assert tokens[request] == request.tokens == engine.generate_ar(prompt, 9).tokens
    assert free(engine) and not session.wait(0) and session.step() == []


def test_a_request_delivers_its_own_events(models):
    """`step` returns those of the other one."""
    engine, seen = load(models, "draft", batch_size=2), []
    mine = engine.session.submit([1, 2], Params(max_new_tokens=9), deliver=seen.append)
    other = engine.session.submit([3], Params(max_new_tokens=9))
    returned = []
    while engine.session.busy:
        returned += engine.session.step()
    for request, events in ((mine, seen), (other, returned)):
        assert {event.request for event in events} == {request}
        assert [token for event in events for token in event.tokens] == request.tokens
        assert [event.finished for event in events] == [None] * (len(events) - 1) + ["length"]


@pytest.mark.parametrize("cancels", [False, True])
def test_a_failed_step_is_delivered_to_every_request_once(models, cancels, monkeypatch):
    """Also if it was launched before, and `cancel` collects it."""
    engine, seen, error = load(models, "ar", batch_size=2, graphs="on"), [[], [], []], ZeroDivisionError("no memory")
    first, *others = [
        engine.session.submit([n], Params(max_new_tokens=20), deliver=entries.append)
        for n, entries in enumerate(seen, 1)
    ]
    engine.session.step()
    assert engine.loop.pending
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.loop, "finish", lambda r: (_ for _ in ()).throw(error))
        engine.session.cancel(first) if cancels else engine.session.step()
    engine.session.step()
    assert [request.finished for request in others] == ["failed", "failed"] and free(engine)
    assert [entries[-1] for entries in seen[1:]] == [error, error]
    assert (seen[0][-1].finished == "cancelled") if cancels else (seen[0][-1] is error)
    assert [sum(x is error or x.finished is not None for x in entries) for entries in seen] == [1, 1, 1]


def test_a_snapshot_counts_requests(models):
    engine = load(models, "draft", batch_size=2)
    session = engine.session
    requests = [session.submit([n], Params(max_new_tokens=20)) for n in (1, 2, 3)]
    assert session.snapshot() == Snapshot(slots=2, running=0, waiting=3)
    session.step()
    assert session.snapshot() == Snapshot(slots=2, running=2, waiting=1)
    assert {model: (0 < used < pages) for model, (used, pages) in session.pages().items()} == {
        "target": True,
        "draft": True,
    }
    for request in requests:
        session.cancel(request)
    assert session.snapshot() == Snapshot(slots=2, running=0, waiting=0)
    assert session.pages()["target"] == (0, engine.cache.spare)


# --- the end of a text


@pytest.mark.parametrize("way", cases.one_in(2, WAYS))
def test_stop_ids(models, way):
    """Within a draft and between drafts; each request has its own."""
    engine = load(models, way, batch_size=2)
    whole = engine.generate_ar([5, 9, 40], 14).tokens
    for stop in dict.fromkeys(whole[2:7]):
        cut = engine.session.submit([5, 9, 40], Params(max_new_tokens=14, stop_ids=(stop,)))
        other = engine.session.submit([5, 9, 40], Params(max_new_tokens=14))
        while engine.session.busy:
            engine.session.step()
        assert cut.tokens == whole[: whole.index(stop) + 1] and cut.finished == "stop"
        assert other.tokens == whole and other.finished == "length"


def test_parameters_are_checked(models):
    engine = load(models, "ar")
    for more, message in {
        "stop_ids must be a list": {"stop_ids": 7},
        "a stop id must be a whole number of at least 0, got -1": {"stop_ids": [-1]},
        "stop_ids must be below": {"stop_ids": [10**6]},
        "logprobs must be a whole number of at least 0, got True": {"logprobs": True},
        "prefix_cache must be exact, all or off, got 'some'": {"prefix_cache": "some"},
    }.items():
        with pytest.raises(ValueError, match=more):
            engine.generate([1], 2, **message)
    with pytest.raises(TypeError, match=r"unknown option 'logprob' \(did you mean logprobs"):
        engine.generate([1], 2, logprob=1)


@pytest.mark.parametrize("where", ["waiting", "prefill", "decoding"])
def test_cancel(models, where, chunk_prompts):
    chunk_prompts(16, 64, 64)
    engine = load(models, "draft", batch_size=2)
    session, prompt = engine.session, [7] * 200
    want = [engine.generate_ar([n], 30).tokens for n in (1, 2)]
    ahead = [session.submit([n], Params(max_new_tokens=30)) for n in ((1, 2) if where == "waiting" else (1,))]
    session.step()
    request = session.submit(prompt, Params(max_new_tokens=12))
    while {"waiting": False, "prefill": not engine.loop.slots.filling, "decoding": not request.tokens}[where]:
        session.step()
    for _ in range(5 if where == "prefill" else 0):  # into a long chunk, of which a slice has run
        session.step()
    session.cancel(request)
    session.cancel(request)
    assert request.finished == "cancelled"
    events = []
    while session.busy:
        events += session.step()
    assert [event.finished for event in events if event.request is request] == ["cancelled"]
    assert [r.tokens for r in ahead] == want[: len(ahead)] and free(engine)
    assert engine.generate([8] * 200, 12).tokens == engine.generate_ar([8] * 200, 12).tokens
    assert request.tokens == engine.generate_ar(prompt, 12).tokens[: len(request.tokens)]


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_closing_a_stream_frees_its_pages_at_once(models, graphs):
    engine = load(models, "draft", batch_size=3, graphs=graphs)
    stream = engine.stream([[5, 9], [7] * 30, [8] * 60, [4]], 20)
    next(stream)
    stream.close()
    assert free(engine) and list(stream) == []
    del stream
    abandoned = engine.stream([[5, 9]], 20)
    next(abandoned)
    del abandoned
    assert free(engine)


# --- log-probabilities


@pytest.mark.parametrize(("way", "graphs"), cases.one_in(2, ["ar", "draft", "tree", "del"], ["off", "on"]))
def test_logprobs_are_those_of_the_target(models, way, graphs, monkeypatch):
    """Against one forward over the whole text by transformers, before temperature and filters."""
    exact_oracle(monkeypatch)
    engine, theirs = load(models, way, graphs=graphs, batch_size=2), oracle(models["target"], torch.float64)
    prompts = [[5, 9, 40], [1] * 20]
    out = engine.generate(prompts, 14, temperature=[0.0, 0.9], top_k=[0, 30], logprobs=[3, 5])
    bare = engine.generate(prompts, 14, temperature=[0.0, 0.9], top_k=[0, 30])
    for prompt, got, same, most in zip(prompts, out, bare, (3, 5), strict=True):
        assert got.tokens == same.tokens and same.logprobs == [] and len(got.logprobs) == len(got.tokens)
        with torch.inference_mode():
            rows = theirs(torch.tensor([prompt + got.tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for token, row, said in zip(got.tokens, rows, got.logprobs, strict=True):
            assert said.token == token and said.logprob == pytest.approx(float(row[token]), abs=1e-9)
            best = row.topk(most)
            assert [i for i, _ in said.best] == best.indices.tolist()
            assert [x for _, x in said.best] == pytest.approx(best.values.tolist(), abs=1e-9)


# --- prompts in chunks


@pytest.mark.parametrize("way", ["ar", "draft", "del", "diffuspec", "lookup"])
def test_other_texts_go_on_while_a_long_prompt_is_prefilled(models, way, monkeypatch, chunk_prompts):
    """At most one chunk of the target's prompt, of a long one a slice of its layers, and one chunk of the draft's lie
    between two rounds of a text."""
    chunk_prompts(16, 64, 64)
    engine, rows = load(models, way, batch_size=2), []  # of each step: a model's rows, times the layers that they ran
    long = [n * 7 % 90 + 3 for n in range(300)]
    want = [engine.generate_ar(p, 24).tokens for p in ([1, 2], long)]
    run_layers = prefill.run_layers

    def counted(model, steps, hidden, *rest, **more):
        steps = list(steps)
        rows[-1][model] += len(hidden) * len(steps)
        return run_layers(model, steps, hidden, *rest, **more)

    monkeypatch.setattr(prefill, "run_layers", counted)
    session = engine.session
    first = session.submit([1, 2], Params(max_new_tokens=24))
    rows.append(collections.Counter())
    session.step()
    told = []
    request = session.request(long, Params(max_new_tokens=24), on_progress=lambda done, of: told.append((done, of)))
    second = session.submit(request)
    while session.busy:
        rows.append(collections.Counter())
        before, waits = len(first.token_ids), not first.finished
        session.step()
        assert first.finished or len(first.token_ids) > before, "a step without a round for the first text"
        slices = {model: count for model, count in rows[-1].items() if way == "draft" or model is engine.model}
        assert max(slices.values(), default=0) <= 64 or not waits
    assert [first.tokens, second.tokens] == want
    assert sum(own[engine.model] for own in rows) == 3 * (1 + len(long) - 1)
    assert told[0] == (16, 299) and told[-1] == (299, 299) and len(told) == 4 + 4


def test_a_step_admits_several_short_prompts(models):
    engine = load(models, "draft", batch_size=4)
    stream = engine.stream([[n, n + 1] for n in range(1, 5)], 20)
    next(stream)
    assert len(engine.loop.active) == 4


# --- everything at once


def a_request(rng, prefixes):
    prompt = list(rng.choice(prefixes)[: rng.randrange(1, 120)]) + [
        rng.randrange(3, 90) for _ in range(rng.randrange(9))
    ]
    options = {
        "max_new_tokens": rng.randrange(1, 14),
        "temperature": rng.choice([0.0, 0.7, 1.2]),
        "seed": rng.randrange(9),
    }
    return prompt, options | ({"stop_ids": [rng.randrange(128) for _ in range(3)]} if rng.random() < 0.3 else {})


@pytest.mark.slow
def test_soak(models):
    """2,000 requests, 40 at a time, from four threads; memory ends as it began."""
    engine = load(models, "auto+lookup", batch_size=8, dtype="float32", kv_tokens=4000, prefix_cache="all")
    rng = random.Random(5)
    prefixes = [[rng.randrange(3, 90) for _ in range(120)] for _ in range(8)]
    jobs = [a_request(rng, prefixes) for _ in range(2000)]
    counts = [0] * 4

    def work(n):
        own = random.Random(n)
        for prompt, options in jobs[n::4]:
            stream = engine.stream(prompt, **options)
            for event in stream:
                if own.random() < 0.01:
                    stream.close()
                assert all(math.isfinite(x.logprob) for x in event.logprobs)
            counts[n] += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(counts) == 2000 and free(engine)


def test_the_oracle_is_another_model(models):
    """The draft differs from the target, so that the tests above see drafts refused."""
    a, b = (load_file(models[name] / "model.safetensors") for name in ("target", "draft"))
    assert any((a[name] != b[name]).any() for name in a)
