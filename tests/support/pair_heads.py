"""Random tensors of the heads that score pairs of neighbouring candidates (DSpine), and what they compute, as an
independent formula in float64."""

import math

import head_parts
import torch
from torch import Tensor

DSPINE = {"transfer_rank": 12, "message_size": 6, "top_k": 5}


def dspine_tensors(random: head_parts.Random, H: int, V: int, layers: int) -> dict[str, Tensor]:
    r, M = DSPINE["transfer_rank"], DSPINE["message_size"]
    codes = random.normal(V, r)
    x = {"transfer_codes": codes / codes.norm(dim=1, keepdim=True), "transfer_ready": torch.tensor(True)}
    for n in range(layers):
        x[f"injection.readouts.{n}.weight"] = random.matrix(r, H)
        x[f"injection.writes.{n}.weight"] = 0.7 * random.matrix(H, M)
    names = "message", "receiver_gate", "predecessor_gate"
    x |= {f"injection.{name}.weight": random.matrix(M, r) for name in names}
    return x | {"injection.bias": random.normal(M)}


class Formula(head_parts.Formula):
    """What makes of a block's rows the scores of its candidates. `candidates`: of a position, 0 for other heads."""

    @property
    def candidates(self) -> int:
        return self.raw["dspine_config"]["top_k"] if "dspine_config" in self.raw else 0

    def injected(self, h: Tensor, layer: int, root: int) -> Tensor:
        """The rows h [B, H] after a layer, of which each but the first hears the one before."""
        if "transfer_codes" not in self.x:
            return h
        said = [self.code(root), *(self.feature(row, layer) for row in h[1:-1])]
        return torch.stack([h[0], *(self.heard(row, layer, p) for row, p in zip(h[1:], said, strict=True))])

    def code(self, token: int) -> Tensor:
        codes = self.x["transfer_codes"]
        return codes[token] * math.sqrt(codes.shape[1])

    def feature(self, row: Tensor, layer: int) -> Tensor:
        y = self.x[f"injection.readouts.{layer}.weight"] @ row
        return y / y.norm() * math.sqrt(len(y))

    def heard(self, row: Tensor, layer: int, said: Tensor) -> Tensor:
        w = {name: self.x[f"injection.{name}.weight"] for name in ("message", "receiver_gate", "predecessor_gate")}
        gate = w["receiver_gate"] @ self.feature(row, layer) + w["predecessor_gate"] @ said + self.x["injection.bias"]
        message = torch.sigmoid(gate) * (w["message"] @ said)
        return row + row.square().mean().sqrt() * (self.x[f"injection.writes.{layer}.weight"] @ message)

    def noted(self, normed: Tensor, last: Tensor) -> None:
        """Keep a block's rows that predict, and those before the last injection, for `scored`."""
        self.normed, self.last = normed, last

    def scored(self, row: int, z: Tensor, before: int, temperature: float) -> Tensor:
        """What is added to the perturbed logits z [V] of position `row` after the token `before`: for the best of them
        what makes them the head's scores; -inf for the others."""
        best = z.topk(self.candidates).indices
        heard = self.heard(self.last[row], self.c["num_hidden_layers"] - 1, self.code(before))
        scores = self.head[best] @ self.rms(heard, self.x["norm.weight"])
        added = (scores - self.head[best] @ self.normed[row]) / temperature
        return torch.full_like(z, -math.inf).index_copy(0, best, added)
