"""The options that every strategy shares, and a request's sampling, as frozen dataclasses.

Flags, help texts, bounds and most refusals are generated from the fields (flags.py). A strategy's own options stand in
its file in runtime/strategies/; `strategies.options` joins them with the common ones to an `Options`, in which every
value is parsed. `specker.load` takes the same names as keyword arguments, as strings or as parsed values.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from specker.flags import opt, settle

DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_BATCH = 256


@dataclass(frozen=True)
class Tree:
    """A draft tree's shape: `depth` levels of the `width` best nodes each."""

    width: int
    depth: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 1:
            raise ValueError(f"--tree must be WIDTHxDEPTH with both at least 1, such as 4x5; got {str(self)!r}")
        if self.width > 64 or self.width * self.depth > 255:
            raise ValueError(f"--tree {self} is too large: the width is at most 64 and WIDTH*DEPTH at most 255")

    @classmethod
    def parse(cls, value: "str | Tree") -> "Tree":
        if isinstance(value, Tree):
            return value
        match = re.fullmatch(r"(\d+)x(\d+)", value)
        if not match:
            raise ValueError(f"--tree must be WIDTHxDEPTH with both at least 1, such as 4x5; got {value!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}"


def probability(value: str | float) -> float:
    """--acceptance: `synthetic:0.8`, the probability with which the target agrees with a draft token."""
    text = value if isinstance(value, str) else f"synthetic:{value:f}"
    match = re.fullmatch(r"synthetic:(0|1|0?\.\d+|[01]\.\d*)", text)
    if not match or float(match[1]) > 1:
        raise ValueError(f"--acceptance must be synthetic:PROBABILITY within 0-1, such as synthetic:0.8, got {value!r}")
    return float(match[1]) if isinstance(value, str) else value


@dataclass(frozen=True)
class Common:
    """The options that do not belong to one strategy; fixed when an engine is loaded."""

    strategy: str = opt("draft", "{strategies}, or a combination joined by +")
    draft_tokens: int | None = opt(
        None,
        "tokens in a draft chain (default 4) or a diffusion block, or a cap on the nodes of a --tree",
        least=1,
        most=255,
    )
    tree: Tree | None = opt(None, "draft a tree instead of a chain: WIDTHxDEPTH, such as 4x5", parse=Tree.parse)
    policy: str | None = opt(None, "how long to draft: {policies} (default: fixed; {defaults})")
    graphs: str | None = opt(
        None,
        "rounds of static shape, CUDA graphs on a GPU: on (default on a GPU), off (default on a CPU and for float64)",
        choices=("on", "off"),
    )
    load: str = opt(
        "weights",
        "weights, or dummy: random weights made from config.json alone, for measuring time and memory",
        choices=("weights", "dummy"),
    )
    acceptance: float | None = opt(
        None,
        "synthetic:0.8 makes the target agree with a draft token with this probability, whatever the models say; for "
        "sizing only, the generated text is meaningless",
        parse=probability,
    )
    linear: str = opt(
        "rows",
        "rows: a row's bits do not depend on the rows beside it; cublas: torch's own linear on a GPU, without that "
        "guarantee. On a CPU cublas changes nothing",
        choices=("rows", "cublas"),
    )
    max_context: int | None = opt(
        None, "positions to allocate K/V for (default: what the checkpoint allows and the memory holds)", least=1
    )
    page_size: int = opt(256, "K/V cache positions per page", least=1)
    batch_size: int = opt(1, "sequences decoded at once", least=1, most=MAX_BATCH)
    kv_tokens: int | None = opt(
        None,
        "positions in the K/V pool that all sequences share (default: batch_size contexts, or what the memory holds)",
        least=1,
    )
    tp: int | None = opt(
        None, "ranks that share the target, of a job that torchrun started (default: all, over --dp)", least=1
    )
    dp: int = opt(1, "replicas that share the prompts", least=1)
    draft_ranks: int | None = opt(
        None, "ranks of --tp that draft (default: all where the strategy divides a draft among them, else 1)", least=1
    )
    reduce: str = opt(
        "fast",
        "how ranks' sums are added: fast, or ordered by rank, which keeps chains bit-equal to plain decoding",
        choices=("fast", "ordered"),
    )

    def __post_init__(self) -> None:
        settle(self)


@dataclass(frozen=True)
class Options(Common):
    """All options of an engine, parsed and checked; made by `strategies.options`."""

    base: str = "draft"  # the strategy that drafts: `strategy` without +vocabtrim
    own: Any = None  # that strategy's own options, a frozen dataclass; None where it has none
    trim: Any = None  # strategies.vocabtrim.TrimOptions where the drafter's head is trimmed, else None

    @property
    def width(self) -> int:
        """Nodes of a level of the draft; a chain is a tree of width 1."""
        return 1 if self.tree is None else self.tree.width

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """What replaces the real models, in words. Results then tell time and memory only."""
        weights = ("random weights",) if self.load == "dummy" else ()
        if self.acceptance is None:
            return weights
        return (*weights, f"acceptance {self.acceptance:g} is given, not earned")


@dataclass(frozen=True)
class Sampling:
    """How the target's token is drawn from its logits, the same for every strategy (see kernels/sample.py)."""

    temperature: float = opt(0.0, "0 decodes greedily")
    top_p: float = opt(1.0, "keep the smallest set of tokens with this much probability")
    top_k: int = opt(0, "keep the k most probable tokens; 0 keeps all", least=0)
    seed: int = opt(0, "same seed, same tokens, whatever the strategy")

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-6 <= self.temperature < float("inf")):  # logits / 1e-7 could overflow
            raise ValueError(f"--temperature must be 0 or at least 1e-6, and finite, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"--top-p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed must be in [0, 2**64), got {self.seed}")
        settle(self)


def from_kwargs(cls: type, kwargs: dict[str, Any]) -> Any:
    """`cls(**kwargs)`. TypeError for an unknown name, so that a misspelt option is not silently ignored."""
    refuse_unknown(kwargs, [f.name for f in dataclasses.fields(cls)])
    return cls(**kwargs)


def refuse_unknown(given: dict[str, Any], known: list[str]) -> None:
    """TypeError that names the unknown options and the known ones."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(f"unknown option {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
