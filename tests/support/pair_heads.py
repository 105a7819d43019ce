"""Random tensors of the heads that score pairs of neighbouring candidates (DSpine, LiLiCorr), and what they compute, as
an independent formula in float64."""

import math

import head_parts
import torch
from torch import Tensor

DSPINE = {"transfer_rank": 12, "message_size": 6, "top_k": 5}
SIZES = {"candidate_topk": 4, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "mlp_ratio": 1.5, "factor_dim": 10}
SIZES |= {"vector_eps": 1e-6, "logit_scale": 9.0}
LILICORR = {f"lilicorr_{name}": value for name, value in SIZES.items()}


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


def lilicorr_tensors(random: head_parts.Random, H: int, size: int, fields: dict) -> dict[str, Tensor]:
    """`size`: rows of a block."""
    h = fields["lilicorr_hidden_size"] or H
    K, layers, heads, f = (
        fields[f"lilicorr_{name}"] for name in ("candidate_topk", "num_layers", "num_heads", "factor_dim")
    )
    inner = int(h * fields["lilicorr_mlp_ratio"])
    shapes = {"pass_hidden_proj": (h, H), "feature_mlp.1": (h, 5), "feature_mlp.3": (h, h), "context_proj": (h, H)}
    shapes |= {"factor_input_proj": (h, 3 * h), "out_head": (f, h), "in_head": (f, h), "anchor_out_head": (f, h)}
    shapes |= {"token_proj": (h, H)} if h != H else {}
    norms = ["output_norm", "anchor_norm"]
    x = {"slot_embedding": random.normal(1, 1, size - 1, 1, h), "rank_embedding": random.normal(1, 1, 1, K, h)}
    x |= {"relative_slot_bias": random.normal(heads, 2 * size - 1), "same_slot_bias": random.normal(heads)}
    x |= {"feature_mlp.0.weight": random.norm(5), "feature_mlp.0.bias": random.vector(5)}
    for p in (f"layers.{n}." for n in range(layers)):
        shapes |= {f"{p}attn.out_proj": (h, h), f"{p}mlp.0": (inner, h), f"{p}mlp.2": (h, inner)}
        x |= {f"{p}attn.in_proj_weight": random.matrix(3 * h, h), f"{p}attn.in_proj_bias": random.vector(3 * h)}
        norms += [f"{p}attn_norm", f"{p}mlp_norm"]
    for name, shape in shapes.items():
        x |= {f"{name}.weight": random.matrix(*shape), f"{name}.bias": random.vector(shape[0])}
    x |= {f"{name}.weight": random.norm(h) for name in norms}
    return {f"lilicorr.{name}": value for name, value in x.items()}


