"""How close decoding comes to the memory limit: shapes of real models, random weights, batch 1 unless a case says more.

Time depends on shapes, not on the values of weights or K/V, so both are made up (`load="dummy"`). The context is not
prefilled: the caches are filled with noise (zeros might raise a GPU's clock), the text is n times id 0, and rounds
continue from there. The decoded text is meaningless and not checked, and nearly no draft is accepted. Every row says
so. bench/papers has models of these shapes whose drafts are accepted as trained ones are.

* `ar`: time of one round of plain decoding, a token of each sequence, between the reports of two rounds as in
  `generate`, with one round always in flight. Limit: bytes of weights (linears, head, norms, biases) as they are stored
  and of K/V over the read bandwidth measured in the same process. `host`: the time to launch a round.
* `verify`: verify and accept 8 and 64 rows, against one row, at one text length (CUDA events, cold L2, in turn).
* `round`: a target with a draft's chain of 5. *outside*: the share of a round outside the two models' forwards,
  1 - (V + D) / R. R: time between reports, as in `ar`. V: embedding, layers, norm and head of the target over 6 rows.
  D: the same for the draft, once over the 6 rows that it forwards again and 4 times over one row; its head includes the
  argmax. V and D are captured and timed separately. Outside are therefore: placing rows, drawing tokens, the walk,
  advancing the state, copying the report, and all gaps. *over ar*: rounds/s over the tokens/s of `ar`, against the
  limit of bytes, 1 / (1 + 5 d / t), with d and t the bytes of a draft and of a target step.
* `first`: from a prompt (with a real prefill) to its first token, the first request after `warmup` over later ones.
* `prefill`: a prompt's K/V, in the chunks of a request, at one length again and again, and at a new length every time
  (a kernel that plans or compiles for a length makes these slower). Limit of the first: the flops of the linears that a
  token passes, over the rate of bfloat16 products measured in the same process; attention is not counted.
* `beside`: `ar` against transformers' generate of the same shape with a static cache, decoding compiled or not. Times
  between tokens come from its streamer, after a real prefill and a whole warm-up run.
* `launches`: kernels and copies of a round, by torch.profiler: how many, and the share of the round in which none ran.
  Prints each one's start, length and gap (bench/timeline.py). It runs last, since a profiler may slow down later
  launches.

A case that cannot run becomes a row with the reason, and the others continue. After --seconds no further case begins
(330: the bench should take less than six minutes on an H200; it has not been timed there). On a CPU the host clock
times, nothing is compiled and there is no limit to compare with: the run only shows that the bench works.
"""

import gc
import itertools
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import specker
from bench import harness, shapes, timeline
from bench.harness import Timing
from bench.kernels import common
from bench.shapes import step_bytes
from specker.kernels.delta_rows import BLOCK, anchor
from specker.model.config import layer_elements
from specker.model.decoder import forward
from specker.model.prefill import prefill
from specker.model.sampling import GREEDY
from specker.options import Sampling
from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, Fixed
from specker.runtime.engine import Engine
from specker.runtime.loop import Loop
from specker.runtime.round import round as stage
from specker.runtime.round.drafter import Draft
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request
from specker.runtime.strategies.base import LOOKAHEAD

DRAFTED = 5
ROWS = (1, 8, 64)  # of `verify`
WARM = 8  # rounds before the timed ones, to compile, capture and fill the pipeline
LATER = 8  # requests after the first
CONTEXTS = (512, 8192, 32768)


