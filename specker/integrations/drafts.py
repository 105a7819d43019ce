"""Drafts for texts that another engine verifies.

The engine passes the whole text of every request at every step. It does not say when a request ends or moves to another
row of the batch, so a request is recognised by its text. Texts that continue a known text are matched first, then texts
that share most of a known text that no other one continues. All requests of a step share one batched draft.

A drafter that reads the target (`Drafts.aux_layers`) also needs the target's hidden rows of each text. The engine
passes those of a text's last columns; the drafter keeps what it made of the columns before. If columns between are
missing, nothing is drafted for this text.

The draft model's K/V comes from a pool of pages. If the pool is full, the least recently used requests lose their
pages. A request that gets no pages gets no draft.

On a GPU a draft has a fixed shape where it can, and is a CUDA graph from its second use on: one for each number of
texts, since the slots beyond may hold other requests, whose K/V must not be written.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.checkpoint import Checkpoint
from specker.cpu import one_torch_thread
from specker.integrations.target import drafter_for
from specker.model.device import current
from specker.model.sampling import pack
from specker.options import Sampling
from specker.runtime import strategies
from specker.runtime.batches import Batches
from specker.runtime.control.policy import Outcome
from specker.runtime.draft_runner import DraftRunner
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.state import Request, State

GREEDY = Sampling()


class Drafts:
    """A drafter for the requests of another engine. Not thread-safe."""

    def __init__(
        self,
        target: str | Path | Checkpoint,
        draft: str | Path | None = None,
        strategy: strategies.Named = "draft",
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        requests: int = 1,
        max_context: int | None = None,
        kv_tokens: int | None = None,
        **options: Any,
    ):
        """`target`: folder or hub id of the model that the engine runs. Its config and tokenizer are read, and its
        embedding, final norm and LM head if the draft uses them; or a checkpoint that has these. `draft`: the draft
        checkpoint; default: the bundled one for the target. `dtype`: of the draft; default as in `specker.load`.
        `requests`: number of texts that keep their K/V between steps. `max_context`: tokens of the longest text;
        default: the target's positions. `kv_tokens`: positions in the K/V pool; default: the whole context of every
        request, or what fits into memory. `strategy`, `options`: as in `specker.load`.

        Raises TypeError for an unknown option, and ValueError for a strategy without a drafter of its own, for draft
        trees, and for checkpoints that do not fit together.
        """
        found = drafter_for(
            target,
            draft,
            strategy,
            device=device,
            dtype=dtype,
            requests=requests,
            max_context=max_context,
            kv_tokens=kv_tokens,
            **options,
        )
        self.drafter, self.policies = found.drafters[0], found.policies
        self.device, self.fixed = found.device, found.fixed
        self.limit, self.width = found.config.max_context, found.config.hidden_size
        largest, model, cache = strategies.plan(self.policies).largest, self.drafter.model, self.drafter.cache
        self.rows = largest.nodes + 1  # of a window; also tokens that a draft of fixed shape forwards
        self.state = State.empty(
            torch.float32 if model is None else model.dtype,
            self.device,
            sequences=requests + 1,
            rows=self.rows,
            wide=0 if model is None else model.config.hidden_size,
            vocab=0,  # the engine has the logits
            columns=self.limit if self.fixed else 0,  # only drafts of fixed shape read texts on the device
        )
        self.graphs = Graphs(self.device if self.fixed and self.device.type == "cuda" else None)
        self._batches = Batches(self.state, [] if cache is None else [cache], largest, self.limit)
        assert self.policies.history is not None
        self._runner = DraftRunner(found.drafters, self.policies.history, largest, learns=False)
        self._slots: list[Request | None] = [None] * (requests + 1)
        self._used: dict[Request, int] = {}  # the last step that had a request's text
        self._step, self._numbers = 0, count()
        self._last: tuple[Batch, Draft, list[list[int]]] | None = None  # the last draft, with its tokens

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The depths whose hidden rows `draft` takes: depth n is the input of the target's layer n, or the output of
        its last layer before the final norm. Empty if the drafter reads none."""
        return self.drafter.aux_layers

    @torch.inference_mode()
    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: int,
        sampling: Sequence[Sampling] | None = None,
        rows: Sequence[Mapping[int, Tensor]] | None = None,
    ) -> list[list[int]]:
        """One batched draft: for each text a chain of up to `most` tokens, perhaps none. texts: prompt and output of
        each request so far. `sampling`: of each request, if the engine draws with specker's noise (`sample_rows`);
        default: the drafts are the draft model's most probable tokens. `rows`, if there are `aux_layers`: of each text,
        depth -> [T, E], the target's hidden rows of the T tokens before the last one: all tokens that are new since the
        last step, or more. Raises ValueError if there are `aux_layers` and no rows."""
        if self.aux_layers and rows is None:
            raise ValueError(f"this drafter reads the target's hidden rows at the depths {self.aux_layers}: pass rows")
        self._step += 1
        drafts: list[list[int]] = [[] for _ in texts]
        chosen: dict[int, Request] = {}
        with current(self.device):
            for i, sequence in self._matched(texts).items():
                sequence.sampling = GREEDY if sampling is None else sampling[i]
                length = len(sequence.token_ids)
                if min(most, self.limit - length) <= 0 or not self._has_memory(sequence, length + most):
                    continue
                if rows is None or self._knows(sequence, rows[i]):
                    chosen[i] = sequence
            self._last = None
            if chosen:
                sequences = list(chosen.values())
                for slot, sequence in enumerate(sequences):
                    self._swap(slot, self._slots.index(sequence))
                drafts_of = self._drafted(sequences, most)
                for i, tokens in zip(chosen, drafts_of, strict=True):
                    drafts[i] = tokens
        return drafts

    def warm_up(self, most: int) -> None:
        """Draft up to `most` tokens for one text and for as many as there are slots, and for texts of two lengths, of
        which only the longer one allows a draft of fixed shape, so that no request waits for a compiler or for the
        capture of these graphs."""
        for n, length in product((1, len(self._slots) - 1), (2, min(2 * most + 2, self.limit - most))):
            zeros = torch.zeros(length - 1, self.width, dtype=torch.float32, device=self.device)
            rows = dict.fromkeys(self.aux_layers, zeros)
            for _ in range(self.graphs.passes):
                self.draft([[0] * length] * n, most, rows=[rows] * n)
            for sequence in [s for s in self._slots if s is not None]:
                self._release(sequence)
        self.graphs.warmed()
        self._last = None

    # --- requests

    def _matched(self, texts: Sequence[Sequence[int]]) -> dict[int, Request]:
        """The sequences of the texts, by their index. A text without a slot is left out."""
        held = [s for s in self._slots if s is not None]
        found: dict[int, Request] = {}
        for i, text in enumerate(texts):
            if same := [s for s in held if _continues(text, s.token_ids)]:
                found[i] = max(same, key=lambda s: len(s.token_ids))
                held.remove(found[i])
        before = {s: len(s.token_ids) for s in found.values()}
        for i, sequence in found.items():
            written = list(texts[i][len(sequence.token_ids) :])
            if self.drafter.head is not None:
                self.drafter.head.count(written)
            sequence.token_ids.extend(written)
        self._observe(before)
        for sequence in found.values():
            self._truncate(self._slots.index(sequence), len(sequence.token_ids) - 1)
        for i, text in enumerate(texts):  # after all texts that continue a known one: those must not lose their K/V
            if i not in found and (new := self._admitted(list(text), held)) is not None:
                found[i] = new
        for sequence in found.values():
            self._used[sequence] = self._step
        return found

    def _observe(self, before: dict[Request, int]) -> None:
        """Compare the last drafts with the tokens that the engine added, before any slot changes. `before`: the texts'
        lengths at those drafts."""
        if self._last is None:
            return
        batch, draft, drafted = self._last
        paths: list[list[int]] = []
        for slot, request in enumerate(batch.requests):
            grown = request.token_ids[before[request] :] if request in before and drafted[slot] else None
            paths.append([] if grown is None else list(range(_common(drafted[slot], grown) + 1)))
            if paths[-1]:
                confidence = [each[slot] for each in draft.confidence]
                request.policy.observe(Outcome(len(drafted[slot]), paths[-1], confidence))
        if not self.aux_layers:  # otherwise the engine passes the hidden rows of all new tokens
            self._runner.accept(batch, draft, Accepted(paths, [], {}, 0.0))
        for slot, path in enumerate(paths):
            if path and batch.fixed:  # the engine may have added more tokens than a round of specker's would
                self._truncate(slot, before[batch.requests[slot]] + len(path) - 1)

    def _admitted(self, text: list[int], held: list[Request]) -> Request | None:
        """A new sequence. It takes over the K/V of the sequence in `held` with the longest common beginning, if that is
        most of that sequence, and removes it from `held`. None if no slot can be freed."""
        shared, nearest = max(((_common(s.token_ids, text), s) for s in held), key=lambda x: x[0], default=(0, None))
        if nearest is not None and 2 * shared > len(nearest.token_ids):
            slot = self._forget(nearest)
            held.remove(nearest)
        else:  # a request that waits for its turn must not lose more than this one gains
            shared = 0
            if (free := self._free_slot(held)) is None:
                return None
            slot = free
        policy = strategies.policy(self.policies)
        sequence = self._slots[slot] = Request(
            index=next(self._numbers), token_ids=text, limit=self.limit, sampling=GREEDY, policy=policy
        )
        behind = (
            self.drafter.tokens_ahead if self.aux_layers else 0
        )  # a column that reads the next token is computed anew
        self._truncate(slot, max(0, min(shared, len(text) - 1) - behind))
        self.drafter.reset(slot)
        return sequence

    def _free_slot(self, held: list[Request]) -> int | None:
        """A slot without a sequence; if there is none, the slot of the sequence in `held` unused for the longest
        time."""
        if None not in self._slots[:-1]:
            if not held:
                return None
            self._release(oldest := min(held, key=self._used.__getitem__))
            held.remove(oldest)
        return self._slots.index(None)

    def _forget(self, sequence: Request) -> int:
        """Remove a sequence. Its slot, which is returned, keeps the K/V."""
        slot = self._slots.index(sequence)
        self._slots[slot] = None
        self._used.pop(sequence, None)
        return slot

    def _release(self, sequence: Request) -> None:
        slot = self._forget(sequence)
        if (cache := self.drafter.cache) is not None:
            cache.release(slot)

    def _truncate(self, slot: int, columns: int) -> None:
        if (cache := self.drafter.cache) is not None:
            cache.truncate(min(columns, cache.exact_len[slot]), slot)

    def _has_memory(self, sequence: Request, columns: int) -> bool:
        """Give the sequence pages for `columns`. If the pool has too few, requests that are not in this step lose
        theirs. If that is not enough, this sequence loses its own, and the result is False."""
        cache = self.drafter.cache
        if cache is None:
            return True
        while not cache.extend(self._slots.index(sequence), columns):
            idle = [s for s, step in self._used.items() if step < self._step]
            self._release(min(idle, key=self._used.__getitem__, default=sequence))
            if not idle:
                return False
        return True

    def _knows(self, sequence: Request, rows: Mapping[int, Tensor]) -> bool:
        """Give the drafter the target's rows (`draft`) of the columns that it lacks. False if some are missing."""
        cache, drafter = self.drafter.cache, self.drafter
        if not self.aux_layers or cache is None:
            return True
        slot = self._slots.index(sequence)
        first, end = cache.exact_len[slot], len(sequence.token_ids) - 1
        held = {depth: rows[depth][max(0, len(rows[depth]) - (end - first)) :] for depth in self.aux_layers}
        if any(len(x) < end - first for x in held.values()):
            return False
        if first < end:
            own = self.state.hidden.dtype
            drafter.read(slot, sequence, first, {n: x.to(self.device, own) for n, x in held.items()})
        return True

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        spare, had = len(self._slots) - 1, self._slots[a] is not None
        for source, target in ((a, spare), (b, a), (spare, b)) if had else ((b, a),):
            if self.drafter.cache is not None:
                self.drafter.cache.move(source, target)
            self.drafter.move(source, target)
            self._slots[target], self._slots[source] = self._slots[source], None

    # --- the draft

    def _drafted(self, sequences: list[Request], most: int) -> list[list[int]]:
        """Draft for the sequences in slots 0..n-1."""
        n, state, lengths = len(sequences), self.state, [len(s.token_ids) for s in sequences]
        budget, _ = self._runner.shape(sequences)
        room = [max(0, min(most, self.limit - length)) for length in lengths]
        if own := self._runner.offers[budget.part].room:
            room = [min(each) for each in zip(room, own, strict=True)]
        if not any(room):
            return [[] for _ in room]
        budget = budget.clip(budget.nodes, max(room))
        fixed = self.fixed and self._runner.fixes(budget)
        if any(s.sampling.temperature > 0 for s in sequences):
            for slot, request in enumerate(sequences):
                state.draw[slot] = pack(request.sampling)
        state.window[:n, 0] = torch.tensor([s.token_ids[-1] for s in sequences], dtype=torch.int64, device="cpu")
        if fixed:
            self._send(sequences)
        batch = self._batches.make(sequences, budget, fixed, self.graphs, n, most)
        self.graphs.counters.reset()
        with self._threads():
            draft = self._runner.draft(batch)
        rows = state.window[:n, 1 : draft.size + 1].tolist()
        tokens = [row[: max(0, min(draft.count(slot), room[slot]))] for slot, row in enumerate(rows)]
        self._last = batch, draft, tokens
        return tokens

    def _send(self, sequences: list[Request]) -> None:
        """Copy the lengths of the texts in slots 0, 1, .. and the last tokens, which a draft of fixed shape forwards
        again, to the device."""
        state, n, device = self.state, len(sequences), self.device
        lengths = torch.tensor([len(s.token_ids) for s in sequences], dtype=torch.int64, device="cpu")
        count = min(self.rows, int(lengths.min()))
        tails = torch.tensor([s.token_ids[-count:] for s in sequences], dtype=torch.int64, device="cpu")
        columns = lengths[:, None] + torch.arange(-count, 0, dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            lengths, tails, columns = (x.pin_memory().to(device, non_blocking=True) for x in (lengths, tails, columns))
        state.length[:n] = lengths
        state.committed[:n].scatter_(1, columns, tails)

    def _threads(self) -> AbstractContextManager[Any]:
        """Context manager for a draft: with compiled kernels, torch's operators run in one thread."""
        model = self.drafter.model
        alone = model is not None and model.stack is not None
        return one_torch_thread() if alone else nullcontext()


def _continues(text: Sequence[int], known: Sequence[int]) -> bool:
    n = len(known)
    return len(text) >= n and text[n - 1] == known[-1] and list(text[:n]) == known


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two texts."""
    shorter = min(len(a), len(b))
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), shorter)
