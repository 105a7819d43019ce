"""The strategies, as data: which checkpoints one needs, and how its drafter and its policy are composed."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specker.config import Keep, Options, Tree
from specker.kernels.row_linear import pack
from specker.runtime.autoregressive import AutoregressiveDrafter
from specker.runtime.cache import KVCache
from specker.runtime.checkpoint import Checkpoint
from specker.runtime.early_exit import EarlyExitDrafter
from specker.runtime.head import Head, Kept
from specker.runtime.loop import Drafter
from specker.runtime.model import Model
from specker.runtime.policy import (
    LONGEST,
    DraftAndVerify,
    DynamicExit,
    Fixed,
    PlusMinusOne,
    Policy,
    eligible_layers,
)
from specker.runtime.schedule import LayerParallel, Schedule
from specker.runtime.vocab_scores import VocabScores

SCRATCH = 256  # cache columns beyond the context: a verify pass of the largest tree
# Of 2, 3 and 4 the best mean over temperatures 0 and 0.7 on the bundled pair (bench/results), by less than the noise.
DRAFT_TOKENS = 4
VOCAB_KEEP = "0.5"
VOCAB_TEXT = 256
LAYER_PARALLEL = "4"  # the paper's recommendation


@dataclass(frozen=True)
class Strategy:
    bundled_draft: str | None  # which of the family drafts for the bundled target; None: no second checkpoint
    drafter: Callable[[Checkpoint, Kept | None, Options], Drafter] | None
    """From that checkpoint and the rows of its head, None for all; None: nothing is drafted, or by the target."""
    by_itself: bool = False  # the target drafts with its own first layers


def _autoregressive(checkpoint: Checkpoint, kept: Kept | None, options: Options) -> Drafter:
    model = Model(checkpoint, pack_head=_packable(kept))
    return AutoregressiveDrafter(model, allocate(model, options), _head(model, kept), width=shape(options)[0])


def _layer_parallel(checkpoint: Checkpoint, kept: Kept | None, options: Options) -> Drafter:
    schedule = Schedule.parse(options.layer_parallel or LAYER_PARALLEL, checkpoint.config.num_layers)
    # a group's weights are stacked instead of packed
    model = Model(checkpoint, packed=False, pack_head=_packable(kept))
    cache = allocate(model, options)
    parallel = LayerParallel(model, cache, schedule)
    return AutoregressiveDrafter(
        model, cache, _head(model, kept), shape(options)[0], parallel, options.calibrate or "every"
    )


def _packable(kept: Kept | None) -> bool:
    """Rows that follow the text are written in place, which a packed head does not allow."""
    return kept is None or not kept.text


def _head(model: Model, kept: Kept | None) -> Head:
    return Head(model.head, model.norm, model.config.rms_norm_eps, kept)


STRATEGIES = {
    "ar": Strategy(None, None),
    "draft": Strategy("code-draft", _autoregressive),
    "easyspec": Strategy("code-draft-deep", _layer_parallel),
    "del": Strategy(None, None, by_itself=True),
}


def default_keep(scores: VocabScores) -> Keep:
    """All that another's file keeps; of our own, which ranks everything, the measured winner on the bundled pair."""
    return Keep(rows=len(scores.ids)) if scores.counts is None else Keep.parse(VOCAB_KEEP)


def shape(options: Options) -> tuple[int, int]:
    """(width, depth) of what is drafted; a chain is a tree of width 1."""
    if options.tree is not None:
        tree = Tree.parse(options.tree)
        return tree.width, tree.depth
    return 1, DRAFT_TOKENS if options.draft_tokens is None else options.draft_tokens


def early_exit(model: Model, cache: KVCache, rows: Tensor | None, kept: Kept | None) -> EarlyExitDrafter:
    """The target as its own drafter, with the kept `rows` [K, E] of its head or all of it."""
    if rows is None:
        head = _head(model, None)
    else:
        weight = pack(rows) if _packable(kept) else rows
        head = Head(weight, model.norm, model.config.rms_norm_eps, kept)
    return EarlyExitDrafter(model, cache, head)


def policy(options: Options, layers: int, head_cost: float) -> Policy:
    """A request's own policy, fresh: what one learns from a prompt does not leak into the next. `layers` of the target;
    `head_cost` of a draft step's LM head, in those layers."""
    width, depth = shape(options)
    name = options.policy or ("del" if options.way == "del" else "fixed")
    if name.startswith("del"):
        return DynamicExit(eligible_layers(layers), layers, head_cost, by_length=name == "del-length")
    exit = (options.exit_layer or max(1, layers // 2)) if options.way == "del" else 0
    rule = {"fixed": Fixed, "plus-minus-one": PlusMinusOne, "draft-and-verify": DraftAndVerify}[name]
    if name == "draft-and-verify" and options.draft_tokens is None:
        depth = LONGEST + 1  # confidence ends a draft, not a number
    return rule(width * depth if options.draft_tokens is None else options.draft_tokens, depth, exit)


def allocate(model: Model, options: Options) -> KVCache:
    """A cache for the model's whole context and a round's scratch columns."""
    capacity = model.config.max_context + SCRATCH
    return KVCache(model.config, capacity, dtype=model.dtype, device=model.device, page_size=options.page_size)
