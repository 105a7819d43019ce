"""Texts that delta_rows and conv_rows decode in several ways, for tests and for the simulator."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specker.kernels.ancestors import ancestor_words, chain_words

BLOCK = 16


def inputs(n: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, a, b of n tokens, a_log and dt_bias."""
    g = torch.Generator().manual_seed(n)
    shapes = (n, Hk, Dk), (n, Hk, Dk), (n, Hv, Dv), (n, Hv), (n, Hv), (Hv,), (Hv,)
    q, k, v, a, b, a_log, dt_bias = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    return *(x.to(dtype) for x in (q, k, v, a, b)), (a_log / 2).to(wide), dt_bias.to(wide)


def defined(given: tuple[Tensor, ...]) -> Tensor:
    """The outputs [n, Hv, Dv] of the definition, with one state that every token changes, in float64."""
    q, k, v, a, b, a_log, dt_bias = (x.double() for x in given)
    (n, Hv, Dv), Dk = v.shape, q.shape[2]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(Hv // x.shape[1], 1) for x in (q, k))
    S, out = v.new_zeros(Hv, Dk, Dv), []
    for i in range(n):
        S = S * torch.exp(-a_log.exp() * torch.nn.functional.softplus(a[i] + dt_bias))[:, None, None]
        u = torch.sigmoid(b[i])[:, None] * (v[i] - torch.einsum("hkv,hk->hv", S, k[i]))
        S = S + k[i][:, :, None] * u[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", S, q[i]) * Dk**-0.5)
    return torch.stack(out)


def gates(n: int, Hv: int, Dv: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """z of n tokens, and the weight of the norm."""
    g = torch.Generator().manual_seed(n + 1)
    return tuple(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((n, Hv, Dv), (Dv,)))


def normed(out: Tensor, gate: tuple[Tensor, Tensor]) -> Tensor:
    """The gated RMSNorm of the outputs [n, Hv, Dv], in float64."""
    z, norm = (x.double() for x in gate)
    return torch.nn.functional.rms_norm(out, out.shape[-1:], norm, 1e-6) * torch.nn.functional.silu(z)


def apart(x: Tensor) -> Tensor:
    """x as a view of every second number of a tensor, whose other numbers are 1."""
    return torch.stack((x, torch.ones_like(x)), -1).flatten(-2)[..., ::2]


class Text:
    """A text of `count` tokens in a cache of small pages, whose order is random. Memory is NaN until it is written."""

    def __init__(self, op: Callable[..., Tensor], count: int, page: int, columns: int):
        self.op, self.count, self.page, pages = op, count, page, columns // page
        self.records: list[Tensor] = []  # [pages, page, ..] each
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3), dtype=torch.int32)
        self.table = order[None]
        self.slots = (order.long()[:, None] * page + torch.arange(page)).flatten()  # of each column

    def arguments(self, rows: list[int], first: int, positions: Tensor, words: Tensor | None) -> tuple[Any, ...]:
        """Of the op, for tokens `rows` in columns from `first` on. The window is the rows."""
        raise NotImplementedError

    def placed(self, first: int, n: int, chain: bool) -> tuple[Tensor, ...]:
        """slots, block_table, kv_len, window and cu_rows of n rows."""
        ints = [torch.tensor(x, dtype=torch.int32) for x in ([first + n], [0 if chain else n], [0, n])]
        return self.slots[first : first + n], self.table, *ints

    def run(self, rows: list[int], first: int, positions: Tensor, words: Tensor | None) -> Tensor:
        return self.op(*self.arguments(rows, first, positions, words))

    def chains(self, sizes: Iterator[int], words: bool = True) -> Tensor:
        """The whole text, decoded in chains of these sizes."""
        at, n, out = 0, self.count, []
        while at < n:
            rows = list(range(at, min(at + next(sizes), n)))
            out.append(self.run(rows, at, torch.tensor(rows), chain_words(len(rows)) if words else None))
            at += len(rows)
        return torch.cat(out)

    def trees(self, depth: int, seed: int = 0) -> Tensor:
        """The whole text, decoded in trees whose true path is hidden among wrong nodes; of it a random part is kept."""
        g, at, n, out = torch.Generator().manual_seed(seed), 0, self.count, []

        def draw(most: int) -> int:
            return int(torch.randint(0, most, (1,), generator=g))

        while at < n:
            rows, parents, positions, right = [at], [], [at], [0]
            for step in range(1, 1 + draw(depth)):
                for _ in range(draw(3)):
                    parents.append(draw(len(rows)))
                    positions.append(positions[parents[-1]] + 1)
                    rows.append(draw(n))
                if at + step < n:
                    parents.append(right[-1])
                    positions.append(at + step)
                    rows.append(at + step)
                    right.append(len(rows) - 1)
            words = ancestor_words(torch.tensor(parents, dtype=torch.int64)) if parents else chain_words(1)
            got = self.run(rows, at, torch.tensor(positions), words)
            kept = right[: 1 + draw(len(right))]
            out.append(got[kept])
            for step, row in enumerate(kept):
                for x in self.records:
                    x.flatten(0, 1)[self.slots[at + step]] = x.flatten(0, 1)[self.slots[at + row]].clone()
            at += len(kept)
        return torch.cat(out)


class World(Text):
    """The state and records of a gated delta rule. `gate`: z of each token and the norm of the output."""

    def __init__(
        self,
        op: Callable[..., Tensor],
        given: tuple[Tensor, ...],
        page: int = 8,
        columns: int = 128,
        gate: tuple[Tensor, Tensor] | None = None,
    ):
        super().__init__(op, len(given[0]), page, columns)
        self.given, self.gate = given, gate
        q, _, v, *_ = given
        Hk, Dk, Hv, Dv, pages = q.shape[1], q.shape[2], v.shape[1], v.shape[2], columns // page
        wide = torch.promote_types(q.dtype, torch.float32)
        self.states = torch.full((3, 2, Hv, Dk, Dv), torch.nan, dtype=wide)
        self.states[1, 0] = 0
        self.anchors = torch.zeros(3, Hv, dtype=torch.int64)
        self.records = [torch.full((pages, page, *s), torch.nan, dtype=wide) for s in ((Hk, Dk), (Hv, Dv), (Hv, 4))]

    def arguments(self, rows: list[int], first: int, positions: Tensor, words: Tensor | None) -> tuple[Any, ...]:
        *own, a_log, dt_bias = self.given
        memory = self.states, torch.tensor([1]), self.anchors, *self.records
        places = positions, *self.placed(first, len(rows), words is None), words, BLOCK
        gate = () if self.gate is None else (self.gate[0][rows], self.gate[1], 1e-6)
        return *(x[rows] for x in own), a_log, dt_bias, *memory, *places, *gate


class Signal(Text):
    """The channels of a convolution over K columns, and its cache. `bias`, `gates`: whether it has them."""

    def __init__(
        self,
        op: Callable[..., Tensor],
        K: int,
        activation: str,
        bias: bool,
        gates: bool,
        dtype: torch.dtype,
        C: int = 6,
        count: int = 75,
        page: int = 8,
        columns: int = 128,
    ):
        super().__init__(op, count, page, columns)
        self.activation = activation
        g, wide = torch.Generator().manual_seed(C), torch.promote_types(dtype, torch.float32)
        x, before, after = (torch.randn(count, C, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
        self.x, self.gates = x, (before, after) if gates else (None, None)
        self.weight = torch.randn(C, K, generator=g, dtype=torch.float64).to(wide)
        self.bias = torch.randn(C, generator=g, dtype=torch.float64).to(wide) if bias else None
        self.records = [torch.full((columns // page, page, C), torch.nan, dtype=dtype)]

    def arguments(self, rows: list[int], first: int, positions: Tensor, words: Tensor | None) -> tuple[Any, ...]:
        gates = (None if gate is None else gate[rows] for gate in self.gates)
        fixed = self.weight, self.bias, *self.records
        return self.x[rows], *fixed, *self.placed(first, len(rows), words is None), words, self.activation, *gates

    def defined(self) -> Tensor:
        """The outputs [n, C] of torch's convolution in float64."""
        before, after = self.gates
        r = self.x.double() if before is None else self.x.double() * before.double()
        C, K = self.weight.shape
        bias = None if self.bias is None else self.bias.double()
        padded = torch.nn.functional.pad(r.T[None], (K - 1, 0))
        y = torch.nn.functional.conv1d(padded, self.weight.double()[:, None], bias, groups=C)[0].T
        y = torch.nn.functional.silu(y) if self.activation == "silu" else y
        return y if after is None else y * after.double()
