"""Strategy `diffuspec`: a diffusion language model drafts a block in one denoising step over the text and a block of
masks (DiffuSpec, arXiv 2510.02358).

A round forwards the committed tokens that the cache lacks (the root among them) and k masks; all of these see each
other and the cached columns. The masks' columns are dropped, the tokens' stay, so a round costs accepted + 1 + k rows
and not the whole text. What stays saw other masks than the next round's: an approximation, which the target's check
makes harmless; `exact` forwards the whole text every round instead.

CPS, the search for a path through the block's candidates, stands in lattice.py. ADL, the block's adaptive length, is
`AdaptiveLength` below: with L_gen the guesses before the first stop token and L_acc the accepted ones,

    ema <- (1 - rho) ema + rho L          k = clip(floor(ema_gen) + step [ema_acc >= ema_gen], shortest, longest)

Row i predicts position i + 1 in Dream's checkpoints (shifted logits) and position i in plain masked-diffusion ones.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker import zoo
from specker.config import Options, Sampling
from specker.flags import opt, settle
from specker.kernels.ancestors import MAX_WORDS, pack_bits
from specker.kernels.noise import gumbel_at
from specker.runtime import ngram
from specker.runtime.draft import Draft
from specker.runtime.head import Head, Kept
from specker.runtime.lattice import Lattice, Search, best_paths, lattice, trie
from specker.runtime.model.cache import KVCache, Rows, Start
from specker.runtime.model.checkpoint import Checkpoint
from specker.runtime.model.decoder import Model, chain_rows, forward, prefill
from specker.runtime.policy import GENERAL, LONGEST, MAX_NODES, Budget, Fixed, Policy
from specker.runtime.stats import DiffusionStats
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy

CATCH_UP_ROWS = 64  # more tokens that the cache lacks are a prompt: prefill them
WINDOW = 64 * MAX_WORDS  # columns that the rows of one pass may hold
# The winners on the bundled pair, and the paper's range for models of the paper's size.
BLOCK = 4
ADL_BUNDLED = (3, 8)
ADL = (20, 30)
CHUNK = (4, 0.5)
CPS_LAMBDA = 0.85  # the paper has 0.5
LONGEST_CHUNKS = 32  # tokens that chunks may add up to


@dataclass
class DiffusionDrafter:
    model: Model  # bidirectional
    cache: KVCache
    head: Head
    stops: Head | None  # the rows of the target's stop ids, which are candidates everywhere
    stop_ids: frozenset[int]  # the target's
    search: Search | None = None  # None: the argmax of each position
    exact: bool = False
    _guesses: list[int] = field(default_factory=list, init=False)  # of this round's earlier passes
    _last: int = field(default=0, init=False)  # how many of them the last pass made

    def reset(self) -> None:
        self.cache.truncate(0)
        self.head.reset()

    def prefill(self, committed: list[int]) -> None:
        """The K/V of all but the root, each chunk of which sees itself and what stands before it."""
        if not self.exact and len(committed) <= self.model.config.max_context:
            prefill(self.model, self.cache, self._known(committed[self.cache.exact_len : -1]))

    def observe(self, path: list[int]) -> None:
        pass  # no draft token's K/V is kept: it was a mask's, or a guess's beside masks

    def propose(
        self,
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        keep_drafting: Callable[[float], bool] | None = None,
    ) -> Draft:
        """A draft under the root committed[-1]: a block of budget.block tokens (all of budget.depth if that is 0), and
        another behind it while `keep_drafting` says so of the least confident one's probability."""
        room = min(self.model.config.max_context, self.cache.capacity) - len(committed)
        depth = min(budget.depth, budget.nodes, room)
        if depth <= 0:
            return Draft.empty(self.model.device)
        self.head.follow(committed)
        self._guesses = []
        blocks: list[Lattice] = []
        confidence: list[float] = []
        passes = 0
        while True:
            n = min(budget.block or depth, depth - len(self._guesses))
            hidden = self._masked(committed, n)
            first = len(committed) + len(self._guesses) - 1  # the position of the row that plain decoding would ask
            positions = self.model.positions[first : first + n]
            passes += 1
            if self.search is None and keep_drafting is None:
                self._guesses += self.head.best(hidden, sampling, positions).tolist()
            else:
                block, ranks = self._candidates(hidden, sampling, positions)
                blocks.append(block)
                self._guesses += block.ids[:, 0].tolist()
                confidence += np.exp(ranks[:, 0]).tolist()
            more = keep_drafting is not None and keep_drafting(min(confidence[-n:]))
            if len(self._guesses) == depth or not more or self._stopped() < len(self._guesses):
                break
        generated = self._stopped()
        if self.search is None:
            tokens = self._guesses[: generated + 1]
            draft = Draft.chain(self._on_device(tokens), confidence=tuple(confidence[: len(tokens)]))
            return draft.with_found(DiffusionStats(generated, passes))
        draft, found = self._searched(blocks, committed, budget, sampling, self.search, passes)
        return draft.with_found(found)

    def _masked(self, committed: list[int], n: int) -> Tensor:
        """The hidden rows [n, E] that guess the n tokens behind the committed ones and this round's guesses."""
        config = self.model.config
        assert config.mask_token_id is not None
        masks = [config.mask_token_id] * n
        if self.exact:
            self.cache.truncate(0)
            text = self._known(committed + self._guesses) + masks
            depth = len(self.model.layers)
            hidden = prefill(self.model, self.cache, text, (depth,), n + 1, chunk=len(text))[depth]
            self.cache.truncate(len(committed))
        else:
            behind = len(committed) - self.cache.exact_len
            if behind > CATCH_UP_ROWS or behind + n > WINDOW:
                self.prefill(committed)
            base = self.cache.exact_len
            if self._guesses:  # columns from base on hold the guesses before the last block's, as they were then
                done = len(self._guesses) - self._last
                text = self._guesses[done:]
                base += done
            else:
                text = committed[base:]
            rows = self._all_ones(base, len(text) + n)
            tokens = torch.tensor(self._known(text) + masks, device=self.model.device)
            hidden = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens)).hidden[-n - 1 :]
            if not self._guesses:
                self.cache.exact_len = len(committed)
        self._last = n
        return hidden[:-1] if config.shifted_logits else hidden[1:]

    def hidden_static(self, start: Start, text: Tensor, n: int) -> Tensor:
        """`_masked` without a number on the host: `text` [R] are the last committed tokens, root included, which stand
        at `start`; n masks stand behind them. All of R run again, beside the new masks."""
        config = self.model.config
        assert config.mask_token_id is not None
        masks = torch.full((n,), config.mask_token_id, dtype=torch.int64, device=text.device)
        tokens = torch.cat((text.clamp(max=config.vocab_size - 1), masks))
        placed = chain_rows(self.model, self.cache, len(tokens), start=start)
        rows = placed._replace(ancestors=_full_words(len(tokens), text.device))
        hidden = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens)).hidden[-n - 1 :]
        return hidden[:-1] if config.shifted_logits else hidden[1:]

    def search_static(
        self, hidden: Tensor, committed: list[int], budget: Budget, sampling: Sampling
    ) -> tuple[Draft, DiffusionStats]:
        """The draft that a search finds in the rows [k, E] of `hidden_static`; reads their candidates on the host."""
        assert self.search is not None
        first = len(committed) - 1
        block, _ = self._candidates(hidden, sampling, self.model.positions[first : first + len(hidden)])
        self._guesses = block.ids[:, 0].tolist()
        return self._searched([block], committed, budget, sampling, self.search)

    def _all_ones(self, first: int, count: int) -> Rows:
        """`count` rows at the columns from `first` on that see each other and all before them."""
        end = first + count
        return Rows(
            positions=self.model.positions[first:end],
            slots=self.cache.slot_of[first:end],
            kv_len=self.cache.lengths[end : end + 1],
            window=self.cache.lengths[count : count + 1],
            ancestors=_full_words(count, self.model.device),
        )

    def _candidates(self, hidden: Tensor, sampling: Sampling, positions: Tensor) -> tuple[Lattice, Any]:
        """Each row's candidates, and their log-probabilities in the ranking used."""
        how = self.search
        k = 1 if how is None else min(how.candidates, self.head.weight.shape[0])
        ids, scores, lse = self.head.ranked(hidden, k, sampling, positions)
        count = 0
        if how is not None and self.stops is not None:
            count = self.stops.weight.shape[0]
            stop_ids, stop_scores, _ = self.stops.ranked(hidden, count, sampling, positions)
            ids, scores = torch.cat((ids, stop_ids), 1), torch.cat((scores, stop_scores), 1)
        ranks = scores - lse.unsqueeze(-1)
        noise = gumbel_at(sampling.seed, positions, ids) if sampling.temperature > 0 else None
        ids_, ranks_, noise_ = _on_host(ids, ranks, noise)
        return lattice(ids_, ranks_, noise_, 0.0 if how is None else how.mass, count), ranks_

    def _searched(
        self,
        blocks: list[Lattice],
        committed: list[int],
        budget: Budget,
        sampling: Sampling,
        how: Search,
        passes: int = 1,
    ) -> tuple[Draft, DiffusionStats]:
        """The draft, and what there was to find."""
        start = time.perf_counter()
        whole = blocks[0] if len(blocks) == 1 else Lattice.joined(blocks)
        before = (committed[-2] if len(committed) > 1 else -1, committed[-1])
        paths = best_paths(whole, how, before, self.stop_ids, sampling.temperature)
        score = paths[0].score / len(whole.ids)
        if not how.tree or len(paths) == 1:
            draft = Draft.chain(self._on_device(list(paths[0].tokens)))
        else:
            tokens, parents = trie(paths, budget.nodes, budget.depth)
            draft = Draft(self._on_device(tokens), self._on_device(parents))
        return draft, DiffusionStats(self._stopped(), passes, whole.width, score, time.perf_counter() - start)

    def _stopped(self) -> int:
        return self.stopped(self._guesses)

    def stopped(self, guesses: list[int]) -> int:
        """Guesses before the first stop token; all of them if there is none."""
        return next((n for n, token in enumerate(guesses) if token in self.stop_ids), len(guesses))

    def _on_device(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)

    def _known(self, tokens: list[int]) -> list[int]:
        """Ids that the drafter's vocabulary lacks become its last one: a draft may be anything."""
        last = self.model.config.vocab_size - 1
        return [min(token, last) for token in tokens]


