"""What a user may set, as frozen dataclasses. `specker.run` generates its flags from them, `specker.load` and
`Engine.generate` take the same names as keyword arguments, and every value is checked here and nowhere else."""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from specker.flags import opt

DTYPES = ("float32", "bfloat16", "float16", "float64")
STRATEGIES = ("ar", "draft", "easyspec", "del", "diffuspec")
POLICIES = ("fixed", "plus-minus-one", "draft-and-verify", "del", "del-length", "adl", "chunk")
POLICY_OF = {"del": "del", "del-length": "del", "adl": "diffuspec", "chunk": "diffuspec"}  # the others are anyone's
EXIT_COSTS = ("layers", "bytes", "measured")
CALIBRATE = ("every", "mismatch", "never")
CPS = ("off", "chain", "tree")
PREFIX = ("reuse", "exact")
LOADS = ("weights", "dummy")
LINEARS = ("rows", "cublas")
SEARCH_OPTIONS = ("cps_paths", "cps_candidates", "cps_mass", "cps_lambda", "ngram")
OPTIONS_OF = {  # what only one strategy has
    "easyspec": ("layer_parallel", "calibrate"),
    "del": ("exit_layer", "exit_cost"),
    "diffuspec": ("cps", *SEARCH_OPTIONS, "diffusion_prefix", "shifted_logits", "adl", "chunk"),
}
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


