"""Draft heads of every strategy and layout on tiny random targets, and what their drafts have to be."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import head_parts
import make_dflash
import make_head
import make_mtp
import pytest
from make_checkpoint import make
from safetensors.torch import load_file
from torch import Tensor

import specker
from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.model.prefill import prefill

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
OFTEN = [35, 74, 119]  # ids that the target writes often, so that a random head with these rows is often right
FULL, SLIDING = "full_attention", "sliding_attention"
NESTED, ZLAB = {"layout": "nested", "ids": OFTEN}, {"layout": "zlab"}
QWEN_WINDOW = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}
DEEPSPEC = {"layout": "deepspec", "qk_norm": True, "own_embedding": True, "target_layer_ids": [0, 2, 3, 4, 6]}
EAGLE = {
    "flat": {"layout": "flat", "ids": OFTEN},
    "nested": NESTED,
    "every id": {"layout": "flat"},
    "residual": {**NESTED, "norm_before_residual": False},
    "norm before fc": {**NESTED, "norm_before_fc": True, "norm_before_residual": True},
    "3.1": {**NESTED, "fc_norm": True, "norm_output": True},
    "flat norm_output": {"layout": "flat", "norm_output": True, "ids": OFTEN},
    "qwen3": {**NESTED, "qk_norm": True},
    "biases": {"layout": "flat", "bias": True, "ids": OFTEN},
    "three layers": {**NESTED, "layers": 3},
    "midlayer and one": {"layout": "flat", "layers": 2, "ids": OFTEN},
    "own embedding": {"layout": "flat", "own_embedding": True, "ids": OFTEN},
    "another width": {"layout": "flat", "own_embedding": True, "width": 24, "heads": (3, 1, 8), "ids": OFTEN},
    "the target's head": {"layout": "flat", "own_head": False},
    "taps": {**NESTED, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
    "inner taps": {"layout": "flat", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "ids": OFTEN},
    "window": {**NESTED, "layer": {"sliding_window": 6, "layer_types": [SLIDING]}},
    "qwen3 window": {**NESTED, "qk_norm": True, "layer": QWEN_WINDOW},
    "one of two layers": {
        "layout": "flat",
        "layers": 2,
        "layer": {"sliding_window": 9, "layer_types": [FULL, SLIDING, SLIDING]},
        "ids": OFTEN,
    },
    "llama has no window without layer_types": {**NESTED, "layer": QWEN_WINDOW},
    "trained longer": {**NESTED, "layer": {"max_position_embeddings": 256}},
    "trained short": {"layout": "flat", "layer": {"max_position_embeddings": 16}, "ids": OFTEN},
    "deepspec": {**DEEPSPEC, "num_target_layers": 8, "ttt_length": 7, "draft_num_hidden_layers": 1},
    "GELU": {**NESTED, "layer": {"hidden_act": "gelu_pytorch_tanh"}},
    "eagle1": {"layout": "eagle1"},
    "eagle1, no bias": {"layout": "eagle1", "fc_bias": False, "layers": 2},
}
PEAGLE = {"layout": "peagle", "ids": OFTEN, "mask_token_id": 90, "own_embedding": True}
EAGLE |= {
    "parallel": PEAGLE,
    "parallel, the target's embedding": {**PEAGLE, "own_embedding": False},
    "parallel, norms before": {**PEAGLE, "norm_before_fc": True, "norm_before_residual": True},
    "parallel, norms of each tap": {**PEAGLE, "fc_norm": True, "qk_norm": True},
    "parallel, windows": {**PEAGLE, "layers": 2, "layer": {"sliding_window": 8, "layer_types": [SLIDING, SLIDING]}},
}
WINDOWS = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 12, "use_sliding_window": True}
BLOCK, SPARK = {"layout": "dflash", "ids": OFTEN}, {"layout": "dspark", "ids": OFTEN, "markov": 6}
ZLAB2, DOMINO = {"layout": "zlab2"}, {"layout": "domino", "gru": {"shift_label": True}}
DSPINE, LILICORR = {"layout": "dspine"}, {"layout": "lilicorr"}
BOTH = {"confidence": "rows and markov"}
DFLASH = {
    "z-lab": ZLAB,
    "z-lab, one layer": {**ZLAB, "layers": 1},
    "z-lab, block in dflash_config": {
        **ZLAB,
        "size": 9,
        "layer_ids": [1, 5],
        "outer": {"block_size": None, "dflash_config": {"block_size": 9, "mask_token_id": 90}},
    },
    "z-lab, causal": {
        **ZLAB,
        "outer": {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 6], "causal": True}},
    },
    "jetspec": {
        **ZLAB,
        "outer": {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 6], "causal_head": True}},
    },
    "z-lab, mask file": {**ZLAB, "mask_file": "tensor"},
    "z-lab, mask table": {**ZLAB, "mask_file": "table"},
    "z-lab, biases": {**ZLAB, "bias": True},
    "z-lab, windows": {**ZLAB, "layers": 3, "layer": WINDOWS},
    "z-lab, soft cap": {**ZLAB, "outer": {"final_logit_softcapping": 1.5}},
    "dflash2": ZLAB2,
    "dflash2, wide": {
        **ZLAB2,
        "layers": 3,
        "layer": WINDOWS,
        "size": 8,
        "second": {"conv_kernel_size": 3, "conv_group_size": 4, "selector_top_k": 16},
        "outer": {"is_causal": False},
    },
    "dflash2, factors": {
        **ZLAB2,
        "second": {"input_embedding_scale": 1.5, "output_multiplier": 0.6, "final_logit_softcapping": 2.0},
    },
    "dflash2, speculators": {
        "layout": "dflash2",
        "layers": 3,
        "layer": WINDOWS,
        "outer": {"draft_ffn_type": "dense", "num_experts": 256},
    },
    "domino": DOMINO,
    "domino, own position": {**DOMINO, "gru": {"shift_label": False, "pure_draft_prefix_len": 2}},
    "domino, of SGLang": {
        **DOMINO,
        "outer": {"architectures": ["DFlashDraftModel"]},
        "gru": {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 0},
    },
    "dspine": DSPINE,
    "lilicorr": LILICORR,
    "lilicorr, convolutions": {
        **LILICORR,
        "size": 8,
        "layers": 3,
        "layer": WINDOWS,
        "second": {"conv_kernel_size": 3, "conv_group_size": 8, "lilicorr_hidden_size": 0, "lilicorr_num_heads": 4},
    },
    "dspine, windows": {**DSPINE, "layers": 3, "size": 7, "layer": WINDOWS},
    "dflash": BLOCK,
    "dflash, every id": {"layout": "dflash"},
    "another width": {**BLOCK, "width": 24, "heads": (3, 1, 8)},
    "dflash, the target's head": {"layout": "dflash", "own": ("embed_tokens",)},
    "dflash, the target's embedding": {**BLOCK, "own": ("lm_head",), "layer": {"hidden_act": "gelu_pytorch_tanh"}},
    "dflash from its anchor": {**BLOCK, "outer": {"sample_from_anchor": True}},
    "dflash, windows": {**BLOCK, "layers": 3, "layer": WINDOWS, "outer": {"sliding_window_non_causal": True}},
    "dspark": {**SPARK, **BOTH},
    "dspark, bonus anchor": {**SPARK, "confidence": "rows", "outer": {"sample_from_anchor": False}},
    "deepspec": {"layout": "deepspec", "markov": 6, **BOTH},
    "deepspec, gated": {"layout": "deepspec", "markov": 6, "markov_kind": "gated", **BOTH},
    "deepspec, recurrent": {
        "layout": "deepspec",
        "markov": 6,
        "markov_kind": "rnn",
        "layer": {"layer_types": [SLIDING, FULL], "sliding_window": 12},
    },
    "dspark, recurrent": {**SPARK, "markov_kind": "rnn"},
    "deepspec without heads": {"layout": "deepspec", "layer_ids": [-1, 3, 5]},
    "deepspec, confidence alone": {"layout": "deepspec", "confidence": "rows"},
}
MTP = {
    "mimo": {"layout": "mimo", "arch": "mimo"},
    "mimo, tied": {"layout": "mimo", "arch": "mimo", "tied": True},
    "qwen3-next": {"layout": "qwen3-next", "arch": "qwen3"},
    "deepseek": {"layout": "deepseek", "arch": "llama"},
    "deepseek's own rows": {"layout": "deepseek", "arch": "llama", "own": True},
    "deepseek of a base model": {"layout": "deepseek", "arch": "qwen3", "prefix": False, "tied": True},
}
MTP |= {f"{name}, 3 heads": {**MTP[name], "heads": 3} for name in ("mimo", "deepseek")}
MTP |= {"qwen3-next, 2 heads": {**MTP["qwen3-next"], "heads": 2}}
TABLES = {"eagle": EAGLE, "dflash": DFLASH, "mtp": MTP}


@dataclass(frozen=True)
class HeadPair:
    """A head by strategy and layout. `folder`: its checkpoint, None if the target's holds it."""

    strategy: str
    target: Path
    folder: Path | None

    def load(self, more: str = "", **options: Any) -> Any:
        """An engine in float64. `more`: the rest of the strategy, such as "+lookup". Drafts have a fixed length."""
        three = {"draft_tokens": 3} if self.strategy != "dflash" and not {"draft_tokens", "tree"} & {*options} else {}
        how = {"policy": "fixed", "device": "cpu", "dtype": "float64", **three, **options}
        models = [str(path) for path in (self.target, self.folder) if path is not None]
        return specker.load(*models, strategy=self.strategy + more, **how)

    def formula(self, engine: Any) -> Any:
        own = engine.model
        if self.folder is None:
            return make_mtp.Formula(self.target)
        if self.strategy == "dflash":
            return make_dflash.Formula(self.folder, own.embed, own.head, own.embed_scale)
        return make_head.Formula(self.folder, own.embed, own.head, own.norm, own.config.rms_norm_eps)


