"""A trimmed LM head (VocabTrim, arXiv 2506.22694): most kept rows are fixed at load time. A few rows follow the text,
so a rare name in the prompt can still be drafted. The number of rows never changes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specker.checkpoints.translation import Translation
from specker.cpu.packed import Packed
from specker.model.weights import Matrix
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.vocabtrim.counts import VocabCounts


@dataclass
class TrimmedHead(LMHead):
    ids: Tensor = field(kw_only=True)  # [K] int64, of the rows as loaded, by rank
    text: int = 0  # the last so many rows are an LRU cache of tokens seen in the text; they start rarest first
    whole: Matrix | None = None  # [V, E], the untrimmed head, from which rows that follow the text are copied
    ranking: str = ""  # how the fixed rows were ranked, for the user
    translation: Translation | None = None  # of a draft with another tokenizer: `ids` and the texts are in its own ids
    counts: VocabCounts | None = None  # counts what the target writes, for the next run
    draftable: set[int] = field(init=False, default_factory=set)
    _slots: dict[int, int] = field(init=False, default_factory=dict)  # id -> row, for text rows, oldest first
    # committed tokens processed
    _seen: WeakKeyDictionary[Request, int] = field(init=False, default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.token_ids = self.ids.clone()
        if self.translation is not None:
            self.token_ids = self.translation.names.to(self.token_ids.device)[self.token_ids]
        self.draftable.update(self.token_ids.tolist())
        self._restore()

    @cached_property
    def followed(self) -> set[int] | range:
        """The ids that may have a row."""
        if self.translation is not None and not self.translation.free:
            return set(self.translation.rows.tolist())
        return range(0 if self.whole is None else len(self.whole))

    @cached_property
    def names(self) -> list[int] | range:
        """What noise and the target call each id."""
        if self.translation is not None:
            names: list[int] = self.translation.names.tolist()
            return names
        return range(0 if self.whole is None else len(self.whole))

    def _restore(self) -> None:
        """Restore the rows as loaded."""
        if not self.text:
            return
        fixed = len(self.ids) - self.text
        first = self.ids[fixed:].tolist()
        if list(self._slots) != first:
            self.draftable.difference_update(self.names[token] for token in self._slots)
            self._slots.clear()
            self._write(first, range(fixed, len(self.ids)))

    def follow(self, sequences: Sequence[Request]) -> None:
        """Give rows to the new tokens of the batch's texts; the least recently seen token loses its row. A batch of new
        texts alone begins with the rows as loaded."""
        if not self.text:
            return
        if not any(sequence in self._seen for sequence in sequences):
            self._restore()
        moved, names, followed = dict[int, int](), self.names, self.followed
        for sequence in sequences:
            seen, text = self._seen.get(sequence, 0), sequence.token_ids
            if seen == len(text):
                continue
            for token in text[seen:]:
                if token in self._slots:
                    self._slots[token] = self._slots.pop(token)
                elif token in followed and names[token] not in self.draftable:
                    oldest = next(iter(self._slots))
                    self.draftable.remove(names[oldest])
                    self.draftable.add(names[token])
                    self._slots[token] = moved[token] = self._slots.pop(oldest)
                    moved.pop(oldest, None)
            self._seen[sequence] = len(text)
        if moved:
            self._write(list(moved), moved.values())

    def count(self, tokens: list[int]) -> None:
        if self.counts is not None:
            self.counts.add(tokens)

    def _write(self, ids: list[int], rows: Iterable[int]) -> None:
        assert self.whole is not None and self.token_ids is not None
        rows, names = list(rows), [self.names[token] for token in ids]
        self._slots.update(zip(ids, rows, strict=True))
        self.draftable.update(names)
        both = torch.tensor([rows, ids, names], dtype=torch.int64, device="cpu")
        if self.weight.is_cuda:  # the host does not wait for a pinned copy
            both = both.pin_memory().to(self.weight.device, non_blocking=True)
        at, tokens, called = both
        if isinstance(self.weight, Packed) and isinstance(self.whole, Packed):
            self.weight.copy(at, self.whole, tokens)
        else:
            self.weight[at] = self.whole[tokens]  # type: ignore[index, assignment]
        self.token_ids[at] = called
