"""An EAGLE-3 head for training: one Llama layer, whose equations stand in specker/model/heads.py.

The embedding and the LM head are the target's own and stay frozen; the LM head keeps the rows of frequent tokens. The
layer starts as the target's last one, fed with the deepest tap.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specker.checkpoints.checkpoint import Checkpoint
from specker.kernels.kv import rope_table

MATRICES = ("fc", "q", "k", "v", "o", "gate", "up", "down")
NORMS = ("embedding_norm", "hidden_norm", "post_norm", "norm")
MOST = 8  # unrolled steps


class Head(nn.Module):
    """Parameters by name: MATRICES, and NORMS [H]. H width, A taps, Hq query heads and Hkv KV heads of dimension D."""

    fc: Tensor  # [H, A * H]
    q: Tensor  # [Hq * D, 2 H], columns of the embedding first
    k: Tensor  # [Hkv * D, 2 H]
    v: Tensor  # [Hkv * D, 2 H]
    embed: Tensor  # [V, H], frozen
    head: Tensor  # [rows, H], frozen
    ids: Tensor  # [rows] int64, the token of each row of `head`
    row: Tensor  # [V] int64, the row of each token; -1: not kept

    def __init__(self, target: Checkpoint, taps: tuple[int, ...], ids: Tensor):
        """`target`: with plain weights in the dtype of training. Raises ValueError for a layer that is not Llama's."""
        super().__init__()
        self.config = c = target.config
        spec, w, n = c.layer, target.weights, c.num_layers - 1
        if spec.activation != "silu" or spec.norms != "before" or c.embed_scale != 1 or c.norm_offset != 0:
            raise ValueError(f"a head has Llama's layer, which cannot start as one of {c.architecture}")
        H, D, Q, KV = c.hidden_size, c.head_dim, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.taps = taps
        q, k, v = w.qkv[n].split((Q, KV, KV))  # type: ignore[union-attr]
        gate, up = w.gate_up[n].split(c.intermediate_size)  # type: ignore[union-attr]
        fc = torch.cat([torch.zeros(H, (len(taps) - 1) * H, dtype=q.dtype), torch.eye(H, dtype=q.dtype)], 1)
        made = {"fc": fc, "o": w.o[n], "gate": gate, "up": up, "down": w.down[n]}
        made |= {name: torch.cat([torch.zeros_like(x), x], 1) for name, x in (("q", q), ("k", k), ("v", v))}
        assert w.norm_in is not None and w.norm_post is not None
        made |= {"embedding_norm": torch.ones_like(w.norm), "hidden_norm": w.norm_in[n]}
        made |= {"post_norm": w.norm_post[n], "norm": w.norm}
        for name in (*MATRICES, *NORMS):
            setattr(self, name, nn.Parameter(made[name].detach().clone()))
        rope = w.ropes[spec.rope(n)]
        row = torch.full((c.vocab_size,), -1)
        row[ids] = torch.arange(len(ids))
        frozen = {"embed": w.embed, "head": w.head[ids], "ids": ids, "row": row}  # type: ignore[index]
        frozen["rope"] = rope_table(rope.inv_freq, rope.scale, c.max_context + MOST, q.dtype)
        for name, x in frozen.items():
            self.register_buffer(name, x, persistent=False)
        self.scale = D**-0.5

    def chains(self, taps: Tensor, tokens: Tensor, places: Tensor, text: Tensor, steps: int) -> list[Tensor]:
        """What the head drafts from every position, with the true tokens: at step k the chain that starts at position t
        reads the token at t + 1 + k and its own output of the step before, and predicts the token at t + 2 + k. It sees
        the true pairs up to t of its text, and its own pairs of steps 1 to k.

        taps [B, T, A, H]; tokens [B, T + steps - 1] (and more), those after each position: tokens[:, 0] is the one
        after position 0; places, text [B, T]. Returns rows for the LM head [B, T, H], one tensor a step."""
        T = taps.shape[1]
        seen = (text[:, :, None] == text[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
        hidden = F.linear(taps.flatten(2), self.fc).to(self.norm.dtype)  # the stream keeps it under autocast, too
        pairs: list[tuple[Tensor, Tensor]] = []
        finals = []
        for step in range(steps):
            hidden = self._layer(hidden, tokens[:, step : step + T], places + step, seen, pairs)
            finals.append(self._norm(hidden, self.norm))
        return finals

    def logits(self, final: Tensor) -> Tensor:
        """Rows for the LM head [.., H] -> logits [.., rows] float32, or float64."""
        return F.linear(final, self.head)

    def _layer(
        self, hidden: Tensor, tokens: Tensor, places: Tensor, seen: Tensor, pairs: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """A step's output [B, T, H]. `seen` [B, T, T]: which true pairs a chain sees. `pairs`: K and V of the steps so
        far [B, Hkv, T, D], to which this one's are added."""
        c = self.config
        entered = torch.cat(
            [self._norm(F.embedding(tokens, self.embed), self.embedding_norm), self._norm(hidden, self.hidden_norm)], -1
        )

        def heads(matrix: Tensor, count: int) -> Tensor:
            return F.linear(entered, matrix).unflatten(-1, (count, c.head_dim)).transpose(1, 2)

        q = self._rotated(heads(self.q, c.num_heads), places)
        pairs.append((self._rotated(heads(self.k, c.num_kv_heads), places), heads(self.v, c.num_kv_heads)))
        group = c.num_heads // c.num_kv_heads
        wide = [(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for k, v in pairs]
        (k, v), own = wide[0], wide[1:]
        scores = (q @ k.mT * self.scale).masked_fill(~seen[:, None], float("-inf"))
        mine = [(q * k).sum(-1, keepdim=True) * self.scale for k, _ in own]
        weights = torch.cat([scores, *mine], -1).float().softmax(-1).to(q.dtype)
        mixed = weights[..., : k.shape[2]] @ v
        for i, (_, v) in enumerate(own):
            mixed = mixed + weights[..., k.shape[2] + i, None] * v
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), self.o).to(hidden.dtype)
        x = self._norm(hidden, self.post_norm)
        return hidden + F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down).to(hidden.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """RoPE over x [B, heads, T, D] at `places` [B, T]."""
        cos, sin = self.rope[places].to(x.dtype).unsqueeze(1).unbind(3)
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
