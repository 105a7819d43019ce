"""Random drafters of blocks in the layouts of z-lab (DFlash, DFlash2), SpecForge (Domino), DeepSpec (DSpark) and
speculators (DFlash, DFlash2, DSpark); and what they compute, as an independent formula in float64."""

import heapq
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_parts
import pair_heads
import torch
from torch import Tensor

IDS = [1, 4, 6]  # z-lab and DeepSpec: outputs of these layers
NESTED = "dflash", "dflash2", "dspark"
FLAT = {"zlab": "DFlashDraftModel", "zlab2": "DFlash2DraftModel", "domino": "DominoDraftModel"}
FLAT |= {"dspine": "DSpineDraftModel", "lilicorr": "LiLiCorrDraftModel"}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
GRU = {"emb_dim": 12, "gru_hidden_dim": 10, "pure_draft_prefix_len": 1}


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
    second: dict | None = None,
    gru: dict | None = None,
    seed: int = 0,
    layer: dict | None = None,
    outer: dict | None = None,
) -> Path:
    """`target`: config.json of the target. `ids`: of the LM head's rows. `own`: of embed_tokens and lm_head. `markov`:
    the Markov head's rank, `markov_kind`: vanilla, gated or rnn. `confidence`: "", "rows" or "rows and markov".
    `mask_file`: "", "tensor" or "table". `second`, `gru`: further fields of DFlash2 or LiLiCorr, and of Domino.
    `layer`, `outer`: further fields of the layers' config and of the outer one, None for fields to leave out."""
    random = head_parts.Random(seed)
    Ht, V = target["hidden_size"], target["vocab_size"]
    H, rows = width or Ht, len(ids) if ids else V
    own = (() if layout in FLAT else ("embed_tokens", "lm_head")) if own is None else own
    layer_ids = layer_ids or IDS
    x = {"fc.weight": random.matrix(H, len(layer_ids) * Ht), "hidden_norm.weight": random.norm(H)}
    for p in (f"layers.{i}." for i in range(layers)):
        x |= random.layer(p, H, H, heads, inner, bias, qk_norm=True)
        x |= {f"{p}{name}_layernorm.weight": random.norm(H) for name in ("input", "post_attention")}
    x["norm.weight"] = random.norm(H)
    if "embed_tokens" in own:
        x["embed_tokens.weight"] = 0.5 * random.normal(V, H)
    if "lm_head" in own:
        x["lm_head.weight"] = random.matrix(rows, H)
    if rows < V:
        x |= head_parts.kept_ids(torch.tensor(ids), V)
    if markov:
        x["markov_head.markov_w1.weight"] = random.normal(V, markov)
        x["markov_head.markov_w2.weight"] = 2 * random.matrix(rows, markov)
        joint = {"gated": ("gate_proj", markov, H + markov), "rnn": ("joint_proj", 3 * markov, 2 * markov + H)}
        if markov_kind in joint:
            name, out, inputs = joint[markov_kind]
            x[f"markov_head.{name}.weight"] = 2 * random.matrix(out, inputs)
            x[f"markov_head.{name}.bias"] = random.normal(out)
    if confidence:
        x["confidence_head.proj.weight"] = random.matrix(1, H + markov * (confidence == "rows and markov"))
        x["confidence_head.proj.bias"] = random.normal(1)
    special: dict = second or {}
    if layout in ("zlab2", "dflash2"):
        special = SECOND | special
    if layout == "lilicorr":
        special = pair_heads.LILICORR | special
        x |= pair_heads.lilicorr_tensors(random, H, size, special)
    if "conv_kernel_size" in special:
        taps, groups = special["conv_kernel_size"], H // special["conv_group_size"]
        for p in (f"layers.{i}.{part}_conv." for i in range(layers) for part in ("attention", "mlp")):
            x[f"{p}base_kernel"] = random.normal(2, taps, H) * 0.4
            x[f"{p}base_kernel"][:, 0] += 1
            x[f"{p}kernel_projection.weight"] = 0.5 * random.matrix(2 * taps * groups, H)
    if "selector_rank" in special:
        for name in ("predecessor", "successor"):
            x[f"candidate_selector.{name}_codebook"] = random.normal(V, special["selector_rank"])
        x["candidate_selector.hidden_projection.weight"] = random.matrix(special["selector_rank"], H)
    if layout == "domino":
        special = GRU | (gru or {})
        S, r = special["gru_hidden_dim"], special["emb_dim"]
        x |= {
            "prefix_gru.weight_ih_l0": 2 * random.matrix(3 * S, H),
            "prefix_gru.weight_hh_l0": random.matrix(3 * S, S),
        }
        x |= {"embed_proj.0.weight": 2 * random.matrix(r, H + S), "embed_proj.2.weight": 2 * random.matrix(V, r)}
    if layout == "dspine":
        x |= pair_heads.dspine_tensors(random, H, V, layers)
        outer = {"dspine_config": pair_heads.DSPINE} | (outer or {})
    more = {"model_type": "qwen3", "tie_word_embeddings": layout in FLAT, **(layer or {})}
    own_fields = head_parts.layer_config(H, inner, heads, layers, V, bias, **more)
    raw: dict = {}
    if layout in FLAT:
        raw = own_fields | {"architectures": [FLAT[layout]], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
        raw |= {"block_size": size, "num_target_layers": target["num_hidden_layers"], "dtype": "bfloat16"}
        raw["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": layer_ids, **special}
    elif layout == "deepspec":
        raw = own_fields | {"architectures": ["Qwen3DSparkModel"], "num_target_layers": target["num_hidden_layers"]}
        raw |= {"block_size": size, "mask_token_id": mask, "target_layer_ids": layer_ids, "num_anchors": 512}
    else:
        raw = {"speculators_model_type": layout, "transformer_layer_config": own_fields, "draft_vocab_size": rows}
        raw |= {"architectures": ["DFlashSpeculator"], "block_size": size, "mask_token_id": mask}
        raw |= {"aux_hidden_state_layer_ids": [n + 1 for n in layer_ids], "sample_from_anchor": layout == "dspark"}
        raw |= special
    if layout in ("deepspec", "dspark"):
        raw |= {"markov_rank": markov, "enable_confidence_head": bool(confidence), "markov_head_type": markov_kind}
        raw["confidence_head_with_markov"] = confidence == "rows and markov"
    raw = {name: value for name, value in {**raw, **(outer or {})}.items() if value is not None}
    if width is not None and layout in NESTED:
        raw["target_hidden_size"] = Ht
    head_parts.save(folder, x, raw)
    if mask_file:
        embedding = random.normal(1, H)
        table = {"mask_token_id": mask, "embedding": embedding}
        torch.save(table if mask_file == "table" else embedding, folder / "mask_embedding.pt")
    return folder


class Formula(pair_heads.Formula):
    """A drafter, one block after a whole text."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor, scale: float = 1.0):
        """`embedding`, `head`: the target's, for drafters that use them. `scale`: of its embedding; speculators'
        drafters use the rows as they are."""
        super().__init__(folder)
        inner = self.raw.get("dflash_config", {})
        self.flat = self.raw | inner
        plain = "speculators_model_type" in self.raw or "selector_rank" in self.flat
        scaled = embedding.double() * (1.0 if plain else scale) * self.flat.get("input_embedding_scale", 1.0)
        self.embedding = self.x.get("embed_tokens.weight", scaled)
        self.head = self.x.get("lm_head.weight", head.double())
        raw = self.raw
        mask = self.embedding[inner.get("mask_token_id", raw.get("mask_token_id"))]
        if (folder / "mask_embedding.pt").is_file():
            saved = torch.load(folder / "mask_embedding.pt", weights_only=True)
            mask = (saved["embedding"] if isinstance(saved, dict) else saved).double().flatten()
        self.mask, self.causal = mask, raw.get("is_causal", inner.get("causal", inner.get("causal_head")))
        self.causal = True if "dspine_config" in raw else self.causal
        dspark = raw.get("speculators_model_type") == "dspark" or raw["architectures"] == ["Qwen3DSparkModel"]
        self.following = inner.get("sample_from_anchor", raw.get("sample_from_anchor", dspark))
        self.following = inner.get("shift_label", self.following)

    def rows(self, taps: list[Tensor], root: int, drafts: int) -> Tensor:
        """The target's rows [T, Ht] of all tokens but the root at each depth -> the block's normed rows that predict
        `drafts` tokens, [drafts, H]."""
        x, T = self.x, len(taps[0])
        c = self.rms(torch.cat(taps, -1) @ x["fc.weight"].T, x["hidden_norm.weight"])
        B = drafts if self.following else drafts + 1
        h = torch.stack([self.embedding[root]] + [self.mask] * (B - 1))
        for i in range(self.c["num_hidden_layers"]):
            p = f"layers.{i}."
            y, after = self.convolved(self.rms(h, x[f"{p}input_layernorm.weight"]), f"{p}attention_conv.")
            h = h + after(self.attention(y, c, p, i, T))
            y, after = self.convolved(self.rms(h, x[f"{p}post_attention_layernorm.weight"]), f"{p}mlp_conv.")
            h = h + after(self.mlp(y, p))
            last, h = h, self.injected(h, i, root)
        self.noted(self.rms(h, x["norm.weight"])[-drafts:], last[-drafts:], c[-1] if T else None)
        return self.normed

    def convolved(self, u: Tensor, p: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """A sublayer's input, made of its normed rows u [B, H], and what becomes of its output; `p`: of the names."""
        if f"{p}base_kernel" not in self.x:
            return u, lambda y: y
        base, C = self.x[f"{p}base_kernel"], self.flat["conv_group_size"]
        kernels = (u @ self.x[f"{p}kernel_projection.weight"].T).view(len(u), *base.shape[:2], -1)

        def side(rows: Tensor, n: int) -> Tensor:
            out = torch.zeros_like(rows)
            for i in range(len(rows)):
                for tap in range(min(base.shape[1], i + 1)):
                    out[i] += (base[n, tap] + kernels[i, n, tap].repeat_interleave(C)) * rows[i - tap]
            return out

        return side(u, 0), lambda y: side(y, 1)

    def attention(self, y: Tensor, c: Tensor, p: str, layer: int, T: int) -> Tensor:
        B, q = len(y), self.project(y, p, "q", T)
        k, v = (torch.cat((self.project(c, p, name), self.project(y, p, name, T))) for name in "kv")
        sliding = self.c.get("layer_types", {})
        sliding = bool(sliding) and sliding[layer] == "sliding_attention"
        aside = self.raw.get("sliding_window_non_causal", self.raw.get("speculators_model_type") == "dflash2")
        causal = (sliding and not aside) if self.causal is None else self.causal
        seen = torch.ones(B, T + B, dtype=torch.bool)
        for row in range(B):
            if causal:
                seen[row, T + row + 1 :] = False
            if sliding:  # the last columns of those that it sees
                at = seen[row].nonzero()[:, 0]
                seen[row, at[: max(0, len(at) - self.c["sliding_window"])]] = False
        return self.attend(q, k, v, seen, p)

    def draft(self, taps: list[Tensor], text: list[int], count: int) -> tuple[list[int], list[float]]:
        """The drafted tokens and their probabilities; arguments as in `block`."""
        tokens, scores, _ = self.block(taps, text, count)
        return tokens, [math.exp(score) for score in scores]

    def block(
        self, taps: list[Tensor], text: list[int], drafts: int, temperature: float = 1.0, noise: Tensor | None = None
    ) -> tuple[list[int], list[float], list[float]]:
        """The best tokens after `text` [drafts], their log-probabilities, and the confidence head's probabilities.
        `taps`: the target's rows of all tokens of the text but the last. `noise` [drafts, V]: of the target's draws."""
        x, before, state = self.x, text[-1], None
        tokens, scores, sure = [], [], []
        for row, normed in enumerate(self.rows(taps, text[-1], drafts)):
            if "confidence_head.proj.weight" in x:
                w = x["confidence_head.proj.weight"][0]
                latent = () if len(w) == len(normed) else (x["markov_head.markov_w1.weight"][before],)
                features = torch.cat((normed, *latent))
                sure.append(float(torch.sigmoid(w @ features + x["confidence_head.proj.bias"][0])))
            z, added, state = self.step(row, normed, before, state, temperature, noise)
            z = z + added
            best = int(z.argmax())
            scores.append(float(z.log_softmax(-1)[best]))
            before = int(self.ids()[best])
            tokens.append(before)
        return tokens, scores, sure

    def step(
        self, row: int, normed: Tensor, before: int, state: Any, temperature: float, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Any]:
        """The logits [V] of draft token `row` over the temperature with the noise, what the token `before` and those
        before it add to them, and the next state."""
        x, added = self.x, torch.zeros(len(self.head)).double()
        z = self.head @ normed * self.flat.get("output_multiplier", 1.0)
        if cap := self.flat.get("final_logit_softcapping"):
            z = cap * (z / cap).tanh()
        if "prefix_gru.weight_ih_l0" in x:
            state = self.gru(before, torch.zeros(x["prefix_gru.weight_hh_l0"].shape[1]).double(), state)
            if row >= self.flat["pure_draft_prefix_len"]:
                y = x["embed_proj.0.weight"] @ torch.cat((normed, state))
                added = x["embed_proj.2.weight"] @ (y * torch.sigmoid(y))
        if "markov_head.markov_w1.weight" in x:
            latent = x["markov_head.markov_w1.weight"][before]
            found, state = self.markov(normed, latent, torch.zeros_like(latent) if state is None else state)
            added = x["markov_head.markov_w2.weight"] @ found
        z = z / temperature
        z = z if noise is None else z + noise[row, self.ids()]
        if "candidate_selector.hidden_projection.weight" in x:
            return z, self.selected(z, normed, before, temperature), state
        if self.candidates:
            return z, self.scored(row, z, before, temperature, noise), state
        return z, added / temperature, state

    def probable(
        self,
        taps: list[Tensor],
        text: list[int],
        shape: tuple[int, int, int],
        temperature: float = 1.0,
        noise: Tensor | None = None,
    ) -> list[tuple[int, ...]]:
        """The most probable beginnings of paths through a block, best first. `shape`: its length, their number, and the
        candidates of a position. A candidate has its share among them, times their share of all logits."""
        drafts, nodes, candidates = shape
        rows, best = self.rows(taps, text[-1], drafts), []
        waiting: list[tuple[float, tuple[int, ...], Any]] = [(0.0, (), None)]
        while len(best) <= nodes:
            cost, path, state = heapq.heappop(waiting)
            best.append(path)
            if len(path) < drafts:
                before = path[-1] if path else text[-1]
                z, added, state = self.step(len(path), rows[len(path)], before, state, temperature, noise)
                kept = z.topk(min(candidates, len(z))).indices
                scores = (z + added)[kept].log_softmax(-1) + z[kept].logsumexp(-1) - z.logsumexp(-1)
                for token, score in zip(self.ids()[kept].tolist(), scores.tolist(), strict=True):
                    heapq.heappush(waiting, (cost - score, (*path, token), state))
        return best[1:]

    def gru(self, token: int, zeros: Tensor, state: Tensor | None) -> Tensor:
        """The next state of a GRU without biases, as in torch.nn.GRU."""
        h = zeros if state is None else state
        given = (self.x["prefix_gru.weight_ih_l0"] @ self.embedding[token]).chunk(3)
        own = (self.x["prefix_gru.weight_hh_l0"] @ h).chunk(3)
        reset, update = (torch.sigmoid(a + b) for a, b in zip(given[:2], own[:2], strict=True))
        return (1 - update) * torch.tanh(given[2] + reset * own[2]) + update * h

    def selected(self, z: Tensor, normed: Tensor, before: int, temperature: float) -> Tensor:
        """What the selector adds to the best of the perturbed logits z [V]; -inf for the others."""
        x, best = self.x, z.topk(self.flat["selector_top_k"]).indices
        asked = x["candidate_selector.predecessor_codebook"][before] * (
            x["candidate_selector.hidden_projection.weight"] @ normed
        )
        added = x["candidate_selector.successor_codebook"][best] @ asked / temperature
        return torch.full_like(z, -math.inf).index_copy(0, best, added)

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
