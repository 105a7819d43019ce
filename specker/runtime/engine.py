"""An engine: a target, perhaps a drafter, and a strategy composed from them. What `specker.load` (load.py) returns."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from specker import zoo
from specker.config import Options, Sampling, from_kwargs
from specker.runtime import check, strategies
from specker.runtime.check import CheckResult
from specker.runtime.detokenize import Detokenizer
from specker.runtime.dist import Ranks, SharedDrafter, SharedPolicy
from specker.runtime.head import Kept
from specker.runtime.loop import Context, Drafter, decode
from specker.runtime.model import memory
from specker.runtime.model.cache import KVCache
from specker.runtime.model.checkpoint import Checkpoint
from specker.runtime.model.decoder import PREFILL_CHUNK, Model
from specker.runtime.policy import Policy
from specker.runtime.rounds import StaticRounds
from specker.runtime.stats import Stats
from specker.runtime.strategies import vocabtrim
from specker.runtime.strategies.base import SCRATCH, DraftContext, Plan, PolicyContext, Strategy, allocate, linear
from specker.runtime.synthetic import agreements

LOST = "a row's bits then depend on how many rows stand beside it: chains are no longer bit-equal to plain decoding"


@dataclass(frozen=True)
class Chunk:
    """What one round added."""

    tokens: list[int]
    accepted: int  # the first `accepted` of tokens were draft tokens, the rest is the target's own
    pieces: list[tuple[str, bool]]  # the new text in order, and whether it came from a draft token
    stats: Stats  # running totals
    finished: str | None  # None, "stop" (a stop id) or "length"

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


@dataclass(frozen=True)
class Generation:
    tokens: list[int]
    text: str
    stats: Stats
    finished: str


@dataclass
class Engine:
    target: Checkpoint
    draft: Checkpoint | None
    options: Options
    device: torch.device
    dtype: torch.dtype
    target_name: str
    draft_name: str | None
    kept: Kept | None = None  # the rows of the draft's head where it is trimmed (strategy vocabtrim)
    notes: dict[str, str] = field(default_factory=dict)  # what loading decided by itself, by its name in `remarks`
    ranks: Ranks | None = None  # that share the target
    model: Model = field(init=False, repr=False)
    cache: KVCache = field(init=False, repr=False)
    drafter: Drafter | None = field(init=False, repr=False)
    plan: Plan = field(init=False, repr=False)  # what `warmup` runs
    trace: Callable[[dict[str, Any]], None] | None = field(default=None, repr=False)  # called with every round
    _strategy: Strategy = field(init=False, repr=False)
    _policies: PolicyContext = field(init=False, repr=False)
    _rounds_of: StaticRounds | None = field(init=False, repr=False, default=None)
    _agrees: tuple[int, torch.Tensor] | None = field(init=False, repr=False, default=None)  # seed, by position
    _running: Context | None = field(init=False, repr=False, default=None)  # the request that owns the caches

    def __post_init__(self) -> None:
        strategy, ranks = strategies.of(self.options), self.ranks
        self._strategy = strategy
        self.model = Model(self.target, linear=linear(self.options), ranks=ranks)
        self.cache = allocate(self.model, self.options)
        alone = ranks is None or not strategy.drafts or strategy.self_drafting  # else rank 0's drafts are shared
        inner: Any = None
        if alone or (ranks is not None and ranks.drafts):
            inner = strategy.drafter(
                DraftContext(
                    self.options, self.target, self.model, self.cache, self.draft, self.kept, self._bundled, ranks
                )
            )
        self.drafter = inner if alone or ranks is None else SharedDrafter(inner, ranks)
        cost = 0.0 if inner is None else strategy.head_cost(self.options, inner)
        if strategy.self_drafting:
            cost = self._agreed(cost)
        self._policies = PolicyContext(self.options, self.target.config.num_layers, self._bundled, cost)
        self.plan = strategy.plan(self._policies)
        if self.options.graphs == "on" and not alone and ranks is not None and ranks.drafting < ranks.size:
            raise ValueError("--graphs on over several ranks needs all of them to draft: --draft-ranks as many as --tp")
        if self.options.graphs == "on" and self.device.type == "cuda" and self.dtype == torch.float64:
            raise ValueError("--graphs on needs kernels, which float64 has not: use --graphs off or another --dtype")
        if (self.options.graphs or self._graphs_by_default()) == "on":
            most, capture = self.plan.largest, self.device.type == "cuda"
            self._rounds_of = StaticRounds(self.model, self.cache, inner, most.nodes, most.depth, capture)

    def _agreed(self, value: float) -> float:
        """Rank 0's value."""
        if self.ranks is None:
            return value
        return float(self.ranks.first(torch.tensor([value], dtype=torch.float64, device=self.device)))

    @property
    def captures(self) -> bool:
        """Whether rounds are CUDA graphs, which `warmup` captures."""
        return self._rounds_of is not None and self._rounds_of.graphs.capture

    def _graphs_by_default(self) -> str:
        """float64 has no kernels: its references read numbers on the host. Over several ranks graphs hold collectives,
        which is to be asked for."""
        fit = self.device.type == "cuda" and self.dtype != torch.float64 and self.ranks is None
        return "on" if fit else "off"

    @property
    def strategy(self) -> str:
        return self.options.strategy

    @property
    def head_cost(self) -> float:
        """What a draft step costs beside its layers, in layers of the target, where the strategy counts it."""
        return self._policies.head_cost

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        return self._strategy.drafts

    @property
    def _bundled(self) -> bool:
        return self.target.folder == zoo.path("code-target")

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    @property
    def max_context(self) -> int:
        return self.target.config.max_context

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can be text."""
        return self.target.tokenizer_or_none is not None

    @property
    def remarks(self) -> dict[str, str]:
        """What a reader of the results must know, in sentences; the keys are those of `--json`."""
        said = dict(self.notes)
        if self.options.stand_ins:
            earned = "text, acceptance" if self.options.acceptance is None else "text"
            said["sizing"] = f"{'; '.join(self.options.stand_ins)}: no statement about {earned} or losslessness"
        if self.options.linear == "cublas":
            said["linear"] = "cublas: " + (LOST if self.device.type == "cuda" else "on a CPU it changes nothing")
        return said

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens."""
        return list(self.tokenizer(text)["input_ids"])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, through the tokenizer's chat template, ready for the assistant's turn."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"--chat: the tokenizer of {self.target_name} has no chat template")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def bit_equal(self) -> bool:
        """Whether tokens may not even differ within rounding: in float64, and of chains on a GPU."""
        chain = self._strategy.chains(self.options) and self.options.linear != "cublas"
        chain = chain and (self.ranks is None or self.ranks.ordered)
        return self.dtype == torch.float64 or (self.device.type == "cuda" and chain)

    def validate(self, prompt: str | list[int]) -> list[int]:
        """A prompt's token ids; ValueError if it is empty, fills the context or has ids the target lacks."""
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("the prompt is empty: there is no token to continue from")
        if len(ids) >= self.max_context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but the context of {self.target_name} is {self.max_context} "
                "and decoding needs room for one more"
            )
        vocab = self.target.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            raise ValueError(f"token ids must be in 0..{vocab - 1}, got {min(ids)}..{max(ids)}")
        return ids

    def trim_report(self, stats: Stats) -> dict[str, Any]:
        """What trimming saved and cost in the decoding that `stats` counted; empty where nothing is trimmed."""
        return vocabtrim.report(self, stats)

    def policy(self) -> Policy:
        """A fresh policy for one request."""
        return self._strategy.policy(self._policies)

    def warmup(self, tell: Callable[[int, int], None] | None = None) -> None:
        """Run what requests will run, so that none of them waits: on a GPU this compiles every kernel and captures the
        graphs of `plan`; elsewhere it decodes a few tokens with and without the drafter. `tell` is called with
        (done, of) now and then."""
        rounds = self._rounds_of
        if rounds is not None:
            plan, confident, agrees = self.plan, self.policy().confident, self._agreement(0)
            with self._in_memory():
                rounds.warmup(list(plan.budgets), list(plan.verified), list(plan.accepted), confident, agrees, tell)
        filters = ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5})
        for how in ({}, {"temperature": 1.0}, *({"temperature": 1.0, **f} for f in filters)):
            self.generate([0, 0], 8, **how)
            self.generate_ar([0, 0], 2, **how)
        if self.captures:  # a prompt uses torch's own linears, whose first call is slow for a first and a second chunk
            for length in (PREFILL_CHUNK // 4, PREFILL_CHUNK + PREFILL_CHUNK // 2):
                self.generate([0] * min(length, self.max_context - 2), 2)

    def stream(self, prompt: str | list[int], max_new_tokens: int = 128, **sampling: Any) -> Iterator[Chunk]:
        """Decode, yielding a Chunk a round. `sampling`: the fields of `specker.config.Sampling`.

        Raises ValueError for an empty prompt, one that fills the context, or bad numbers; TypeError for unknown names.
        """
        with self._in_memory():
            return self._stream(self._context(prompt, max_new_tokens, self.drafter, sampling))

    def generate(self, prompt: str | list[int], max_new_tokens: int = 128, **sampling: Any) -> Generation:
        """Decode to the end. See `stream`."""
        with self._in_memory():
            return self._generate(self._context(prompt, max_new_tokens, self.drafter, sampling))

    def generate_ar(self, prompt: str | list[int], max_new_tokens: int = 128, **sampling: Any) -> Generation:
        """The same prompt by plain decoding with the same ops and weights: the baseline, and the truth."""
        with self._in_memory():
            return self._generate(self._context(prompt, max_new_tokens, None, sampling))

    def check(
        self, prompt: str | list[int], generation: Generation, max_new_tokens: int = 128, **sampling: Any
    ) -> CheckResult:
        """Decode the prompt with `ar` and compare; see check.py."""
        return check.check(self, prompt, generation, max_new_tokens, **sampling)

    def _context(
        self, prompt: str | list[int], max_new_tokens: int, drafter: Drafter | None, sampling: dict[str, Any]
    ) -> Context:
        params = from_kwargs(Sampling, sampling)
        if max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
        ids = self.validate(prompt)
        self.cache.truncate(0)
        if drafter is not None:
            drafter.reset()
        limit = min(len(ids) + max_new_tokens, self.max_context)
        kept = None if drafter is None or self.kept is None else drafter.head.known
        trace = self.trace if drafter is self.drafter else None  # not of the plain decoding that --check compares with
        rule = self.policy()
        if self.ranks is not None and drafter is not None and rule.layers:
            rule = SharedPolicy(rule, self.ranks)
        agrees = None if drafter is None else self._agreement(params.seed)
        if self._rounds_of is not None:
            self._rounds_of.reset()
        rounds = None if trace else self._rounds_of  # a trace needs what static rounds keep on the device
        return Context(self.model, self.cache, drafter, rule, params, Stats(), ids, limit, kept, trace, agrees, rounds)

    def _stream(self, ctx: Context) -> Iterator[Chunk]:
        text = Detokenizer(self.target.tokenizer_or_none)
        with self._in_memory():
            for tokens, accepted, finished in self._rounds(ctx):
                pieces = [(text.add(token), n < accepted) for n, token in enumerate(tokens)]
                if finished:
                    pieces.append((text.flush(), False))
                yield Chunk(tokens, accepted, [p for p in pieces if p[0]], ctx.stats, finished)

    def _generate(self, ctx: Context) -> Generation:
        tokens: list[int] = []
        finished = "length"
        for new, _, done in self._rounds(ctx):
            tokens += new
            finished = done or finished
        return Generation(tokens, self._decode(tokens), ctx.stats, finished)

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self.target.tokenizer_or_none
        return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)

    def _rounds(self, ctx: Context) -> Iterator[tuple[list[int], int, str | None]]:
        own = () if self.options.stand_ins else self.target.config.eos_ids  # a token that is nobody's ends nothing
        stop_ids = frozenset(own)
        start = time.perf_counter()
        self._running = ctx
        for tokens, accepted in decode(ctx, stop_ids):
            ctx.stats.wall += time.perf_counter() - start
            finished = "stop" if tokens[-1] in stop_ids else None
            if finished is None and len(ctx.committed) >= ctx.limit:
                finished = "length"
            yield tokens, accepted, finished
            if self._running is not ctx:
                raise RuntimeError("this stream ended when another request began: an engine decodes one at a time")
            start = time.perf_counter()  # the consumer's time between rounds is not ours

    def _agreement(self, seed: int) -> torch.Tensor | None:
        """With --acceptance, the positions at which the target agrees: one tensor, rewritten when the seed changes."""
        if self.options.acceptance is None:
            return None
        if self._agrees is None or self._agrees[0] != seed:
            table = agreements(self.options.acceptance, seed, self.cache.capacity).to(self.device)
            self._agrees = seed, table if self._agrees is None else self._agrees[1].copy_(table)
        return self._agrees[1]

    def _in_memory(self) -> AbstractContextManager[None]:
        """Turns an out-of-memory error into a sentence that names the context that would fit."""
        return room_of(self.target, self.draft, self.options).running()


def room_of(target: Checkpoint, draft: Checkpoint | None, options: Options) -> memory.Room:
    own = [target] if draft is None or strategies.of(options).self_drafting else [target, draft]
    embed = target.weights.embed
    return memory.Room(tuple(c.local for c in own), embed.dtype, embed.device, options.page_size, SCRATCH)
