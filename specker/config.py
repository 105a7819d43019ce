"""What a user may set, as frozen dataclasses. `specker.run` generates its flags from them, `specker.load` and
`Engine.generate` take the same names as keyword arguments, and every value is checked here and nowhere else."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
STRATEGIES = ("ar", "draft")
PLANNED = ("easyspec", "del", "diffuspec", "vocabtrim")


def _opt(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Tree:
    """A draft tree's shape: `depth` levels of the `width` best nodes each."""

    width: int
    depth: int

    @classmethod
    def parse(cls, text: str) -> "Tree":
        match = re.fullmatch(r"(\d+)x(\d+)", text)
        if not match or "0" in (match[1].lstrip("0") or "0", match[2].lstrip("0") or "0"):
            raise ValueError(f"--tree must be WIDTHxDEPTH with both at least 1, such as 4x5; got {text!r}")
        tree = cls(int(match[1]), int(match[2]))
        if tree.width > 64 or tree.width * tree.depth > 255:
            raise ValueError(f"--tree {text} is too large: the width is at most 64 and WIDTH*DEPTH at most 255")
        return tree


@dataclass(frozen=True)
class Options:
    """How an engine decodes; fixed when it is loaded."""

    strategy: str = _opt("draft", "ar, draft, or a combination joined by +")
    draft_tokens: int | None = _opt(None, "tokens in a draft chain (default 4), or a cap on the nodes of a --tree")
    tree: str | None = _opt(None, "draft a tree instead of a chain: WIDTHxDEPTH, such as 4x5")
    max_context: int | None = _opt(None, "positions to allocate K/V for (default: what the checkpoint allows)")
    page_size: int = _opt(256, "K/V cache positions per page")

    def __post_init__(self) -> None:
        parts = self.strategy.split("+")
        for part in parts:
            if part in PLANNED:
                raise ValueError(f"strategy {part!r} is not built yet; available: {', '.join(STRATEGIES)}")
            if part not in STRATEGIES:
                raise ValueError(f"unknown strategy {part!r}; available: {', '.join(STRATEGIES)}")
        if len(parts) > 1:
            raise ValueError(f"strategies {' and '.join(parts)} do not compose: each decides what is drafted")
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= 255:
            raise ValueError(f"--draft-tokens must be between 1 and 255, got {self.draft_tokens}")
        if self.tree is not None:
            Tree.parse(self.tree)
        if self.strategy == "ar" and (self.tree is not None or self.draft_tokens is not None):
            raise ValueError("strategy 'ar' drafts nothing: --tree and --draft-tokens do not apply")
        if self.max_context is not None and self.max_context < 1:
            raise ValueError(f"--max-context must be at least 1, got {self.max_context}")
        if self.page_size < 1:
            raise ValueError(f"--page-size must be at least 1, got {self.page_size}")


@dataclass(frozen=True)
class Sampling:
    """How the target's token is drawn from its logits, the same for every strategy (see kernels/accept.py)."""

    temperature: float = _opt(0.0, "0 decodes greedily")
    top_p: float = _opt(1.0, "keep the smallest set of tokens with this much probability")
    top_k: int = _opt(0, "keep the k most probable tokens; 0 keeps all")
    seed: int = _opt(0, "same seed, same tokens, whatever the strategy")

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-6 <= self.temperature < float("inf")):  # logits / 1e-7 could overflow
            raise ValueError(f"--temperature must be 0 or at least 1e-6, and finite, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"--top-p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"--top-k must be at least 0, got {self.top_k}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed must be in [0, 2**64), got {self.seed}")


def from_kwargs(cls: type, kwargs: dict[str, Any]) -> Any:
    """`cls(**kwargs)`, naming what is unknown: a misspelt option must not be dropped silently."""
    known = [f.name for f in dataclasses.fields(cls)]
    unknown = [name for name in kwargs if name not in known]
    if unknown:
        raise TypeError(f"unknown option {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    return cls(**kwargs)
