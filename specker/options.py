"""The options that every strategy shares, and a request's sampling, as frozen dataclasses.

Flags, help texts, bounds and most error messages are generated from the fields (fields.py). Each strategy defines its
own options in its file in runtime/strategies/; `strategies.options` merges them with the common ones into a parsed
`Options`. `specker.load` takes the same names as keyword arguments, as strings or as parsed values, and a few that
have no flag.
"""

import dataclasses
import difflib
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from specker.fields import check_fields, opt, option

DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTIZE = ("int8", "int4", "fp8", "none")
STORED = "stored"  # of a draft: its matrices as the checkpoint has them
ACTIVATIONS = ("int8", "bfloat16", "float32")
KV_DTYPES = ("float32", "bfloat16", "float16", "int8")
LAYOUTS = ("replicated", "layer-parallel", "tensor", "both")
GRAPHS = "SPECKER_GRAPHS"  # the environment's variable, to debug a run with or without graphs
MAX_BATCH = 256
MOST_K = 2**31 - 1  # of top_k, which kernels take as an integer of 32 bits
MAX_BIASES = 300  # of a request, as in OpenAI's API
MAX_STOP_IDS = 64  # of a request with `min_tokens`, the checkpoint's included
RECOMMENDED = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"  # what a checkpoint may recommend
TEMPERATURE = 0.7  # of conversations and of the server, if the checkpoint recommends nothing
TREE = "must be WIDTHxDEPTH with both at least 1, such as 4x5"


