"""An engine: a target, perhaps a drafter, and a strategy composed from them. What `specker.load` (load.py) returns."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from specker import zoo
from specker.config import Options, Sampling, from_kwargs
from specker.runtime import check, strategies
from specker.runtime import state as states
from specker.runtime.check import CheckResult
from specker.runtime.detokenize import Detokenizer
from specker.runtime.dist import Ranks
from specker.runtime.draft import Drafter
from specker.runtime.graphs import Graphs
from specker.runtime.head import Kept
from specker.runtime.loop import Batch, Step, decode
from specker.runtime.model import memory
from specker.runtime.model.cache import KVCache
from specker.runtime.model.checkpoint import Checkpoint
from specker.runtime.model.config import layer_elements
from specker.runtime.model.decoder import Model
from specker.runtime.policy import Budget, Fixed, Policy
from specker.runtime.shared import SharedDrafter
from specker.runtime.stats import Stats
from specker.runtime.strategies import vocabtrim
from specker.runtime.strategies.base import SCRATCH, DraftContext, Plan, PolicyContext, Strategy, allocate, linear
from specker.runtime.warmup import warm_up

LOST = "a row's bits then depend on how many rows stand beside it: chains are no longer bit-equal to plain decoding"

Prompt = str | list[int]


@dataclass(frozen=True)
class Chunk:
    """What one round added to one prompt's text."""

    prompt: int  # which of the prompts
    tokens: list[int]
    accepted: int  # the first `accepted` of tokens were draft tokens, the rest is the target's own
    pieces: list[tuple[str, bool]]  # the new text in order, and whether it came from a draft token
    stats: Stats  # running totals of this prompt
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
    trace: Callable[[dict[str, Any]], None] | None = field(default=None, repr=False)  # called with every round
    model: Model = field(init=False, repr=False)  # the target's
    cache: KVCache = field(init=False, repr=False)
    drafter: Drafter | None = field(init=False, repr=False, default=None)
    batch: Batch = field(init=False, repr=False)
    plan: Plan = field(init=False, repr=False)  # what `warmup` runs
    _strategy: Strategy = field(init=False, repr=False)
    _policies: PolicyContext = field(init=False, repr=False)
    _request: object = field(init=False, repr=False, default=None)  # the one that owns the caches

    def __post_init__(self) -> None:
        o, ranks, gpu = self.options, self.ranks, self.device.type == "cuda"
        self._strategy = strategy = strategies.of(o)
        self.model = Model(self.target, linear=linear(o), ranks=ranks)
        self.cache = allocate(self.model, o)
        alone = ranks is None or not strategy.drafts or strategy.self_drafting  # else rank 0's drafts are shared
        models = self.target, self.model, self.cache, self.draft, self.kept
        context = DraftContext(o, *models, self._bundled, ranks)
        inner = strategy.drafter(context) if alone or (ranks is not None and ranks.drafts) else None
        self.drafter = inner if alone or ranks is None else SharedDrafter(inner, ranks)
        cost = 0.0 if inner is None else strategy.head_cost(o, inner)
        if strategy.self_drafting:
            cost = self._agreed(cost)
        self._policies = PolicyContext(o, self.target.config.num_layers, self._bundled, cost)
        self.plan = strategy.plan(self._policies)
        if o.graphs == "on" and not alone and ranks is not None and ranks.drafting < ranks.size:
            raise ValueError("--graphs on over several ranks needs all of them to draft: --draft-ranks as many as --tp")
        if o.graphs == "on" and gpu and self.dtype == torch.float64:
            raise ValueError("--graphs on needs kernels, which float64 has not: use --graphs off or another --dtype")
        # float64 has no kernels: its references read numbers on the host. Over several ranks graphs hold collectives,
        # which must be asked for.
        fixed = gpu and self.dtype != torch.float64 and ranks is None if o.graphs is None else o.graphs == "on"
        rest = self.plan.largest, fixed, Graphs(fixed and gpu), self._cost, SCRATCH, o.acceptance, ranks
        self.batch = Batch(self.model, self.cache, self.drafter, *rest)

    def _agreed(self, value: float) -> float:
        """Rank 0's value."""
        if self.ranks is None:
            return value
        return float(self.ranks.first(torch.tensor([value], dtype=torch.float64, device=self.device)))

    def _cost(self, budget: Budget) -> float:
        """Of a round, in steps of plain decoding: by bytes of weights. A verify pass reads as much as one row does."""
        if budget.exit:
            layers = self.target.config.num_layers
            return 1 + min(budget.nodes, budget.depth) * (budget.exit + self.head_cost) / layers
        if self.draft is None:
            return 1.0
        own = layer_elements(self.draft.config) + self.draft.weights.head.numel()
        steps = 1 if not self.draft.config.causal else min(budget.nodes, budget.depth)
        return 1 + steps * own / (layer_elements(self.target.config) + self.target.weights.head.numel())

    @property
    def captures(self) -> bool:
        """Whether rounds are CUDA graphs, which `warmup` captures."""
        return self.batch.graphs.capture

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
    def has_tokenizer(self) -> bool:
        """Whether prompts can be text."""
        return self.target.tokenizer_or_none is not None

    @property
    def max_context(self) -> int:
        return self.target.config.max_context

    @property
    def remarks(self) -> dict[str, str]:
        """What a reader of any result has to know first, in sentences; the keys are those of `--json`."""
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

    def validate(self, prompt: Prompt, max_new_tokens: int = 1) -> list[int]:
        """A prompt's token ids; ValueError if it is empty, fills the context, has ids the target lacks or could never
        fit into the K/V pool."""
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
        self.batch.check_fits(len(ids), min(len(ids) + max_new_tokens, self.max_context))
        return ids

    def policy(self) -> Policy:
        """A fresh one: what a policy learns from one request does not leak into the next."""
        return self._strategy.policy(self._policies)

    def warmup(self, tell: Callable[[int, int], None] | None = None) -> None:
        """Do once what a request may meet, so that none is kept waiting. `tell` is called with (done, of)."""
        warm_up(self, tell)

    # --- decoding

    def request(
        self, index: int, prompt: Prompt, max_new_tokens: int = 128, drafting: bool = True, **sampling: Any
    ) -> states.Sequence:
        """A request for `serve`, checked. `sampling`: the fields of `specker.config.Sampling`."""
        params = from_kwargs(Sampling, sampling)
        if max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
        ids = self.validate(prompt, max_new_tokens)
        limit = min(len(ids) + max_new_tokens, self.max_context)
        drafting = drafting and self.drafter is not None
        return states.Sequence(index, ids, limit, params, self.policy() if drafting else Fixed(0, 0), drafting)

    def serve(self, waiting: deque[states.Sequence], traced: bool = True) -> Iterator[Step]:
        """Decode requests, at most `--batch-size` at once; the caller may append to `waiting` at any time."""
        own = () if self.options.stand_ins else self.target.config.eos_ids  # a made-up token ends nothing
        self._request = request = object()
        self.batch.trace = self.trace if traced else None
        with self._in_memory():
            for step in decode(self.batch, waiting, frozenset(own)):
                yield step
                if self._request is not request:
                    raise RuntimeError("this stream ended when another request began: an engine decodes one at a time")

    def stream(self, prompts: Prompt | Sequence[Prompt], max_new_tokens: Any = 128, **sampling: Any) -> Iterator[Chunk]:
        """Decode one prompt, or several as a batch, yielding a Chunk a round and prompt. `sampling`: the fields of
        `specker.config.Sampling`; each, like max_new_tokens, is one value for all prompts or a list with one a prompt.

        Raises ValueError for an empty prompt, one that does not fit, or bad numbers; TypeError for unknown names.
        """
        return self._chunks(self._requests(prompts, max_new_tokens, sampling, drafting=True))

    def generate(self, prompts: Any, max_new_tokens: Any = 128, **sampling: Any) -> Any:
        """Decode to the end: a Generation for one prompt, a list of them for a list of prompts. See `stream`."""
        return self._generate(prompts, max_new_tokens, sampling, drafting=True)

    def generate_ar(self, prompts: Any, max_new_tokens: Any = 128, **sampling: Any) -> Any:
        """The same by plain decoding with the same ops and weights: the baseline, and the truth."""
        return self._generate(prompts, max_new_tokens, sampling, drafting=False)

    def check(self, prompt: Prompt, generation: Generation, max_new_tokens: int = 128, **sampling: Any) -> CheckResult:
        """Decode the prompt with `ar` and compare (check.py)."""
        return check.check(self, prompt, generation, max_new_tokens, **sampling)

    def _requests(
        self, prompts: Any, max_new_tokens: Any, sampling: dict[str, Any], drafting: bool
    ) -> deque[states.Sequence]:
        each = prompts if several(prompts) else [prompts]
        options = {"max_new_tokens": max_new_tokens, **sampling}
        for name, value in options.items():
            if isinstance(value, list | tuple) and len(value) != len(each):
                raise ValueError(f"{name} has {len(value)} values for {len(each)} prompts")
        return deque(
            self.request(
                i, prompt, drafting=drafting,
                **{name: v[i] if isinstance(v, list | tuple) else v for name, v in options.items()},
            )
            for i, prompt in enumerate(each)
        )  # fmt: skip

    def _chunks(self, requests: Iterable[states.Sequence]) -> Iterator[Chunk]:
        texts: dict[int, Detokenizer] = {}
        for step in self.serve(deque(requests)):
            yield self.chunk(step, texts)

    def chunk(self, step: Step, texts: dict[int, Detokenizer]) -> Chunk:
        """What a step of `serve` added, as text; `texts` holds what is yet to be written of each prompt."""
        s = step.sequence
        text = texts.setdefault(s.index, Detokenizer(self.target.tokenizer_or_none))
        pieces = [(text.add(token), n < step.accepted) for n, token in enumerate(step.tokens)]
        if s.finished:
            pieces.append((texts.pop(s.index).flush(), False))
        return Chunk(s.index, step.tokens, step.accepted, [p for p in pieces if p[0]], s.stats, s.finished)

    def _generate(self, prompts: Any, max_new_tokens: Any, sampling: dict[str, Any], drafting: bool) -> Any:
        requests = self._requests(prompts, max_new_tokens, sampling, drafting)
        sequences, tokens = list(requests), [[] for _ in requests]  # type: list[states.Sequence], list[list[int]]
        for step in self.serve(requests, traced=drafting):
            tokens[step.sequence.index] += step.tokens
        out = [
            Generation(own, self.decode(own), s.stats, s.finished or "length")
            for s, own in zip(sequences, tokens, strict=True)
        ]
        return out if several(prompts) else out[0]

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, without special tokens."""
        tokenizer = self.target.tokenizer_or_none
        return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)

    def _in_memory(self) -> AbstractContextManager[None]:
        """Memory that runs out in here is reported in a sentence, with the context that would fit."""
        return room_of(self.target, self.draft, self.options).running()

    def trim_report(self, stats: Stats) -> dict[str, Any]:
        """What trimming saved and cost in the decoding that `stats` counted; empty where nothing is trimmed."""
        return vocabtrim.report(self, stats)


def several(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts: of texts or of lists of ids."""
    return isinstance(prompts, list | tuple) and bool(prompts) and not isinstance(prompts[0], int)


def room_of(target: Checkpoint, draft: Checkpoint | None, options: Options) -> memory.Room:
    own = [target] if draft is None or strategies.of(options).self_drafting else [target, draft]
    embed = target.weights.embed
    return memory.Room(tuple(c.local for c in own), embed.dtype, embed.device, options.page_size, SCRATCH)