def made(folder: Path, strategy: str, target: Path | None = None, **how: Any) -> HeadPair:
    """A head in `folder`. `how`: arguments of its maker; `target`: of a head with a checkpoint of its own."""
    if strategy == "mtp":
        return HeadPair(strategy, make_mtp.make_mtp(folder, **how), None)
    target = target or plain_target(folder.parent)
    maker = make_dflash.make_dflash if strategy == "dflash" else make_head.make_head
    return HeadPair(strategy, target, maker(folder, json.loads((target / "config.json").read_text()), **how))


def changed(
    head: HeadPair,
    folder: Path,
    tensors: dict | None = None,
    drop: tuple = (),
    layer: dict | None = None,
    **config: Any,
) -> HeadPair:
    """A copy of a head with other tensors and fields of config.json; `layer`: fields of its layers."""
    assert head.folder is not None
    x = {name: t for name, t in load_file(head.folder / "model.safetensors").items() if name not in drop}
    raw = json.loads((head.folder / "config.json").read_text()) | config
    if layer:
        raw["transformer_layer_config"] |= layer
    head_parts.save(folder, x | (tensors or {}), raw)
    return replace(head, folder=folder)


@cache
def plain_target(folder: Path) -> Path:
    return make(folder / "target", layers=8, max_context=256, seed=2)


