"""The conformance table: architectures, strategies and ways of running. Of each combination test_conformance.py asserts
the same: the tokens of plain decoding. A new architecture, strategy or way is one more entry here."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from make_checkpoint import (
    FULL,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_MIXED,
    GEMMA4_PLE,
    GEMMA4_SHARED,
    GEMMA4_WIDE,
    GEMMA4_WIDE_PLE,
    GPT_OSS,
    GRANITE,
    LFM2,
    LFM2_MOE,
    LONGROPE,
    MIXTRAL,
    OLMO3,
    PHI4,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    SHORT,
    SLIDING,
)

# Arguments of `make`, with which a random model repeats no token for ever. The compiled CPU layers take heads of 32.
# The windows are shorter than the prompts, and than some drafts.
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "max_context": 256}
GEMMA = {"tied": False, "layer_types": [SLIDING, FULL, FULL, SLIDING]}
WIDER_ROPE = LONGROPE | {name: LONGROPE[name] * 2 for name in ("short_factor", "long_factor")}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama-geglu": {"arch": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "mistral": {"arch": "mistral", "sliding_window": 5},
    "ministral": {"arch": "ministral", "sliding_window": 5, "layer_types": [SLIDING, FULL] * 2},
    "mixtral": MIXTRAL | {"sliding_window": 5, "ffn": 96},
    "qwen2": {"arch": "qwen2", "max_window_layers": 1, "seed": 1, **SHORT},
    "qwen3": {"arch": "qwen3", "seed": 7},
    "qwen3-moe": QWEN3_MOE | {"mlp_only_layers": [2]},
    "qwen3.5": QWEN3_5,
    "qwen3-next": QWEN3_NEXT,
    "lfm2": LFM2 | {"layer_types": ["conv", FULL, "conv", "conv"]},
    "lfm2-moe": LFM2_MOE,
    "gemma2": GEMMA2 | GEMMA | {"seed": 2},
    "gemma3": GEMMA3 | GEMMA,
    "gemma3-window-of-2": GEMMA3 | GEMMA | {"layer_types": [SLIDING] * 3 + [FULL], "sliding_window": 2},
    "gemma4-31b": GEMMA4 | GEMMA4_WIDE | {"tied": False},
    "gemma4-shared": GEMMA4_SHARED | GEMMA4_WIDE | {"tied": False},
    "gemma4-e2b": GEMMA4_PLE | GEMMA4_WIDE_PLE | {"tied": False},
    "gemma4-26b-a4b": GEMMA4_MIXED | GEMMA4_WIDE | {"tied": False},
    "olmo2": {"arch": "olmo2"},
    "olmo3": OLMO3 | {"layer_types": [SLIDING, FULL, SLIDING, SLIDING], "seed": 4},
    "smollm3": {"arch": "smollm3"},
    "granite": GRANITE,
    "phi4-mini": PHI4 | {"hidden": 128, "rope": WIDER_ROPE, "seed": 3},
    "gpt-oss": GPT_OSS | {"layer_types": [SLIDING, FULL, FULL, SLIDING], "seed": 4},
}
ARCHITECTURES = {name: SIZES | options for name, options in ARCHITECTURES.items()}
# Layers that EasySpec drafts with side by side; those of a group are of one kind. It is paired with these alone.
GROUPS = dict.fromkeys(("llama", "qwen3", "olmo2", "mixtral", "mistral", "granite"), "2")
GROUPS |= dict.fromkeys(("gemma2", "gemma3", "gpt-oss", "qwen3-moe"), "[[0],[1,2],[3]]")
GROUPS |= {"qwen2": "[[0],[1,2,3]]", "gemma3-window-of-2": "[[0,1,2],[3]]"}

STRATEGIES: dict[str, dict[str, Any]] = {  # options of `load`
    "ar": {"strategy": "ar"},
    "chain": {"strategy": "draft", "draft_tokens": 4},
    "chain of 1": {"strategy": "draft", "draft_tokens": 1},
    "tree": {"strategy": "draft", "tree": "3x3"},
    "pruned tree": {"strategy": "draft", "tree": "4x3", "draft_tokens": 7},
    "wide tree": {"strategy": "draft", "tree": "8x1"},
    "deep tree": {"strategy": "draft", "tree": "22x3"},
    "auto": {"strategy": "draft", "policy": "auto"},
    "plus-minus-one": {"strategy": "draft", "policy": "plus-minus-one"},
    "draft-and-verify": {"strategy": "draft", "policy": "draft-and-verify"},
    "pard": {"strategy": "draft", "draft_tokens": 4},
    "easyspec": {"strategy": "easyspec", "draft_tokens": 4},
    "easyspec tree": {"strategy": "easyspec", "tree": "2x3"},
    "vocabtrim": {"strategy": "vocabtrim", "vocab_keep": "60", "vocab_text": 8},
    "vocabtrim tree": {"strategy": "vocabtrim", "vocab_keep": "coverage:0.9", "vocab_text": 0, "tree": "3x4"},
    "del": {"strategy": "del"},
    "del-length": {"strategy": "del", "policy": "del-length", "exit_cost": "bytes"},
    "del as published": {"strategy": "del", "as_published": True},
    "one exit": {"strategy": "del", "policy": "fixed", "exit_layer": 3, "draft_tokens": 3},
    "diffuspec": {"strategy": "diffuspec", "adl": "2-5", "cps": "off"},
    "diffuspec tree": {"strategy": "diffuspec", "draft_tokens": 4, "cps": "tree"},
    "eagle": {"strategy": "eagle", "draft_tokens": 3},
    "eagle tree": {"strategy": "eagle", "tree": "3x2"},
    "dflash": {"strategy": "dflash", "policy": "fixed"},
    "lookup": {"strategy": "lookup"},
    "lookup tree": {"strategy": "lookup", "tree": "3x4"},
    "draft+lookup": {"strategy": "draft+lookup", "draft_tokens": 4},
    "tree+lookup": {"strategy": "lookup+draft", "tree": "3x3"},
    "auto+lookup": {"strategy": "draft+lookup"},
    "easyspec+lookup": {"strategy": "easyspec+lookup"},
    "vocabtrim+lookup": {"strategy": "vocabtrim+lookup", "vocab_keep": "0.5", "tree": "3x3"},
    "del+lookup": {"strategy": "del+lookup"},
    "diffuspec+lookup": {"strategy": "diffuspec+lookup", "adl": "2-5", "cps": "off"},
}

# Options of `load`. Those in ARITHMETIC are also of the engine that decodes plainly.
ARITHMETIC = ("dtype", "quantize", "kv_dtype")
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"dtype": "float32"},
    "batch": {"dtype": "float32", "kv_dtype": "float16", "batch_size": 3, "page_size": 16, "prefix_cache": "all"},
    "torch": {"dtype": "float64", "batch_size": 3, "page_size": 16, "prefix_cache": "all"},
    "fixed shapes": {"dtype": "float64", "batch_size": 5, "page_size": 16, "graphs": "on"},
    "int8": {"dtype": "float32", "quantize": "int8", "kv_dtype": "int8", "batch_size": 2, "prefix_cache": "all"},
    "int4": {"dtype": "float32", "quantize": "int4", "kv_dtype": "bfloat16", "graphs": "on"},
}

# In `make test` every architecture and every strategy meets one way of each group, whose ways share their arithmetic.
TURNS = (("alone", "batch"), ("torch", "fixed shapes"), ("int8", "int4"))

# Prompts that repeat themselves, of one token, across a recurrent layer's anchor and over several pages; texts that are
# greedy or sampled, with filters, penalties and biases.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 9, 40, 77, 3, 8] * 3 + [5, 9, 40], {"max_new_tokens": 14}),
    ([7], {"max_new_tokens": 8, "temperature": 0.7, "seed": 3}),
    ([(7 * n * n + 3 * n) % 120 for n in range(62)], {"max_new_tokens": 9}),
    ([3, 4] * 20, {"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.8, "top_k": 20, "frequency_penalty": 1.5}),
    ([*range(3, 90)], {"max_new_tokens": 6, "repetition_penalty": 1.4, "presence_penalty": 2.0}),
    ([21, 60], {"max_new_tokens": 9, "temperature": 0.8, "min_p": 0.05, "logit_bias": {9: 1.5}, "seed": 2**63}),
]


def fits(architecture: str, strategy: str) -> bool:
    """Whether the strategy is paired with targets of this architecture."""
    if "easyspec" in strategy:
        return architecture in GROUPS
    return architecture != "granite" or not strategy.startswith(("eagle", "dflash"))  # refused by name


def quick() -> Iterator[tuple[str, str, str]]:
    """The cases of `make test`: in the ways of each group, in turn, every architecture decodes, and every strategy,
    with the architecture that it met least often."""
    met: Counter[tuple[str, str]] = Counter()
    for ways in TURNS:
        waiting = [*STRATEGIES]
        for n in range(max(len(ARCHITECTURES), len(STRATEGIES))):
            architecture = [*ARCHITECTURES][n % len(ARCHITECTURES)]
            own = [strategy for strategy in waiting if fits(architecture, strategy)] or [
                strategy for strategy in STRATEGIES if fits(architecture, strategy)
            ]
            strategy = min(own, key=lambda strategy: met[architecture, strategy])
            met[architecture, strategy] += 1
            if strategy in waiting:
                waiting.remove(strategy)
            yield architecture, strategy, ways[n % 2]
        for strategy in waiting:
            architecture = min((a for a in ARCHITECTURES if fits(a, strategy)), key=lambda a: met[a, strategy])
            met[architecture, strategy] += 1
            yield architecture, strategy, ways[0]
