"""Decide what an engine will be from options, configs and the names of a head's tensors: `resolve` reads no weights.

A recipe names the checkpoints, in which form their weights are read, what drafts, and what the caches will take.
`load.py` reads the weights, sizes the context to the memory that they leave free, and makes the engine.
"""

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from specker import cpu, zoo
from specker.checkpoints.buffers import AUTO, activations, served
from specker.checkpoints.checkpoint import Checkpoint, Opened, opened
from specker.fields import option
from specker.model.config import ModelConfig
from specker.model.memory import CacheMemory
from specker.model.split import WHOLE, Part
from specker.options import DTYPES, STORED, Options
from specker.runtime import strategies
from specker.runtime.notes import Notes
from specker.runtime.ranks import dist
from specker.runtime.strategies.base import (
    LOOKAHEAD,
    PolicyContext,
    kv_dtype,
    planned_kv_dtype,
    saved_states,
    slots,
)
from specker.zoo import catalogue

C = TypeVar("C", Opened, Checkpoint)


@dataclass(frozen=True)
class Recipe:
    """What an engine is made of, without weights."""

    options: Options  # with the defaults that depend on the draft
    device: torch.device
    dtype: torch.dtype  # of matrices that are not quantised
    target: Opened
    draft: Opened | None
    bundled_draft: bool  # `draft` is a bundled one, which suits the target only if they have the same embedding
    draft_quantize: str | None  # as in `checkpoint.read`
    target_name: str
    draft_name: str | None
    notes: Notes = field(default_factory=Notes)  # decisions, by their names in `Engine.remarks`
    ranks: dist.Ranks | None = None  # the ranks that share the target
    family: zoo.Family | None = None  # the bundled files for the target, which its embedding must prove

    @property
    def models(self) -> int:
        """The checkpoints whose reading shows its progress: a head's does not."""
        return 1 if self.draft is None or strategies.of(self.options).reads_target else 2

    @property
    def drafts(self) -> bool:
        """Whether this process makes its drafts itself; else it gets those of rank 0."""
        method = strategies.of(self.options)
        return self.ranks is None or self.ranks.drafts or method.every_rank or not method.drafts

    @property
    def compiles(self) -> bool:
        """Whether compiled layers may run the models on a CPU."""
        return self.ranks is None or self.ranks.communicator is not None

    @property
    def branches(self) -> bool:
        """Whether a round may have two drafts as branches of one tree. On a GPU a chain has the bits of plain decoding,
        and a tree has them up to rounding, so there only trees get another branch."""
        method = strategies.of(self.options)
        return method.branches and (self.device.type != "cuda" or not method.chains(self.options))

    @property
    def draft_part(self) -> Part:
        """What this process, if it drafts, holds of the draft."""
        layout = self.options.layout
        if self.ranks is None or layout not in ("tensor", "both"):
            return WHOLE
        return Part(self.ranks.rank, self.ranks.draft_ranks, whole_mixers=layout == "both")

    @cached_property
    def memory(self) -> CacheMemory:
        """What the caches must fit into."""
        o, target, kind = self.options, self.target.config, activations(self.dtype, self.device)
        configs = [target if self.ranks is None else self.ranks.part.config(target)]
        if self.draft is not None and self.drafts:
            configs += map(self.draft_part.config, self.draft.configs)
        context = PolicyContext(o, target.num_layers, self.family, branches=self.branches)
        # The drafter decides whether its policy reads confidences, so the larger plan counts.
        plans = [strategies.plan(replace(context, confident=confident)) for confident in (False, True)]
        return CacheMemory(
            configs=tuple(configs),
            dtype=kind,
            device=self.device,
            page_size=o.page_size,
            lookahead=LOOKAHEAD,
            rows=o.batch_size * (max(plan.largest.nodes for plan in plans) + 1),
            rings=slots(o),
            sequences=slots(o),
            saved=saved_states(o),
            kv_dtypes=tuple(planned_kv_dtype(o, config, kind, self.device, self.compiles) for config in configs),
        )

    def within(self, context: int) -> "Recipe":
        """The recipe for at most `context` positions."""
        draft = None if self.draft is None else within(self.draft, context)
        return replace(self, target=within(self.target, context), draft=draft)

    def of_family(self, family: zoo.Family | None) -> "Recipe":
        """The recipe for a target whose weights have shown that these bundled files are for it, or none. Raises
        ValueError if it has a bundled draft, and none are."""
        if self.bundled_draft and family is None:
            raise ValueError(no_draft(self.options, self.target.source))
        return replace(self, family=family)


def within(checkpoint: C, context: int) -> C:
    """Limit a checkpoint to `context` positions: no draft is longer than the target's text."""
    if checkpoint.config.max_context <= context:
        return checkpoint
    return replace(checkpoint, config=replace(checkpoint.config, max_context=context))


def resolve(
    options: Options,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    ranks: dist.Ranks | None = None,
) -> Recipe:
    """The recipe of the engine that `specker.load` makes of these arguments. Each config is read once, and before any
    weights: a checkpoint may come from the hub. Raises ValueError, or CheckpointError, as `load` does."""
    method, where, notes = strategies.of(options), device_of(device), Notes()
    if draft is not None and not method.takes_draft:
        raise ValueError(f"strategy {options.strategy!r} uses no draft checkpoint: leave out {option('draft')}")
    for name, source in (("target", target), ("draft", draft)):
        if not isinstance(source, str | os.PathLike | None):
            raise ValueError(f"{option(name)} must be a folder, a GGUF file or a hub id, got {source!r}")
        if source == "":
            raise ValueError(f"{option(name)} is empty: give a folder, a GGUF file or a hub id")
    if draft == catalogue.AUTO:
        chosen = catalogue.choose(target, method.name)
        notes["draft_choice"] = catalogue.reason(chosen, method.name)
        draft = None if chosen.bundled else chosen.draft
    if target is None and draft is not None and draft not in zoo.NAMES:
        raise ValueError(f"{option('draft')} needs {option('target')}: the bundled target has its own draft")
    source = zoo.path("code-target") if target is None else zoo.source_of(target)
    found = opened(source, max_context=options.max_context)
    if where.type == "cpu" and (why := _slow(found.config)) is not None:
        notes["cpu"] = f"decoding is slow, because {why}"
    recipe = recipe_of(options, found, draft, where, dtype, name_of(source), ranks)
    recipe.notes.update(notes)
    return recipe


