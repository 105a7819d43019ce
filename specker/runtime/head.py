"""The drafter's LM head: hidden rows -> the k best candidate ids of the full vocabulary."""

import math
from dataclasses import dataclass

from torch import Tensor

from specker.config import Sampling
from specker.kernels.vocab_topk import vocab_topk


@dataclass(frozen=True)
class Head:
    weight: Tensor  # [K, E], as row_linear takes it
    norm: Tensor  # [E]
    eps: float
    token_ids: Tensor | None = None  # [K] ids of the kept rows; None: row i is id i

    def best(self, hidden: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
        """hidden [T, E] at `positions` [T] -> the first candidate of each row, [T]."""
        noise = self._noise(sampling, positions)
        return vocab_topk(hidden, self.weight, self.token_ids, 1, (self.norm, self.eps), noise, with_lse=False)[0][:, 0]

    def confident(self, hidden: Tensor, sampling: Sampling, positions: Tensor) -> tuple[Tensor, float]:
        """Of one row [1, E]: the first candidate [1] and its probability in the ranking used. Reads it on the host."""
        ids, scores = self.candidates(hidden, 1, sampling, positions)
        return ids[:, 0], math.exp(float(scores))

    def candidates(self, hidden: Tensor, k: int, sampling: Sampling, positions: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, E] at `positions` [T] -> the k best ids [T, k] and their log-probabilities in the ranking used.

        Above temperature 0 the ranking is of logits perturbed by the very noise that the target's draw will add at
        those positions (Gumbel coupling, arXiv 2408.07978), so the first candidate is the best guess of that draw.
        """
        noise = self._noise(sampling, positions)
        ids, scores, lse = vocab_topk(hidden, self.weight, self.token_ids, k, (self.norm, self.eps), noise)
        # Rounding must not lift a log-probability above 0: a tree's child may never outrank its parent.
        return ids, (scores - lse.unsqueeze(-1)).clamp_(max=0)

    @staticmethod
    def _noise(sampling: Sampling, positions: Tensor) -> tuple[int, Tensor, float] | None:
        return (sampling.seed, positions, sampling.temperature) if sampling.temperature > 0 else None
