"""A drafter of blocks for training: DFlash's (arXiv 2602.06036), DSpark's or Domino's (arXiv 2605.29707), whose
equations stand in specker/model/dflash.py.

A window is the context of blocks at random roots. A block sees the columns of its text before the root and its own
rows. Its rows are the root and masks: draft token k is guessed by the k-th mask, which stands at its position, or in
DSpark by the row before it. Token k counts exp(-(k - 1) / decay) in the loss, because what follows a wrong guess is
lost. The embedding and the LM head are the target's own and stay frozen. The layers start as the target's last ones,
and the context as the deepest tap. DSpark's Markov head and Domino's GRU read the text's tokens in training, and not
those that were guessed.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specker.checkpoints.checkpoint import Checkpoint
from train.head.chained import HEADS
from train.head.net import Net, matrices_of
from train.head.taps import Batch


class Layer(nn.Module):
    """A Qwen3 layer: its matrices, norms [H], and the norms of queries and keys [D]."""

    q: Tensor  # [Hq * D, H]
    k: Tensor  # [Hkv * D, H]
    v: Tensor  # [Hkv * D, H]
    o: Tensor  # [H, Hq * D]
    gate: Tensor  # [F, H]
    up: Tensor  # [F, H]
    down: Tensor  # [H, F]
    norm_in: Tensor
    norm_post: Tensor
    q_norm: Tensor
    k_norm: Tensor

    def __init__(self, found: dict[str, Tensor], dimension: int):
        super().__init__()
        ones = found["q"].new_ones(2, dimension)
        for name, x in {**found, "q_norm": ones[0].clone(), "k_norm": ones[1].clone()}.items():
            setattr(self, name, nn.Parameter(x))


class Blocks(Net):
    """A drafter of `beyond` tokens after a root. Its parameters are those of `layers` and of `chained`, and
    fc [H, A * H], hidden_norm [H] and norm [H]."""

    mask: Tensor  # int64, the token whose embedding is a mask's
    tables = "chained.w1", "chained.w2"

    def __init__(
        self,
        target: Checkpoint,
        taps: tuple[int, ...],
        mask: int,
        beyond: int = 7,
        layers: int = 2,
        kind: str = "dflash",
        rank: int = 64,
    ):
        """As `Net`, with all rows of the LM head. `mask`: a token that texts lack. `rank`: of the head of `kind`."""
        c = target.config
        super().__init__(target, taps, torch.arange(c.vocab_size), beyond)
        self.size, self.decay = beyond if kind == "dspark" else beyond + 1, (beyond + 1) / 2  # rows of a block
        self.kind, self.chained = kind, HEADS[kind](self.embed, rank) if kind in HEADS else None
        self.register_buffer("mask", torch.tensor(mask))
        first = c.num_layers - layers
        if first < 0:
            raise ValueError(f"a drafter of {layers} layers cannot start as the target's, which has {c.num_layers}")
        self.layers = nn.ModuleList(Layer(matrices_of(target, first + n), c.head_dim) for n in range(layers))
        norm = target.weights.norm.detach()
        self.fc = nn.Parameter(self._fused(len(taps), norm))
        self.hidden_norm, self.norm = nn.Parameter(torch.ones_like(norm)), nn.Parameter(norm.clone())

    def loss(self, batch: Batch, share: float, heat: float, turn: int) -> Tensor:
        """Over as many blocks as would stand in the windows side by side, at other roots in every step."""
        B, T = batch.ids.shape[0], batch.ids.shape[1] - self.beyond
        generator = torch.Generator().manual_seed(turn)
        roots = torch.rand(B, T, generator=generator).topk(max(1, T // self.size)).indices.to(batch.ids.device)
        at, weight = self._drafted(batch, roots)
        rows = batch.last.gather(1, at.flatten(1)[..., None].expand(-1, -1, batch.last.shape[-1]))
        teacher = self.taught(rows.flatten(0, 1), heat)
        weight = weight * torch.exp(-torch.arange(self.beyond, device=weight.device) / self.decay)
        places, final = torch.arange(weight.numel(), device=weight.device), self.blocks(batch, roots)
        if self.chained is not None:
            final = torch.cat([final, self._latent(batch, at, final).to(final.dtype)], -1)
        learnt = None if self.chained is None else self.chained.w2
        total = self.divergence(teacher, places, final.flatten(0, 2), weight.flatten(), heat, learnt)
        return total / weight.sum().clamp(min=1)

    @torch.no_grad()
    def agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """At each position of blocks side by side, of the blocks whose guesses before it are the text's tokens."""
        roots = torch.arange(0, batch.ids.shape[1] - self.beyond, self.size, device=batch.ids.device)
        roots = roots.repeat(len(batch.ids), 1)
        at, weight = self._drafted(batch, roots)
        final = self.blocks(batch, roots)
        logits = self.logits(final)
        if self.chained is not None:
            logits = logits + F.linear(self._latent(batch, at, final), self.chained.w2)
        guesses = logits.argmax(-1)
        best, true = (x.gather(1, at.flatten(1)).view_as(at) for x in (batch.best, batch.ids[:, 1:]))
        known = torch.cat([torch.ones_like(at[..., :1]), (guesses == true)[..., :-1].long().cumprod(-1)], -1) == 1
        counts = known & (weight == 1)
        return ((guesses == best) & counts).sum((0, 1)), counts.sum((0, 1))

    def _latent(self, batch: Batch, at: Tensor, final: Tensor) -> Tensor:
        """What w2 of the Markov head or the GRU multiplies, [B, N, beyond, r], after the text's tokens at positions
        `at` [B, N, beyond]."""
        assert self.chained is not None
        found: Tensor = self.chained(batch.ids.gather(1, at.flatten(1)).view_as(at), final, self.embed)
        return found

    def _drafted(self, batch: Batch, roots: Tensor) -> tuple[Tensor, Tensor]:
        """For blocks at `roots` [B, N]: the positions [B, N, beyond] whose rows of the target predict what the blocks
        draft, and the weight of these predictions: 0 behind the end of a text."""
        at = roots[..., None] + torch.arange(self.beyond, device=roots.device)
        weight, text = (x.gather(1, at.flatten(1)).view_as(at) for x in (batch.weight, batch.text))
        return at, weight * (text == batch.text.gather(1, roots)[..., None])

    def blocks(self, batch: Batch, roots: Tensor) -> Tensor:
        """Rows for the LM head of blocks at `roots` [B, N], positions of their windows: [B, N, beyond, H]."""
        c, (B, N), S = self.config, roots.shape, self.size
        context = F.linear(batch.taps.flatten(2), self.fc)
        context = self._norm(context, self.hidden_norm)
        W = context.shape[1]
        own = batch.text.gather(1, roots)
        seen = (batch.text[:, None] == own[..., None]) & (torch.arange(W, device=roots.device) < roots[..., None])
        seen = seen.repeat_interleave(S, 1)[:, None]  # [B, 1, N * S, W]
        places = (batch.place.gather(1, roots)[..., None] + torch.arange(S, device=roots.device)).flatten(1)
        masks = F.embedding(self.mask, self.embed).expand(B, N, S - 1, -1)
        hidden = torch.cat([F.embedding(batch.ids.gather(1, roots), self.embed)[:, :, None], masks], 2).flatten(1, 2)

        def heads(x: Tensor, matrix: Tensor) -> Tensor:
            return F.linear(x, matrix).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)

        def keys(x: Tensor, layer: Layer, places: Tensor) -> Tensor:
            return self._wide(self._rotated(self._norm(heads(x, layer.k), layer.k_norm), places))

        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = self._norm(hidden, layer.norm_in)
            q = self._rotated(self._norm(heads(x, layer.q), layer.q_norm), places)
            k, v = keys(context, layer, batch.place), self._wide(heads(context, layer.v))
            scores = (q @ k.mT * self.scale).masked_fill(~seen, float("-inf"))
            k, mine = (x.unflatten(2, (N, S)) for x in (keys(x, layer, places), self._wide(heads(x, layer.v))))
            among = (q.unflatten(2, (N, S)) @ k.mT * self.scale).flatten(2, 3)  # of rows of one block
            weights = torch.cat([scores, among], -1).float().softmax(-1).to(q.dtype)
            mixed = weights[..., :W] @ v + (weights[..., W:].unflatten(2, (N, S)) @ mine).flatten(2, 3)
            hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), layer.o).to(hidden.dtype)
            x = self._norm(hidden, layer.norm_post)
            inner = F.silu(F.linear(x, layer.gate)) * F.linear(x, layer.up)
            hidden = hidden + F.linear(inner, layer.down).to(hidden.dtype)
        return self._norm(hidden, self.norm).unflatten(1, (N, S))[:, :, S - self.beyond :]
