"""Phi-3 and Phi-4-mini."""

from specker.checkpoints.architectures.architecture import SLIDING, Architecture
from specker.checkpoints.architectures.names import LAYER, TensorName

JOINED = {"qkv": TensorName("self_attn.qkv_proj"), "gate_up": TensorName("mlp.gate_up_proj")}
FAMILY = {"Phi3ForCausalLM": Architecture("phi3", LAYER | JOINED, kinds=SLIDING, partial=True)}
