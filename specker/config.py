"""What a user may set, as frozen dataclasses. `specker.run` generates its flags from them, `specker.load` and
`Engine.generate` take the same names as keyword arguments, and every value is checked here and nowhere else."""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from specker.flags import opt

DTYPES = ("float32", "bfloat16", "float16", "float64")
STRATEGIES = ("ar", "draft", "easyspec", "del")
PLANNED = ("diffuspec",)
POLICIES = ("fixed", "plus-minus-one", "draft-and-verify", "del", "del-length")
EXIT_COSTS = ("layers", "bytes", "measured")
CALIBRATE = ("every", "mismatch", "never")
TRIM = "vocabtrim"  # not a way to draft but a smaller head for one: joined with `+`, or alone for draft+vocabtrim


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
class Keep:
    """How much of a ranked vocabulary to keep: exactly one of the three."""

    rows: int | None = None
    fraction: float | None = None
    coverage: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Keep":
        """`8192` rows, `0.25` of the vocabulary, or as many rows as make up `coverage:0.98` of the counted tokens."""
        value = text.removeprefix("coverage:")
        try:
            if value == text and re.fullmatch(r"\d+", text):
                if int(text) >= 1:
                    return cls(rows=int(text))
            elif 0 < float(value) <= 1:
                return cls(coverage=float(value)) if value != text else cls(fraction=float(value))
        except ValueError:
            pass
        raise ValueError(
            f"--vocab-keep must be rows (8192), a fraction (0.25) or a coverage (coverage:0.98), got {text!r}"
        )


