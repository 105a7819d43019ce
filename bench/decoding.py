"""What the end-to-end benches share: the models and prompts of a run, decoding in turns, and the fields of a row."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import specker
from bench import harness
from bench.harness import Timing
from specker.checkpoints.checkpoint import read_config
from specker.runtime import strategies
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine, Generation
from specker.zoo import Family

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
    quantize: str = field(default="", metadata={"help": "as of specker; default: as the checkpoint is"})
    save: bool = harness.save_flag()

    @property
    def source(self) -> str | Path:
        """The target's checkpoint."""
        return self.target or specker.zoo.path("code-target")

    @property
    def family(self) -> Family | None:
        """The bundled files for the target."""
        return specker.zoo.CODE if self.target is None else specker.zoo.family_of(read_config(self.target))

    @property
    def drafts(self) -> dict[str, str | Path]:
        """The draft of each strategy that has one, given or bundled."""
        given = {"draft": self.draft, "easyspec": self.deep_draft or self.draft}
        given |= {"diffuspec": self.diffusion_draft, "dflash": self.draft}
        chosen: dict[str, str | Path] = {strategy: path for strategy, path in given.items() if path is not None}
        return chosen if self.family is None or self.draft is not None else {**self.family.drafts, **chosen}

    def draft_of(self, strategy: str) -> str | Path | None:
        """The draft that a strategy takes, if it takes one and there is one."""
        own = strategy.split("+")[0]
        return self.drafts.get("draft" if own == "vocabtrim" else own)

    def load(self, strategy: str, **options: Any) -> Engine:
        """An engine of a strategy, which computes every prompt anew, as transformers does, and remembers no answer: the
        same prompts are decoded several times."""
        how: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "max_context": self.max_context}
        if self.quantize:
            how["quantize"] = self.quantize
        if "vocabtrim" in strategy and self.vocab_scores is not None:
            how["vocab_scores"] = self.vocab_scores
        if "lookup" in strategy.split("+"):
            how["lookup_share"] = "off"
        return specker.load(self.source, self.draft_of(strategy), strategy, prefix_cache="off", **how | options)

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
        engine.loop.target = engine.loop.prompts.target = base.model
        engine.loop.cache = engine.loop.slots.cache = base.cache
        drafts = None if engine.drafter is None else engine.drafter.cache
        caches = [base.cache, *([] if drafts in (None, base.cache) else [drafts])]
        engine.loop.slots.caches = engine.loop.batches.caches = caches


def ours(engine: Engine, prompts: list[list[int]], count: int, temperature: float) -> Decoded:
    done: list[Generation] = [engine.generate(p, count, temperature=temperature) for p in prompts]
    return Decoded([g.tokens for g in done], sum((g.stats for g in done), Stats()))


def joined(parts: Sequence[Decoded]) -> Decoded:
    """Joins the results of prompts decoded one by one."""
    stats = [part.stats for part in parts if part.stats is not None]
    return Decoded([text for part in parts for text in part.tokens], sum(stats, Stats()) if stats else None)


def ways_of(engines: dict[str, Engine], args: Given, temperature: float) -> dict[str, Callable[[list[int]], Decoded]]:
    """A function for each engine that decodes one prompt."""
    return {
        name: lambda prompt, e=engine: ours(e, [prompt], args.max_new_tokens, temperature)
        for name, engine in engines.items()
    }


def measured(
    ways: dict[str, Any], prompts: Sequence[Any], rounds: int, warmup: int = 1, seconds: float = math.inf
) -> dict[str, Timing]:
    """Seconds of each way that decodes one of `prompts`, in turns at each; `last` is one `Decoded` of all of them.
    `seconds`: see `harness.measure_each`."""
    timings = harness.measure_each(ways, prompts, rounds, warmup, seconds)
    return {name: dataclasses.replace(timing, last=joined(timing.last)) for name, timing in timings.items()}


class Transformers:
    """The same checkpoints in transformers."""

    def __init__(self, args: Given, eos: tuple[int, ...], drafts: bool = True):
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.target = self.model(args, args.source)
        draft = args.drafts.get("draft") if drafts else None
        self.draft = None if draft is None else self.model(args, draft)
        self.args, self.eos = args, list(eos) or None

    def model(self, args: Given, source: str | Path) -> Any:
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
    def decode(self, prompts: list[list[int]], temperature: float, size: int = 1, **more: Any) -> Decoded:
        """`size` prompts at once, padded on the left: without continuous batching, a batch ends with its longest text.
        `more`: for `generate`."""
        how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": self.args.max_new_tokens}
        if temperature > 0:
            how |= {"temperature": temperature, "top_k": 0}
        tokens = []
        for i in range(0, len(prompts), size):
            part = prompts[i : i + size]
            longest = max(map(len, part))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in part], device=self.args.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part], device=self.args.device)
            out = self.target.generate(ids, attention_mask=mask, eos_token_id=self.eos, pad_token_id=0, **how, **more)
            tokens += out[:, longest:].tolist()
        return Decoded(tokens, None)

    def ways(self) -> dict[str, dict[str, Any]]:
        """What `generate` is given in each configuration."""
        ways: dict[str, dict[str, Any]] = {name: {} for name in HF}
        ways["transformers assisted"] = {"assistant_model": self.draft}
        ways["transformers lookup"] = {"prompt_lookup_num_tokens": 10}  # its documentation's example
        return {name: how for name, how in ways.items() if self.draft is not None or "assistant_model" not in how}


class WrongTokens(SystemExit):
    """Tokens differ from plain decoding; ends a bench that does not catch it."""


def differing(
    engine: Engine, prompts: list[list[int]], got: Decoded, want: Decoded, count: int, temperature: float
) -> int:
    """The number of texts that differ from `ar` within rounding; WrongTokens if rounding does not explain one."""
    found = 0
    for prompt, ours_, theirs in zip(prompts, got.tokens, want.tokens, strict=True):
        if ours_ != theirs:
            generation = Generation(ours_, "", Stats(), "length")
            result = engine.check(prompt, generation, count, temperature=temperature)
            if not result.ok:
                raise WrongTokens(f"bench: {result.message}; no timing of a wrong answer is worth keeping")
            found += 1
    return found


def row_of(
    bench: str,
    way: str,
    temperature: float,
    args: Given,
    timings: dict[str, Timing],
    engine: Engine | None,
    prompts: list[list[int]],
) -> dict[str, Any]:
    """The fields of every end-to-end row. `timings`: of all configurations, `ar` among them; `engine`: None for
    transformers. WrongTokens if an engine's tokens are not those of `ar`."""
    timing, plain = timings[way], timings["ar"]
    done: Decoded = timing.last
    speed = done.count / timing.median
    row = {
        "bench": bench,
        **({"target": args.name} if args.name else {}),
        "way": way,
        "temperature": temperature,
        "dtype": args.dtype,
        "device": args.device,
        "prompts": len(done.tokens),
        "tokens": done.count,
        **timing.row(),
        "tokens_per_second": speed,
        "over_ar": speed / (plain.last.count / plain.median),
        "over_ar_rounds": timing.times_as_fast(plain),
    }
    if engine is not None:
        row["acceptance_length"] = done.stats.acceptance_length
        if engine.strategy != "ar":
            row["differing_within_rounding"] = differing(
                engine, prompts, done, plain.last, args.max_new_tokens, temperature
            )
    return row


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
