"""Numbers that point outside of what they are an index into: the compiled layers refuse them before they write."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid import CONV, DELTA, Cache, E, Hybrid
from make_checkpoint import FULL, GEMMA3, SLIDING
from stacks import model_of
from torch import Tensor

from specker.cpu import CachedRows
from specker.cpu.chain import Chains, Committed, Vocabulary, draft_chain
from specker.model.cache import KVCache

SAID = "positions, slots, pages, lengths or ids point outside of what they are an index into"
KINDS = {"delta": (DELTA, None, DELTA), "conv": (CONV, CONV, None)}
INDICES = "positions", "slots", "cu_rows", "kv_len", "window", "table"
SIZES = [(0, 3, None), (1, 5, None)]  # rows of two sequences


@dataclass
class Call:
    """A call of `Stack.run`, its indices by name and all that it may write."""

    stack: Any
    x: Tensor
    kv: tuple[Tensor, ...]
    given: dict[str, Tensor]
    words: Tensor | None
    memory: list[Tensor]
    used: dict[str, int]  # entries of a sequence's row of a table that are read
    records: Any = None

    def run(self, **other: Tensor) -> Tensor:
        return self.stack.run(self.x, self.rows(**other), range(len(self.stack.layers) + 1))[0]

    def rows(self, **other: Tensor) -> CachedRows:
        at = self.given | other
        rows = CachedRows(self.kv, words=self.words, **{name: at[name] for name in INDICES})
        if self.records is not None:
            past = {"slots": at["past"], "table": at["past_table"], "state_of": at["state_of"]}
            return rows._replace(records=self.records._replace(**past))
        return rows._replace(in_rings=(at["near"], at["near_table"])) if "near" in at else rows

    def kept(self) -> list[Tensor]:
        return [x.view(torch.uint8).clone() for x in self.memory]

    def refuse(self, **other: Tensor) -> None:
        with pytest.raises(ValueError, match=SAID):
            self.run(**other)


def recurrent(kind: str, words: bool) -> Call:
    model = Hybrid(KINDS[kind], gated=False)
    cache, g = Cache(model, 2), torch.Generator().manual_seed(2)
    for n, length in ((0, 40), (1, 70)):
        cache.text(torch.randn(length, E, generator=g), [length], n)
    rows = cache.arguments(SIZES)
    own, records = {name: getattr(rows, name) for name in INDICES}, rows.records
    own |= {"past": records.slots, "past_table": records.table, "state_of": records.state_of}
    memory = [*rows.kv, *(x for x in records[:6] if x is not None)]
    bits = torch.ones(8, 1, dtype=torch.int64) if words else None
    return Call(model.stack, torch.randn(8, E), rows.kv, own, bits, memory, {"table": 6, "past_table": 6}, records)


def paged(folder: Path, rings: bool) -> Call:
    layers = {"layer_types": [SLIDING, FULL, FULL, SLIDING], "sliding_window": 8}
    model = model_of(folder, **(GEMMA3 | layers if rings else {}))
    cache = KVCache(model.config, 2048, sequences=2, dtype=torch.float32, device="cpu", page_size=16, rings=rings)
    assert (cache.rings is not None) == rings
    for kv in cache.kv:
        kv.zero_()
    for slot in (0, 1):
        cache.take(slot, 2000)
    rows = cache.after([40, 70], [3, 5])
    own = {name: getattr(rows, name) for name in INDICES}
    if rings:
        own["near"], own["near_table"] = rows.ring_rows.slots, rows.ring_rows.table
    words = rows.ancestors if rows.ancestors.shape[1] else None
    x = model.embed_tokens(torch.arange(8))
    return Call(model.stack, x, cache.kv, own, words, list(cache.kv), {"table": 3, "near_table": 3})


@pytest.fixture(params=["delta", "delta with words", "conv", "paged", "rings"])
def call(request: pytest.FixtureRequest, tmp_path: Path) -> Call:
    kind, *words = request.param.split(maxsplit=1)
    return recurrent(kind, bool(words)) if kind in KINDS else paged(tmp_path, kind == "rings")


def outside(name: str, x: Tensor, call: Call, draw: random.Random) -> Tensor:
    """The index with one number that is wrong in any case."""
    big = torch.iinfo(x.dtype).max
    value = draw.choice((-1, -2, -big - 1, big, big - 1, 2**30, 2**20))
    x = x.clone()
    if name in call.used:
        x[draw.randrange(len(x)), draw.randrange(call.used[name])] = value
    else:
        x.view(-1)[draw.randrange(x.numel())] = value
    return x


def test_invalid_numbers_are_refused_and_nothing_is_written(call: Call) -> None:
    draw, want, before = random.Random(7), call.run(), call.kept()
    checked = [name for name in call.given if name != "window" or call.words is not None]
    if call.records is not None and call.records.states is None:
        checked.remove("state_of")  # convolutions have no states
    for n in range(20 * len(checked)):
        name = checked[n % len(checked)]
        other = outside(name, call.given[name], call, draw)
        call.refuse(**{name: other})
    assert all(map(torch.equal, before, call.kept()))
    assert torch.equal(call.run(), want)


def test_what_is_not_read_may_point_anywhere(call: Call) -> None:
    """Entries of a table after the last column, windows of rows without words, and a sequence without rows."""
    want, other = call.run(), {}
    for name, used in call.used.items():
        if name in call.given:
            other[name] = torch.cat((call.given[name], torch.full_like(call.given[name][:1], -1)))
            other[name][0, used:] = 2**31 - 1
    if call.words is None:
        other["window"] = torch.full_like(call.given["window"], -(2**31))
    if "state_of" in call.given:
        other["state_of"] = torch.cat((call.given["state_of"], torch.tensor([0])))
    lengths = {"cu_rows": 8, "window": 0, "kv_len": 256}
    for name, more in lengths.items():
        other[name] = torch.cat((other.get(name, call.given[name]), torch.tensor([more], dtype=torch.int32)))
    assert torch.equal(call.run(**other), want)


def test_anchors_between_blocks_are_refused() -> None:
    call = recurrent("delta", False)
    want, before = call.run(), call.kept()
    for layer, value in ((0, -16), (1, 7), (0, -(2**63)), (1, 2**62 + 1)):
        anchor = int(call.records.anchors[layer, 1, 3])
        call.records.anchors[layer, 1, 3] = value
        call.refuse()
        call.records.anchors[layer, 1, 3] = anchor
    assert all(map(torch.equal, before, call.kept()))
    assert torch.equal(call.run(), want)


def test_chains_are_checked(tmp_path: Path) -> None:
    """The rows of the first forward, its tokens, and the columns of later ones."""
    model, call = model_of(tmp_path), paged(tmp_path, False)
    words = Vocabulary(model.embed, 1.0, model.head, None, model.norm, "float32")
    given = call.given | {"tokens": torch.arange(8)}

    def draft(columns: tuple[int, int] = (43, 75), steps: int = 4, last: int = 127, **other: Tensor) -> Any:
        committed = Committed((given | other)["tokens"])
        rows = call.rows(**other)._replace(words=None)
        chains = Chains(columns, last, steps, [(0.0, 0)] * 2, None)
        return draft_chain(model.stack, words, rows, committed, (range(5), range(5)), chains)

    want, draw = draft()[0].tolist(), random.Random(3)
    bad: list[dict[str, Any]] = [{"columns": (43, 2**40)}, {"columns": (-1, 75)}, {"last": -1}, {"last": 10**6}]
    bad += [{"steps": 2048}, {"columns": (43, 2046)}]
    for name in ("positions", "slots", "cu_rows", "kv_len", "table", "tokens"):
        bad += [{name: outside(name, given[name], call, draw)} for _ in range(20)]
    before = call.kept()
    for other in bad:
        with pytest.raises(ValueError, match=SAID):
            draft(**other)
    assert all(map(torch.equal, before, call.kept()))
    assert draft()[0].tolist() == want
