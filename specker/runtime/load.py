"""Load checkpoints into an Engine by a recipe: read the weights, check that the models fit together, and size the
context to the memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specker import zoo
from specker.checkpoints.buffers import AUTO
from specker.checkpoints.checkpoint import Checkpoint, OpenedHead, made_for
from specker.checkpoints.checkpoint import read as read_checkpoint
from specker.checkpoints.translation import LEAST, Translation
from specker.fields import option
from specker.model.split import WHOLE
from specker.options import Options
from specker.runtime import strategies
from specker.runtime.engine import Engine
from specker.runtime.notes import Notes
from specker.runtime.ranks import dist
from specker.runtime.recipe import Recipe, device_of, resolve, within
from specker.runtime.strategies.base import LOOKAHEAD
from specker.runtime.strategies.vocabtrim.trim import planned_bytes
from specker.torchrun import processes_here

NODES = Path("/sys/devices/system/node")  # Linux's folder of the machine's memory nodes


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    strategy: strategies.Named | Options | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> Engine:
    """Load an Engine; `specker.load` documents the arguments."""
    if isinstance(strategy, Options) and options:
        raise TypeError(f"an Options object excludes further options: {', '.join(options)}")
    if strategy is None:
        options |= strategies.usual(target, draft, options)
    else:
        options["strategy"] = strategy
    opts = strategy if isinstance(strategy, Options) else strategies.options(**options)
    where = device_of(device)
    ranks = dist.join(opts, where)
    recipe = resolve(opts, target, draft, where, dtype, ranks)
    if ranks is not None and where.type == "cpu" and (said := shared_cores(ranks.size)) is not None:
        recipe.notes["shared_cores"] = said
    return engine_of(recipe, read_target(recipe, on_progress), on_progress)


def read_target(recipe: Recipe, on_progress: Callable[[int, int, str], None] | None = None) -> Checkpoint:
    """The recipe's target, or this rank's part of it. Raises as `checkpoint.read` does."""
    o, ranks, draft = recipe.options, recipe.ranks, recipe.draft
    shares_head = ranks is not None and draft is not None and "lm_head" in draft.config.shares
    target = read_checkpoint(
        recipe.target,
        dtype=recipe.dtype,
        device=recipe.device,
        random=0 if o.load == "dummy" else None,
        part=WHOLE if ranks is None else ranks.part,
        whole_head=strategies.of(o).every_rank or shares_head,
        quantize=o.quantize,
        activations=o.activations,
        pack=recipe.compiles,
        on_progress=on_progress and (lambda done, of: on_progress(done, of, f"target, 1 of {recipe.models}")),
    )
    if ranks is not None:
        ranks.same("target", dist.fingerprint(target.folder))
    note_formats(recipe.notes, "weights", target, "target")
    return target


def engine_of(recipe: Recipe, target: Checkpoint, on_progress: Callable[[int, int, str], None] | None = None) -> Engine:
    """Read what drafts for a target whose weights are there, size the context to the memory that is left, and make the
    engine. Raises as `load` does."""
    opts, notes, ranks = recipe.options, recipe.notes, recipe.ranks
    recipe = recipe.of_family(family_of(target))
    last = f"draft, {recipe.models} of {recipe.models}"
    draft = read_draft(recipe, target, on_progress and (lambda done, of: on_progress(done, of, last)))
    copies = planned_bytes(target, draft, opts) if recipe.drafts else 0
    context, lowered = recipe.memory.sized(opts.max_context, copies)
    if ranks is not None:
        context = ranks.least(context)
        if context < target.config.max_context:
            less = f"the context is lowered to {context} positions: another rank has too little memory for more"
            lowered = lowered or less
    if lowered is not None:
        notes["context"] = lowered
        recipe = recipe.within(context)
        target, draft = within(target, context), None if draft is None else within(draft, context)
    pool, note = recipe.memory.pool(opts.batch_size, opts.kv_tokens, copies)
    if ranks is not None and opts.batch_size > 1:
        pool = ranks.least(pool or opts.batch_size * (target.config.max_context + LOOKAHEAD))
    if note is not None:
        notes["kv_pool"] = note
    limit = target.config.max_context
    if draft is not None and (ends := draft.config.max_context) < limit:
        beyond = "drafts are copies only" if len(opts.sources) > 1 else "nothing is drafted"
        notes["draft_context"] = f"the draft's context ends at {ends} of {limit} tokens: beyond, {beyond}"
    recipe = replace(recipe, options=replace(opts, kv_tokens=pool))
    with recipe.memory.allocating():
        return Engine(recipe, target, draft)


def read_draft(
    recipe: Recipe, target: Checkpoint, on_progress: Callable[[int, int], None] | None = None
) -> Checkpoint | None:
    """The checkpoint that drafts for `target`, fitted to its vocabulary and context, or None. Adds remarks to the
    recipe's notes. Raises as `load` does."""
    opts, source, ranks = recipe.options, recipe.draft, recipe.ranks
    if source is None or not recipe.drafts:
        return None
    if isinstance(source, OpenedHead):
        draft = source.read(target, recipe.dtype, recipe.draft_quantize)
    else:
        draft = read_checkpoint(
            source,
            dtype=recipe.dtype,
            device=target.weights.embed.device,
            random=1 if opts.load == "dummy" else None,
            part=recipe.draft_part,
            whole_head=True,
            owner=target,
            quantize=recipe.draft_quantize,
            activations=opts.activations,
            pack=recipe.compiles,
            on_progress=on_progress,
        )
    note_formats(recipe.notes, "draft_weights", draft, "draft", "int8" if recipe.draft_quantize == AUTO else None)
    if (drafting := ranks if ranks is None or strategies.of(opts).every_rank else ranks.drafting) is not None:
        drafting.same("draft", dist.fingerprint(draft.folder))
    if not isinstance(source, OpenedHead):
        return _fitted(recipe, target, draft, source.source)
    if opts.trim is not None and draft.untrimmed:
        raise ValueError(f"{source.source} {draft.untrimmed}: leave out +vocabtrim")
    return draft


