"""Sampling parameters of a round, in the form the ops take: temperature, filters and seed per sequence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specker.kernels.noise import gumbel_at, pack_draw
from specker.kernels.sample_rows import Splits, sample_rows, sample_splits
from specker.kernels.vocab_topk import Noise
from specker.options import Sampling

ALL = 2**31 - 1  # top_k that keeps every token
KINDS = ("greedy", "noise", "filtered")  # the kernels a draw launches; a later kind also covers the earlier ones


@dataclass(frozen=True)
class Draws:
    """Sampling parameters for all rows of a round."""

    kind: str
    memory: Tensor | None  # [n, 4] int64, each sequence's parameters (`pack`): one CUDA graph serves every request
    only: Sampling | None = None  # parameters of a single sequence, to pass as launch arguments
    adjusts: bool = False  # whether `adjust_rows` changes the logits before. Its numbers are in the state

    @classmethod
    def of(cls, samplings: Sequence[Sampling], memory: Tensor, fixed: bool) -> "Draws":
        """`fixed`: kernels read the parameters from memory even for one sequence."""
        only = samplings[0] if len(samplings) == 1 and not fixed else None
        return cls(max(map(kind, samplings), key=KINDS.index), memory, only, any(map(adjusting, samplings)))

    @classmethod
    def one(cls, sampling: Sampling) -> "Draws":
        """Draws of a single sequence, whose parameters are launch arguments."""
        return cls(kind(sampling), None, sampling)

    def each(self, which: Tensor) -> "Draws":
        """Draws for rows of which row i belongs to sequence which[i] [T] int64; otherwise all have equally many."""
        return self if self.memory is None or self.only is not None else replace(self, memory=self.memory[which])

    def tokens(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's token after each row: logits [T, V] at `positions` [T] int64 -> [T] int64."""
        return sample_rows(logits, *self._numbers(), positions, self._drawn)

    def splits(self, logits: Tensor, positions: Tensor) -> Tensor | Splits:
        """`tokens` for `settle`. On a GPU, `settle` also reduces the partial results of each row of logits, which saves
        a launch."""
        if logits.is_cpu:
            return self.tokens(logits, positions)
        return sample_splits(logits, *self._numbers(), positions, self._drawn)

    @property
    def _drawn(self) -> Tensor | None:
        return self.memory if self.only is None else None

    def _numbers(self) -> tuple[float, int, float, int]:
        """The arguments temperature, top_k, top_p and seed."""
        if (s := self.only) is not None:
            return s.temperature, s.top_k, s.top_p, s.seed
        top_k, top_p = (1, 0.5) if self.kind == "filtered" else (0, 1.0)  # enables filters; the values are in memory
        return 0.0 if self.kind == "greedy" else 1.0, top_k, top_p, 0

    def held(self, positions: Tensor) -> Noise:
        """The noise at `positions` [T] int64 with every sequence's parameters from memory, for greedy draws too."""
        return Noise(0, positions, 1.0, self.memory)

    def heat(self) -> Tensor | float:
        """What noisy logits are divided by before the noise is added, of each sequence [n] float64, or of all: the
        temperature, and 1 for greedy draws."""
        if self.kind == "greedy":
            return 1.0
        if (s := self.only) is not None:
            return s.temperature or 1.0
        assert self.memory is not None
        temperature = self.memory.view(-1, 4)[:, 2].view(torch.float64)  # `pack_draw`
        return torch.where(temperature > 0, temperature, 1.0)

    def noise(self, positions: Tensor) -> Noise | None:
        """The noise of the target's draws at `positions` [T] int64, for a drafter's ranking; None if all are greedy."""
        if self.kind == "greedy":
            return None
        if (s := self.only) is not None:
            return Noise(s.seed, positions, s.temperature)
        return self.held(positions)

    def gumbel(self, positions: Tensor, ids: Tensor) -> Tensor | None:
        """`noise` itself of a few ids [T, K] int64 at each position, [T, K] float32."""
        if self.kind == "greedy":
            return None
        if (s := self.only) is not None:
            return gumbel_at(s.seed, positions, ids)
        assert self.memory is not None
        numbers = self.memory.view(-1, 4).repeat_interleave(len(positions) // len(self.memory), 0)  # `pack_draw`
        noise = gumbel_at(numbers[:, :1], positions, ids)
        return noise.masked_fill(numbers[:, 2:3] == 0, 0.0)


def kind(s: Sampling) -> str:
    filtered = s.temperature > 0 and (s.top_k > 0 or s.top_p < 1)
    return "filtered" if filtered else "noise" if s.temperature > 0 else "greedy"


def adjusting(s: Sampling) -> bool:
    """Whether logits are adjusted: by penalties, min_p or biases."""
    floors = s.min_p > 0 and s.temperature > 0  # at temperature 0 the most probable token remains
    penalties = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    return penalties or floors or bool(s.logit_bias)


def rules(s: Sampling) -> Tensor:
    """A sequence's `numbers` of `adjust_rows`, [4] float32 on the CPU."""
    reach = -s.temperature * math.log(s.min_p) if s.min_p > 0 and s.temperature > 0 else math.inf
    numbers = [s.repetition_penalty, s.presence_penalty, s.frequency_penalty, reach]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def pack(s: Sampling) -> Tensor:
    """A sequence's parameters for `Draws.memory`, [4] int64 on the CPU."""
    return pack_draw(s.seed, s.temperature, min(s.top_k or ALL, ALL), s.top_p)


GREEDY = Draws.one(Sampling())