class Formula(head_parts.Formula):
    """What makes of a block's rows the scores of its candidates. `candidates`: of a position, 0 for other heads."""

    embedding: Tensor

    @property
    def candidates(self) -> int:
        if "dspine_config" in self.raw:
            return self.raw["dspine_config"]["top_k"]
        return self.raw.get("dflash_config", {}).get("lilicorr_candidate_topk", 0)

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

    def noted(self, normed: Tensor, last: Tensor, anchor: Tensor | None) -> None:
        """Keep for `scored` a block's rows that predict, those before the last injection, and what the drafter reads of
        the target's last row."""
        self.normed, self.last, self.anchor = normed, last, anchor

    def scored(self, row: int, z: Tensor, before: int, temperature: float, noise: Tensor | None) -> Tensor:
        """What is added to the perturbed logits z [V] of position `row` after the token `before`: for the best of them
        what makes them the head's scores; -inf for the others."""
        best = z.topk(self.candidates).indices
        if "transfer_codes" in self.x:
            heard = self.heard(self.last[row], self.c["num_hidden_layers"] - 1, self.code(before))
            scores = self.head[best] @ self.rms(heard, self.x["norm.weight"])
        else:
            scores = self.corrected(row, best, before, temperature, noise)
        added = (scores - self.head[best] @ self.normed[row]) / temperature
        return torch.full_like(z, -math.inf).index_copy(0, best, added)

    def corrected(self, row: int, best: Tensor, before: int, temperature: float, noise: Tensor | None) -> Tensor:
        """LiLiCorr's scores of the candidates `best` of position `row` after the token `before`."""
        p, states, names = self.flat, [], []
        for slot, normed in enumerate(self.normed):
            z = self.head @ normed / temperature + (0 if noise is None else noise[slot, self.ids()])
            log_p = (self.head @ normed).log_softmax(-1)
            kept = z.topk(self.candidates).indices
            for rank, token in enumerate(kept[log_p[kept].argsort(descending=True)].tolist()):
                states.append(self.state(slot, rank, token, normed, log_p, log_p[kept].max()))
                names.append((slot, token))
        x, heads = torch.stack(states), p["lilicorr_num_heads"]
        apart = torch.tensor([[a - b for b, _ in names] for a, _ in names])
        bias = self.x["lilicorr.relative_slot_bias"][:, apart + self.flat["block_size"] - 1]
        bias = bias + (apart == 0) * self.x["lilicorr.same_slot_bias"][:, None, None]
        for n in range(p["lilicorr_num_layers"]):
            w = f"layers.{n}."
            y = self.own_rms(x, f"{w}attn_norm")
            qkv = y @ self.x[f"lilicorr.{w}attn.in_proj_weight"].T + self.x[f"lilicorr.{w}attn.in_proj_bias"]
            mixed = []
            for head, (q, k, v) in enumerate(zip(*(part.chunk(heads, 1) for part in qkv.chunk(3, 1)), strict=True)):
                mixed.append((q @ k.T * q.shape[1] ** -0.5 + bias[head]).softmax(-1) @ v)
            x = x + self.affine(torch.cat(mixed, 1), f"{w}attn.out_proj")
            y = self.affine(self.own_rms(x, f"{w}mlp_norm"), f"{w}mlp.0")
            x = x + self.affine(y * torch.sigmoid(y), f"{w}mlp.2")
        x = self.own_rms(x, "output_norm")
        anchor = torch.zeros(x.shape[1]).double()
        if self.anchor is not None:
            anchor = self.own_rms(self.affine(self.anchor, "context_proj"), "anchor_norm")
        y = torch.stack([self.affine(torch.cat((each, anchor, each * anchor)), "factor_input_proj") for each in x])
        y = y * torch.sigmoid(y)
        into = self.affine(y, "in_head")
        out = (
            self.affine(y[names.index((row - 1, before))], "out_head")
            if row
            else self.affine(anchor, "anchor_out_head")
        )
        chosen = into[[names.index((row, token)) for token in best.tolist()]]
        return p["lilicorr_logit_scale"] * (chosen @ out) / chosen.norm(dim=1) / out.norm()

    def state(self, slot: int, rank: int, token: int, normed: Tensor, log_p: Tensor, most: Tensor) -> Tensor:
        """A candidate before LiLiCorr's layers."""
        p, own = log_p[token], self.embedding[token]
        features = torch.stack((p, p.exp(), p - most, p * 0 + rank / (self.candidates - 1), p * 0 + (rank == 0)))
        features = (features - features.mean()) / (features.var(correction=0) + 1e-5).sqrt()
        features = features * self.x["lilicorr.feature_mlp.0.weight"] + self.x["lilicorr.feature_mlp.0.bias"]
        y = self.affine(features, "feature_mlp.1")
        own = self.affine(own, "token_proj") if "lilicorr.token_proj.weight" in self.x else own
        own = own + self.affine(normed, "pass_hidden_proj") + self.affine(y * torch.sigmoid(y), "feature_mlp.3")
        return own + self.x["lilicorr.slot_embedding"][0, 0, slot, 0] + self.x["lilicorr.rank_embedding"][0, 0, 0, rank]

    def affine(self, x: Tensor, name: str) -> Tensor:
        return x @ self.x[f"lilicorr.{name}.weight"].T + self.x[f"lilicorr.{name}.bias"]

    def own_rms(self, x: Tensor, name: str) -> Tensor:
        return self.rms(x, self.x[f"lilicorr.{name}.weight"])
