"""Drafters with one idea of their paper taken out, to measure what it is worth. No flag selects them.

with drafting_as(Uncalibrated):
    engine = specker.load(target, draft, strategy="easyspec")
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from specker.model.decoder import Final
from specker.model.prefill import prefill
from specker.runtime.control.policy import Budget
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.strategies import model_drafter
from specker.runtime.strategies.diffuspec import diffusion_drafter as diffuspec
from specker.runtime.strategies.diffuspec.diffusion_drafter import DiffusionDrafter
from specker.runtime.strategies.model_drafter import AutoregressiveDrafter, ModelDrafter


class Uncalibrated(AutoregressiveDrafter):
    """EasySpec without bonus calibration: the fuzzy K/V of accepted tokens stays. exact_len then also counts fuzzy
    columns, so rounds are placed by the host and no later request reuses the cache."""

    keeps_prefix = False

    def fits(self, length: int, budget: Budget) -> bool:
        return False

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        for slot, path in enumerate(accepted.paths):
            if path and draft.size:
                self.accept_fuzzy(draft, slot, path)

    def accept_fuzzy(self, draft: Draft, slot: int, path: list[int]) -> None:
        self.keep(draft, slot, path)


class ExactPrefix(DiffusionDrafter):
    """DiffuSpec that keeps no K/V between rounds: every pass runs over the whole text and the masks."""

    def prefill(self, slot: int, text: list[int]) -> None:
        pass

    def fits(self, length: int, budget: Budget) -> bool:
        return False

    def masked(self, texts: Any, n: int) -> Final:
        config, cache, depth = self.model.config, self.cache, len(self.model.layers)
        assert config.mask_token_id is not None
        kept = []
        for slot, text in enumerate(texts):
            cache.truncate(0, slot)
            # If the text exceeds the drafter's context, it sees only the end: a poor draft, but a valid one.
            whole = (self.in_vocabulary(text) + [config.mask_token_id] * n)[-self.limit :]
            hidden = prefill(self.model, cache, whole, (depth,), n + 1, chunk=len(whole), slot=slot)[depth]
            cache.truncate(min(len(text), len(whole)), slot)
            kept.append(hidden[-n - 1 : -1] if config.shifted_logits else hidden[-n:])
        return Final(torch.cat(kept))


@contextmanager
def drafting_as(kind: type[ModelDrafter]) -> Iterator[None]:
    """Engines that are loaded inside draft with `kind` where they would with the class that it derives from."""
    with ExitStack() as stack:
        for module, usual in ((model_drafter, AutoregressiveDrafter), (diffuspec, DiffusionDrafter)):
            if issubclass(kind, usual):
                stack.enter_context(mock.patch.object(module, usual.__name__, kind))
        yield
