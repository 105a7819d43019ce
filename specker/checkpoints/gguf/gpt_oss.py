"""gpt-oss in a GGUF file.

What llama.cpp's converter changes: the rows of gate and up, which take turns in a checkpoint, are a tensor each, and so
are their biases; matrices that are not quantised are no longer transposed; numbers in MXFP4 stand in other bytes. The
converted checkpoint keeps gate and up apart, so that a CPU multiplies by the memory-mapped file itself, and config.json
says so (`Experts.turns`).

Sources: llama.cpp's conversion/gpt_oss.py and src/models/openai-moe-iswa.cpp.
"""

from typing import Any

from specker.checkpoints.architectures import FULL, SLIDING
from specker.checkpoints.gguf.experts import NAMES as EXPERTS
from specker.checkpoints.gguf.families import NAMES as LAYER
from specker.checkpoints.gguf.keys import Keys

# Names in GGUF -> in the checkpoint, of a layer's tensors.
NAMES = {name: own for name, own in (LAYER | EXPERTS).items() if name != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
WHOLE = {"attn_sinks.weight": "self_attn.sinks"}  # without `.weight` in the checkpoint
SOFTMAX_OF_CHOSEN = 3  # of llama_expert_gating_func_type


def fields(keys: Keys) -> dict[str, Any]:
    """Fields of config.json. llama.cpp has the first layer's window in every second layer, and scores that are the
    softmax of the chosen experts' logits.

    A file does not say that the range of frequencies that YaRN scales is not rounded to whole ones, which is so in all
    checkpoints of the architecture (`truncate`); llama.cpp rounds it."""
    keys.no("expert_gating_func", 0, SOFTMAX_OF_CHOSEN)
    width = keys["attention.key_length"]
    for name in ("attention.value_length", "rope.dimension_count"):
        keys.no(name, width)
    rope = {"rope_type": "default", "rope_theta": keys["rope.freq_base"]}
    if keys.get("rope.scaling.type", "none") == "yarn":
        context = keys["rope.scaling.original_context_length"]
        rope |= {"rope_type": "yarn", "factor": keys["rope.scaling.factor"], "truncate": False}
        rope |= {"original_max_position_embeddings": context}
        for name, own in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            rope[name] = keys.get(f"rope.scaling.yarn_{name}", own)
    return {
        "num_hidden_layers": keys["block_count"],
        "layer_types": [FULL if n % 2 else SLIDING for n in range(keys["block_count"])],
        "sliding_window": keys["attention.sliding_window"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "head_dim": width,
        "intermediate_size": keys["expert_feed_forward_length"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": rope,
        "num_local_experts": keys["expert_count"],
        "num_experts_per_tok": keys["expert_used_count"],
    }
