"""The strategies, as data: which checkpoints one needs, and how its drafter and its policy are composed."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specker.config import Keep, Options, Tree
from specker.runtime.autoregressive import AutoregressiveDrafter
from specker.runtime.cache import KVCache
from specker.runtime.checkpoint import Checkpoint
from specker.runtime.head import Head
from specker.runtime.loop import Drafter
from specker.runtime.model import Model
from specker.runtime.policy import Fixed, Policy
from specker.runtime.schedule import LayerParallel, Schedule
from specker.runtime.vocab_scores import VocabScores

SCRATCH = 256  # cache columns beyond the context: a verify pass of the largest tree
# Of 2, 3 and 4 the best mean over temperatures 0 and 0.7 on the bundled pair (bench/results), by less than the noise.
DRAFT_TOKENS = 4
VOCAB_KEEP = "0.25"
LAYER_PARALLEL = "4"  # the paper's recommendation


@dataclass(frozen=True)
class Strategy:
    bundled_draft: str | None  # which of the family drafts for the bundled target; None: no second checkpoint
    drafter: Callable[[Checkpoint, Tensor | None, Options], Drafter] | None
    """From that checkpoint and the ids of its head's rows, None for all; None: nothing is drafted."""


def _autoregressive(checkpoint: Checkpoint, token_ids: Tensor | None, options: Options) -> Drafter:
    model = Model(checkpoint)
    head = Head(model.head, model.norm[0], model.config.rms_norm_eps, token_ids)
    return AutoregressiveDrafter(model, allocate(model, options), head, width=shape(options)[0])


def _layer_parallel(checkpoint: Checkpoint, token_ids: Tensor | None, options: Options) -> Drafter:
    schedule = Schedule.parse(options.layer_parallel or LAYER_PARALLEL, checkpoint.config.num_layers)
    model = Model(checkpoint, packed=False)  # a group's weights are stacked instead
    cache = allocate(model, options)
    head = Head(model.head, model.norm[0], model.config.rms_norm_eps, token_ids)
    parallel = LayerParallel(model, cache, schedule)
    return AutoregressiveDrafter(model, cache, head, shape(options)[0], parallel, options.calibrate or "every")


STRATEGIES = {
    "ar": Strategy(None, None),
    "draft": Strategy("code-draft", _autoregressive),
    "easyspec": Strategy("code-draft-deep", _layer_parallel),
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


def policy(options: Options) -> Policy:
    """A request's own policy, fresh: what one learns from a prompt does not leak into the next."""
    width, depth = shape(options)
    return Fixed(width * depth if options.draft_tokens is None else options.draft_tokens, depth)


def allocate(model: Model, options: Options) -> KVCache:
    """A cache for the model's whole context and a round's scratch columns."""
    capacity = model.config.max_context + SCRATCH
    return KVCache(model.config, capacity, dtype=model.dtype, device=model.device, page_size=options.page_size)
