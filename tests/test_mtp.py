"""Strategy mtp: heads in the target's own checkpoint draft what an independent formula says, and change no token."""

import json
from itertools import count

import cases
import pytest
import torch
from make_checkpoint import edit, make
from make_head import Formula
from safetensors.torch import load_file, save_file

import specker
from specker.model.cache import KVCache
from specker.model.prefill import prefill
from specker.runtime.control.choose import NONE
from specker.runtime.control.policy import Fixed
from specker.runtime.engine import cache_memory
from specker.runtime.strategies.mtp import drafter

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
NAMES = {  # layout -> start of a head's and of its layer's names, and the names of fc and the three norms
    "mimo": ("model.mtp_layers.{}.", "", ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")),
    "qwen3-next": ("mtp.", "layers.{}.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
    "deepseek": ("model.layers.{}.", "", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
}
KINDS = {
    "mimo": ("mimo", {"arch": "mimo"}),
    "mimo, tied": ("mimo", {"arch": "mimo", "tied": True}),
    "qwen3-next": ("qwen3-next", {"arch": "qwen3"}),
    "deepseek": ("deepseek", {"arch": "llama"}),
    "deepseek's own rows": ("deepseek", {"arch": "llama", "own": True}),
    "deepseek of a base model": ("deepseek", {"arch": "qwen3", "prefix": False, "tied": True}),
}


def names(layout, k, base="model."):
    """Start of the names of head k, start of its layer's, and the names of fc and the three norms."""
    start, layer, rest = NAMES[layout]
    number = k + 4 * (layout == "deepseek")
    start = start.format(number) if base else start.format(number).removeprefix("model.")
    return start, start + layer.format(number), rest


def make_target(folder, layout, own=False, heads=1, **how):
    """A target with random heads, whose layers are like the target's last one but with other numbers."""
    make(folder, layers=4, max_context=256, seed=2, **how)
    generator = torch.Generator().manual_seed(1)
    x = load_file(folder / "model.safetensors")
    base = "model." if any(name.startswith("model.") for name in x) else ""
    H, V = x[f"{base}embed_tokens.weight"].shape[1], len(x[f"{base}embed_tokens.weight"])

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    new, rows = {}, {}
    for k in range(heads):
        start, layer, (fc, *norms) = names(layout, k, base)
        new[f"{start}{fc}.weight"] = noise(H, 2 * H) * 1.2 * (2 * H) ** -0.5
        new |= {f"{start}{name}.weight": 1 + 0.3 * noise(H) for name in norms}
        for name, old in x.items():
            if name.startswith(f"{base}layers.3."):
                about = old + (0.2 if old.dim() == 1 else 0.1) * noise(*old.shape)
                new[f"{layer}{name.removeprefix(f'{base}layers.3.')}"] = about
        if own:
            rows = rows or {"embed_tokens": noise(V, H) * 0.3, "shared_head.head": noise(V, H) * 0.2}
            new |= {f"{start}{name}.weight": row.clone() for name, row in rows.items()}
    save_file(x | new, folder / "model.safetensors", {"format": "pt"})
    edit(folder, num_nextn_predict_layers=heads)
    return folder


class MtpFormula(Formula):
    """The heads in float64, all columns at once and without a cache."""

    def __init__(self, folder, layout, own=False, tied_head=False, heads=1):
        self.c = json.loads((folder / "config.json").read_text())
        self.c.setdefault("head_dim", self.c["hidden_size"] // self.c["num_attention_heads"])
        self.c["rope_theta"] = self.c["rope_parameters"]["rope_theta"]
        self.raw = self.c
        self.x = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        base = "model." if any(name.startswith("model.") for name in self.x) else ""
        self.layout, self.names = layout, [names(layout, k, base) for k in range(heads)]
        rows = self.names[0][0] if own else base
        self.embedding = self.x[f"{rows}embed_tokens.weight"]
        head = f"{rows}shared_head.head.weight" if own else "lm_head.weight"
        self.head = self.x[f"{base}embed_tokens.weight"] if tied_head else self.x[head]
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
        y = self.rms(r, x[f"{p}post_attention_layernorm.weight"])
        gate, up = y @ x[f"{p}mlp.gate_proj.weight"].T, y @ x[f"{p}mlp.up_proj.weight"].T
        r = r + (gate * torch.sigmoid(gate) * up) @ x[f"{p}mlp.down_proj.weight"].T
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
        passed on. Returns the tokens and the last step's logits."""
        n, L, tokens = len(self.names), len(text), text + path
        true = [self.features(taps)]
        for k in range(n):
            true.append(self.passed(k, true[k][: L - 1 - k], text[k + 1 :])[0])
        passed = logits = true[0]
        for i in range(steps):
            k = i % n
            features = torch.cat((true[k][: L - 1 - k], passed[len(passed) - i :]))
            passed, logits = self.passed(k, features, tokens[k + 1 : L + i])
            if len(tokens) == L + i:
                tokens.append(int(logits[-1].argmax()))
        return tokens[L:], logits[-1]

    def chain(self, taps, text, count):
        return self.run(taps, text, [], count)[0]

    def after(self, taps, text, path):
        return self.run(taps, text, path, len(path) + 1)[1].log_softmax(-1)

    def ids(self):
        return torch.arange(len(self.head))


def load(target, strategy="mtp", **options):
    options = {} if strategy == "ar" else {"policy": "fixed", "draft_tokens": 3, **options}
    return specker.load(str(target), strategy=strategy, device="cpu", dtype="float64", **options)


def hidden(engine, text):
    """The target's last rows before the final norm, of all tokens but the last."""
    model = engine.model
    cache = KVCache(model.config, 256, dtype=model.dtype, device="cpu")
    return [prefill(model, cache, text[:-1], (4,), len(text))[4]]


@pytest.mark.parametrize(("kind", "several"), cases.one_in(2, KINDS, [False, True]))
def test_drafts_are_those_of_the_formula(tmp_path, kind, several):
    heads, graphs = (2, "off") if several else (1, "on")
    layout, how = KINDS[kind]
    target = make_target(tmp_path / "target", layout, heads=heads, **how)
    engine, seen = load(target, graphs=graphs), []
    engine.trace = seen.append
    prompts = [TEXT, TEXT[::-1], [7, 3]]
    formula = MtpFormula(target, layout, how.get("own"), how.get("tied"), heads)
    drafted = 0
    for prompt in prompts:
        seen.clear()
        out = engine.generate(prompt, 20)
        assert engine.check(prompt, out, 20).identical
        text = prompt + out.tokens
        for row in seen:
            before, size = text[: row["position"]], len(row["draft"])
            if len(before) <= heads:
                assert size == 0
            else:
                assert size == min(3, len(text) - len(before) - 1) or (graphs == "on" and size == 3)
            if size:
                assert row["draft"] == formula.chain(hidden(engine, before), before, size)
                drafted += 1
    assert drafted > 20


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("mtp") / "target", "mimo", arch="mimo")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Targets with three heads by layout, and what the heads draft."""
    folder = tmp_path_factory.mktemp("three")
    made = {
        name: make_target(folder / name, *KINDS[name][:1], heads=3, **KINDS[name][1]) for name in ("mimo", "deepseek")
    }
    return {name: (target, MtpFormula(target, name, heads=3)) for name, target in made.items()}


SHAPES = {
    "two heads": {"draft_tokens": 2},
    "more tokens than heads": {"draft_tokens": 7},
    "tree": {"tree": "3x2"},
    "pruned tree": {"tree": "2x4", "draft_tokens": 6},
}


def assert_drafts(engine, formula, seen, text):
    """The drafts of a trace are those of the formula after the same texts. Returns how many were as long as asked."""
    size, whole = engine.plan.largest, 0
    for row in seen:
        before, count = text[: row["position"]], len(row["draft"])
        if count and engine.options.tree is None:
            assert row["draft"] == formula.chain(hidden(engine, before), before, count)
        elif count == size.nodes:  # the end of a text cuts the tree
            want = formula.tree(hidden(engine, before), before, engine.options.width, size.depth, size.nodes)
            assert (row["draft"], row["parents"]) == want
        whole += count == size.nodes
    return whole


@pytest.mark.parametrize(("layout", "shape"), cases.one_in(2, ["deepseek", "mimo"], SHAPES))
def test_heads_take_turns(three, monkeypatch, layout, shape):
    """Texts of unequal length in three slots: the first ones end early, and others take their slots. Rows are forwarded
    in blocks."""
    monkeypatch.setattr(drafter, "BLOCK", 9)
    target, formula = three[layout]
    engine, seen = load(target, batch_size=3, page_size=16, **{"draft_tokens": None, **SHAPES[shape]}), []
    prompts, counts = [TEXT[:9], [7], [5, 6], TEXT], [4, 12, 14, 11]
    engine.trace = seen.append
    out = engine.generate(prompts, counts)
    assert [each.tokens for each in out] == [cases.plain(target, p, n) for p, n in zip(prompts, counts, strict=True)]
    for n, prompt in enumerate(prompts):
        rows = [row for row in seen if row["prompt"] == n]
        assert assert_drafts(engine, formula, rows, prompt + out[n].tokens) > 1 or n == 0


@pytest.mark.parametrize("prefixes", ["all", "exact"])
def test_a_known_beginning_gives_the_drafts_of_a_fresh_prompt(three, prefixes):
    """A column depends on as many tokens after it as there are heads: where two prompts part, it is computed anew."""
    target, formula = three["deepseek"]
    engine = load(target, prefix_cache=prefixes, page_size=4)
    first = engine.generate(TEXT, 20)
    for prompt in (TEXT + [8, 8, 8], (TEXT + first.tokens)[:30], TEXT[:12] + [1, 2, 3, 4], TEXT):
        seen = []
        engine.trace = seen.append
        out = engine.generate(prompt, 8)
        assert assert_drafts(engine, formula, seen, prompt + out.tokens)
        if prefixes == "all":
            assert out.stats.prompt < len(prompt) - 6


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_rows_wait_while_nothing_is_drafted(three, monkeypatch, graphs):
    """Rounds without a draft may have fixed shapes. After 12 of them, the draft is that of the formula."""
    monkeypatch.setattr(drafter, "WAITING", 4)
    target, formula = three["mimo"]
    engine, rounds, seen = load(target, graphs=graphs), count(), []
    budget = Fixed.budget
    monkeypatch.setattr(Fixed, "budget", lambda self: NONE if next(rounds) < 12 else budget(self))
    engine.trace = seen.append
    out = engine.generate(TEXT, 20)
    drafted = [row for row in seen if row["draft"]]
    assert len(seen) - len(drafted) >= 12 and assert_drafts(engine, formula, drafted, TEXT + out.tokens)
    assert (engine.loop.launched >= 12) == (graphs == "on")


SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 4, "top_k": 20}}


@pytest.mark.parametrize(("heads", "strategy", "how"), cases.one_in(2, [1, 3], ["mtp", "mtp+lookup"], SAMPLING))
def test_batches_change_no_token(mimo, three, heads, strategy, how):
    prompts, counts = [TEXT, [7], TEXT[:5] * 2, [n % 100 for n in range(90)], [5, 6]], [20, 9, 30, 12, 25]
    target = mimo if heads == 1 else three["deepseek"][0]
    engine = load(target, strategy, batch_size=3, max_context=256, page_size=16)
    plain = [cases.plain(target, p, n, **SAMPLING[how]) for p, n in zip(prompts, counts, strict=True)]
    assert [each.tokens for each in engine.generate(prompts, counts, **SAMPLING[how])] == plain


def test_a_draft_that_ends_by_confidence(three):
    target, formula = three["deepseek"]
    engine, seen = load(target, policy="draft-and-verify", draft_tokens=5), []
    engine.trace = seen.append
    out = engine.generate(TEXT, 20)
    text = TEXT + out.tokens
    assert out.tokens == cases.plain(target, TEXT, 20)
    for row in seen:
        before = text[: row["position"]]
        assert row["draft"] == formula.chain(hidden(engine, before), before, len(row["draft"]))
    assert len({len(row["draft"]) for row in seen}) > 1


def test_each_head_has_a_layer_of_the_cache(three, mimo):
    few, many = load(mimo), load(three["mimo"][0])
    assert len(few.drafter.cache.layers) == 1 and len(many.drafter.cache.layers) == 3
    costs = [cache_memory(e.target, e.draft, e.options, None).configs for e in (few, many)]
    assert [len(configs) for configs in costs] == [2, 4]


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
    "a gap": (
        {"model.mtp_layers.2.input_proj.weight": torch.ones(64, 128)},
        (),
        r"are numbered \[0, 2\]; 0 is the first",
    ),
    "half a second head": (
        {"model.mtp_layers.1.input_proj.weight": torch.ones(64, 128)},
        (),
        "lacks model.mtp_layers.1",
    ),
}


@pytest.mark.parametrize("way", BAD)
def test_heads_that_do_not_fit_are_refused(mimo, tmp_path, way):
    tensors, drop, says = BAD[way]
    with pytest.raises(ValueError, match=says):
        load(changed(mimo, tmp_path / "target", drop, **tensors))


def test_heads_with_other_lm_heads_are_refused(tmp_path):
    layout, how = KINDS["deepseek's own rows"]
    target = make_target(tmp_path / "target", layout, heads=2, **how)
    other = changed(target, tmp_path / "other", **{"model.layers.5.shared_head.head.weight": torch.ones(128, 64)})
    with pytest.raises(ValueError, match=r"MTP head 2 has model.layers.5.shared_head.head.weight, which is not"):
        load(other)


def test_a_target_without_a_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no MTP heads"):
        load(make(tmp_path / "target", layers=4, max_context=256))


def test_random_weights_are_refused(mimo):
    with pytest.raises(ValueError, match="strategy mtp reads a trained head"):
        load(mimo, load="dummy")


def test_a_draft_checkpoint_is_refused(mimo):
    with pytest.raises(ValueError, match="strategy 'mtp' uses no draft checkpoint"):
        specker.load(str(mimo), str(mimo), strategy="mtp", device="cpu")
