"""Which of a drafter's layers run side by side, and the forward pass that runs them so (EasySpec, arXiv 2502.02493).

A schedule is an ordered list of groups of neighbouring layers. The layers of a group all attend from the group's own
input h; their feed-forwards then follow one another:

    a_i = o_i(attention_i(norm_in_i(h)))      i = 0..N-1, in one batch
    h   = h + a_i;  h = h + mlp_i(norm_post_i(h))

The K/V that a group of several layers writes is "fuzzy": not what the layers in sequence would write. A group of one is
a layer as it is.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specker.config import groups
from specker.kernels.attention import tree_attention
from specker.kernels.kv import kv_calibrate
from specker.kernels.merge import residual_merge
from specker.runtime.dist import Ranks
from specker.runtime.model.cache import KVCache, Rows
from specker.runtime.model.checkpoint import Weights
from specker.runtime.model.decoder import Model, forward, sequence_bounds
from specker.runtime.ops.repeat import Repeated, repeat_rows


@dataclass(frozen=True)
class Schedule:
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        order = [layer for group in self.groups for layer in group]
        if not order or order != list(range(len(order))) or not all(self.groups):
            raise ValueError(f"a schedule's groups hold every layer from 0 on once and in order, got {self}")

    @classmethod
    def parallel(cls, layers: int, width: int) -> "Schedule":
        """Groups of `width`, the last perhaps shorter; the first and the last layer stand alone."""
        inner = range(1, layers - 1)
        groups = (tuple(inner[i : i + width]) for i in range(0, len(inner), width))
        return cls(((0,), *groups, (layers - 1,)) if layers > 1 else ((0,),))

    @classmethod
    def parse(cls, text: str, layers: int) -> "Schedule":
        """--layer-parallel for a model of `layers`."""
        value = groups(text)
        if isinstance(value, int):
            return cls.parallel(layers, value)
        if (count := sum(map(len, value))) != layers:
            raise ValueError(f"--layer-parallel {text} has {count} layers, but the draft has {layers}")
        return cls(value)

    def owner(self, layer: int, ranks: int) -> int:
        """The rank that runs `layer` within its group, where several share the work: neighbours stay together."""
        group = next(g for g in self.groups if layer in g)
        return group.index(layer) * ranks // len(group) if len(group) > 1 else 0

    def __str__(self) -> str:
        return json.dumps(self.groups, separators=(",", ":"))


@dataclass(frozen=True)
class _Group:
    """What a batch over a group's layers needs. The stacks own the layers' weights; the model's layers are views."""

    layers: tuple[int, ...]
    own: tuple[int, ...]  # those of them that this rank attends for; the tensors below are theirs
    norm_in: Tensor  # [N, E]
    qkv: Tensor  # [N, O, E]
    qkv_bias: Tensor | None  # [N, O]
    q_norm: Tensor | None  # [N, D]
    k_norm: Tensor | None
    o: Tensor  # [N, E, Hq * D]
    o_bias: Tensor | None  # [N, E]


