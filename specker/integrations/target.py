"""The drafter for a target that another engine runs."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from specker import zoo
from specker.checkpoints import checkpoint
from specker.checkpoints.buffers import served
from specker.checkpoints.checkpoint import Checkpoint, Opened, opened
from specker.checkpoints.files import folder_of
from specker.checkpoints.numbers import FIELDS, check_size
from specker.checkpoints.parse import eos_ids, read_json, reason
from specker.model.config import CheckpointError, LayerSpec, ModelConfig
from specker.model.weights import Weights
from specker.options import MAX_BATCH
from specker.runtime import strategies
from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import AUTO
from specker.runtime.engine import draft_cost
from specker.runtime.load import family_of, read_draft
from specker.runtime.recipe import device_of, dtype_of, recipe_of
from specker.runtime.round.drafter import Drafter
from specker.runtime.strategies.base import DraftContext, PolicyContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Foreign:
    """The drafters and what belongs to them, for a target that another engine runs."""

    drafters: list[Drafter]
    config: ModelConfig  # the target's
    policies: PolicyContext
    device: torch.device
    fixed: bool  # whether drafts have fixed shapes where they can


def drafter_for(
    target: str | Path | Checkpoint,
    draft: str | Path | None,
    strategy: strategies.Named,
    *,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    requests: int,
    max_context: int | None,
    kv_tokens: int | None,
    **options: Any,
) -> Foreign:
    """Load the drafter that `Drafts` describes. Raises as `Drafts` does."""
    if not 1 <= requests < MAX_BATCH:
        raise ValueError(f"requests must be between 1 and {MAX_BATCH - 1}, got {requests}")
    if options.get("tree") is not None or options.get("cps") == "tree":
        raise ValueError("another engine verifies one path of each request: leave out draft trees")
    if options.get("policy") is None and strategies.options(strategy=strategy, **options).policy == AUTO:
        options["policy"] = "fixed"  # the engine does not say what its verify passes cost
    o = strategies.options(  # the last slot is a spare one
        strategy=strategy, batch_size=requests + 1, kv_tokens=kv_tokens, max_context=max_context, **options
    )
    method, where = strategies.of(o), device_of(device)
    if method.self_drafting or not method.drafts:
        raise ValueError(f"strategy {o.strategy!r} does not draft for another engine: use one with its own drafter")
    if draft is not None and not method.needs_draft:
        why = "uses no draft checkpoint"
        if method.may_draft:
            why = "with an assistant reads the target's K/V, which another engine keeps to itself"
        raise ValueError(f"strategy {o.strategy!r} {why}: leave out draft")
    if isinstance(target, Checkpoint):
        found = Opened(target.folder, target.folder, target.config, (), None)
    else:
        found = read_sizes(target, max_context)
    config = found.config
    if method.reads_target and not method.needs_draft and not config.num_heads:
        raise ValueError(
            f"strategy {o.strategy!r} needs a target that specker's decoder runs, not {config.architecture}"
        )
    recipe = recipe_of(o, found, draft, where, dtype, str(found.source))
    o, own = recipe.options, None if recipe.draft is None else recipe.draft.config
    called = "" if recipe.draft is None else recipe.draft.source
    if own is not None and own.layer.recurrent is not None:  # its cache cannot drop what the other engine refuses
        raise ValueError(f"{called} has recurrent layers, and does not draft for another engine yet: use another draft")
    kind = dtype_of(dtype)  # of the draft, which alone runs here
    if dtype is None and where.type == "cpu" and (own is None or method.reads_target or not served(own)):
        kind = torch.float32
    if isinstance(target, Checkpoint):
        target_checkpoint = target
    elif method.reads_target or (own is not None and own.shares):
        supported = opened(target, max_context=max_context)  # raises CheckpointError
        target_checkpoint = checkpoint.read(supported, dtype=kind, device=where, layers=False)
    else:
        none = torch.empty(0, dtype=torch.float32, device=where)
        target_checkpoint = Checkpoint(config, Weights(embed=none, norm=none, head=none, ropes=()), found.folder)
    family = family_of(target_checkpoint) if own is not None and own.shares else zoo.family_of(config)
    recipe = replace(recipe, dtype=kind).of_family(family)
    draft_checkpoint = read_draft(recipe, target_checkpoint)
    if draft_checkpoint is not None:
        if draft_checkpoint.translation is not None:
            raise ValueError(
                f"{called} has another tokenizer, and does not draft for another engine yet: use another draft"
            )
        o = replace(o, kv_tokens=recipe.memory.of_drafts().pool(o.batch_size, kv_tokens)[0])
    context = DraftContext(o, target_checkpoint, None, None, draft_checkpoint, family, notes=recipe.notes)
    drafters = strategies.drafters(context)
    for sentence in recipe.notes.warnings().values():
        log.warning(sentence)
    head_bytes = drafters[0].head_bytes
    costs = Costs(lambda budget: draft_cost(budget, target_checkpoint, draft_checkpoint, head_bytes, 0.0))
    history = AcceptanceHistory(costs)
    apart = own is not None and own.layer.ple > 0  # its table is on the host
    fixed = where.type == "cuda" and kind != torch.float64 and not apart if o.graphs is None else o.graphs == "on"
    reads = where.type == "cpu" and method.stepwise(draft_checkpoint)
    policies = PolicyContext(o, config.num_layers, family, history, 0.0, reads)
    return Foreign(drafters, config, policies, where, fixed)


def read_sizes(target: str | Path, max_context: int | None) -> Opened:
    """The target with its config. For an architecture that specker's decoder lacks, or for quantised weights, only the
    vocabulary, the number of layers, the hidden size, the positions and the stop ids are known. Raises
    CheckpointError."""
    try:
        return opened(target, max_context=max_context)
    except CheckpointError:
        folder = folder_of(target, weights=False)
        raw = read_json(folder / "config.json")
    inner = raw.get("text_config")
    for name, value in (raw | (inner if isinstance(inner, dict) else {})).items():
        if name in FIELDS and FIELDS[name].needed:  # transformers makes a list with an entry for each layer
            check_size(name, value, str(folder / "config.json"))
    try:
        hf = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).get_text_config()
        sizes = hf.vocab_size, hf.hidden_size, hf.num_hidden_layers, hf.max_position_embeddings
    except Exception as error:  # validation raises several types; a config may lack a field
        raise CheckpointError(f"{folder / 'config.json'} lacks the model's sizes ({reason(error)})") from error
    vocab, hidden, layers, positions = sizes
    config = ModelConfig(
        architecture=str((raw.get("architectures") or ["unknown"])[0]),
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=4 * hidden,
        rms_norm_eps=0.0,
        layer=LayerSpec(),
        tied=False,
        causal=True,
        shifted_logits=True,
        mask_token_id=None,
        max_context=min(max_context or positions, positions),
        eos_ids=eos_ids(folder, raw, vocab),
    )
    return Opened(target, folder, config, (), None)
