"""The drafter's LM head: hidden rows -> the k best candidate ids of the full vocabulary.

A trimmed head (VocabTrim, arXiv 2506.22694) fixes most kept rows at load time. A few rows follow the text, so a rare
name in the prompt can still be drafted. The number of rows never changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specker.cpu.packed import Packed
from specker.kernels.cpu import native
from specker.kernels.topk import largest_of, vocab_topk
from specker.model.decoder import Final
from specker.model.sampling import Draws
from specker.model.weights import Matrix
from specker.runtime import state as states
from specker.runtime.strategies.vocabtrim.counts import VocabCounts


@dataclass(frozen=True)
class Kept:
    """The rows of a trimmed head."""

    ids: Tensor  # [K] int64; the last `text` rows follow the text and start with the next ids by rank, rarest first
    text: int = 0
    whole: Matrix | None = None  # [V, E], the untrimmed head, source of those rows
    ranking: str = ""  # what the fixed rows were chosen by, for the user
    counts: VocabCounts | None = None  # counts what the target writes, for the next run


@dataclass
class Head:
    weight: Matrix  # [K, E]
    norm: Tensor  # [E]
    eps: float
    kept: Kept | None = None  # None: row i is id i
    activations: str = "int8"  # for packed rows (cpu.ACTIVATIONS)
    token_ids: Tensor | None = field(init=False, default=None)  # [K] int64, current id of each row
    known: set[int] = field(init=False, default_factory=set)  # the same, on the host
    _slots: dict[int, int] = field(init=False, default_factory=dict)  # id -> row, for text rows, oldest first
    _seen: dict[int, int] = field(init=False, default_factory=dict)  # committed tokens processed, by sequence

    def __post_init__(self) -> None:
        if self.kept is not None:
            self.token_ids = self.kept.ids.clone()
            self.known.update(self.kept.ids.tolist())
        self.reset()

    def reset(self) -> None:
        """Restore the rows as loaded. Called when the batch is empty."""
        self._seen.clear()
        if self.kept is None or not self.kept.text:
            return
        fixed = len(self.kept.ids) - self.kept.text
        first = self.kept.ids[fixed:].tolist()
        if list(self._slots) != first:
            self.known.difference_update(self._slots)
            self._slots.clear()
            self._write(first, range(fixed, len(self.kept.ids)))

    def follow(self, sequences: Iterable[states.Sequence]) -> None:
        """Give rows to the new tokens of the batch's texts; the least recently seen token loses its row."""
        if self.kept is None or not self.kept.text:
            return
        assert self.kept.whole is not None
        moved: dict[int, int] = {}
        for sequence in sequences:
            seen, text = self._seen.get(sequence.index, 0), sequence.text
            if seen == len(text):
                continue
            for token in text[seen:]:
                if token in self._slots:
                    self._slots[token] = self._slots.pop(token)
                elif token not in self.known and token < len(self.kept.whole):
                    oldest = next(iter(self._slots))
                    self.known.remove(oldest)
                    self.known.add(token)
                    self._slots[token] = moved[token] = self._slots.pop(oldest)
                    moved.pop(oldest, None)
            self._seen[sequence.index] = len(text)
        if moved:
            self._write(list(moved), moved.values())

    def count(self, tokens: list[int]) -> None:
        """The target has written these tokens."""
        if self.kept is not None and self.kept.counts is not None:
            self.kept.counts.add(tokens)

    def forget(self, sequence: states.Sequence) -> None:
        """The sequence has ended; its tokens keep their rows until other ones need them."""
        self._seen.pop(sequence.index, None)

    def _write(self, ids: list[int], rows: Iterable[int]) -> None:
        assert self.kept is not None and self.kept.whole is not None and self.token_ids is not None
        rows = list(rows)
        self._slots.update(zip(ids, rows, strict=True))
        self.known.update(ids)
        both = torch.tensor([rows, ids])
        if self.weight.is_cuda:  # the host does not wait for a pinned copy
            both = both.pin_memory().to(self.weight.device, non_blocking=True)
        at, tokens = both
        if isinstance(self.weight, Packed) and isinstance(self.kept.whole, Packed):
            self.weight.copy(at, self.kept.whole, tokens)
        else:
            self.weight[at] = self.kept.whole[tokens]  # type: ignore[index, assignment]
        self.token_ids[at] = tokens

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

    def _topk(
        self, final: Final, k: int, draws: Draws, positions: Tensor, with_lse: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm, noise = None if final.normed else (self.norm, self.eps), draws.noise(positions)
        if isinstance(self.weight, Packed):
            z = native().product(final.rows, self.weight, self.activations, *(norm or ()))
            ids, values, lse = largest_of(z, self.token_ids, k, noise, with_lse)
            return (ids if out is None else out.copy_(ids)), values, lse
        return vocab_topk(final.rows, self.weight, self.token_ids, k, norm, noise, with_lse, out=out)
