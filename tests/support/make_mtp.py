"""Targets whose checkpoints hold random MTP heads, in the layouts of MiMo, Qwen3-Next and DeepSeek; and what the heads
compute, as an independent formula in float64."""

from pathlib import Path

import head_parts
import make_head
import torch
from make_checkpoint import edit, make
from safetensors.torch import load_file, save_file

NAMES = {  # layout -> start of a head's and of its layer's names, and the names of fc and the three norms
    "mimo": ("model.mtp_layers.{}.", "", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")),
    "qwen3-next": ("mtp.", "layers.{}.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
    "deepseek": ("model.layers.{}.", "", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
}


def names(layout, k, base="model."):
    """Start of the names of head k, start of its layer's, and the names of fc and the three norms."""
    start, layer, rest = NAMES[layout]
    number = k + 4 * (layout == "deepseek")
    start = start.format(number) if base else start.format(number).removeprefix("model.")
    return start, start + layer.format(number), rest


def make_mtp(folder, layout, own=False, heads=1, **how):
    """A target with random heads, whose layers are like the target's last one but with other numbers. `own`: the heads
    have an embedding and an LM head of their own."""
    make(folder, layers=4, max_context=256, seed=2, **how)
    random, x = head_parts.Random(1), load_file(folder / "model.safetensors")
    base = "model." if any(name.startswith("model.") for name in x) else ""
    H, V = x[f"{base}embed_tokens.weight"].shape[1], len(x[f"{base}embed_tokens.weight"])
    new, rows = {}, {}
    for k in range(heads):
        start, layer, (fc, *norms) = names(layout, k, base)
        new[f"{start}{fc}.weight"] = random.normal(H, 2 * H) * 1.2 * (2 * H) ** -0.5
        new |= {f"{start}{name}.weight": 1 + 0.3 * random.normal(H) for name in norms}
        for name, old in x.items():
            if name.startswith(f"{base}layers.3."):
                about = old + (0.2 if old.dim() == 1 else 0.1) * random.normal(*old.shape)
                new[f"{layer}{name.removeprefix(f'{base}layers.3.')}"] = about
        if own:
            rows = rows or {"embed_tokens": random.normal(V, H) * 0.3, "shared_head.head": random.normal(V, H) * 0.2}
            new |= {f"{start}{name}.weight": row.clone() for name, row in rows.items()}
    save_file(x | new, folder / "model.safetensors", {"format": "pt"})
    edit(folder, num_nextn_predict_layers=heads)
    return folder


class Formula(make_head.Formula):
    """The heads, all columns at once."""

    def __init__(self, folder: Path):
        head_parts.Formula.__init__(self, folder)
        self.c.setdefault("head_dim", self.c["hidden_size"] // self.c["num_attention_heads"])
        self.c["rope_theta"] = self.c["rope_parameters"]["rope_theta"]
        base = "model." if any(name.startswith("model.") for name in self.x) else ""
        own = {"mtp_layers.": "mimo", "mtp.": "qwen3-next"}
        self.layout = next((own[start] for start in own if any(start in name for name in self.x)), "deepseek")
        self.names = [names(self.layout, k, base) for k in range(self.c["num_nextn_predict_layers"])]
        start = self.names[0][0]
        self.embedding = self.x.get(f"{start}embed_tokens.weight", self.x[f"{base}embed_tokens.weight"])
        head = self.embedding if self.c["tie_word_embeddings"] else self.x["lm_head.weight"]
        self.head = self.x.get(f"{start}shared_head.head.weight", head)
        self.target_norm = self.x[f"{base}norm.weight"]

    def window(self, p):
        return 1 << 30

    def features(self, taps):
        return taps[0] if self.layout == "mimo" else self.rms(taps[0], self.target_norm)

    def through(self, k, features, tokens):
        """Head k at columns 0, 1, ..: features [T, H] and tokens [T] -> (its rows, their norm), [T, H] each."""
        x, (s, p, (fc, *norms)) = self.x, self.names[k]
        e, h = self.embedding[torch.tensor(tokens)], features
        if self.layout != "qwen3-next":
            e = torch.cat((torch.zeros(1, e.shape[1], dtype=e.dtype), e[1:]))
        embed_norm, hidden_norm, norm = (x[f"{s}{name}.weight"] for name in norms)
        pair = [self.rms(e, embed_norm), self.rms(h, hidden_norm)]
        r = torch.cat(pair[::-1] if self.layout == "mimo" else pair, -1) @ x[f"{s}{fc}.weight"].T
        r = r + self.attention(self.rms(r, x[f"{p}input_layernorm.weight"]), p)
        r = r + self.mlp(self.rms(r, x[f"{p}post_attention_layernorm.weight"]), p)
        return r, self.rms(r, norm)

    def passed(self, k, features, tokens):
        """What head k passes on to the next one, and its logits."""
        r, normed = self.through(k, features, tokens)
        if self.layout == "mimo":
            return (r if k == len(self.names) - 1 else features), normed @ self.head.T
        return normed, normed @ self.head.T

    def run(self, taps, text, path, steps):
        """Draft `steps` tokens after `text`, of which the first ones are `path`. Head k at column t reads the token of
        column t + k + 1 and what head k - 1 passed on at column t. After the last head, the first one reads what it
        passed on. Returns the tokens and each step's logits."""
        n, L, tokens, logits = len(self.names), len(text), text + path, []
        true = [self.features(taps)]
        for k in range(n):
            true.append(self.passed(k, true[k][: L - 1 - k], text[k + 1 :])[0])
        passed = true[0]
        for i in range(steps):
            k = i % n
            features = torch.cat((true[k][: L - 1 - k], passed[len(passed) - i :]))
            passed, z = self.passed(k, features, tokens[k + 1 : L + i])
            logits.append(z[-1])
            if len(tokens) == L + i:
                tokens.append(int(z[-1].argmax()))
        return tokens[L:], logits

    def chain(self, taps, text, count):
        return self.run(taps, text, [], count)

    def after(self, taps, text, path):
        return self.run(taps, text, path, len(path) + 1)[1][-1].log_softmax(-1)