def recipe_of(
    options: Options,
    target: Opened,
    draft: str | Path | None,
    device: torch.device,
    dtype: str | torch.dtype | None,
    target_name: str,
    ranks: dist.Ranks | None = None,
) -> Recipe:
    """`resolve` for an opened target, of which another program may hold the weights."""
    method, kind = strategies.of(options), dtype_of(dtype)
    drafting = draft_of(options, target, draft)
    named = draft is not None or method.needs_draft  # else it is a part of the target's own checkpoint
    part, compiles = (WHOLE, True) if ranks is None else (ranks.part, ranks.communicator is not None)
    if dtype is None and device.type == "cpu" and not (compiles and served(part.config(target.config))):
        kind = torch.float32
    kv_dtype(options, activations(kind, device), device)  # raises ValueError for one that does not suit
    method.check_target(options, target.config.num_layers)
    keep = None if options.trim is None else options.trim.vocab_keep
    ids = (target if drafting is None or method.reads_target else drafting).config.vocab_size
    if keep is not None and keep.rows is not None and keep.rows > ids:
        raise ValueError(f"{option('vocab_keep', keep.rows)} is more than the {ids} rows of the draft's head")
    recipe = Recipe(
        options if drafting is None else method.with_draft(options, drafting),
        device,
        kind,
        target,
        drafting,
        bundled_draft=draft is None and method.needs_draft,
        draft_quantize=rounding(options.draft_quantize, dtype, device),
        target_name=target_name,
        draft_name=name_of(drafting.source) if drafting is not None and named else None,
        ranks=ranks,
    )
    if recipe.bundled_draft and method.about_draft:
        about = f"{recipe.draft_name} drafts, because {method.about_draft}; strategy draft takes the same with "
        recipe.notes.fact("draft_choice", about + option("draft", recipe.draft_name), shown=True)
    if options.as_published:
        recipe.notes.fact("published", strategies.about_published(options), shown=True)
    if drafting is not None:
        recipe.draft_part.check(drafting.config, "draft")
    return recipe


def draft_of(options: Options, target: Opened, draft: str | Path | None) -> Opened | None:
    """What drafts for the target: `draft`, or else the bundled one. None if the strategy needs none. Raises ValueError
    if none is known, and for one that the strategy cannot use."""
    method, source = strategies.of(options), zoo.source_of(draft)
    if source is None and method.needs_draft:
        zoo.require_for(target.config)
        family = zoo.family_of(target.config)
        source = None if family is None else family.drafts.get(method.name)
        if source is None:
            raise ValueError(no_draft(options, target.source))
    if method.reads_target:
        return method.open_head(source, target)
    if source is None:
        return None
    found = opened(source, bidirectional=None if method.causal else True)
    if method.causal and not found.config.causal:
        raise ValueError(f"{source} is a bidirectional drafter; strategy {options.strategy!r} needs a causal one")
    if options.width > min(found.config.vocab_size, target.config.vocab_size):
        raise ValueError(f"{option('tree', options.tree)} is wider than the vocabulary")
    return within(found, target.config.max_context)


def no_draft(options: Options, target: object) -> str:
    return f"strategy {options.strategy!r} needs a draft checkpoint for {target}: pass {option('draft')}"


def device_of(device: str | torch.device | None) -> torch.device:
    """The device of a name, a GPU with its number; default: a GPU if there is one. Raises ValueError."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {str(device)!r}: use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device} is not supported: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device cuda needs a CUDA GPU, and torch finds none: use {option('device', 'cpu')}")
    device = dist.own_device(device)
    if device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
        raise ValueError(f"there is no device {device}: torch finds {count}, from cuda:0 to cuda:{count - 1}")
    return device


def rounding(asked: str | None, dtype: str | torch.dtype | None, device: torch.device) -> str | None:
    """What `checkpoint.read` makes of `--draft-quantize`, for a run with `--dtype dtype`. By default drafts are rounded
    on a CPU: products with int8 read half the bytes of bfloat16 and take nearly as good drafts; drafts do not change
    the text."""
    usual = AUTO if dtype is None and device.type == "cpu" else None
    return None if asked == STORED else asked or usual


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype:
    """The dtype of a name; default: bfloat16. Raises ValueError."""
    if dtype is None:
        return torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name)


def name_of(source: str | Path) -> str:
    """A source's name for people: a folder's own name, or what the user called it."""
    path = Path(source).expanduser()
    return Path(os.path.abspath(path)).name if path.is_dir() else str(source)


def _slow(config: ModelConfig) -> str | None:
    """Why a CPU's compiled kernels do not run a target; None if they do."""
    if (why := cpu.problem()) is not None:
        return why
    if lacks := cpu.Stack.lacks(config.layer):
        return f"the compiled kernels lack {lacks}"
    if not served(config):
        return "the compiled kernels take heads of a multiple of 32 only, and other sizes of a multiple of 16"
    return None
