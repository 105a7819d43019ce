"""What the heads of both kinds share in training: the target's frozen embedding and LM head, RoPE and the norms."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specker.checkpoints.checkpoint import Checkpoint
from specker.kernels.kv_calibrate import rope_table
from train.head.taps import Batch

LOGITS = 1 << 20  # logits that are computed at once: a few copies of them fit a CPU's caches


@dataclass(frozen=True)
class Teacher:
    """What the target predicts in M places, over the kept tokens."""

    probabilities: Tensor  # [M, rows]
    entropy: Tensor  # [M]


class Divergence(torch.autograd.Function):
    """Sum over N rows of weight x KL(teacher || student). The student's logits [N, rows] are never kept: a pass over a
    few rows at a time also computes the gradients of what its matrix reads, and of the matrix's last columns, while the
    logits are in the caches."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        final: Tensor,
        frozen: Tensor,
        learnt: Tensor | None,
        teacher: Teacher,
        places: Tensor,
        weight: Tensor,
        heat: float,
    ) -> Tensor:
        """final [N, H + r]; frozen [rows, H] and learnt [rows, r]: the matrix of the logits; places [N] int64, the
        teacher's of each row; weight [N]; heat: the temperature of both."""
        head = frozen if learnt is None else torch.cat([frozen, learnt.to(frozen.dtype)], 1)
        total, gradient = weight.new_zeros(()), torch.empty_like(final)
        own = None if learnt is None else torch.zeros_like(learnt)
        for at in _few_rows(len(final), len(head)):
            logits, p = _scaled(final[at], head, heat), teacher.probabilities[places[at]]
            every = logits.logsumexp(-1)
            cross = every - (p * logits).sum(-1)
            total = total + ((cross - teacher.entropy[places[at]]) * weight[at]).sum()
            wrong = logits.sub_(every[:, None]).exp_().sub_(p).mul_((weight[at] / heat)[:, None])
            wrong = wrong.to(head.dtype)
            gradient[at] = wrong @ head
            if own is not None:
                own += wrong.T @ final[at, frozen.shape[1] :].to(head.dtype)
        ctx.save_for_backward(gradient, own)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        final, own = ctx.saved_tensors
        return final * gradient, None, None if own is None else own * gradient, None, None, None, None


def _few_rows(count: int, rows: int) -> list[slice]:
    most = max(1, LOGITS // rows)
    return [slice(n, n + most) for n in range(0, count, most)]


def _scaled(final: Tensor, head: Tensor, heat: float) -> Tensor:
    """Logits at a temperature, float32 or float64, which the caller may overwrite."""
    logits = F.linear(final.to(head.dtype), head)
    return (logits.float() if logits.dtype == torch.bfloat16 else logits).div_(heat)


class Net(nn.Module):
    """A head in training. Its parameters are matrices, norms and `tables`. H width, A taps, Hq query heads and Hkv KV
    heads of dimension D."""

    embed: Tensor  # [V, H], frozen
    head: Tensor  # [rows, H], frozen
    ids: Tensor  # [rows] int64, the token of each row of `head`
    row: Tensor  # [V] int64, the row of each token; -1: not kept
    tables: tuple[str, ...] = ()  # the names of parameters with a row for each token, which learn as norms do

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

    def taught(self, last: Tensor, heat: float) -> Teacher:
        """What the target predicts at temperature `heat` after its rows `last` [N, H]."""
        head = self._multiplied()
        probabilities, entropy = last.new_empty(len(last), len(head)), last.new_empty(len(last))
        with torch.no_grad():
            for at in _few_rows(len(last), len(head)):
                logits = _scaled(last[at], head, heat)
                every = logits.logsumexp(-1)
                p = torch.exp(logits - every[:, None], out=probabilities[at])
                entropy[at] = every - (p * logits).sum(-1)
        return Teacher(probabilities, entropy)

    def divergence(
        self,
        teacher: Teacher,
        places: Tensor,
        final: Tensor,
        weight: Tensor,
        heat: float,
        learnt: Tensor | None = None,
    ) -> Tensor:
        """Sum over N rows of weight x KL(teacher || head) at temperature `heat`. places [N] int64, the teacher's;
        final [N, H + r], what the LM head and then `learnt` [rows, r] read; weight [N]."""
        matrix = self._multiplied()
        return Divergence.apply(final, matrix, learnt, teacher, places, weight, heat)  # type: ignore[no-any-return]

    def _multiplied(self) -> Tensor:
        """The LM head in the dtype in which products are computed."""
        kind = self.head.device.type
        mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return self.head.to(torch.get_autocast_dtype(kind)) if mixed else self.head

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
