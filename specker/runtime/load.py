"""Checkpoints -> an Engine: what may be asked for, what fits together, what is trimmed, what the memory holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specker import zoo
from specker.config import DTYPES, Keep, Options, Tree, from_kwargs
from specker.runtime import dist, vocab_scores
from specker.runtime.engine import Engine, room_of
from specker.runtime.head import Kept
from specker.runtime.model.checkpoint import WHOLE, Checkpoint
from specker.runtime.model.checkpoint import load as load_checkpoint
from specker.runtime.model.config import CheckpointError
from specker.runtime.strategies import STRATEGIES, VOCAB_KEEP, VOCAB_TEXT, default_keep, shape


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    strategy: str = "draft",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Engine:
    """An Engine from checkpoints: local folders or hub ids in Hugging Face format, the bundled family by default.

    `dtype` is a torch dtype or one of float32, bfloat16, float16, float64: float32 by default on a CPU, bfloat16 on a
    GPU. `options` are the fields of `specker.config.Options`. Raises TypeError for an unknown option and ValueError
    (CheckpointError) for a checkpoint or a combination that cannot be run, saying why.
    """
    opts: Options = from_kwargs(Options, {"strategy": strategy, **options})
    where = dist.own_device(_device(device))
    ranks = dist.join(opts, where)
    kind = _dtype(dtype, where)
    parts = STRATEGIES[opts.way]
    if draft is not None and parts.bundled_draft is None:
        raise ValueError(f"strategy {opts.strategy!r} uses no draft checkpoint: leave out --draft")
    dummy = opts.load == "dummy"
    notes: dict[str, str] = {}
    if dummy and target is not None and draft is None and parts.bundled_draft is not None:
        draft = target
        notes["draft_shape"] = f"no --draft was given, so the draft has the shape of {_name(target)}"
    if target is not None and draft is None and parts.bundled_draft is not None:
        raise ValueError(f"strategy {opts.strategy!r} needs a draft checkpoint for {target}: pass --draft")
    if target is None and draft is not None:
        raise ValueError("--draft without --target: the bundled target has its own draft")
    target_source = zoo.path("code-target") if target is None else target
    main = load_checkpoint(
        target_source,
        dtype=kind,
        device=where,
        max_context=opts.max_context,
        random=0 if dummy else None,
        part=WHOLE if ranks is None else ranks.part,
        whole_head=parts.by_itself,
    )
    if ranks is not None:
        ranks.same("target", dist.fingerprint(main.folder))
    side = None
    draft_source = zoo.path(parts.bundled_draft) if draft is None and parts.bundled_draft is not None else draft
    if draft_source is not None and (ranks is None or ranks.drafts):
        side = load_checkpoint(
            draft_source,
            dtype=kind,
            device=where,
            bidirectional=None if parts.causal else True,
            random=1 if dummy else None,
        )
        if ranks is not None:
            ranks.same("draft", dist.fingerprint(side.folder), drafters=True)
        side = _within(side, main.config.max_context)
        if parts.causal and not side.config.causal:
            raise ValueError(
                f"{draft_source} is a bidirectional drafter; strategy {opts.strategy!r} needs a causal one"
            )
        if opts.shifted_logits is not None:
            side = replace(side, config=replace(side.config, shifted_logits=opts.shifted_logits == "yes"))
        ids = min(side.config.vocab_size, main.config.vocab_size)
        ids -= opts.acceptance is not None  # one that is no child's, to disagree with
        if opts.tree and Tree.parse(opts.tree).width > ids:
            raise ValueError(f"--tree {opts.tree} is wider than the vocabulary")
        side = _same_vocabulary(main, side, dummy)
    kept = None
    if opts.exit_layer is not None and opts.exit_layer >= main.config.num_layers:
        raise ValueError(f"--exit-layer must be below the target's {main.config.num_layers} layers")
    if parts.by_itself and main.config.num_layers < 2:
        raise ValueError(f"strategy {opts.strategy!r} needs a target of at least 2 layers")
    if opts.trimmed and (ranks is None or ranks.drafts or parts.by_itself):
        if opts.vocab_scores is None and target is not None and not dummy:
            raise ValueError(
                f"strategy {opts.strategy!r} needs --vocab-scores for {target}: python -m specker.calibrate makes them"
            )
        side, kept = _trimmed(main, side or main, opts, target is None)
    names = [_name(target_source), None if draft_source is None else _name(draft_source)]
    context, lowered = room_of(main, side, opts).sized(opts.max_context)
    if ranks is not None:
        context = ranks.least(context)
        if context < main.config.max_context:
            lowered = lowered or f"the context is {context} positions: another rank's memory holds no more"
    if lowered is not None:
        notes["context"] = lowered
        main, side = _within(main, context), None if side is None else _within(side, context)
    with room_of(main, side, opts).allocating():
        return Engine(main, side, opts, where, kind, names[0] or "", names[1], kept, notes, ranks)


def _within(checkpoint: Checkpoint, context: int) -> Checkpoint:
    """With no more positions than `context`: no draft is longer than the target's text."""
    if checkpoint.config.max_context <= context:
        return checkpoint
    return replace(checkpoint, config=replace(checkpoint.config, max_context=context))


