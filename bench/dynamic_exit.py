"""Self-speculation, on the bundled target or another one: DEL, fixed exits, the +-1 rule and a confidence threshold.

The full sweep of fixed settings (exit layer E, draft tokens g) needs no decoding per setting. Accepted drafts are the
text itself, so it is enough to know which tokens of `ar`'s text each layer predicts. The best settings of the sweep are
also decoded, and must have the acceptance that the sweep predicts. tokens/layer is the paper's eTPL,

    tokens / (L + g E) summed over rounds; tokens/layer+head also counts the LM head of a draft step.

The configurations take turns at every prompt; rows go to bench/results/<machine>/dynamic_exit.jsonl.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from bench import harness
from bench.decoding import Given, Transformers, measured, prompts_of, row_of, share_target, ways_of
from specker.kernels.sample_rows import sample_rows
from specker.model.decoder import Final, forward
from specker.options import Sampling
from specker.runtime.engine import Engine

LENGTHS = range(18)


@dataclass(frozen=True)
class Args(Given):
    prompts: int = field(default=40, metadata={"help": "prompts"})
    max_new_tokens: int = 48
    temperatures: str = "0,0.7"
    rounds: int = 1
    transformers: bool = field(default=True, metadata={"help": "time transformers' assistant_early_exit too (T 0)"})


@torch.inference_mode()
def matches(engine: Engine, prompt: list[int], text: list[int], temperature: float) -> torch.Tensor:
    """[L - 1, n] bool: whether layer l's token (l = 1..L-1) after each position is the next token of `text` [n]."""
    model, cache = engine.model, engine.cache
    cache.take(0, len(prompt) + len(text))
    rows = cache.after([0], [len(prompt) + len(text) - 1])
    ids = torch.tensor([*prompt, *text[:-1]], device=model.device)
    depths = tuple(range(1, len(model.layers)))
    out = forward(model, cache, rows, model.embed_tokens(ids), aux_layers=depths)
    cache.release(0)
    kept, s = slice(len(prompt) - 1, None), Sampling(temperature=temperature)
    said = [
        sample_rows(
            model.logits(Final(out.aux_hidden_states[n][kept])), s.temperature, 0, 1.0, s.seed, rows.positions[kept]
        )
        for n in depths
    ]
    return torch.stack(said).cpu() == torch.tensor(text)


def fixed(match: list[torch.Tensor], layers: int, head: float) -> list[dict[str, float]]:
    """For every (E, g) over all texts: acceptance length, tokens per loaded layer with and without the head."""
    found = []
    for E in range(1, layers):
        for g in LENGTHS:
            tokens = rounds = drafted = 0
            for text in match:
                right, at = text[E - 1].tolist(), 0
                while at < len(right):
                    room = min(g, len(right) - at - 1)
                    accepted = 0
                    while accepted < room and right[at + accepted]:
                        accepted += 1
                    at, tokens, rounds, drafted = at + accepted + 1, tokens + accepted + 1, rounds + 1, drafted + room
            loads = layers * rounds + drafted * E
            row = {"exit": E, "g": g, "acceptance_length": tokens / rounds}
            found.append({**row, "etpl": tokens / loads, "etpl_head": tokens / (loads + drafted * head)})
    return found


