"""The drafter's LM head: hidden rows -> the k best candidate ids of the full vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specker.cpu import product
from specker.cpu.communicator import Communicator
from specker.cpu.packed import Packed
from specker.kernels.residual_merge import add_norm
from specker.kernels.row_linear import row_linear
from specker.kernels.vocab_topk import largest_of, vocab_topk
from specker.model.decoder import Final, capped
from specker.model.sampling import Draws
from specker.model.weights import Matrix
from specker.runtime.round.state import Request


@dataclass
class LMHead:
    """A head with all rows: row i is id i. strategies/vocabtrim/head.py has the trimmed one, which overrides the
    methods that follow the texts, and strategies/mtp/assistant.py one that reads clusters of rows."""

    weight: Matrix  # [K, E]
    norm: Tensor  # [E]
    eps: float
    activations: str = "int8"  # for packed rows (cpu.ACTIVATIONS)
    cap: float = 0.0  # soft cap of the logits (ModelConfig.logits_cap)
    token_ids: Tensor | None = field(init=False, default=None)  # [K] int64, current id of each row; None: row i is id i
    draftable: set[int] | None = field(init=False, default=None)  # the ids that can be drafted; None: all

    @property
    def communicator(self) -> Communicator | None:
        """What the ranks exchange through that hold the other rows; None: all are here."""
        return None

    @property
    def most(self) -> int:
        """How many candidates a row can have."""
        return self.weight.shape[0]

    def follow(self, sequences: Sequence[Request]) -> None:
        """Called before each draft with the batch's texts."""

    def count(self, tokens: list[int]) -> None:
        """Called with the tokens that the target writes to texts that are drafted for."""

    def best(self, final: Final, draws: Draws, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows [T, E] at `positions` [T] -> the best candidate of each row, [T] int64; written to `out` [T] if
        given, which may be a column of a window."""
        column = None if out is None else out.unsqueeze(1)
        return self._topk(final, 1, draws, positions, with_lse=False, out=column)[0][:, 0]

    def candidates(self, final: Final, k: int, draws: Draws, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows [T, E] at `positions` [T] -> the k best ids [T, k] int64 and their log-probabilities [T, k].

        Above temperature 0, logits and log-probabilities include the noise that the target's draw will add at those
        positions (Gumbel coupling, arXiv 2408.07978), so the first candidate is the best guess of that draw.
        """
        ids, scores, lse = self.ranked(final, k, draws, positions)
        # Rounding must not lift a log-probability above 0: a tree's child may never outrank its parent.
        return ids, (scores - lse.unsqueeze(-1)).clamp_(max=0)

    def ranked(self, final: Final, k: int, draws: Draws, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Like `candidates`: ids [T, k], (perturbed) logits [T, k] divided by the temperature, lse [T] over all kept
        rows."""
        return self._topk(final, k, draws, positions)

    def logits(self, final: Final) -> Tensor:
        """The rows [T, E] -> their logits [T, K] float32 (float64 in float64 runs)."""
        if isinstance(self.weight, Packed):
            norm = None if final.normed else self.norm
            return capped(product(final.rows, self.weight, self.activations, norm, self.eps), self.cap)
        rows = final.rows if final.normed else add_norm(final.rows, None, self.norm, self.eps)[1]
        return capped(row_linear(rows, self.weight, epilogue="float32"), self.cap)

    def _topk(
        self, final: Final, k: int, draws: Draws, positions: Tensor, with_lse: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm, noise = None if final.normed else (self.norm, self.eps), draws.noise(positions)
        bends = self.cap and (with_lse or noise is not None)  # otherwise the cap changes no choice
        if isinstance(self.weight, Packed) or (bends and final.rows.is_cpu):  # a GPU's kernel ranks without the cap
            ids, values, lse = largest_of(self.logits(final), self.token_ids, k, noise, with_lse)
            return (ids if out is None else out.copy_(ids)), values, lse
        return vocab_topk(final.rows, self.weight, self.token_ids, k, norm, noise, with_lse, out=out)
