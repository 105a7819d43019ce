"""Mixtures of experts: how many experts do the rows of a verify pass read, what does the pass cost, and what does
speculation gain?

Each row chooses k of X experts. If the router chooses all equally often and independently, R rows read

    X (1 - (1 - k / X)^R)

of them, so rows are not free: with the number of experts grow the bytes that bound a pass. The first table measures a
random model on this machine: passes over R tokens from all over the vocabulary, in turns, with the experts that they
read. The second one is computed: the bytes of a round of R rows of real shapes in bfloat16, without K/V, and the most
that speculation can gain by them if a draft token is right with probability `acceptance`: for free drafts, and for a
draft model of 0.6B parameters (Qwen3) that reads its weights for each draft token.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import specker
from bench import harness
from bench.shapes import SHAPES
from specker.checkpoints.parse import parse_config
from specker.model.config import ModelConfig
from specker.model.decoder import Output, experts_read, forward
from specker.model.prefill import prefill
from specker.runtime.engine import Engine, pass_elements

TEXT = 64  # tokens before the passes


@dataclass(frozen=True)
class Args:
    rows: str = field(default="1,2,3,4,6,8,12,16,32", metadata={"help": "rows of a pass, comma-separated"})
    experts: int = field(default=64, metadata={"help": "experts of the measured model; 0: measure nothing"})
    chosen: int = 4
    hidden: int = 512
    width: int = field(default=256, metadata={"help": "intermediate size of an expert"})
    layers: int = 6
    shapes: str = field(default="30b-a3b,8x7b", metadata={"help": "computed shapes (bench/shapes.py)"})
    acceptance: float = 0.8
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 2
    rounds: int = 15
    save: bool = harness.save_flag()


def config_of(content: dict[str, Any]) -> ModelConfig:
    with TemporaryDirectory() as folder:
        return parse_config(Path(folder), None, None, content)[0]


def small(args: Args) -> dict[str, Any]:
    """config.json of the measured model."""
    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "num_attention_heads": args.hidden // 64}
    sizes |= {"num_key_value_heads": args.hidden // 128, "head_dim": 64, "moe_intermediate_size": args.width}
    sizes |= {"num_experts": args.experts, "num_experts_per_tok": args.chosen, "vocab_size": 4096}
    return SHAPES["30b-a3b"] | sizes | {"max_position_embeddings": 1024}


@torch.inference_mode()
def passes(engine: Engine, rows: int) -> Output:
    """A verify pass over a chain of tokens from all over the vocabulary."""
    model, cache = engine.model, engine.cache
    tokens = torch.tensor([(7919 * i + 1) % model.config.vocab_size for i in range(rows)], device=model.device)
    return forward(model, cache, cache.place([TEXT + 1], 1, 0, rows), model.embed_tokens(tokens))


def measured(args: Args, counts: list[int]) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(small(args)))
        engine = specker.load(folder, strategy="ar", load="dummy", dtype=args.dtype, device=args.device)
    engine.cache.take(0, TEXT + max(counts) + 1)
    prefill(engine.model, engine.cache, [(104729 * i) % 4096 for i in range(TEXT)])
    timings = harness.measure({str(n): partial(passes, engine, n) for n in counts}, args.rounds, warmup=2)
    config, first, out = engine.model.config, timings[str(counts[0])], []
    experts = config.layer.experts
    assert experts is not None
    for n in counts:
        timing = timings[str(n)]
        read = float(experts_read(engine.model, [timing.last])) if engine.model.counts_experts else None
        row = {"rows": n, "experts": experts.count, "chosen": experts.chosen, "read": read, "of": experts.read(n)}
        row |= {"over_first": 1 / timing.times_as_fast(first)["median"], "dtype": args.dtype}
        row["elements_over_first"] = pass_elements(config, n) / pass_elements(config, counts[0])
        out.append(row | timing.row())
    return out


def computed(name: str, counts: list[int], acceptance: float) -> list[dict[str, Any]]:
    c, draft = config_of(SHAPES[name]), config_of(SHAPES["0.6b"])
    one, side, out = pass_elements(c, 1), pass_elements(draft, 1), []
    assert c.layer.experts is not None
    for n in counts:
        tokens = (1 - acceptance**n) / (1 - acceptance) if acceptance < 1 else n
        whole = pass_elements(c, n)
        row = {"shape": name, "rows": n, "of": c.layer.experts.read(n), "gigabytes": 2e-9 * whole, "tokens": tokens}
        out.append(row | {"free": tokens * one / whole, "drafted": tokens * one / (whole + (n - 1) * side)})
    return out


def show(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print `columns`: key -> heading."""
    table = Table(title=title)
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row[key] for key in columns]
        table.add_row(*("" if x is None else str(x) if isinstance(x, int) else f"{x:.2f}" for x in cells))
    Console(width=110).print(table)


def main() -> None:
    args = harness.arguments(Args)
    torch.set_num_threads(args.threads)
    counts = [int(n) for n in args.rows.split(",")]
    rows: list[dict[str, Any]] = []
    if args.experts:
        rows += measured(args, counts)
        about = f"{args.layers} layers of {args.experts} experts, {args.chosen} a row, {harness.machine(args.device)}"
        heads = {"rows": "rows", "read": "experts read", "of": "expected", "median": "seconds"}
        heads |= {"over_first": "time over the first", "elements_over_first": "expected bytes over the first"}
        show(about, [row | {"median": 1e3 * row["median"]} for row in rows], heads | {"median": "ms"})
    for name in args.shapes.split(","):
        found = computed(name, counts, args.acceptance)
        heads = {"rows": "rows", "of": "experts", "gigabytes": "GB a pass", "tokens": "tokens a round"}
        heads |= {"free": "gain, free drafts", "drafted": "gain, a draft of 0.6B"}
        show(f"computed: {name} in bfloat16, acceptance {args.acceptance:g}", found, heads)
    if args.save and rows:
        print(harness.save("experts", rows, args.device))


if __name__ == "__main__":
    main()
