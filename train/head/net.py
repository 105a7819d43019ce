"""What the heads of both kinds share in training: the target's frozen embedding and LM head, RoPE and the norms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specker.checkpoints.checkpoint import Checkpoint
from specker.kernels.kv import rope_table
from train.head.taps import Batch


class Net(nn.Module):
    """A head in training. Its parameters are matrices and norms. H width, A taps, Hq query heads and Hkv KV heads of
    dimension D."""

    embed: Tensor  # [V, H], frozen
    head: Tensor  # [rows, H], frozen
    ids: Tensor  # [rows] int64, the token of each row of `head`
    row: Tensor  # [V] int64, the row of each token; -1: not kept

    def __init__(self, target: Checkpoint, taps: tuple[int, ...], ids: Tensor, beyond: int):
        """`target`: with plain weights in the dtype of training. `ids`: the tokens whose rows the LM head keeps.
        `beyond`: positions that a draft reaches after its root. Raises ValueError for layers that are not Llama's."""
        super().__init__()
        self.config = c = target.config
        spec, w = c.layer, target.weights
        if spec.activation != "silu" or spec.norms != "before" or c.embed_scale != 1 or c.norm_offset != 0:
            raise ValueError(f"a head has Llama's layers, which cannot start as those of {c.architecture}")
        self.taps, self.beyond = taps, beyond
        rope = w.ropes[spec.rope(c.num_layers - 1)]
        row = torch.full((c.vocab_size,), -1)
        row[ids] = torch.arange(len(ids))
        frozen = {"embed": w.embed, "head": w.head[ids], "ids": ids, "row": row}  # type: ignore[index]
        frozen["rope"] = rope_table(rope.inv_freq, rope.scale, c.max_context + beyond, w.norm.dtype)
        for name, x in frozen.items():
            self.register_buffer(name, x, persistent=False)
        self.scale = c.head_dim**-0.5

    def loss(self, batch: Batch, share: float, heat: float, turn: int) -> Tensor:
        """Mean weighted KL(target || head) at temperature `heat` over what the head drafts in a batch. `share`: of the
        training that is done; `turn`: number of the step."""
        raise NotImplementedError

    def agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How often each token of a draft is the target's most probable one after true tokens, for the answers'
        tokens: (right, of how many), both [tokens of a draft] int64."""
        raise NotImplementedError

    def logits(self, final: Tensor) -> Tensor:
        """Rows for the LM head [.., H] -> logits [.., rows] float32, or float64."""
        return F.linear(final, self.head)

    def _fused(self, taps: int, like: Tensor) -> Tensor:
        """A matrix [H, taps * H] that returns the deepest tap."""
        H = self.config.hidden_size
        return torch.cat([like.new_zeros(H, (taps - 1) * H), torch.eye(H, dtype=like.dtype)], 1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, self.config.rms_norm_eps)

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """RoPE over x [B, heads, T, D] at `places` [B, T]."""
        cos, sin = self.rope[places].to(x.dtype).unsqueeze(1).unbind(3)
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

    def _wide(self, x: Tensor) -> Tensor:
        """Keys or values [B, Hkv, T, D] once for each query head."""
        return x.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, 1)


def matrices_of(target: Checkpoint, layer: int) -> dict[str, Tensor]:
    """The matrices and norms of a layer of the target, copied."""
    c, w, n = target.config, target.weights, layer
    Q, KV = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q, k, v = w.qkv[n].split((Q, KV, KV))  # type: ignore[union-attr]
    gate, up = w.gate_up[n].split(c.intermediate_size)  # type: ignore[union-attr]
    assert w.norm_in is not None and w.norm_post is not None
    found = {"q": q, "k": k, "v": v, "o": w.o[n], "gate": gate, "up": up, "down": w.down[n]}
    found |= {"norm_in": w.norm_in[n], "norm_post": w.norm_post[n]}
    return {name: x.detach().clone() for name, x in found.items()}  # type: ignore[union-attr]


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL of log-probabilities [.., rows] -> [..]."""
    return (teacher.exp() * (teacher - student)).sum(-1)
