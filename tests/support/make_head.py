"""Random draft heads in the layouts of SafeAILab (SpecForge, SGLang), speculators (vLLM) and DeepSpec, and EAGLE-1's;
and what they compute, as an independent formula in float64."""

from pathlib import Path

import head_parts
import torch
from torch import Tensor


def make_head(
    folder: Path,
    target: dict,
    *,
    layout: str = "flat",
    rows: int | None = None,
    ids: list[int] | None = None,
    layers: int = 1,
    heads: tuple[int, int, int] = (4, 2, 8),
    inner: int = 48,
    own_embedding: bool = False,
    own_head: bool = True,
    seed: int = 0,
    qk_norm: bool = False,
    bias: bool = False,
    fc_bias: bool = True,
    width: int | None = None,
    layer: dict | None = None,
    **config,
) -> Path:
    """`target`: config.json of the target. `layout`: "flat", "nested", "peagle", "deepspec" or "eagle1". `ids`: of the
    LM head's rows. `heads`: query heads, KV heads and their dimension. `layer`, `config`: further fields of the layers
    and of the head."""
    random, x = head_parts.Random(seed), {}
    H = width or target["hidden_size"]
    Ht, V, A = target["hidden_size"], target["vocab_size"], len(config.get("target_layer_ids", "abc"))
    rows = len(ids) if ids else rows or V
    three = layout != "eagle1"
    x["fc.weight"] = random.matrix(H, A * Ht if three else H + Ht)
    if not three and fc_bias:
        x["fc.bias"] = random.vector(H)
    for i in range(layers):
        p = "midlayer." if layout == "flat" and i == 0 else f"layers.{i}."
        x |= random.layer(p, H, 2 * H if i == 0 and three else H, heads, inner, bias, qk_norm)
        if three or i:
            x[f"{p}input_layernorm.weight"] = random.norm(H)
        if three and i == 0:
            x[f"{p}hidden_norm.weight"] = random.norm(H)
        x[f"{p}post_attention_layernorm.weight"] = random.norm(H)
    if three:
        x["norm.weight"] = random.norm(H)
    if layout == "peagle":
        x["mask_hidden"] = random.matrix(1, 1, A * Ht)
    if own_embedding:
        x["embed_tokens.weight"] = 0.3 * random.normal(V, H)
    if own_head and three:
        x["lm_head.weight"] = random.matrix(rows, H)
    if rows < V:
        some = torch.randperm(V, generator=random.generator)[:rows].sort().values
        x |= head_parts.kept_ids(torch.tensor(ids) if ids else some, V)
    if config.get("norm_before_fc"):
        x["input_norm.weight"] = random.norm(A * Ht)
    if config.get("fc_norm"):
        x |= {f"fc_norm.{n}.weight": random.norm(Ht) for n in range(A)}
    more = {"model_type": "qwen3" if qk_norm else "llama", "tie_word_embeddings": False, **(layer or {})}
    own = head_parts.layer_config(H, inner, heads, layers, V, bias, **more)
    if layout in ("nested", "peagle"):
        kind = {"nested": "eagle3"}.get(layout, layout)
        raw = {
            "architectures": ["Eagle3DraftModel" if kind == "eagle3" else "PEagleSpeculator"],
            "speculators_model_type": kind,
            "transformer_layer_config": own,
        }
    else:
        names = {"flat": "LlamaForCausalLMEagle3", "deepspec": "Qwen3Eagle3Model", "eagle1": "LlamaForCausalLM"}
        raw = {"architectures": [names[layout]], **own}
    if three and layout != "deepspec":
        raw["draft_vocab_size"] = rows
    elif not fc_bias:
        raw["bias"] = False
    if width is not None:
        raw["target_hidden_size"] = Ht
    return head_parts.save(folder, x, raw | config)


