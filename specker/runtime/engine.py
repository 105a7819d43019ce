"""The engine that `specker.load` (load.py) returns: a target, a drafter if any, and the strategy that joins them."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch

from specker.checkpoints import gguf
from specker.checkpoints.checkpoint import Checkpoint
from specker.config import Options, Sampling, refuse_unknown, stop_strings
from specker.flags import option
from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.runtime import strategies, text
from specker.runtime.check import CheckResult, check
from specker.runtime.compose import compose, room_of
from specker.runtime.detokenize import Detokenizer, whole
from specker.runtime.dist import Ranks
from specker.runtime.draft import Drafter
from specker.runtime.loop import Batch, Step, decode
from specker.runtime.policy import Fixed, Policy
from specker.runtime.state import Sequence
from specker.runtime.stats import Stats
from specker.runtime.strategies.base import Plan, PolicyContext
from specker.runtime.strategies.vocabtrim import trim
from specker.runtime.strategies.vocabtrim.head import Kept
from specker.runtime.text import Chunk, Counts, Generation, Prompt, Prompts, Stop
from specker.runtime.turns import Turn, Turns
from specker.runtime.warmup import warm_up
from specker.zoo import Family

if TYPE_CHECKING:
    from specker.arguments import EachSampling, SamplingOptions

log = logging.getLogger(__name__)


@dataclass(repr=False)
class Engine:
    target: Checkpoint
    draft: Checkpoint | None
    options: Options
    device: torch.device
    dtype: torch.dtype
    target_name: str
    draft_name: str | None
    kept: Kept | None = None  # the kept rows of a trimmed draft head (strategy vocabtrim)
    notes: dict[str, str] = field(default_factory=dict)  # decisions of the loader, by their names in `remarks`
    ranks: Ranks | None = None  # the ranks that share the target
    family: Family | None = None  # the bundled files for the target
    trace: Callable[[dict[str, Any]], None] | None = None  # called with every round
    model: Model = field(init=False)  # the target's
    cache: KVCache = field(init=False)
    drafter: Drafter | None = field(init=False)
    policies: PolicyContext = field(init=False)
    plan: Plan = field(init=False)  # the warm-up plan
    batch: Batch = field(init=False)
    turns: Turns = field(init=False, default_factory=Turns)  # of threads, on the caches

    def __post_init__(self) -> None:
        made = compose(self.target, self.draft, self.options, self.kept, self.family, self.ranks)
        self.model, self.cache, self.drafter, self.policies, self.plan, self.batch = made
        for sentence in self.remarks.values():
            log.warning(sentence)

    def __repr__(self) -> str:
        how = f"{self.device}, {str(self.dtype).removeprefix('torch.')}, context {self.max_context}"
        return f"<specker.Engine: {self.models}, {self.strategy}, {how}>"

    @property
    def models(self) -> str:
        """The models' names for people: a folder's or a GGUF file's own name, or a hub id."""
        sides = (self.target_name, self.target), (self.draft_name, self.draft)
        return " + ".join((side and gguf.origin(side.folder)) or name for name, side in sides if name is not None)

    @property
    def captures(self) -> bool:
        """Whether rounds are CUDA graphs, which `warmup` captures."""
        return self.batch.graphs.capture

    @property
    def strategy(self) -> str:
        return self.options.strategy

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        return strategies.of(self.options).drafts

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
        """Caveats for a reader of the results: sentences by their keys in `--json`. Logged when the engine is made."""
        said = dict(self.notes)
        if self.options.stand_ins:
            nothing = "text and acceptance mean" if self.options.acceptance is None else "text means"
            made_up = " and ".join(self.options.stand_ins)
            said["sizing"] = f"with {made_up} a run measures time and memory only: its {nothing} nothing"
        if self.options.linear == "cublas":
            linear = option("linear", "cublas")
            said["linear"] = f"{linear} is not batch-invariant, so chains are not bit-equal to plain decoding"
        return said

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens. Raises ValueError."""
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt must be a string to be encoded, got {prompt!r}")
        return list(self.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, through the tokenizer's chat template, ready for the assistant's turn. Raises
        ValueError."""
        return text.encode_chat(self.target, self.target_name, messages)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, without special tokens; "" without a tokenizer."""
        tokenizer = self.target.tokenizer_or_none
        return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)

    def validate(self, prompt: Prompt, max_new_tokens: int = 1) -> list[int]:
        """A prompt's token ids. Raises ValueError if it is empty, has ids that the target lacks or can never fit."""
        max_new_tokens = text.count(max_new_tokens)
        ids = self.encode(prompt) if isinstance(prompt, str) else text.token_ids(prompt)
        text.checked(ids, self.target, self.target_name)
        self.batch.check_fits(len(ids), min(len(ids) + max_new_tokens, self.max_context))
        return ids

    def policy(self) -> Policy:
        """A fresh policy for one request."""
        return strategies.policy(self.policies)

    def warmup(self, tell: Callable[[int, int], None] | None = None) -> None:
        """Run the warm-up plan, so no request waits for a compiler or a capture. Calls `tell` with (done, of)."""
        counts = None if self.kept is None else self.kept.counts
        with nullcontext() if counts is None else counts.paused():
            warm_up(self, tell)

    def request(
        self,
        index: int,
        prompt: Prompt,
        max_new_tokens: int = 128,
        drafting: bool = True,
        stop: Stop = (),
        streams: bool = False,
        **sampling: Any,
    ) -> Sequence:
        """Check a prompt and its options and make a request for `serve`. `streams`: its steps have text. Raises as
        `stream` does."""
        refuse_unknown(sampling, ["max_new_tokens", "stop", *(f.name for f in fields(Sampling))])
        params, max_new_tokens, stops = Sampling(**sampling), text.count(max_new_tokens), stop_strings(stop)
        if stops and not self.has_tokenizer:
            raise ValueError(f"{self.target_name} has no tokenizer, so its text cannot end at {option('stop')}")
        ids = self.validate(prompt, max_new_tokens)
        asked, drafting = len(ids) + max_new_tokens, drafting and self.drafter is not None
        policy = self.policy() if drafting else Fixed(0, 0)
        ends = "length" if asked <= self.max_context else "context"
        reader = Detokenizer(self.target.tokenizer_or_none, stops) if stops or streams else None
        return Sequence(index, ids, min(asked, self.max_context), params, policy, drafting, reader=reader, ends=ends)

    def serve(self, waiting: deque[Sequence], traced: bool = True) -> Iterator[Step]:
        """Decode requests, at most `batch_size` at once; the caller may append to `waiting` at any time. Requests of
        other threads wait until the last one is done."""
        own = () if self.options.stand_ins else self.target.config.eos_ids  # stand-ins ignore stop ids
        with self.alone() as turn:
            self.batch.trace = self.trace if traced else None
            for step in decode(self.batch, waiting, frozenset(own)):
                turn.pause()
                yield step
                turn.resume()

    def stream(
        self,
        prompt: Prompt | Prompts,
        max_new_tokens: int | Counts = 128,
        stop: Stop = (),
        **sampling: "Unpack[EachSampling]",
    ) -> Iterator[Chunk]:
        """Decode one prompt, or several as a batch; yields a Chunk per round and prompt. `sampling`: the fields of
        `specker.config.Sampling`; each of them, and max_new_tokens, is one value for all prompts or a list per prompt.
        A text ends before the first of the strings `stop`; what may be the beginning of one is held back.

        Raises ValueError for an empty prompt, one that does not fit, or bad numbers; TypeError for unknown names.
        """
        requests = self._requests(prompt, {"max_new_tokens": max_new_tokens, **sampling}, stop=stop, streams=True)
        return (text.chunk(step) for step in self.serve(requests))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of strings, too
        self, prompt: Prompt, max_new_tokens: int = 128, stop: Stop = (), **sampling: "Unpack[SamplingOptions]"
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompts, max_new_tokens: int | Counts = 128, stop: Stop = (), **sampling: "Unpack[EachSampling]"
    ) -> list[Generation]: ...

    def generate(self, prompt: Any, max_new_tokens: Any = 128, stop: Any = (), **sampling: Any) -> Any:
        """Decode to the end: a Generation for one prompt, a list of them for a list of prompts. See `stream`."""
        return self._generate(prompt, {"max_new_tokens": max_new_tokens, **sampling}, stop, True)

    @overload
    def generate_ar(  # type: ignore[overload-overlap]
        self, prompt: Prompt, max_new_tokens: int = 128, stop: Stop = (), **sampling: "Unpack[SamplingOptions]"
    ) -> Generation: ...

    @overload
    def generate_ar(
        self, prompt: Prompts, max_new_tokens: int | Counts = 128, stop: Stop = (), **sampling: "Unpack[EachSampling]"
    ) -> list[Generation]: ...

    def generate_ar(self, prompt: Any, max_new_tokens: Any = 128, stop: Any = (), **sampling: Any) -> Any:
        """`generate` by plain decoding with the same ops and weights: the baseline and the reference."""
        return self._generate(prompt, {"max_new_tokens": max_new_tokens, **sampling}, stop, False)

    def check(
        self,
        prompt: Prompt,
        generation: Generation,
        max_new_tokens: int = 128,
        stop: Stop = (),
        **sampling: "Unpack[SamplingOptions]",
    ) -> CheckResult:
        """Decode the prompt with `ar` and compare; see check.py."""
        return check(self, prompt, generation, max_new_tokens, stop, **sampling)

    def trim_report(self, stats: Stats) -> dict[str, Any]:
        """What trimming saved and cost, by `stats` of a run; {} if the head is not trimmed."""
        return trim.report(self, stats)

    @contextmanager
    def alone(self) -> Iterator[Turn]:
        """Context manager for what uses the caches: waits for the turn (turns.py). Out of memory becomes a ValueError
        that names a context that would fit."""
        turn = self.turns.take()
        try:
            with room_of(self.target, self.draft, self.options).running():
                yield turn
        finally:
            turn.end()

    def _requests(self, prompt: Any, options: dict[str, Any], **same: Any) -> deque[Sequence]:
        return deque(self.request(i, p, **o, **same) for i, (p, o) in enumerate(text.each(prompt, options)))

    def _generate(self, prompt: Any, options: dict[str, Any], stop: Stop, drafting: bool) -> Any:
        requests = self._requests(prompt, options, stop=stop, drafting=drafting)
        tokens: dict[Sequence, list[int]] = {sequence: [] for sequence in requests}
        texts = dict.fromkeys(tokens, "")
        for step in self.serve(requests, traced=drafting):
            tokens[step.sequence] += step.tokens
            texts[step.sequence] += "".join(piece for piece, _ in step.pieces)
        out = [
            Generation(t, whole(self.decode(t)) if s.reader is None else texts[s], s.stats, s.finished or "length")
            for s, t in tokens.items()
        ]
        return out if text.several(prompt) else out[0]
