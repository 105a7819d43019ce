"""The states and records of layers with a recurrent state (kernels/delta_rows.py, kernels/conv_rows.py).

A sequence has two states, and a ring of records, which holds its last columns (rings.py): as many as rows read behind
them, and AHEAD more, which a forward writes. Records are placed, committed, moved and taken over as K and V in rings
are, and a refused draft is a record that is overwritten. A sequence's states move on by themselves, behind the columns
that a draft can change.

A request goes on from an ended one's states near its end (`Rings.keep`), or from a column of a prompt that was saved: a
state and the records after it, copied, from which any number of requests may go on. The saved state with the lowest
worth is replaced. Worth = the columns it saves beyond the longest other saved prefix of its text + an age term: the
worth of whatever was evicted last, as it stood when this state was last used. So long texts stay longer than short
ones, and none stays for ever (GreedyDual: Young, "The k-server dual and loose competitiveness for paging", 1994).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specker.kernels.delta_rows import BLOCK, PAGE, anchor
from specker.model.chunks import Chunks
from specker.model.config import DeltaNet, Mixer, ModelConfig
from specker.model.rings import EndedRing, Rings

AHEAD = 128  # the most columns that are written from the first row of a forward on: the root and a draft


class Memory(NamedTuple):
    """What one layer keeps, or L layers [L, ...]. A short convolution keeps its inputs alone."""

    inputs: Tensor  # [pages, page_size, channels], of the convolution
    k: Tensor | None = None  # [pages, page_size, Hk, Dk], see `delta_rows`
    u: Tensor | None = None  # [pages, page_size, Hv, Dv]
    g: Tensor | None = None  # [pages, page_size, Hv, 4]
    states: Tensor | None = None  # [X, 2, Hv, Dk, Dv]
    anchors: Tensor | None = None  # [X, Hv] int64


@dataclass(eq=False)
class Saved:
    """A column of a prompt from which other texts can go on."""

    text: list[int]  # the tokens before it
    exact: bool  # its bits are those of a fresh prefill
    place: int  # where its state and records stand
    first: int  # the column of the first record: the state's anchor
    since: int  # what the last column replaced before this one's latest use was worth


def ring_columns(mixer: Mixer) -> int:
    """Columns that a ring holds."""
    return -(-(_behind(mixer) + AHEAD) // PAGE) * PAGE


def _behind(mixer: Mixer) -> int:
    """Columns behind a row whose records it reads, at most."""
    return 2 * BLOCK if isinstance(mixer, DeltaNet) else mixer.kernel


def sequence_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the states and records of one sequence in all layers."""
    mixer = config.layer.recurrent
    return 0 if mixer is None else _bytes(config, dtype, ring_columns(mixer), ring_columns(mixer), 2)