def span(text: str) -> tuple[int, int]:
    """--adl: the shortest and the longest block, `20-30`."""
    match = re.fullmatch(r"(\d{1,3})-(\d{1,3})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= 255:
        raise ValueError(f"--adl must be SHORTEST-LONGEST within 1-255, such as 20-30, got {text!r}")
    return int(match[1]), int(match[2])


def chunked(text: str) -> tuple[int, float]:
    """--chunk: tokens of a pass, and the probability under which a token ends the draft, `8:0.5`."""
    match = re.fullmatch(r"(\d{1,3}):(0|1|0?\.\d+|1\.0*)", text)
    if not match or not 1 <= int(match[1]) <= 128:
        raise ValueError(f"--chunk must be TOKENS:PROBABILITY within 1-128 and 0-1, such as 8:0.5, got {text!r}")
    return int(match[1]), float(match[2])


def given(text: str) -> float:
    """--acceptance: the probability with which the target is made to agree, `synthetic:0.8`."""
    match = re.fullmatch(r"synthetic:(0|1|0?\.\d+|[01]\.\d*)", text)
    if not match or float(match[1]) > 1:
        raise ValueError(f"--acceptance must be synthetic:PROBABILITY within 0-1, such as synthetic:0.8, got {text!r}")
    return float(match[1])


@dataclass(frozen=True)
class Options:
    """How an engine decodes; fixed when it is loaded."""

    strategy: str = opt("draft", "ar, draft, easyspec, del, diffuspec, vocabtrim, or a combination joined by +")
    draft_tokens: int | None = opt(
        None, "tokens in a draft chain (default 4) or a diffusion block, or a cap on the nodes of a --tree"
    )
    tree: str | None = opt(None, "draft a tree instead of a chain: WIDTHxDEPTH, such as 4x5")
    policy: str | None = opt(
        None, f"how long to draft: {', '.join(POLICIES)} (default: fixed; del for del, adl for diffuspec)"
    )
    exit_layer: int | None = opt(None, "del: layers that draft, for the policies that do not choose (default: half)")
    exit_cost: str | None = opt(
        None,
        "del: what a draft token costs: layers (the paper's), bytes (default: the LM head too) or measured (and the "
        "verify pass's row)",
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
    cps: str | None = opt(
        None,
        "diffuspec: search the lattice of a diffusion draft for its best path (chain), the best paths as one tree, "
        "or take the argmax (off, the default without --ngram)",
    )
    cps_paths: int | None = opt(None, "diffuspec: width of the search's beam (default 3)")
    cps_candidates: int | None = opt(None, "diffuspec: candidates of a position at most (default 15)")
    cps_mass: float | None = opt(None, "diffuspec: the fewest candidates with this probability (default 0.8)")
    cps_lambda: float | None = opt(None, "diffuspec: weight of the diffusion model against the n-gram's (default 0.85)")
    ngram: str | None = opt(
        None, "diffuspec: the search's n-gram model (default: the bundled family's); see python -m specker.calibrate"
    )
    diffusion_prefix: str | None = opt(
        None, "diffuspec: reuse the text's K/V of earlier rounds (default), or run the whole text every round: exact"
    )
    shifted_logits: str | None = opt(
        None, "diffuspec: whether row i predicts position i + 1: yes (default for Dream) or no (for others)"
    )
    adl: str | None = opt(
        None, "diffuspec: shortest and longest block of --policy adl (default 20-30; 3-8 with the bundled pair)"
    )
    chunk: str | None = opt(
        None, "diffuspec: tokens a pass of --policy chunk, and the probability that lets it go on (default 4:0.5)"
    )
    graphs: str | None = opt(
        None,
        "rounds of static shape, CUDA graphs on a GPU: on (default on a GPU), off (default on a CPU and for float64)",
    )
    load: str | None = opt(
        None,
        "weights (default), or dummy: random ones, made from config.json alone, which tell time and memory and "
        "nothing else",
    )
    acceptance: str | None = opt(
        None,
        "synthetic:0.8 makes the target agree with a draft token with this probability, whatever the models say: "
        "for sizing, the text is nobody's",
    )
    linear: str | None = opt(
        None,
        "rows (default): a row's bits do not depend on the rows beside it; cublas: torch's own linear on a GPU, which "
        "gives that up. On a CPU cublas changes nothing",
    )
    max_context: int | None = opt(
        None, "positions to allocate K/V for (default: what the checkpoint allows and the memory holds)"
    )
    tp: int | None = opt(None, "ranks that share the target, of a job that torchrun started (default: all, over --dp)")
    dp: int | None = opt(None, "replicas that share the prompts (default 1)")
    draft_ranks: int | None = opt(
        None, "ranks of --tp that draft: those that EasySpec's groups are shared over (default: all), else 1"
    )
    reduce: str | None = opt(
        None,
        "how ranks' sums are added: fast (default), or ordered, by rank: chains stay bit-equal to plain decoding",
    )
    page_size: int = opt(256, "K/V cache positions per page")
    batch_size: int = opt(1, "sequences decoded at once")
    kv_tokens: int | None = opt(None, "positions in the K/V pool that all sequences share")

    def __post_init__(self) -> None:
        self._check_strategy()
        self._check_policy()
        for name, known in (("exit_cost", EXIT_COSTS), ("calibrate", CALIBRATE), ("cps", CPS)):
            self._one_of(name, known)
        self._one_of("diffusion_prefix", PREFIX)
        self._one_of("shifted_logits", ("yes", "no"))
        self._one_of("graphs", ("on", "off"))
        self._one_of("reduce", ("fast", "ordered"))
        self._one_of("load", LOADS)
        self._one_of("linear", LINEARS)
        for way, names in OPTIONS_OF.items():
            for name in names:
                if getattr(self, name) is not None and self.way != way:
                    raise ValueError(f"{_flag(name)} is for strategy {way}, not {self.strategy!r}")
        for name in ("vocab_scores", "vocab_keep", "vocab_text"):
            if getattr(self, name) is not None and not self.trimmed:
                flag = _flag(name)
                raise ValueError(f"{flag} is for strategy vocabtrim or a combination with it, not {self.strategy!r}")
        for name, read in (
            ("layer_parallel", groups), ("vocab_keep", Keep.parse), ("tree", Tree.parse), ("adl", span),
            ("chunk", chunked), ("acceptance", given),
        ):  # fmt: skip
            if (text := getattr(self, name)) is not None:
                read(text)
        for name, least, most in (
            ("exit_layer", 1, None), ("vocab_text", 0, None), ("draft_tokens", 1, 255), ("max_context", 1, None),
            ("tp", 1, None), ("dp", 1, None), ("draft_ranks", 1, None),
            ("page_size", 1, None), ("cps_paths", 1, 64), ("cps_candidates", 1, 64), ("cps_mass", 0, 1),
            ("cps_lambda", 0, 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (least <= value and (most is None or value <= most)):
                bounds = f"at least {least}" if most is None else f"between {least} and {most}"
                raise ValueError(f"{_flag(name)} must be {bounds}, got {value}")

    def _check_strategy(self) -> None:
        known = (*STRATEGIES, TRIM)
        parts = self.strategy.split("+")
        for part in parts:
            if part not in known:
                raise ValueError(f"unknown strategy {part!r}; available: {', '.join(known)}")
        ways = [part for part in parts if part != TRIM]
        if len(ways) > 1 or len(set(parts)) < len(parts):
            raise ValueError(f"strategies {' and '.join(parts)} do not compose: each decides what is drafted")
        if ways == ["ar"] and self.trimmed:
            raise ValueError("strategies ar and vocabtrim do not compose: ar drafts nothing, so it has no draft head")
        if self.way == "ar" and any(x is not None for x in (self.tree, self.draft_tokens, self.policy)):
            raise ValueError("strategy 'ar' drafts nothing: --tree, --draft-tokens and --policy do not apply")
        if self.way == "ar" and self.acceptance is not None:
            raise ValueError("strategy 'ar' drafts nothing: --acceptance does not apply")
        if self.way == "del" and self.tree is not None:
            raise ValueError("strategy del drafts a chain: --tree does not apply")
        if self.way == "diffuspec" and self.tree is not None:
            raise ValueError("strategy diffuspec drafts a block: --tree does not apply, but --cps tree does")
        if self.cps == "off" and any(getattr(self, name) is not None for name in SEARCH_OPTIONS):
            raise ValueError("--cps off searches nothing: the other --cps-... flags and --ngram do not apply")

    def _check_policy(self) -> None:
        policy = self.policy
        self._one_of("policy", POLICIES)
        if policy in POLICY_OF and self.way != POLICY_OF[policy]:
            raise ValueError(f"--policy {policy} is for strategy {POLICY_OF[policy]}, not {self.strategy!r}")
        if policy == "draft-and-verify" and self.way == "diffuspec":
            raise ValueError("--policy draft-and-verify ends a draft token by token, but diffuspec drafts a block")
        if policy not in (None, "fixed") and self.tree is not None:
            raise ValueError(f"--policy {policy} is for chains: leave out --tree")
        if policy == "plus-minus-one" and self.cps == "tree":
            raise ValueError("--policy plus-minus-one is for chains: leave out --cps tree")
        if self.exit_layer is not None and (policy or "del").startswith("del") and self.way == "del":
            raise ValueError("--exit-layer is for --policy fixed, plus-minus-one and draft-and-verify; del chooses")
        for name in ("adl", "chunk"):
            usual = "adl" if self.draft_tokens is None else "fixed"
            if getattr(self, name) is not None and (policy or usual) != name:
                raise ValueError(f"--{name} is for --policy {name}")
        if policy == "adl" and self.draft_tokens is not None:
            raise ValueError("--policy adl chooses the block's length: --adl bounds it, --draft-tokens does not apply")

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in (None, *known):
            raise ValueError(f"{_flag(name)} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def trimmed(self) -> bool:
        """Whether the drafter's head keeps only some of the vocabulary."""
        return TRIM in self.strategy.split("+")

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """What stands in for the real thing, in words. Where anything does, the run tells time and memory alone."""
        weights = ("random weights",) if self.load == "dummy" else ()
        if self.acceptance is None:
            return weights
        return (*weights, f"acceptance {given(self.acceptance):g} is given, not earned")

    @property
    def way(self) -> str:
        """What drafts: the strategy without the trimming, which alone is `draft`'s."""
        return next((part for part in self.strategy.split("+") if part != TRIM), "draft")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Sampling:
    """How the target's token is drawn from its logits, the same for every strategy (see kernels/sample_rows.py)."""

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
