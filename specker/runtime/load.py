"""Load checkpoints into an Engine: check that models and options fit together, and size the context to the memory."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specker import cpu, zoo
from specker.checkpoints.buffers import AUTO, activations, served
from specker.checkpoints.checkpoint import Checkpoint, Opened, made_for, opened
from specker.checkpoints.checkpoint import read as read_checkpoint
from specker.checkpoints.translation import LEAST, Translation
from specker.fields import option
from specker.model.split import WHOLE
from specker.options import DTYPES, Options
from specker.runtime import strategies
from specker.runtime.engine import Engine, cache_memory
from specker.runtime.notes import Notes
from specker.runtime.ranks import dist
from specker.runtime.strategies.base import LOOKAHEAD, kv_dtype
from specker.runtime.strategies.vocabtrim import trim
from specker.runtime.strategies.vocabtrim.head import KeptRows
from specker.zoo import catalogue


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
    method = strategies.of(opts)
    where = device_of(device)
    ranks = dist.join(opts, where, method.divides)
    if draft is not None and not method.takes_draft:
        raise ValueError(f"strategy {opts.strategy!r} uses no draft checkpoint: leave out {option('draft')}")
    notes = Notes()
    for name, source in (("target", target), ("draft", draft)):
        if not isinstance(source, str | os.PathLike | None):
            raise ValueError(f"{option(name)} must be a folder, a GGUF file or a hub id, got {source!r}")
        if source == "":
            raise ValueError(f"{option(name)} is empty: give a folder, a GGUF file or a hub id")
    if draft == catalogue.AUTO:
        chosen = catalogue.choose(target, method.name)
        notes["draft_choice"] = catalogue.reason(chosen, method.name)
        draft = None if chosen.bundled else chosen.draft
    if target is None and draft is not None:
        raise ValueError(f"{option('draft')} needs {option('target')}: the bundled target has its own draft")
    target_source, draft = zoo.path("code-target") if target is None else zoo.source_of(target), zoo.source_of(draft)
    # Each config is read once, and before any weights: the checkpoint may come from the hub.
    opened_target = opened(target_source, max_context=opts.max_context)
    opened_draft = (
        None if draft is None or method.reads_target else opened(draft, bidirectional=None if method.causal else True)
    )
    lacks_draft = method.needs_draft and draft is None
    if lacks_draft:
        zoo.require_for(opened_target.config)
        known = zoo.family_of(opened_target.config)
        if known is None or method.name not in known.drafts:
            raise ValueError(_no_draft(opts, target_source))
    if where.type == "cpu":
        why, lacks = cpu.problem(), cpu.Stack.lacks(opened_target.config.layer)
        if why is None and lacks:
            why = f"the compiled kernels lack {lacks}"
        elif why is None and not served(opened_target.config):
            why = "the compiled kernels take heads of a multiple of 32 only, and other sizes of a multiple of 16"
        if why is not None:
            notes["cpu"] = f"decoding is slow, because {why}"
    rounds = opts.draft_quantize or usual_rounding(dtype, where)
    if dtype is None and where.type == "cpu":
        dtype = torch.bfloat16 if ranks is None and served(opened_target.config) else torch.float32
    kind = dtype_of(dtype)
    kv_dtype(opts, activations(kind, where), where)  # refuses before any weights are read
    shares_head = ranks is not None and opened_draft is not None and "lm_head" in opened_draft.config.shares
    models = 1 + (lacks_draft or opened_draft is not None)
    target_checkpoint = read_checkpoint(
        opened_target,
        dtype=kind,
        device=where,
        random=0 if opts.load == "dummy" else None,
        part=WHOLE if ranks is None else ranks.part,
        whole_head=method.every_rank or shares_head,
        quantize=opts.quantize,
        activations=opts.activations,
        pack=ranks is None,
        on_progress=on_progress and (lambda done, of: on_progress(done, of, f"target, 1 of {models}")),
    )
    if ranks is not None:
        ranks.same("target", dist.fingerprint(target_checkpoint.folder))
    note_formats(notes, "weights", target_checkpoint, "target")
    family = family_of(target_checkpoint)
    if lacks_draft and family is None:
        raise ValueError(_no_draft(opts, target_source))
    draft_source = family.drafts[method.name] if lacks_draft and family is not None else draft
    opts = method.with_defaults(opts, family)
    method.check_target(opts, target_checkpoint.config.num_layers)
    draft_checkpoint, kept = read_draft(
        target_checkpoint,
        opened_draft or draft_source,
        opts,
        kind,
        rounds,
        target,
        family,
        notes,
        ranks,
        on_progress and (lambda done, of: on_progress(done, of, f"draft, {models} of {models}")),
    )
    opts = opts if draft_checkpoint is None else method.with_draft(opts, draft_checkpoint)
    names = [_name(target_source), None if draft_source is None else _name(draft_source)]
    context, lowered = cache_memory(target_checkpoint, draft_checkpoint, opts, family).sized(opts.max_context)
    if ranks is not None:
        context = ranks.least(context)
        if context < target_checkpoint.config.max_context:
            less = f"the context is lowered to {context} positions: another rank has too little memory for more"
            lowered = lowered or less
    if lowered is not None:
        notes["context"] = lowered
        target_checkpoint, draft_checkpoint = (
            _within(target_checkpoint, context),
            None if draft_checkpoint is None else _within(draft_checkpoint, context),
        )
    pool, note = cache_memory(target_checkpoint, draft_checkpoint, opts, family).pool(opts.batch_size, opts.kv_tokens)
    if ranks is not None and opts.batch_size > 1:
        pool = ranks.least(pool or opts.batch_size * (target_checkpoint.config.max_context + LOOKAHEAD))
    if note is not None:
        notes["kv_pool"] = note
    opts = replace(opts, kv_tokens=pool)
    contexts = [c.config.max_context for c in (target_checkpoint, draft_checkpoint) if c is not None]
    if draft_source is not None and not method.reads_target and contexts[-1] < contexts[0]:
        beyond = "drafts are copies only" if len(opts.sources) > 1 else "nothing is drafted"
        notes["draft_context"] = f"the draft's context ends at {contexts[-1]} of {contexts[0]} tokens: beyond, {beyond}"
    with cache_memory(target_checkpoint, draft_checkpoint, opts, family).allocating():
        return Engine(
            target_checkpoint, draft_checkpoint, opts, where, kind, names[0] or "", names[1], kept, notes, ranks, family
        )


def read_draft(
    target_checkpoint: Checkpoint,
    source: str | Path | Opened | None,
    opts: Options,
    dtype: torch.dtype,
    quantize: str | None,
    target: str | Path | None,
    family: zoo.Family | None,
    notes: Notes,
    ranks: dist.Ranks | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Checkpoint | None, KeptRows | None]:
    """(the checkpoint that drafts for `target_checkpoint`, fitted to its vocabulary and context, or None; the kept rows
    of a trimmed head, or None). `source`: the draft checkpoint; None if the strategy needs none. `quantize`: as in
    `checkpoint.read`. `target`: what the user called the target. Adds remarks to `notes`. Raises as `load` does."""
    method, kept = strategies.of(opts), None
    draft_checkpoint: Checkpoint | None = None
    usual = "int8" if quantize == AUTO else None
    if method.reads_target:
        assert not isinstance(source, Opened)
        draft_checkpoint = method.read_head(source, target_checkpoint, dtype, quantize)
        if ranks is not None:
            ranks.same("draft", dist.fingerprint(draft_checkpoint.folder))
        note_formats(notes, "draft_weights", draft_checkpoint, "draft", usual)
        if opts.trim is not None and draft_checkpoint.untrimmed:
            raise ValueError(f"{source} {draft_checkpoint.untrimmed}: leave out +vocabtrim")
    elif source is not None and (ranks is None or ranks.drafts):
        draft_checkpoint = read_checkpoint(
            source if isinstance(source, Opened) else opened(source, bidirectional=None if method.causal else True),
            dtype=dtype,
            device=target_checkpoint.weights.embed.device,
            random=1 if opts.load == "dummy" else None,
            owner=target_checkpoint,
            quantize=quantize,
            activations=opts.activations,
            pack=ranks is None,
            on_progress=on_progress,
        )
        note_formats(notes, "draft_weights", draft_checkpoint, "draft", usual)
        if ranks is not None:
            ranks.same("draft", dist.fingerprint(draft_checkpoint.folder), drafters=True)
        draft_checkpoint = _within(draft_checkpoint, target_checkpoint.config.max_context)
        called = source.source if isinstance(source, Opened) else source
        if method.causal and not draft_checkpoint.config.causal:
            raise ValueError(f"{called} is a bidirectional drafter; strategy {opts.strategy!r} needs a causal one")
        ids = min(draft_checkpoint.config.vocab_size, target_checkpoint.config.vocab_size)
        if opts.width > ids:
            raise ValueError(f"{option('tree', opts.tree)} is wider than the vocabulary")
        draft_checkpoint = _fitted(
            target_checkpoint, draft_checkpoint, opts, (target or target_checkpoint.folder, called), notes, ranks
        )
    if opts.trim is not None and (ranks is None or ranks.drafts or method.every_rank):
        draft_checkpoint, kept = trim.trimmed(
            target_checkpoint, draft_checkpoint or target_checkpoint, opts, family, notes, ranks, method.every_rank
        )
    return draft_checkpoint, kept


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


def _no_draft(options: Options, target: object) -> str:
    return f"strategy {options.strategy!r} needs a draft checkpoint for {target}: pass {option('draft')}"


def _within(checkpoint: Checkpoint, context: int) -> Checkpoint:
    """Limit a checkpoint to `context` positions: no draft is longer than the target's text."""
    if checkpoint.config.max_context <= context:
        return checkpoint
    return replace(checkpoint, config=replace(checkpoint.config, max_context=context))


