"""specker: fused Triton ops for speculative decoding, and a slim runtime that composes them. See README.md."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Unpack

if TYPE_CHECKING:  # `import specker` stays light
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from specker import zoo
    from specker.arguments import LoadOptions
    from specker.options import Options
    from specker.runtime.engine import Engine
    from specker.runtime.strategies.base import Strategy

__version__ = "0.2.0"
__all__ = ["Engine", "load", "zoo"]

# The application decides where records go. specker logs as warnings an engine's remarks when it is loaded, and captures
# that failed.
logging.getLogger("specker").addHandler(logging.NullHandler())

# libgomp, which runs torch's threads on a CPU, reads this when torch is imported. By default a waiting thread spins for
# milliseconds. If another process computes too, the spinning keeps the awaited thread off the core, and decoding drops
# to a sixth of its speed. Short spinning costs at most 3% on a quiet machine (bench/LOG.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    strategy: str | Strategy | Sequence[str | Strategy] | Options | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
    **options: Unpack[LoadOptions],
) -> Engine:
    """Load an engine: a target, a strategy and what the strategy drafts with.

    Args:
        target: a local folder, a GGUF file or a hub id. None: the bundled model of Python code.
        draft: the same for the model or head that drafts; "auto": a known one for the target, as `specker drafts`
            lists them. None: the bundled one for the target.
        strategy: a name such as `draft+lookup`, with its own options in `options`; a `Strategy` of your own, or a
            list that joins it with others, such as `[MyStrategy(), "lookup"]` (docs/strategies.md); or an `Options`
            with all of them. None: `vocabtrim+lookup` with a draft model, `eagle` with a head that draft "auto" chose,
            otherwise `lookup`.
        device: "cpu" or "cuda". None: cuda if available.
        dtype: a torch dtype, or one of float32, bfloat16, float16, float64. None: bfloat16, but float32 on a CPU that
            has no compiled kernels for the target.
        on_progress: called with (elements read, total elements, "target, 1 of 2") while weights are read, for each
            model; a trained head is read without it.
        options: fields of `specker.options.Common` and of the strategy, as strings or parsed values.

    Returns:
        The engine. With `batch_size` several requests share its rounds, whichever thread they come from; others wait
        for a free slot.

    Raises:
        TypeError: an unknown option.
        ValueError: a checkpoint (`CheckpointError`) or a combination that cannot run, in one sentence.
        RankLost: another process of the job failed.

    Examples:
        >>> import specker
        >>> engine = specker.load(strategy="lookup", device="cpu")
        >>> engine.generate("def fibonacci(n):", max_new_tokens=8).stats.tokens
        8
    """
    from specker.runtime.load import load

    return load(target, draft, strategy, device, dtype, on_progress, **options)


def _register_backends() -> None:
    """Import what computes the ops on a CPU. The ops call it when they first need it (kernels/cpu.py), so that a
    program that imports nothing but ops has the compiled ones, too."""
    import specker.cpu  # noqa: F401


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    import importlib

    if name == "zoo":
        return importlib.import_module("specker.zoo")
    if name == "Engine":
        return importlib.import_module("specker.runtime.engine").Engine
    raise AttributeError(f"module 'specker' has no attribute {name!r}")
