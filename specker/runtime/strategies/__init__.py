"""The strategies, as data: which checkpoints one needs, and how its drafter and its policy are composed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specker import zoo
from specker.config import SEARCH_OPTIONS, Keep, Options, Tree, chunked, span
from specker.kernels.linear import pack, row_linear, row_linear_ref
from specker.runtime import ngram
from specker.runtime.dist import Ranks
from specker.runtime.draft import Drafter
from specker.runtime.head import Head, Kept
from specker.runtime.lattice import Search
from specker.runtime.model.cache import KVCache
from specker.runtime.model.checkpoint import Checkpoint
from specker.runtime.model.decoder import Model
from specker.runtime.policy import LONGEST, MAX_NODES, Budget, DraftAndVerify, Fixed, PlusMinusOne, Policy
from specker.runtime.strategies.diffuspec import AdaptiveLength, Chunks, DiffusionDrafter
from specker.runtime.strategies.draft import AutoregressiveDrafter
from specker.runtime.strategies.dynamic_exit import DynamicExit, EarlyExitDrafter, eligible_layers
from specker.runtime.strategies.easyspec import LayerParallel, Schedule
from specker.runtime.vocab_scores import VocabScores

SCRATCH = 256  # cache columns beyond the context: a verify pass of the largest tree
# Of 2, 3 and 4 the best mean over temperatures 0 and 0.7 on the bundled pair (bench/results), by less than the noise.
DRAFT_TOKENS = 4
VOCAB_KEEP = "0.125"
VOCAB_TEXT = 256
# Of diffuspec: the winners on the bundled pair, but the paper's range for models of the paper's size.
DIFFUSION_TOKENS = 4
ADL_BUNDLED = "3-8"
CPS_LAMBDA = 0.85  # the paper has 0.5
ADL = "20-30"  # the paper's
CHUNK = "4:0.5"
LONGEST_CHUNKS = 32  # tokens that chunks may add up to
LAYER_PARALLEL = "4"  # the paper's recommendation


@dataclass(frozen=True)
class Pair:
    target: Checkpoint
    draft: Checkpoint
    bundled: bool  # the family's own target
    tokenizer: str | None  # the target's hash, if it has one
    ranks: Ranks | None = None  # of which this one drafts


@dataclass(frozen=True)
class Strategy:
    bundled_draft: str | None  # which of the family drafts for the bundled target; None: no second checkpoint
    drafter: Callable[["Pair", Kept | None, Options], "Drafter"] | None
    """With the rows of the draft's head, None for all of them. None: nothing is drafted, or by the target."""
    causal: bool = True  # the draft checkpoint; False: a diffusion language model
    by_itself: bool = False  # the target drafts with its own first layers


def _autoregressive(pair: Pair, kept: Kept | None, options: Options) -> "Drafter":
    model = Model(pair.draft, pack_head=_packable(kept), linear=linear(options))
    return AutoregressiveDrafter(
        model,
        allocate(model, options),
        _head(model, kept),
        shape(options)[0],
        depth=longest(options, pair.bundled).depth,
    )


def _layer_parallel(pair: Pair, kept: Kept | None, options: Options) -> "Drafter":
    schedule = Schedule.parse(options.layer_parallel or LAYER_PARALLEL, pair.draft.config.num_layers)
    # a group's weights are stacked instead of packed
    model = Model(pair.draft, packed=False, pack_head=_packable(kept), linear=linear(options))
    cache = allocate(model, options)
    parallel = LayerParallel(model, cache, schedule, pair.ranks, pair.draft.weights)
    return AutoregressiveDrafter(
        model,
        cache,
        _head(model, kept),
        shape(options)[0],
        parallel,
        options.calibrate or "every",
        longest(options, pair.bundled).depth,
    )


def _diffusion(pair: Pair, kept: Kept | None, options: Options) -> "Drafter":
    search = _search(pair, options)
    rows, stop_ids = pair.draft.weights.head, () if options.stand_ins else pair.target.config.eos_ids
    row_of = range(len(rows)) if kept is None else {token: row for row, token in enumerate(kept.ids.tolist())}
    ids = [token for token in stop_ids if token in row_of]
    at = torch.tensor([row_of[token] for token in ids], dtype=torch.int64, device=rows.device)
    rows = rows[at]
    model = Model(pair.draft, pack_head=_packable(kept), linear=linear(options))
    stops = Head(rows, model.norm, model.config.rms_norm_eps, Kept(torch.tensor(ids, device=rows.device)))
    exact = options.diffusion_prefix == "exact"
    cache, head = allocate(model, options), _head(model, kept)
    depth = longest(options, pair.bundled).depth
    return DiffusionDrafter(model, cache, head, stops if ids else None, frozenset(stop_ids), search, exact, depth)


