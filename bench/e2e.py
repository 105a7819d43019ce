"""End to end: the gain from speculation and the overhead of the runtime, on any pair.

    python bench/e2e.py                                                      # the bundled family, its held-out prompts
    python bench/e2e.py --target DIR --questions bench/spec_bench.jsonl --ways ar,lookup,del
    python bench/e2e.py --target DIR --draft DIR --questions FILE --categories summarization,rag
    python bench/e2e.py --target FILE.gguf --draft FILE.gguf --questions bench/coder_prompts.jsonl --transformers false

One process decodes the prompts: held-out code for the bundled family, otherwise the first turns of `--questions`, or
its conversations (`messages`), through the target's chat template; a `prompt` is continued as it is. The configurations
take turns at every prompt; medians of rounds are reported.
Configurations: `ar`, `draft`, chains and trees of it, every other strategy with its defaults, transformers' `generate`,
its assisted generation with the models of `draft` and its prompt lookup, in the same dtype. A strategy that needs a
checkpoint or a file that is neither given nor bundled is left out. Speedup over `ar` should be

    tau / (k * c + v)      tau: acceptance length, k: draft tokens, c: a draft step over a target step,
                           v: a verify pass (with accept and commit) over a target step

so c, v and the predicted speedup are printed with the measured one. Tokens must equal those of `ar` (in float32, ties
within rounding are allowed and counted). A configuration that fails this or cannot run here has a row with the reason
and no times. Distinct 4-grams are printed because looping text raises acceptance.
"""

import dataclasses
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import HfArgumentParser

import specker
from bench import harness
from specker.checkpoints.checkpoint import read_config
from specker.runtime import strategies
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine, Generation
from specker.zoo import Family

SHAPES: dict[str, dict[str, Any]] = {
    "ar": {"strategy": "ar"},
    "draft": {},
    "draft chain 2": {"draft_tokens": 2},
    "draft chain 3": {"draft_tokens": 3},
    "draft chain 4": {"draft_tokens": 4},
    "draft tree 2x4": {"tree": "2x4"},
    "draft tree 4x4": {"tree": "4x4"},
    **{name: {"strategy": name} for name in ("vocabtrim", "easyspec", "diffuspec", "del", "del+vocabtrim", "lookup")},
    **{name: {"strategy": name} for name in ("draft+lookup", "vocabtrim+lookup")},
}
HF = ("transformers generate", "transformers assisted", "transformers lookup")


@dataclass(frozen=True)
class Given:
    """The models and prompts of a bench."""

    prompts: int = field(default=16, metadata={"help": "number of prompts"})
    target: str | None = field(default=None, metadata={"help": "checkpoint; default: the bundled family"})
    draft: str | None = field(default=None, metadata={"help": "its draft; default: the bundled one for the target"})
    deep_draft: str | None = field(default=None, metadata={"help": "its draft for easyspec; default: --draft"})
    diffusion_draft: str | None = field(default=None, metadata={"help": "its draft for diffuspec"})
    vocab_scores: str | None = field(default=None, metadata={"help": "its score file for vocabtrim"})
    questions: str | None = field(
        default=None, metadata={"help": "JSON lines with `turns`, `messages` or `prompt`, for --target"}
    )
    categories: str = field(default="", metadata={"help": "comma-separated: only questions of these categories"})
    max_context: int | None = None
    max_new_tokens: int = 96
    device: str = "cpu"
    dtype: str = "float32"
    save: bool = field(default=True, metadata={"help": "append to bench/results"})

    @property
    def family(self) -> Family | None:
        """The bundled files for the target."""
        return specker.zoo.CODE if self.target is None else specker.zoo.family_of(read_config(self.target))

    @property
    def drafts(self) -> dict[str, str | Path]:
        """The draft of each strategy that has one, given or bundled."""
        given = {"draft": self.draft, "easyspec": self.deep_draft or self.draft, "diffuspec": self.diffusion_draft}
        chosen: dict[str, str | Path] = {strategy: path for strategy, path in given.items() if path is not None}
        return chosen if self.family is None or self.draft is not None else {**self.family.drafts, **chosen}

    @property
    def scores(self) -> str | Path | None:
        """The score file of the target, given or bundled."""
        bundled = None if self.family is None else self.family.vocab_scores
        return self.vocab_scores or (bundled if bundled is not None and bundled.is_file() else None)

    @property
    def name(self) -> str:
        """The target's name, "" for the bundled one. A GGUF file has an ending, and its converted folder a hash."""
        return "" if self.target is None else re.sub(r"(-[0-9a-f]{16}|\.gguf)$", "", Path(self.target).name)


