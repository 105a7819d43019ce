"""Random drafters of blocks in the layouts of z-lab (DFlash), DeepSpec (DSpark) and speculators (both); and what they
compute, as an independent formula in float64."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

IDS = [1, 4, 6]  # z-lab and DeepSpec: outputs of these layers
NESTED = "dflash", "dspark"


def make_dflash(
    folder: Path,
    target: dict,
    *,
    layout: str = "zlab",
    size: int = 5,
    mask: int = 126,
    ids: list[int] | None = None,
    layers: int = 2,
    heads: tuple[int, int, int] = (4, 2, 8),
    inner: int = 48,
    width: int | None = None,
    own: tuple[str, ...] | None = None,
    layer_ids: list[int] | None = None,
    bias: bool = False,
    markov: int = 0,
    markov_kind: str = "vanilla",
    confidence: str = "",
    mask_file: str = "",
    seed: int = 0,
    layer: dict | None = None,
    outer: dict | None = None,
) -> Path:
    """`target`: config.json of the target. `ids`: of the LM head's rows. `own`: of embed_tokens and lm_head. `markov`:
    the Markov head's rank, `markov_kind`: vanilla, gated or rnn. `confidence`: "", "rows" or "rows and markov".
    `mask_file`: "", "tensor" or "table". `layer`, `outer`: further fields of the layers' config and of the outer one,
    None for fields to leave out."""
    generator = torch.Generator().manual_seed(seed)
    Ht, V = target["hidden_size"], target["vocab_size"]
    H, (Hq, Hkv, D) = width or Ht, heads
    rows = len(ids) if ids else V
    own = (() if layout == "zlab" else ("embed_tokens", "lm_head")) if own is None else own
    layer_ids = layer_ids or IDS

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.2 * shape[-1] ** -0.5

    def norm(n: int) -> Tensor:
        return 1 + 0.2 * torch.randn(n, generator=generator)

    x: dict[str, Tensor] = {"fc.weight": matrix(H, len(layer_ids) * Ht), "hidden_norm.weight": norm(H)}
    for p in (f"layers.{i}." for i in range(layers)):
        shapes = {"q": (Hq * D, H), "k": (Hkv * D, H), "v": (Hkv * D, H), "o": (H, Hq * D)}
        for name, shape in shapes.items():
            x[f"{p}self_attn.{name}_proj.weight"] = matrix(*shape)
            if bias:
                x[f"{p}self_attn.{name}_proj.bias"] = 0.3 * torch.randn(shape[0], generator=generator)
        x |= {f"{p}self_attn.{name}_norm.weight": norm(D) for name in "qk"}
        x |= {f"{p}mlp.{name}_proj.weight": matrix(inner, H) for name in ("gate", "up")}
        x[f"{p}mlp.down_proj.weight"] = matrix(H, inner)
        x |= {f"{p}{name}_layernorm.weight": norm(H) for name in ("input", "post_attention")}
    x["norm.weight"] = norm(H)
    if "embed_tokens" in own:
        x["embed_tokens.weight"] = 0.5 * torch.randn((V, H), generator=generator)
    if "lm_head" in own:
        x["lm_head.weight"] = matrix(rows, H)
    if rows < V:
        kept = torch.tensor(ids)
        x["d2t"], x["t2d"] = kept - torch.arange(rows), torch.zeros(V, dtype=torch.bool).index_fill_(0, kept, True)
    if markov:
        x["markov_head.markov_w1.weight"] = torch.randn((V, markov), generator=generator)
        x["markov_head.markov_w2.weight"] = 2 * matrix(rows, markov)
        joint = {"gated": ("gate_proj", markov, H + markov), "rnn": ("joint_proj", 3 * markov, 2 * markov + H)}
        if markov_kind in joint:
            name, out, inputs = joint[markov_kind]
            x[f"markov_head.{name}.weight"] = 2 * matrix(out, inputs)
            x[f"markov_head.{name}.bias"] = torch.randn(out, generator=generator)
    if confidence:
        x["confidence_head.proj.weight"] = matrix(1, H + markov * (confidence == "rows and markov"))
        x["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    own_fields = {
        "model_type": "qwen3",
        "hidden_size": H,
        "intermediate_size": inner,
        "num_attention_heads": Hq,
        "num_key_value_heads": Hkv,
        "head_dim": D,
        "num_hidden_layers": layers,
        "vocab_size": V,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "attention_bias": bias,
        "tie_word_embeddings": layout == "zlab",
        **(layer or {}),
    }
    raw: dict = {}
    if layout == "zlab":
        raw = own_fields | {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
        raw |= {"block_size": size, "num_target_layers": target["num_hidden_layers"], "dtype": "bfloat16"}
        raw["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": layer_ids}
    elif layout == "deepspec":
        raw = own_fields | {"architectures": ["Qwen3DSparkModel"], "num_target_layers": target["num_hidden_layers"]}
        raw |= {"block_size": size, "mask_token_id": mask, "target_layer_ids": layer_ids, "num_anchors": 512}
    else:
        raw = {"speculators_model_type": layout, "transformer_layer_config": own_fields, "draft_vocab_size": rows}
        raw |= {"architectures": ["DFlashSpeculator"], "block_size": size, "mask_token_id": mask}
        raw |= {"aux_hidden_state_layer_ids": [n + 1 for n in layer_ids], "sample_from_anchor": layout == "dspark"}
    if layout in ("deepspec", "dspark"):
        raw |= {"markov_rank": markov, "enable_confidence_head": bool(confidence), "markov_head_type": markov_kind}
        raw["confidence_head_with_markov"] = confidence == "rows and markov"
    raw = {name: value for name, value in {**raw, **(outer or {})}.items() if value is not None}
    if width is not None and layout in NESTED:
        raw["target_hidden_size"] = Ht
    folder.mkdir(parents=True, exist_ok=True)
    save_file(x, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    if mask_file:
        embedding = torch.randn((1, H), generator=generator)
        table = {"mask_token_id": mask, "embedding": embedding}
        torch.save(table if mask_file == "table" else embedding, folder / "mask_embedding.pt")
    return folder


class Formula:
    """A drafter in float64, one block after a whole text, without a cache."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor):
        """`embedding`, `head`: the target's, for drafters that use them."""
        raw = json.loads((folder / "config.json").read_text())
        self.raw, self.c = raw, raw.get("transformer_layer_config", raw)
        x = load_file(folder / "model.safetensors")
        self.x = {name: t.double() if t.is_floating_point() else t for name, t in x.items()}
        self.embedding = self.x.get("embed_tokens.weight", embedding.double())
        self.head = self.x.get("lm_head.weight", head.double())
        inner = raw.get("dflash_config", {})
        mask = self.embedding[inner.get("mask_token_id", raw.get("mask_token_id"))]
        if (folder / "mask_embedding.pt").is_file():
            saved = torch.load(folder / "mask_embedding.pt", weights_only=True)
            mask = (saved["embedding"] if isinstance(saved, dict) else saved).double().flatten()
        self.mask, self.causal = mask, inner.get("causal")
        dspark = raw.get("speculators_model_type") == "dspark" or raw["architectures"] == ["Qwen3DSparkModel"]
        self.following = inner.get("sample_from_anchor", raw.get("sample_from_anchor", dspark))

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.x[name] * x / (x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()

    def rows(self, taps: list[Tensor], root: int, drafts: int) -> Tensor:
        """The target's rows [T, Ht] of all tokens but the root at each depth -> the block's normed rows that predict
        `drafts` tokens, [drafts, H]."""
        x, T = self.x, len(taps[0])
        c = self.rms(torch.cat(taps, -1) @ x["fc.weight"].T, "hidden_norm.weight")
        B = drafts if self.following else drafts + 1
        h = torch.stack([self.embedding[root]] + [self.mask] * (B - 1))
        for i in range(self.c["num_hidden_layers"]):
            p = f"layers.{i}."
            h = h + self.attention(self.rms(h, f"{p}input_layernorm.weight"), c, p, i, T)
            y = self.rms(h, f"{p}post_attention_layernorm.weight")
            gate, up = (y @ x[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            h = h + (gate * torch.sigmoid(gate) * up) @ x[f"{p}mlp.down_proj.weight"].T
        return self.rms(h, "norm.weight")[-drafts:]

    def attention(self, y: Tensor, c: Tensor, p: str, layer: int, T: int) -> Tensor:
        D, B = self.c["head_dim"], len(y)
        G = self.c["num_attention_heads"] // self.c["num_key_value_heads"]

        def project(z: Tensor, name: str, first: int) -> Tensor:
            name = f"{p}self_attn.{name}"
            z = z @ self.x[f"{name}_proj.weight"].T + self.x.get(f"{name}_proj.bias", 0)
            z = z.view(len(z), -1, D)
            return z if name.endswith("v") else self.rotated(self.rms(z, f"{name}_norm.weight"), first)

        q = project(y, "q", T)
        k, v = (torch.cat((project(c, name, 0), project(y, name, T))).repeat_interleave(G, 1) for name in "kv")
        sliding = self.c.get("layer_types", {})
        sliding = bool(sliding) and sliding[layer] == "sliding_attention"
        causal = (sliding and not self.raw.get("sliding_window_non_causal")) if self.causal is None else self.causal
        seen = torch.ones(B, T + B, dtype=torch.bool)
        for row in range(B):
            if causal:
                seen[row, T + row + 1 :] = False
            if sliding:  # the last columns of those that it sees
                at = seen[row].nonzero()[:, 0]
                seen[row, at[: max(0, len(at) - self.c["sliding_window"])]] = False
        scores = torch.einsum("thd,shd->hts", q, k) * D**-0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        return out @ self.x[f"{p}self_attn.o_proj.weight"].T + self.x.get(f"{p}self_attn.o_proj.bias", 0)

    def rotated(self, z: Tensor, first: int) -> Tensor:
        D = z.shape[-1]
        at = torch.arange(first, first + len(z))[:, None]
        angles = at / self.c["rope_theta"] ** (torch.arange(0, D, 2) / D)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = z[..., : D // 2], z[..., D // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def ids(self) -> Tensor:
        """The target's id of each row of the LM head."""
        return torch.arange(len(self.head)) + self.x.get("d2t", 0)

    def block(
        self, taps: list[Tensor], text: list[int], drafts: int, temperature: float = 1.0, noise: Tensor | None = None
    ) -> tuple[list[int], list[float], list[float]]:
        """The best tokens after `text` [drafts], their log-probabilities, and the confidence head's probabilities.
        `taps`: the target's rows of all tokens of the text but the last. `noise` [drafts, V]: of the target's draws."""
        h, x, before = self.rows(taps, text[-1], drafts), self.x, text[-1]
        tokens, scores, sure = [], [], []
        state = None
        for row, normed in enumerate(h):
            z = self.head @ normed
            latent = x["markov_head.markov_w1.weight"][before] if "markov_head.markov_w1.weight" in x else None
            if latent is not None:
                found, state = self.markov(normed, latent, torch.zeros_like(latent) if state is None else state)
                z = z + x["markov_head.markov_w2.weight"] @ found
            if "confidence_head.proj.weight" in x:
                w = x["confidence_head.proj.weight"][0]
                features = normed if len(w) == len(normed) else torch.cat((normed, latent))
                sure.append(float(torch.sigmoid(w @ features + x["confidence_head.proj.bias"][0])))
            z = z / temperature
            z = z if noise is None else z + noise[row, self.ids()]
            best = int(z.argmax())
            scores.append(float(z.log_softmax(-1)[best]))
            before = int(self.ids()[best])
            tokens.append(before)
        return tokens, scores, sure

    def markov(self, row: Tensor, latent: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What w2 is applied to, and the next state, both [r]. `row` [H]: the block's normed row; `latent` [r]: w1 of
        the token before."""
        kind, x = self.raw["markov_head_type"], self.x
        if kind == "vanilla":
            return latent, state
        name = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}[kind]
        weight, bias = x[f"{name}.weight"], x[f"{name}.bias"]
        if kind == "gated":
            return torch.sigmoid(weight @ torch.cat((row, latent)) + bias) * latent, state
        r = len(latent)
        y = weight @ torch.cat((state, latent, row)) + bias
        gate = torch.sigmoid(y[:r])
        return torch.tanh(y[2 * r :]), gate * state + (1 - gate) * torch.tanh(y[r : 2 * r])
