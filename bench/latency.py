"""Models the time of a forward from its bytes, launches and collectives, and EasySpec's rounds from forwards. Batch 1.

A forward of T rows of L layers takes, on the busiest of R ranks,

    graphs: device = bytes / bandwidth + launches * node_us + collectives
    eager:  max(device, (launches + collectives' launches) * host_us)

since an eager host runs ahead of the device unless it is slower. Only weights are counted as reads (K/V is 1% of an 8B
model's bytes at 1,200 tokens). Flops hide behind these reads up to about 150 rows on an A100 and 200 on an H200; more
than 128 rows are refused. The target is tensor parallel over R: 2 L all-reduces of T * E, then a gather of candidates.
The draft is

    replicated      whole on every rank, in sequence, no communication: the paper's baseline, draft TP 1
    tensor          tensor parallel like the target
    layer-parallel  groups of N layers: a rank attends for its share of a group, one all-gather of N * T * E, then all
                    N feed-forwards on every rank; first and last layer and head whole on every rank

A round is one exact catch-up forward (in sequence; depth + 1 rows), depth - 1 forwards of `width` rows by the layout, a
verify pass of width * depth + 1 rows, and a broadcast. Skew between ranks and host work between forwards are ignored,
so times are lower bounds.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specker.runtime.strategies.easyspec.parallel import Schedule

Row = dict[str, Any]
MAX_ROWS = 128
LAYOUTS = ("replicated", "tensor", "layer-parallel")
ENGINES = ("eager", "graphs")


def arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Inputs:
    """0 means that bench/project.py takes the number from committed rows or from the GPU's data sheet."""

    bandwidth: float = arg(0.0, "TB/s of a GPU; else measured rows of this GPU, else data sheet x efficiency")
    efficiency: float = arg(0.9, "of the data sheet's bandwidth; an assumption")
    memory: float = arg(0.0, "GB of a GPU; else the data sheet's")
    # Assumed orders of magnitude: a launch from Python or C++, and one kernel after another in a graph.
    host_us: float = arg(5.0, "us of the host for a launch, eager")
    node_us: float = arg(1.0, "us of the device for a kernel's start")
    # NCCL's own estimates, src/graph/tuning.cc (commit 01afd20a): ring, protocol LL over NVLink, 3.6 us and 0.47 us a
    # step, a quarter of the ring's bandwidth. Steps: 2(R - 1) of an all-reduce, R - 1 of an all-gather.
    base_us: float = arg(3.6, "us of a collective")
    step_us: float = arg(0.47, "us of each of a ring's steps")
    bus: float = arg(0.0, "GB/s of a ring; else by GPU")
    bus_share: float = arg(0.25, "of it for short messages")
    tau: float = arg(0.0, "acceptance length, drafted in sequence; else the bundled pair's, committed rows")
    keep: float = arg(0.0, "share of it that layers side by side keep, at most 1; else the bundled pair's")
    temperature: float = arg(0.0, "of those rows")
    depth: int = arg(5, "draft forwards a round, the first of them exact")
    width: int = arg(12, "rows of each forward: the paper's top-k tree")
    parallel: int = arg(4, "layers in a group")
    logits: bool = arg(False, "verification gathers logits (sampling), not (id, logit) pairs")
    # Recorded without a GPU (bench/LOG.md, tests/test_project.py). Assumes as many launches for a shard as for a whole.
    mlp_launches: float = arg(3, "of a layer's feed-forward, its norm included")
    group_launches: float = arg(4, "of a group's attention, two layers or more of it on a rank")
    group_layer_launches: float = arg(3, "of each layer's feed-forward in a group")
    draft_launches: float = arg(5, "of a draft forward beyond its layers")
    verify_launches: float = arg(3, "of a verify pass beyond its layers")
    round_launches: float = arg(2, "of a round beyond its forwards")


@dataclass(frozen=True)
class Gpu:
    bandwidth: float  # TB/s, data sheet
    memory: float  # GB, data sheet
    bus: float  # GB/s of a ring over 8


