"""How long should a step of decoding take on a GPU, and a round of EasySpec on several? A model, not a measurement.

    python bench/project.py [--gpus h200,a100] [--set launch_us=2,tau=4]

A forward of a few rows, batch 1, takes on the busiest of R ranks

    graphs: device = max(weights / bandwidth, restored / restored_rate) + kv / bandwidth + launches * launch_us + wire
    eager:  max(device, (launches + collectives) * host_us)

since an eager host runs ahead of the device unless it is slower. `restored` weights have eight or four bits, and their
conversion takes instructions. Flops hide behind the reads up to about 150 rows on an A100 and 200 on an H200; more than
128 rows are refused. The target is tensor parallel over R: 2 L all-reduces of T * E for T rows and L layers, then a
gather of candidates. The draft is

    replicated      whole on every rank, in sequence, no communication: the paper's baseline, draft TP 1
    tensor          tensor parallel like the target
    layer-parallel  groups of N layers: a rank attends for its share of a group, one all-gather of N * T * E, then all
                    N feed-forwards on every rank; first and last layer and head whole on every rank

A round is one exact catch-up forward (in sequence; depth + 1 rows), depth - 1 forwards of `width` rows by the layout, a
verify pass of width * depth + 1 rows, and a broadcast. Skew between ranks and host work between forwards are ignored,
so times are lower bounds. `--save` writes bench/results/projection.md, and .jsonl with "model": true and the inputs in
each row.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bench import harness, plot
from bench.shapes import SHAPES
from specker.kernels.attention import MERGED
from specker.paths import write_file
from specker.runtime.strategies.easyspec.parallel import Schedule

Row = dict[str, Any]
RESULT = plot.RESULTS / "projection.md"
WARNING = "A model, not a measurement."
PAPER_DRAFT, PAPER_TOTAL = 1.62, 4.17  # arXiv 2502.02493, abstract: "up to", over all its pairs; 8 A100s
MAX_ROWS = 128
LAYOUTS = ("replicated", "tensor", "layer-parallel")
ENGINES = ("eager", "graphs")


def arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Inputs:
    bandwidth: float = arg(0.0, "TB/s of a GPU: 0.9 of the data sheet's, an assumption")
    memory: float = arg(0.0, "GB of a GPU, data sheet")
    bus: float = arg(0.0, "GB/s of a ring over 8 GPUs")
    # A kernel's start takes 2 us, first bytes and last programs 2, and in two kernels of a layer's seven the last
    # program, or a kernel of its own, merges partials in 2.5. With programmatic dependent launch a start takes 0.5, and
    # prefetching weights hides half of the first bytes. All of this is assumed.
    launch_us: float = arg(4.7, "us between the streams of two kernels of a CUDA graph")
    host_us: float = arg(5.0, "us of the host for a launch, eager; an assumption")
    restored_rate: float = arg(7.0, "10^12 weights a second restored from eight or four bits: 32 a clock and SM")
    # NCCL's own estimates, src/graph/tuning.cc (commit 01afd20a): ring, protocol LL over NVLink, 3.6 us and 0.47 us a
    # step, a quarter of the ring's bandwidth. Steps: 2(R - 1) of an all-reduce, R - 1 of an all-gather.
    base_us: float = arg(3.6, "us of a collective")
    step_us: float = arg(0.47, "us of each of a ring's steps")
    bus_share: float = arg(0.25, "of the ring's bandwidth for short messages")
    tau: float = arg(
        5.33, "acceptance length drafted in sequence: the bundled pair's at T 0, easyspec.jsonl, 6 prompts"
    )
    keep: float = arg(1.0, "share of it that layers side by side keep: the bundled pair's")
    depth: int = arg(5, "draft forwards a round, the first of them exact")
    width: int = arg(12, "rows of each forward: the paper's top-k tree")
    parallel: int = arg(4, "layers in a group")
    # Recorded without a GPU (tests/test_project.py). Assumes as many launches for a shard as for a whole.
    attention_launches: float = arg(4, "of a layer's attention, its norm included")
    mlp_launches: float = arg(3, "of a layer's feed-forward, its norm included")
    group_launches: float = arg(4, "of a group's attention, two layers or more of it on a rank")
    draft_launches: float = arg(5, "of a draft forward beyond its layers")
    verify_launches: float = arg(3, "of a verify pass beyond its layers")
    round_launches: float = arg(1, "of a round beyond its forwards; several ranks draw in one more")


GPUS = {
    # bus: 0.8 of NVLink 4's 450 GB/s a direction, an assumption
    "h200": Inputs(bandwidth=0.9 * 4.8, memory=141, bus=360, launch_us=2.6),
    # bus: NCCL's own cap for compute capability 8.0 (same file); no programmatic dependent launch before 9.0
    "a100": Inputs(bandwidth=0.9 * 2.0, memory=80, bus=235),
}


@dataclass(frozen=True)
class Shape:
    """Elements of a decoder's parts."""

    layers: int
    hidden: int
    attention: int  # of a layer
    mlp: int  # of a layer
    head: int
    kv: int  # of all layers, for each column of the context
    tied: bool = False  # the head is the embedding
    sharing: int = 4  # query heads of a KV head

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        layers, hidden, dim = config["num_hidden_layers"], config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        attention, mlp = 2 * hidden * dim * (heads + kv_heads), 3 * hidden * config["intermediate_size"]
        head, kv = hidden * config["vocab_size"], 2 * layers * kv_heads * dim
        return cls(layers, hidden, attention, mlp, head, kv, config["tie_word_embeddings"], heads // kv_heads)

    @property
    def elements(self) -> int:
        """Elements read by a step."""
        return self.layers * (self.attention + self.mlp) + self.head

    def merges(self, rows: int) -> int:
        """Launches of a layer that merge attention's splits for so many rows."""
        return int(rows * self.sharing > MERGED)

    @property
    def stored(self) -> int:
        """`elements`, plus the embedding unless it is the head."""
        return self.elements + (0 if self.tied else self.head)


# --- cost of a forward


@dataclass(frozen=True)
class Cost:
    """Of the busiest rank."""

    weights: float = 0.0  # bytes
    launches: float = 0.0  # kernels, without collectives
    wire: float = 0.0  # us of collectives
    calls: float = 0.0  # collectives
    kv: float = 0.0  # bytes
    restored: float = 0.0  # weights of eight or four bits

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Cost)))

    def us(self, i: Inputs, engine: str) -> float:
        stream = max(self.weights / i.bandwidth, self.restored / i.restored_rate) + self.kv / i.bandwidth
        device = stream / 1e6 + self.launches * i.launch_us + self.wire
        return max(device, (self.launches + self.calls) * i.host_us) if engine == "eager" else device


