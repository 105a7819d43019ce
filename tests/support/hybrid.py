"""Small random layers of every kind on the compiled CPU layers, their definition, and a cache for them."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.cpu import Packed, packed
from specker.cpu.layers import CachedRows, Records, Stack
from specker.kernels.ancestors import chain_words
from specker.kernels.quant import quantised
from specker.layer_weights import KINDS, LayerWeights
from specker.model.config import DeltaNet, Experts, LayerSpec, Mixer, ShortConv

E = 64
HQ = 4
HKV = 2
D = 32
FFN = 96
EPS = 1e-6
DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=32, value_dim=48, kernel=4)
TILED = DeltaNet(key_heads=2, value_heads=6, key_dim=32, value_dim=16, kernel=4, tiled=True)
CONV = ShortConv(channels=80, kernel=3)
PAGE = 8  # columns of a page


class Hybrid:
    """Layers of a stack, and its definition in float64."""

    def __init__(
        self,
        mixers: Sequence[Mixer | None],
        experts: Experts | None = None,
        gated: bool = True,
        separate: bool = False,
        quantize: str | None = None,
    ):
        """`separate`: the gates a and b have a matrix of their own."""
        g = torch.Generator().manual_seed(5)

        def random(*shape: int, scale: float | None = None) -> Tensor:
            return torch.randn(shape, generator=g) * (shape[-1] ** -0.5 if scale is None else scale)

        self.spec = LayerSpec(mixers=tuple(mixers), gated=gated, qk_norm="head", experts=experts)
        self.mixers, self.layers = tuple(mixers), []
        turn = torch.outer(torch.arange(512.0), 100 ** (-torch.arange(0, D, 2) / D))
        self.rope = torch.stack((turn.cos().repeat(1, 2), torch.cat((-turn.sin(), turn.sin()), 1)), 1)
        for mixer in mixers:
            own: dict[str, Any] = dict.fromkeys(KINDS)
            own["norm_in"], own["norm_post"] = 1 + random(E, scale=0.1), 1 + random(E, scale=0.1)
            if mixer is None:
                own["qkv"] = random((HQ * (1 + gated) + 2 * HKV) * D, E)
                own["q_norm"], own["k_norm"] = 1 + random(D, scale=0.1), 1 + random(D, scale=0.1)
                own["o"] = random(E, HQ * D)
            else:
                own["qkv"], own["o"] = random(mixer.projected, E), random(E, mixer.values)
                own["conv"] = random(mixer.channels, mixer.kernel, scale=0.5)
            if isinstance(mixer, DeltaNet):
                own["a_log"] = random(mixer.value_heads, scale=1)
                own["dt_bias"] = random(mixer.value_heads, scale=1) - 2
                own["norm_mix"] = 1 + random(mixer.value_dim, scale=0.1)
                if separate:
                    gates = 2 * mixer.value_heads
                    own["qkv"], own["gates"] = own["qkv"][:-gates].contiguous(), own["qkv"][-gates:].contiguous()
            if experts is None:
                own["gate_up"], own["down"] = random(2 * FFN, E), random(E, FFN)
            else:
                X, width, S = experts.count, experts.width, experts.shared
                own["gate_up"], own["down"] = random(X, 2 * width, E), random(X, E, width)
                own["router"] = random(X, E)
                own["router_bias"] = random(X, scale=0.3) if experts.biased else None
                if S:
                    own["shared_gate_up"], own["shared_down"] = random(2 * S, E), random(E, S)
                    own["shared_gate"] = random(1, E)
            for name in ("qkv", "o", "gate_up", "down") if quantize else ():
                own[name] = packed.of_quantised(quantised(own[name], quantize))
            self.layers.append(own)
        given = [LayerWeights(**own) for own in self.layers]
        assert Stack.takes(given, D) and not Stack.lacks(self.spec)
        ropes = [self.rope if mixer is None else None for mixer in mixers]
        self.stack = Stack(given, self.spec, (HQ, HKV), ropes, EPS, D**-0.5)

    def defined(self, x: Tensor) -> Tensor:
        """The residual stream [n, E] float64 after the layers, of a text whose rows enter as x [n, E]."""
        x = x.double()
        for own, mixer in zip(self.layers, self.mixers, strict=True):
            dense = {name: w.dequantised(torch.float32) if isinstance(w, Packed) else w for name, w in own.items()}
            w = {name: None if each is None else each.double() for name, each in dense.items()}
            normed = norm(x, w["norm_in"])
            x = x + {DeltaNet: delta_net, ShortConv: short_conv}.get(type(mixer), self.attention)(normed, w, mixer)
            x = x + self.feed_forward(norm(x, w["norm_post"]), w)
        return x

    def attention(self, x: Tensor, w: dict[str, Any], _: None) -> Tensor:
        n, (cos, sin) = len(x), self.rope.double().unbind(1)
        *gate, q, k, v = (x @ w["qkv"].T).split([*[HQ * D] * self.spec.gated, HQ * D, HKV * D, HKV * D], 1)
        q, k, v = (each.view(n, -1, D) for each in (q, k, v))
        q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        q, k = (a * cos[:n, None] + a.roll(D // 2, -1) * sin[:n, None] for a in (q, k))
        k, v = (each.repeat_interleave(HQ // HKV, 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * D**-0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        return (mixed * gate[0].sigmoid() if gate else mixed) @ w["o"].T

    def feed_forward(self, x: Tensor, w: dict[str, Any]) -> Tensor:
        def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            gate, up = (x @ gate_up.T).chunk(2, -1)
            return (F.silu(gate) * up) @ down.T

        experts = self.spec.experts
        if experts is None:
            return swiglu(x, w["gate_up"], w["down"])
        logits = x @ w["router"].T
        p = logits.sigmoid() if experts.scoring == "sigmoid" else logits.softmax(-1)
        chosen = (p if w["router_bias"] is None else p + w["router_bias"]).topk(experts.chosen).indices
        scores = p.gather(1, chosen)
        scores = scores / (scores.sum(-1, keepdim=True) + experts.eps) if experts.normalised else scores
        scores = scores * experts.scale
        out = [
            sum(p * swiglu(row, w["gate_up"][e], w["down"][e]) for p, e in zip(*one, strict=True))
            for row, *one in zip(x, scores, chosen, strict=True)
        ]
        y = torch.stack(out)
        if experts.shared:
            y = y + (x @ w["shared_gate"].T).sigmoid() * swiglu(x, w["shared_gate_up"], w["shared_down"])
        return y


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, C], weight [C, K]: a causal convolution of each channel."""
    K = weight.shape[1]
    padded = torch.cat((x.new_zeros(K - 1, x.shape[1]), x))
    y = sum(padded[j : j + len(x)] * weight[:, j] for j in range(K))
    assert isinstance(y, Tensor)
    return y