def saved_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a saved column in all layers."""
    mixer = config.layer.recurrent
    return 0 if mixer is None else _bytes(config, dtype, mixer.kernel, _behind(mixer), 1)


def _bytes(config: ModelConfig, dtype: torch.dtype, inputs: int, columns: int, states: int) -> int:
    """Bytes of the inputs of a convolution and the other records of so many columns, and of states, in all layers."""
    mixer = config.layer.recurrent
    assert mixer is not None
    wide = torch.promote_types(dtype, torch.float32).itemsize
    each = inputs * mixer.channels * dtype.itemsize
    state = 0
    if isinstance(mixer, DeltaNet):
        each += columns * wide * (mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 4))
        state = mixer.value_heads * (wide * mixer.key_dim * mixer.value_dim + 4)
    count = sum(each is not None for each in config.layer.mixers)
    return count * (each + states * state)


class StateRings(Rings):
    """The states and records of all sequences, and of the columns that were saved."""

    shares_pages = True  # only rows that a forward writes are looked up in `slots`

    def __init__(
        self,
        config: ModelConfig,
        page: int,
        pool: int,
        table: Tensor,
        dtype: torch.dtype,
        sequences: int,
        spare: bool,
        saved: int = 0,
    ):
        """See `Rings`. With `spare` there are also states that belong to no sequence. `saved`: columns that are saved
        at once."""
        mixer, device = config.layer.recurrent, table.device
        assert mixer is not None
        self.mixer, columns = mixer, ring_columns(mixer)
        most = columns // PAGE
        super().__init__(sequences * most, most, PAGE, page, pool, table, spare)
        L = sum(each is not None for each in config.layer.mixers)
        wide = torch.promote_types(dtype, torch.float32)

        def zeros(*shape: int, kind: torch.dtype = wide) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        def records(*shape: int, kind: torch.dtype = wide) -> Tensor:
            return zeros(L, sequences * most + spare, PAGE, *shape, kind=kind)

        # Zeros, since masked columns are multiplied.
        if isinstance(mixer, DeltaNet):
            Hk, Hv, Dk, Dv = mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim
            count = sequences + spare
            self.memory = Memory(
                records(mixer.channels, kind=dtype),
                records(Hk, Dk),
                records(Hv, Dv),
                records(Hv, 4),
                zeros(L, count, 2, Hv, Dk, Dv),
                zeros(L, count, Hv, kind=torch.int64),
            )
        else:
            self.memory = Memory(records(mixer.channels, kind=dtype))
        layers = zip(*(x.unbind(0) for x in self.memory if x is not None), strict=True)
        self.layers = list(starmap(Memory, layers))
        self.ahead = columns - _behind(mixer)
        self._absent_state = sequences if spare else 0
        self._free_states = list(range(sequences))
        self._states = [-1] * len(table)
        self.state_of = torch.full((len(table),), self._absent_state, dtype=torch.int64, device=device)  # [sequences]
        self.saved: list[Saved] = []  # the one used last stands last
        self._replaced = 0  # what the last replaced one was worth
        self._places = list(range(saved))
        states = self.memory.states
        self._saved_states = None if states is None else zeros(L, saved, *states.shape[3:])
        behind = mixer.kernel, *[_behind(mixer)] * 3
        each = zip(self.records, behind, strict=False)
        self._saved_records = [zeros(L, saved, n, *x.shape[3:], kind=x.dtype) for x, n in each]

    @property
    def records(self) -> list[Tensor]:
        """What each column has, [L, pages, page_size, ..] each."""
        return [x for x in self.memory[:4] if x is not None]

    @property
    def saves(self) -> int:
        """How many columns can be saved at once."""
        return len(self.saved) + len(self._places)

    def begin(self, slot: int, ring: EndedRing | Saved | None, columns: int) -> None:
        ring = ring if isinstance(ring, EndedRing) else None  # `restore` follows
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
            anchors[:, own] = 0
        else:
            anchors[:, own].clamp_(max=(at := anchor(columns, BLOCK)))
            if 0 < at < ring.anchor:  # a later state stands where the one before `at` was
                self._least[slot] = max(ring.least, at + BLOCK)

    def _set(self, slot: int, state: int) -> None:
        self._states[slot] = state
        self.state_of[slot] = state if state >= 0 else self._absent_state

    def assign(self, slot: int, pages: Tensor) -> None:
        super().assign(slot, pages)
        if not len(pages) and self._states[slot] >= 0:
            self._free_states += [self._states[slot]]
            self._set(slot, -1)

    def evict(self) -> None:
        self._free_states += [self.ended[0].state]
        super().evict()

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._set(target, self._states[source])
        self._set(source, -1)

    def keep(self, slot: int, text: list[int], prefilled: int, end: int) -> None:
        super().keep(slot, text, prefilled, end)
        ring, anchors = self.ended[-1], self.memory.anchors
        ring.state = self._states[slot]
        ring.anchor = 0 if anchors is None else int(anchors[:, ring.state].max())
        self._set(slot, -1)

    def first_seen(self, columns: int, ring: EndedRing) -> int:
        behind = columns - self.mixer.kernel
        if isinstance(self.mixer, DeltaNet):
            state = min(anchor(columns, BLOCK), ring.anchor)
            if state < ring.anchor - BLOCK:
                return -self._capacity
            behind = min(behind, state)
        return max(0, behind)

    # --- saved columns

    def save(self, slot: int, text: list[int], exact: bool, columns: int) -> None:
        """Save the column after `text` of the sequence in `slot`, whose last forward ended before column `columns`,
        less than BLOCK further on. It replaces the one with the lowest worth, of several the one used least recently.
        `exact`: its bits are those of a fresh prefill."""
        end = len(text)
        for known in self.saved:
            if known.text == text and known.exact >= exact:
                return
        if not self.saves:
            return
        if not self._places:
            self._replaced, n = min((self._worth(each), n) for n, each in enumerate(self.saved))
            self._places.append(self.saved.pop(n).place)
        place, own, first = self._places.pop(), self._states[slot], max(0, end - self.mixer.kernel)
        states, kept = self.memory.states, self._saved_states
        if states is not None and kept is not None:
            first = anchor(columns - 1, BLOCK)  # of the last row
            first -= BLOCK if first > anchor(end, BLOCK) else 0
            kept[:, place] = states[:, own, first // BLOCK % 2]
        for x, copies, rows in self._saved_rows(slot, first, end):
            copies[:, place, : len(rows)] = x[:, rows]
        self.saved.append(Saved(text, exact, place, first, self._replaced))

    def _worth(self, saved: Saved) -> int:
        """See above. What serves no exact request is no beginning of what does."""
        others = (each for each in self.saved if each is not saved and each.exact >= saved.exact)
        known = (len(each.text) for each in others if saved.text[: len(each.text)] == each.text)
        return len(saved.text) - max(known, default=0) + saved.since

    def restore(self, slot: int, saved: Saved) -> None:
        """Let the sequence in `slot`, which has a ring, go on from a saved column."""
        own, (_, _, _, _, states, anchors) = self._states[slot], self.memory
        if states is not None and anchors is not None and self._saved_states is not None:
            states[:, own, saved.first // BLOCK % 2] = self._saved_states[:, saved.place]
            anchors[:, own] = saved.first
        for x, copies, rows in self._saved_rows(slot, saved.first, len(saved.text)):
            x[:, rows] = copies[:, saved.place, : len(rows)]
        self._least[slot] = len(saved.text)  # of a convolution's inputs only those behind this column were saved
        saved.since = self._replaced
        self.saved.remove(saved)
        self.saved.append(saved)

    def match(self, text: list[int], chunks: Chunks | None) -> tuple[int, Any]:
        """As `Rings.match`, or a longer beginning whose end was saved, and that."""
        found = super().match(text, chunks)
        for saved in self.saved:
            columns = len(saved.text)
            serves = chunks is None or (saved.exact and chunks.whole(columns) == columns)
            if serves and columns > found[0] and text[:columns] == saved.text:
                found = columns, saved
        return found

    def forget(self) -> None:
        super().forget()
        self._places += [saved.place for saved in self.saved]
        self.saved, self._replaced = [], 0

    def _saved_rows(self, slot: int, start: int, end: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each kind of records: all of them [L, rows, ..], the saved ones [L, saved, n, ..], and where those of
        columns start..end - 1 stand [rows] int64, the last n of them."""
        columns = torch.arange(start, end, dtype=torch.int64, device=self.block_table.device)
        rows = self.block_table[slot, columns // PAGE].long() * PAGE + columns % PAGE
        for x, copies in zip(self.records, self._saved_records, strict=True):
            yield x.flatten(1, 2), copies, rows[-copies.shape[2] :]

    def shift(self, src: Tensor, dst: Tensor) -> None:
        """Copy the records of the flattened rows src [M] int64 to dst [M] int64, in all layers."""
        for x in self.records:
            rows = x.flatten(1, 2)
            rows.index_copy_(1, dst, rows.index_select(1, src))
