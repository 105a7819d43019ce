"""Self-speculation on the bundled target: DEL, fixed exits, the +-1 rule and a confidence threshold.

The full sweep of fixed settings (exit layer E, draft tokens g) needs no decoding per setting. Accepted drafts are the
text itself, so it is enough to know which tokens of `ar`'s text each layer predicts. The best settings of the sweep are
also decoded, and must have the acceptance that the sweep predicts. tokens/layer is the paper's eTPL,

    tokens / (L + g E) summed over rounds; tokens/layer+head also counts the LM head of a draft step.

The configurations take turns at every prompt; rows and pictures go to bench/results/<machine>/dynamic_exit.*.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from transformers import HfArgumentParser

import specker
from bench import harness, plot
from bench.e2e import Decoded, differing, joined, ours, row_of, share_target
from specker.kernels.sample import sample_rows
from specker.model.decoder import Final, forward
from specker.options import Sampling
from specker.runtime.engine import Engine

LENGTHS = range(18)


@dataclass
class Args:
    prompts: int = field(default=40, metadata={"help": "held-out prompts"})
    max_new_tokens: int = 48
    temperatures: str = "0,0.7"
    rounds: int = 1
    transformers: bool = field(default=True, metadata={"help": "time transformers' assistant_early_exit too (T 0)"})
    save: bool = True
    device: str = "cpu"
    dtype: str = "float32"


@torch.inference_mode()
def matches(engine: Engine, prompt: list[int], text: list[int], temperature: float) -> torch.Tensor:
    """[L - 1, n] bool: whether layer l's token (l = 1..L-1) after each position is the next token of `text` [n]."""
    model, cache = engine.model, engine.cache
    rows = cache.after([0], [len(prompt) + len(text) - 1])
    ids = torch.tensor([*prompt, *text[:-1]], device=model.device)
    depths = tuple(range(1, len(model.layers)))
    out = forward(model, cache, rows, model.embed_tokens(ids), aux_layers=depths)
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


def load(args: Args, **options: Any) -> Engine:
    return specker.load(
        specker.zoo.path("code-target"), device=args.device, dtype=args.dtype, prefix_cache="off", **options
    )


class EarlyExit:
    """transformers' self-speculation with the same checkpoint."""

    def __init__(self, args: Args, exit: int, eos: tuple[int, ...]):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        source, dtype = specker.zoo.path("code-target"), getattr(torch, args.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval().to(args.device)
        self.args, self.exit, self.eos = args, exit, list(eos) or None

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]]) -> Decoded:
        tokens = []
        how = {"max_new_tokens": self.args.max_new_tokens, "do_sample": False, "assistant_early_exit": self.exit}
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.args.device)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), eos_token_id=self.eos, pad_token_id=0, **how
            )
            tokens.append(out[0, len(prompt) :].tolist())
        return Decoded(tokens, None)


def bench(args: Args, temperature: float, prompts: list[list[int]]) -> tuple[list[dict], dict[str, list[dict]]]:
    plain = load(args, strategy="ar")
    layers = plain.target.config.num_layers
    head = load(args, strategy="del").policies.head_cost
    texts = [plain.generate(p, args.max_new_tokens, temperature=temperature).tokens for p in prompts]
    sweep = fixed([matches(plain, p, t, temperature) for p, t in zip(prompts, texts, strict=True)], layers, head)
    best = max(sweep, key=lambda row: row["etpl"])
    best_head = max(sweep, key=lambda row: row["etpl_head"])
    exits = {"best fixed": best, "best fixed with head": best_head}
    engines = {"ar": plain}
    for name, row in exits.items():
        how = {"policy": "fixed", "exit_layer": int(row["exit"]), "draft_tokens": max(1, int(row["g"]))}
        engines[f"{name}: E {row['exit']} g {row['g']}"] = load(args, strategy="del", **how)
    for rule in ("plus-minus-one", "draft-and-verify"):
        engines[f"{rule}, E {best_head['exit']}"] = load(
            args, strategy="del", policy=rule, exit_layer=int(best_head["exit"])
        )
    for name, how in (
        ("del", {}),
        ("del, paper's cost", {"exit_cost": "layers"}),
        ("del-length", {"policy": "del-length"}),
    ):
        engines[name] = load(args, strategy="del", **how)
    scores = {"vocab_scores": str(specker.zoo.CODE.vocab_scores), "vocab_keep": "2048"}
    engines["del+vocabtrim 2048"] = load(args, strategy="del+vocabtrim", **scores)
    share_target(list(engines.values()))
    ways: dict[str, Any] = {
        name: lambda prompt, e=engine: ours(e, [prompt], args.max_new_tokens, temperature)
        for name, engine in engines.items()
    }
    if args.transformers and temperature == 0:
        hf = EarlyExit(args, int(best_head["exit"]), plain.target.config.eos_ids)
        ways[f"transformers early exit {best_head['exit']}"] = lambda prompt: hf.decode([prompt])
        hf.decode(prompts[:1])
    # Tracing costs some microseconds per round, so traced runs are not timed; they serve as warm-up.
    traces = {name: trace(engine, prompts, args.max_new_tokens, temperature) for name, engine in engines.items()}
    timings = harness.measure_each(ways, prompts, args.rounds, warmup=0)
    timings = {name: dataclasses.replace(t, last=joined(t.last)) for name, t in timings.items()}
    rows = []
    for name, timing in timings.items():
        done: Decoded = timing.last
        row = row_of("dynamic_exit", name, temperature, args, timings)
        row |= {"over_ar_rounds": timing.times_as_fast(timings["ar"])}
        if done.stats is not None:
            s, engine = done.stats, engines[name]
            seconds = sum(s.seconds.values()) - s.seconds["prefill"]
            row |= {"acceptance_length": s.acceptance_length, "watch_share": s.seconds["watch"] / seconds}
            row |= {"lengths": s.lengths, "exits": s.exits}
            if engine.strategy != "ar":
                how = {"temperature": temperature}
                row["differing_within_rounding"] = differing(
                    engine,
                    prompts,
                    done,
                    timings["ar"].last,
                    args,
                    how,  # type: ignore[arg-type]
                )
            loads = sum(layers + len(r["draft"]) * r["exit"] for r in traces[name])
            heads = sum(len(r["draft"]) for r in traces[name]) * (engine.policies.head_cost or head)
            emitted = sum(len(r["tokens"]) for r in traces[name])
            row |= {"etpl": emitted / loads, "etpl_head": emitted / (loads + heads)}
        rows.append(row)
    rows += [
        {"bench": "dynamic_exit", "way": f"sweep E {r['exit']} g {r['g']}", "temperature": temperature, **r}
        for r in sweep
    ]
    return rows, traces


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