@dataclass(frozen=True)
class Args(Given):
    ways: str = field(default="", metadata={"help": "comma-separated: only these configurations"})
    rounds: int = 5
    temperatures: str = field(default="0,0.7", metadata={"help": "comma-separated"})
    transformers: bool = field(default=True, metadata={"help": "time transformers' generate too"})


FRESH: Any = {"prefix_cache": "off"}  # every run computes its prompts, as transformers does


@dataclass(frozen=True)
class Decoded:
    tokens: list[list[int]]
    stats: Stats | None  # None for transformers

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


def share_target(engines: Sequence[Engine]) -> None:
    """Share one target and cache, since the engines decode in turn and idle memory may be paged out."""
    base = engines[0]
    for engine in engines[1:]:
        engine.target, engine.model, engine.cache = base.target, base.model, base.cache
        if engine.drafter is not None and strategies.of(engine.options).self_drafting:
            engine.drafter.model, engine.drafter.cache = base.model, base.cache
        engine.loop.target = base.model
        engine.loop.cache = engine.loop.slots.cache = base.cache


def distinct4(texts: Sequence[list[int]]) -> float:
    """Distinct 4-grams of tokens within each text, over all 4-grams."""
    grams = [[tuple(t[i : i + 4]) for i in range(len(t) - 3)] for t in texts]
    return sum(len(set(g)) for g in grams) / max(1, sum(map(len, grams)))


def ours(engine: Engine, prompts: list[list[int]], count: int, temperature: float) -> Decoded:
    done: list[Generation] = [engine.generate(p, count, temperature=temperature) for p in prompts]
    return Decoded([g.tokens for g in done], sum((g.stats for g in done), Stats()))


def joined(parts: Sequence[Decoded]) -> Decoded:
    """Joins the results of prompts decoded one by one."""
    stats = [part.stats for part in parts if part.stats is not None]
    return Decoded([text for part in parts for text in part.tokens], sum(stats, Stats()) if stats else None)


class Transformers:
    """The same checkpoints in transformers."""

    def __init__(self, args: Args, eos: tuple[int, ...]):
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.target = self.model(args, args.target or specker.zoo.path("code-target"))
        draft = args.drafts.get("draft")
        self.draft = None if draft is None else self.model(args, draft)
        self.args, self.eos = args, list(eos) or None

    def model(self, args: Args, source: str | Path) -> Any:
        """A model of transformers; a draft that shares the target's embedding gets the target's."""
        from transformers import AutoModelForCausalLM

        shared = read_config(source).shares
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, args.dtype), device_map=None)
        if "embed_tokens" in shared:
            loaded.set_input_embeddings(self.target.get_input_embeddings())
            loaded.tie_weights()
        if "lm_head" in shared:
            loaded.set_output_embeddings(self.target.get_output_embeddings())
        return loaded.eval().to(args.device)

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], temperature: float, way: str) -> Decoded:
        how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": self.args.max_new_tokens}
        if temperature > 0:
            how |= {"temperature": temperature, "top_k": 0}
        if way == "transformers assisted":
            how["assistant_model"] = self.draft
        elif way == "transformers lookup":
            how["prompt_lookup_num_tokens"] = 10  # its documentation's example
        tokens = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.args.device)
            out = self.target.generate(
                ids, attention_mask=torch.ones_like(ids), eos_token_id=self.eos, pad_token_id=0, **how
            )
            tokens.append(out[0, len(prompt) :].tolist())
        return Decoded(tokens, None)


class WrongTokens(SystemExit):
    """Tokens differ from plain decoding; ends a bench that does not catch it."""


