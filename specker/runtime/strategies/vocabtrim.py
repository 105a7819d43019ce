"""Strategy `vocabtrim`: the drafter's LM head keeps only the rows of frequent tokens (VocabTrim, arXiv 2506.22694).

It trims the head of another strategy's drafter: `+vocabtrim` after that strategy's name. Alone it means
draft+vocabtrim. The paper's metric is the memory-bound speed-up

    MBSU = tau / (c gamma + 1)

with tau the acceptance length, c the bytes of a draft step over those of a target step and gamma the draft steps per
round. Noise depends on a token's id in the full vocabulary, so trimming can cost acceptance but never changes the text.
Beyond the paper, a few rows follow the text (runtime/head.py).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specker.config import Options
from specker.flags import opt, settle
from specker.runtime import vocab_scores
from specker.runtime.head import Kept
from specker.runtime.model.checkpoint import Checkpoint
from specker.runtime.stats import Stats
from specker.runtime.vocab_scores import Keep, VocabScores
from specker.zoo import Family

if TYPE_CHECKING:  # engine.py imports this package
    from specker.runtime.engine import Engine

TRIM = "vocabtrim"
SUMMARY = "a smaller LM head for the drafter of another strategy (alone: of draft)"
PAPER = "VocabTrim (2506.22694)"
NEEDS = "token frequencies"
VOCAB_KEEP = 0.125  # of the rows; the measured winner on the bundled code pair


@dataclass(frozen=True)
class TrimOptions:
    vocab_scores: str | None = opt(
        None,
        "file with token frequencies (default: the bundled one for the target); see python -m specker.calibrate",
        "FILE",
    )
    vocab_keep: Keep | None = opt(
        None,
        "rows of the draft's head to keep: 8192, 0.25 of them, or coverage:0.98 of the counted tokens (default: 0.125, "
        "2048 rows for SmolLM2-135M, or all ids of a file without counts)",
        "ROWS|X|coverage:X",
        parse=Keep.parse,
    )
    vocab_text: int = opt(256, "further rows for tokens of the text that are not in the kept rows; 0: none", least=0)

    def __post_init__(self) -> None:
        settle(self)


def default_keep(scores: VocabScores, family: Family | None) -> Keep:
    """All ids of a file without counts; else the fraction that was fastest with the target."""
    if scores.counts is None:
        return Keep(rows=len(scores.ids))
    return Keep(fraction=VOCAB_KEEP if family is None else family.vocab_keep)


def check(options: Options, target: object, family: Family | None) -> None:
    """Raise ValueError if there are no scores for the target; random weights need none."""
    if options.trim.vocab_scores is None and family is None and options.load != "dummy":
        raise ValueError(
            f"strategy {options.strategy!r} needs --vocab-scores for {target}: run python -m specker.calibrate"
        )


def trimmed(
    target: Checkpoint, draft: Checkpoint, options: Options, family: Family | None, notes: dict[str, str]
) -> tuple[Checkpoint, Kept]:
    """(draft with only the kept rows of its head, one contiguous copy; the kept rows: fixed ids ascending, then those
    that follow the text). The embedding stays whole, because the text may contain any token. Random weights without a
    score file keep the first ids. Adds a remark to `notes` if rows are kept that the file never counted. Raises
    ValueError if the scores do not match the target."""
    trim: TrimOptions = options.trim
    vocab, has_tokenizer = target.config.vocab_size, target.vocabulary is not None
    if (path := trim.vocab_scores or (None if family is None else family.vocab_scores)) is None:
        scores = VocabScores(torch.arange(vocab), None)
        keep = trim.vocab_keep or Keep(fraction=VOCAB_KEEP)
    else:
        scores = vocab_scores.read(path)
        scores.check(vocab, vocab_scores.tokenizer_hash(target.tokenizer) if has_tokenizer else None, path)
        keep = trim.vocab_keep or default_keep(scores, family)
    whole = draft.weights.head
    rows = min(vocab, len(whole))  # a draft may know fewer ids than a padded target
    special = vocab_scores.special_ids(target.tokenizer) if has_tokenizer else set()
    always = {*target.config.eos_ids, *special}
    fixed = scores.kept(keep, always, rows)
    unseen = [i for i in fixed[torch.isin(fixed, scores.ids, invert=True)].tolist() if i not in always]
    if unseen:
        notes["vocab_keep"] = (
            f"the score file ranks only {len(scores.ids)} ids; {len(unseen)} of the kept rows are ids it never counted"
        )
    text = trim.vocab_text
    if len(fixed) + text >= rows:  # nothing is left to follow
        fixed, text = (torch.arange(rows), 0) if text else (fixed, 0)
    also = scores.kept(Keep(rows=len(fixed) + text), fixed.tolist(), rows)  # next by rank, until a text replaces them
    spare = scores.ranked(also[torch.isin(also, fixed, invert=True)]).flip(0)
    ids = torch.cat((fixed, spare)).to(whole.device)
    if options.width > len(ids):
        raise ValueError(f"--tree {options.tree} is wider than the {len(ids)} rows that --vocab-keep leaves")
    head = whole[ids]
    return replace(draft, weights=replace(draft.weights, head=head)), Kept(ids, len(spare), whole if text else None)


def report(engine: "Engine", stats: Stats) -> dict[str, Any]:
    """What trimming saved and cost, by `stats` of a run; {} if the head is not trimmed."""
    if engine.kept is None or engine.draft is None:
        return {}
    return {
        "kept_rows": len(engine.kept.ids),
        "text_rows": engine.kept.text,
        "vocab_size": engine.target.config.vocab_size,
        "coverage": stats.kept / max(1, stats.tokens),
        "rounds_lost": stats.lost,
        "head_bytes_per_draft_step": engine.draft.weights.head.nbytes,
        "mbsu": mbsu(engine, stats),
    }


def mbsu(engine: "Engine", stats: Stats) -> float:
    """The memory-bound speed-up, from the counted rounds and the models' sizes; a model, not a measurement."""
    if engine.draft is None:
        return 1.0
    drafted = engine.draft.layer_bytes
    if stats.exits:  # drafted by the target's first layers
        mean = sum(n * times for n, times in stats.exits.items()) / sum(stats.exits.values())
        drafted *= mean / engine.target.config.num_layers
    drafted += engine.draft.weights.head.nbytes
    whole = engine.target.layer_bytes + engine.target.weights.head.nbytes
    tree = engine.options.tree
    gamma = tree.depth if tree is not None and tree.width > 1 else stats.drafted / max(1, stats.rounds)
    if stats.found:  # a pass guesses a whole block
        gamma = stats.diffusion["passes"]
    return stats.acceptance_length / (drafted / whole * gamma + 1)
