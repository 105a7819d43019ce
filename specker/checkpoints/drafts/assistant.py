"""Read an assistant that reads the target's K/V (`model_type` gemma4_assistant, as Google publishes one for each Gemma
4). `docs/checkpoints.md` lists the tensors.

An assistant for another target drafts badly without any error, so its layers must have the heads of the target's layers
that they read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.architectures.architecture import FULL, SLIDING
from specker.checkpoints.architectures.heads import ASSISTANT
from specker.checkpoints.buffers import Storage
from specker.checkpoints.checkpoint import Checkpoint, idle
from specker.checkpoints.drafts.heads import Files, HeadLayout, check_target, head_pieces
from specker.checkpoints.numbers import check_size
from specker.checkpoints.parse import SHARED, parse_config
from specker.checkpoints.pieces import Piece, pieces_of
from specker.checkpoints.quantised.schemes import scheme_of
from specker.cpu import available
from specker.kernels.cluster_topk import MAX_CLUSTERS
from specker.model.assistant import AssistantSpec, AssistantWeights
from specker.model.config import CheckpointError, ModelConfig
from specker.model.split import WHOLE

KIND = "gemma4_assistant"
LAYERS = "Gemma4ForCausalLM"  # the architecture of its layers
ORDER = "masked_embedding.token_ordering"  # [V] int64, the ids cluster by cluster
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Fields of text_config that must be off: what an assistant's layers do not have.
OFF = "hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"


@dataclass(frozen=True, eq=False)
class AssistantCheckpoint(Checkpoint):
    """An assistant: its layers as a model of their own, and what a model does not have."""

    spec: AssistantSpec = field(kw_only=True)
    parts: AssistantWeights = field(kw_only=True)

    @property
    def untrimmed(self) -> str:
        if self.parts.order is None:
            return ""
        return f"reads {self.spec.chosen} of {len(self.parts.order)} clusters of its LM head's rows in each step"


def _order(order: Tensor | None, clusters: int, vocab: int, source: str | Path) -> Tensor:
    """The ids of each cluster, [clusters, vocab / clusters] int64. Raises CheckpointError."""
    if order is None:
        raise CheckpointError(f"{source} says use_ordered_embeddings and lacks {ORDER}, each cluster's ids")
    ids = order.long() if not order.is_floating_point() else order.new_empty(0)
    every = torch.arange(vocab, dtype=torch.int64, device="cpu")
    if ids.shape != (vocab,) or not torch.equal(ids.sort().values, every):
        raise CheckpointError(f"{ORDER} of {source} must hold each of the {vocab} ids once, as whole numbers")
    return ids.view(clusters, -1)


@dataclass(frozen=True, eq=False)
class Layout(HeadLayout):
    """An LM head with clusters is not rounded."""

    tied: bool  # the LM head is the assistant's embedding, which has no other use here
    clusters: int  # of ids; 0: none

    strategy, reads = "mtp", (KIND,)
    made = AssistantCheckpoint
    extra = (ORDER,)

    @classmethod
    def of(cls, files: Files, target: ModelConfig) -> "Layout":
        source, folder, raw, _, _ = files
        if raw.get("model_type") != KIND:
            raise cls.unread(source, raw.get("model_type"))
        given = raw.get("text_config")
        if not isinstance(given, dict):
            raise CheckpointError(f"text_config of {folder} must be an object, got {short(given)}")
        sizes = {
            "of width {}": (raw.get("backbone_hidden_size"), target.hidden_size),
            "with {} ids": (given.get("vocab_size"), target.vocab_size),
        }
        check_target(folder, "an assistant for a target", sizes)
        if target.rotated:
            raise CheckpointError(
                f"{folder} is an assistant, and reads no K/V of {target.architecture}, whose heads are rotated in part"
            )
        for name in OFF:
            if given.get(name, name == OFF[0]):  # transformers' default of the first one is a width
                raise CheckpointError(f"{name} of an assistant must be off, but {folder} has {short(given.get(name))}")
        if (positions := given.get("max_position_embeddings")) is not None:
            check_size("max_position_embeddings", positions, str(folder))
        tied = bool(raw.get("tie_word_embeddings", True))
        plain = {
            **given,
            "architectures": [LAYERS],
            "model_type": ARCHITECTURES[LAYERS].model_type,
            "num_kv_shared_layers": 0,  # it shares the target's K/V, not its own
            "max_position_embeddings": max(positions or 0, target.max_context),
            "tie_word_embeddings": tied,
            "eos_token_id": None,  # the target's count
        }
        config, ropes = parse_config(folder, target.max_context, None, plain)
        sources = _sources(folder, config, target)
        kvs = tuple(config.kv(n)._replace(source=source) for n, source in enumerate(sources))
        # One column more than the window has: see model/assistant.py.
        windows = tuple(window and window + 1 for window in config.layer.sliding_windows)
        layer = replace(config.layer, kvs=kvs, sliding_windows=windows)
        # The LM head of transformers' Gemma4AssistantForCausalLM has no soft cap.
        config = replace(config, layer=layer, tied=False, eos_ids=(), logits_cap=0.0)
        clusters, chosen = _clusters(folder, raw, config.vocab_size)
        spec = AssistantSpec(sources, target.num_layers, target.hidden_size, chosen)
        return cls(source, folder, config, ropes, scheme_of(raw, str(source)), spec, tied, clusters)

    def used(self, files: Files) -> dict[str, Any]:
        where, unread = files.where, EMBED  # no step reads an embedding of the assistant's own
        if self.tied:
            unread = HEAD  # a copy, which save_pretrained leaves out
            rows = [where[name].get_tensor(name) for name in (HEAD, EMBED) if name in where]
            if len(rows) == 2 and not torch.equal(*rows):
                raise CheckpointError(f"{HEAD} of {files.source} differs from {EMBED}, and tie_word_embeddings is true")
        return {n: file for n, file in where.items() if n != unread and not idle(self.config, "model.", n)}

    def pieces(self) -> Iterator[Piece]:
        c = self.config
        for p in pieces_of(replace(c, shares=SHARED), WHOLE, True):
            yield replace(p, name=f"model.{p.name}")
        sizes = {"V": c.vocab_size, "H": c.hidden_size, "W": self.spec.width, "C": self.clusters}
        for p in head_pieces(ASSISTANT, sizes, {"clusters" if self.clusters else "head"}, c):
            yield replace(p, name=EMBED) if p.name == HEAD and self.tied else p

    def storage(self, quantize: str | None, dtype: torch.dtype, device: torch.device) -> Storage:
        packs = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and available()
        return Storage(self.scheme, quantize, dtype, device, packs)

    def parts(self, found: dict[str, Any], files: Files, storage: Storage) -> AssistantWeights:
        parts = AssistantWeights(found["pre"], found["post"], found.get("centroids"))
        if not self.clusters:
            return parts
        order = _order(files.extra.get(ORDER), self.clusters, self.config.vocab_size, files.source).to(storage.device)
        found["head"] = found.pop("rows")[order.flatten()]  # cluster by cluster, as `cluster_topk` reads it
        return parts._replace(order=order)


def _clusters(folder: Path, raw: dict[str, Any], vocab: int) -> tuple[int, int]:
    """The number of clusters, and how many a step chooses; 0 and 0 without clusters. Raises CheckpointError."""
    if not raw.get("use_ordered_embeddings"):
        return 0, 0
    count, chosen = (raw.get(name) for name in ("num_centroids", "centroid_intermediate_top_k"))
    if type(count) is not int or count < 1 or vocab % count:
        raise CheckpointError(f"num_centroids of {folder} is {short(count)}, which does not divide its {vocab} ids")
    most = min(count, MAX_CLUSTERS)
    if type(chosen) is not int or not 1 <= chosen <= most:
        raise CheckpointError(
            f"centroid_intermediate_top_k of {folder} must be between 1 and {most}, got {short(chosen)}"
        )
    return count, chosen


def _sources(folder: Path, config: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """For each layer, the target's last one of the same kind that has K/V of its own. Raises CheckpointError unless its
    K/V fits."""
    kinds, own = _kinds(target), [target.layer.mixer(n) is None and target.kv(n).source is None for n in _each(target)]
    found = []
    for n, kind in enumerate(_kinds(config)):
        fitting = [m for m in _each(target) if own[m] and kinds[m] == kind]
        if not fitting:
            raise CheckpointError(f"{folder} reads the K/V of {kind} layers, and the target has none")
        source, its = fitting[-1], config.kv(n)
        sizes = {
            f"whose {kind} layers have {{}} K/V heads": (its.heads, target.kv(source).heads),
            f"whose {kind} layers have heads of {{}}": (its.dim, target.kv(source).dim),
            "with sliding windows of {}": (config.layer.sliding_window(n), target.layer.sliding_window(source)),
        }
        check_target(folder, "an assistant for a target", sizes)
        found.append(source)
    return tuple(found)


def _each(c: ModelConfig) -> range:
    return range(c.num_layers)


def _kinds(c: ModelConfig) -> list[str]:
    """Each layer's kind. Of a context that fits into the window, the config still tells by a layer's RoPE."""
    apart = ARCHITECTURES[c.architecture].ropes == "by type"
    return [SLIDING if c.layer.sliding_window(n) or (apart and c.layer.rope(n)) else FULL for n in _each(c)]
