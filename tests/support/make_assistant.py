"""Random assistants that read a target's K/V, by transformers' own model, and its candidate generator as the oracle."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_head
import torch
import transformers
from make_checkpoint import FULL, GEMMA4, GEMMA4_PLE, SLIDING, make, oracle, randomize
from torch import Tensor
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import specker

# The layers of two targets, with windows that texts pass: as in 31B, where full layers have K for V, and as in E2B,
# with per-layer embeddings and layers that read earlier K/V.
TARGETS: dict[str, dict[str, Any]] = {
    "31b": {**GEMMA4, "layers": 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]},
    "e2b": GEMMA4_PLE,
}
OFTEN = {"31b": [125, 88, 95], "e2b": [112, 92, 102]}  # ids that these targets write often
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}

_MODES = getattr(transformers.Gemma4TextConfig, "kv_sharing_modes", None)


def _modes(self: Any) -> list[str | None]:
    """transformers 5.23 refuses a config of which all layers read other K/V, as an assistant's do."""
    every = self.num_hidden_layers
    return ["reuse"] * every if self.num_kv_shared_layers == every else _MODES.fget(self)


if _MODES is not None:
    transformers.Gemma4TextConfig.kv_sharing_modes = property(_modes)


def make_target(folder: Path, kind: str) -> Path:
    return make(folder, max_context=512, seed=2, **TARGETS[kind])


def make_assistant(
    folder: Path, target: Path, clusters: dict[str, Any] | None = None, often: list[int] | None = None
) -> Path:
    """An assistant of four layers for `target`, half as wide. `often`: ids that it drafts more than others."""
    raw = json.loads((target / "config.json").read_text())
    names = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim")
    names += ("num_global_key_value_heads", "attention_k_eq_v", "sliding_window", "rope_parameters")
    text = {name: raw[name] for name in names if name in raw} | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    if "per_layer_config" in raw:  # newer files name each layer's heads
        full = raw["layer_types"].index(FULL)
        text["per_layer_config"] = {3: raw["per_layer_config"][str(full)]}
    more = {"backbone_hidden_size": raw["hidden_size"], **(clusters or {})}
    config = transformers.Gemma4AssistantConfig(text_config=transformers.Gemma4TextConfig(**text), **more)
    model = transformers.Gemma4AssistantForCausalLM(config)
    randomize(model, seed=1)
    if model.masked_embedding is not None:
        generator = torch.Generator().manual_seed(1)
        model.masked_embedding.token_ordering.copy_(torch.randperm(raw["vocab_size"], generator=generator))
    if often:
        rows = model.lm_head.weight.data
        rows[torch.isin(torch.arange(len(rows)), torch.tensor(often), invert=True)] *= 0.1
        if (clustered := model.masked_embedding) is not None:  # clusters with these ids are chosen more often, too
            each = rows[clustered.token_ordering].unflatten(0, (clustered.num_centroids, -1))
            clustered.centroids.weight.data.copy_(each.sum(1))
    model.save_pretrained(folder)
    return folder


class Oracle(make_head.Formula):
    """transformers' drafts after a text, with the target's K/V of the text's columns alone. It runs the target itself,
    so `taps` do not matter."""

    def __init__(self, target: Path, assistant: Path):
        self.target = oracle(target, torch.float64)
        for kind in (FULL, SLIDING):  # transformers keeps K/V for assistants only if later layers of the target read it
            own = [layer for layer in self.target.model.layers if not layer.self_attn.is_kv_shared_layer]
            last = [layer.self_attn for layer in own if layer.self_attn.layer_type == kind][-1]
            last.store_full_length_kv = True
        self.assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(assistant, dtype=torch.float64).eval()
        self.outputs_of: dict[tuple[int, ...], Any] = {}

    def ids(self) -> Tensor:
        return torch.arange(self.target.config.vocab_size)

    @torch.no_grad()
    def of(self, text: list[int]) -> Any:
        """The target's outputs for a text without its root."""
        key = tuple(text[:-1])
        if key not in self.outputs_of:
            how = {"output_hidden_states": True, "return_shared_kv_states": True}
            self.outputs_of[key] = self.target(torch.tensor([text[:-1]]), **how)
        return self.outputs_of[key]

    def draft(self, taps: Any, text: list[int], count: int) -> tuple[list[int], list[float]]:
        """A greedy chain by transformers' generator, and the tokens' probabilities."""
        self.assistant.generation_config.num_assistant_tokens = count
        limits = SimpleNamespace(max_length=len(text) + count + 1)
        embed = self.target.get_input_embeddings()
        generator = SinglePositionMultiTokenCandidateGenerator(self.assistant, embed, limits)
        ids, logits = generator.get_candidates(torch.tensor([text]), {}, self.of(text), False, 0)
        return ids[0, len(text) :].tolist(), [float(self.seen(z).softmax(-1).max()) for z in logits[0]]

    def seen(self, z: Tensor) -> Tensor:
        """Logits [V] without those of other clusters, which transformers sets below the others."""
        return z.masked_fill(z == z.min(), -math.inf) if self.assistant.masked_embedding is not None else z

    @torch.no_grad()
    def after(self, taps: Any, text: list[int], path: list[int]) -> Tensor:
        out, at = self.of(text), torch.tensor([[len(text) - 1]])
        row = out.hidden_states[-1][:, -1:]
        for token in [text[-1], *path]:
            pair = torch.cat((self.target.get_input_embeddings()(torch.tensor([[token]])), row), -1)
            step = self.assistant(inputs_embeds=pair, position_ids=at, shared_kv_states=dict(out.shared_kv_states))
            row = step.last_hidden_state
        return self.seen(step.logits[0, 0]).log_softmax(-1)


def load(target: Path, assistant: Path, strategy: str = "mtp", **options: Any) -> Any:
    usual = {"draft_tokens": 3} if not {"draft_tokens", "tree"} & {*options} else {}
    how = {"policy": "fixed", "device": "cpu", "dtype": "float64", **usual, **options}
    return specker.load(str(target), str(assistant), strategy=strategy, **how)