def _fitted(
    target: Checkpoint,
    draft: Checkpoint,
    opts: Options,
    names: tuple[object, object],
    notes: Notes,
    ranks: dist.Ranks | None,
) -> Checkpoint:
    """Cut the draft's head to the target's ids, of equal or padded sizes if both have the same tokens. A diffusion
    drafter may have extra tokens, such as a mask; ids after the target's are cut too. With other tokens the draft gets
    a translation, if the strategy can use it, and raises ValueError if not. `names`: what the user called them."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    if target.tokens.equal(draft.tokens):
        return _cut(replace(draft, shared=target.tokens), min(sizes))
    its, own = target.vocabulary, draft.vocabulary
    if its is not None and own is not None and not draft.config.causal and its.items() <= own.items():
        return _cut(draft, min(sizes) if len(its) == len(own) else min(*sizes, max(its.values()) + 1))
    if its is not None and own is not None and its != own:
        differ = (
            f"target and draft have different tokenizers ({names[0]} has {len(its)} tokens, {names[1]} has {len(own)}; "
            "the tokens differ)"
        )
        return _translated(target, draft, opts, differ, notes, ranks)
    if sizes[0] != sizes[1] and (its is None or own is None):
        raise ValueError(
            f"target and draft have vocabularies of {sizes[0]} and {sizes[1]} ids, and without a tokenizer in both "
            "folders specker cannot check that one pads the other: use a draft of the target's own family"
        )
    return _cut(draft, min(sizes))  # ids that only the padded draft has must never be drafted


def _translated(
    target: Checkpoint, draft: Checkpoint, opts: Options, differ: str, notes: Notes, ranks: dist.Ranks | None
) -> Checkpoint:
    """A draft that reads the target's text in ids of its own, with only the rows of shared tokens in its head. `differ`
    begins the sentences of a refusal. Raises ValueError where that cannot be, and for too few shared tokens."""
    other = "use a draft of the target's own family"
    if not strategies.of(opts).translates or not draft.config.causal:
        raise ValueError(f"{differ}: {other}")
    if ranks is not None:
        raise ValueError(f"{differ}, and with {option('tp')} a draft cannot read its own tokens: {other}")
    if draft.config.pard_token is not None:
        raise ValueError(f"{differ}, and a PARD model cannot draft from changed text: {other}")
    if draft.config.layer.recurrent:
        raise ValueError(f"{differ}, and a draft with recurrent layers cannot read changed text again: {other}")
    sizes, free = (target.config.vocab_size, draft.config.vocab_size), opts.width == 1
    found = Translation.between(target.tokens, draft.tokens, sizes, free)
    if found.share < LEAST or len(found.ids) <= opts.width:
        raise ValueError(f"{differ}, and only {len(found.ids)} of the draft's are the target's, too: {other}")
    notes["draft_tokens"] = found.sentence
    if free or opts.trim is not None:
        return replace(_cut(draft, min(sizes[1], len(found.draft.texts))), translation=found)
    head = draft.weights.head
    rows = head[found.rows.to(head.device)]
    return replace(draft, weights=replace(draft.weights, head=rows), translation=found)


def _cut(draft: Checkpoint, rows: int) -> Checkpoint:
    head = draft.weights.head
    return draft if rows == len(head) else replace(draft, weights=replace(draft.weights, head=head[:rows]))


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


def usual_rounding(dtype: str | torch.dtype | None, device: torch.device) -> str | None:
    """What `--draft-quantize` is if it is not given (see `checkpoint.read`), for a run with `--dtype dtype`. Products
    with int8 read half the bytes of bfloat16 and take nearly as good drafts; drafts do not change the text."""
    return AUTO if dtype is None and device.type == "cpu" else None


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype:
    """The dtype of a name; default: bfloat16. Raises ValueError."""
    if dtype is None:
        return torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name)


def _name(source: str | Path) -> str:
    path = Path(source).expanduser()
    return Path(os.path.abspath(path)).name if path.is_dir() else str(source)