GPUS = {
    "h200": Gpu(4.8, 141, 360),  # bus: 0.8 of NVLink 4's 450 a direction, an assumption
    "a100": Gpu(2.0, 80, 235),  # bus: NCCL's own cap for compute capability 8.0 (same file)
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that determine its time."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: float
    vocab: int
    attention_launches: float = 4  # per layer, including the norm
    tied: bool = False  # the head is the embedding

    @property
    def attention(self) -> float:
        """Elements of a layer's attention."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp(self) -> float:
        return 3 * self.hidden * self.inner

    @property
    def head(self) -> float:
        return self.hidden * self.vocab

    @property
    def elements(self) -> float:
        """Elements read by a step."""
        return self.layers * (self.attention + self.mlp) + self.head

    @property
    def stored(self) -> float:
        """`elements`, plus the embedding unless it is the head."""
        return self.elements + (0 if self.tied else self.head)


SHAPES = {  # Llama 3's config.json
    "70b": Shape(80, 8192, 64, 8, 128, 28672, 128256),
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
}


# --- cost of a forward


@dataclass(frozen=True)
class Cost:
    bytes: float = 0.0  # read by the busiest rank
    launches: float = 0.0  # kernels, without collectives
    wire: float = 0.0  # us of collectives
    calls: float = 0.0  # collectives

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Cost)))

    def __mul__(self, times: float) -> "Cost":
        return Cost(*(getattr(self, f.name) * times for f in dataclasses.fields(Cost)))

    def us(self, i: Inputs, engine: str) -> float:
        device = self.bytes / (i.bandwidth * 1e6) + self.launches * i.node_us + self.wire
        return max(device, (self.launches + self.calls) * i.host_us) if engine == "eager" else device


def all_reduce(i: Inputs, ranks: int, size: float) -> Cost:
    """All-reduce of `size` bytes: 2(R - 1) / R of them over each link."""
    return _ring(i, ranks, 2 * (ranks - 1), size)


def all_gather(i: Inputs, ranks: int, size: float) -> Cost:
    """All-gather into `size` bytes on every rank: (R - 1) / R of them over each link."""
    return _ring(i, ranks, ranks - 1, size)


def _ring(i: Inputs, ranks: int, steps: int, size: float) -> Cost:
    if ranks == 1:
        return Cost()
    return Cost(wire=i.base_us + steps * i.step_us + steps / ranks * size / (i.bus * i.bus_share * 1e3), calls=1)


def tensor_parallel(i: Inputs, m: Shape, rows: int, ranks: int, beyond: float, gathered: float) -> Cost:
    """A forward that ends by gathering `gathered` bytes of candidates on each rank. One rank runs in sequence."""
    launches = m.layers * (m.attention_launches + i.mlp_launches) + beyond
    sums = all_reduce(i, ranks, rows * m.hidden * 2) * (2 * m.layers)
    return Cost(m.elements * 2 / ranks, launches) + sums + all_gather(i, ranks, gathered * ranks)


def layer_parallel(i: Inputs, m: Shape, rows: int, ranks: int) -> Cost:
    """A draft forward by specker's schedule, split over ranks by specker's rule."""
    total = Cost(m.head * 2, i.draft_launches)
    schedule = Schedule.parallel(m.layers, i.parallel)
    for n, share in _shares(schedule, ranks):
        launches = i.group_launches + n * i.group_layer_launches if n > 1 else m.attention_launches + i.mlp_launches
        total += Cost(2 * (share * m.attention + n * m.mlp), launches)
        if n > 1:
            total += all_gather(i, ranks, n * rows * m.hidden * 2)
    # One launch repeats the rows for all groups. `draft_launches` includes the sum after the last layer.
    return total + Cost(launches=1.0 if any(len(group) > 1 for group in schedule.groups) else 0.0)


def _shares(schedule: Schedule, ranks: int) -> list[tuple[int, int]]:
    """Per group, the number of layers and how many of them the busiest rank attends for."""
    return [(len(g), max(Counter(schedule.owner(l, ranks) for l in g).values())) for g in schedule.groups]


def verify(i: Inputs, target: Shape, rows: int, ranks: int) -> Cost:
    """A target forward, the round's other launches, and its broadcast. One row means plain decoding."""
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows: beyond {MAX_ROWS} flops take longer than bytes, and this model has no flops")
    gathered = rows * (target.vocab * 2 / ranks if i.logits else 8)
    forward = tensor_parallel(i, target, rows, ranks, i.verify_launches + i.round_launches, gathered)
    return forward + _ring(i, ranks, ranks - 1, 0)


def drafts(i: Inputs, draft: Shape, ranks: int, layout: str) -> tuple[Cost, Cost]:
    """The cost of the exact forward, and of each other one."""
    over = ranks if layout == "tensor" else 1
    exact, other = (
        tensor_parallel(i, draft, rows, over, i.draft_launches, rows * i.width * 8) for rows in (i.depth + 1, i.width)
    )
    return exact, layer_parallel(i, draft, i.width, ranks) if layout == "layer-parallel" else other


def project(i: Inputs, target: Shape, draft: Shape, ranks: int, layout: str, engine: str) -> Row:
    """Microseconds of one round, and the resulting speeds. `i` is resolved."""
    exact, other = (cost.us(i, engine) for cost in drafts(i, draft, ranks, layout))
    stage = exact + (i.depth - 1) * other
    one, all_ = (cost.us(i, engine) for cost in drafts(i, draft, ranks, "replicated"))
    check, plain = (verify(i, target, rows, ranks).us(i, engine) for rows in (i.width * i.depth + 1, 1))
    tau = i.tau * (i.keep if layout == "layer-parallel" else 1)
    gb = 2e-9 * (target.stored / ranks + draft.stored / (ranks if layout == "tensor" else 1))
    return {
        "model": True,
        "ranks": ranks,
        "layout": layout,
        "engine": engine,
        "draft_forward_us": other,
        "draft_us": stage,
        "verify_us": check,
        "round_us": stage + check,
        "plain_us": plain,
        "tau": tau,
        "tokens_per_second": tau / (stage + check) * 1e6,
        "speedup": tau * plain / (stage + check),
        "draft_speedup": (one + (i.depth - 1) * all_) / stage,
        "weights_gb": gb,
        "fits": gb < 0.9 * i.memory,  # assumes a tenth for K/V and the rest
    }


# --- solvers for a required speedup


def attention_share(i: Inputs, m: Shape, ranks: int, target: float, stage: bool) -> float:
    """The share of a sequential forward that attention must take for layers side by side to be `target` times as fast
    if nothing else costs time: for a forward, or for the draft stage with its exact forward. Above 1: impossible."""
    saved = sum(n - share for n, share in _shares(Schedule.parallel(m.layers, i.parallel), ranks)) / m.layers
    if stage:
        saved *= (i.depth - 1) / i.depth
    return (1 - 1 / target) / saved if saved else float("inf")


def solve(f: Callable[[float], float], target: float, low: float, high: float) -> float | None:
    """x in [low, high] with f(x) = target for a rising f; `low` if f(low) is enough, None if f(high) is too small."""
    if f(low) >= target:
        return low
    if f(high) < target:
        return None
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) >= target else (middle, high)
    return high