def _on_host(ids: Tensor, ranks: Tensor, noise: Tensor | None) -> tuple[Any, Any, Any]:
    """As numpy. From a GPU in one read: ids are exact in float64."""
    if not ids.is_cuda:
        return ids.numpy(), ranks.numpy(), None if noise is None else noise.numpy()
    both = (ids, ranks) if noise is None else (ids, ranks, noise)
    first, *others = torch.stack([x.double() for x in both]).cpu().numpy()
    return first.astype(np.int64), others[0], others[1] if noise is not None else None


@lru_cache(maxsize=512)
def _full_words(count: int, device: torch.device) -> Tensor:
    return pack_bits([(1 << count) - 1] * count, count).to(device)


@dataclass
class AdaptiveLength:
    """ADL of DiffuSpec: follow how much the diffusion model generates before it would stop, and grow by `step` while
    the target accepts as much.

        k = clip(floor(ema_generated) + step [ema_accepted >= ema_generated], shortest, longest)

    with ema <- (1 - rho) ema + rho L, from 0; the first block is the longest.
    """

    shortest: int = 20
    longest: int = 30
    step: int = 10
    rho: float = 0.5
    nodes: int = 255  # of all paths
    confident: bool = field(default=False, init=False)
    layers: tuple[int, ...] = field(default=(), init=False)
    length: int = field(init=False)  # k
    generated: float = field(default=0.0, init=False)  # smoothed
    accepted: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.length = self.longest

    def budget(self) -> Budget:
        return Budget(self.nodes, self.length)

    def keep_drafting(self, confidence: float) -> bool:
        return True

    def observe(self, draft: Draft, path: list[int]) -> None:
        if draft.found is None or not len(draft):
            return
        self.generated += self.rho * (draft.found.generated - self.generated)
        self.accepted += self.rho * (len(path) - 1 - self.accepted)
        grown = self.step if self.accepted >= self.generated else 0
        self.length = min(max(math.floor(self.generated) + grown, self.shortest), self.longest)

    def learn(self, layers: tuple[int, ...], match: Any, confidence: Any, seconds: float = 0.0) -> None:
        pass