def differing(engine: Engine, prompts: list[list[int]], got: Decoded, want: Decoded, args: Given, how: dict) -> int:
    """The number of texts that differ from `ar` within rounding; WrongTokens if rounding does not explain one."""
    count = 0
    for prompt, ours_, theirs in zip(prompts, got.tokens, want.tokens, strict=True):
        if ours_ != theirs:
            generation = Generation(ours_, "", Stats(), "length")
            result = engine.check(prompt, generation, args.max_new_tokens, **how)
            if not result.ok:
                raise WrongTokens(f"bench: {result.message}; no timing of a wrong answer is worth keeping")
            count += 1
    return count


def row_of(bench: str, way: str, temperature: float, args: Any, timings: dict[str, Any]) -> dict[str, Any]:
    """The fields of every end-to-end row; `timings` holds all configurations, including `ar`."""
    timing = timings[way]
    done: Decoded = timing.last
    speed, plain = done.count / timing.median, timings["ar"].last.count / timings["ar"].median
    return {
        "bench": bench,
        "way": way,
        "temperature": temperature,
        "dtype": args.dtype,
        "device": args.device,
        "prompts": len(done.tokens),
        "tokens": done.count,
        **timing.row(),
        "tokens_per_second": speed,
        "over_ar": speed / plain,
    }


def bench(args: Args, temperature: float, engines: dict[str, Engine], prompts: list[list[int]], hf: Any) -> list[dict]:
    how = {"temperature": temperature}
    ways: dict[str, Any] = {
        name: lambda prompt, e=engine: ours(e, [prompt], args.max_new_tokens, temperature)
        for name, engine in engines.items()
    }
    for name in HF if hf is not None else ():
        if wanted(name, args) and (hf.draft is not None or name != "transformers assisted"):
            ways[name] = lambda prompt, name=name: hf.decode([prompt], temperature, name)
    about = about_of(args) | {"temperature": temperature}
    reasons = {name: reason for name, way in ways.items() if (reason := reason_not(lambda w=way: w(prompts[0])))}
    ways = {name: way for name, way in ways.items() if name not in reasons}
    timings = harness.measure_each(ways, prompts, args.rounds)
    timings = {name: dataclasses.replace(timing, last=joined(timing.last)) for name, timing in timings.items()}
    plain: Decoded = timings["ar"].last
    assert plain.stats is not None
    step = _step(plain.stats)
    rows = []
    for name, timing in timings.items():
        done: Decoded = timing.last
        row = about | row_of("e2e", name, temperature, args, timings) | {"distinct_4grams": distinct4(done.tokens)}
        row["over_ar_rounds"] = timing.times_as_fast(timings["ar"])
        if (s := done.stats) is not None:
            row |= {"acceptance_length": s.acceptance_length, "accepted_per_position": s.accepted_per_position}
            if name != "ar":
                try:
                    row["differing_within_rounding"] = differing(engines[name], prompts, done, plain, args, how)
                except WrongTokens as error:
                    reasons[name] = str(error)
                    continue
            if s.drafted:
                k = s.drafted / s.rounds
                c, v = s.seconds["draft"] / s.drafted / step, _step(s) / step
                row |= {"k": k, "c": c, "v": v, "predicted": s.acceptance_length / (k * c + v)}
        rows.append(row)
    return rows + [{**about, "way": name, "reason": reason} for name, reason in reasons.items()]


def about_of(args: Args) -> dict[str, Any]:
    """The fields that all rows of a run share."""
    models = {} if args.target is None else {"target": args.name, "categories": args.categories}
    return {"bench": "e2e", **models, "dtype": args.dtype, "device": args.device}


def wanted(way: str, args: Args) -> bool:
    return not args.ways or way == "ar" or way in args.ways.split(",")


