"""The states and records of layers with a recurrent state (kernels/delta.py, kernels/conv.py).

A sequence has two states, and a ring of records, which holds its last columns (rings.py): as many as rows read behind
them, and AHEAD more, which a forward writes. Records are placed, committed, moved and taken over as K and V in rings
are, and a refused draft is a record that is overwritten. A sequence's states move on by themselves, behind the columns
that a draft can change.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.delta import BLOCK, PAGE, anchor
from specker.model.config import DeltaNet, Mixer, ModelConfig
from specker.model.rings import Kept, Rings

AHEAD = 128  # the most columns that are written from the first row of a forward on: the root and a draft


class Memory(NamedTuple):
    """What one layer keeps, or L layers [L, ...]. A short convolution keeps its inputs alone."""

    inputs: Tensor  # [pages, page_size, channels], of the convolution
    k: Tensor | None = None  # [pages, page_size, Hk, Dk], see `delta_rows`
    u: Tensor | None = None  # [pages, page_size, Hv, Dv]
    g: Tensor | None = None  # [pages, page_size, Hv, 4]
    states: Tensor | None = None  # [X, 2, Hv, Dk, Dv]
    anchors: Tensor | None = None  # [X, Hv] int64


def ring_columns(mixer: Mixer) -> int:
    """Columns that a ring holds."""
    behind = 2 * BLOCK if isinstance(mixer, DeltaNet) else mixer.kernel
    return -(-(behind + AHEAD) // PAGE) * PAGE


def sequence_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the states and records of one sequence in all layers."""
    mixer = config.layer.recurrent
    if mixer is None:
        return 0
    wide = torch.promote_types(dtype, torch.float32).itemsize
    each = mixer.values * dtype.itemsize
    states = 0
    if isinstance(mixer, DeltaNet):
        each = mixer.channels * dtype.itemsize
        each += wide * (mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 4))
        states = mixer.value_heads * (2 * wide * mixer.key_dim * mixer.value_dim + 8)
    count = sum(each is not None for each in config.layer.mixers)
    return count * (ring_columns(mixer) * each + states)


class StateRings(Rings):
    """The states and records of all sequences."""

    def __init__(
        self, config: ModelConfig, page: int, pool: int, table: Tensor, dtype: torch.dtype, sequences: int, spare: bool
    ):
        """See `Rings`. With `spare` there are also states that belong to no sequence."""
        mixer, device = config.layer.recurrent, table.device
        assert mixer is not None
        self.mixer, columns = mixer, ring_columns(mixer)
        most = columns // PAGE
        super().__init__(sequences * most, most, PAGE, page, pool, table, spare)
        L = sum(each is not None for each in config.layer.mixers)
        rows = L, sequences * most + spare, PAGE
        wide = torch.promote_types(dtype, torch.float32)

        def zeros(*shape: int, kind: torch.dtype = wide) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        # Zeros, since masked columns are multiplied.
        if isinstance(mixer, DeltaNet):
            Hk, Hv, Dk, Dv = mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim
            count = sequences + spare
            self.memory = Memory(
                zeros(*rows, mixer.channels, kind=dtype),
                zeros(*rows, Hk, Dk),
                zeros(*rows, Hv, Dv),
                zeros(*rows, Hv, 4),
                zeros(L, count, 2, Hv, Dk, Dv),
                zeros(L, count, Hv, kind=torch.int64),
            )
        else:
            self.memory = Memory(zeros(*rows, mixer.channels, kind=dtype))
        each = zip(*(x.unbind(0) for x in self.memory if x is not None), strict=True)
        self.layers = [Memory(*own) for own in each]
        self.ahead = columns - (2 * BLOCK if isinstance(mixer, DeltaNet) else mixer.kernel)
        self._absent_state = sequences if spare else 0
        self._free_states = list(range(sequences))
        self._states = [-1] * len(table)
        self.state_of = torch.full((len(table),), self._absent_state, device=device)  # [sequences] int64

    @property
    def records(self) -> list[Tensor]:
        """What each column has, [L, pages, page_size, ..] each."""
        return [x for x in self.memory[:4] if x is not None]

    def begin(self, slot: int, ring: Kept | None, columns: int) -> None:
        super().begin(slot, ring, columns)
        own = self._states[slot]
        if ring is not None:
            self._free_states += [own] if own >= 0 else []
            own = ring.state
        elif own < 0:
            while not self._free_states:
                self.evict()
            own = self._free_states.pop()
        self._set(slot, own)
        _, _, _, _, states, anchors = self.memory
        if states is None or anchors is None:
            return
        if ring is None:
            states[:, own, 0] = 0
        anchors[:, own] = anchor(columns, BLOCK)

    def _set(self, slot: int, state: int) -> None:
        self._states[slot] = state
        self.state_of[slot] = state if state >= 0 else self._absent_state

    def assign(self, slot: int, pages: Tensor) -> None:
        super().assign(slot, pages)
        if not len(pages) and self._states[slot] >= 0:
            self._free_states += [self._states[slot]]
            self._set(slot, -1)

    def evict(self) -> None:
        self._free_states += [self.kept[0].state]
        super().evict()

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._set(target, self._states[source])
        self._set(source, -1)

    def keep(self, slot: int, text: list[int], prefilled: int, end: int) -> None:
        super().keep(slot, text, prefilled, end)
        kept, anchors = self.kept[-1], self.memory.anchors
        kept.state = self._states[slot]
        kept.anchor = 0 if anchors is None else int(anchors[0, kept.state, 0])
        self._set(slot, -1)

    def first_seen(self, columns: int, ring: Kept) -> int:
        behind = columns - self.mixer.kernel
        if isinstance(self.mixer, DeltaNet):
            state = anchor(columns, BLOCK)
            if state not in (ring.anchor, ring.anchor - BLOCK):
                return -self._capacity
            behind = min(behind, state)
        return max(0, behind)

    def shift(self, src: Tensor, dst: Tensor) -> None:
        """Copy the records of the flattened rows src [M] int64 to dst [M] int64, in all layers."""
        for x in self.records:
            rows = x.flatten(1, 2)
            rows.index_copy_(1, dst, rows.index_select(1, src))
