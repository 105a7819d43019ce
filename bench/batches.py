"""Total tokens per second of `ar` and of `draft` for several batch sizes, and of transformers' batched `generate` with
the same target.

All prompts are decoded to the same length. The configurations take turns; medians of rounds are reported. Tokens must
equal plain decoding one by one (in float32 ties within rounding are allowed and counted), or the bench ends.

A step reads every weight once for any batch. While memory bandwidth is the limit, B sequences therefore cost as much as
one. Speculation uses the same idle arithmetic, so it gains less in larger batches. The bundled target's weights (22 MB
in float32) fit into a CPU's caches, where arithmetic is the limit from a few rows on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

import specker
from bench import harness
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine, Generation

WAYS: dict[str, dict[str, Any]] = {"ar": {"strategy": "ar"}, "draft": {"strategy": "draft", "draft_tokens": 4}}


@dataclass(frozen=True)
class Args:
    sizes: str = field(default="1,2,4,8", metadata={"help": "batch sizes, comma-separated"})
    prompts: int = field(default=16, metadata={"help": "held-out prompts"})
    max_new_tokens: int = 64
    rounds: int = 5
    temperature: float = 0.0
    threads: int = 2
    transformers: bool = field(default=True, metadata={"help": "time transformers' generate too"})
    save: bool = field(default=True, metadata={"help": "append to bench/results"})


class Transformers:
    """The bundled target in transformers, with padded batches."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.model = AutoModelForCausalLM.from_pretrained(specker.zoo.path("code-target"), dtype=torch.float32).eval()

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], size: int, count: int, temperature: float) -> list[list[int]]:
        """Pads on the left. Without continuous batching, a batch ends with its longest text."""
        how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": count, "min_new_tokens": count}
        if temperature > 0:
            how |= {"temperature": temperature, "top_k": 0}
        out = []
        for i in range(0, len(prompts), size):
            part = prompts[i : i + size]
            longest = max(map(len, part))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in part])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
            tokens = self.model.generate(ids, attention_mask=mask, pad_token_id=0, **how)
            out += tokens[:, longest:].tolist()
        return out


def rounding(engine: Engine, prompts: list[list[int]], got: list[Generation], want: list[Generation], how: dict) -> int:
    """The number of texts that differ from plain decoding within rounding; SystemExit if rounding does not explain
    one."""
    count = 0
    for prompt, ours, theirs in zip(prompts, got, want, strict=True):
        result = engine.compare(prompt, ours, theirs, **how)
        if not result.ok:
            raise SystemExit(f"bench: {result.message}; no timing of a wrong answer is worth keeping")
        count += result.identical is False
    return count


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    torch.set_num_threads(args.threads)
    sizes, how = [int(n) for n in args.sizes.split(",")], {"temperature": args.temperature}
    engines = {
        (way, n): specker.load(device="cpu", batch_size=n, prefix_cache="off", **WAYS[way])
        for way in WAYS
        for n in sizes
    }
    plain = specker.load(strategy="ar", device="cpu")
    prompts = [plain.encode(row["prompt"]) for row in specker.zoo.heldout()[: args.prompts]]
    count = args.max_new_tokens
    want = [plain.generate(prompt, count, **how) for prompt in prompts]

    def ours(engine: Engine) -> list[Generation]:
        return engine.generate(prompts, count, **how)

    ways: dict[str, Callable[[], Any]] = {f"{w} B {n}": partial(ours, engine) for (w, n), engine in engines.items()}
    if args.transformers:
        theirs = Transformers()
        for n in sizes:
            ways[f"transformers B {n}"] = partial(theirs.decode, prompts, n, count, args.temperature)
    timings = harness.measure(ways, args.rounds)
    first = next(iter(timings.values()))
    rows = []
    table = Table("way", "tokens/s", "over ar B 1", "p20", "p80", "acceptance length", "flips")
    for (name, timing), key in zip(timings.items(), [*engines, *(("transformers", n) for n in sizes)], strict=False):
        row: dict[str, Any] = {"way": key[0], "batch_size": key[1], "prompts": len(prompts), **how, **timing.row()}
        row["over_ar_1"] = timing.times_as_fast(first)
        if key in engines:
            stats = sum((g.stats for g in timing.last), Stats())
            row |= {"tokens": stats.tokens, "acceptance_length": stats.acceptance_length}
            row["flips"] = rounding(engines[key], prompts, timing.last, want, how)
        else:
            row["tokens"] = sum(map(len, timing.last))
        row["tokens_per_second"] = row["tokens"] / timing.median
        rows.append(row)
        ratio = row["over_ar_1"]
        numbers = [f"{ratio[n]:.2f}" for n in ("median", "p20", "p80")]
        more = [f"{row.get('acceptance_length', 1):.2f}", str(row.get("flips", ""))]
        table.add_row(name, f"{row['tokens_per_second']:.0f}", *numbers, *more)
    Console().print(table)
    if args.save:
        print(harness.save("batches", [{"max_new_tokens": count, **row} for row in rows]))


if __name__ == "__main__":
    main()