def delta_net(x: Tensor, w: dict[str, Any], m: DeltaNet) -> Tensor:
    rows = w["qkv"] if w["gates"] is None else torch.cat((w["qkv"], w["gates"]))
    mixed, z, b, a = (x @ rows.T).split([m.channels, m.values, m.value_heads, m.value_heads], 1)
    mixed, keys = F.silu(convolution(mixed, w["conv"])), m.key_heads * m.key_dim
    q, k, v = mixed.split([keys, keys, m.values], 1)
    q, k = (each.view(len(x), -1, m.key_dim) for each in (q, k))
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q, k = (each.repeat_interleave(m.value_heads // m.key_heads, 1) for each in (q, k))
    v, z = (each.view(len(x), -1, m.value_dim) for each in (v, z))
    decay, beta = torch.exp(-w["a_log"].exp() * F.softplus(a + w["dt_bias"])), b.sigmoid()
    S, out = x.new_zeros(m.value_heads, m.key_dim, m.value_dim), []
    for i in range(len(x)):
        S = S * decay[i][:, None, None]
        u = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", S, k[i]))
        S = S + k[i][:, :, None] * u[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", S, q[i]) * m.key_dim**-0.5)
    heads = norm(torch.stack(out), w["norm_mix"]) * F.silu(z)
    if m.tiled:
        heads = heads[:, [h for first in range(3) for h in range(first, m.value_heads, 3)]]
    return heads.flatten(1) @ w["o"].T


def short_conv(x: Tensor, w: dict[str, Any], _: ShortConv) -> Tensor:
    b, c, inner = (x @ w["qkv"].T).chunk(3, 1)
    return (c * convolution(b * inner, w["conv"])) @ w["o"].T


class Cache:
    """K/V and records of some sequences. Memory is NaN until it is written; the order of pages is random."""

    def __init__(self, model: Hybrid, sequences: int = 1, columns: int = 256, ring: int = 0):
        """`ring`: columns of the records of a sequence; 0: all."""
        self.model, self.columns, self.lengths = model, columns, [0] * sequences
        recurrent = [mixer for mixer in model.mixers if mixer is not None]
        L, ring = len(recurrent), ring or columns
        order = torch.randperm(2 * sequences * columns // PAGE, generator=torch.Generator().manual_seed(3))

        def pages(each: int) -> Tensor:
            own = order[: sequences * each // PAGE].view(sequences, -1).int()
            return own.repeat(1, -(-columns // each))[:, : columns // PAGE].contiguous()

        def empty(*shape: int) -> Tensor:
            return torch.full(shape, torch.nan)

        self.table, self.ring = pages(columns), pages(ring)
        rows, attending = (len(order), PAGE), len(model.mixers) - L
        self.kv = empty(attending, *rows, HKV, D), empty(attending, *rows, HKV, D)
        self.inputs = empty(L, *rows, recurrent[0].channels)
        self.memory: list[Any] = [None] * 5
        if isinstance(m := recurrent[0], DeltaNet):
            shapes = (m.key_heads, m.key_dim), (m.value_heads, m.value_dim), (m.value_heads, 4)
            self.memory[:3] = [empty(L, *rows, *shape) for shape in shapes]
            self.memory[3] = empty(L, sequences + 1, 2, m.value_heads, m.key_dim, m.value_dim)
            self.memory[3][:, :, 0] = 0
            self.memory[4] = torch.zeros(L, sequences + 1, m.value_heads, dtype=torch.int64)

    def slots(self, table: Tensor, sequence: int) -> Tensor:
        """The flattened rows of the columns of a sequence."""
        return (table[sequence].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def arguments(self, parts: Sequence[tuple[int, int, Tensor | None]]) -> CachedRows:
        """For the number of rows and the ancestor words of some sequences."""
        counts, which = [n for _, n, _ in parts], [b for b, _, _ in parts]
        spans = [slice(self.lengths[b], self.lengths[b] + n) for b, n in zip(which, counts, strict=True)]
        positions, words = [], []
        for span, (_, n, own) in zip(spans, parts, strict=True):
            own = chain_words(n) if own is None else own
            words.append(F.pad(own, (0, 4 - own.shape[1])))
            bits = own[:, :, None] >> torch.arange(64) & 1
            positions.append(span.start + bits.sum((1, 2)) - 1)
        masked = any(own is not None for _, _, own in parts)
        slots, past = (
            torch.cat([self.slots(table, b)[span] for b, span in zip(which, spans, strict=True)])
            for table in (self.table, self.ring)
        )
        bounds = torch.tensor([0, *counts]).cumsum(0).int()
        lengths, window = (torch.tensor(x, dtype=torch.int32) for x in ([span.stop for span in spans], counts))
        records = Records(self.inputs, *self.memory, past, self.ring[which], torch.tensor(which) + 1)
        return CachedRows(
            self.kv,
            torch.cat(positions),
            slots,
            bounds,
            lengths,
            window,
            torch.cat(words) if masked else None,
            self.table[which],
            records=records,
        )

    def run(self, x: Tensor, parts: Sequence[tuple[int, int, Tensor | None]]) -> Tensor:
        """The residual stream after the layers, of rows that enter as x [T, E]."""
        return self.model.stack.run(x, self.arguments(parts), range(len(self.model.layers) + 1))[0][0]

    def keep(self, sequence: int, path: Sequence[int]) -> None:
        """Commit these of the last call's rows of a sequence."""
        at = self.lengths[sequence]
        kept = [(self.table, self.kv), (self.ring, (self.inputs, *(x for x in self.memory[:3] if x is not None)))]
        for table, memory in kept:
            slots = self.slots(table, sequence)
            for x in memory:
                flat = x.flatten(1, 2)
                for step, row in enumerate(path):
                    flat[:, slots[at + step]] = flat[:, slots[at + row]].clone()
        self.lengths[sequence] += len(path)

    def text(self, x: Tensor, sizes: Sequence[int], sequence: int = 0, words: bool = False) -> Tensor:
        """A whole text in chains of these sizes, over and over."""
        out, size = [x[:0]], cycle(sizes)
        while len(x):
            n = min(next(size), len(x))
            out.append(self.run(x[:n], [(sequence, n, chain_words(n) if words else None)]))
            self.keep(sequence, range(n))
            x = x[n:]
        return torch.cat(out)
