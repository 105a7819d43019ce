"""The decoder of the bundled family: Llama (causal) or Qwen2 in Dream's layout (bidirectional, qkv bias), for training.

Weights are fp32 masters; computation runs in `Net.compute` (bf16 on AMX or CUDA). export.py has the weights' names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 8192
    head_dim: int = 64
    context: int = 1024
    rope_theta: float = 10000.0
    eps: float = 1e-5
    diffusion: bool = (
        False  # bidirectional attention, qkv bias, row i predicts the token at i + 1 as in the causal case
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B,T,H,D], cos and sin [T,1,D]; the half-split convention of Llama."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    """One pre-norm decoder layer; qkv and gate/up are stacked into one matrix each."""

    def __init__(self, c: NetConfig):
        super().__init__()
        self.c = c
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.norm1 = nn.Parameter(torch.ones(c.hidden))
        self.qkv = nn.Parameter(torch.empty(q + 2 * kv, c.hidden))
        self.bias = nn.Parameter(torch.zeros(q + 2 * kv)) if c.diffusion else None
        self.out = nn.Parameter(torch.empty(c.hidden, q))
        self.norm2 = nn.Parameter(torch.ones(c.hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * c.ffn, c.hidden))
        self.down = nn.Parameter(torch.empty(c.hidden, c.ffn))
        for w in (self.qkv, self.gate_up):
            nn.init.normal_(w, std=c.hidden**-0.5)
        for w in (self.out, self.down):
            nn.init.normal_(w, std=(2 * c.layers * w.shape[1]) ** -0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, past=None) -> Tensor:
        """x [B,T,E] -> [B,T,E]. `mask` [T,T] bool: what each row sees, instead of the config's default (causal or all).

        `past` = (K, V [B,Hkv,length,D], rows already there). The new rows go after them: one row, or many into an empty
        cache. Raises ValueError for many rows after others."""
        c, t = self.c, x.dtype
        b, n, _ = x.shape
        h = F.rms_norm(x, (c.hidden,), self.norm1.to(t), c.eps)
        h = F.linear(h, self.qkv.to(t), None if self.bias is None else self.bias.to(t))
        q, k, v = h.view(b, n, -1, c.head_dim).split((c.heads, c.kv_heads, c.kv_heads), dim=2)
        q, k, v = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        causal = not c.diffusion and n > 1
        if past is not None:
            keys, values, done = past
            keys[:, :, done : done + n], values[:, :, done : done + n] = k, v
            k, v = keys[:, :, : done + n], values[:, :, : done + n]
            if n > 1 and done:
                raise ValueError(f"expected one new row behind a filled cache, got {n}")
        if n == 1:  # the heads of a group become the rows of one query: K and V are not copied
            a = F.scaled_dot_product_attention(q.reshape(b, c.kv_heads, -1, c.head_dim), k, v)
        else:
            k, v = (z.repeat_interleave(c.heads // c.kv_heads, dim=1) for z in (k, v))
            a = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None).transpose(1, 2)
        x = x + F.linear(a.reshape(b, n, -1), self.out.to(t))
        h = F.rms_norm(x, (c.hidden,), self.norm2.to(t), c.eps)
        gate, up = F.linear(h, self.gate_up.to(t)).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down.to(t))

    cached = forward  # stays eager when `forward` is compiled: every step has other shapes


class Net(nn.Module):
    def __init__(self, c: NetConfig, compute: torch.dtype = torch.float32):
        super().__init__()
        self.c, self.compute = c, compute
        self.embed = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.hidden))
        freq = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.outer(torch.arange(c.context).float(), freq).repeat(1, 2)[:, None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def final(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.c.hidden,), self.norm.to(x.dtype), self.c.eps)

    def forward(
        self, ids: Tensor, skip=frozenset(), taps=(), mask: Tensor | None = None, rows=None, past=None, done: int = 0
    ):
        """ids [B,T] -> normed hidden rows [B,T,E] after the last layer; with `taps` also those after each listed layer.

        `skip`: layers to leave out (layer dropout). `mask`: see Block. `rows` [T]: positions (default: done, done + 1,
        ...). `past`: a cache from `new_cache` that holds `done` rows."""
        x = F.embedding(ids, self.embed).to(self.compute)
        rows = slice(done, done + ids.shape[1]) if rows is None else rows
        cos, sin = self.cos[rows].to(x.dtype), self.sin[rows].to(x.dtype)
        exits = []
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = block(x, cos, sin, mask) if past is None else block.cached(x, cos, sin, past=(*past[:, i], done))
            if i in taps:
                exits.append(self.final(x))
        return (self.final(x), exits) if taps else self.final(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.to(hidden.dtype))

    def new_cache(self, batch: int, length: int) -> Tensor:
        c = self.c
        shape = (2, c.layers, batch, c.kv_heads, length, c.head_dim)
        return torch.zeros(shape, dtype=self.compute, device=self.embed.device)


def _head_chunk(h: Tensor, weight: Tensor, label: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row [n] and its gradient with respect to the logits [n,V], for integer labels."""
    logits = F.linear(h, weight).float()
    lse = logits.logsumexp(-1)
    loss = lse - logits.gather(1, label[:, None])[:, 0]
    hit = torch.arange(logits.shape[1], device=h.device)[None] == label[:, None]
    grad = ((logits - lse[:, None]).exp() - hit.to(logits.dtype)) * scale[:, None]
    return loss, grad.to(h.dtype)


def _head_chunk_kl(h: Tensor, weight: Tensor, label: Tensor, scale: Tensor, teacher: Tensor, hard: float, heat: Tensor):
    """Like `_head_chunk`, against the mixture (1 - hard) * softmax(teacher logits) + hard * one-hot label.

    All at temperature `heat` (a tensor, so that a new value does not recompile)."""
    logits, t = F.linear(h, weight).float() / heat, teacher.float() / heat
    logq = logits - logits.logsumexp(-1, keepdim=True)
    logp = t - t.logsumexp(-1, keepdim=True)
    p = logp.exp()
    hit = (torch.arange(logits.shape[1], device=h.device)[None] == label[:, None]).to(logits.dtype)
    loss = (1 - hard) * (p * (logp - logq)).sum(-1) - hard * (hit * logq).sum(-1)
    grad = (logq.exp() - (1 - hard) * p - hard * hit) * (scale[:, None] / heat)
    return loss, grad.to(h.dtype)


class LinearLoss(torch.autograd.Function):
    """sum_i scale_i * loss_i of the tied head, in chunks of rows, so that fp32 logits [T,V] never exist.

    hidden [T,E], weight [V,E], label [T] int64, scale [T]; `teacher`: None, or (rows [T,E'], weight [V,E']) of the net
    whose softmax at temperature `heat` is the soft label. The gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, label, scale, teacher, hard, heat, ops, chunk):
        w = weight.to(hidden.dtype)
        dh, dw = torch.empty_like(hidden), torch.zeros_like(weight)
        losses = torch.empty(len(hidden), device=hidden.device)
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            if teacher is None:
                losses[s], g = ops[0](hidden[s], w, label[s], scale[s])
            else:
                losses[s], g = ops[1](hidden[s], w, label[s], scale[s], F.linear(teacher[0][s], teacher[1]), hard, heat)
            dh[s] = g @ w
            dw += g.T @ hidden[s]
        ctx.save_for_backward(dh, dw)
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx, grad, _):
        dh, dw = ctx.saved_tensors
        return dh * grad.to(dh.dtype), dw * grad, None, None, None, None, None, None, None