@dataclass
class Chunks(Fixed):
    """A diffusion drafter's block, and another behind it as long as it trusts every token (FailFast, 2512.20573)."""

    block: int = 4
    threshold: float = 0.5

    def __post_init__(self) -> None:
        self.confident = True

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, block=self.block)

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.threshold


def span(value: str | tuple[int, int]) -> tuple[int, int]:
    """--adl: the shortest and the longest block, `20-30`."""
    text = value if isinstance(value, str) else "-".join(map(str, value))
    match = re.fullmatch(r"(\d{1,3})-(\d{1,3})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= 255:
        raise ValueError(f"--adl must be SHORTEST-LONGEST within 1-255, such as 20-30, got {text!r}")
    return int(match[1]), int(match[2])


def chunked(value: str | tuple[int, float]) -> tuple[int, float]:
    """--chunk: tokens of a pass, and the probability below which a token ends the draft, `8:0.5`."""
    text = value if isinstance(value, str) else f"{value[0]}:{value[1]:f}"
    match = re.fullmatch(r"(\d{1,3}):(0|1|0?\.\d+|1\.0*)", text)
    if not match or not 1 <= int(match[1]) <= 128:
        raise ValueError(f"--chunk must be TOKENS:PROBABILITY within 1-128 and 0-1, such as 8:0.5, got {text!r}")
    return int(match[1]), float(match[2])


@dataclass(frozen=True)
class DiffuSpecOptions:
    cps: str | None = opt(
        None,
        "off: take the argmax of each position (default, if no search option is given); chain: search the lattice of "
        "candidates for the best path; tree: verify its best paths as one tree",
        choices=("off", "chain", "tree"),
    )
    cps_paths: int | None = opt(None, "width of the search's beam (default 3)", least=1, most=64)
    cps_candidates: int | None = opt(None, "candidates of a position at most (default 15)", least=1, most=64)
    cps_mass: float | None = opt(
        None, "keep the fewest candidates of a position with this probability (default 0.8)", least=0, most=1
    )
    cps_lambda: float | None = opt(
        None, "weight of the diffusion model against the n-gram model (default 0.85)", least=0, most=1
    )
    ngram: str | None = opt(
        None, "the search's n-gram model (default: the bundled family's); see python -m specker.calibrate"
    )
    diffusion_prefix: str = opt(
        "reuse",
        "reuse the text's K/V of earlier rounds, or run the whole text every round: exact",
        choices=("reuse", "exact"),
    )
    shifted_logits: str | None = opt(
        None, "whether row i predicts position i + 1: yes (default for Dream) or no (for others)", choices=("yes", "no")
    )
    adl: tuple[int, int] | None = opt(
        None,
        "shortest and longest block of --policy adl (default 20-30; 3-8 with the bundled pair)",
        parse=span,
    )
    chunk: tuple[int, float] | None = opt(
        None,
        "tokens a pass of --policy chunk, and the probability below which a token ends the draft (default 4:0.5)",
        parse=chunked,
    )

    def __post_init__(self) -> None:
        settle(self)
        if self.cps == "off" and self._search_options:
            raise ValueError("--cps off searches nothing: the other --cps-... flags and --ngram do not apply")

    @property
    def _search_options(self) -> bool:
        names = ("cps_paths", "cps_candidates", "cps_mass", "cps_lambda", "ngram")
        return any(getattr(self, name) is not None for name in names)

    @property
    def search(self) -> str:
        """Whether and how paths through a block are searched: off, chain or tree."""
        return self.cps or ("chain" if self._search_options else "off")

    def lengths(self, bundled: bool) -> tuple[int, int]:
        """The shortest and the longest block of --policy adl."""
        return self.adl or (ADL_BUNDLED if bundled else ADL)


class DiffuSpec(Strategy):
    name = "diffuspec"
    summary = "a diffusion language model drafts a block in one pass"
    options = DiffuSpecOptions
    policies = ("adl", "chunk")
    bundled_draft = "code-diffusion"
    causal = False

    def default_policy(self, options: Options) -> str:
        return "adl" if options.draft_tokens is None else "fixed"

    def check(self, options: Options) -> None:
        own: DiffuSpecOptions = options.own
        policy = options.policy or self.default_policy(options)
        if options.tree is not None:
            raise ValueError("strategy diffuspec drafts a block: --tree does not apply, but --cps tree does")
        if policy == "draft-and-verify":
            raise ValueError("--policy draft-and-verify ends a draft token by token, but diffuspec drafts a block")
        if policy == "plus-minus-one" and own.search == "tree":
            raise ValueError("--policy plus-minus-one is for chains: leave out --cps tree")
        for name in self.policies:
            if getattr(own, name) is not None and policy != name:
                raise ValueError(f"--{name} is for --policy {name}")
        if policy == "adl" and options.draft_tokens is not None:
            raise ValueError("--policy adl chooses the block's length: --adl bounds it, --draft-tokens does not apply")

    def adapt(self, options: Options, draft: Checkpoint) -> Checkpoint:
        shifted = options.own.shifted_logits
        if shifted is None:
            return draft
        return replace(draft, config=replace(draft.config, shifted_logits=shifted == "yes"))

    def chains(self, options: Options) -> bool:
        return options.own.search != "tree"

    def drafter(self, context: DraftContext) -> DiffusionDrafter:
        own: DiffuSpecOptions = context.options.own
        assert context.draft is not None
        search = _search(context, own)
        rows, kept = context.draft.weights.head, context.kept
        stop_ids = () if context.options.stand_ins else context.target.config.eos_ids
        row_of = range(len(rows)) if kept is None else {token: row for row, token in enumerate(kept.ids.tolist())}
        ids = [token for token in stop_ids if token in row_of]
        at = torch.tensor([row_of[token] for token in ids], dtype=torch.int64, device=rows.device)
        rows = rows[at]  # copied before the model packs the head
        model = context.draft_model()
        cache, head = context.allocate(model), context.head(model)
        stops = Head(rows, model.norm, model.config.rms_norm_eps, Kept(torch.tensor(ids, device=rows.device)))
        exact = own.diffusion_prefix == "exact"
        return DiffusionDrafter(model, cache, head, stops if ids else None, frozenset(stop_ids), search, exact)

    def policy(self, context: PolicyContext) -> Policy:
        """The paths of a block share its length, so the block's depth is limited and its nodes only by room."""
        options, own = context.options, context.options.own
        length, rule = options.draft_tokens or BLOCK, options.policy or "fixed"
        if rule == "adl":
            return AdaptiveLength(*own.lengths(context.bundled))
        if rule == "chunk":
            block, threshold = own.chunk or CHUNK
            return Chunks(MAX_NODES, options.draft_tokens or LONGEST_CHUNKS, block=block, threshold=threshold)
        return GENERAL[rule](MAX_NODES if rule == "fixed" else length, length)

    def plan(self, context: PolicyContext) -> Plan:
        """A searched path may end anywhere, so drafts of every size are verified."""
        options, own = context.options, context.options.own
        rule, shortest, longest = options.policy, 1, options.draft_tokens or BLOCK
        if rule == "adl":
            shortest, longest = own.lengths(context.bundled)
        elif rule == "plus-minus-one":
            longest = max(longest, LONGEST)
        elif rule == "fixed":
            shortest = longest
        paths = (own.cps_paths or Search.paths) if own.search == "tree" else 1
        nodes = min(paths * longest, MAX_NODES)
        sizes = (0,) if own.search == "off" else tuple(range(nodes + 1))
        lengths = tuple(Budget(nodes, n) for n in range(shortest, longest + 1))
        return Plan(Budget(nodes, longest), lengths, sizes, sizes)


def _search(context: DraftContext, own: DiffuSpecOptions) -> Search | None:
    """The path search, or None for the argmax, which is faster on the bundled pair."""
    how, target = own.search, context.target
    if how == "off":
        return None
    path = own.ngram or (zoo.ngram() if context.bundled else None)
    weight = CPS_LAMBDA if own.cps_lambda is None else own.cps_lambda
    if path is None and weight < 1:
        raise ValueError(
            f"--cps {how} needs --ngram for {target.folder} (python -m specker.calibrate --ngram makes one), "
            "or --cps-lambda 1 to go without, or --cps off"
        )
    model = None
    if path is not None and weight < 1:
        model = ngram.read(path)
        model.check(target.config.vocab_size, context.tokenizer_hash, path)
    return Search(
        model,
        own.cps_paths or Search.paths,
        how == "tree",
        own.cps_candidates or Search.candidates,
        Search.mass if own.cps_mass is None else own.cps_mass,
        weight,
    )
