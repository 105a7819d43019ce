"""Strategy `mtp`: the multi-token prediction head in the target's own checkpoint drafts (DeepSeek-V3, arXiv
2412.19437). model/heads.py has the equations.

A target that was trained with such a head needs no draft checkpoint. The head drafts as an EAGLE head does, with the
target's embedding, LM head and hidden states after the final norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specker.runtime.strategies.eagle import Eagle

if TYPE_CHECKING:
    import torch

    from specker.checkpoints.checkpoint import Checkpoint


class MultiTokenPrediction(Eagle):
    name = "mtp"
    summary = "the multi-token prediction head of the target's own checkpoint drafts a chain or a tree"
    paper = "DeepSeek-V3 (2412.19437)"
    needs_draft = False

    @property
    def needs(self) -> str:
        return "a target with such a head"

    def read_head(
        self, source: str | Path | None, target: Checkpoint, dtype: torch.dtype, quantize: str | None
    ) -> Checkpoint:
        from specker.checkpoints import mtp

        return mtp.read(target, dtype=dtype, quantize=quantize)
