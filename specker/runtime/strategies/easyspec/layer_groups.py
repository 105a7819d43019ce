"""The schedule of a draft's layers, and the code that runs them side by side."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specker.fields import option
from specker.kernels.quant import Quantized, joined
from specker.kernels.round.repeat_rows import repeat_rows
from specker.layer_weights import LayerWeights
from specker.model.cache import KVCache, Rows, sequence_bounds
from specker.model.decoder import GroupRows, GroupStep, Model, Output, compiled, in_blocks, over_pages, run_layers
from specker.model.recurrent import paths
from specker.model.weights import ONE_ROW, Group
from specker.runtime.ranks.dist import Ranks
from specker.runtime.strategies.easyspec import WIDTH, Groups

ATTENTION = "norm_in", "qkv", "qkv_bias", "q_norm", "k_norm", "sinks", "o", "o_bias"  # what a group computes as one


@dataclass(frozen=True)
class Schedule:
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        order = [layer for group in self.groups for layer in group]
        if not order or order != list(range(len(order))) or not all(self.groups):
            raise ValueError(f"a schedule's groups must hold every layer from 0 on once and in order, got {self}")

    @classmethod
    def parallel(cls, layers: int, width: int) -> "Schedule":
        """Groups of `width` layers, the last one perhaps shorter; the first and the last layer are groups of one."""
        inner = range(1, layers - 1)
        groups = (tuple(inner[i : i + width]) for i in range(0, len(inner), width))
        return cls(((0,), *groups, (layers - 1,)) if layers > 1 else ((0,),))

    @classmethod
    def of(cls, groups: Groups | None, layers: int) -> "Schedule":
        """The schedule of --layer-parallel for a model of `layers`. Raises ValueError for another number of layers, and
        for a group wider than the layers that can run side by side."""
        if groups is None and layers < 4:
            raise ValueError(
                f"a draft of {layers} layers has none to run side by side, since the first and the last one run alone: "
                f"use {option('strategy', 'draft')}, or name all groups with {option('layer_parallel')}"
            )
        if isinstance(groups, int) and groups > max(1, layers - 2):
            raise ValueError(
                f"{option('layer_parallel', groups)} is wider than the {max(0, layers - 2)} inner layers of a draft of "
                f"{layers}: the first and the last one run alone"
            )
        if isinstance(groups, int | None):
            return cls.parallel(layers, groups or WIDTH)
        if (count := sum(map(len, groups))) != layers:
            asked = option("layer_parallel", cls(groups))
            raise ValueError(f"{asked} has {count} layers, but the draft has {layers}")
        return cls(groups)

    def owner(self, layer: int, ranks: int) -> int:
        """The rank that runs `layer` within its group if `ranks` share the work; adjacent layers share a rank."""
        group = next(g for g in self.groups if layer in g)
        return group.index(layer) * ranks // len(group) if len(group) > 1 else 0

    def __str__(self) -> str:
        return json.dumps(self.groups, separators=(",", ":"))


class LayerParallel:
    """Runs a model's layers by a schedule over one cache. `ranks` share a group's attention: each attends for its own
    layers of a group and gathers the results, so no hidden rows are sent. Only the owner of a layer holds its fuzzy
    K/V. Every rank attends for all layers in groups of one and in the exact pass. The model may be a part of one
    (model/split.py): without `ranks`, every rank attends for all layers with its heads."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        schedule: Schedule,
        ranks: Ranks | None = None,
        calibrate: str = "every",
    ):
        """Moves the attention weights of groups of several layers into stacks, one group at a time, unless they are
        adjacent in memory. `model` keeps views of the stacks."""
        self.model, self.cache, self.schedule, self.calibrate = model, cache, schedule, calibrate
        if model.config.layer.kvs and any(len(layers) > 1 for layers in schedule.groups):
            raise ValueError(
                f"EasySpec cannot run layers of {model.config.architecture} side by side, whose heads differ: "
                "choose strategy draft"
            )
        self.ranks = ranks if ranks is not None and ranks.size > 1 else None
        self.compiles = self.ranks is None  # whether the compiled library can run the schedule
        if model.stack is not None and self.ranks is not None and self.ranks.communicator is not None:
            model.stack.divide_groups(self.ranks.communicator)
            self.compiles = True
        self.groups = [*(layers[0] for layers in schedule.groups), len(model.layers)]  # as it takes them
        self.kv = cache.k.flatten(0, 1), cache.v.flatten(0, 1)  # views: [L * pages, page, Hkv, D]
        packed = model.stack is not None and model.stack.packed
        self.stacks = [] if packed else [self._group(layers) for layers in schedule.groups]

    def forward(self, rows: Rows, hidden: Tensor) -> Output:
        """Run all layers of the schedule from the embedding `hidden` [T, E]. Writes the rows' K/V, fuzzy in groups of
        several layers."""

        def run(rows: Rows, hidden: Tensor) -> Output:
            if self.model.stack is not None and self.compiles:
                return compiled(self.model, self.cache, rows, hidden, self.groups)
            return run_layers(self.model, self._steps(rows), hidden)

        return in_blocks(self.model, rows, hidden, run)

    def _steps(self, rows: Rows) -> Iterator[GroupStep]:
        model, cache = self.model, self.cache
        one = GroupRows(
            rows.positions, rows.slots, over_pages(model, rows), model.joined, rows.ring_rows, rows.idle, paths(rows)
        )
        every = self._repeated(rows) if any(len(group.layers) > 1 for group in self.stacks) else rows
        for layers, group in zip(self.schedule.groups, self.stacks, strict=True):
            if len(layers) == 1:
                yield group, cache.layers[layers[0]], one
                continue
            own = _of_layers(every, self._own(layers), len(model.layers))
            join = model.joined if self.ranks is None else partial(self._gathered, layers, self.ranks)
            yield group, self.kv, GroupRows(own.positions, own.slots, over_pages(model, own), join)

    def _repeated(self, rows: Rows) -> Rows:
        """Repeat the rows of B sequences for L layers: L * B sequences, layer by layer, over `self.kv`."""
        L, T, (pages, page) = len(self.model.layers), len(rows.positions), self.cache.k.shape[1:3]
        B = len(rows.kv_len)
        every = repeat_rows(*rows[:5], rows.table, L, pages * page, pages)
        return Rows(*every[:5], sequence_bounds(T // B, self.model.device, L * B), every.table)

    def _gathered(self, layers: tuple[int, ...], ranks: Ranks, added: Tensor) -> Tensor:
        """Gather `added` [own, T, E] from every rank -> [N, T, E] for a group's `layers`."""
        N, R = len(layers), ranks.size
        if N % R == 0:  # equal shares: the ranks' order is the layers' order
            return ranks.gather(added).flatten(0, 1)
        most = -(-N // R)  # a rank with fewer layers sends padding
        sent = added.new_zeros(most, *added.shape[1:])
        sent[: len(added)] = added
        every = ranks.gather(sent)  # [R, most, T, E]
        owners = [self.schedule.owner(layer, R) for layer in layers]
        return torch.stack([every[r, owners[:i].count(r)] for i, r in enumerate(owners)])

    def _own(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The adjacent layers of a group that this rank attends for."""
        if self.ranks is None:
            return layers
        return tuple(n for n in layers if self.schedule.owner(n, self.ranks.size) == self.ranks.rank)

    def _group(self, layers: tuple[int, ...]) -> Group:
        """Make a group. Its stacks own the attention weights; the model's layers become views of them."""
        first, *others = (self.model.layers[n] for n in layers)
        if not others:
            return first
        if any(self.model.layers[n].mixer.recurrent for n in layers):
            raise ValueError(
                "EasySpec cannot run layers with a recurrent state side by side: choose other "
                f"{option('layer_parallel')} groups, or strategy draft"
            )
        if any(layer.sliding_window != first.sliding_window or layer.rope is not first.rope for layer in others):
            raise ValueError(
                "EasySpec cannot run layers with different sliding windows or RoPE side by side: choose other "
                f"{option('layer_parallel')} groups"
            )
        if own := self._own(layers):
            mixer = LayerWeights(**{name: self._stack(own, name) for name in ATTENTION})
        else:  # this rank attends for no layer: empty stacks
            one = self.model.layers[0].mixer
            mixer = LayerWeights(**{n: x[None][:0] for n in ATTENTION if (x := getattr(one, n)) is not None})
        return Group(mixer, tuple(self.model.layers[n].mixer for n in layers), first.rope, first.sliding_window)

    def _stack(self, layers: tuple[int, ...], name: str) -> Any:
        """Stack the layers' weights `name`, [N, ...], and make the layers' own weights views of it."""
        each = [getattr(self.model.layers[n].mixer, name) for n in layers]
        if each[0] is None:
            return None
        stack = _in_one(each)
        for i, n in enumerate(layers):
            w = replace(self.model.layers[n].mixer, **{name: stack[i]})
            self.model.layers[n] = self.model.layers[n]._replace(mixer=w, layers=(w,))
        return stack.squeeze(1) if name in ONE_ROW else stack


def _of_layers(batch: Rows, layers: tuple[int, ...], of: int) -> Rows:
    """Select the rows of adjacent `layers` from `batch`, which repeats them for `of` layers. Only slots and pages
    differ between layers."""
    N, T, B = len(layers), len(batch.positions) // of, len(batch.kv_len) // of
    first = layers[0] if layers else 0
    return Rows(
        positions=batch.positions[: N * T],
        slots=batch.slots[first * T : (first + N) * T],
        kv_len=batch.kv_len[: N * B],
        window=batch.window[: N * B],
        ancestors=batch.ancestors[: N * T],
        cu_rows=batch.cu_rows[: N * B + 1],
        table=batch.table[first * B : (first + N) * B],
    )


def _in_one(each: list[Any]) -> Any:
    """Stack N tensors or N quantised matrices of equal shape, [N, ...]; a view if they are tensors and adjacent in
    memory, as in a stacked checkpoint."""
    first = each[0]
    if any(isinstance(x, Quantized) for x in each):
        if not all(isinstance(x, Quantized) for x in each):
            raise ValueError(
                "EasySpec cannot run quantised and other layers side by side: choose other "
                f"{option('layer_parallel')} groups"
            )
        return joined(each, stack=True)
    if all(x.is_contiguous() for x in each):
        places = [(x.untyped_storage().data_ptr(), x.storage_offset()) for x in each]
        if places == [(places[0][0], places[0][1] + i * first.numel()) for i in range(len(each))]:
            return first.as_strided((len(each), *first.shape), (first.numel(), *first.stride()), first.storage_offset())
    return torch.stack(each)
