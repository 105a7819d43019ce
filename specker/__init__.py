"""specker: fused Triton ops for speculative decoding, and a slim runtime that composes them. See README.md."""

import os
from typing import Any

__version__ = "0.1.0"
__all__ = ["load", "zoo"]

# libgomp, which runs torch's threads on a CPU, reads this when torch is imported. By default a thread that waits for
# another spins for milliseconds, and keeps the other off the core if a process beside it computes: a sixth of the
# speed. Short spinning costs at most 3% on a quiet machine (bench/LOG.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def load(target: Any = None, draft: Any = None, strategy: Any = "draft", **options: Any) -> Any:
    """Load an engine; see `specker.runtime.load.load`, which this calls (imported on use: it needs torch)."""
    from specker.runtime.load import load

    return load(target, draft, strategy, **options)


def __getattr__(name: str) -> Any:
    if name == "zoo":
        import importlib

        return importlib.import_module("specker.zoo")
    raise AttributeError(f"module 'specker' has no attribute {name!r}")