def ring(i: Inputs, ranks: int, steps: int, size: float, calls: int = 1) -> Cost:
    """Collectives over `size` bytes, of which a step sends 1 / R over each link."""
    if ranks == 1:
        return Cost()
    each = i.base_us + steps * i.step_us + steps / ranks * size / (i.bus * i.bus_share * 1e3)
    return Cost(wire=calls * each, calls=calls)


def forward(i: Inputs, m: Shape, rows: int, ranks: int, beyond: float, candidates: int) -> Cost:
    """A tensor-parallel forward in 16 bits with `beyond` launches outside its layers, which gathers `candidates` (id,
    logit) from each rank."""
    launches = m.layers * (i.attention_launches + m.merges(rows) + i.mlp_launches) + beyond
    reduced = ring(i, ranks, 2 * (ranks - 1), rows * m.hidden * 2, calls=2 * m.layers)
    return Cost(m.elements * 2 / ranks, launches) + reduced + ring(i, ranks, ranks - 1, candidates * 8 * ranks)


def layer_parallel(i: Inputs, m: Shape, rows: int, ranks: int) -> Cost:
    """A draft forward by specker's schedule, split over ranks by specker's rule."""
    schedule = Schedule.parallel(m.layers, i.parallel)
    # One launch repeats the rows for all groups. `draft_launches` includes the sum after the last layer.
    total = Cost(m.head * 2, i.draft_launches + any(len(group) > 1 for group in schedule.groups))
    for group in schedule.groups:
        n, share = len(group), max(Counter(schedule.owner(layer, ranks) for layer in group).values())
        attention = (i.group_launches if n > 1 else i.attention_launches) + m.merges(rows)
        total += Cost(2 * (share * m.attention + n * m.mlp), attention + n * i.mlp_launches)
        if n > 1:
            total += ring(i, ranks, ranks - 1, n * rows * m.hidden * 2)
    return total


def verify(i: Inputs, target: Shape, rows: int, ranks: int) -> Cost:
    """A target forward, the round's other launches, and its broadcast. One row means plain decoding."""
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows: beyond {MAX_ROWS} flops take longer than bytes, and this model has no flops")
    beyond = i.verify_launches + i.round_launches + (ranks > 1)
    return forward(i, target, rows, ranks, beyond, rows) + ring(i, ranks, ranks - 1, 0)


def drafts(i: Inputs, draft: Shape, ranks: int, layout: str) -> tuple[Cost, Cost]:
    """The cost of the exact forward, and of each other one."""
    over = ranks if layout == "tensor" else 1
    exact, other = (forward(i, draft, n, over, i.draft_launches, n * i.width) for n in (i.depth + 1, i.width))
    return exact, layer_parallel(i, draft, i.width, ranks) if layout == "layer-parallel" else other


