"""config.json as specker reads it itself, against transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specker.checkpoints import parse
from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.plain_config import config_of, frequencies

OWN = [name for name, its in ARCHITECTURES.items() if its.fills is not None]
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000},
    {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
    {"rope_parameters": LLAMA3 | {"rope_theta": 1e6}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.5}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}},
    {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
    {"rope_parameters": BY_TYPE},
    {"rope_parameters": BY_TYPE | {"full_attention": {"type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
]
OTHERS: list[dict[str, Any]] = [
    {"sliding_window": 8},
    {"sliding_window": None, "head_dim": 32, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 8, "use_sliding_window": False, "hidden_act": "gelu", "hidden_activation": "gelu"},
    {"sliding_window": 8, "use_sliding_window": True, "layer_types": KINDS, "no_rope_layers": [1, 0, 1]},
    {"sliding_window": 8, "layer_types": KINDS, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 64},
    {"sliding_window": 8, "layer_types": KINDS[:2]},
    {"sliding_window": -1, "layer_types": KINDS, "rms_norm_eps": 1e-5},
    {"sliding_window": 8, "attention_multiplier": 0.5, "logits_scaling": 2, "embedding_multiplier": 12.0},
    {"sliding_window": 8, "bos_token_id": "x"},
    {"sliding_window": 8, "rms_norm_eps": 1},
    {"sliding_window": 8, "num_key_value_heads": None, "tie_word_embeddings": None},
    {"sliding_window": 8, "num_attention_heads": 3, "head_dim": 16},
    {"sliding_window": 8, "layer_types": KINDS, "use_bidirectional_attention": True},
]


def files(architecture: str) -> Iterator[dict[str, Any]]:
    """Contents of config.json: usual ones, older ones and wrong ones."""
    its = ARCHITECTURES[architecture]
    base: dict[str, Any] = SIZES | {"architectures": [architecture], "model_type": its.model_type}
    base |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if its.experts else {}
    base |= {"mask_token_id": 5} if its.masked == "always" else {}
    for rope in ROPES:
        yield base | rope | {"sliding_window": 8, "layer_types": KINDS, "no_rope_layers": [1, 0, 1]}
    for other in OTHERS:
        yield base | ({"rope_parameters": BY_TYPE} if its.ropes == "by type" else {"rope_theta": 5e4}) | other


@pytest.mark.parametrize("architecture", OWN)
def test_a_config_is_that_of_transformers(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    for raw in files(architecture):
        said: list[Any] = []
        read += config_of(raw, ARCHITECTURES[architecture]) is not None
        for way in (config_of, lambda *_: None):
            monkeypatch.setattr(parse, "config_of", way)
            try:
                config, ropes = parse.parse_config(tmp_path, None, None, json.loads(json.dumps(raw)))
                tables = [
                    x.tolist() if isinstance(x, torch.Tensor) else x for r in ropes for x in (r.inv_freq, r.scale)
                ]
                said.append((config, tables))
            except parse.CheckpointError as error:
                said.append(str(error))
        assert said[0] == said[1], raw
    assert read


@pytest.mark.parametrize("architecture", OWN)
def test_fields_that_a_file_leaves_out_have_the_values_of_transformers(architecture: str) -> None:
    its = ARCHITECTURES[architecture]
    name = its.config or architecture.replace("ForCausalLM", "Config")
    # sizes of its own, from which transformers computes other fields
    usual = getattr(transformers, name)(**its.defaults, hidden_size=96, num_attention_heads=4)
    computed = {"head_dim": (None, 24), "num_key_value_heads": (None, 4)}
    for field, value in (its.fills or {}).items():
        if field == "rope_theta":
            assert its.ropes == "by type" or usual.rope_parameters["rope_theta"] == value
        elif field != its.activation and field == "hidden_act":
            continue  # Gemma's activation has another name
        elif value is None and field in computed:
            assert getattr(usual, field, None) in computed[field]
        else:
            assert repr(getattr(usual, field)) == repr(value), field


@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize("factor", [1.0, 8, 32.5])
def test_frequencies_are_those_of_transformers(kind: str, factor: float) -> None:
    rope = LLAMA3 | {"rope_type": kind, "factor": factor, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=dict(rope))
    want, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert torch.equal(frequencies(kind, rope, 128), want)
