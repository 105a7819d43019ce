"""An EAGLE-3 head for training: one Llama layer, whose equations stand in specker/model/heads.py.

The embedding and the LM head are the target's own and stay frozen; the LM head keeps the rows of frequent tokens. The
layer starts as the target's last one, fed with the deepest tap.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specker.checkpoints.checkpoint import Checkpoint
from train.head.net import Net, matrices_of
from train.head.taps import Batch

MOST = 8  # unrolled steps
STEP_WEIGHT = 0.8  # step k of a chain counts 0.8 ** k
FIRST = 0.1  # this share of training has chains of one step


class Chained(Net):
    """A head that drafts a chain token by token, in training from every position at once."""

    steps: int  # tokens of a chain in training

    def drafts(self, batch: Batch, T: int, steps: int) -> list[Tensor]:
        """What chains draft from the first T positions of a batch over the true tokens: rows for the LM head
        [B, T, H], one tensor a step. Step k of the chain at position t predicts the token at t + 2 + k."""
        raise NotImplementedError

    def loss(self, batch: Batch, share: float, heat: float, turn: int) -> Tensor:
        """Chains of one step at first, then unrolled ones. A position whose most probable token is not kept does not
        count."""
        steps = 1 if share < FIRST else self.steps
        T = batch.ids.shape[1] - steps
        chains = self.drafts(batch, T, steps)
        weights = (batch.weight * (self.row[batch.best] >= 0))[:, 1:]
        teacher = self.taught(batch.last[:, 1:].flatten(0, 1), heat)
        places = torch.arange(len(teacher.entropy), device=weights.device).view_as(weights)
        total = sums = batch.weight.new_zeros(())
        for step, final in enumerate(chains):
            at = slice(step, step + T)
            weight = STEP_WEIGHT**step * weights[:, at] * (batch.text[:, :T] == batch.text[:, 1:][:, at])
            own, rows = places[:, at].flatten(), final.flatten(0, 1)
            total = total + self.divergence(teacher, own, rows, weight.flatten(), heat)
            sums = sums + weight.sum()
        return total / sums.clamp(min=1)

    @torch.no_grad()
    def agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """At each step of chains over the true tokens."""
        T = batch.ids.shape[1] - self.steps
        chains = self.drafts(batch, T, self.steps)
        right, of = [], []
        for step, final in enumerate(chains):
            at = slice(step + 1, step + 1 + T)
            counts = (batch.weight[:, at] == 1) & (batch.text[:, :T] == batch.text[:, at])
            drafted = self.ids[self.logits(final).argmax(-1)]
            right.append(((drafted == batch.best[:, at]) & counts).sum())
            of.append(counts.sum())
        return torch.stack(right), torch.stack(of)


class Head(Chained):
    """Its matrices, and its norms [H]."""

    fc: Tensor  # [H, A * H]
    q: Tensor  # [Hq * D, 2 H], columns of the embedding first
    k: Tensor  # [Hkv * D, 2 H]
    v: Tensor  # [Hkv * D, 2 H]
    o: Tensor  # [H, Hq * D]
    gate: Tensor  # [F, H]
    up: Tensor  # [F, H]
    down: Tensor  # [H, F]
    embedding_norm: Tensor
    hidden_norm: Tensor
    post_norm: Tensor
    norm: Tensor

    def __init__(self, target: Checkpoint, taps: tuple[int, ...], ids: Tensor, steps: int = 3):
        """As `Net`. `steps`: tokens of a chain in training."""
        super().__init__(target, taps, ids, steps)
        self.steps = steps
        last = matrices_of(target, self.config.num_layers - 1)
        own = {"fc": self._fused(len(taps), last["q"])}
        own |= {name: torch.cat([torch.zeros_like(last[name]), last[name]], 1) for name in "qkv"}
        own |= {name: last[name] for name in ("o", "gate", "up", "down")}
        norm = target.weights.norm
        own |= {"embedding_norm": torch.ones_like(norm), "hidden_norm": last["norm_in"]}
        own |= {"post_norm": last["norm_post"], "norm": norm.detach().clone()}
        for name, x in own.items():
            setattr(self, name, nn.Parameter(x))

    def drafts(self, batch: Batch, T: int, steps: int) -> list[Tensor]:
        return self.chains(batch.taps[:, :T], batch.ids[:, 1:], batch.place[:, :T], batch.text[:, :T], steps)

    def chains(self, taps: Tensor, tokens: Tensor, places: Tensor, text: Tensor, steps: int) -> list[Tensor]:
        """What the head drafts from every position, with the true tokens: at step k the chain that starts at position t
        reads the token at t + 1 + k and its own output of the step before, and predicts the token at t + 2 + k. It sees
        the true pairs up to t of its text, and its own pairs of steps 1 to k.

        taps [B, T, A, H]; tokens [B, T + steps - 1] (and more), those after each position: tokens[:, 0] is the one
        after position 0; places, text [B, T]. Returns rows for the LM head [B, T, H], one tensor a step."""
        T = taps.shape[1]
        seen = (text[:, :, None] == text[:, None]) & torch.ones(T, T, dtype=torch.bool, device=text.device).tril()
        hidden = F.linear(taps.flatten(2), self.fc).to(self.norm.dtype)  # the stream keeps it under autocast, too
        pairs: list[tuple[Tensor, Tensor]] = []
        finals = []
        for step in range(steps):
            hidden = self._layer(hidden, tokens[:, step : step + T], places + step, seen, pairs)
            finals.append(self._norm(hidden, self.norm))
        return finals

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
        (k, v), *own = [(self._wide(k), self._wide(v)) for k, v in pairs]
        scores = (q @ k.mT * self.scale).masked_fill(~seen[:, None], float("-inf"))
        mine = [(q * k).sum(-1, keepdim=True) * self.scale for k, _ in own]
        weights = torch.cat([scores, *mine], -1).float().softmax(-1).to(q.dtype)
        mixed = weights[..., : k.shape[2]] @ v
        for i, (_, v) in enumerate(own):
            mixed = mixed + weights[..., k.shape[2] + i, None] * v
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), self.o).to(hidden.dtype)
        x = self._norm(hidden, self.post_norm)
        return hidden + F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down).to(hidden.dtype)