def draw(rows: list[dict], title: str) -> Any:
    """The sweep as one line per exit layer, DEL as horizontal lines; one column per temperature."""
    from matplotlib.figure import Figure

    temperatures = sorted({row["temperature"] for row in rows})
    figure = Figure(figsize=(7 * len(temperatures), 7), layout="constrained")
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(2, len(temperatures), squeeze=False)
    for column, temperature in enumerate(temperatures):
        mine = [row for row in rows if row["temperature"] == temperature]
        for axis, key, label in zip(grid[:, column], ("etpl", "etpl_head"), ("layer", "layer, with head"), strict=True):
            for E in sorted({r["exit"] for r in mine if "g" in r}):
                points = [(r["g"], r[key]) for r in mine if r.get("exit") == E and "g" in r]
                axis.plot(*zip(*points, strict=True), linewidth=1, label=f"E {E}", color=str(0.85 - 0.07 * E))
            for n, name in enumerate(("del", "del-length")):
                level = next(r[key] for r in mine if r["way"] == name)
                axis.axhline(level, color=f"C{n}", linestyle="--", label=name)
            axis.set_xlabel("draft tokens g", fontsize=9)
            axis.set_ylabel(f"tokens per {label}", fontsize=9)
            axis.set_title(f"T {temperature:g}", fontsize=9)
        grid[0, column].legend(fontsize=6, ncols=2)
    return figure


def draw_choices(traces: list[dict], title: str) -> Any:
    """DEL's exit layer and draft length over the position in the text, for the first eight prompts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    above, below = figure.subplots(2, 1, sharex=True)
    for n in range(8):
        mine = [r for r in traces if r["prompt"] == n]
        above.step(
            [r["position"] - r["start"] for r in mine],
            [r["exit"] for r in mine],
            where="post",
            linewidth=0.9,
            alpha=0.8,
        )
        below.step(
            [r["position"] - r["start"] for r in mine],
            [len(r["draft"]) for r in mine],
            where="post",
            linewidth=0.9,
            alpha=0.8,
        )
    above.set_ylabel("exit layer")
    below.set_ylabel("tokens drafted")
    below.set_xlabel("position in the text")
    return figure


def main() -> None:
    args = HfArgumentParser(Args).parse_args_into_dataclasses()[0]
    plain = load(args, strategy="ar")
    prompts = [plain.encode(row["prompt"]) for row in specker.zoo.heldout()[: args.prompts]]
    rows, traces = [], {}
    for temperature in map(float, args.temperatures.split(",")):
        new, traces = bench(args, temperature, prompts)
        show(new, temperature)
        rows += new
    if args.save:
        path = harness.save("dynamic_exit", rows, args.device)
        title = f"self-speculation, the bundled target, {harness.machine(args.device)}"
        plot.save(draw(rows, title), path.with_suffix(""))
        plot.save(draw_choices(traces["del"], f"{title}, T {temperature:g}"), path.with_name("dynamic_exit_choices"))
        print(path)
    else:
        print(json.dumps(dataclasses.asdict(args)))


if __name__ == "__main__":
    main()
