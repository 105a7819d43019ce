"""The names of a layer's tensors: in a checkpoint and in a GGUF file.

A key is a field of `LayerWeights`, followed by the part's name if several tensors, or other ones in other layers, hold
it.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple


class TensorName(NamedTuple):
    name: str  # in a checkpoint, without "layers.#." and ".weight"; # stands for an expert's number
    gguf: str = ""  # in a GGUF file, without "blk.#." and ".weight"; "": not read from one
    whole: bool = False  # neither name has a ".weight" left out

    @property
    def tensor(self) -> str:
        """The whole name in a layer."""
        return self.name if self.whole else f"{self.name}.weight"


Names = Mapping[str, TensorName]

LAYER = {
    "norm_in": TensorName("input_layernorm", "attn_norm"),
    "qkv.q": TensorName("self_attn.q_proj", "attn_q"),
    "qkv.k": TensorName("self_attn.k_proj", "attn_k"),
    "qkv.v": TensorName("self_attn.v_proj", "attn_v"),
    "q_norm": TensorName("self_attn.q_norm", "attn_q_norm"),
    "k_norm": TensorName("self_attn.k_norm", "attn_k_norm"),
    "o": TensorName("self_attn.o_proj", "attn_output"),
    "norm_post": TensorName("post_attention_layernorm", "ffn_norm"),
    "gate_up.gate": TensorName("mlp.gate_proj", "ffn_gate"),
    "gate_up.up": TensorName("mlp.up_proj", "ffn_up"),
    "down": TensorName("mlp.down_proj", "ffn_down"),
}
# Norms of the outputs of attention and of the feed-forward
NORMS_AFTER = {
    "norm_o": TensorName("post_attention_layernorm"),
    "norm_down": TensorName("post_feedforward_layernorm", "post_ffw_norm"),
}
NORMS_BOTH = NORMS_AFTER | {
    "norm_o": TensorName("post_attention_layernorm", "post_attention_norm"),
    "norm_post": TensorName("pre_feedforward_layernorm", "ffn_norm"),
}

FINAL = TensorName("norm", "output_norm")  # the norm after the last layer

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# A tensor for all experts of a layer: the fused layout (pieces.py). GGUF files have gate and up apart.
FUSED_EXPERTS = {
    "router": TensorName("mlp.gate", "ffn_gate_inp"),
    "gate_up.experts_gate": TensorName("mlp.experts.gate_proj", "ffn_gate_exps"),
    "gate_up.experts_up": TensorName("mlp.experts.up_proj", "ffn_up_exps"),
    "gate_up.experts": TensorName(GATE_UP, "ffn_gate_up_exps"),
    "down.experts": TensorName(DOWN, "ffn_down_exps"),
}
# Both layouts of experts: three matrices for each one, or the fused layout
EXPERTS = FUSED_EXPERTS | {
    "gate_up.expert_gate": TensorName("mlp.experts.#.gate_proj"),
    "gate_up.expert_up": TensorName("mlp.experts.#.up_proj"),
    "down.expert": TensorName("mlp.experts.#.down_proj"),
}


BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def gguf_block(names: Names, name: str) -> tuple[int, str] | None:
    """The layer and the name in it of a GGUF file's tensor; None if no layer has it."""
    if (block := BLOCK.fullmatch(name)) is None:
        return None
    found = {own.gguf: own for own in names.values() if own.gguf}
    own, (stem, _, kind) = block[2], block[2].rpartition(".")
    if own in found and found[own].whole:
        return int(block[1]), found[own].name
    if stem in found and not found[stem].whole:
        return int(block[1]), f"{found[stem].name}.{kind}"
    return None
