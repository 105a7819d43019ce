"""The choice of the rows that a trimmed head keeps, and what trimming saved."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specker import zoo
from specker.checkpoints.checkpoint import Checkpoint
from specker.checkpoints.translation import Translation
from specker.fields import option
from specker.options import Options, VocabKeep
from specker.runtime.control.stats import Stats
from specker.runtime.notes import Notes
from specker.runtime.ranks.dist import Ranks
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.vocabtrim import LEARN, TrimOptions
from specker.runtime.strategies.vocabtrim import order as vocab_order
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.runtime.strategies.vocabtrim.counts import VocabCounts
from specker.runtime.strategies.vocabtrim.head import TrimmedHead
from specker.runtime.strategies.vocabtrim.scores import VocabScores
from specker.zoo import Family

VOCAB_KEEP = 0.125  # share of the rows; the fastest measured on the bundled code pair
# Without a score file the ranking is worse. For Qwen2.5's 151,936 ids a quarter of the rows covers 2 to 3% more of the
# text than an eighth. With a draft of 0.5B parameters that is worth more than the time that the rows take.
UNCOUNTED_KEEP = 0.25


class Ranking(NamedTuple):
    """Which rows to keep first."""

    scores: VocabScores
    keep: VocabKeep  # the default of `vocab_keep`
    source: str  # what the ranking comes from, for the user
    counts: VocabCounts | None = None  # where to count what the target writes


def default_keep(scores: VocabScores) -> VocabKeep:
    """All ids of a file without counts; else a fraction of the rows."""
    return VocabKeep(rows=len(scores.ids)) if scores.counts is None else VocabKeep(fraction=VOCAB_KEEP)


def bundled(tokenizer: str | None, family: Family | None) -> Path | None:
    """The bundled score file for a target whose tokenizer has this hash, or None. Counts are statistics of text, so a
    file serves every target with the tokenizer that it was counted with. Without a tokenizer: the family's file, if the
    target's embedding has shown that the target belongs to the family."""
    if tokenizer is None:
        return family.vocab_scores if family is not None and family.drafts else None
    files = (known.vocab_scores for known in zoo.FAMILIES)
    return next((path for path in files if vocab_scores.tokenizer_of(path) == tokenizer), None)


def ranking(
    target: Checkpoint,
    options: Options,
    family: Family | None,
    notes: Notes,
    ranks: Ranks | None,
) -> Ranking:
    """The ranking of the target's ids: by the score file, else by what was counted in earlier runs and then by the
    tokenizer. Arguments and errors are those of `trimmed`."""
    trim: TrimOptions = options.trim
    vocab, tokenizer = target.config.vocab_size, target.tokenizer_or_none
    digest = vocab_order.tokenizer_hash(target.tokens)
    if (path := trim.vocab_scores or bundled(digest, family)) is not None:
        scores = vocab_scores.read(path)
        scores.check(vocab, digest, path)
        return Ranking(scores, default_keep(scores), Path(path).name)
    if trim.vocab_keep is not None and trim.vocab_keep.coverage is not None:
        raise ValueError(
            f"{option('vocab_keep', 'coverage:X')} needs a score file ({option('vocab_scores')}); without one, keep a "
            "number of rows or a fraction"
        )
    order, counts = vocab_order.learnt(target.tokens, vocab), None
    source = "id" if tokenizer is None else "the tokenizer's order"
    if (learn := os.environ.get(LEARN) or "on") not in ("on", "off"):
        raise ValueError(f"the environment variable {LEARN} must be on or off, got {learn!r}")
    if learn == "on" and options.adapts and digest is not None and options.load != "dummy":
        counts = VocabCounts(digest, notes)
        order = counts.first(order)
        if counts.earlier:
            source = f"{counts.earlier.total():,} tokens of earlier runs"
    if ranks is not None:  # all must keep the same rows, but a rank may see other counts than rank 0
        order = order.to(ranks.device)
        drafting = ranks if options.base.every_rank else ranks.drafting
        assert drafting is not None
        order, counts = drafting.first(order).cpu(), counts if ranks.rank == 0 else None
    return Ranking(VocabScores(order, None), VocabKeep(fraction=UNCOUNTED_KEEP), source, counts)