def shared_cores(ranks: int) -> str | None:
    """A warning if more of the `ranks` that share a target run on this machine than it has memory nodes (sockets)."""
    here, nodes = min(ranks, processes_here()), max(1, len(list(NODES.glob("node[0-9]*"))))
    if here <= nodes:
        return None
    return (
        f"{here} ranks share {nodes} socket{'s' * (nodes > 1)} of this machine, where one process with all its threads "
        f"exchanges nothing and drafts on every core: {option('strategy', 'ar')} without torchrun measures it"
    )


def note_formats(notes: Notes, key: str, checkpoint: Checkpoint, name: str, usual: str | None = None) -> None:
    """Add how the matrices of `name` (target or draft) are stored, unless in the run's dtype or as `usual`."""
    said = None if checkpoint.quantised in (None, usual) else f"the {name}'s matrices are in {checkpoint.quantised}"
    if checkpoint.restored:
        formats = ", ".join(checkpoint.restored)
        lack = f"the {name}'s {formats} matrices are restored, because specker has no kernels for these formats"
        notes[key] = f"{said}; {lack}" if said else lack
    elif said:
        notes.fact(key, said)


def family_of(target: Checkpoint) -> zoo.Family | None:
    """The bundled files for the target, if they are installed. Equal sizes alone do not prove that the target belongs
    to a family: its embedding must be the one that the drafts share. A family without drafts has only a score file,
    which names its tokenizer."""
    family = zoo.family_of(target.config) if zoo.installed() else None
    if family is None or (family.drafts and not made_for(family.drafts["draft"], target)):
        return None
    return family


def _fitted(recipe: Recipe, target: Checkpoint, draft: Checkpoint, called: object) -> Checkpoint:
    """Cut the draft's head to the target's ids, of equal or padded sizes if both have the same tokens. A diffusion
    drafter may have extra tokens, such as a mask; ids after the target's are cut too. With other tokens the draft gets
    a translation, if the strategy can use it, and raises ValueError if not. `called`: the draft, by the user."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    if target.tokens.equal(draft.tokens):
        return _cut(replace(draft, shared=target.tokens), min(sizes))
    its, own = target.vocabulary, draft.vocabulary
    if its is not None and own is not None and not draft.config.causal and its.items() <= own.items():
        return _cut(draft, min(sizes) if len(its) == len(own) else min(*sizes, max(its.values()) + 1))
    if its is not None and own is not None and its != own:
        differ = (
            f"target and draft have different tokenizers ({recipe.target.source} has {len(its)} tokens, {called} has "
            f"{len(own)}; the tokens differ)"
        )
        return _translated(recipe, target, draft, differ)
    if sizes[0] != sizes[1] and (its is None or own is None):
        raise ValueError(
            f"target and draft have vocabularies of {sizes[0]} and {sizes[1]} ids, and without a tokenizer in both "
            "folders specker cannot check that one pads the other: use a draft of the target's own family"
        )
    return _cut(draft, min(sizes))  # ids that only the padded draft has must never be drafted


def _translated(recipe: Recipe, target: Checkpoint, draft: Checkpoint, differ: str) -> Checkpoint:
    """A draft that reads the target's text in ids of its own, with only the rows of shared tokens in its head. `differ`
    begins the sentences of a refusal. Raises ValueError where that cannot be, and for too few shared tokens."""
    other, opts = "use a draft of the target's own family", recipe.options
    if not strategies.of(opts).translates or not draft.config.causal:
        raise ValueError(f"{differ}: {other}")
    if recipe.ranks is not None:
        raise ValueError(f"{differ}, and with {option('tp')} a draft cannot read its own tokens: {other}")
    if draft.config.pard_token is not None:
        raise ValueError(f"{differ}, and a PARD model cannot draft from changed text: {other}")
    if draft.config.layer.recurrent:
        raise ValueError(f"{differ}, and a draft with recurrent layers cannot read changed text again: {other}")
    sizes, free = (target.config.vocab_size, draft.config.vocab_size), opts.width == 1
    found = Translation.between(target.tokens, draft.tokens, sizes, free)
    if found.share < LEAST or len(found.ids) <= opts.width:
        raise ValueError(f"{differ}, and only {len(found.ids)} of the draft's are the target's, too: {other}")
    recipe.notes["draft_tokens"] = found.sentence
    if free or opts.trim is not None:
        return replace(_cut(draft, min(sizes[1], len(found.draft.texts))), translation=found)
    head = draft.weights.head
    rows = head[found.rows.to(head.device)]
    return replace(draft, weights=replace(draft.weights, head=rows), translation=found)


def _cut(draft: Checkpoint, rows: int) -> Checkpoint:
    head = draft.weights.head
    return draft if rows == len(head) else replace(draft, weights=replace(draft.weights, head=head[:rows]))
