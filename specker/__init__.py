"""specker: fused Triton ops for speculative decoding, and a slim runtime that composes them. See README.md."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["load", "zoo"]


def load(target: Any = None, draft: Any = None, strategy: Any = "draft", **options: Any) -> Any:
    """Load an engine; see `specker.runtime.load.load`, which this calls (imported on use: it needs torch)."""
    from specker.runtime.load import load

    return load(target, draft, strategy, **options)


def __getattr__(name: str) -> Any:
    if name == "zoo":
        import importlib

        return importlib.import_module("specker.zoo")
    raise AttributeError(f"module 'specker' has no attribute {name!r}")
