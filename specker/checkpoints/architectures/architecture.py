"""`Architecture`: what an architecture's name says about a checkpoint's layers.

`parse.py` joins it with the fields of config.json to a `ModelConfig`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specker.checkpoints.architectures.gguf import Gguf
from specker.checkpoints.architectures.names import FINAL, LAYER, Names, TensorName
from specker.model.config import KV, CheckpointError, LayerSpec, Mixer, ModelConfig

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Architecture:
    """What the name of an architecture says; config.json says the rest. The weights of a base model (LlamaModel) are
    the same, under names without "model."."""

    model_type: str
    names: Names = field(default_factory=lambda: LAYER)
    final: TensorName = FINAL
    gguf: Gguf | None = None  # None: not supported in a GGUF file
    layer: LayerSpec = field(default_factory=LayerSpec)  # what of it config.json does not say
    biases: str = ""
    """Which linears have biases: "qkv" always, those of "attention" if the field attention_bias says so, or "all",
    those of the feed-forward by mlp_bias. "": none."""
    kinds: str = "layer_types"  # where each layer's kind of attention stands; or FULL or SLIDING for all layers
    ropes: str = ""  # "by type": a RoPE for each kind of layer; "some": for the layers that no_rope_layers names
    partial: bool = False  # RoPE may rotate only a head's first dimensions
    norm_offset: float = 0.0  # ModelConfig.norm_offset
    activation: str = "hidden_act"  # the field that names the activation; "": `layer` does
    eps: str = "rms_norm_eps"  # the field with the norms' epsilon
    recurrent: tuple[str, Callable[[Any], Mixer]] | None = None  # layers of this type, and what they compute
    kvs: Callable[[Any], tuple[KV, ...]] = lambda hf: ()  # LayerSpec.kvs, from transformers' config
    finish: Callable[[Any, ModelConfig], ModelConfig] = lambda hf, config: config
    """The config with what else transformers' config `hf` says in this family. Raises CheckpointError for what the
    decoder does not compute."""
    experts: tuple[str, ...] = ()
    """The fields with the number of experts, how many each row chooses, an expert's intermediate size, and perhaps that
    of an expert that every row reads. Empty: every layer has one feed-forward."""
    mixes: str = ""  # the field that says whether there are experts; "": there are
    normalises: str = ""  # the field that says whether chosen experts' scores are divided by their sum; "": they are
    mixture: Callable[[Any], dict[str, Any]] = lambda hf: {}
    """Further fields of Experts, from transformers' config: the router's rule, if it is not a softmax over the experts,
    and the dense layers, if other fields than those of Qwen3-MoE name them."""
    masked: str = ""  # "always": a diffusion drafter; "may be": if the user says so
    config: str = ""  # the name of a class of transformers with the same fields; "": the architecture's own
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that this class sets otherwise
    text: str = ""  # the model type that the text model's config has, if it may be part of a multimodal checkpoint
    fills: Mapping[str, Any] | None = None
    """The fields that config.json may leave out, with the values that transformers' class gives them
    (`plain_config.py`). None: transformers reads config.json."""


# Fields that config.json may leave out in most families (Architecture.fills)
BASE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "rope_theta": 10000.0,
}


def check_kernel(name: str, size: int) -> None:
    """Raise CheckpointError unless a short convolution of this many columns is supported."""
    if not 2 <= size <= 8:
        raise CheckpointError(f"{name} {size} is not supported; it must be between 2 and 8")