class Formula(head_parts.Formula):
    """A head, pair by pair."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor, norm: Tensor, eps: float):
        """`embedding`, `head`, `norm`, `eps`: the target's, for heads that use them."""
        super().__init__(folder)
        self.three = any(name.endswith("hidden_norm.weight") for name in self.x)
        self.embedding = self.x.get("embed_tokens.weight", embedding.double())
        self.head = self.x.get("lm_head.weight", head.double())
        self.target_norm, self.target_eps = norm.double(), eps
        self.layers = sorted(
            {n.split("self_attn")[0] for n in self.x if "self_attn" in n}, key=lambda n: (n != "midlayer.", n)
        )

    def features(self, taps: list[Tensor]) -> Tensor:
        """Rows of the target [T, Ht] at each depth -> [T, H]."""
        if not self.three:
            return self.rms(taps[0], self.target_norm, self.target_eps)
        g = torch.cat(taps, -1)
        if "input_norm.weight" in self.x:
            g = self.rms(g, self.x["input_norm.weight"])
        if "fc_norm.0.weight" in self.x:
            each = enumerate(g.chunk(len(taps), -1))
            g = torch.cat([self.rms(t, self.x[f"fc_norm.{n}.weight"]) for n, t in each], -1)
        return g @ self.x["fc.weight"].T

    def outputs(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs [T, H] and [T] at positions 0, 1, .. -> (output [T, H], logits [T, rows])."""
        e, x = self.embedding[tokens], self.x
        if self.three:
            first = self.layers[0]
            u = self.rms(features, x[f"{first}hidden_norm.weight"])
            nested = "transformer_layer_config" in self.raw
            r = u if self.raw.get("norm_before_residual", nested) else features
            entering = torch.cat((self.rms(e, x[f"{first}input_layernorm.weight"]), u), -1)
        else:
            r = torch.cat((e, features), -1) @ x["fc.weight"].T + x.get("fc.bias", 0)
            entering = r
        for i, p in enumerate(self.layers):
            if i:
                entering = self.rms(r, x[f"{p}input_layernorm.weight"])
            r = r + self.attention(entering, p)
            r = r + self.mlp(self.rms(r, x[f"{p}post_attention_layernorm.weight"]), p)
        if not self.three:
            return r, r @ self.head.T
        normed = self.rms(r, x["norm.weight"])
        return normed if self.raw.get("norm_output") else r, normed @ self.head.T

    def window(self, p: str) -> int:
        """The columns that a row of the layer sees."""
        c, i = self.c, self.layers.index(p)
        kinds = c.get("layer_types")
        if kinds is None:
            qwen = c["model_type"] == "qwen3" and c.get("use_sliding_window")
            kinds = ["sliding_attention" if qwen and n >= c["max_window_layers"] else "" for n in range(9)]
        trained = c["max_position_embeddings"]
        return min(trained, c["sliding_window"]) if kinds[i] == "sliding_attention" else trained

    def attention(self, y: Tensor, p: str) -> Tensor:
        q, k, v = (self.project(y, p, name) for name in "qkv")
        behind = torch.arange(len(y))[:, None] - torch.arange(len(y))
        return self.attend(q, k, v, (behind >= 0) & (behind < self.window(p)), p)

    def draft(self, taps: list[Tensor], text: list[int], count: int) -> tuple[list[int], list[float]]:
        """The drafted tokens and their probabilities; arguments as in `chain`."""
        tokens, logits = self.chain(taps, text, count)
        return tokens, [float(z.softmax(-1).max()) for z in logits]

    def chain(self, taps: list[Tensor], text: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Draft `count` tokens after `text`, whose last token is the root. `taps`: the target's rows of all other
        tokens. Returns the tokens and the logits of each step."""
        if "mask_hidden" in self.x:
            return self.parallel(taps, text, count)
        features, tokens, drafted, logits = self.features(taps), torch.tensor(text[1:]), [], []
        for _ in range(count):
            out, z = self.outputs(features, tokens)
            logits.append(z[-1])
            drafted.append(int(self.ids()[z[-1].argmax()]))
            features = torch.cat((features, out[-1:]))
            tokens = torch.cat((tokens, torch.tensor([drafted[-1]])))
        return drafted, logits

    def after(self, taps: list[Tensor], text: list[int], path: list[int]) -> Tensor:
        """Log-probabilities [rows] after the drafted tokens `path`; other arguments as in `chain`."""
        features, tokens = self.features(taps), torch.tensor(text[1:] + path)
        for _ in path:
            out, _ = self.outputs(features, tokens[: len(features)])
            features = torch.cat((features, out[-1:]))
        return self.outputs(features, tokens)[1][-1].log_softmax(-1)

    def tree(
        self, taps: list[Tensor], text: list[int], width: int, depth: int, count: int
    ) -> tuple[list[int], list[int]]:
        """EAGLE-2's tree: each level grows the `width` nodes with the largest cumulative probability, and the tree is
        the `count` best of all children of grown nodes. Returns their tokens and parents, row 0 being the root."""
        nodes: list[tuple[float, list[int], int]] = []  # score, path, parent
        level = [(0.0, [], 0)]
        for _ in range(depth):
            first = len(nodes)
            for score, path, row in level:
                z = self.after(taps, text, path)
                best = z.sort(descending=True, stable=True).indices[:width]
                nodes += [(score + float(z[i]), [*path, int(self.ids()[i])], row) for i in best]
            grown = sorted(range(first, len(nodes)), key=lambda i: -nodes[i][0])[:width]
            level = [(*nodes[i][:2], i + 1) for i in grown]
        kept = sorted(range(len(nodes)), key=lambda i: -nodes[i][0])[:count]
        rows = {0: 0, **{i + 1: row for row, i in enumerate(kept, 1)}}
        return [nodes[i][1][-1] for i in kept], [rows[nodes[i][2]] for i in kept]

    def parallel(self, taps: list[Tensor], text: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        """`chain` of a P-EAGLE head, in one pass."""
        A, masks = len(taps), count - 1
        mask = self.features(list(self.x["mask_hidden"].view(A, 1, -1)))
        tokens = torch.tensor(text[1:] + [self.raw["mask_token_id"]] * masks)
        _, logits = self.outputs(torch.cat((self.features(taps), mask.expand(masks, -1))), tokens)
        return self.ids()[logits[-count:].argmax(-1)].tolist(), list(logits[-count:])
