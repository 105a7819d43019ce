"""The tensors of draft heads, in addition to those of their layers.

Sizes in shapes: H the head's width, W that of the target's rows, V ids, D rows of the head's own LM head, A depths of
the target that it reads, L its layers, `inputs` columns of fc. The readers (drafts/) say which parts a head has.
"""

from typing import NamedTuple


class HeadTensor(NamedTuple):
    field: str  # of Weights, or of the head's own tensors
    name: str  # in a checkpoint; # stands for the number of one of several, which are stored one below the other
    shape: str  # see `shape_of`
    part: str = ""  # a head without this part lacks the tensor
    gguf: str = ""  # name in a GGUF file; "": not read from one
    copies: str = ""  # the size that says how many there are, if there are several


HeadTable = tuple[HeadTensor, ...]

EAGLE = (
    HeadTensor("embed", "embed_tokens.weight", "V, H", "embed_tokens", "token_embd.weight"),
    HeadTensor("fc", "fc.weight", "H, inputs", "", "fc.weight"),
    HeadTensor("fc_bias", "fc.bias", "H", "bias"),
    HeadTensor("input_norm", "input_norm.weight", "inputs", "input_norm", "enc.output_norm.weight"),
    HeadTensor("fc_norm", "fc_norm.#.weight", "W", "fc_norm", copies="A"),
    HeadTensor("hidden_norm", "layers.0.hidden_norm.weight", "H", "eagle3", "blk.0.attn_norm_2.weight"),
    HeadTensor("norm", "norm.weight", "H", "eagle3", "output_norm.weight"),
    HeadTensor("head", "lm_head.weight", "D, H", "lm_head", "output.weight"),
)
# Drafters of blocks. Sizes: fields of config.json; r the Markov head's rank, `kernels` weights of a row's convolution,
# `read` columns of the confidence head
BLOCKS: HeadTable = (
    HeadTensor("fc", "fc.weight", "H, inputs", "", "fc.weight"),
    HeadTensor("hidden_norm", "hidden_norm.weight", "H", "", "enc.output_norm.weight"),
    HeadTensor("head", "lm_head.weight", "D, H", "lm_head", "output.weight"),
    HeadTensor("entering", "prefix_gru.weight_ih_l0", "3 gru_hidden_dim, H", "gru"),
    HeadTensor("recurrent", "prefix_gru.weight_hh_l0", "3 gru_hidden_dim, gru_hidden_dim", "gru"),
    HeadTensor("joint", "embed_proj.0.weight", "r, H + gru_hidden_dim", "gru"),
    HeadTensor("w2", "embed_proj.2.weight", "D, r", "gru"),
    HeadTensor("w1", "markov_head.markov_w1.weight", "V, r", "markov", "markov_w1.weight"),
    HeadTensor("w2", "markov_head.markov_w2.weight", "D, r", "markov", "markov_w2.weight"),
    HeadTensor("joint", "markov_head.gate_proj.weight", "r, H + r", "gated"),
    HeadTensor("joint_bias", "markov_head.gate_proj.bias", "r", "gated"),
    HeadTensor("joint", "markov_head.joint_proj.weight", "3 r, 2 r + H", "rnn"),
    HeadTensor("joint_bias", "markov_head.joint_proj.bias", "3 r", "rnn"),
    HeadTensor(
        "attention_base",
        "layers.#.attention_conv.base_kernel",
        "2, conv_kernel_size, H",
        "conv",
        "blk.#.attn_conv_base",
        copies="L",
    ),
    HeadTensor(
        "attention",
        "layers.#.attention_conv.kernel_projection.weight",
        "2 kernels, H",
        "conv",
        "blk.#.attn_conv_proj.weight",
        copies="L",
    ),
    HeadTensor(
        "mlp_base",
        "layers.#.mlp_conv.base_kernel",
        "2, conv_kernel_size, H",
        "conv",
        "blk.#.ffn_conv_base",
        copies="L",
    ),
    HeadTensor(
        "mlp",
        "layers.#.mlp_conv.kernel_projection.weight",
        "2 kernels, H",
        "conv",
        "blk.#.ffn_conv_proj.weight",
        copies="L",
    ),
    HeadTensor(
        "before",
        "candidate_selector.predecessor_codebook",
        "V, selector_rank",
        "selector",
        "selector_predecessor.weight",
    ),
    HeadTensor(
        "after", "candidate_selector.successor_codebook", "V, selector_rank", "selector", "selector_successor.weight"
    ),
    HeadTensor(
        "project",
        "candidate_selector.hidden_projection.weight",
        "selector_rank, H",
        "selector",
        "selector_hidden.weight",
    ),
    HeadTensor("confidence", "confidence_head.proj.weight", "1, read", "confidence", "conf_proj.weight"),
    HeadTensor("confidence_bias", "confidence_head.proj.bias", "1", "confidence", "conf_proj.bias"),
    HeadTensor("readouts", "injection.readouts.#.weight", "transfer_rank, H", "injection", copies="L"),
    HeadTensor("writes", "injection.writes.#.weight", "H, message_size", "injection", copies="L"),
    HeadTensor("message", "injection.message.weight", "message_size, transfer_rank", "injection"),
    HeadTensor("receiver", "injection.receiver_gate.weight", "message_size, transfer_rank", "injection"),
    HeadTensor("predecessor", "injection.predecessor_gate.weight", "message_size, transfer_rank", "injection"),
    HeadTensor("bias", "injection.bias", "message_size", "injection"),
    HeadTensor("codes", "transfer_codes", "V, transfer_rank", "injection"),
)


