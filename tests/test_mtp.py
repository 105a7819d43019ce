"""Strategy mtp: heads in the target's own checkpoint draft what an independent formula says, and change no token."""

import json

import pytest
import torch
from make_checkpoint import edit, make
from make_head import Formula
from safetensors.torch import load_file, save_file

import specker
from specker.model.cache import KVCache
from specker.model.decoder import prefill

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
NAMES = {  # layout -> start of the head's and of the layer's names, and the names of fc and the three norms
    "mimo": ("model.mtp_layers.0.", "", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")),
    "qwen3-next": ("mtp.", "layers.0.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
    "deepseek": ("model.layers.4.", "", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
}
KINDS = {
    "mimo": ("mimo", {"arch": "mimo"}),
    "mimo, tied": ("mimo", {"arch": "mimo", "tied": True}),
    "qwen3-next": ("qwen3-next", {"arch": "qwen3"}),
    "deepseek": ("deepseek", {"arch": "llama"}),
    "deepseek's own rows": ("deepseek", {"arch": "llama", "own": True}),
    "deepseek of a base model": ("deepseek", {"arch": "qwen3", "prefix": False, "tied": True}),
}


def make_target(folder, layout, own=False, heads=1, **how):
    """A target with a random head, whose layer is like the target's last one but with other numbers."""
    make(folder, layers=4, max_context=256, seed=2, **how)
    generator = torch.Generator().manual_seed(1)
    x = load_file(folder / "model.safetensors")
    base = "model." if any(name.startswith("model.") for name in x) else ""
    H, V = x[f"{base}embed_tokens.weight"].shape[1], len(x[f"{base}embed_tokens.weight"])

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    start, layer, (fc, *norms) = NAMES[layout]
    start = start if base else start.removeprefix("model.")
    new = {f"{start}{fc}.weight": noise(H, 2 * H) * 1.2 * (2 * H) ** -0.5}
    new |= {f"{start}{name}.weight": 1 + 0.3 * noise(H) for name in norms}
    for name, old in x.items():
        if name.startswith(f"{base}layers.3."):
            about = old + (0.2 if old.dim() == 1 else 0.1) * noise(*old.shape)
            new[f"{start}{layer}{name.removeprefix(f'{base}layers.3.')}"] = about
    if own:
        new |= {f"{start}embed_tokens.weight": noise(V, H) * 0.3, f"{start}shared_head.head.weight": noise(V, H) * 0.2}
    if heads > 1:  # the names of a second head
        new |= {n.replace("layers.0", "layers.1").replace("layers.4", "layers.5"): y.clone() for n, y in new.items()}
    save_file(x | new, folder / "model.safetensors", {"format": "pt"})
    edit(folder, num_nextn_predict_layers=heads)
    return folder


class MtpFormula(Formula):
    """The head in float64, pair by pair over a whole text, without a cache."""

    def __init__(self, folder, layout, own, tied_head):
        self.c = json.loads((folder / "config.json").read_text())
        self.c.setdefault("head_dim", self.c["hidden_size"] // self.c["num_attention_heads"])
        self.c["rope_theta"] = self.c["rope_parameters"]["rope_theta"]
        self.raw = self.c
        self.x = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        base = "model." if any(name.startswith("model.") for name in self.x) else ""
        self.start, layer, (self.fc, *self.norms) = NAMES[layout]
        self.start = self.start if base else self.start.removeprefix("model.")
        self.layers, self.layout = [self.start + layer], layout
        rows = self.start if own else base
        self.embedding = self.x[f"{rows}embed_tokens.weight"]
        head = f"{self.start}shared_head.head.weight" if own else "lm_head.weight"
        self.head = self.x[f"{base}embed_tokens.weight"] if tied_head else self.x[head]
        self.target_norm, self.target_eps = self.x[f"{base}norm.weight"], self.c["rms_norm_eps"]

    def window(self, p):
        return 1 << 30

    def features(self, taps):
        return self.rms(taps[0], self.target_norm)

    def outputs(self, features, tokens):
        x, s = self.x, self.start
        e, h = self.embedding[tokens], features
        if self.layout != "qwen3-next":
            e = torch.cat((torch.zeros(1, e.shape[1], dtype=e.dtype), e[1:]))
        embed_norm, hidden_norm, norm = (x[f"{s}{name}.weight"] for name in self.norms)
        pair = [self.rms(e, embed_norm), self.rms(h, hidden_norm)]
        r = torch.cat(pair[::-1] if self.layout == "mimo" else pair, -1) @ x[f"{s}{self.fc}.weight"].T
        p = self.layers[0]
        r = r + self.attention(self.rms(r, x[f"{p}input_layernorm.weight"]), p)
        y = self.rms(r, x[f"{p}post_attention_layernorm.weight"])
        gate, up = y @ x[f"{p}mlp.gate_proj.weight"].T, y @ x[f"{p}mlp.up_proj.weight"].T
        r = r + (gate * torch.sigmoid(gate) * up) @ x[f"{p}mlp.down_proj.weight"].T
        normed = self.rms(r, norm)
        return r if self.layout == "deepseek" else normed, normed @ self.head.T


def load(target, strategy="mtp", **options):
    options = {} if strategy == "ar" else {"policy": "fixed", "draft_tokens": 3, **options}
    return specker.load(str(target), strategy=strategy, device="cpu", dtype="float64", **options)


def hidden(engine, text):
    """The target's last rows before the final norm, of all tokens but the last."""
    model = engine.model
    cache = KVCache(model.config, 256, dtype=model.dtype, device="cpu")
    return [prefill(model, cache, text[:-1], (4,), len(text))[4]]


@pytest.mark.parametrize(("heads", "graphs"), [(1, "off"), (2, "on")])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formula(tmp_path, kind, heads, graphs):
    """Of two heads, the first one drafts the whole chain."""
    layout, how = KINDS[kind]
    target = make_target(tmp_path / "target", layout, heads=heads, **how)
    engine, seen = load(target, graphs=graphs), []
    engine.trace = seen.append
    prompts = [TEXT, TEXT[::-1], [7, 3]]
    formula = MtpFormula(target, layout, how.get("own"), how.get("tied"))
    drafted = 0
    for prompt in prompts:
        seen.clear()
        out = engine.generate(prompt, 20)
        assert engine.check(prompt, out, 20).identical
        text = prompt + out.tokens
        for row in seen:
            before, size = text[: row["position"]], len(row["draft"])
            assert size == min(3, len(text) - len(before) - 1) or (graphs == "on" and size == 3)
            if size:
                assert row["draft"] == formula.chain(hidden(engine, before), before, size)[0]
                drafted += 1
    assert drafted > 20


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("mtp") / "target", "mimo", arch="mimo")


@pytest.mark.parametrize("strategy", ["mtp", "mtp+lookup"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4, "top_k": 20}])
def test_batches_change_no_token(mimo, strategy, sampling):
    prompts, counts = [TEXT, [7], TEXT[:5] * 2, [n % 100 for n in range(90)], TEXT[::-1]], [20, 9, 30, 12, 25]
    engine = load(mimo, strategy, batch_size=3, max_context=256, page_size=16)
    plain = [engine.generate_ar(p, n, **sampling).tokens for p, n in zip(prompts, counts, strict=True)]
    assert [each.tokens for each in engine.generate(prompts, counts, **sampling)] == plain


@pytest.mark.parametrize("kind", ["mimo", "qwen3-next", "deepseek"])
def test_other_strategies_ignore_the_head(tmp_path, kind):
    layout, how = KINDS[kind]
    plain = make(tmp_path / "plain", layers=4, max_context=256, seed=2, **how)
    with_head = make_target(tmp_path / "target", layout, heads=2, **how)
    assert load(with_head, "ar").generate(TEXT, 20).tokens == load(plain, "ar").generate(TEXT, 20).tokens


def changed(target, folder, drop=(), **tensors):
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    x = {name: t for name, t in load_file(target / "model.safetensors").items() if name not in drop}
    save_file(x | tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


BAD = {
    "another tensor": ({"model.mtp_layers.0.extra.weight": torch.ones(3)}, (), "has model.mtp_layers.0.extra.weight"),
    "missing": ({}, ("model.mtp_layers.0.mlp.up_proj.weight",), "lacks model.mtp_layers.0.mlp.up_proj.weight"),
    "shape": ({"model.mtp_layers.0.input_proj.weight": torch.ones(64, 64)}, (), "input_proj.weight has shape"),
}


@pytest.mark.parametrize("way", BAD)
def test_heads_that_do_not_fit_are_refused(mimo, tmp_path, way):
    tensors, drop, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        load(changed(mimo, tmp_path / "target", drop, **tensors))


def test_a_target_without_a_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no MTP heads"):
        load(make(tmp_path / "target", layers=4, max_context=256))


def test_random_weights_are_refused(mimo):
    with pytest.raises(ValueError, match="strategy mtp reads a trained head"):
        load(mimo, load="dummy")


def test_a_draft_checkpoint_is_refused(mimo):
    with pytest.raises(ValueError, match="strategy 'mtp' uses no draft checkpoint"):
        specker.load(str(mimo), str(mimo), strategy="mtp", device="cpu")