@dataclass(frozen=True)
class Tree:
    """A draft tree's shape: `depth` levels of the `width` best nodes each."""

    width: int
    depth: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 1:
            raise ValueError(f"{option('tree')} {TREE}; got {str(self)!r}")
        if self.width > 64 or self.width * self.depth > 255:
            raise ValueError(
                f"{option('tree', self)} is too large: the width is at most 64 and WIDTH*DEPTH at most 255"
            )

    @classmethod
    def parse(cls, value: "str | Tree") -> "Tree":
        if isinstance(value, Tree):
            return value
        match = re.fullmatch(r"(\d+)x(\d+)", str(value))
        if not match:
            raise ValueError(f"{option('tree')} {TREE}; got {value!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}"


@dataclass(frozen=True)
class VocabKeep:
    """How much of a ranked vocabulary to keep: exactly one of the three."""

    rows: int | None = None
    fraction: float | None = None
    coverage: float | None = None

    @classmethod
    def parse(cls, given: "str | VocabKeep") -> "VocabKeep":
        """Parse `8192` (rows), `0.25` (of the vocabulary) or `coverage:0.98` (of the counted tokens)."""
        if isinstance(given, VocabKeep):
            return given
        text = str(given)
        value = text.removeprefix("coverage:")
        try:
            if value == text and re.fullmatch(r"\d+", text):
                if int(text) >= 1:
                    return cls(rows=int(text))
            elif 0 < float(value) <= 1:
                return cls(coverage=float(value)) if value != text else cls(fraction=float(value))
        except ValueError:
            pass
        about = "must be rows (8192), a fraction (0.25) or a coverage (coverage:0.98)"
        raise ValueError(f"{option('vocab_keep')} {about}, got {given!r}")


@dataclass(frozen=True)
class Common:
    """The options shared by all strategies; fixed when an engine is loaded."""

    strategy: str = opt(
        "vocabtrim+lookup",
        "how to draft; NAME+{trim} also trims the draft's head, NAME+lookup also copies text; without a draft "
        "model the default is lookup",
        "{strategies}",
    )
    draft_tokens: int | None = opt(
        None,
        "tokens in a draft chain (default: the policy chooses; 4 with --policy fixed) or a diffusion block, or a cap "
        "on the nodes of a --tree",
        least=1,
        most=255,
    )
    tree: Tree | None = opt(None, "draft a tree instead of a chain, such as 4x5", "WIDTHxDEPTH", parse=Tree.parse)
    policy: str | None = opt(
        None,
        "how long to draft: {policies} (default: auto, which drafts as long as pays by measured costs, or not at all; "
        "fixed with --draft-tokens or --tree; {defaults})",
        "NAME",
    )
    as_published: bool = opt(
        False,
        "draft as the strategy's paper does: with its constants, in every round, with nothing learnt from other texts; "
        "a flag that is given replaces the paper's value ({published})",
    )
    graphs: str | None = opt(
        None,
        "run rounds of fixed shape, as CUDA graphs on a GPU: on (default on a GPU) or off (default on a CPU, for "
        "float64, and with `tp` if only rank 0 drafts); the environment's SPECKER_GRAPHS sets it for a whole program",
        choices=("on", "off"),
        flag=False,
    )
    load: str = opt(
        "weights",
        "weights: read the checkpoint; dummy: random weights, from config.json alone, for benchmarks of shapes",
        choices=("weights", "dummy"),
        flag=False,
    )
    quantize: str | None = opt(
        None,
        "round the target's matrices to int8, int4 or fp8 when loading; none restores quantised ones to --dtype "
        "(default: as the checkpoint stores them)",
        choices=QUANTIZE,
    )
    draft_quantize: str | None = opt(
        None,
        "the same for the draft checkpoint, or stored: as the checkpoint has them (default: stored; on a CPU, unless "
        "--dtype is given, int8 instead of 16 or 32 bits)",
        choices=(*QUANTIZE, STORED),
    )
    activations: str | None = opt(
        None,
        "on a CPU, round what meets quantised weights to int8 (default; fastest), bfloat16 or float32",
        choices=ACTIVATIONS,
        flag=False,
    )
    kv_dtype: str | None = opt(
        None,
        "on a CPU, how K/V is kept: float16 (default where the compiled layers run the model), float32, bfloat16, or "
        "int8 with a scale for each head and row",
        choices=KV_DTYPES,
    )
    huge_pages: str = opt(
        "on",
        "on a CPU under Linux, move weights to huge pages, which are faster; memory then holds a copy of weights that "
        "are mapped from files: on, where half of the free memory suffices, or off",
        choices=("on", "off"),
    )
    max_context: int | None = opt(
        None, "positions to allocate K/V for (default: as many as the checkpoint allows and fit in memory)", least=1
    )
    page_size: int = opt(256, "K/V cache positions per page", least=1, flag=False)
    batch_size: int = opt(1, "sequences decoded at once", least=1, most=MAX_BATCH)
    kv_tokens: int | None = opt(
        None,
        "positions in the K/V pool that all sequences share (default: batch_size contexts, or as many as fit)",
        least=1,
    )
    prefix_cache: str = opt(
        "exact",
        "which K/V of earlier texts with the same beginning a request takes over: exact, as far as its bits are those "
        "of a fresh prefill; all; or off",
        choices=("exact", "all", "off"),
    )
    tp: int | None = opt(
        None, "ranks that share one target, in a torchrun job (default: all ranks divided by --dp)", least=1
    )
    dp: int = opt(1, "replicas that share the prompts", least=1)
    draft_ranks: int | None = opt(
        None, "ranks of --tp that draft (default: 1 with --draft-layout replicated, else all)", least=1
    )
    draft_layout: str | None = opt(
        None,
        "how the ranks that draft share a draft model: replicated (each has all of it), layer-parallel (each attends "
        "for some layers of a group), tensor (each has a part of every matrix) or both (layer-parallel, with split "
        "feed-forwards) (default: layer-parallel for easyspec, else replicated)",
        choices=LAYOUTS,
    )
    reduce: str = opt(
        "fast",
        "how to add the ranks' partial sums: fast, or ordered by rank, which keeps chains bit-equal to plain decoding",
        choices=("fast", "ordered"),
    )

    def __post_init__(self) -> None:
        if self.graphs is None and (named := os.environ.get(GRAPHS)) is not None:
            if named not in ("on", "off"):
                raise ValueError(f"the environment variable {GRAPHS} must be on or off, got {named!r}")
            object.__setattr__(self, "graphs", named)
        check_fields(self)


@dataclass(frozen=True)
class Source:
    """A strategy that drafts, with its own options."""

    strategy: Any  # a strategies.base.Strategy
    options: Any = None  # its own options, a frozen dataclass; None if it has none
    trim: Any = None  # strategies.vocabtrim.TrimOptions if the drafter's head is trimmed, otherwise None


@dataclass(frozen=True)
class Options(Common):
    """All options of an engine, parsed and checked. `strategies.options` makes it."""

    sources: tuple[Source, ...] = ()  # what drafts, one in each round; only the first may run a model
    departures: tuple[tuple[str, Any], ...] = ()  # with `as_published`: what the user chose instead of the paper's

    @property
    def base(self) -> Any:
        """The strategy of the first source."""
        return self.sources[0].strategy

    @property
    def own(self) -> Any:
        """The own options of the first source."""
        return self.sources[0].options

    @property
    def trim(self) -> Any:
        """How the head of the first source is trimmed; None: it is whole."""
        return self.sources[0].trim

    @property
    def adapts(self) -> bool:
        """Whether rounds rest while drafts lose, and texts and runs learn from earlier ones."""
        return not self.as_published

    @property
    def layout(self) -> str:
        """How the ranks that draft share a draft model."""
        layout: str = self.draft_layout or self.base.layouts[0]
        return layout

    @property
    def width(self) -> int:
        """Nodes per level of the draft; a chain is a tree of width 1."""
        return 1 if self.tree is None else self.tree.width


def biases(given: Any) -> tuple[tuple[int, float], ...]:
    """What is added to the logits of some ids, ascending: from a mapping, pairs, or texts such as `50256=-100`."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        pairs = [pair.split("=") if isinstance(pair, str) else pair for pair in pairs]
        found = {int(token): float(value) for token, value in pairs}
    except (TypeError, ValueError):
        found = None
    if found is None or len(found) < len(pairs) or any(token < 0 or not abs(x) <= 100 for token, x in found.items()):
        about = "must give ids, each once, values between -100 and 100, such as 50256=-100"
        raise ValueError(f"{option('logit_bias')} {about}; got {short(given)}")
    if len(found) > MAX_BIASES:
        raise ValueError(f"{option('logit_bias')} takes at most {MAX_BIASES} ids, got {len(found)}")
    return tuple(sorted(found.items()))


@dataclass(frozen=True)
class Sampling:
    """How to draw the target's token from its logits; the same for every strategy (see kernels/sample_rows.py and
    kernels/adjust_rows.py)."""

    temperature: float = opt(0.0, "0 decodes greedily")
    top_p: float = opt(1.0, "keep the smallest set of tokens with this much probability")
    top_k: int = opt(0, "keep the k most probable tokens; 0 keeps all", least=0)
    seed: int = opt(0, "the same seed gives the same tokens with every strategy")
    min_p: float = opt(0.0, "keep the tokens that are at least this share as probable as the most probable one")
    repetition_penalty: float = opt(
        1.0, "divide the logits of tokens that occur in the prompt or the text by this (multiply negative ones)"
    )
    presence_penalty: float = opt(0.0, "subtract this from the logits of tokens that the text has", least=-2, most=2)
    frequency_penalty: float = opt(0.0, "subtract this for each time that the text has the token", least=-2, most=2)
    logit_bias: tuple[tuple[int, float], ...] = opt((), "add X to the logit of a token id", "ID=X", parse=biases)

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.temperature == 0 or 1e-6 <= self.temperature < float("inf")):  # logits / 1e-7 could overflow
            raise ValueError(f"{option('temperature')} must be 0 or at least 1e-6, and finite, got {self.temperature}")
        if self.top_k > MOST_K:
            raise ValueError(f"{option('top_k')} must be at most {MOST_K}, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"{option('top_p')} must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"{option('min_p')} must be in [0, 1], got {self.min_p}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"{option('repetition_penalty')} must be in [0.01, 100], got {self.repetition_penalty}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"{option('seed')} must be in [0, 2**64), got {self.seed}")


@dataclass(frozen=True)
class Params:
    """What a request asks for.

    Attributes:
        max_new_tokens: tokens to emit at most.
        sampling: how to draw them.
        min_tokens: tokens before which no stop id and no stop string ends the text. A grammar that leaves nothing else
            does.
        stop: strings; the text ends before the first one that occurs.
        stop_ids: token ids that end the text, besides the model's own.
        ignore_eos: the model's own do not end it.
        logprobs: how many of the most probable tokens each emitted token comes with; 0: none, and no log-probability.
        prefix_cache: "exact", "all" or "off" for this request; None: as the engine was loaded.
        cache_salt: requests share what they leave behind, K/V of common beginnings and texts that lookup copies, only
            with requests of the same salt. None: K/V as without a salt, and no texts.
        grammar: what the text must match, as a function of specker.grammar returns it, or as a Lark grammar.
        policy: how long to draft for this request, as `--policy`, or "off" to draft nothing; None: as the engine was
            loaded. Requests with different policies are not decoded together.
        prediction: what the text will probably be, from which strategy lookup drafts first: a text, its token ids, or
            OpenAI's form, {"type": "content", "content": TEXT}.
    """

    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int = 0
    prefix_cache: str | None = None
    cache_salt: str | None = ""
    grammar: str | None = None
    ignore_eos: bool = False
    policy: str | None = None
    prediction: str | tuple[int, ...] | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prediction", predicted(self.prediction))
        object.__setattr__(self, "max_new_tokens", whole(self.max_new_tokens, option("max_new_tokens"), 1))
        object.__setattr__(self, "min_tokens", whole(self.min_tokens, option("min_tokens"), 0))
        check_least(self.min_tokens, self.max_new_tokens)
        object.__setattr__(self, "stop", stop_strings(self.stop))
        several = isinstance(self.stop_ids, list | tuple | set | frozenset)
        ids = tuple(whole(token, "a stop id", 0) for token in self.stop_ids) if several else None
        if ids is None:
            raise ValueError(f"stop_ids must be a list of token ids, got {self.stop_ids!r}")
        object.__setattr__(self, "stop_ids", ids)
        object.__setattr__(self, "logprobs", whole(self.logprobs, "logprobs", 0))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.ignore_eos and self.grammar is not None:
            raise ValueError("ignore_eos and a grammar exclude each other: a text ends where its grammar does")
        if self.policy is not None and not isinstance(self.policy, str):
            raise ValueError(f"policy must be a string, got {self.policy!r}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt must be a string, got {self.cache_salt!r}")
        if self.prefix_cache not in (None, "exact", "all", "off"):
            raise ValueError(f"prefix_cache must be exact, all or off, got {self.prefix_cache!r}")
        if self.grammar is not None and (not isinstance(self.grammar, str) or not self.grammar.strip()):
            raise ValueError(f"a grammar must be a string that is not empty (specker.grammar), got {self.grammar!r}")

    @classmethod
    def of(cls, **named: Any) -> "Params":
        """Parameters from flat names, those of `Sampling` included. Raises TypeError for an unknown one."""
        own = [f.name for f in dataclasses.fields(cls) if f.name != "sampling"]
        drawn = [f.name for f in dataclasses.fields(Sampling)]
        refuse_unknown(named, [*own, *drawn])
        sampling = Sampling(**{name: value for name, value in named.items() if name in drawn})
        return cls(sampling=sampling, **{name: value for name, value in named.items() if name in own})


def check_least(least: int, most: int) -> None:
    """ValueError for a text of at least `least` and at most `most` tokens."""
    if least > most:
        raise ValueError(f"{option('min_tokens')} must be at most {option('max_new_tokens')}, {most}; got {least}")


def whole(value: Any, name: str, least: int) -> int:
    """A whole number as Python's integer. Raises ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return operator.index(value)


def stop_strings(value: Any) -> tuple[str, ...]:
    """The strings at which a text ends: one string or several. Raises ValueError."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(stop, str) and stop for stop in several):
        raise ValueError(f"{option('stop')} must be a string or a list of strings, none of them empty, got {value!r}")
    return tuple(several)


def predicted(given: Any) -> str | tuple[int, ...] | None:
    """A prediction as a text or token ids; OpenAI's form of a text may divide it into parts. Raises ValueError."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        content: Any = given.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        known = given.keys() == {"type", "content"} and given["type"] == "content" and isinstance(parts, list)
        if known and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in parts
        ):
            return "".join(part["text"] for part in parts)
    elif isinstance(given, list | tuple):
        return tuple(whole(token, "a token id of the prediction", 0) for token in given)
    form = 'a text, token ids or {"type": "content", "content": TEXT}, whose TEXT may be a list of text parts'
    raise ValueError(f"{option('prediction')} must be {form}; got {short(given)}")


def refuse_unknown(options: dict[str, Any], known: list[str]) -> None:
    """Raise TypeError for unknown names; the message lists the unknown and the known options."""
    unknown = [name for name in options if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise TypeError(f"unknown option {', '.join(map(repr, unknown))}{meant}; known: {', '.join(known)}")