def traced(engine: Any, prompts: list, count: int | list[int], **sampling: Any) -> tuple[Any, list[dict]]:
    """What `generate` returns, and the trace's rows. Drafts come from the engine's draft model or head, or from the
    text."""
    rows: list[dict] = []
    engine.trace = rows.append
    out = engine.generate(prompts, count, **sampling)
    engine.trace = None
    own = "model" if engine.strategy.startswith("draft") else "head"
    assert {row["source"] for row in rows if row["draft"]} <= {own, "text", "past"}
    return out, rows


def hidden(model: Model, text: list[int], depths: tuple[int, ...]) -> list[Tensor]:
    """The target's rows [T, E] of all tokens of a text but the last, at each depth."""
    cache = KVCache(model.config, model.config.max_context, dtype=model.dtype, device="cpu")
    rows = prefill(model, cache, text[:-1], depths, len(text), chunk=len(text))
    return [rows[depth] for depth in depths]


def assert_drafts(engine: Any, formula: Any, rows: list[dict], text: list[int]) -> int:
    """A trace's drafts for one text, and their probabilities where it has them, are those of the formula after the same
    beginnings of the text. Returns how many were as long as the policy asks for."""
    largest, tree, full = engine.plan.largest, engine.options.tree, 0
    taps = hidden(engine.model, text, engine.drafter.aux_layers)
    for row in rows:
        at, size = row["position"], len(row["draft"])
        known = [depth[: at - 1] for depth in taps], text[:at]
        full += size == largest.nodes
        if tree and size == largest.nodes and len(text) - at > largest.depth:  # the end of a text cuts a tree
            want = formula.tree(*known, engine.options.width, largest.depth, largest.nodes)
            assert (row["draft"], row["parents"]) == want
        elif size and not tree:
            tokens, certain = formula.draft(*known, size)
            assert row["draft"] == tokens
            assert row.get("probability", certain) == pytest.approx(certain, rel=1e-5)
    return full