def host_for(i: Inputs, target: Shape, draft: Shape, ranks: int, speedup: float) -> float | None:
    """us of an eager launch at which layer-parallel drafting is `speedup` times as fast as in sequence."""
    how = (target, draft, ranks, "layer-parallel", "eager")
    return solve(lambda x: project(replace(i, host_us=x), *how)["draft_speedup"], speedup, 0, 1000)


def launches_for(i: Inputs, target: Shape, draft: Shape, ranks: int, speedup: float) -> float | None:
    """Launches of a layer's attention (a group's grows by as many) with the same effect at i.host_us."""

    def with_(x: float) -> float:
        more = replace(i, group_launches=i.group_launches + x - draft.attention_launches)
        shape = replace(draft, attention_launches=x)
        return project(more, target, shape, ranks, "layer-parallel", "eager")["draft_speedup"]

    return solve(with_, speedup, draft.attention_launches, 1000)


def tau_for(row: Row, speedup: float) -> float:
    """The acceptance length that gives `speedup` over plain decoding."""
    return speedup * row["round_us"] / row["plain_us"]


def room_for(row: Row, speedup: float) -> float:
    """us that drafting may take for `speedup` at the row's acceptance length; negative: impossible."""
    return row["tau"] * row["plain_us"] / speedup - row["verify_us"]
