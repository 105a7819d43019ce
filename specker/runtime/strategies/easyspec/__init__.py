"""Strategy `easyspec`: a small model drafts with groups of its layers side by side (EasySpec, arXiv 2502.02493).

A schedule is an ordered list of groups of neighbouring layers. The layers of a group all attend from the group's own
input h; their feed-forwards then follow one another:

    a_i = o_i(attention_i(norm_in_i(h)))      i = 0..N-1, in one batch
    h   = h + a_i;  h = h + mlp_i(norm_post_i(h))

The K/V of a group of several layers is "fuzzy": layers in sequence would write other values. Bonus calibration drops
it: the next round's first drafting pass runs the accepted tokens and the target's own token through the layers in
sequence. One of d drafting passes is exact and d - 1 are fuzzy. A group of one layer is exact. To measure what this is
worth, --calibrate keeps the fuzzy K/V of accepted tokens, always or after rounds without a refused token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specker.fields import check_fields, opt, option
from specker.options import STORED, Options, Tree
from specker.runtime.strategies.base import DraftContext, shaped
from specker.runtime.strategies.draft import SmallModel, made
from specker.torchrun import world_size

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Opened
    from specker.runtime.strategies.model_drafter import AutoregressiveDrafter

WIDTH = 4  # layers of a group, as the paper recommends
TREE = Tree(12, 5)  # the paper's
Groups = int | tuple[tuple[int, ...], ...]  # a group's width, or the layers of every group


def groups(value: Any) -> Groups:
    """A group's width, `4`, or all groups, `[[0],[1,2,3],[4]]`: every layer once, in order."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if type(value) is int and value >= 1:
        return value
    lists = isinstance(value, list) and value and all(isinstance(group, list) and group for group in value)
    if not lists or any(type(n) is not int for group in value for n in group):
        raise ValueError(
            f"{option('layer_parallel')} must be a width (4) or all groups ([[0],[1,2],[3]]), got {text!r}"
        )
    if (order := [n for group in value for n in group]) != list(range(len(order))):
        raise ValueError(f"{option('layer_parallel')} must hold every layer from 0 on once and in order, got {text}")
    return tuple(map(tuple, value))


@dataclass(frozen=True)
class EasySpecOptions:
    layer_parallel: Groups | None = opt(
        None,
        f"layers side by side in a group, of the draft's layers but its first and its last one, or all groups, such as "
        f"[[0],[1,2,3],[4]] (default: {WIDTH}, or as many as there are)",
        "N|GROUPS",
        parse=groups,
    )
    calibrate: str = opt(
        "every",
        "after which rounds the K/V of accepted draft tokens is computed again with the layers in sequence: every one, "
        "those with a refused token (mismatch), or never",
        choices=("every", "mismatch", "never"),
    )

    def __post_init__(self) -> None:
        check_fields(self)


class EasySpec(SmallModel):
    name = "easyspec"
    summary = "a small model drafts with groups of its layers side by side"
    paper = "EasySpec (2502.02493)"
    options = EasySpecOptions
    needs_draft = True
    layouts = ("layer-parallel", "tensor", "both", "replicated")
    about_draft = "the small model of strategy draft has no layers to run side by side"

    def published(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        settings = {"layer_parallel": WIDTH, "calibrate": "every", "draft_quantize": STORED}
        return settings | ({} if shaped(given) else {"tree": TREE})

    def with_draft(self, options: Options, draft: Opened) -> Options:
        from specker.runtime.strategies.easyspec.layer_groups import Schedule

        if draft.config.pard_token is not None:
            raise ValueError(
                f"a PARD model drafts in one pass, and easyspec shortens many: use {option('strategy', 'draft')}"
            )
        own: EasySpecOptions = options.own
        Schedule.of(own.layer_parallel, draft.config.num_layers)  # refuses what these layers cannot meet
        divided = options.layout in ("layer-parallel", "both") and options.draft_ranks != 1
        if own.calibrate != "every" and divided and (options.tp or world_size() // options.dp) > 1:
            asked = option("calibrate", own.calibrate)
            raise ValueError(f"{asked} needs {option('draft_ranks', 1)}: each rank has the fuzzy K/V of its own layers")
        return options

    def drafter(self, context: DraftContext) -> AutoregressiveDrafter:
        from specker.runtime.strategies.easyspec.layer_groups import LayerParallel, Schedule

        own: EasySpecOptions = context.options.own
        assert context.draft is not None
        schedule = Schedule.of(own.layer_parallel, context.draft.config.num_layers)
        model = context.draft_model()
        cache = context.allocate(model)
        if own.calibrate != "every" and context.draft.translation is not None:
            raise ValueError(f"{option('calibrate', own.calibrate)} needs a draft with the target's tokenizer")
        owners = context.ranks if context.options.layout in ("layer-parallel", "both") else None
        parallel = LayerParallel(model, cache, schedule, owners and owners.drafting, own.calibrate)
        return made(context, model, cache, context.depth(self), parallel)
