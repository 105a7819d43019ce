"""Random sessions over models of every kind of memory: what an engine keeps of earlier requests changes no text."""

import functools
import random
from dataclasses import dataclass, field

import cases
import pytest
from make_checkpoint import FULL, GEMMA3, LFM2, QWEN3_5, SLIDING, make
from pairs import perturbed

import specker
from specker.options import Params, Sampling
from specker.runtime.session import Request

PAGE = 16
HEADS = {"heads": 2, "kv_heads": 1, "head_dim": 32}  # which the compiled layers take
CONTEXT = 320
# The target's layers, and those of a draft model. Windows stand in rings of 12 + 32 columns.
MEMORY = {
    "dense": {"arch": "qwen2", "layers": 2, **HEADS},
    "windows": GEMMA3 | HEADS | {"layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 12, "tied": False},
    "convolutions": LFM2 | HEADS | {"layers": 2, "layer_types": ["conv", FULL], "tied": False},
    "delta": QWEN3_5
    | HEADS
    | {"layers": 2, "layer_types": ["linear_attention", FULL], "linear_num_key_heads": 1, "linear_num_value_heads": 2},
}
CHAIN = {"draft_tokens": 3}
TREE = {"tree": "2x3"}
COPIES = {"strategy": "lookup", "draft_tokens": 3}
ANY_BITS = {"dtype": "float64", "prefix_cache": "all"}  # by torch's operators
OTHERS = [  # of a dense target, each with a policy that follows its texts
    ("dense", {"strategy": "easyspec", "layer_parallel": "[[0,1]]"}),
    (None, {"strategy": "del"}),
    ("dream", {"strategy": "diffuspec", "cps": "off", "adl": "2-4"}),
    ("dense", {"strategy": "draft+lookup"}),
]
WAYS = [  # target, draft, options
    *[(kind, None, {"strategy": "ar"}) for kind in MEMORY],
    *[(kind, kind, CHAIN) for kind in MEMORY],
    *[("dense", draft, CHAIN) for draft in MEMORY if draft != "dense"],
    *[(kind, kind, TREE) for kind in MEMORY],
    *[(kind, None, COPIES) for kind in MEMORY],
    *[(kind, kind, CHAIN | ANY_BITS) for kind in MEMORY if kind != "dense"],
    *[("dense", draft, options | ANY_BITS) for draft, options in OTHERS],
]
AHEAD = 32  # columns of a ring beyond a window, instead of 512
LENGTHS = (1, PAGE, 2 * PAGE, 4 * PAGE, 6 * PAGE, 9 * PAGE, 12 * PAGE)  # of what a prompt shares, give or take two,
LEFT_OUT = (0, 0, 10, 25, 40, 60)  # or what it leaves out of an earlier text's end, likewise
pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock


@pytest.fixture(autouse=True)
def short_rings(monkeypatch):
    monkeypatch.setattr("specker.model.rings.AHEAD", AHEAD)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> (target, draft)."""
    made = {}
    for seed, (kind, options) in enumerate(MEMORY.items()):
        target = make(tmp_path_factory.mktemp(kind), max_context=CONTEXT, seed=seed, **options)
        made[kind] = target, perturbed(target, tmp_path_factory.mktemp(f"{kind}-draft"), 0.05)
    return made | {"dream": (None, make(tmp_path_factory.mktemp("dream"), "dream", max_context=CONTEXT))}


@dataclass
class Conversation:
    """A request, and what came of it."""

    prompt: list[int]
    params: Params
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cancelled: bool = False


class RandomSession:
    """Requests at random times, whose prompts begin as earlier texts did: their prompts, half of them, and answers."""

    def __init__(self, engine, seed):
        self.engine, self.session, self.rng = engine, engine.session, random.Random(seed)
        self.texts, self.all = [self._ids(12 * PAGE + 4) for _ in range(2)], []
        self.open: dict[Request, Conversation] = {}

    def _ids(self, count):
        return [self.rng.randrange(128) for _ in range(count)]

    def prompt(self):
        text = self.rng.choice(self.texts)
        lengths = [*LENGTHS, *(len(text) - n for n in LEFT_OUT)]
        shared = max(0, self.rng.choice(lengths) + self.rng.randrange(-2, 3))
        return (text[:shared] + self._ids(self.rng.choice((1, 1, 2, 5, 31, 40))))[: CONTEXT - 1]

    def submit(self):
        prompt, count = self.prompt(), self.rng.choice((1, 2, 5, 9, 35))
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            sampling = Sampling(self.rng.choice((0.0, 0.9)), seed=self.rng.randrange(2))
            stops = tuple(self.rng.randrange(128) for _ in range(self.rng.choice((0, 0, 3))))
            salt = self.rng.choice(("", "", "", "other"))
            params = Params(count, sampling, logprobs=1, cache_salt=salt, stop_ids=stops)
            request = self.session.submit(prompt, params)
            self.open[request] = Conversation(prompt, params)
            self.all.append(self.open[request])

    def step(self):
        for event in self.session.step():
            own = self.open[event.request]
            own.tokens += event.tokens
            own.logprobs += [each.logprob for each in event.logprobs]
            if event.finished:
                del self.open[event.request]
                own.cancelled = event.finished == "cancelled"
                self.texts.append(own.prompt + own.tokens)
                self.texts = self.texts[:2] + self.texts[2:][-4:]

    def run(self, texts):
        while len(self.all) < texts or self.open:
            chance = self.rng.random()
            if len(self.all) < texts and (chance < 0.3 or not self.open) and len(self.open) < 6:
                self.submit()
            elif chance > 0.99:
                self.session.cancel(self.rng.choice(list(self.open)))
            else:
                self.step()
        for cache in self.engine.loop.slots.caches:
            cache.check()
            assert cache.free_pages == cache.spare, "an ended request holds pages"


class Alone:
    """Plain decoding by an engine that keeps nothing."""

    def __init__(self, target, dtype):
        self.engine = specker.load(target, strategy="ar", device="cpu", dtype=dtype, prefix_cache="off")
        self.known = {}

    def __call__(self, own):
        sampling, count = own.params.sampling, len(own.tokens)
        tokens, logprobs = self.known.get(key := (*own.prompt, sampling.temperature, sampling.seed), ([], []))
        if len(tokens) < count:
            how = {"temperature": sampling.temperature, "seed": sampling.seed}
            out = self.engine.generate(own.prompt, count, logprobs=1, **how)
            tokens, logprobs = self.known[key] = out.tokens, [each.logprob for each in out.logprobs]
        return tokens[:count], logprobs[:count]


@pytest.fixture(scope="module")
def alone(folders):
    """A function of kind and dtype."""
    return functools.cache(lambda kind, dtype: Alone(folders[kind][0], dtype))


def check(folders, alone, way, size, seed, texts):
    kind, draft, options = WAYS[way]
    drafts = [] if draft is None else [folders[draft][1]]
    options = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "batch_size": size} | options
    engine, plain = specker.load(folders[kind][0], *drafts, **options), alone(kind, options["dtype"])
    run = RandomSession(engine, seed)
    run.run(texts)
    for n, own in enumerate(run.all):
        tokens, logprobs = plain(own)
        assert own.tokens == tokens, f"text {n} of {len(run.all)}"
        assert own.logprobs == pytest.approx(logprobs, abs=1e-4), f"text {n} of {len(run.all)}"
        stops, most = {*own.params.stop_ids}, min(own.params.max_new_tokens, CONTEXT - len(own.prompt))
        assert own.cancelled or len(own.tokens) == most or own.tokens[-1] in stops
        assert not stops & {*own.tokens[:-1]}
    assert sum(own.cancelled for own in run.all) < len(run.all) // 4


@pytest.mark.parametrize(("way", "size"), cases.one_in(2, range(len(WAYS)), [1, 4]))
def test_texts_do_not_depend_on_what_an_engine_keeps(folders, alone, way, size):
    check(folders, alone, way, size, 100 * way + size + 2, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_texts_of_long_sessions(folders, alone, way, size, seed):
    check(folders, alone, way, size, 1000 + seed, 50)
