"""A decoder's settings, and the error that says why a checkpoint cannot be one."""

from dataclasses import dataclass


class CheckpointError(ValueError):
    """The checkpoint cannot be used. The message is one sentence: what is wrong and what to do."""


@dataclass(frozen=True)
class LayerSpec:
    """What a layer computes, besides its sizes. The decoder implements all of it; whatever else runs layers (the CPU's
    compiled ones) says which value it lacks."""

    activation: str = "silu"  # of the feed-forward's gate: silu (SwiGLU), gelu or gelu_tanh (GeGLU, arXiv 2002.05202)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head's q and k before RoPE


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's settings; none depends on the run's dtype or device."""

    architecture: str  # a key of ARCHITECTURES (checkpoints/config.py)
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    layer: LayerSpec
    tied: bool  # the LM head is the embedding
    causal: bool  # False: a diffusion drafter, in which all rows see each other
    shifted_logits: bool  # row i - 1 predicts position i (causal models and Dream); False: row i does
    mask_token_id: int | None
    max_context: int  # positions
    eos_ids: tuple[int, ...]  # sorted, from config.json, generation_config.json and the tokenizer; may be empty
    bos_id: int | None
    shares: tuple[str, ...] = ()  # of embed_tokens and lm_head: the target's tensors that this draft uses


def layer_elements(config: ModelConfig) -> int:
    """Elements of all layers' linear weights, which every step reads in addition to the head."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
