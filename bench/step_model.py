"""Models the time of a step of bench/decode.py's cases on one H200, before and after each change to its launches.

    python bench/step_model.py [--shapes 8b,1b] [--start_us 1.5] [any other constant]

A model, not a measurement: nothing was timed. A step is a sequence of launches in a CUDA graph. Each one takes

    start + ramp + max(memory / bandwidth, l2 / l2_bandwidth, n / restored)   a kernel that streams weights or K/V
    start + small + l2 / l2_bandwidth                                         a kernel on activations only

and `last` more if its last program merges what the others left. Partials larger than the L2 cache go to memory and
come back at `bandwidth`.
`start`: from the end of a kernel to the start of the next. `ramp`: until the first bytes arrive, and while the last
programs end. With programmatic dependent launch a start costs `early`, and prefetching weights leaves half of the ramp.
`memory`: weights, and K/V of the context, read once. `l2`: those, x for every tile of the weight, and the float32 sums
of splits, by the kernels' own tile tables. n: weights in eight or four bits, whose restoring takes instructions: a
conversion, a fused multiply-add and half a packing each, about 32 weights a clock and SM. Writes
bench/results/step_model.md.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from bench import plot, shapes
from bench.decode import CASES, DRAFTED, Case
from specker.kernels import attention, linear, project
from specker.paths import write_file

RESULT = plot.RESULTS / "step_model.md"
WARNING = "Model, not measurement."
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Constants:
    bandwidth: float = field(default=4.3, metadata={"help": "TB/s that a read of memory reaches on an H200"})
    l2_bandwidth: float = field(default=7.0, metadata={"help": "TB/s from the L2 cache; an assumption"})
    start_us: float = field(default=2.0, metadata={"help": "from one kernel's end to the next one's start in a graph"})
    early_us: float = field(default=0.5, metadata={"help": "the same with programmatic dependent launch"})
    ramp_us: float = field(default=2.0, metadata={"help": "of a stream's first bytes and its last programs"})
    last_us: float = field(
        default=2.5, metadata={"help": "of the last program: the count of arrivals, and a merge of partials from L2"}
    )
    l2_mb: float = field(default=50.0, metadata={"help": "MB of the L2 cache that partials may take, of an H200's 50"})
    small_us: float = field(default=2.0, metadata={"help": "of a kernel on activations: two round trips to L2"})
    restored: float = field(
        default=7.0, metadata={"help": "10^12 weights a second from eight or four bits, by instruction throughput"}
    )


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that determine its launches, from its config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    qkv_bias: bool
    bits: float = 16.0  # of a layer's weight, scales included
    head_bits: float = 16.0

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        names = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size"
        sizes = (config[name] for name in (*names.split(), "vocab_size"))
        return cls(*sizes, qkv_bias=config["model_type"] == "qwen2")

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class Changes:
    """What the launches of a step look like; the defaults are how they were before."""

    splits_in_norms: bool = False  # residual_merge adds up the splits of o and down
    one_attention: bool = False  # tree_attention merges its own splits
    one_projection: bool = False  # kv_project instead of row_linear and kv_calibrate
    float_logits: bool = False  # the head writes float32
    few_outside: bool = False  # start_rows and settle: OUTSIDE's second number
    norm_in_last_sum: bool = False  # the last sum comes with the final norm
    early: bool = False  # programmatic dependent launch


@dataclass(frozen=True)
class Launch:
    name: str
    memory: float = 0.0  # bytes of weights and K/V; 0: a kernel on activations
    l2: float = 0.0  # bytes
    prefetches: bool = False
    restored: float = 0.0  # weights of eight or four bits
    partials: float = 0.0  # bytes of float32 partials that it writes or reads
    merges: bool = False  # its last program reads the partials that all have written

    def us(self, c: Constants, early: bool) -> float:
        start, ramp = (c.early_us if early else c.start_us), c.ramp_us / (2 if early and self.prefetches else 1)
        spilled = self.partials * (1 + self.merges) if self.partials > c.l2_mb * 1e6 else 0.0
        memory = (self.memory + spilled) / c.bandwidth
        stream = max(memory, self.l2 / c.l2_bandwidth, self.restored / c.restored) / 1e6
        if not self.memory:
            return start + c.small_us + stream
        return start + ramp + stream + c.last_us * self.merges


# Launches of a round outside its forwards, before and now, recorded without a GPU (tests/test_rounds.py).
OUTSIDE = {"ar": (8, 2), "verify": (8, 2), "round": (21, 2)}
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("before", {}),
    ("norms add up splits", {"splits_in_norms": True}),
    ("attention in one launch", {"one_attention": True}),
    ("kv_project", {"one_projection": True}),
    ("float32 logits from the head", {"float_logits": True}),
    ("start_rows, settle and no copies", {"few_outside": True}),
    ("programmatic dependent launch", {"early": True}),
    ("final norm in the last sum", {"norm_in_last_sum": True}),
)


def product(name: str, O: int, E: int, rows: int, merged: bool, bits: float, silu: bool = False) -> Iterator[Launch]:
    """row_linear, and its merge unless what follows adds up the splits."""
    m, n, _, _, splits = linear.tiles(BF16, O, E, 90, split=not merged)
    weight, tiles = bits / 8 * O * E, -(-O // n)
    sums = 4.0 * splits * rows * O if splits > 1 or not merged else 0.0
    l2 = weight * -(-rows // m) + 2 * tiles * rows * E + sums
    yield Launch(name, weight, l2, prefetches=True, restored=O * E * -(-rows // m) if bits < 16 else 0.0)
    if splits > 1 and merged:
        yield Launch(f"{name} merge", l2=sums + 2 * rows * (O // 2 if silu else O))


def layer(s: Shape, rows: int, context: int, how: Changes) -> Iterator[Launch]:
    """The launches of one layer, in order."""
    x = 2.0 * rows * s.hidden
    norm = Launch("norm", l2=4 * x)
    yield norm
    if how.one_projection:
        size = s.heads, s.kv_heads, s.head_dim
        sizes = project._variant(BF16, 1, *size, s.hidden, False, s.qkv_bias, 90).constexprs
        weight, count = s.bits / 8 * s.qkv * s.hidden, s.qkv // s.head_dim
        sums = 4.0 * sizes["SPLITS"] * rows * s.qkv
        times = -(-rows // sizes["M"])
        restored = s.qkv * s.hidden * times if s.bits < 16 else 0.0
        l2 = weight * times + count * x + 2 * sums
        yield Launch("kv_project", weight, l2, True, restored, sums, merges=sizes["SPLITS"] > 1)
    else:
        yield from product("qkv", s.qkv, s.hidden, rows, True, s.bits)
        yield Launch("kv_calibrate", l2=4.0 * rows * s.qkv)
    unit = attention.split_unit(s.kv_heads)
    splits = attention.split_count(context + rows, unit)
    kv = 4.0 * (context + rows) * s.kv_heads * s.head_dim
    pairs = rows * s.heads // s.kv_heads
    partial = 4.0 * splits * rows * s.heads * s.head_dim if splits > 1 else 0.0
    merges = how.one_attention and splits > 1
    l2 = kv * -(-pairs // 64) + partial * (1 + merges)
    yield Launch("attention", kv, l2, partials=partial, merges=merges)
    if splits > 1 and not how.one_attention:
        yield Launch("attention merge", l2=partial, partials=partial)
    yield from product("o", s.hidden, s.heads * s.head_dim, rows, not how.splits_in_norms, s.bits)
    yield norm
    yield from product("gate_up", 2 * s.inner, s.hidden, rows, True, s.bits, silu=True)
    yield from product("down", s.hidden, s.inner, rows, not how.splits_in_norms, s.bits)


def forward(s: Shape, rows: int, context: int, how: Changes, drafts: bool = False) -> list[Launch]:
    """Embedding, layers, the last sum, the final norm, and the head: a product, or for a draft vocab_topk and its
    merge."""
    out = [Launch("embedding", l2=4.0 * rows * s.hidden)]
    out += [launch for _ in range(s.layers) for launch in layer(s, rows, context, how)]
    if how.norm_in_last_sum:
        out += [Launch("last sum and norm", l2=8.0 * rows * s.hidden)]
    else:
        out += [Launch("last sum", l2=6.0 * rows * s.hidden), Launch("norm", l2=4.0 * rows * s.hidden)]
    out += product("head", s.vocab, s.hidden, rows, True, s.head_bits)
    if drafts:
        out += [Launch("top-k merge")]
    elif not how.float_logits:
        out += [Launch("logits to float32", l2=6.0 * rows * s.vocab)]
    return out


def outside(count: int, rows: int, vocab: int) -> list[Launch]:
    """Launches of a round outside the forwards; one of them reads the logits."""
    return [Launch("sample", l2=4.0 * rows * vocab), *[Launch("small")] * (count - 1)]


def row(case: Case, rows: int, c: Constants, how: Changes, **bits: float) -> dict[str, Any]:
    """Launches, bytes and time of one step of `case` with `rows` rows of the target. `bits`: of Shape."""
    s = dataclasses.replace(Shape.of(shapes.SHAPES[case.shape]), **bits)  # type: ignore[arg-type]
    launches = forward(s, rows, case.context, how) + outside(OUTSIDE[case.kind][how.few_outside], rows, s.vocab)
    if case.draft:
        d = Shape.of(shapes.SHAPES[case.draft])
        for n in (DRAFTED + 1, *[1] * (DRAFTED - 1)):
            launches += forward(d, n, case.context, how, drafts=True)
    us = sum(launch.us(c, how.early) for launch in launches)
    read = sum(launch.memory for launch in launches)
    return {
        "case": case.name + (f", {rows} rows" if case.kind == "verify" else ""),
        "a_layer": len(list(layer(s, rows, case.context, how))),
        "launches": len(launches),
        "gb": read / 1e9,
        "ms": us / 1e3,
        "share": read / (us * 1e6) / c.bandwidth,
    }


def cases(names: list[str]) -> Iterator[tuple[Case, int]]:
    """The cases of bench/decode.py that the model covers, with the target's rows."""
    for case in CASES:
        if case.shape in names:
            for n in {"ar": (1,), "verify": (8, 64), "round": (DRAFTED + 1,)}.get(case.kind, ()):
                yield case, n


