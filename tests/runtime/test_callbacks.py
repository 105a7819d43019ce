"""Functions that requests call: what one of them raises ends its own request and no other."""

import random
from dataclasses import dataclass, field

import cases
import pytest
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.options import Params

pytestmark = pytest.mark.usefixtures("cheap")
MOMENTS = ("first", "middle", "end", "cancel", "prompt")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=2, max_context=300, tokenizer=True, eos=None)
    return target, perturbed(target, folder / "draft", amount=0.05)


@pytest.fixture(scope="module")
def engines(models):
    options = {"dtype": "float64", "device": "cpu", "page_size": 16, "draft_tokens": 3}
    ways = {(size, graphs): {"batch_size": size, "graphs": graphs} for size in (1, 4) for graphs in ("off", "on")}
    return {way: specker.load(*models, strategy="draft", **options, **more) for way, more in ways.items()}


def free(engine):
    for cache in engine.loop.slots.caches:
        cache.check()
    return all(cache.free_pages == cache.spare for cache in engine.loop.slots.caches) and not engine.loop.busy


class Fault(Exception):
    """What a callback raises."""


@dataclass
class Owner:
    """Takes a request's events, and raises at one of MOMENTS, or never."""

    moment: str | None
    again: bool = False  # whether it raises of its error, too
    tokens: list[int] = field(default_factory=list)
    events: int = 0
    finished: str | None = None
    raised: Fault | None = None
    told: list[BaseException] = field(default_factory=list)

    def fault(self):
        self.raised = Fault(self.moment)
        raise self.raised

    def progress(self, done, of):
        if self.moment == "prompt":
            self.fault()

    def __call__(self, entry):
        if isinstance(entry, BaseException):
            self.told.append(entry)
            if self.again:
                raise entry
            return
        assert not self.told and self.finished is None, "an event after the last"
        self.events += 1
        self.finished = entry.finished
        ended = {"end": "length", "cancel": "cancelled"}.get(self.moment)
        if (self.moment, self.events) in {("first", 1), ("middle", 3)} or (ended and entry.finished == ended):
            self.fault()
        self.tokens += entry.tokens


@pytest.fixture(scope="module")
def jobs(engines):
    """Prompts, and their tokens alone."""
    rng, alone = random.Random(1), engines[1, "off"].generate_ar
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in (2, 40, 9, 3, 25, 5)]
    return [(prompt, alone(prompt, 10 + n).tokens) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize(("size", "graphs"), cases.diagonal([1, 4], ["off", "on"]))
def test_a_callback_that_raises_ends_its_own_request(engines, jobs, size, graphs, caplog):
    """Five times random arrivals, steps and cancels, beside a stream that runs steps too, for each moment."""
    engine = engines[size, graphs]
    session = engine.session
    for run in range(5):
        rng, owners, unrelated = random.Random(f"{run} {size} {graphs}"), {}, []
        moments = [MOMENTS[run % len(MOMENTS)], rng.choice(MOMENTS), None, None]
        rng.shuffle(moments)
        (mine, mine_alone), *others = rng.sample(jobs, 5)
        stream = engine.stream(mine, len(mine_alone))
        while moments or session.busy:
            if moments and rng.random() < 0.4:
                (prompt, alone), owner = others[len(owners)], Owner(moments.pop(), rng.random() < 0.5)
                params = Params(max_new_tokens=len(alone))
                request = session.request(prompt, params, on_progress=owner.progress)
                owners[session.submit(request, deliver=owner)] = owner, alone
            for request, (owner, _) in owners.items():
                if (owner.moment == "cancel" and owner.events) or (owner.moment is None and rng.random() < 0.02):
                    session.cancel(request)
            if (event := next(stream, None)) is not None:
                unrelated += event.tokens
            elif rng.random() < 0.5:
                session.step()
        assert unrelated + [token for event in stream for token in event.tokens] == mine_alone
        for request, (owner, alone) in owners.items():
            assert owner.tokens == alone[: len(owner.tokens)]
            assert owner.told == ([] if owner.raised is None else [owner.raised])
            if owner.raised is None:
                assert owner.finished == "cancelled" or (owner.finished == "length" and owner.tokens == alone)
            assert request.finished == (owner.finished or "failed")
        assert free(engine)
    assert "a function that a request calls raised an error" in caplog.text and "Fault" in caplog.text


def test_a_request_without_deliver_ends_with_an_event(engines, jobs):
    """`step` returns it, and raises nothing."""
    session, (prompt, alone) = engines[4, "off"].session, jobs[1]
    params = Params(max_new_tokens=len(alone))
    good = session.submit(prompt, params)
    bad = session.submit(session.request(prompt, params, on_progress=Owner("prompt").progress))
    events = []
    while session.busy:
        events += session.step()
    assert good.tokens == alone and good.finished == "length" and free(engines[4, "off"])
    assert [(e.tokens, e.finished) for e in events if e.request is bad] == [([], "failed")] and bad.finished == "failed"


def test_a_stream_raises_what_its_own_request_raised(engines, jobs):
    engine, (prompt, alone) = engines[4, "off"], jobs[1]
    other = engine.stream(prompt, len(alone))
    first = next(other).tokens
    owner = Owner("prompt")
    with pytest.raises(Fault) as raised, engine.session.stream([]) as stream:
        stream.submit(engine.session.request(jobs[4][0], Params(max_new_tokens=3), on_progress=owner.progress))
        list(stream)
    assert raised.value is owner.raised
    assert first + [token for event in other for token in event.tokens] == alone and free(engine)