def searched(options: Options) -> str | None:
    """Whether paths through a block are searched: for the best "chain" or several as a "tree"."""
    asked = any(getattr(options, name) is not None for name in SEARCH_OPTIONS)
    how = options.cps or ("chain" if asked else "off")
    return None if how == "off" else how


def _search(pair: Pair, options: Options) -> Search | None:
    """The path search, or None for the argmax, which is faster on the bundled pair."""
    how = searched(options)
    if how is None:
        return None
    path = options.ngram or (zoo.ngram() if pair.bundled else None)
    weight = CPS_LAMBDA if options.cps_lambda is None else options.cps_lambda
    if path is None and weight < 1:
        raise ValueError(
            f"--cps {how} needs --ngram for {pair.target.folder} (python -m specker.calibrate --ngram makes one), "
            "or --cps-lambda 1 to go without, or --cps off"
        )
    model = None
    if path is not None and weight < 1:
        model = ngram.read(path)
        model.check(pair.target.config.vocab_size, pair.tokenizer, path)
    standard = Search()
    return Search(
        model,
        options.cps_paths or standard.paths,
        how == "tree",
        options.cps_candidates or standard.candidates,
        standard.mass if options.cps_mass is None else options.cps_mass,
        weight,
    )


def _packable(kept: Kept | None) -> bool:
    """Rows that follow the text are written in place, which a packed head does not allow."""
    return kept is None or not kept.text


def _head(model: Model, kept: Kept | None) -> Head:
    return Head(model.head, model.norm, model.config.rms_norm_eps, kept)


STRATEGIES = {
    "ar": Strategy(None, None),
    "draft": Strategy("code-draft", _autoregressive),
    "easyspec": Strategy("code-draft-deep", _layer_parallel),
    "del": Strategy(None, None, by_itself=True),
    "diffuspec": Strategy("code-diffusion", _diffusion, causal=False),
}


def default_keep(scores: VocabScores) -> Keep:
    """All that another's file keeps; of our own, which ranks everything, the measured winner on the bundled pair."""
    return Keep(rows=len(scores.ids)) if scores.counts is None else Keep.parse(VOCAB_KEEP)


def shape(options: Options) -> tuple[int, int]:
    """(width, depth) of what is drafted; a chain is a tree of width 1."""
    if options.tree is not None:
        tree = Tree.parse(options.tree)
        return tree.width, tree.depth
    usual = DIFFUSION_TOKENS if options.way == "diffuspec" else DRAFT_TOKENS
    return 1, usual if options.draft_tokens is None else options.draft_tokens


def early_exit(model: Model, cache: KVCache, rows: Tensor | None, kept: Kept | None) -> EarlyExitDrafter:
    """The target as its own drafter, with the kept `rows` [K, E] of its head or all of it."""
    if rows is None:
        head = _head(model, None)
    else:
        weight = pack(rows) if _packable(kept) else rows
        head = Head(weight, model.norm, model.config.rms_norm_eps, kept)
    return EarlyExitDrafter(model, cache, head)