def groups(text: str) -> int | tuple[tuple[int, ...], ...]:
    """--layer-parallel: a group's width, `4`, or all groups, `[[0],[1,2,3],[4]]`: every layer once, in order."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if type(value) is int and value >= 1:
        return value
    lists = isinstance(value, list) and value and all(isinstance(group, list) and group for group in value)
    if not lists or any(type(n) is not int for group in value for n in group):
        raise ValueError(f"--layer-parallel must be a width (4) or all groups ([[0],[1,2],[3]]), got {text!r}")
    if (order := [n for group in value for n in group]) != list(range(len(order))):
        raise ValueError(f"--layer-parallel must hold every layer from 0 on once and in order, got {text}")
    return tuple(map(tuple, value))


@dataclass(frozen=True)
class Options:
    """How an engine decodes; fixed when it is loaded."""

    strategy: str = opt("draft", "ar, draft, easyspec, del, vocabtrim, or a combination joined by +")
    draft_tokens: int | None = opt(None, "tokens in a draft chain (default 4), or a cap on the nodes of a --tree")
    tree: str | None = opt(None, "draft a tree instead of a chain: WIDTHxDEPTH, such as 4x5")
    policy: str | None = opt(None, f"how long to draft: {', '.join(POLICIES)} (default: fixed; del for strategy del)")
    exit_layer: int | None = opt(None, "del: layers that draft, for the policies that do not choose (default: half)")
    exit_cost: str | None = opt(
        None, "del: what a draft step costs: layers (the paper's), bytes (default: the LM head counts too) or measured"
    )
    layer_parallel: str | None = opt(
        None, "easyspec: layers side by side in a group (default 4), or all groups, such as [[0],[1,2,3],[4]]"
    )
    calibrate: str | None = opt(
        None,
        "easyspec: when accepted tokens' K/V is written anew by the layers in sequence: every round (default), "
        "on a mismatch, never",
    )
    vocab_scores: str | None = opt(
        None, "vocabtrim: how often each token occurs (default: the bundled family's); see python -m specker.calibrate"
    )
    vocab_keep: str | None = opt(
        None, "vocabtrim: rows of the draft's head to keep: 8192, 0.25 of them, or coverage:0.98 of the counted tokens"
    )
    vocab_text: int | None = opt(
        None,
        "vocabtrim: more rows, that follow the text: its own tokens beyond those kept (default 256; 0: none)",
    )
    max_context: int | None = opt(None, "positions to allocate K/V for (default: what the checkpoint allows)")
    page_size: int = opt(256, "K/V cache positions per page")

    def __post_init__(self) -> None:
        known = (*STRATEGIES, TRIM)
        parts = self.strategy.split("+")
        for part in parts:
            if part in PLANNED:
                raise ValueError(f"strategy {part!r} is not built yet; available: {', '.join(known)}")
            if part not in known:
                raise ValueError(f"unknown strategy {part!r}; available: {', '.join(known)}")
        ways = [part for part in parts if part != TRIM]
        if len(ways) > 1 or len(set(parts)) < len(parts):
            raise ValueError(f"strategies {' and '.join(parts)} do not compose: each decides what is drafted")
        if ways == ["ar"] and self.trimmed:
            raise ValueError("strategies ar and vocabtrim do not compose: ar drafts nothing, so it has no draft head")
        if self.policy not in (None, *POLICIES):
            raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.exit_cost not in (None, *EXIT_COSTS):
            raise ValueError(f"--exit-cost must be one of {', '.join(EXIT_COSTS)}, got {self.exit_cost!r}")
        for name in ("exit_layer", "exit_cost"):
            if getattr(self, name) is not None and self.way != "del":
                raise ValueError(f"--{name.replace('_', '-')} is for strategy del, not {self.strategy!r}")
        if self.way == "del":
            if self.tree is not None:
                raise ValueError("strategy del drafts a chain: --tree does not apply")
            if self.exit_layer is not None and (self.policy or "del").startswith("del"):
                raise ValueError("--exit-layer is for --policy fixed, plus-minus-one and draft-and-verify; del chooses")
            if self.exit_layer is not None and self.exit_layer < 1:
                raise ValueError(f"--exit-layer must be at least 1, got {self.exit_layer}")
        elif (self.policy or "").startswith("del"):
            raise ValueError(f"--policy {self.policy} is for strategy del, not {self.strategy!r}")
        if self.policy not in (None, "fixed") and self.tree is not None:
            raise ValueError(f"--policy {self.policy} is for chains: leave out --tree")
        if self.calibrate not in (None, *CALIBRATE):
            raise ValueError(f"--calibrate must be one of {', '.join(CALIBRATE)}, got {self.calibrate!r}")
        for name in ("layer_parallel", "calibrate"):
            if getattr(self, name) is not None and self.way != "easyspec":
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is for strategy easyspec, not {self.strategy!r}")
        if self.layer_parallel is not None:
            groups(self.layer_parallel)
        if self.vocab_keep is not None:
            Keep.parse(self.vocab_keep)
        if self.vocab_text is not None and self.vocab_text < 0:
            raise ValueError(f"--vocab-text must be at least 0, got {self.vocab_text}")
        for name in ("vocab_scores", "vocab_keep", "vocab_text"):
            if getattr(self, name) is not None and not self.trimmed:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is for strategy vocabtrim or a combination with it, not {self.strategy!r}")
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= 255:
            raise ValueError(f"--draft-tokens must be between 1 and 255, got {self.draft_tokens}")
        if self.tree is not None:
            Tree.parse(self.tree)
        if self.way == "ar" and any(x is not None for x in (self.tree, self.draft_tokens, self.policy)):
            raise ValueError("strategy 'ar' drafts nothing: --tree, --draft-tokens and --policy do not apply")
        if self.max_context is not None and self.max_context < 1:
            raise ValueError(f"--max-context must be at least 1, got {self.max_context}")
        if self.page_size < 1:
            raise ValueError(f"--page-size must be at least 1, got {self.page_size}")

    @property
    def trimmed(self) -> bool:
        """Whether the drafter's head keeps only some of the vocabulary."""
        return TRIM in self.strategy.split("+")

    @property
    def way(self) -> str:
        """What drafts: the strategy without the trimming, which alone is `draft`'s."""
        return next((part for part in self.strategy.split("+") if part != TRIM), "draft")


@dataclass(frozen=True)
class Sampling:
    """How the target's token is drawn from its logits, the same for every strategy (see kernels/accept.py)."""

    temperature: float = opt(0.0, "0 decodes greedily")
    top_p: float = opt(1.0, "keep the smallest set of tokens with this much probability")
    top_k: int = opt(0, "keep the k most probable tokens; 0 keeps all")
    seed: int = opt(0, "same seed, same tokens, whatever the strategy")

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
