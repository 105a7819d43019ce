"""Strategy `draft`: a small model drafts (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

It drafts a chain token by token, or a tree level by level: each level keeps the `width` nodes with the largest
cumulative probability

    score(child) = score(parent) + log q(child | path)

as in EAGLE-2 (arXiv 2406.16858) and EasySpec. Above temperature 0, q is perturbed with the target's own noise
(runtime/round/lm_head.py).

A model whose config.json names a `pard_token` drafts the whole chain in one pass (PARD, arXiv 2504.18583; pard.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specker.fields import option
from specker.options import STORED, Options
from specker.runtime.strategies.base import DraftContext, Strategy, shaped

if TYPE_CHECKING:
    from specker.checkpoints.checkpoint import Checkpoint, Opened
    from specker.model.cache import KVCache
    from specker.model.decoder import Model
    from specker.runtime.round.drafter import Drafter
    from specker.runtime.strategies.model_drafter import AutoregressiveDrafter, DraftLayers


class SmallModel(Strategy):
    name = "draft"
    summary = "a small model drafts a chain or a tree"
    paper = "Leviathan et al. (2211.17192), Chen et al. (2302.01318), PARD (2504.18583)"
    needs_draft = True
    translates = True
    layouts: tuple[str, ...] = ("replicated", "tensor")

    def published(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Chen et al. draft four tokens."""
        return {"draft_quantize": STORED} | ({} if shaped(given) else {"draft_tokens": 4})

    def with_draft(self, options: Options, draft: Opened) -> Options:
        if draft.config.pard_token is not None and options.tree is not None:
            raise ValueError(f"a PARD model drafts a chain in one pass: {option('tree')} does not apply")
        return options

    def stepwise(self, draft: Checkpoint | None) -> bool:
        return draft is None or draft.config.pard_token is None

    def drafter(self, context: DraftContext) -> Drafter:
        model = context.draft_model()
        if model.config.pard_token is not None:
            from specker.runtime.strategies.draft.pard import ParallelDrafter

            note_mode(context)
            return ParallelDrafter(model, context.allocate(model), context.head(model), context.depth(self))
        return made(context, model, context.allocate(model), context.depth(self))


def made(
    context: DraftContext, model: Model, cache: KVCache, depth: int, layers: DraftLayers | None = None
) -> AutoregressiveDrafter:
    """The drafter of a small model, in the target's ids or in its own. depth, layers: of `AutoregressiveDrafter`."""
    head, width = context.head(model), context.options.width
    assert context.draft is not None
    if (translation := context.draft.translation) is not None:
        from specker.runtime.strategies.draft.translated import TranslatedDrafter

        return TranslatedDrafter(translation, model, cache, head, width, depth, layers)
    from specker.runtime.strategies.model_drafter import AutoregressiveDrafter

    return AutoregressiveDrafter(model, cache, head, width, depth, layers)


def note_mode(context: DraftContext) -> None:
    """Say so if a PARD-2 model (arXiv 2605.08632) drafts in its target-independent mode: the projection that reads the
    target's hidden states is in a file of its own, which is not read."""
    from specker.checkpoints.parse import read_json

    assert context.draft is not None
    raw = read_json(context.draft.folder / "config.json", required=False)
    if raw.get("spd_type") == "pard2" or raw.get("pard2"):
        context.notes["draft_mode"] = (
            "drafting with a PARD-2 draft without its hidden states of the target, which is its weaker mode"
        )