def trimmed(
    head: LMHead,
    translation: Translation | None,
    target: Checkpoint,
    options: Options,
    family: Family | None,
    notes: Notes,
    ranks: Ranks | None,
) -> TrimmedHead:
    """A drafter's head with a contiguous copy of the kept rows: fixed ids ascending, then those that follow the text.
    `translation`: of a draft with another tokenizer. Of several ranks, those that draft call this. Adds remarks to
    `notes`: rows are kept that the score file never counted, or the counts of earlier runs cannot be read or written.
    Raises ValueError if a score file does not match the target, or if `vocab_keep` needs one."""
    trim: TrimOptions = options.trim
    scores, default, source, counts = ranking(target, options, family, notes, ranks)
    tokenizer, whole = target.tokenizer_or_none, head.weight
    rows = min(target.config.vocab_size, len(whole))  # a draft may know fewer ids than a padded target
    special = set() if tokenizer is None else vocab_scores.special_ids(tokenizer)
    always = {*target.config.eos_ids, *special}
    if translation is not None:  # from here on ids are the draft's
        rows = len(whole)
        scores = in_own_ids(scores, translation, trim.vocab_keep or default, trim.vocab_text, rows)
        shared = zip(translation.ids.tolist(), translation.rows.tolist(), strict=True)
        always = {own for n, own in shared if n in always}
    fixed = scores.kept(trim.vocab_keep or default, always, rows)
    unseen = [i for i in fixed[torch.isin(fixed, scores.ids, invert=True)].tolist() if i not in always]
    if unseen:
        counted = f"the score file counts only {len(scores.ids)} ids, so the draft head also has {len(unseen)} rows of"
        if trim.vocab_keep is None:
            notes.fact("vocab_keep", f"{counted} ids that it never counted")
        else:
            less = option("vocab_keep", len(scores.ids))
            notes["vocab_keep"] = f"{counted} ids that it never counted: {less} leaves them out"
    text = trim.vocab_text
    if len(fixed) + text >= rows:  # no other rows are left that could follow the text
        fixed, text = (torch.arange(rows, dtype=torch.int64, device="cpu"), 0) if text else (fixed, 0)
    also = scores.kept(
        VocabKeep(rows=len(fixed) + text), fixed.tolist(), rows
    )  # next by rank, until a text replaces them
    spare = scores.ranked(also[torch.isin(also, fixed, invert=True)]).flip(0)
    if translation is not None and not translation.free:  # rows that filled up the others
        fixed, spare = (x[torch.isin(x, translation.rows)] for x in (fixed, spare))
    ids = torch.cat((fixed, spare)).to(whole.device)
    if options.width > len(ids):
        tree = option("tree", options.tree)
        raise ValueError(f"{tree} is wider than the {len(ids)} rows that {option('vocab_keep')} leaves")
    return TrimmedHead(
        whole[ids],
        head.norm,
        head.eps,
        head.activations,
        head.cap,
        ids=ids,
        text=len(spare),
        whole=whole if text else None,
        ranking=source,
        translation=translation,
        counts=counts,
    )


def planned_bytes(target: Checkpoint, draft: Checkpoint | None, options: Options) -> int:
    """Bytes that `trimmed` will copy at most: the context is sized before drafters are made. 0 without trimming. Raises
    as `vocab_scores.read` does."""
    trim: TrimOptions | None = options.trim
    if trim is None:
        return 0
    head = (target if draft is None else draft).weights.head
    keep = trim.vocab_keep
    if keep is None and trim.vocab_scores is not None:
        keep = default_keep(vocab_scores.read(Path(trim.vocab_scores)))
    share = UNCOUNTED_KEEP if keep is None else keep.fraction
    rows = len(head) if share is None else math.ceil(share * len(head))
    if keep is not None and keep.rows is not None:
        rows = keep.rows
    return math.ceil(head.nbytes / len(head) * min(len(head), rows + trim.vocab_text))


def in_own_ids(scores: VocabScores, translation: Translation, keep: VocabKeep, text: int, rows: int) -> VocabScores:
    """A ranking of the target's ids for a draft with another tokenizer, which has `rows` ids: its tokens by how often
    they occur in the texts of the target's; without counts by the first such text. Ranks those that `keep` and `text`
    rows need; of a draft that writes shared tokens, these alone."""
    shared = dict(zip(translation.ids.tolist(), translation.rows.tolist(), strict=True))
    texts, free = translation.target.texts, translation.free
    most = keep.rows if keep.rows is not None else rows if keep.fraction is None else round(keep.fraction * rows)
    each = [1] * len(scores.ids) if scores.counts is None else scores.counts.tolist()
    found: dict[int, int] = {}
    for n, times in zip(scores.ids.tolist(), each, strict=True):
        own = [shared[n]] if n in shared else translation.read(texts[n], True) if free and n < len(texts) else []
        for token in own:
            found[token] = found.get(token, 0) + times
        if scores.counts is None and len(found) >= most + text:
            break
    ids, counts = torch.tensor([[*found], [*found.values()]], dtype=torch.int64, device="cpu")
    if scores.counts is not None:
        order = counts.sort(descending=True, stable=True).indices
        ids, counts = ids[order], counts[order]
    return VocabScores(ids, None if scores.counts is None else counts, rows)


def report(target: Checkpoint, draft: Checkpoint, head: TrimmedHead, options: Options, stats: Stats) -> dict[str, Any]:
    """What trimming saved and cost, by `stats` of a run. `draft`: the model that drafts, which may be the target."""
    return {
        "kept_rows": len(head.ids),
        "text_rows": head.text,
        "ranking": head.ranking,
        "vocab_size": target.config.vocab_size,
        "coverage": stats.kept / max(1, stats.tokens),
        "rounds_lost": stats.lost,
        "head_bytes_per_draft_step": head.weight.nbytes,
        "mbsu": mbsu(target, draft, head.weight.nbytes, options, stats),
    }


def mbsu(target: Checkpoint, draft: Checkpoint, head_bytes: int, options: Options, stats: Stats) -> float:
    """The memory-bound speed-up, from the counted rounds, the models' sizes and the bytes of the draft's head; a model,
    not a measurement."""
    drafted = draft.layer_bytes
    if stats.exits:  # drafted by the target's first layers
        mean = sum(n * times for n, times in stats.exits.items()) / sum(stats.exits.values())
        drafted *= mean / target.config.num_layers
    drafted += head_bytes
    whole = target.layer_bytes + target.weights.head.nbytes
    tree = options.tree
    gamma = tree.depth if tree is not None and tree.width > 1 else stats.drafted / max(1, stats.rounds)
    if stats.found:  # a pass guesses a whole block
        gamma = 1.0
    return stats.acceptance_length / (drafted / whole * gamma + 1)