def policy(options: Options, layers: int, head_cost: float, bundled: bool) -> Policy:
    """A request's own policy, fresh: what one learns from a prompt does not leak into the next. `layers` of the target;
    `head_cost` of a draft step's LM head, in those layers; `bundled`: of the family's own target."""
    width, depth = shape(options)
    if options.way == "diffuspec":
        return _block_policy(options, bundled)
    name = options.policy or ("del" if options.way == "del" else "fixed")
    if name.startswith("del"):
        return DynamicExit(eligible_layers(layers, head_cost), layers, head_cost, by_length=name == "del-length")
    exit = (options.exit_layer or max(1, layers // 2)) if options.way == "del" else 0
    rule = {"fixed": Fixed, "plus-minus-one": PlusMinusOne, "draft-and-verify": DraftAndVerify}[name]
    if name == "draft-and-verify" and options.draft_tokens is None:
        depth = LONGEST + 1  # confidence ends a draft, not a number
    return rule(width * depth if options.draft_tokens is None else options.draft_tokens, depth, exit)


def longest(options: Options, bundled: bool) -> Budget:
    """The largest draft that `policy` may ask for: nodes and depth."""
    width, depth = shape(options)
    rule = options.policy
    if options.way == "ar":
        return Budget(0, 0)
    if options.way == "diffuspec":
        if rule == "adl" or (rule is None and options.draft_tokens is None):
            depth = span(options.adl or (ADL_BUNDLED if bundled else ADL))[1]
        paths = (options.cps_paths or Search().paths) if options.cps == "tree" else 1
        depth = max(depth, LONGEST) if rule == "plus-minus-one" else depth
        return Budget(min(paths * depth, MAX_NODES), depth)
    if (options.way == "del" and (rule or "del").startswith("del")) or rule == "draft-and-verify":
        return Budget(*(options.draft_tokens or LONGEST + 1,) * 2)
    if rule == "plus-minus-one":
        return Budget(*(max(depth, LONGEST),) * 2)
    return Budget(width * depth if options.draft_tokens is None else options.draft_tokens, depth)


class Met(NamedTuple):
    """What a request may meet, and a warm-up goes through."""

    budgets: list[Budget]  # that `policy` may ask for; none: nothing is drafted
    verified: list[int]  # sizes of drafts that whole verify passes may have, beside those of the budgets
    accepted: list[int]  # sizes of drafts at all, likewise


def met(options: Options, layers: int, head_cost: float, bundled: bool) -> Met:
    """Of a policy that ends a draft by confidence the longest draft stands for all: it is drafted token by token."""
    most = longest(options, bundled)
    rule = options.policy or {"del": "del", "diffuspec": "adl" if options.draft_tokens is None else "fixed"}.get(
        options.way, "fixed"
    )
    sizes = list(range(most.nodes + 1))
    if options.way == "ar":
        return Met([], [0], [0])
    if options.way == "del":
        exits = eligible_layers(layers, head_cost) if rule.startswith("del") else (options.exit_layer or layers // 2,)
        length = most.depth if rule == "fixed" else 1
        return Met([Budget(length, length, exit) for exit in exits], [0], [0] if rule == "fixed" else sizes)
    if rule == "fixed" and options.way != "diffuspec":
        return Met([most], [0], [0])
    if rule == "draft-and-verify":
        return Met([most], sizes, sizes)
    first = span(options.adl or (ADL_BUNDLED if bundled else ADL))[0] if rule == "adl" else 1
    lengths = [most.depth] if rule == "fixed" else range(first, most.depth + 1)
    if options.way != "diffuspec" or not searched(options):  # a draft is as long as it was asked for
        sizes = [0]
    return Met([Budget(most.nodes, n) for n in lengths], sizes, sizes)


def _block_policy(options: Options, bundled: bool) -> Policy:
    """Of a diffusion drafter, whose paths share the block's length: nodes are limited by room alone."""
    depth = shape(options)[1]
    name = options.policy or ("adl" if options.draft_tokens is None else "fixed")
    if name == "adl":
        return AdaptiveLength(*span(options.adl or (ADL_BUNDLED if bundled else ADL)))
    if name == "chunk":
        block, threshold = chunked(options.chunk or CHUNK)
        depth = LONGEST_CHUNKS if options.draft_tokens is None else depth
        return Chunks(MAX_NODES, depth, block=block, threshold=threshold)
    return PlusMinusOne(depth, depth) if name == "plus-minus-one" else Fixed(MAX_NODES, depth)


def linear(options: Options) -> Callable[..., Tensor]:
    """What a Model multiplies with: the kernel whose rows do not depend on each other, or torch's own. A drafter's
    head is neither: it ends in the fused top-k."""
    return row_linear_ref if options.linear == "cublas" else row_linear


def allocate(model: Model, options: Options) -> KVCache:
    """A cache for sequences of the model's whole context and a round's scratch columns."""
    columns, page, n = model.config.max_context + SCRATCH, options.page_size, options.batch_size
    pages = None if options.kv_tokens is None else max(n, 1) * 0 + -(-options.kv_tokens // page)
    return KVCache(
        model.config, columns, dtype=model.dtype, device=model.device, page_size=page, sequences=n, pages=pages
    )
