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
from specker.runtime.head import Head
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
LAYER_PARALLEL = "4"  # the paper's recommendation


@dataclass(frozen=True)
class Strategy:
    bundled_draft: str | None  # which of the family drafts for the bundled target; None: no second checkpoint
    drafter: Callable[[Checkpoint, Tensor | None, Options], Drafter] | None
    """From that checkpoint and the ids of its head's rows, None for all; None: nothing is drafted, or by the target."""
    by_itself: bool = False  # the target drafts with its own first layers


def _autoregressive(checkpoint: Checkpoint, token_ids: Tensor | None, options: Options) -> Drafter:
    model = Model(checkpoint)
    head = Head(model.head, model.norm, model.config.rms_norm_eps, token_ids)
    return AutoregressiveDrafter(model, allocate(model, options), head, width=shape(options)[0])


def _layer_parallel(checkpoint: Checkpoint, token_ids: Tensor | None, options: Options) -> Drafter:
    schedule = Schedule.parse(options.layer_parallel or LAYER_PARALLEL, checkpoint.config.num_layers)
    model = Model(checkpoint, packed=False)  # a group's weights are stacked instead
    cache = allocate(model, options)
    head = Head(model.head, model.norm, model.config.rms_norm_eps, token_ids)
    parallel = LayerParallel(model, cache, schedule)
    return AutoregressiveDrafter(model, cache, head, shape(options)[0], parallel, options.calibrate or "every")


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


def early_exit(model: Model, cache: KVCache, head: Tensor | None, token_ids: Tensor | None) -> EarlyExitDrafter:
    """The target as its own drafter, with the kept rows `head` [K, E] of its head or all of it."""
    weight = model.head if head is None else pack(head)
    return EarlyExitDrafter(model, cache, Head(weight, model.norm, model.config.rms_norm_eps, token_ids))


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
