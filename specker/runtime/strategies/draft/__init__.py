"""Strategy `draft`: a small model drafts (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

It drafts a chain token by token, or a tree level by level: each level keeps the `width` nodes with the largest
cumulative probability

    score(child) = score(parent) + log q(child | path)

as in EAGLE-2 (arXiv 2406.16858) and EasySpec. Above temperature 0, q is perturbed with the target's own noise
(runtime/round/lm_head.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specker.runtime.strategies.base import DraftContext, Strategy

if TYPE_CHECKING:
    from specker.model.cache import KVCache
    from specker.model.decoder import Model
    from specker.runtime.strategies.draft.drafter import AutoregressiveDrafter, DraftLayers


class SmallModel(Strategy):
    name = "draft"
    summary = "a small model drafts a chain or a tree"
    paper = "Leviathan et al. (2211.17192), Chen et al. (2302.01318)"
    needs_draft = True
    translates = True

    def drafter(self, context: DraftContext) -> AutoregressiveDrafter:
        model = context.draft_model()
        return made(context, model, context.allocate(model), context.depth(self))


def made(
    context: DraftContext, model: Model, cache: KVCache, depth: int, layers: DraftLayers | None = None
) -> AutoregressiveDrafter:
    """The drafter of a small model, in the target's ids or in its own. depth, layers: of `AutoregressiveDrafter`."""
    parts = model, cache, context.head(model), context.options.width, depth, layers
    assert context.draft is not None
    if (translation := context.draft.translation) is not None:
        from specker.runtime.strategies.draft.translated import TranslatedDrafter

        return TranslatedDrafter(translation, *parts)
    from specker.runtime.strategies.draft.drafter import AutoregressiveDrafter

    return AutoregressiveDrafter(*parts)