class LayerParallel:
    """A model whose layers run by a schedule over one cache; where several ranks draft, each attends for its own layers
    of a group, and their results are gathered. All else every rank does for itself, so that no hidden row need be sent.
    Fuzzy K/V stands with the owner alone; the pass that makes it exact is whole on every rank."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        schedule: Schedule,
        ranks: Ranks | None = None,
        weights: Weights | None = None,
    ):
        """Moves the weights of wide groups into stacks, a group at a time; `model`, and the checkpoint's `weights` that
        it was made of, go on with views of them."""
        self.model, self.cache, self.schedule, self._weights = model, cache, schedule, weights
        self.ranks = ranks if ranks is not None and ranks.drafting > 1 else None
        self.k, self.v = (x.flatten(0, 1) for x in (cache.k, cache.v))  # views: [L * pages, page, Hkv, D]
        self.groups = [self._group(layers) if len(layers) > 1 else None for layers in schedule.groups]

    def forward(self, rows: Rows, hidden: Tensor) -> Tensor:
        """hidden [T, E], the embedding -> [T, E], the residual stream after all layers, by the schedule. Writes the
        rows' K/V, fuzzy in groups of several layers."""
        model, eps = self.model, self.model.config.rms_norm_eps
        pending = hidden.unsqueeze(0)[:0]  # [P, T, E], what is yet to be added to `hidden`
        pages, page = self.cache.k.shape[1:3]
        batch = None
        if any(self.groups):
            batch = repeat_rows(*rows, self.cache.table, len(model.layers), pages * page, pages)
        for layers, group in zip(self.schedule.groups, self.groups, strict=True):
            if group is None:
                if len(pending):
                    hidden, _ = residual_merge(hidden, pending, None, eps)
                    pending = pending[:0]
                hidden = forward(model, self.cache, rows, hidden, slice(layers[0], layers[0] + 1)).hidden
                continue
            hidden, normed = residual_merge(hidden, pending, group.norm_in, eps)
            attended = self._attend(group, batch, normed) if batch is not None and group.own else normed
            if self.ranks is not None:
                attended = self._gathered(group, attended, self.ranks)
            pending = attended[:1]
            for i, n in enumerate(layers):
                w, last = model.layers[n], attended[i] if i else None
                hidden, post = residual_merge(hidden, pending, w.norm_post.unsqueeze(0), eps, last)
                up = model.linear(post[0], w.gate_up, w.gate_up_bias, epilogue="silu_mul")
                pending = model.linear(up, w.down, w.down_bias).unsqueeze(0)
        if len(pending):
            hidden, _ = residual_merge(hidden, pending, None, eps)
        return hidden

    def _gathered(self, group: _Group, attended: Tensor, ranks: Ranks) -> Tensor:
        """attended [own, T, E] of every rank -> [N, T, E]."""
        N, R = len(group.layers), ranks.drafting
        if N % R == 0:  # neighbours stay together: the ranks' order is the layers'
            return ranks.gather(attended).flatten(0, 1)
        most = -(-N // R)  # a rank with fewer sends padding
        sent = attended.new_zeros(most, *attended.shape[1:])
        sent[: len(group.own)] = attended
        every = ranks.gather(sent)  # [R, most, T, E]
        owners = [self.schedule.owner(layer, R) for layer in group.layers]
        return torch.stack([every[r, owners[:i].count(r)] for i, r in enumerate(owners)])

    def _group(self, layers: tuple[int, ...]) -> _Group:
        own = layers
        if self.ranks is not None:
            own = tuple(n for n in layers if self.schedule.owner(n, self.ranks.drafting) == self.ranks.rank)
        return _Group(layers, *self._stacked(own))

    def _attend(self, group: _Group, batch: Repeated, normed: Tensor) -> Tensor:
        """normed [N, T, E], each layer's own -> [N, T, E], what each layer's attention adds. N layers are a batch of N
        sequences, whose K/V stand in the same columns of their own layers' pages; `batch` has the rows of all layers,
        alike but for the slots and pages."""
        N, T, _ = normed.shape
        config, model, first = self.model.config, self.model, group.own[0]
        qkv = model.linear(normed, group.qkv, group.qkv_bias).flatten(0, 1)
        q = kv_calibrate(
            qkv,
            batch.positions[: N * T],
            batch.slots[first * T : (first + N) * T],
            model.rope,
            self.k,
            self.v,
            group.q_norm,
            group.k_norm,
            config.rms_norm_eps,
        )
        mixed, _ = tree_attention(
            q,
            self.k,
            self.v,
            batch.table[first : first + N],
            batch.kv_len[:N],
            batch.window[:N],
            sequence_bounds(T, q.device, N),
            batch.ancestors[: N * T],
            model.scale,
            with_lse=False,
        )
        return model.linear(mixed.reshape(N, T, -1), group.o, group.o_bias)

    def _stacked(self, layers: tuple[int, ...]) -> Iterator:
        yield layers
        if not layers:  # this rank waits for the others
            yield self.model.layers[0].norm_in.new_empty(0, self.model.config.hidden_size)
            yield from (None,) * 6
        else:
            for name in ("norm_in", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias"):
                yield self._stack(layers, name)

    def _stack(self, layers: tuple[int, ...], name: str) -> Tensor | None:
        """The layers' tensors of one name in one, [N, ...], and the layers' own as views of it."""
        each = [getattr(self.model.layers[n], name) for n in layers]
        if each[0] is None:
            return None
        stack = _in_one(each)
        for i, n in enumerate(layers):
            self.model.layers[n] = self.model.layers[n]._replace(**{name: stack[i]})
            held = getattr(self._weights, name, None)
            if isinstance(held, list):  # one tensor a layer: the last that holds the old one
                held[n] = stack[i].view_as(held[n])
        return stack.squeeze(1) if name in ("q_norm", "k_norm") else stack  # [1, D] each


def _in_one(each: list[Tensor]) -> Tensor:
    """Equal tensors as one, [N, ...]: a view where they stand one behind another, as a stacked checkpoint's do."""
    first = each[0]
    if all(x.is_contiguous() for x in each):
        places = [(x.untyped_storage().data_ptr(), x.storage_offset()) for x in each]
        if places == [(places[0][0], places[0][1] + i * first.numel()) for i in range(len(each))]:
            return first.as_strided((len(each), *first.shape), (first.numel(), *first.stride()), first.storage_offset())
    return torch.stack(each)
