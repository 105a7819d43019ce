"""Muon for the matrices, AdamW for the rest, and the warm-up/stable/decay schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from .net import Net


def lr_scale(done: float, warmup: float = 0.02, decay: float = 0.25) -> float:
    """Factor on the peak rate after a fraction `done` of all tokens: linear up, flat, linear down to zero."""
    return min(1.0, (done + 1e-9) / warmup) * min(1.0, (1 - done) / decay)


def orthogonal(m: Tensor) -> Tensor:
    """[N,R,C] fp32 -> nearest semi-orthogonal matrices, by five quintic Newton-Schulz steps (Jordan et al., Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).to(torch.bfloat16)
    for _ in range(5):
        g = x @ x.mT
        x = a * x + (b * g + c * g @ g) @ x
    return (x.mT if tall else x).float()


def stacked(net: Net) -> list[tuple[Tensor, tuple[int, ...] | None]]:
    """The matrices of a Net's blocks, and the parts of stacked ones (qkv, gate/up)."""
    c = net.c
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts = {"qkv": (q, kv, kv), "out": None, "gate_up": (c.ffn, c.ffn), "down": None}
    return [(getattr(block, name), rows) for block in net.blocks for name, rows in parts.items()]


class Optimizer:
    """Orthogonalises matrices by part, and equal shapes of all layers in one batch."""

    def __init__(
        self,
        matrices: list[tuple[Tensor, tuple[int, ...] | None]],
        parameters: list[Tensor],
        lr: float,
        weight_decay: float = 0.1,
        betas=(0.9, 0.95),
        momentum: float = 0.95,
    ):
        """`matrices`: of `parameters`, each with the rows of its parts if several matrices are stacked in it."""
        self.matrices, self.parameters = matrices, parameters
        self.lr, self.decay, self.momentum = lr, weight_decay, momentum
        mine = {id(w) for w, _ in self.matrices}
        rest = [p for p in parameters if id(p) not in mine]
        groups = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
        self.buffers = [torch.zeros_like(w) for w, _ in self.matrices]

    @torch.no_grad()
    def step(self, scale: float, clip: float = 1.0) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, clip)
        lr = self.lr * scale
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for (w, sizes), buf in zip(self.matrices, self.buffers, strict=True):
            if w.grad is None:  # the layer was dropped in this step
                continue
            buf.lerp_(w.grad, 1 - self.momentum)
            update = w.grad.lerp(buf, self.momentum)  # Nesterov
            w.mul_(1 - lr * self.decay)
            sizes = sizes or (w.shape[0],)
            for piece, u in zip(w.split(sizes), update.split(sizes), strict=True):
                by_shape.setdefault(tuple(u.shape), []).append((piece, u))
        for (rows, cols), pairs in by_shape.items():
            # 0.2 sqrt(max) matches AdamW's update size, so that one rate serves both (Liu et al., 2025)
            updates = orthogonal(torch.stack([u for _, u in pairs])) * (-lr * 0.2 * max(rows, cols) ** 0.5)
            torch._foreach_add_([w for w, _ in pairs], list(updates.unbind()))
        for p in self.parameters:
            p.grad = None

    def state(self) -> dict:
        return {"adam": self.adam.state_dict(), "buffers": self.buffers}

    def load(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.buffers, state["buffers"], strict=True):
            mine.copy_(saved)
