"""Small models of every kind with their drafters, which a GPU's kernels serve."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_assistant import CLUSTERS, TARGETS, make_assistant
from make_checkpoint import GEMMA3, GEMMA4, GPT_OSS, LFM2, QWEN3_5, QWEN3_MOE, edit, make
from make_mxfp4 import make_mxfp4
from pairs import perturbed

LONG_WINDOW = {"sliding_window": 256}  # a GPU's kernels take none below 128
SIZES = {"hidden": 64, "heads": 6, "kv_heads": 6, "head_dim": 32, "ffn": 96, "vocab": 120}
RANDOM: dict[str, dict[str, Any]] = {  # what a random model with a perturbed copy as its draft has
    "mixture": QWEN3_MOE,
    "int4 mixture": QWEN3_MOE,
    "rings": {**GEMMA3, **LONG_WINDOW},
    "gemma 4": {**GEMMA4, **LONG_WINDOW, "global_head_dim": 512},
    "sinks": {**GPT_OSS, **LONG_WINDOW},
    "delta nets": QWEN3_5,
    "convolutions": LFM2,
    "pard": {"arch": "llama"},
}
HEADS = {  # strategy and layout of heads.py
    "eagle": ("eagle", "trained longer"),
    "mtp": ("mtp", "mimo"),
    "mtp heads in turn": ("mtp", "mimo, 3 heads"),
    "dflash": ("dflash", "dflash"),
    "dflash2": ("dflash", "dflash2"),
    "domino": ("dflash", "domino"),
}
MADE = [*HEADS, *RANDOM, "mxfp4", "assistant", "clusters"]
MANY = [[3 * n % 110 + 1 for n in range(length)] for length in (5, 40, 90)]
PAST_WINDOWS = [[*MANY[2]] * 6, MANY[1], [*MANY[2]] * 3]


def small_model(
    name: str, folder: Path, heads: Callable[[str, str], Any]
) -> tuple[list[str], dict[str, Any], list[list[int]]]:
    """The arguments that load a model of MADE with its drafter, and prompts. `heads`: the fixture."""
    options: dict[str, Any] = {"draft_tokens": 3, "policy": "fixed"}
    if name in HEADS:
        strategy, layout = HEADS[name]
        pair = heads(strategy, layout)
        models = [pair.target] if strategy == "mtp" else [pair.target, pair.folder]
        return [*map(str, models)], {"strategy": strategy, **options}, MANY
    target, draft, prompts = folder / "target", folder / "draft", MANY
    if name in ("assistant", "clusters"):
        make(target, max_context=1024, seed=2, **TARGETS["31b"] | LONG_WINDOW)
        make_assistant(draft, target, CLUSTERS if name == "clusters" else None)
        options["strategy"] = "mtp"
    elif name == "mxfp4":
        make_mxfp4(target, max_context=1024, **GPT_OSS | LONG_WINDOW | SIZES)
        make(draft, max_context=1024, layers=1, vocab=SIZES["vocab"])
        prompts = PAST_WINDOWS
    else:
        make(target, max_context=1024, **RANDOM[name])
        perturbed(target, draft)
        prompts = PAST_WINDOWS if "sliding_window" in RANDOM[name] else MANY
    if name == "pard":
        edit(draft, pard_token=126, spd_type="pard")
    if name == "int4 mixture":
        options["quantize"] = "int4"
    return [str(target), str(draft)], options, prompts
