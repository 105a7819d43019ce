"""Strategy `diffuspec`: a diffusion language model drafts a block in one denoising step over the text and a block of
masks (DiffuSpec, arXiv 2510.02358).

A round forwards the committed tokens that the cache lacks (including the root) and k masks; all of them see each other
and the cached columns. The cache keeps the tokens' columns and drops the masks', so a round costs accepted + 1 + k rows
instead of the whole text. The kept K/V saw an earlier round's masks: an approximation that can cost acceptance but not
correctness. --diffusion-prefix exact forwards the whole text every round instead.

CPS, the path search through the block's candidates, is in lattice.py. ADL, the adaptive block length, is
`AdaptiveLength` below: with L_gen the guesses before the first stop token and L_acc the accepted ones,

    ema <- (1 - rho) ema + rho L          k = clip(floor(ema_gen) + step [ema_acc >= ema_gen], shortest, longest)

Row i predicts position i + 1 in Dream's checkpoints (shifted logits) and position i in plain masked-diffusion ones.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.config import Options, Sampling
from specker.flags import opt, settle
from specker.kernels.ancestors import MAX_WORDS, pack_bits
from specker.kernels.noise import gumbel_at
from specker.runtime import ngram
from specker.runtime import state as states
from specker.runtime.draft import CATCH_UP_ROWS, ModelDrafter
from specker.runtime.head import Head, Kept
from specker.runtime.lattice import Lattice, Search, best_paths, lattice, trie
from specker.runtime.model.cache import KVCache
from specker.runtime.model.checkpoint import Checkpoint
from specker.runtime.model.decoder import Final, Model, forward, prefill
from specker.runtime.policy import (
    AUTO,
    CONFIDENT,
    LENGTHS,
    LONGEST,
    MAX_NODES,
    Budget,
    Fixed,
    Outcome,
    Policy,
    StopRule,
    general,
)
from specker.runtime.round import Round
from specker.runtime.stats import DiffusionStats
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy
from specker.zoo import Family

WINDOW = 64 * MAX_WORDS  # maximum rows of one pass
# The measured winners on the bundled pair.
BLOCK = 4
CHUNK = (4, 0.5)
ADL = (20, 30)  # the paper's, for models of the paper's size
CPS_LAMBDA = 0.85  # 0.5 in the paper
LONGEST_CHUNKS = 32  # maximum tokens of all chunks


class DiffusionDrafter(ModelDrafter):
    def __init__(
        self,
        model: Model,
        cache: KVCache,
        head: Head,
        stops: Head | None,
        stop_ids: frozenset[int],
        search: Search | None = None,
        exact: bool = False,
        depth: int = 0,
    ):
        """`model` is bidirectional. `stops`: a head with the rows of the target's stop ids, which are candidates
        everywhere. `search`: None takes the argmax of each position."""
        super().__init__(model, cache, head, depth)
        self.stops, self.stop_ids, self.search, self.exact = stops, stop_ids, search, exact
        self.reads = search is not None
        self._last = 0  # tokens guessed by the last pass

    def prefill(self, slot: int, text: list[int]) -> None:
        """Each chunk sees itself and the earlier columns."""
        if not self.exact:
            super().prefill(slot, text)

    def room(self, length: int) -> int:
        return self.limit - length

    def fixed(self, length: int, budget: Budget) -> bool:
        """Whether the catch-up rows and the masks fit into the window of one pass."""
        rows = self.repeated + min(budget.depth, budget.nodes)
        return not self.exact and not budget.block and rows <= WINDOW and super().fixed(length, budget)

    def draft(self, r: Round) -> None:
        """Draft a block of budget.block tokens (budget.depth if that is 0), and further blocks while the policies
        accept the probability of the last block's least confident token."""
        if self.head.kept is not None:
            self.head.follow(r.sequences)
        depth = min(r.budget.depth, r.budget.nodes)
        if r.fixed:
            r.run(("block", depth), lambda: self._fixed_block(r, depth))
            if self.search is None:
                r.size = r.depth = depth
                r.generated, r.found = True, [DiffusionStats(0)] * len(r.sequences)
                return
            lengths = [len(s.text) for s in r.sequences]
            new, blocks, _ = self._candidates(r, Final(r.kept("hidden", r.n * depth)), lengths)
            self._searched(r, new, [[block] for block in blocks], 1)
            return
        texts = [s.text[: self.limit] for s in r.sequences]
        guesses: list[list[int]] = [[] for _ in texts]
        lattices: list[list[Lattice]] = [[] for _ in texts]
        confidence: list[list[float]] = [[] for _ in texts]
        passes = done = 0
        while True:
            n = min(r.budget.block or depth, depth - done)
            final = self._masked(texts, guesses, done, n)
            passes += 1
            if self.search is None and not r.asks:
                at = self._positions([len(t) + done for t in texts], n)
                new = self.head.best(final, r.draws, at).view(len(texts), n).tolist()
            else:
                new, blocks, sure = self._candidates(r, final, [len(t) + done for t in texts])
                for b, block in enumerate(blocks):
                    lattices[b].append(block)
                    confidence[b] += sure[b]
            guesses = [old + more for old, more in zip(guesses, new, strict=True)]
            done += n
            more = r.asks and r.vote([min(each[-n:]) for each in confidence])
            if done == depth or not more or all(self.stopped(g) < done for g in guesses):
                break
        if self.search is not None:
            r.confidence = []  # of blocks; a searched path may hold other tokens
            self._searched(r, guesses, lattices, passes)
            return
        kept = [g[: self.stopped(g) + 1] for g in guesses]
        r.confidence = [list(each) for each in zip_longest(*confidence, fillvalue=0.0)] if r.asks else []
        r.write(kept, [list(range(len(k))) for k in kept])
        r.found = [DiffusionStats(self.stopped(g), passes) for g in guesses]

    def observe(self, r: Round, slot: int, path: list[int]) -> None:
        """Keep no draft token's K/V: it belongs to a mask, or to a guess that saw masks."""
        if r.fixed and r.size:
            self.cache.exact_len[slot] = self.exact_after_fixed(len(r.sequences[slot].text))
        if r.generated:
            r.found[slot] = DiffusionStats(self.stopped(r.host["draft"][slot].tolist()))

    def _positions(self, lengths: list[int], k: int) -> Tensor:
        """[len(lengths) * k] int64, the positions that plain decoding draws the next k tokens of each text after."""
        device, last = self.model.device, self.model.config.max_context - 1
        first = torch.tensor(lengths, device=device)[:, None] - 1
        return (first + torch.arange(k, device=device)).clamp(max=last).view(-1)

    def _masked(self, texts: Sequence[list[int]], guesses: list[list[int]], done: int, n: int) -> Final:
        """The rows [sequences * n, E] that predict the n tokens after the texts and this round's guesses."""
        config, cache = self.model.config, self.cache
        assert config.mask_token_id is not None
        masks = [config.mask_token_id] * n
        out = slice(-n - 1, -1) if config.shifted_logits else slice(-n, None)
        if self.exact:
            kept = []
            for slot, (text, new) in enumerate(zip(texts, guesses, strict=True)):
                cache.truncate(0, slot)
                # If the text exceeds the drafter's context, it sees only the end: a poor draft, but a valid one.
                whole, depth = (self.known(text + new) + masks)[-self.limit :], len(self.model.layers)
                hidden = prefill(self.model, cache, whole, (depth,), n + 1, chunk=len(whole), slot=slot)[depth]
                cache.truncate(min(len(text), len(whole)), slot)
                kept.append(hidden[out])
            return Final(torch.cat(kept))
        starts, new_tokens = [], []
        for slot, (text, new) in enumerate(zip(texts, guesses, strict=True)):
            behind = len(text) - cache.exact_len[slot]
            if behind > CATCH_UP_ROWS or behind + n > WINDOW:
                self.prefill(slot, text)
            start = cache.exact_len[slot]
            if done:  # the columns after the text hold the blocks before the last
                before = done - self._last
                starts.append(start + before)
                new_tokens.append(self.known(new[before:]) + masks)
            else:
                start = min(start, len(text) - 1)
                starts.append(start)
                new_tokens.append(self.known(text[start:]) + masks)
                cache.exact_len[slot] = len(text)
        self._last = n
        rows = cache.after(starts, [len(tokens) for tokens in new_tokens], full=True)
        tokens = torch.tensor([token for each in new_tokens for token in each], device=self.model.device)
        final = forward(self.model, cache, rows, self.model.embed_tokens(tokens)).final
        if len(texts) == 1:
            return final.at(out)
        each = final.rows.split([len(tokens) for tokens in new_tokens])
        return Final(torch.cat([x[out] for x in each]), final.normed)

    def _fixed_block(self, r: Round, k: int) -> None:
        """One pass, placed by the device, over the last committed tokens and the new masks."""
        config, R, n = self.model.config, self.repeated, r.n
        assert config.mask_token_id is not None
        text = r.last(R).clamp(max=config.vocab_size - 1)
        tokens = torch.cat((text, torch.full_like(text[:, :1], config.mask_token_id).expand(n, k)), 1)
        rows = self.cache.place(r.lengths, R, 0, R + k)
        rows = rows._replace(ancestors=_full_words(R + k, self.model.device).repeat(n, 1))
        out = forward(self.model, self.cache, rows, self.model.embed_tokens(tokens.view(-1)))
        masks = slice(R - 1, -1) if config.shifted_logits else slice(R, None)

        def asking(x: Tensor) -> Tensor:
            return x.view(n, R + k, -1)[:, masks].reshape(n * k, -1)

        if self.search is not None:
            r.keep("hidden", asking(out.hidden))
            return
        asked = (r.state.length[:, None] + torch.arange(-1, k - 1, device=self.model.device)).view(-1)
        final = Final(asking(out.final.rows), out.final.normed)
        r.window[:, 1 : k + 1] = self.head.best(final, r.draws, asked).view(n, k)

    def _candidates(
        self, r: Round, final: Final, lengths: list[int]
    ) -> tuple[list[list[int]], list[Lattice], list[list[float]]]:
        """final [n * k, E], the rows that predict the tokens after texts of `lengths` -> per sequence the best guesses
        [k], the candidates of each position, and the guesses' probabilities [k]. Waits for the device."""
        how, n = self.search, len(r.sequences)
        k = len(final.rows) // r.n
        positions = self._positions(lengths + [1] * (r.n - n), k)
        width = 1 if how is None else min(how.candidates, self.head.weight.shape[0])
        ids, scores, lse = self.head.ranked(final, width, r.draws, positions)
        stops = 0
        if how is not None and self.stops is not None:
            stops = self.stops.weight.shape[0]
            stop_ids, stop_scores, _ = self.stops.ranked(final, stops, r.draws, positions)
            ids, scores = torch.cat((ids, stop_ids), 1), torch.cat((scores, stop_scores), 1)
        noise = self._noise(r.sequences, positions, ids, k)
        ids_, ranks_, noise_ = _on_host(ids, scores - lse.unsqueeze(-1), noise)
        mass = 0.0 if how is None else how.mass
        blocks = []
        for b, sequence in enumerate(r.sequences):
            own = slice(b * k, (b + 1) * k)
            drawn = noise_ is not None and sequence.sampling.temperature > 0
            blocks.append(lattice(ids_[own], ranks_[own], noise_[own] if drawn else None, mass, stops))
        sure = [np.exp(ranks_[b * k : (b + 1) * k, 0]).tolist() for b in range(n)]
        return [block.ids[:, 0].tolist() for block in blocks], blocks, sure

    @staticmethod
    def _noise(sequences: Sequence[states.Sequence], positions: Tensor, ids: Tensor, k: int) -> Tensor | None:
        samplings: list[Sampling] = [s.sampling for s in sequences]
        if all(s.temperature == 0 for s in samplings):
            return None
        noise = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        for b, s in enumerate(samplings):
            own = slice(b * k, (b + 1) * k)
            if s.temperature > 0:
                noise[own] = gumbel_at(s.seed, positions[own], ids[own])
        return noise

    def _searched(self, r: Round, guesses: list[list[int]], blocks: list[list[Lattice]], passes: int) -> None:
        """Search paths through each sequence's blocks, write them as drafts and record the statistics."""
        how = self.search
        assert how is not None
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for sequence, own, found in zip(r.sequences, guesses, blocks, strict=True):
            start = time.perf_counter()
            whole = found[0] if len(found) == 1 else Lattice.joined(found)
            before = (sequence.text[-2] if len(sequence.text) > 1 else -1, sequence.text[-1])
            paths = best_paths(whole, how, before, self.stop_ids, sequence.sampling.temperature)
            score = paths[0].score / len(whole.ids)
            if not how.tree or len(paths) == 1:
                tokens.append(list(paths[0].tokens))
                parents.append(list(range(len(tokens[-1]))))
            else:
                found_tokens, found_parents = trie(paths, r.budget.nodes, r.budget.depth)
                tokens.append(found_tokens)
                parents.append(found_parents)
            seconds = time.perf_counter() - start
            r.found.append(DiffusionStats(self.stopped(own), passes, whole.width, score, seconds))
        r.write(tokens, parents)

    def stopped(self, guesses: list[int]) -> int:
        """The number of guesses before the first stop token; all if there is none."""
        return next((n for n, token in enumerate(guesses) if token in self.stop_ids), len(guesses))