def engines_of(args: Args) -> dict[str, Engine]:
    """An engine for each configuration that the given or bundled files allow."""
    drafts, engines = args.drafts, {}
    for name, shape in SHAPES.items():
        options: dict[str, Any] = {"strategy": "draft", **shape}
        if not wanted(name, args):
            continue
        parts = options["strategy"].split("+")
        needs_draft, trims = parts[0] not in ("ar", "del", "lookup"), "vocabtrim" in parts
        if args.target is not None:
            draft = drafts.get("draft" if parts[0] == "vocabtrim" else parts[0]) if needs_draft else None
            if needs_draft and draft is None:
                continue
            options |= {"target": args.target, "draft": draft}
            options |= {"vocab_scores": args.vocab_scores} if trims else {}
        engines[name] = specker.load(
            device=args.device, dtype=args.dtype, max_context=args.max_context, **options, **FRESH
        )
        share_target([engines["ar"], engines[name]])  # at once: memory need not hold a target for each
    return engines


def prompts_of(args: Given, plain: Engine) -> list[list[int]]:
    """Token ids of the prompts, cut where the context leaves no room for the new tokens."""
    if args.target is None:
        prompts = [plain.encode(row["prompt"]) for row in specker.zoo.heldout()]
    elif args.questions is None:
        sys.exit("bench: --target needs --questions, a file of JSON lines with `turns`, `messages` or `prompt`")
    else:
        lines = Path(args.questions).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if not args.categories or row.get("category") in args.categories.split(",")]
        prompts = [encoded(row, plain) for row in rows[: args.prompts]]
    return [prompt[-(plain.max_context - args.max_new_tokens) :] for prompt in prompts[: args.prompts]]


def encoded(row: dict[str, Any], plain: Engine) -> list[int]:
    """Token ids of a `prompt` as it is, or of a conversation through the chat template."""
    if "prompt" in row:
        return plain.encode(row["prompt"])
    return plain.encode_chat(row.get("messages") or [{"role": "user", "content": row["turns"][0]}])


def reason_not(call: Callable[[], Any]) -> str:
    """Why `call` fails on this machine, with a traceback on stderr; "" if it succeeds."""
    try:
        call()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return ""


def _step(stats: Stats) -> float:
    """Seconds of a round outside prefill and drafting."""
    return sum(stats.seconds[name] for name in ("verify", "accept", "commit")) / stats.rounds


def show(rows: list[dict], temperature: float) -> None:
    columns = ("way", "tokens/s", "over ar", "tau", "k", "c", "v", "predicted", "distinct 4-grams", "differ")
    table = harness.table_of(temperature, columns)

    def number(row: dict, key: str, digits: int) -> str:
        return f"{row[key]:.{digits}f}" if key in row else ""

    for row in rows:
        if "reason" in row:
            table.add_row(row["way"], *[""] * 8, row["reason"])
            continue
        table.add_row(
            row["way"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['over_ar']:.2f}",
            *(number(row, key, 2) for key in ("acceptance_length", "k", "c", "v", "predicted", "distinct_4grams")),
            str(row.get("differing_within_rounding", "")),
        )
    Console(width=120).print(table)


def main() -> None:
    args = HfArgumentParser(Args).parse_args_into_dataclasses()[0]
    if unknown := set(args.ways.split(",")) - {"", *SHAPES, *HF}:
        sys.exit(f"bench: --ways has {', '.join(sorted(unknown))}; there are {', '.join((*SHAPES, *HF))}")
    engines = engines_of(args)
    plain = engines["ar"]
    rows = []
    for name, engine in list(engines.items()):
        if engine.captures and (reason := reason_not(engine.warmup)):
            rows.append(about_of(args) | {"way": name, "reason": reason})
            del engines[name]
    if args.save and rows:
        harness.save("e2e", rows, args.device)
    prompts = prompts_of(args, plain)
    hf = Transformers(args, plain.target.config.eos_ids) if args.transformers else None
    for temperature in map(float, args.temperatures.split(",")):
        if "ar" not in engines:  # no baseline
            break
        new = bench(args, temperature, engines, prompts, hf)
        show(new, temperature)
        rows += new
        if args.save:  # after each temperature, so that an interrupt keeps the rows
            print(harness.save("e2e", new, args.device))
    if not args.save:
        print(json.dumps(dataclasses.asdict(args)))
    failed = dict.fromkeys(row["way"] for row in rows if "reason" in row)
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
