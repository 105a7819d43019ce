"""An assistant for training, which reads the target's K/V: Gemma 4's. specker/model/assistant.py has the equations.

The target's K and V come from its kept row before the layer that has them, by its own frozen matrices. A window is all
that a chain sees of its text. The assistant is as wide as the target, and its LM head is the target's own and stays
frozen; in training it keeps the rows of frequent tokens. The layers start as the target's last ones, and the first row
as the target's. Unlike Gemma's they have SiLU, as the target's.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specker.checkpoints.checkpoint import Checkpoint
from specker.kernels.kv_calibrate import rope_table
from specker.model.config import ModelConfig
from train.head.eagle import Chained
from train.head.net import matrices_of
from train.head.taps import Batch

SUBLAYER = 0.3  # norms of the sublayers' outputs, at first


def source_of(c: ModelConfig) -> int:
    """The target's last layer that attends to the whole text, whose K and V an assistant reads. Raises ValueError."""
    full = [n for n in range(c.num_layers) if c.layer.mixer(n) is None and not c.layer.sliding_window(n)]
    own = [n for n in full if c.kv(n).source is None]
    if not own or c.layer.qk_norm == "projection" or c.rotated:
        raise ValueError(f"an assistant cannot read the K and V of {c.architecture}")
    return own[-1]


class Layer(nn.Module):
    """A Gemma 4 layer without K and V: its matrices, norms [H], and the norm of queries [D]."""

    q: Tensor  # [Hq * D, H]
    o: Tensor  # [H, Hq * D]
    gate: Tensor  # [F, H]
    up: Tensor  # [F, H]
    down: Tensor  # [H, F]
    norm_in: Tensor
    norm_o: Tensor
    norm_post: Tensor
    norm_down: Tensor
    q_norm: Tensor

    def __init__(self, found: dict[str, Tensor], dimension: int):
        """`found`: of a layer of the target. Queries keep about the length that they have there."""
        super().__init__()
        length = (found["q"] * found["norm_in"]).square().sum(1).mean().sqrt()
        own = {name: found[name] for name in ("q", "o", "gate", "up", "down", "norm_in", "norm_post")}
        own["q_norm"] = length * dimension**-0.5 * torch.ones_like(found["q"][:dimension, 0])  # scores have no factor
        own |= {name: torch.full_like(found["norm_in"], SUBLAYER) for name in ("norm_o", "norm_down")}
        for name, x in own.items():
            setattr(self, name, nn.Parameter(x))


class Reader(Chained):
    """An assistant. Its parameters are those of `layers`, and pre [H, 2 H], post [H, H] and norm [H]."""

    k: Tensor  # [Hkv * D, H], the target's, as are the next two
    v: Tensor  # [Hkv * D, H]
    norm_in: Tensor  # [H]

    def __init__(self, target: Checkpoint, ids: Tensor, steps: int = 3, layers: int = 2):
        """`ids`: the tokens whose rows the LM head keeps in training. `steps`: tokens of a chain. Raises ValueError."""
        c, w = target.config, target.weights
        self.source = n = source_of(c)
        super().__init__(target, (n,), ids, steps)
        first = c.num_layers - layers
        if first < 0:
            raise ValueError(f"an assistant of {layers} layers cannot start as the target's, which has {c.num_layers}")
        self.steps = steps
        rope = w.ropes[c.layer.rope(n)]
        Q, KV = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        last = matrices_of(target, n)
        frozen = {"k": last["k"], "v": last["v"], "norm_in": last["norm_in"]}
        frozen["rope"] = rope_table(rope.inv_freq, rope.scale, c.max_context + steps, w.norm.dtype)
        frozen["k_norm"] = w.norm.new_empty(0) if w.k_norm is None else w.k_norm[n]
        bias = w.norm.new_zeros(Q + 2 * KV) if w.qkv_bias is None else w.qkv_bias[n]
        frozen["kv_bias"] = bias[Q:]
        for name, x in frozen.items():
            self.register_buffer(name, x, persistent=False)
        self.layers = nn.ModuleList(Layer(matrices_of(target, first + i), c.head_dim) for i in range(layers))
        norm = w.norm.detach()
        self.pre = nn.Parameter(self._fused(2, norm))  # [embedding | row] -> the row
        self.post = nn.Parameter(torch.eye(c.hidden_size, dtype=norm.dtype))
        self.norm = nn.Parameter(norm.square().mean().sqrt() * torch.ones_like(norm))  # the row is normed already

    def drafts(self, batch: Batch, T: int, steps: int) -> list[Tensor]:
        rows = batch.taps[:, :T, 0], batch.last[:, :T]
        return self.chains(*rows, batch.ids[:, 1:], batch.place[:, :T], batch.text[:, :T], steps)

    def chains(
        self, before: Tensor, last: Tensor, tokens: Tensor, places: Tensor, text: Tensor, steps: int
    ) -> list[Tensor]:
        """What the assistant drafts from every position, with the true tokens: step k of the chain at position t, whose
        root is the token at t + 1, reads the token at t + 1 + k, and the target's row of t or its own row of the step
        before. All steps attend from t + 1 to the columns of its text up to t.

        before, last [B, T, H]: the target's rows before the layer `source`, and after its final norm; tokens [B, T +
        steps - 1] (and more), those after each position; places, text [B, T]. Returns rows for the LM head [B, T, H],
        one tensor a step."""
        T = last.shape[1]
        seen = (text[:, :, None] == text[:, None]) & torch.ones(T, T, dtype=torch.bool, device=text.device).tril()
        kv = self._target(before, places)
        feature, finals = last, []
        for step in range(steps):
            pair = torch.cat((F.embedding(tokens[:, step : step + T], self.embed), feature.to(self.embed.dtype)), -1)
            hidden = F.linear(pair, self.pre).to(self.norm.dtype)  # the stream keeps it under autocast, too
            for layer in self.layers:
                assert isinstance(layer, Layer)
                hidden = self._layer(hidden, layer, places + 1, seen, *kv)
            finals.append(self._norm(hidden, self.norm))
            feature = F.linear(finals[-1], self.post)
        return finals

    def _target(self, before: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The target's K and V [B, Hq, T, D], for each query head."""
        x, D = self._norm(before, self.norm_in), self.config.head_dim
        both = zip((self.k, self.v), self.kv_bias.chunk(2), strict=True)
        k, v = (F.linear(x, m, bias).unflatten(-1, (-1, D)).transpose(1, 2) for m, bias in both)
        k = self._norm(k, self.k_norm) if len(self.k_norm) else k
        return self._wide(self._rotated(k, places)), self._wide(v)

    def _layer(self, hidden: Tensor, w: Layer, places: Tensor, seen: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = self._norm(hidden, w.norm_in)
        q = F.linear(x, w.q).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        q = self._rotated(self._norm(q, w.q_norm), places)
        scores = (q @ k.mT).masked_fill(~seen[:, None], float("-inf"))
        mixed = (scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + self._norm(F.linear(mixed, w.o), w.norm_o).to(hidden.dtype)
        x = self._norm(hidden, w.norm_post)
        inner = F.linear(F.silu(F.linear(x, w.gate)) * F.linear(x, w.up), w.down)
        return hidden + self._norm(inner, w.norm_down).to(hidden.dtype)
