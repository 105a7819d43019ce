"""What random draft heads for tests have in common: their tensors, their files, and parts of a formula in float64."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional


class Random:
    """Random tensors of a head, the same ones for the same seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def matrix(self, *shape: int) -> Tensor:
        return self.normal(*shape) * 1.2 * shape[-1] ** -0.5

    def norm(self, n: int) -> Tensor:
        return 1 + 0.2 * self.normal(n)

    def vector(self, n: int) -> Tensor:
        return 0.3 * self.normal(n)

    def layer(
        self, p: str, hidden: int, entering: int, heads: tuple[int, int, int], inner: int, bias: bool, qk_norm: bool
    ) -> dict[str, Tensor]:
        """A layer's attention on rows of `entering` columns, and its MLP. `p`: start of the names."""
        x: dict[str, Tensor] = {}
        Hq, Hkv, D = heads
        shapes = {"q": (Hq * D, entering), "k": (Hkv * D, entering), "v": (Hkv * D, entering), "o": (hidden, Hq * D)}
        for name, shape in shapes.items():
            x[f"{p}self_attn.{name}_proj.weight"] = self.matrix(*shape)
            if bias:
                x[f"{p}self_attn.{name}_proj.bias"] = self.vector(shape[0])
        if qk_norm:
            x |= {f"{p}self_attn.{name}_norm.weight": self.norm(D) for name in "qk"}
        x |= {f"{p}mlp.{name}_proj.weight": self.matrix(inner, hidden) for name in ("gate", "up")}
        x[f"{p}mlp.down_proj.weight"] = self.matrix(hidden, inner)
        return x


def layer_config(
    hidden: int, inner: int, heads: tuple[int, int, int], layers: int, vocab: int, bias: bool, **more
) -> dict:
    """config.json's fields of a head's layers."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "attention_bias": bias,
        **more,
    }


def kept_ids(kept: Tensor, vocab: int) -> dict[str, Tensor]:
    """The maps of an LM head with rows for the ids `kept`."""
    return {
        "d2t": kept - torch.arange(len(kept)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True),
    }


def save(folder: Path, tensors: dict[str, Tensor], config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Formula:
    """A head in float64, over a whole text and without a cache. `raw`: config.json, `c`: its layers' fields."""

    def __init__(self, folder: Path):
        self.raw = json.loads((folder / "config.json").read_text())
        self.c = self.raw.get("transformer_layer_config", self.raw)
        x = load_file(folder / "model.safetensors")
        self.x = {name: t.double() if t.is_floating_point() else t for name, t in x.items()}
        self.head: Tensor

    def ids(self) -> Tensor:
        """The target's id of each row of the LM head."""
        return torch.arange(len(self.head)) + self.x.get("d2t", 0)

    def rms(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + (eps or self.c["rms_norm_eps"])).sqrt()

    def project(self, y: Tensor, p: str, name: str, first: int = 0) -> Tensor:
        """Rows at positions `first`, .. -> q, k or v [T, heads, D]."""
        p = f"{p}self_attn.{name}"
        z = y @ self.x[f"{p}_proj.weight"].T + self.x.get(f"{p}_proj.bias", 0)
        z = z.unflatten(-1, (-1, self.c["head_dim"]))
        if name == "v":
            return z
        norm = self.x.get(f"{p}_norm.weight")
        return self.rotated(z if norm is None else self.rms(z, norm), first)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, p: str) -> Tensor:
        """`seen` [rows, columns]: the columns that each row sees."""
        group = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * self.c["head_dim"] ** -0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        return out @ self.x[f"{p}self_attn.o_proj.weight"].T + self.x.get(f"{p}self_attn.o_proj.bias", 0)

    def mlp(self, y: Tensor, p: str) -> Tensor:
        gate, up = (y @ self.x[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        gelu = self.c["hidden_act"] == "gelu_pytorch_tanh"
        gate = functional.gelu(gate, approximate="tanh") if gelu else gate * torch.sigmoid(gate)
        return (gate * up) @ self.x[f"{p}mlp.down_proj.weight"].T

    def rotated(self, z: Tensor, first: int) -> Tensor:
        D = z.shape[-1]
        at = torch.arange(first, first + len(z))[:, None]
        angles = at / self.c["rope_theta"] ** (torch.arange(0, D, 2) / D)
        cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
        a, b = z[..., : D // 2], z[..., D // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
