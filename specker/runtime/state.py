"""What a round leaves to the next: tensors with a leading dimension B, at addresses that stay, and the host's view of
each sequence."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from specker.config import Sampling
from specker.runtime.model.decoder import Model
from specker.runtime.policy import Policy
from specker.runtime.sampling import pack
from specker.runtime.stats import Stats


@dataclass(eq=False)
class Sequence:
    """One request, as the host sees it."""

    index: int  # of its prompt
    text: list[int]  # committed tokens: the prompt, then what was emitted; the last one is the root
    limit: int  # committed tokens at which decoding ends
    sampling: Sampling
    policy: Policy
    drafting: bool = True  # False: plain decoding
    stats: Stats = field(default_factory=Stats)
    finished: str | None = None  # None, "stop" (a stop id) or "length"


@dataclass(frozen=True)
class State:
    """Tensors of the sequences in slots 0..n-1. R rows a sequence: the root and the largest draft."""

    committed: Tensor  # [n, C] int64, the text
    length: Tensor  # [n] int64, tokens of it that count; the last is the root
    limit: Tensor  # [n] int64
    window: Tensor  # [n, R] int64: the root, then the draft
    parents: Tensor  # [n, R - 1] int64, of a tree
    draw: Tensor  # [n, 4] int64, how tokens are drawn (sampling.pack)
    agrees: Tensor  # [n, C] bool, where synthetic acceptance agrees; [n, 0] without it
    confidence: Tensor  # [n] float32, log-probability of the last draft token
    step: Tensor  # [1] int64: draft tokens in the window, where they come one by one
    # Work space of one round; rows of all sequences, sequence after sequence.
    hidden: Tensor  # [n * R, E of the drafter]
    positions: Tensor  # [n * R] int64
    logits: Tensor  # [n * R, V]
    target: Tensor  # [n * R] int64, the target's token after each row
    report: Tensor  # [n * (1 + 2 R)] int64, of `advance`

    @classmethod
    def empty(cls, model: Model, sequences: int, rows: int, wide: int, columns: int, synthetic: bool) -> "State":
        """For drafts of up to rows - 1 tokens, hidden rows of `wide` and texts of up to `columns` tokens."""
        device, vocab = model.device, model.head.shape[0]  # the rank's share of a split model
        scores = torch.float64 if model.dtype == torch.float64 else torch.float32

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            committed=ints(sequences, columns + rows),
            length=ints(sequences),
            limit=ints(sequences),
            window=ints(sequences, rows),
            parents=ints(sequences, rows - 1),
            draw=ints(sequences, 4),
            agrees=torch.zeros(sequences, columns if synthetic else 0, dtype=torch.bool, device=device),
            confidence=torch.zeros(sequences, dtype=scores, device=device),
            step=ints(1),
            hidden=torch.zeros(sequences * rows, wide, dtype=model.dtype, device=device),
            positions=ints(sequences * rows),
            logits=torch.empty(sequences * rows, vocab, dtype=scores, device=device),
            target=ints(sequences * rows),
            report=ints(sequences * (1 + 2 * rows)),
        )

    @cached_property
    def _per_sequence(self) -> dict[str, Tensor]:
        names = [f.name for f in fields(self)][: [f.name for f in fields(self)].index("step")]
        return {name: getattr(self, name) for name in names}

    def first(self, sequences: int) -> "State":
        """Views of the first slots."""
        if sequences == len(self.length):
            return self
        return replace(self, **{name: x[:sequences] for name, x in self._per_sequence.items()})

    def load(self, slot: int, sequence: Sequence, agrees: Tensor | None = None) -> None:
        """Bring a sequence, its text as far as it is known, to `slot`."""
        n = len(sequence.text)
        self.committed[slot, :n] = torch.tensor(sequence.text)
        self.length[slot], self.limit[slot] = n, sequence.limit
        self.window[slot, 0] = sequence.text[-1]
        self.draw[slot] = pack(sequence.sampling)
        if agrees is not None:
            self.agrees[slot] = agrees

    def move(self, source: int, target: int) -> None:
        """Move what stands in slot `source` to slot `target`."""
        for x in self._per_sequence.values():
            x[target] = x[source]

    def idle(self, slot: int, length: int) -> None:
        """Let rounds of a fixed number of slots run over a slot that has no sequence: its text never grows."""
        self.length[slot] = self.limit[slot] = length
        self.window[slot, 0] = 0
        self.draw[slot] = pack(Sampling())