def _affine(name: str, rows: str, columns: str) -> dict[str, str]:
    return {f"{name}.weight": f"{rows}, {columns}", f"{name}.bias": rows}


# Of LiLiCorr's head: h its width, B rows of a block, K candidates, `inner` the width of its feed-forward
_LILICORR = {
    **_affine("token_proj", "h", "H"),
    **_affine("pass_hidden_proj", "h", "H"),
    "feature_mlp.0.weight": "5",
    "feature_mlp.0.bias": "5",
    **_affine("feature_mlp.1", "h", "5"),
    **_affine("feature_mlp.3", "h", "h"),
    "slot_embedding": "1, 1, slots, 1, h",  # B - 1 slots
    "rank_embedding": "1, 1, 1, K, h",
    "relative_slot_bias": "heads, distances",  # 2 B - 1 distances
    "same_slot_bias": "heads",
    **_affine("context_proj", "h", "H"),
    "layers.#.attn_norm.weight": "h",
    "layers.#.attn.in_proj_weight": "3 h, h",
    "layers.#.attn.in_proj_bias": "3 h",
    **_affine("layers.#.attn.out_proj", "h", "h"),
    "layers.#.mlp_norm.weight": "h",
    **_affine("layers.#.mlp.0", "inner", "h"),
    **_affine("layers.#.mlp.2", "h", "inner"),
    "output_norm.weight": "h",
    "anchor_norm.weight": "h",
    **_affine("factor_input_proj", "h", "3 h"),
    **_affine("out_head", "f", "h"),
    **_affine("in_head", "f", "h"),
    **_affine("anchor_out_head", "f", "h"),
}
BLOCKS += tuple(
    HeadTensor(name, f"lilicorr.{name}", shape, part, copies="corrector_layers" if "#" in name else "")
    for name, shape in _LILICORR.items()
    for part in ("token_proj" if name.startswith("token_proj") else "lilicorr",)
)
# Assistants: C clusters of ids. `rows`: the LM head in the order of ids, before it is ordered by cluster
ASSISTANT = (
    HeadTensor("pre", "pre_projection.weight", "H, 2 W", "", "nextn.pre_projection.weight"),
    HeadTensor("post", "post_projection.weight", "W, H", "", "nextn.post_projection.weight"),
    HeadTensor("head", "lm_head.weight", "V, H", "head"),
    HeadTensor("rows", "lm_head.weight", "V, H", "clusters"),
    HeadTensor("centroids", "masked_embedding.centroids.weight", "C, H", "clusters"),
)
# MTP heads, after the start of all of a head's names
MIMO = (
    HeadTensor("fc", "input_proj.weight", "H, 2 H"),
    HeadTensor("embed_norm", "token_layernorm.weight", "H"),
    HeadTensor("hidden_norm", "hidden_layernorm.weight", "H"),
    HeadTensor("norm", "final_layernorm.weight", "H"),
)
QWEN = (
    HeadTensor("fc", "fc.weight", "H, 2 H", gguf="nextn.eh_proj.weight"),
    HeadTensor("embed_norm", "pre_fc_norm_embedding.weight", "H", gguf="nextn.enorm.weight"),
    HeadTensor("hidden_norm", "pre_fc_norm_hidden.weight", "H", gguf="nextn.hnorm.weight"),
    HeadTensor("norm", "norm.weight", "H", gguf="nextn.shared_head_norm.weight"),
)
DEEPSEEK = (
    HeadTensor("fc", "eh_proj.weight", "H, 2 H"),
    HeadTensor("embed_norm", "enorm.weight", "H"),
    HeadTensor("hidden_norm", "hnorm.weight", "H"),
    HeadTensor("norm", "shared_head.norm.weight", "H"),
    HeadTensor("embed", "embed_tokens.weight", "V, H", "embed"),
    HeadTensor("head", "shared_head.head.weight", "V, H", "head"),
)