@dataclass(frozen=True)
class Goal:
    """The target for a value."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def told(self, unit: str) -> str:
        bounds = ((">=", self.least), ("<=", self.most))
        return ", ".join(f"{sign} {number(x, unit)}" for sign, x in bounds if x is not None)


@dataclass(frozen=True)
class Case:
    kind: str  # a key of KINDS
    shape: str  # a key of shapes.SHAPES
    context: int
    draft: str | None = None  # likewise
    goals: dict[str, Goal] = field(default_factory=dict)  # by way
    quantize: str | None = None  # as --quantize
    batch: int = 1  # sequences at once, for `ar`

    @property
    def name(self) -> str:
        models = f"{self.shape}{f'+{self.draft}' if self.draft else ''}"
        how = f"{f' {self.quantize}' if self.quantize else ''}{f' batch {self.batch}' if self.batch > 1 else ''}"
        return f"{self.kind} {models}{how} {self.context}"


AR = {"ar": Goal(least=0.80)}  # of the measured bandwidth; engines reach 0.70, the highest published is 0.87
VERIFY = {"8 rows": Goal(most=1.05), "64 rows": Goal(most=1.35)}  # of the 8B shape at 8,192
ROUND = {"outside": Goal(most=0.03), "over ar": Goal(least=0.90)}
FIRST = {"first request": Goal(most=1.2)}
PREFILL = {"one length": Goal(least=0.5), "new lengths": Goal(most=1.1)}
QUANTISED = {"one length": Goal(least=0.2), "new lengths": Goal(most=1.1)}
MODELS = ("8b", "1b", "9b", "30b-a3b", "gpt-oss-20b")
ROUNDED = ("fp8", "int8", "int4")


# Cases that share an engine are adjacent; cases with goals come first.
CASES = [
    *(Case("ar", "8b", n, goals=AR) for n in CONTEXTS),
    *(Case("verify", "8b", n, goals=VERIFY if n == 8192 else {}) for n in CONTEXTS),
    Case("first", "8b", 512, "1b", FIRST),
    Case("round", "8b", 8192, "1b", ROUND),
    *(Case("prefill", "8b", n, goals=PREFILL if n == 4096 else {}) for n in (512, 4096, 16384)),
    *(Case("prefill", "8b", 4096, goals=QUANTISED, quantize=kind) for kind in ("int8", "int4")),
    *(Case(kind, "30b-a3b", n) for kind, n in (("ar", 512), ("ar", 8192), ("verify", 8192), ("prefill", 4096))),
    *(Case(kind, "9b", n) for n in (512, 8192) for kind in ("ar", "verify")),
    Case("prefill", "9b", 4096),
    *(Case(kind, shape, n) for shape in ("1b", "32b") for kind in ("ar", "verify") for n in CONTEXTS),
    Case("ar", "gpt-oss-20b", 512),  # experts in MXFP4, as they are stored
    Case("ar", "gpt-oss-20b", 512, quantize="none"),
    *(Case("ar", "8b", 512, batch=n) for n in (8, 32)),
    *(Case("ar", shape, 512, quantize=kind) for shape in MODELS for kind in ROUNDED),
    Case("ar", "gemma4-31b", 512),
    Case("beside", "1b", 512),
    Case("beside", "8b", 512),
    Case("launches", "8b", 8192),
    Case("launches", "8b", 8192, "1b"),
    *(Case("launches", shape, 8192) for shape in ("1b", "9b", "32b")),
    *(Case(kind, shape, n) for shape in ("tiny", "tiny-hybrid") for kind in ("ar", "verify") for n in (64, 160)),
    *(Case(kind, "tiny", 64, "tiny") for kind in ("first", "round")),
    Case("ar", "tiny", 64, quantize="int8", batch=3),
    *(Case("prefill", "tiny", 160, quantize=kind) for kind in (None, "int8")),
    *(Case(kind, "tiny", 64) for kind in ("beside", "launches")),
]


@dataclass(frozen=True)
class Args:
    cases: str = field(
        default="",
        metadata={"help": "parts of names, comma separated, such as 'ar 8b,round' (default: all; on a CPU the tiny)"},
    )
    rounds: int = field(default=40, metadata={"help": "timed rounds of each way"})
    seconds: float = field(default=330, metadata={"help": "after which no case begins"})
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    capture: bool = field(default=True, metadata={"help": "replay CUDA graphs; else launch kernels one by one"})
    layers: int = field(default=0, metadata={"help": "of each shape, to compile its kernels; 0: all of them"})
    save: bool = harness.save_flag()


def chosen(args: Args) -> list[Case]:
    """The cases that `args` select; ValueError if there are none."""
    parts = [part.strip() for part in args.cases.split(",") if part.strip()]
    tiny = torch.device(args.device).type == "cpu"
    found = [c for c in CASES if any(p in c.name for p in parts) or (not parts and c.shape.startswith("tiny") == tiny)]
    if not found:
        raise ValueError(f"no case is called {args.cases!r}; there are {', '.join(c.name for c in CASES)}")
    return found


class Bench:
    """The engines, one at a time."""

    def __init__(self, args: Args, folder: Path):
        """Writes each shape's config.json into `folder`."""
        self.args, self.folder = args, folder
        self.cuda = torch.device(args.device).type == "cuda"
        self.captures = self.cuda and args.capture
        shapes.write(folder, args.layers)
        self._held: tuple[tuple[Any, ...], Engine] | None = None

    def options(self, case: Case) -> dict[str, Any]:
        # Room for every context of the shape and for the rounds' tokens.
        contexts = [c.context for c in CASES if (c.shape, c.batch) == (case.shape, case.batch)]
        most = max(contexts) + (self.args.rounds + WARM) * (DRAFTED + 1) + 128
        how: dict[str, Any] = {"load": "dummy", "graphs": "on", "max_context": most, "strategy": "ar"}
        how["batch_size"] = case.batch
        if case.draft is not None:
            how |= {"strategy": "draft", "draft_tokens": DRAFTED}
        return how if case.quantize is None else how | {"quantize": case.quantize}

    def engine(self, case: Case, fresh: bool = False) -> Engine:
        """The last engine if its shapes are the same and `fresh` is not set."""
        key = case.shape, case.draft, case.quantize, case.batch
        if self._held is None or self._held[0] != key or fresh:
            self.drop()
            draft = None if case.draft is None else self.folder / case.draft
            where = {"device": self.args.device, "dtype": self.args.dtype}
            engine = specker.load(self.folder / case.shape, draft, **where, **self.options(case))
            engine.loop.graphs = self.graphs(engine)
            self._held = key, engine
        return self._held[1]

    def graphs(self, engine: Engine) -> Graphs:
        """New graphs, which capture nothing on a CPU or with `--capture False`."""
        return Graphs(engine.model.device if self.captures else None)

    def drop(self) -> None:
        self._held = None
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def in_turn(self, ways: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Timings of `ways`; the first call compiles and the second captures."""
        if not self.cuda:
            return harness.measure(ways, self.args.rounds)
        for call in 3 * list(ways.values()):
            call()
        return common.in_turn(ways, self.args.rounds, common.this_machine().replay)


@dataclass(frozen=True)
class Decoded:
    """Results of the rounds after warm-up."""

    timing: Timing  # of a round, from report to report
    host: float  # seconds to launch one
    stages: dict[str, float]  # seconds of a round's draft, verify and accept

    @property
    def round_seconds(self) -> float:
        """The mean."""
        return sum(self.timing.seconds) / len(self.timing.seconds)


def in_place(loop: Loop, sequences: Sequence[Request]) -> None:
    """Make requests whose texts are equally long the loop's only ones, with noise as the K/V, states and records."""
    loop.clear()
    for cache in loop.slots.caches:
        for x in cache.kv:
            x.normal_()
        for slot, sequence in enumerate(sequences):
            cache.take(slot, loop.slots.columns(sequence.limit))
            cache.exact_len[slot] = len(sequence.token_ids) - 1
        if (memory := cache.memory) is not None:
            memory.inputs.normal_()
            if memory.anchors is not None:
                for noise in (memory.k, memory.u, memory.states):
                    assert noise is not None
                    noise.normal_(std=0.1)
                memory.anchors.fill_(anchor(cache.exact_len[0], BLOCK))  # no state moves on to the text's end
    for slot, sequence in enumerate(sequences):
        loop.active.append(sequence)
        loop.state.write(slot, sequence)


def a_text(engine: Engine, context: int, tokens: int, drafting: bool, index: int = 0) -> Request:
    """A request with a text of `context` tokens that may grow by `tokens`."""
    policy = engine.policy() if drafting else Fixed(0, 0)
    return Request(
        index=index,
        token_ids=[0] * context,
        limit=context + tokens,
        sampling=Sampling(),
        policy=policy,
        speculates=drafting,
        prefixes="off",
    )


@torch.inference_mode()
def decode(bench: Bench, engine: Engine, context: int, drafting: bool) -> Decoded:
    """Decode after `context` tokens, in every slot, like `generate`, which launches the next round before one has
    finished."""
    loop, rounds = engine.loop, bench.args.rounds
    tokens = (WARM + rounds + 4) * (DRAFTED + 1)
    sequences = [a_text(engine, context, tokens, drafting, slot) for slot in range(loop.size)]
    in_place(loop, sequences)

    def spent() -> dict[str, float]:
        return {name: sum(s.stats.seconds[name] for s in sequences) for name in ("draft", "verify", "accept")}

    stamps: list[float] = []
    host, launched = 0.0, 0
    stages: dict[str, float] = {}
    r = loop.start()
    for n in range(1, WARM + rounds + 1):
        assert r is not None and r.batch.fixed, "the bench needs rounds of fixed shape"
        after = loop.start(r.draft.size + 1)
        loop.finish(r)
        r = after
        stamps.append(time.perf_counter())
        if n == WARM:
            host, launched, stages = loop.host_seconds, loop.launched, spent()
    host = (loop.host_seconds - host) / (loop.launched - launched)
    stages = {name: (seconds - stages[name]) / rounds for name, seconds in spent().items()}
    harness.wait()
    loop.clear()
    seconds = [b - a for a, b in itertools.pairwise(stamps[WARM - 1 :])]
    return Decoded(Timing(tuple(sorted(seconds)), None), host, stages)


# --- measurements: a case -> row fields for each configuration


Found = dict[str, dict[str, Any]]


def ar(bench: Bench, case: Case) -> Found:
    engine = bench.engine(case)
    done = decode(bench, engine, case.context, False)
    in_the_middle = case.context + WARM + bench.args.rounds // 2
    read = step_bytes(engine.model, in_the_middle, case.batch)
    row = {**done.timing.row(), "bytes": read, "host": done.host, "unit": "%", "of": "the bandwidth"}
    row["tokens_per_second"] = case.batch / done.timing.median
    if bench.cuda:
        machine, seconds = common.this_machine(), done.timing.median
        limit = read / machine.bandwidth
        row |= {"bandwidth": machine.bandwidth, "limit": limit, "value": limit / seconds}
        if machine.specified is not None:
            row |= {"specified": machine.specified, "share_specified": read / machine.specified / seconds}
    return {"ar": row}


def verify(bench: Bench, case: Case) -> Found:
    judge = judging(bench, bench.engine(case), case.context)
    timings = bench.in_turn({f"{n} rows": partial(judge, n - 1) for n in ROWS})
    one = timings.pop("1 rows").median
    more = {"one": one, "unit": "x", "of": "one row"}
    return {way: {**timing.row(), "value": timing.median / one, **more} for way, timing in timings.items()}


def judging(bench: Bench, engine: Engine, context: int) -> Callable[[int], Round]:
    """A function that verifies and accepts a draft of a given size after `context` tokens, to be captured; the text
    does not grow."""
    most = ROWS[-1] - 1
    known = AcceptanceHistory(Costs(lambda _: 1.0))
    how = Budget(most, most), True, bench.graphs(engine), known, 1, LOOKAHEAD
    loop = Loop(engine.model, engine.cache, [], *how)
    in_place(loop, [a_text(engine, context, 0, False)])
    made: dict[int, Round] = {}

    @torch.inference_mode()
    def judge(size: int) -> Round:
        if size not in made:
            made[size] = loop.new_round(Budget(size, size), True)
            made[size].draft = Draft(size)
        stage.verify(made[size], loop.target, loop.cache)
        stage.accept(made[size], loop.target, loop.cache)
        return made[size]

    return judge


@torch.inference_mode()
def forwards(bench: Bench, engine: Engine, context: int) -> dict[str, Timing]:
    """Only a round's forwards of the two models, each as one graph: `target` and `draft`."""
    drafter: Any = engine.drafter
    target, draft = engine.model, drafter.model
    engine.loop.batches.see(context + engine.loop.batches.lookahead)
    graphs, rows = bench.graphs(engine), DRAFTED + 1
    length = torch.tensor([context], device=target.device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=target.device)
    verified = engine.cache.place(length, 1, 0, rows)
    again = drafter.cache.place(length, rows, 0, rows)
    steps = [drafter.cache.place(length, 0, n, 1) for n in range(DRAFTED - 1)]

    def verifying() -> None:
        target.logits(forward(target, engine.cache, verified, target.embed_tokens(tokens)).final)

    def drafting() -> None:
        fed = tokens
        for at in (again, *steps):
            final = forward(draft, drafter.cache, at, draft.embed_tokens(fed)).final.at(slice(-1, None))
            fed = drafter.head.best(final, GREEDY, at.positions[-1:])

    ways = {"target": lambda: graphs.run("target", verifying), "draft": lambda: graphs.run("draft", drafting)}
    return bench.in_turn(ways)


def rounds(bench: Bench, case: Case) -> Found:
    engine = bench.engine(case)
    whole = decode(bench, engine, case.context, True)
    plain = decode(bench, engine, case.context, False)
    parts = {name: timing.median for name, timing in forwards(bench, engine, case.context).items()}
    drafter: Any = engine.drafter
    models = {"target": engine.model, "draft": drafter.model}
    read = {name: step_bytes(model, case.context) for name, model in models.items()}
    allowed = read["target"] / (DRAFTED * read["draft"] + read["target"])
    over = plain.round_seconds / whole.round_seconds
    row = {**whole.timing.row(), "host": whole.host, "stages": whole.stages}
    outside = {
        **row,
        "forwards": parts,
        "value": 1 - sum(parts.values()) / whole.timing.median,
        "unit": "%",
        "of": "a round",
    }
    speed = {
        **row,
        "ar_seconds": plain.round_seconds,
        "bytes": DRAFTED * read["draft"] + read["target"],
        "over_ar": over,
        "limit": allowed,
        "value": over / allowed,
        "unit": "%",
        "of": f"the {allowed:.2f} rounds a token that bytes allow",
    }
    return {"outside": outside, "over ar": speed}


def first(bench: Bench, case: Case) -> Found:
    engine = bench.engine(case, fresh=True)
    engine.warmup()
    vocab = engine.target.config.vocab_size
    prompt = torch.randint(vocab, (case.context,), generator=torch.Generator().manual_seed(0)).tolist()
    seconds = []
    for _ in range(1 + LATER):
        harness.wait()
        start = time.perf_counter()
        stream = engine.stream(prompt, 16, prefix_cache="off")  # later requests would take over the draft's K/V
        next(stream)
        seconds.append(time.perf_counter() - start)
        stream.close()
    later = Timing(tuple(sorted(seconds[1:])), None).median
    row = {"median": seconds[0], "later": later, "value": seconds[0] / later, "unit": "x", "of": "later ones"}
    return {"first request": row | ({"graphs": engine.loop.graphs.to_json()} if engine.captures else {})}


def prefills(bench: Bench, case: Case) -> Found:
    loop, most, rounds = bench.engine(case).loop, case.context, max(3, bench.args.rounds // 4)
    lengths = iter(range(most - 1, 0, -3))

    def prompt(length: int) -> None:
        loop.cache.truncate(0)
        prefill(loop.target, loop.cache, [1] * length)

    loop.clear()
    loop.cache.take(0, loop.slots.columns(most))
    ways = {"one length": lambda: prompt(most), "new lengths": lambda: prompt(next(lengths))}
    timings = harness.measure(ways, rounds, warmup=2)
    loop.clear()
    one, new = timings["one length"], timings["new lengths"]
    row = {**one.row(), "tokens_per_second": most / one.median, "unit": "%", "of": "the rate of products"}
    if bench.cuda:
        flops = 2 * layer_elements(loop.target.config, 1) * most
        row |= {"limit": flops / common.this_machine().matmul, "flops": flops}
        row |= {"value": row["limit"] / one.median}
    more = {**new.row(), "value": new.median / one.median, "unit": "x", "of": "one length"}
    return {"one length": row, "new lengths": more}


class Stamps:
    """A streamer that records the time of each token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Any) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None: ...


def theirs(bench: Bench, case: Case, compiled: bool, model: Any) -> Timing:
    """Time of a token in transformers' generate."""
    ids = torch.zeros(1, case.context, dtype=torch.int64, device=bench.args.device)
    how = {"cache_implementation": "static", "disable_compile": not compiled, "do_sample": False}
    count = WARM + bench.args.rounds
    for _ in range(2):
        stamps = Stamps()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, streamer=stamps, **how)
    if compiled and not hasattr(model, "_compiled_call"):
        raise RuntimeError("generate did not compile")
    told = stamps.seconds[WARM:]  # the first stamp is the prompt's
    return Timing(tuple(sorted(b - a for a, b in itertools.pairwise(told))), None)


def beside(bench: Bench, case: Case) -> Found:
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = decode(bench, bench.engine(case), case.context, False).timing
    config = AutoConfig.from_pretrained(bench.folder / case.shape)
    with torch.device(bench.args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, bench.args.dtype)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    found: Found = {"specker ar": ours.row()}
    for way, compiled in (("transformers", False), ("transformers, compiled", True)):
        try:
            if compiled and not bench.cuda:
                raise RuntimeError("generate does not compile on a CPU")
            timing = theirs(bench, case, compiled, model)
        except Exception as error:  # compilers raise many kinds
            found[way] = {"reason": reason(error)}
        else:
            value = timing.median / ours.median
            found[way] = {**timing.row(), "value": value, "unit": "x", "of": "specker's time"}
    return found


@torch.inference_mode()
def launches(bench: Bench, case: Case) -> Found:
    engine = bench.engine(case)
    in_place(engine.loop, [a_text(engine, case.context, 0, engine.drafter is not None)])  # the text cannot grow

    def once() -> None:
        r = engine.loop.start()
        assert r is not None and r.batch.fixed
        engine.loop.finish(r)
        harness.wait()

    for _ in range(3):
        once()
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        once()
    engine.loop.clear()
    ran = timeline.of(profile.events() or [])
    if not ran:
        raise ValueError("the profiler saw no work on a GPU")
    print(f"{case.name}:\n{timeline.told(ran)}")
    nothing, span = timeline.idle(ran)
    row = {"launches": len(ran), "kernels": timeline.by_name(ran), "span": span / 1e6}
    return {"a round": {**row, "value": nothing / span, "unit": "%", "of": "a round, with nothing running"}}


KINDS: dict[str, Callable[[Bench, Case], Found]] = {
    "ar": ar,
    "verify": verify,
    "round": rounds,
    "first": first,
    "prefill": prefills,
    "beside": beside,
    "launches": launches,
}


# --- rows


def run(bench: Bench, case: Case, late: bool = False) -> list[dict[str, Any]]:
    """The rows of a case: one per configuration, or a single one with the reason why it was not measured."""
    remarks = {"sizing": "random weights"}
    failed = {}
    try:
        if late:
            raise ValueError(f"not begun: {bench.args.seconds:g} s were over")
        found = KINDS[case.kind](bench, case)
        remarks = bench.engine(case).remarks
    except Exception as error:
        found = {"": {"reason": reason(error)}}
        if not isinstance(error, (ValueError, torch.OutOfMemoryError)):  # refusals, and running out of memory
            traceback.print_exc()
            failed = {"failed": True}
    if any("reason" in values for values in found.values()):
        bench.drop()  # frees its memory for the next case
    about = {"bench": "decode", "case": case.name, "kind": case.kind, "shape": case.shape, "draft": case.draft}
    about |= {"context": case.context, "batch": case.batch, "dtype": bench.args.dtype, "device": bench.args.device}
    about |= {"remarks": remarks}
    about |= {} if bench.captures or not bench.cuda else {"captured": False}
    rows = []
    for way, values in found.items():
        row, goal = {**about, "way": way, **values, **failed}, case.goals.get(way)
        if goal is not None and "value" in row:
            row |= {"goal": goal.told(row["unit"]), "met": goal.met(row["value"])}
        rows.append(row)
    return rows


def number(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" else f"{value:.2f}x"


def reason(error: Exception) -> str:
    """The error's first line, with the type if the message alone says too little."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def show(rows: list[dict[str, Any]], device: str) -> None:
    table = Table(title=f"decoding on {harness.machine(device)}")
    left = ("case", "way", "found", "goal")
    for column in ("case", "way", "ms", "p20", "p80", "GB", "found", "goal", "met", "launches", "host, us"):
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        found = row.get("reason", "")
        if "value" in row:
            found = f"{number(row['value'], row['unit'])} of {row['of']}"
        table.add_row(
            row["case"],
            row["way"],
            *(f"{row[key] * 1e3:.3f}" if key in row else "" for key in ("median", "p20", "p80")),
            f"{row['bytes'] / 1e9:.2f}" if "bytes" in row else "",
            found,
            row.get("goal", ""),
            {True: "yes", False: "no", None: ""}[row.get("met")],
            str(row.get("launches") or ""),
            f"{row['host'] * 1e6:.0f}" if "host" in row else "",
        )
    table.caption = "\n".join(dict.fromkeys(text for row in rows for text in row["remarks"].values()))
    Console(width=170).print(table)


def main() -> None:
    args = harness.arguments(Args)
    if args.layers and args.save:
        sys.exit("bench: rows of fewer layers are no results: leave out --save or --layers")
    try:
        cases = chosen(args)
    except ValueError as error:
        sys.exit(f"bench: {error}")
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    saved: Path | None = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(args, Path(folder))
            for case in cases:
                new = run(bench, case, late=time.perf_counter() - start > args.seconds)
                rows += new
                if args.save:  # after each case, so that an interrupt keeps the rows
                    saved = harness.save("decode", new, args.device)
    finally:
        show(rows, args.device)
        print(f"{time.perf_counter() - start:.0f} s in all", *([saved] if saved else []))
    failed = [row["case"] for row in rows if "failed" in row]
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
