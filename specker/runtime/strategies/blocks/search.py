"""Make drafts of the rows of blocks: the candidates of each position, and the chain or the tree that a search finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.fields import option
from specker.kernels.round.lattice import cut_lattice
from specker.model.decoder import Final
from specker.runtime.control.policy import Budget
from specker.runtime.control.stats import BlockStats
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.base import DraftContext
from specker.runtime.strategies.blocks import (
    BEAM,
    CANDIDATES,
    MASS,
    RANKED_CANDIDATES,
    RANKED_MASS,
    BlockOptions,
    ngram,
)
from specker.runtime.strategies.blocks.ngram_scorer import NGramScorer, Tables
from specker.runtime.strategies.blocks.tree import Scorer, size, write_chain, write_tree


@dataclass(eq=False)
class BlockDraft(Draft):
    """A draft of a model that guesses blocks. `observed` is "draft" where the tokens are the best of each position, and
    "search" where they were searched."""

    blocks: list[BlockStats] = field(default_factory=list)  # one a sequence, once accepted

    def note(self, slot: int) -> BlockStats | None:
        return self.blocks[slot] if self.blocks and slot not in self.idle else None

    def observe(self, accepted: Accepted, stop_ids: frozenset[int]) -> None:
        """Note what was generated, which only the device knew until now."""
        if self.observed == "search":
            self.blocks = [BlockStats(int(generated), *rest) for generated, *rest in accepted.observed]
        elif self.observed:
            self.blocks = [BlockStats(before_stop(tokens[: self.size], stop_ids)) for tokens in accepted.observed]


@dataclass(frozen=True)
class Search:
    """Parameters of the path search. The defaults are the fastest measured with the bundled models."""

    ngram: Tables | None = None
    tree: bool = False  # True: draft the most probable beginnings of paths; False: the best path
    paths: int = BEAM  # B of a chain's beam
    candidates: int = CANDIDATES  # M, the most candidates per position
    mass: float = MASS  # tau: keep the fewest candidates with this much probability
    weight: float = 0.85  # lambda from the second position on (0.5 in the paper)
    both: bool = False  # whether lambda is the same at the first position, as in the paper; else it is 1

    def shaped(self, budget: Budget) -> "Search | None":
        """The search for a draft of this shape. Policy auto may take a chain where trees may be drafted: that of the
        n-gram model, or without one (None) the drafter's own."""
        if not self.tree or budget.tree:
            return self
        return None if self.ngram is None else replace(self, tree=False)


def read(context: DraftContext, device: torch.device, ranks_paths: bool = False) -> Search | None:
    """The path search of the options, or None for the argmax of each position. `ranks_paths`: the drafter says itself
    how probable a candidate is after a path, so it takes no n-gram model. Raises ValueError if the n-gram model is of
    another vocabulary."""
    own: BlockOptions = context.options.own
    if own.search == "off":
        return None
    path = None if ranks_paths else own.ngram or (None if context.family is None else context.family.ngram)
    model = None if path is None else ngram.read(path)
    if model is not None:
        model.check(context.target.config.vocab_size, context.tokenizer_hash, path)
    if model is None and own.cps_lambda is not None:
        asked = option("cps_lambda", own.cps_lambda)
        raise ValueError(
            f"{asked} weighs an n-gram model, and this target has none: make one with specker calibrate and pass "
            f"{option('ngram')}"
        )
    named = "without an n-gram model" if path is None else f"with the n-gram model {Path(path).name}"
    context.notes.fact("path_search", f"paths through blocks are searched {named}", shown=True)
    given = {"mass": own.cps_tau, "candidates": own.cps_candidates, "paths": own.cps_beam, "weight": own.cps_lambda}
    ranked = {"mass": RANKED_MASS, "candidates": RANKED_CANDIDATES} if ranks_paths and own.search == "tree" else {}
    constants: dict[str, Any] = ranked | {name: value for name, value in given.items() if value is not None}
    tables = None if model is None else Tables.of(model, device)
    return Search(tables, own.search == "tree", both=own.cps_first == "both", **constants)


def searched(batch: Batch, depth: int, how: Search, candidates: int) -> BlockDraft:
    """The draft that `search` will write: of `depth` positions with `candidates` each."""
    count = size(depth, candidates, batch.budget.nodes) if how.tree else depth
    return BlockDraft(count, tree=how.tree, depth=depth, observed="search")


def search(
    batch: Batch,
    draft: Draft,
    final: Final,
    positions: Tensor,
    head: LMHead,
    how: Search,
    stop_ids: Tensor,
    stops: LMHead | None = None,
    scorer: Callable[[Tensor, Tensor, Tensor], Scorer | None] = lambda ids, logits, lse: None,
) -> None:
    """Search each sequence's block, and write the path or the tree. final [n * k, E]: the rows that predict k tokens of
    each sequence, at `positions` [n * k] int64. `stop_ids` [s] int64: where paths end. `stops`: a head with their rows,
    which are then candidates everywhere. `scorer`: makes the drafter's own of the candidates [n, k, K] int64, their
    logits with noise, over the temperature, and the lse [n, k] of all ids."""
    n, k, count = batch.n, draft.depth, 0
    ids, logits, lse = head.ranked(final, min(how.candidates, head.most), batch.draws, positions)
    if stops is not None:
        count = stops.most
        more, theirs, _ = stops.ranked(final, count, batch.draws, positions)
        ids, logits = torch.cat((ids, more), 1), torch.cat((logits, theirs), 1)
    ids, logits, lse = ids.view(n, k, -1), logits.view(n, k, -1), lse.view(n, k)
    report = batch.memory.out("search", n)
    report = logits.new_empty(n, 3) if report is None else report
    found = cut_lattice(ids, logits, lse, stop_ids, report, how.mass, count)
    by: Scorer | None = scorer(ids, logits, lse)
    if by is None and how.ngram is not None:
        by = NGramScorer(batch, found, positions, how.ngram, how.weight, how.both)
    if how.tree:
        write_tree(batch, found, by, stop_ids, draft.size, report[:, 2])
    else:
        write_chain(batch, found, by, stop_ids, how.paths, report[:, 2])
    batch.memory.put("search", report)


def before_stop(guesses: Sequence[int], stop_ids: frozenset[int]) -> int:
    """The number of guesses before the first stop token; all if there is none."""
    return next((n for n, token in enumerate(guesses) if token in stop_ids), len(guesses))