def bench(args: Args, temperature: float, plain: Engine, prompts: list[list[int]]) -> list[dict]:
    layers = plain.target.config.num_layers
    head = args.load("del").policies.head_cost
    texts = [plain.generate(p, args.max_new_tokens, temperature=temperature).tokens for p in prompts]
    sweep = fixed([matches(plain, p, t, temperature) for p, t in zip(prompts, texts, strict=True)], layers, head)
    best = max(sweep, key=lambda row: row["etpl"])
    best_head = max(sweep, key=lambda row: row["etpl_head"])
    exits = {"best fixed": best, "best fixed with head": best_head}
    engines = {"ar": plain}
    for name, row in exits.items():
        how = {"policy": "fixed", "exit_layer": int(row["exit"]), "draft_tokens": max(1, int(row["g"]))}
        engines[f"{name}: E {row['exit']} g {row['g']}"] = args.load("del", **how)
    for rule in ("plus-minus-one", "draft-and-verify"):
        engines[f"{rule}, E {best_head['exit']}"] = args.load("del", policy=rule, exit_layer=int(best_head["exit"]))
    for name, how in (
        ("del", {}),
        ("del, paper's cost", {"exit_cost": "layers"}),
        ("del-length", {"policy": "del-length"}),
    ):
        engines[name] = args.load("del", **how)
    if args.scores is not None:
        scores = {"vocab_scores": str(args.scores), "vocab_keep": "2048"}
        engines["del+vocabtrim 2048"] = args.load("del+vocabtrim", **scores)
    share_target(list(engines.values()))
    ways: dict[str, Any] = ways_of(engines, args, temperature)
    if args.transformers and temperature == 0:
        hf = Transformers(args, plain.target.config.eos_ids, drafts=False)
        how = {"assistant_early_exit": int(best_head["exit"])}
        ways[f"transformers early exit {best_head['exit']}"] = lambda prompt: hf.decode([prompt], 0.0, **how)
        hf.decode(prompts[:1], 0.0, **how)
    # Tracing costs some microseconds per round, so traced runs are not timed; they serve as warm-up.
    traces = {name: trace(engine, prompts, args.max_new_tokens, temperature) for name, engine in engines.items()}
    timings = measured(ways, prompts, args.rounds, warmup=0)
    rows = []
    for name, timing in timings.items():
        engine = engines.get(name)
        row = row_of("dynamic_exit", name, temperature, args, timings, engine, prompts)
        if engine is not None:
            s = timing.last.stats
            seconds = sum(s.seconds.values()) - s.seconds["prefill"]
            row |= {"watch_share": s.seconds["watch"] / seconds, "lengths": s.lengths, "exits": s.exits}
            loads = sum(layers + len(r["draft"]) * r["exit"] for r in traces[name])
            heads = sum(len(r["draft"]) for r in traces[name]) * (engine.policies.head_cost or head)
            emitted = sum(len(r["tokens"]) for r in traces[name])
            row |= {"etpl": emitted / loads, "etpl_head": emitted / (loads + heads)}
        rows.append(row)
    sweeping = {"bench": "dynamic_exit", "temperature": temperature}
    return rows + [{**sweeping, "way": f"sweep E {r['exit']} g {r['g']}", **r} for r in sweep]


def trace(engine: Engine, prompts: list[list[int]], count: int, temperature: float) -> list[dict]:
    found: list[dict] = []
    for n, prompt in enumerate(prompts):
        more = {"prompt": n, "start": len(prompt)}
        engine.trace = lambda row, more=more: found.append({**row, **more})
        engine.generate(prompt, count, temperature=temperature)
    engine.trace = None
    return found


def show(rows: list[dict], temperature: float) -> None:
    columns = ("way", "tokens/s", "over ar", "tau", "tokens/layer", "with head", "watching", "mean g", "mean E")
    table = harness.table_of(temperature, columns)

    def mean(histogram: dict[int, int]) -> str:
        return f"{sum(n * c for n, c in histogram.items()) / sum(histogram.values()):.1f}" if histogram else ""

    for row in rows:
        if "median" not in row:
            continue
        table.add_row(
            row["way"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_ar']:.2f}",
            f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else "",
            f"{row['etpl']:.4f}" if "etpl" in row else "",
            f"{row['etpl_head']:.4f}" if "etpl" in row else "",
            f"{row['watch_share']:.1%}" if row.get("watch_share") else "",
            mean(row.get("lengths", {})),
            mean(row.get("exits", {})),
        )
    Console(width=130).print(table)


def main() -> None:
    args = harness.arguments(Args)
    plain = args.load("ar")
    prompts = prompts_of(args, plain)
    harness.report("dynamic_exit", args, lambda temperature: bench(args, temperature, plain, prompts), show)


if __name__ == "__main__":
    main()
