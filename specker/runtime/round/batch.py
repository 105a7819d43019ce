"""What a round is about: the requests, their state, and the shape that all launches share. Drafters read it.

Rows are placed in one of two ways. In a batch of *fixed* shape the device reads how long each text is: launches do not
depend on what the last round decided, so on a GPU they are CUDA graphs, and a round may be launched before the last
one's tokens are known. Otherwise the host knows every length and places exactly the rows that are needed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specker.model.cache import Lengths
from specker.model.sampling import Draws
from specker.runtime.control.policy import Budget
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.state import Request, State


class Shape(NamedTuple):
    """What the launches of a round depend on. Captures are keyed by it."""

    sequences: int  # idle slots included
    budget: Budget
    fixed: bool = False
    bucket: int = 0  # columns that attention sees; 0: all
    draws: str = "greedy"  # the kind of draws (model/sampling.py)

    def key(self, name: Hashable, attends: bool = True, draws: bool = True) -> Hashable | None:
        """The key of a graph segment whose launches depend only on `name`, the number of sequences, the KV bucket (if
        it `attends`) and whether draws have noise (if it `draws`); None if it must not be captured."""
        noise = draws and self.draws != "greedy"
        return (name, self.sequences, self.bucket if attends else 0, noise) if self.fixed else None


class Workspace:
    """Values that one graph segment passes to the next. A replayed graph runs no Python, so batches of fixed shape
    pass them through the state's memory; other batches just keep the tensors."""

    def __init__(self, state: State, fixed: bool):
        self.state, self.fixed = state, fixed
        self._values: dict[str, Tensor] = {}

    def out(self, name: str, count: int) -> Tensor | None:
        """The state's memory for the first `count` entries of `name`, for an op that can write there; None if the op
        must allocate."""
        if not self.fixed:
            return None
        self._values[name] = getattr(self.state, name)[:count]
        return self._values[name]

    def put(self, name: str, value: Tensor) -> None:
        """Pass on `value`, which may be the memory that `out` gave."""
        if not self.fixed:
            self._values[name] = value
        elif value is not self._values.get(name):
            getattr(self.state, name)[: len(value)].copy_(value)

    def get(self, name: str, count: int) -> Tensor:
        """The first `count` entries of `name`."""
        return (getattr(self.state, name) if self.fixed else self._values[name])[:count]

    def put_aux(self, rows: list[Tensor]) -> None:
        """Pass on the target's hidden rows after some depths, [rows, E] each."""
        if self.fixed:
            torch.stack(rows, 1, out=self.state.aux_hidden_states[: len(rows[0]), : len(rows)])
        else:
            self._values["aux"] = torch.stack(rows, 1) if len(rows) > 1 else rows[0].unsqueeze(1)

    def aux(self, depths: int, rows: int) -> Tensor:
        """What `put_aux` passed on, [rows, depths, E]."""
        return (self.state.aux_hidden_states if self.fixed else self._values["aux"])[:rows, :depths]


@dataclass(eq=False)
class Batch:
    """The requests of a round, in slots 0, 1, .."""

    requests: list[Request]
    state: State  # of their slots, and of idle slots where the batch is padded
    shape: Shape
    draws: Draws
    lengths: Lengths  # the texts' lengths, which place the rows
    graphs: Graphs
    early: bool = False  # whether a text may not end yet, so that stop ids are kept from its next rows
    confident: bool = False  # whether policies end the draft by the confidence of each token
    traced: bool = False  # whether a trace wants the draft and its probabilities
    aux_layers: tuple[int, ...] = ()  # depths of the target whose hidden rows the drafter reads after this round
    memory: Workspace = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Workspace(self.state, self.shape.fixed)

    @property
    def n(self) -> int:
        """Sequences, idle slots included."""
        return self.shape.sequences

    @property
    def fixed(self) -> bool:
        return self.shape.fixed

    @property
    def budget(self) -> Budget:
        return self.shape.budget

    def lengths_within(self, limit: int) -> Lengths:
        """The texts' lengths, clamped to a drafter's context, for placing its rows."""
        return self.lengths if isinstance(self.lengths, Tensor) else [min(n, limit) for n in self.lengths]

    @property
    def window(self) -> Tensor:
        """[n, R] int64: the root, then the draft."""
        return self.state.window

    def run(self, name: Hashable, work: Callable[[], None], attends: bool = True, draws: bool = True) -> None:
        """Run a graph segment, captured if shapes are fixed (see `Shape.key`)."""
        self.graphs.run(self.shape.key(name, attends, draws), work)

    def last(self, count: int) -> Tensor:
        """The last committed tokens of each sequence, [n, count] int64, read on the device."""
        s = self.state
        back = torch.arange(-count, 0, dtype=torch.int64, device=s.length.device)
        return s.committed.gather(1, s.length[:, None] + back)

    def before_root(self) -> Tensor:
        """The token before each root, [n, 1] int64, or -1 if there is none."""
        if not self.fixed:
            texts = [request.token_ids for request in self.requests]
            before = [[text[-2] if len(text) > 1 else -1] for text in texts]
            return torch.tensor(before, dtype=torch.int64, device=self.window.device)
        at = self.state.length[:, None] - 2
        return self.state.committed.gather(1, at.clamp(min=0)).masked_fill(at < 0, -1)

    def aux_hidden_states(self, size: int, slot: int, path: Sequence[int]) -> Tensor:
        """The target's hidden rows that the drafter reads, [len(path), D, E]: of the rows `path` of a sequence, in a
        round with drafts of `size` tokens."""
        first = slot * (size + 1)
        return self.memory.aux(len(self.aux_layers), self.n * (size + 1))[first : first + size + 1][path]
