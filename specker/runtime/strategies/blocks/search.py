"""Make drafts of the rows of blocks: the candidates of each position, and the paths through them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specker.fields import option
from specker.kernels.noise import gumbel_at
from specker.model.decoder import Final
from specker.options import Sampling
from specker.runtime.control.stats import BlockStats
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.state import Request
from specker.runtime.strategies.base import DraftContext
from specker.runtime.strategies.blocks import BlockOptions, ngram
from specker.runtime.strategies.blocks.lattice import Lattice, Search, best_paths, best_tree, lattice


@dataclass(eq=False)
class BlockDraft(Draft):
    """A draft of a model that guesses blocks."""

    blocks: list[BlockStats] = field(default_factory=list)  # one a sequence

    def note(self, slot: int) -> BlockStats | None:
        return self.blocks[slot] if self.blocks else None

    def observe(self, accepted: Accepted, stop_ids: frozenset[int]) -> None:
        """Note what was generated, if only the device knew the tokens until now."""
        if self.observed:
            self.blocks = [BlockStats(before_stop(tokens, stop_ids)) for tokens in accepted.tokens]


def read(context: DraftContext) -> Search | None:
    """The path search of the options, or None for the argmax of each position. Raises ValueError if the n-gram model
    is of another vocabulary."""
    own: BlockOptions = context.options.own
    if own.search == "off":
        return None
    path = own.ngram or (None if context.family is None else context.family.ngram)
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
    constants: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Search(model, own.search == "tree", both=own.cps_first == "both", **constants)


def searched(
    batch: Batch,
    final: Final,
    positions: Tensor,
    head: LMHead,
    how: Search,
    stop_ids: frozenset[int],
    stops: LMHead | None = None,
) -> BlockDraft:
    """Search each sequence's block, and write the path or the tree as a draft. final [n * k, E]: the rows that predict
    k tokens of each sequence, at `positions` [n * k] int64. `stops`: a head with the rows of the stop ids, which are
    candidates everywhere. Waits for the device."""
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    stats: list[BlockStats] = []
    for sequence, block in zip(batch.requests, _candidates(batch, final, positions, head, how, stops), strict=True):
        start = time.perf_counter()
        before = (sequence.token_ids[-2] if len(sequence.token_ids) > 1 else -1, sequence.token_ids[-1])
        temperature = sequence.sampling.temperature
        if how.tree:
            nodes = min(how.nodes * len(block.ids), batch.budget.nodes)
            paths, up = best_tree(block, how, before, stop_ids, nodes, temperature)
            tokens.append([path.tokens[-1] for path in paths])
            best = max(paths, key=lambda path: len(path.tokens))
        else:
            best = best_paths(block, how, before, stop_ids, temperature)[0]
            tokens.append(list(best.tokens))
            up = list(range(len(best.tokens)))
        parents.append(up)
        score, seconds = best.score / max(1, len(best.tokens)), time.perf_counter() - start
        generated = before_stop(block.ids[:, 0].tolist(), stop_ids)  # of the best guess of each position
        stats.append(BlockStats(generated, block.width, score, seconds))
    draft = BlockDraft.of(batch, tokens, parents)
    draft.blocks = stats
    return draft


def _candidates(
    batch: Batch, final: Final, positions: Tensor, head: LMHead, how: Search, stops: LMHead | None
) -> list[Lattice]:
    """The candidates of each position, per sequence."""
    k = len(final.rows) // batch.n
    ids, scores, lse = head.ranked(final, min(how.candidates, head.most), batch.draws, positions)
    count = 0
    if stops is not None:
        count = stops.weight.shape[0]
        stop_ids, stop_scores, _ = stops.ranked(final, count, batch.draws, positions)
        ids, scores = torch.cat((ids, stop_ids), 1), torch.cat((scores, stop_scores), 1)
    noise = _noise(batch.requests, positions, ids, k)
    ids_, ranks_, noise_ = _on_host(ids, scores - lse.unsqueeze(-1), noise)
    blocks = []
    for b, sequence in enumerate(batch.requests):
        own = slice(b * k, (b + 1) * k)
        drawn = noise_ is not None and sequence.sampling.temperature > 0
        blocks.append(lattice(ids_[own], ranks_[own], noise_[own] if drawn else None, how.mass, count))
    return blocks


def before_stop(guesses: Sequence[int], stop_ids: frozenset[int]) -> int:
    """The number of guesses before the first stop token; all if there is none."""
    return next((n for n, token in enumerate(guesses) if token in stop_ids), len(guesses))


def _noise(sequences: Sequence[Request], positions: Tensor, ids: Tensor, k: int) -> Tensor | None:
    samplings: list[Sampling] = [s.sampling for s in sequences]
    if all(s.temperature == 0 for s in samplings):
        return None
    noise = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for b, s in enumerate(samplings):
        own = slice(b * k, (b + 1) * k)
        if s.temperature > 0:
            noise[own] = gumbel_at(s.seed, positions[own], ids[own])
    return noise


def _on_host(ids: Tensor, ranks: Tensor, noise: Tensor | None) -> tuple[Any, Any, Any]:
    """Copy to numpy, from a GPU in one transfer: float64 represents ids exactly."""
    if not ids.is_cuda:
        return ids.numpy(), ranks.numpy(), None if noise is None else noise.numpy()
    both = (ids, ranks) if noise is None else (ids, ranks, noise)
    first, *others = torch.stack([x.double() for x in both]).cpu().numpy()
    return first.astype(np.int64), others[0], others[1] if noise is not None else None