def _trimmed(target: Checkpoint, draft: Checkpoint, options: Options, bundled: bool) -> tuple[Checkpoint, Kept]:
    """The draft with the kept rows of its head alone, copied once and contiguous, and which they are: the fixed ones
    ascending, then those that follow the text. Its embedding stays whole: any token may stand in the text. Random
    weights that come without scores know no frequent tokens: the first ids are as good as any."""
    vocab, tokens = target.config.vocab_size, _vocabulary(target)
    if options.vocab_scores is None and not bundled:
        scores = vocab_scores.VocabScores(torch.arange(vocab), None)
        keep = Keep.parse(options.vocab_keep or VOCAB_KEEP)
    else:
        path = options.vocab_scores or zoo.vocab_scores()
        scores = vocab_scores.read(path)
        scores.check(vocab, None if tokens is None else vocab_scores.tokenizer_hash(target.tokenizer), path)
        keep = Keep.parse(options.vocab_keep) if options.vocab_keep else default_keep(scores)
    whole = draft.weights.head
    rows = min(vocab, len(whole))  # a draft may know fewer ids than a padded target
    special = vocab_scores.special_ids(target.tokenizer) if tokens is not None else set()
    fixed = scores.kept(keep, {*target.config.eos_ids, *special}, rows)
    text = VOCAB_TEXT if options.vocab_text is None else options.vocab_text
    if len(fixed) + text >= rows:  # nothing is left to follow
        fixed, text = (torch.arange(rows), 0) if text else (fixed, 0)
    also = scores.kept(Keep(rows=len(fixed) + text), fixed.tolist(), rows)  # the next in rank, until there is a text
    spare = scores.ranked(also[torch.isin(also, fixed, invert=True)]).flip(0)
    width = shape(options)[0]
    ids = torch.cat((fixed, spare)).to(whole.device)
    if width > len(ids):
        raise ValueError(f"--tree {options.tree} is wider than the {len(ids)} rows that --vocab-keep leaves")
    head = whole[ids]
    return replace(draft, weights=replace(draft.weights, head=head)), Kept(ids, len(spare), whole if text else None)


def _same_vocabulary(target: Checkpoint, draft: Checkpoint, dummy: bool) -> Checkpoint:
    """The draft with its head cut to the target's ids. Refused unless the two speak of the same tokens: the same size
    or one padded, and the same tokenizer where both have one. A diffusion drafter may have further tokens of its own,
    such as its mask: those behind the target's are cut off too. Random weights speak of no tokens: only sizes count."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    tokens = [_vocabulary(checkpoint) for checkpoint in (target, draft)]
    ours, theirs = tokens
    if ours is not None and theirs is not None and not draft.config.causal and ours.items() <= theirs.items():
        rows = min(sizes) if len(ours) == len(theirs) else min(*sizes, max(ours.values()) + 1)
        return _cut(draft, rows)
    if dummy and ours != theirs:
        tokens = [None, None]
    elif ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"target and draft have different tokenizers ({target.folder} has {len(tokens[0] or {})} tokens, "
            f"{draft.folder} has {len(tokens[1] or {})}, not the same ones): use a draft of the target's own family"
        )
    if sizes[0] != sizes[1] and None in tokens:
        raise ValueError(
            f"target and draft have vocabularies of {sizes[0]} and {sizes[1]} ids, and without one tokenizer in "
            "both folders it cannot be told whether one is the other padded: use a draft of the target's own family"
        )
    return _cut(draft, min(sizes))  # ids that only the padded draft has must never be drafted


def _cut(draft: Checkpoint, rows: int) -> Checkpoint:
    head = draft.weights.head
    return draft if rows == len(head) else replace(draft, weights=replace(draft.weights, head=head[:rows]))


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    try:
        return checkpoint.tokenizer.get_vocab()
    except CheckpointError:
        return None


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {str(device)!r}: use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device} is not supported: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but this torch finds no CUDA GPU: use --device cpu")
    return device


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name)


def _name(source: str | Path) -> str:
    path = Path(source)
    return path.name if path.is_dir() else str(source)
