"""Counters of a run. acceptance length = 1 + accepted / rounds: the mean number of tokens per round (vLLM's
definition; papers that do not count the target's own token report it minus 1)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from specker.runtime.control.reasons import drafting

STAGES = ("prefill", "draft", "verify", "accept", "watch", "commit")


@dataclass(frozen=True)
class BlockStats:
    """Results of one draft of a model that guesses blocks: its block and its path search."""

    generated: int  # tokens before the first stop token in the raw argmax
    width: float = 1.0  # mean candidates per position
    score: float = 0.0  # score of the best path through the whole block, per token


@dataclass(frozen=True)
class CopyStats:
    """What one draft copied."""

    source: str  # "prediction"; "text", the text itself; "past", a text that ended; "corpus", a file of the user
    matched: int  # tokens at the end of the text that occurred there


@dataclass
class Stats:
    tokens: int = 0  # emitted
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: list[int] = field(default_factory=list)  # hits[i]: rounds that accepted at least i + 1 draft tokens
    lengths: dict[int, int] = field(default_factory=dict)  # rounds by tokens drafted
    rests: dict[str, int] = field(default_factory=dict)  # rounds without a draft, by the reason (reasons.py)
    captures: int = 0  # CUDA graphs captured in its rounds, after the warm-up
    forced: int = 0  # accepted tokens that a grammar left no choice about
    copied: int = 0  # rounds whose draft copied text, if a drafter is joined with lookup
    beside: int = 0  # of them, those that the other drafter drafted for as well
    sources: dict[str, int] = field(default_factory=dict)  # rounds by what their draft copied from (`CopyStats`)
    predicted: int = 0  # tokens drafted from the request's prediction
    predicted_right: int = 0  # of them, those that were accepted
    exits: dict[int, int] = field(default_factory=dict)  # rounds by exit layer, for a self-drafting target
    experts: float = 0.0  # sum over rounds: experts that the verify pass read in a layer, on average over layers
    kept: int = 0  # emitted tokens in a trimmed head's vocabulary
    lost: int = 0  # rounds whose draft ended at a token outside it
    found: dict[str, float] = field(default_factory=dict)  # sums of `BlockStats` over rounds
    prefilled: int = 0  # tokens of prompts
    wall: float = 0.0  # seconds from the prompt to the last token
    token_times: list[float] = field(default_factory=list)  # token_times[i]: `wall` when token i was emitted
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def observe(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count one round: `drafted` tokens, `accepted` of them, and `emitted` tokens including the target's own."""
        self.tokens += emitted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.hits += [0] * (accepted - len(self.hits))
        for i in range(accepted):
            self.hits[i] += 1

    def observe_budget(self, drafted: int, exit: int, reason: str = "") -> None:
        """Count one round: `drafted` tokens from the first `exit` layers of the target (0: from another drafter).
        `reason`: why nothing was drafted, if that is known."""
        if reason and not drafted:
            self.rests[reason] = self.rests.get(reason, 0) + 1
        self.lengths[drafted] = self.lengths.get(drafted, 0) + 1
        if exit:
            self.exits[exit] = self.exits.get(exit, 0) + 1

    def observe_block(self, block: BlockStats, length: int, accepted: int) -> None:
        """Count one round of a diffusion drafter: paths of `length` tokens, `accepted` of them accepted."""
        new: dict[str, float] = {"rounds": 1, "generated": block.generated, "accepted": accepted, "length": length}
        self.found = _sum(self.found, new | {"width": block.width, "score": block.score})

    @property
    def acceptance_length(self) -> float:
        """The mean number of tokens of a round, the target's own included."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def drafting(self) -> str:
        """Whether anything was drafted and, if not, why."""
        return drafting(self.drafted, self.rounds, self.rests)

    @property
    def experts_read(self) -> float:
        """The mean number of experts that a round's verify pass read in a layer, for all its sequences together."""
        return self.experts / self.rounds if self.rounds else 0.0

    @property
    def diffusion(self) -> dict[str, float]:
        """Means per round: L_gen, L_acc, length k, candidates per position and path score per token."""
        rounds = self.found.get("rounds", 0) or 1
        names = {"generated": "L_gen", "accepted": "L_acc", "length": "k"}
        names |= {"width": "lattice_width", "score": "path_score"}
        return {name: self.found.get(key, 0) / rounds for key, name in names.items()}

    @property
    def accepted_per_position(self) -> list[float]:
        """For each i, the share of rounds that accepted at least i + 1 draft tokens."""
        return [hits / self.rounds for hits in self.hits]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens divided by the wall time, prefill included."""
        return self.tokens / self.wall if self.wall else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Emitted tokens divided by the wall time without prefill."""
        seconds = self.wall - self.seconds["prefill"]
        return self.tokens / seconds if seconds > 0 else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of prompts divided by the seconds of their prefill."""
        return self.prefilled / self.seconds["prefill"] if self.seconds["prefill"] else 0.0

    def __add__(self, other: "Stats") -> "Stats":
        summed = (f.name for f in fields(self) if f.name != "token_times")  # which are of one text
        return Stats(**{name: _sum(getattr(self, name), getattr(other, name)) for name in summed})

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "accepted_per_position": self.accepted_per_position,
            "lengths": dict(sorted(self.lengths.items())),
            "drafting": self.drafting,
            "rests": dict(sorted(self.rests.items())),
            **({"captures": self.captures} if self.captures else {}),
            **({"forced": self.forced} if self.forced else {}),
            **({"copied": self.copied} if self.copied else {}),
            **({"beside": self.beside} if self.beside else {}),
            **({"sources": dict(sorted(self.sources.items()))} if self.sources else {}),
            **({"predicted": self.predicted, "predicted_right": self.predicted_right} if self.predicted else {}),
            **({"exits": dict(sorted(self.exits.items()))} if self.exits else {}),
            **({"experts_read": self.experts_read} if self.experts else {}),
            **({"diffusion": self.diffusion} if self.found else {}),
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "seconds": {**self.seconds, "total": self.wall},
        }


def _sum(a: Any, b: Any) -> Any:
    """Of numbers, of lists item by item, or of dictionaries key by key."""
    if isinstance(a, dict):
        return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
    return [sum(both) for both in zip_longest(a, b, fillvalue=0)] if isinstance(a, list) else a + b