@dataclass(frozen=True)
class Run:
    shapes: str = field(default="8b,1b,32b", metadata={"help": "comma-separated: only cases of these shapes"})
    save: bool = field(default=True, metadata={"help": "write bench/results/step_model.md"})


BITS: dict[str, dict[str, float]] = {  # of weights with their scales; row scales are left out
    "bfloat16": {},
    "int8 or fp8, a scale for each row": {"bits": 8.0, "head_bits": 8.0},
    "int4, scale and shift for each 32; int8 head": {"bits": 5.0, "head_bits": 8.0},
    "int4, a scale for each 128; bfloat16 head": {"bits": 4.125},
}


def quantised(names: list[str], c: Constants) -> Iterator[list[str]]:
    """Rows of the table of weights in eight and four bits, with all changes made."""
    after = Changes(**{name: value for _, change in STEPS for name, value in change.items()})
    for case, rows in cases(names):
        if case.draft:
            continue
        base = row(case, rows, c, after)
        for name, bits in BITS.items():
            r = row(case, rows, c, after, **bits)
            yield [
                r["case"],
                name,
                f"{r['gb']:.2f}",
                f"{r['ms']:.3f}",
                f"{r['share']:.0%}",
                f"{base['ms'] / r['ms']:.2f}",
            ]