def plain(i: Inputs, m: Shape, context: int, bits: float = 16, head_bits: float = 16) -> Row:
    """A step of plain decoding on one GPU, in a graph. `bits`: of a layer's weight, scales included."""
    layers = m.elements - m.head
    restored = layers * (bits < 16) + m.head * (head_bits < 16)
    read = replace(verify(i, m, 1, 1), weights=(layers * bits + m.head * head_bits) / 8, kv=2.0 * m.kv * (context + 1))
    us = replace(read, restored=restored).us(i, "graphs")
    size = read.weights + read.kv
    return {"launches": read.launches, "gb": size / 1e9, "ms": us / 1e3, "share": size / (us * 1e6 * i.bandwidth)}


def project(i: Inputs, target: Shape, draft: Shape, ranks: int, layout: str, engine: str) -> Row:
    """Microseconds of one round, and the resulting speeds."""
    exact, other = (cost.us(i, engine) for cost in drafts(i, draft, ranks, layout))
    stage = exact + (i.depth - 1) * other
    one, all_ = (cost.us(i, engine) for cost in drafts(i, draft, ranks, "replicated"))
    check, step = (verify(i, target, rows, ranks).us(i, engine) for rows in (i.width * i.depth + 1, 1))
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
        "plain_us": step,
        "tau": tau,
        "tokens_per_second": tau / (stage + check) * 1e6,
        "speedup": tau * step / (stage + check),
        "draft_speedup": (one + (i.depth - 1) * all_) / stage,
        "weights_gb": gb,
        "fits": gb < 0.9 * i.memory,  # assumes a tenth for K/V and the rest
    }


# --- output

STEP = ("case", "weights", "launches", "GB", "ms", "of the bandwidth", "times bfloat16")
BITS: dict[str, tuple[float, float]] = {  # of weights and head with their scales; row scales are left out
    "bfloat16": (16, 16),
    "int8 or fp8, a scale for each row": (8, 8),
    "int4, scale and shift for each 32; int8 head": (5, 8),
    "int4, a scale for each 128; bfloat16 head": (4.125, 16),
}
ROUND = {
    "R": lambda r: str(r["ranks"]),
    "draft": lambda r: r["layout"],
    "draft forward, us": lambda r: f"{r['draft_forward_us']:.0f}",
    "draft stage, us": lambda r: f"{r['draft_us']:.0f}",
    "verify, us": lambda r: f"{r['verify_us']:.0f}",
    "round, us": lambda r: f"{r['round_us']:.0f}",
    "plain step, us": lambda r: f"{r['plain_us']:.0f}",
    "tokens/s": lambda r: f"{r['tokens_per_second']:.0f}",
    "over plain": lambda r: f"{r['speedup']:.2f}",
    "draft stage over replicated": lambda r: f"{r['draft_speedup']:.2f}",
    "weights, GB a rank": lambda r: f"{r['weights_gb']:.0f}" + ("" if r["fits"] else " (does not fit)"),
}


def steps(i: Inputs) -> Iterator[tuple[str, ...]]:
    """Lines of the table of plain steps."""
    for name in ("8b", "1b", "32b"):
        for context in (512, 8192, 32768):
            found = {kind: plain(i, Shape.of(SHAPES[name]), context, *bits) for kind, bits in BITS.items()}
            for kind, r in found.items():
                speed = f"{found['bfloat16']['ms'] / r['ms']:.2f}"
                numbers = (f"{r['launches']:.0f}", f"{r['gb']:.2f}", f"{r['ms']:.3f}", f"{r['share']:.0%}", speed)
                yield f"{name}, {context}", kind, *numbers


def findings(i: Inputs, target: Shape, draft: Shape, rows: list[Row]) -> list[str]:
    """What limits the gain of the last R in `rows`, all of one engine."""
    ranks, engine = rows[-1]["ranks"], rows[-1]["engine"]
    fitting = {r["ranks"]: r for r in sorted(rows, key=lambda r: r["tokens_per_second"]) if r["fits"]}
    best = ", ".join(f"R {n}: {r['layout']}" for n, r in sorted(fitting.items()))
    last = {row["layout"]: row for row in rows if row["ranks"] == ranks}
    limits = {
        "launches and links were free": replace(i, launch_us=0.0, host_us=0.0, base_us=0.0, step_us=0.0, bus=1e12),
        "launches were all that counts": replace(i, launch_us=1e6, host_us=1e6),
    }
    bounds = {
        case: project(x, target, draft, ranks, "layer-parallel", engine)["draft_speedup"] for case, x in limits.items()
    }
    out = [
        f"Most tokens a second: {best or 'nothing fits'}.",
        f"At R {ranks} the draft stage side by side is {last['layer-parallel']['draft_speedup']:.2f} times as fast as "
        f"replicated (paper: up to {PAPER_DRAFT}); "
        + ", ".join(f"{x:.2f} if {case}" for case, x in bounds.items())
        + ".",
    ]
    for layout, row in last.items():
        tau, free = PAPER_TOTAL * row["round_us"] / row["plain_us"], row["tau"] * row["plain_us"] / row["verify_us"]
        beyond = f", more than the {i.depth + 1} that depth {i.depth} can give" if tau > i.depth + 1 else ""
        needs = f"needs an acceptance length of {tau:.1f}{beyond}"
        out.append(f"The paper's {PAPER_TOTAL}, draft {layout}, {needs}; free drafting gives {free:.2f}.")
    return out