def _on_host(ids: Tensor, ranks: Tensor, noise: Tensor | None) -> tuple[Any, Any, Any]:
    """Copy to numpy, from a GPU in one transfer: float64 represents ids exactly."""
    if not ids.is_cuda:
        return ids.numpy(), ranks.numpy(), None if noise is None else noise.numpy()
    both = (ids, ranks) if noise is None else (ids, ranks, noise)
    first, *others = torch.stack([x.double() for x in both]).cpu().numpy()
    return first.astype(np.int64), others[0], others[1] if noise is not None else None


@lru_cache(maxsize=512)
def _full_words(count: int, device: torch.device) -> Tensor:
    return pack_bits([(1 << count) - 1] * count, count).to(device)


@dataclass
class AdaptiveLength(Policy):
    """ADL of DiffuSpec (arXiv 2510.02358): follow the number of guesses before the first stop token, and add `step`
    while the target accepts as many.

        k = clip(floor(ema_generated) + step [ema_accepted >= ema_generated], shortest, longest)

    with ema <- (1 - rho) ema + rho L, starting from 0. The first block has the longest length.
    """

    shortest: int = 20
    longest: int = 30
    step: int = 10
    rho: float = 0.5
    nodes: int = 255  # of all paths
    rests = True
    length: int = field(init=False)  # k
    generated: float = field(default=0.0, init=False)  # smoothed
    accepted: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.length = self.longest

    def budget(self) -> Budget:
        return Budget(self.nodes, self.length)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.found is None or not outcome.drafted:
            return
        self.generated += self.rho * (outcome.found.generated - self.generated)
        self.accepted += self.rho * (len(outcome.path) - 1 - self.accepted)
        grown = self.step if self.accepted >= self.generated else 0
        self.length = min(max(math.floor(self.generated) + grown, self.shortest), self.longest)