def main() -> None:
    c, run = HfArgumentParser((Constants, Run)).parse_args_into_dataclasses()
    console, page = Console(width=120, highlight=False), [WARNING, "", "# A step's launches", ""]
    console.print(WARNING)
    about = ", ".join(f"{f.name} {getattr(c, f.name):g}" for f in dataclasses.fields(c))
    page += [f"Written by `python bench/step_model.py`; how times come about stands there. Constants: {about}.", ""]
    columns = "change", "launches a layer", "launches", "GB", "ms", "of the bandwidth"
    for case, rows in cases(run.shapes.split(",")):
        how, lines = Changes(), []
        for name, change in STEPS:
            how = dataclasses.replace(how, **change)
            r = row(case, rows, c, how)
            lines.append(
                [name, str(r["a_layer"]), str(r["launches"]), f"{r['gb']:.2f}", f"{r['ms']:.3f}", f"{r['share']:.0%}"]
            )
        table = Table(title=f"{r['case']}. {WARNING}")
        for n, column in enumerate(columns):
            table.add_column(column, justify="right" if n else "left")
        for line in lines:
            table.add_row(*line)
        console.print(table)
        page += [f"## {r['case']}", "", "| " + " | ".join(columns) + " |", "|--" + "|--:" * (len(columns) - 1) + "|"]
        page += ["| " + " | ".join(line) + " |" for line in lines] + [""]
    columns = "case", "weights", "GB", "ms", "of the bandwidth", "times bfloat16"
    page += ["## Weights in eight and four bits", "", "| " + " | ".join(columns) + " |", "|--|--" + "|--:" * 4 + "|"]
    table = Table(title=f"Weights in eight and four bits. {WARNING}")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n > 1 else "left")
    for line in quantised(run.shapes.split(","), c):
        table.add_row(*line)
        page.append("| " + " | ".join(line) + " |")
    console.print(table)
    if run.save:
        write_file(RESULT, "\n".join(page))
        print(RESULT)


if __name__ == "__main__":
    main()