def checked(rows: Iterable[Row]) -> list[str]:
    """Predicted over measured seconds of bench/decode.py's plain steps on a GPU in 16 bits."""
    out = []
    for row in rows:
        gpu = next((name for name in GPUS if name in str(row.get("machine", "")).lower()), None)
        if (
            gpu
            and row.get("bench") == "decode"
            and row.get("way") == "ar"
            and row.get("dtype") in ("bfloat16", "float16")
        ):
            context = int(row["case"].rsplit(" ", 1)[1])
            ms, found = plain(GPUS[gpu], Shape.of(SHAPES[row["shape"]]), context)["ms"], row["median"] * 1e3
            out.append(
                f"{row['machine']}, {row['case']}: {ms:.3f} ms predicted, {found:.3f} measured, {ms / found:.2f}"
            )
    return out or ["no measurement yet"]


def section(
    title: str, about: str, columns: Iterable[str], lines: Iterable[Iterable[str]], said: list[str]
) -> list[str]:
    names = list(columns)
    cells = [names, ["--"] * len(names), *lines]
    return [f"## {title}", "", *([about, ""] if about else []), *(f"| {' | '.join(line)} |" for line in cells), ""] + [
        *(f"* {line}" for line in said),
        *([""] if said else []),
    ]


@dataclass(frozen=True)
class Run:
    gpus: str = arg("h200,a100", "comma-separated")
    pairs: str = arg("70b+8b,70b+1b", "target+draft, comma-separated")
    ranks: str = arg("1,2,4,8", "comma-separated; what stands last is compared with the paper")
    set: str = arg("", "inputs to change, such as launch_us=2,tau=4")
    save: bool = harness.save_flag("write bench/results/projection.*")


def main() -> None:
    run = harness.arguments(Run)
    pairs = (each.split("=") for each in run.set.split(",") if each)
    given = {name: type(getattr(Inputs(), name))(value) for name, value in pairs}
    page = [
        "# What a GPU and several GPUs would do",
        "",
        f"{WARNING} Written by `python bench/project.py`, which says how.",
    ]
    page += ["", "R is how many GPUs; a case names a model and its context.", ""]
    rows: list[Row] = []
    for gpu in run.gpus.split(","):
        if gpu not in GPUS:
            raise ValueError(f"gpu {gpu!r} is not known; there are {', '.join(GPUS)}")
        i = replace(GPUS[gpu], **given)
        page += section(f"{gpu}, a step", WARNING, STEP, steps(i), [])
        for pair in run.pairs.split(","):
            target, draft = (Shape.of(SHAPES[name]) for name in pair.split("+"))
            for engine in ENGINES:
                cases = [(int(ranks), layout) for ranks in run.ranks.split(",") for layout in LAYOUTS]
                mine = [project(i, target, draft, *case, engine) for case in cases]
                rows += [{**row, "gpu": gpu, "pair": pair, "inputs": dataclasses.asdict(i)} for row in mine]
                lines = [[form(row) for form in ROUND.values()] for row in mine]
                said = findings(i, target, draft, mine)
                page += section(f"{gpu}, {pair}, {engine}", WARNING, ROUND, lines, said)
        values = [[f"`{f.name}`", f"{getattr(i, f.name):g}", f.metadata["help"]] for f in dataclasses.fields(i)]
        page += section(f"{gpu}, inputs", "", ("input", "value", ""), values, [])
    committed = [row for folder in sorted(plot.RESULTS.iterdir()) if folder.is_dir() for row in plot.read(folder)]
    page += ["## One GPU, predicted over measured", "", *(f"* {line}" for line in checked(committed))]
    print("\n".join(page))
    if run.save:
        write_file(RESULT, "\n".join(page) + "\n")
        write_file(RESULT.with_suffix(".jsonl"), "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