@dataclass
class Chunks(Fixed):
    """Draft further blocks while every token is at least as probable as `threshold` (FailFast, arXiv 2512.20573)."""

    block: int = 4
    threshold: float = 0.5
    confident = True
    rests = True

    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth, block=self.block)

    @property
    def rule(self) -> StopRule:  # type: ignore[override]
        return StopRule(token=self.threshold)


def span(value: str | tuple[int, int]) -> tuple[int, int]:
    """Parse --adl: the shortest and the longest block, such as `20-30`."""
    text = value if isinstance(value, str) else "-".join(map(str, value))
    match = re.fullmatch(r"(\d{1,3})-(\d{1,3})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= 255:
        raise ValueError(f"--adl must be SHORTEST-LONGEST within 1-255, such as 20-30, got {text!r}")
    return int(match[1]), int(match[2])


def chunked(value: str | tuple[int, float]) -> tuple[int, float]:
    """Parse --chunk: tokens per pass and the probability below which a token ends the draft, such as `8:0.5`."""
    text = value if isinstance(value, str) else f"{value[0]}:{value[1]:f}"
    match = re.fullmatch(r"(\d{1,3}):(0|1|0?\.\d+|1\.0*)", text)
    if not match or not 1 <= int(match[1]) <= 128:
        raise ValueError(f"--chunk must be TOKENS:PROBABILITY within 1-128 and 0-1, such as 8:0.5, got {text!r}")
    return int(match[1]), float(match[2])


@dataclass(frozen=True)
class DiffuSpecOptions:
    cps: str | None = opt(
        None,
        "off: take the argmax of each position (default without search options); chain: search the lattice of "
        "candidates for the best path; tree: verify the best paths as one tree",
        choices=("off", "chain", "tree"),
    )
    cps_paths: int | None = opt(None, "width of the search's beam (default 3)", least=1, most=64)
    cps_candidates: int | None = opt(None, "maximum candidates per position (default 15)", least=1, most=64)
    cps_mass: float | None = opt(
        None, "keep the fewest candidates of a position with this probability (default 0.8)", least=0, most=1
    )
    cps_lambda: float | None = opt(
        None, "weight of the diffusion model against the n-gram model (default 0.85)", least=0, most=1
    )
    ngram: str | None = opt(
        None,
        "the search's n-gram model (default: the bundled one for the target); see python -m specker.calibrate",
        "FILE",
    )
    diffusion_prefix: str = opt(
        "reuse",
        "reuse: keep the text's K/V of earlier rounds; exact: run the whole text every round",
        choices=("reuse", "exact"),
    )
    shifted_logits: str | None = opt(
        None, "whether row i predicts position i + 1 (default: yes for Dream, no for others)", choices=("yes", "no")
    )
    adl: tuple[int, int] | None = opt(
        None,
        "shortest and longest block of --policy adl (default 20-30; with bundled drafts the fastest measured)",
        "SHORTEST-LONGEST",
        parse=span,
    )
    chunk: tuple[int, float] | None = opt(
        None,
        "tokens per pass of --policy chunk, and the probability below which a token ends the draft (default 4:0.5)",
        "TOKENS:X",
        parse=chunked,
    )

    def __post_init__(self) -> None:
        settle(self)
        if self.cps == "off" and self._search_options:
            raise ValueError("--cps off disables the search: the other --cps-... flags and --ngram do not apply")

    @property
    def _search_options(self) -> bool:
        names = ("cps_paths", "cps_candidates", "cps_mass", "cps_lambda", "ngram")
        return any(getattr(self, name) is not None for name in names)

    @property
    def search(self) -> str:
        """The mode of the path search: off, chain or tree."""
        return self.cps or ("chain" if self._search_options else "off")

    def lengths(self, family: Family | None) -> tuple[int, int]:
        """The shortest and the longest block of --policy adl, in tokens."""
        return self.adl or (None if family is None else family.adl) or ADL


class DiffuSpec(Strategy):
    name = "diffuspec"
    summary = "a diffusion language model drafts a block in one pass"
    paper = "DiffuSpec (2510.02358)"
    options = DiffuSpecOptions
    policies = ("adl", "chunk")
    needs_draft = True
    causal = False

    def default_policy(self, options: Options) -> str:
        return "adl" if options.draft_tokens is None else "fixed"

    def check(self, options: Options) -> None:
        own: DiffuSpecOptions = options.own
        policy = options.policy or self.default_policy(options)
        if options.tree is not None:
            raise ValueError("strategy diffuspec drafts a block: --tree does not apply, but --cps tree does")
        if policy in CONFIDENT:
            raise ValueError(f"--policy {policy} ends a draft token by token, but diffuspec drafts a block")
        if policy in ("plus-minus-one", AUTO) and own.search == "tree":
            raise ValueError(f"--policy {policy} is for chains: leave out --cps tree")
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
        model = context.draft_model()
        cache, head = context.allocate(model), context.head(model)
        stops = Head(rows[at], model.norm, model.config.rms_norm_eps, Kept(torch.tensor(ids, device=rows.device)))
        exact = own.diffusion_prefix == "exact"
        return DiffusionDrafter(
            model, cache, head, stops if ids else None, frozenset(stop_ids), search, exact, context.depth(self)
        )

    def policy(self, context: PolicyContext) -> Policy:
        """All paths of a block have its length, so the policies limit the depth; only MAX_NODES limits the nodes."""
        options, own = context.options, context.options.own
        length, rule = options.draft_tokens or BLOCK, options.policy or "fixed"
        if rule == "adl":
            return AdaptiveLength(*own.lengths(context.family))
        if rule == "chunk":
            block, threshold = own.chunk or CHUNK
            return Chunks(MAX_NODES, options.draft_tokens or LONGEST_CHUNKS, block=block, threshold=threshold)
        if rule == AUTO:
            longest = options.draft_tokens or LENGTHS[-1]
            return self.auto(replace(context, confident=False), Budget(longest, longest))
        return general(rule, Budget(MAX_NODES if rule == "fixed" else length, length))

    def plan(self, context: PolicyContext) -> Plan:
        """A searched path may end anywhere, so the warm-up verifies drafts of every size."""
        options, own = context.options, context.options.own
        rule, shortest, longest = options.policy, 1, options.draft_tokens or BLOCK
        if rule == AUTO:
            longest = options.draft_tokens or LENGTHS[-1]
        if rule == "adl":
            shortest, longest = own.lengths(context.family)
        elif rule == "plus-minus-one":
            longest = max(longest, LONGEST)
        elif rule == "fixed":
            shortest = longest
        elif rule == "chunk":  # its rounds never have fixed shapes
            longest = options.draft_tokens or LONGEST_CHUNKS
            return Plan(Budget(min(longest * (own.cps_paths or Search.paths), MAX_NODES), longest), (), (0,), (0,))
        paths = (own.cps_paths or Search.paths) if own.search == "tree" else 1
        nodes = min(paths * longest, MAX_NODES)
        sizes = (0,) if own.search == "off" else tuple(range(nodes + 1))
        lengths = tuple(Budget(nodes, n) for n in range(shortest, longest + 1))
        return Plan(Budget(nodes, longest), lengths, sizes, sizes)


def _search(context: DraftContext, own: DiffuSpecOptions) -> Search | None:
    """The path search, or None for the argmax, which is faster on the bundled pair. Raises ValueError if the n-gram
    model is missing or of another vocabulary."""
    how, target = own.search, context.target
    if how == "off":
        return None
    path = own.ngram or (None if context.family is None else context.family.ngram)
    weight = CPS_LAMBDA if own.cps_lambda is None else own.cps_lambda
    if path is None and weight < 1:
        raise ValueError(
            f"--cps {how} needs --ngram for {target.folder} (python -m specker.calibrate --ngram makes one), "
            "or --cps-lambda 1 to search without it, or --cps off"
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
