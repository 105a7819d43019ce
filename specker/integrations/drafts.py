"""Drafts for texts that another engine verifies.

The engine passes the whole text of every request at every step. It does not say when a request ends or moves to another
row of the batch, so a request is recognised by its text. Texts that continue a known text are matched first, then texts
that share most of a known text that no other one continues. All requests of a step share one batched draft.

A drafter that reads the target (`Drafts.taps`) also needs the target's hidden rows of each text. The engine passes
those of a text's last columns; the drafter keeps what it made of the columns before. If columns between are missing,
nothing is drafted for this text.

The draft model's K/V comes from a pool of pages. If the pool is full, the least recently used requests lose their
pages. A request that gets no pages gets no draft.

On a GPU a draft has a fixed shape where it can, and is a CUDA graph from its second use on: one for each number of
texts, since the slots beyond may hold other requests, whose K/V must not be written.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from specker import zoo
from specker.checkpoints import checkpoint
from specker.checkpoints.buffers import served
from specker.checkpoints.checkpoint import Checkpoint, folder_of, read_config
from specker.checkpoints.parse import eos_ids, read_json, reason
from specker.kernels.cpu import native
from specker.model.cache import Lengths
from specker.model.config import CheckpointError, LayerSpec, ModelConfig
from specker.model.device import current
from specker.model.memory import CacheMemory
from specker.model.sampling import Draws, pack
from specker.model.weights import Weights
from specker.options import MAX_BATCH, Sampling
from specker.runtime import strategies
from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.choose import Chooser
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import AUTO, Outcome
from specker.runtime.engine import draft_cost
from specker.runtime.load import device_of, drafting, dtype_of, family_of
from specker.runtime.loop import KV_BUCKETS
from specker.runtime.round.drafter import CATCH_UP_ROWS
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.round import Round, Shape
from specker.runtime.round.state import Request, State
from specker.runtime.strategies.base import LOOKAHEAD, DraftContext, PolicyContext

log = logging.getLogger(__name__)
GREEDY = Sampling()


class Drafts:
    """A drafter for the requests of another engine. Not thread-safe."""

    def __init__(
        self,
        target: str | Path | Checkpoint,
        draft: str | Path | None = None,
        strategy: str = "draft",
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
        request, or what fits into memory. `options`: the strategy's, as in `specker.load`.

        Raises TypeError for an unknown option, and ValueError for a strategy without a drafter of its own, for draft
        trees, and for checkpoints that do not fit together.
        """
        if not 1 <= requests < MAX_BATCH:
            raise ValueError(f"requests must be between 1 and {MAX_BATCH - 1}, got {requests}")
        if options.get("tree") is not None or options.get("cps") == "tree":
            raise ValueError("another engine verifies one path of each request: leave out draft trees")
        if options.get("policy") is None and strategies.options(strategy=strategy, **options).policy == AUTO:
            options["policy"] = "fixed"  # the engine does not say what its verify passes cost
        o = strategies.options(  # the last slot is a spare one
            strategy=strategy, batch_size=requests + 1, kv_tokens=kv_tokens, max_context=max_context, **options
        )
        parts, where = strategies.of(o), device_of(device)
        name = target.folder if isinstance(target, Checkpoint) else target
        if parts.self_drafting or not parts.drafts:
            raise ValueError(f"strategy {strategy!r} does not draft for another engine: use one with its own drafter")
        if draft is not None and not parts.needs_draft:
            raise ValueError(f"strategy {strategy!r} uses no draft checkpoint: leave out draft")
        config = target.config if isinstance(target, Checkpoint) else read_sizes(target, max_context)
        if parts.reads_target and not parts.needs_draft and not config.num_heads:
            raise ValueError(
                f"strategy {strategy!r} needs a target that specker's decoder runs, not {config.architecture}"
            )
        if draft is None and parts.needs_draft:
            zoo.require_for(config)
        family, source = zoo.family_of(config), draft
        if source is None and parts.needs_draft and family is not None:
            source = family.drafts.get(parts.name)
        if source is None and parts.needs_draft:
            raise ValueError(f"strategy {strategy!r} needs a draft checkpoint for {name}: pass draft")
        own = None if source is None or parts.reads_target else read_config(source)
        kind = dtype_of(dtype)
        if dtype is None and where.type == "cpu" and not (own is not None and served(own)):
            kind = torch.float32
        if isinstance(target, Checkpoint):
            main = target
        elif parts.reads_target or (own is not None and own.shares):
            main = checkpoint.read(target, dtype=kind, device=where, max_context=max_context, layers=False)
        else:
            main = Checkpoint(config, no_weights(where), folder_of(target, weights=False))
        if own is not None and own.shares:
            family = family_of(main)
        if draft is None and parts.needs_draft and family is None:
            raise ValueError(f"strategy {strategy!r} needs a draft checkpoint for {name}: pass draft")
        o = parts.with_defaults(o, family)
        notes: dict[str, str] = {}
        side, kept = drafting(main, source, o, kind, name, family, notes)
        for sentence in notes.values():
            log.warning(sentence)
        if side is not None:
            o = parts.with_draft(o, side)
            memory = CacheMemory((side.config,), side.weights.norm.dtype, where, o.page_size, LOOKAHEAD)
            o = replace(o, kv_tokens=memory.pool(o.batch_size, kv_tokens)[0])
        drafter = strategies.drafter(DraftContext(o, main, None, None, side, kept, family))
        assert drafter is not None
        self.drafter, self.width = drafter, config.hidden_size
        known = AcceptanceHistory(Costs(lambda budget: draft_cost(budget, main, side, 0.0)))
        gpu = where.type == "cuda"
        self.fixed = gpu and kind != torch.float64 if o.graphs is None else o.graphs == "on"
        self.device, self._graphs = where, Graphs(where if self.fixed and gpu else None)
        self._chooser = Chooser(known.costs, learns=False)
        self.policies = PolicyContext(o, config.num_layers, family, known, 0.0, where.type == "cpu")
        self.limit = config.max_context
        largest, model = strategies.plan(self.policies).largest, drafter.model
        self.rows = largest.nodes + 1  # of a window; also tokens that a draft of fixed shape forwards
        self.state = State.empty(
            torch.float32 if model is None else model.dtype,
            where,
            sequences=requests + 1,
            rows=self.rows,
            wide=0 if model is None else model.config.hidden_size,
            vocab=0,  # the engine has the logits
            columns=self.limit if self.fixed else 0,  # only drafts of fixed shape read texts on the device
        )
        self._slots: list[Request | None] = [None] * (requests + 1)
        self._used: dict[Request, int] = {}  # the last step that had a request's text
        self._step, self._numbers = 0, count()
        self._round: Round | None = None  # the last round
        self._tokens: list[list[int]] = []  # tokens that the last round drafted

    @property
    def taps(self) -> tuple[int, ...]:
        """The depths whose hidden rows `draft` takes: depth n is the input of the target's layer n, or the output of
        its last layer before the final norm. Empty if the drafter reads none."""
        return self.drafter.taps

    @torch.inference_mode()
    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: int,
        sampling: Sequence[Sampling] | None = None,
        rows: Sequence[Mapping[int, Tensor]] | None = None,
    ) -> list[list[int]]:
        """One batched draft: for each text a chain of up to `most` tokens, perhaps none. texts: prompt and output of
        each request so far. `sampling`: of each request, if the engine draws with specker's noise (kernels/sample.py);
        default: the drafts are the draft model's most probable tokens. `rows`, if there are `taps`: of each text, depth
        -> [T, E], the target's hidden rows of the T tokens before the last one: all tokens that are new since the last
        step, or more. Raises ValueError if there are `taps` and no rows."""
        if self.taps and rows is None:
            raise ValueError(f"this drafter reads the target's hidden rows at the depths {self.taps}: pass rows")
        self._step += 1
        drafts: list[list[int]] = [[] for _ in texts]
        chosen: dict[int, Request] = {}
        with current(self.device):
            for i, sequence in self._matched(texts).items():
                sequence.sampling = GREEDY if sampling is None else sampling[i]
                length = len(sequence.text)
                left = min(most, self.limit - length, self.drafter.left(length))
                if left <= 0 or not self._has_memory(sequence, length + most):
                    continue
                if rows is None or self._knows(sequence, rows[i]):
                    chosen[i] = sequence
            self._round = None
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
            rows = {depth: torch.zeros(length - 1, self.width, device=self.device) for depth in self.taps}
            for _ in range(self._graphs.passes):
                self.draft([[0] * length] * n, most, rows=[rows] * n)
            for sequence in [s for s in self._slots if s is not None]:
                self._release(sequence)
        self._graphs.warmed()
        self._round = None

    # --- requests

    def _matched(self, texts: Sequence[Sequence[int]]) -> dict[int, Request]:
        """The sequences of the texts, by their index. A text without a slot is left out."""
        held = [s for s in self._slots if s is not None]
        found: dict[int, Request] = {}
        for i, text in enumerate(texts):
            if same := [s for s in held if _continues(text, s.text)]:
                found[i] = max(same, key=lambda s: len(s.text))
                held.remove(found[i])
        before = {s: len(s.text) for s in found.values()}
        for i, sequence in found.items():
            written = list(texts[i][len(sequence.text) :])
            if self.drafter.head is not None:
                self.drafter.head.count(written)
            sequence.text.extend(written)
        self._observe(before)
        for sequence in found.values():
            self._truncate(self._slots.index(sequence), len(sequence.text) - 1)
        for i, text in enumerate(texts):  # after all texts that continue a known one: those must not lose their K/V
            if i not in found and (new := self._admitted(list(text), held)) is not None:
                found[i] = new
        for sequence in found.values():
            self._used[sequence] = self._step
        return found

    def _observe(self, before: dict[Request, int]) -> None:
        """Compare the last drafts with the tokens that the engine added, before any slot changes. `before`: the texts'
        lengths at those drafts."""
        if (r := self._round) is None:
            return
        for slot, sequence in enumerate(r.requests):
            if sequence not in before or not (drafted := self._tokens[slot]):
                continue
            known = before[sequence]
            path = list(range(_common(drafted, sequence.text[known:]) + 1))
            sequence.policy.observe(Outcome(len(drafted), path, [each[slot] for each in r.draft.confidence]))
            self.drafter.observe(r, slot, path)
            if r.fixed:  # the engine may have added more tokens than a round of specker's would
                self._truncate(slot, known + len(path) - 1)

    def _admitted(self, text: list[int], held: list[Request]) -> Request | None:
        """A new sequence. It takes over the K/V of the sequence in `held` with the longest common beginning, if that is
        most of that sequence, and removes it from `held`. None if no slot can be freed."""
        shared, nearest = max(((_common(s.text, text), s) for s in held), key=lambda x: x[0], default=(0, None))
        if nearest is not None and 2 * shared > len(nearest.text):
            slot = self._forget(nearest)
            held.remove(nearest)
        else:  # a request that waits for its turn must not lose more than this one gains
            shared = 0
            if (free := self._free_slot(held)) is None:
                return None
            slot = free
        policy = strategies.policy(self.policies)
        sequence = self._slots[slot] = Request(next(self._numbers), text, self.limit, GREEDY, policy)
        behind = self.drafter.ahead if self.taps else 0  # a column that reads the next token is computed anew
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
        if self.drafter.head is not None:
            self.drafter.head.forget(sequence)
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
        if not self.taps or cache is None:
            return True
        slot = self._slots.index(sequence)
        first, end = cache.exact_len[slot], len(sequence.text) - 1
        held = {depth: rows[depth][max(0, len(rows[depth]) - (end - first)) :] for depth in self.taps}
        if any(len(x) < end - first for x in held.values()):
            return False
        if first < end:
            own = self.state.hidden.dtype
            drafter.prefilled(slot, sequence, first, {n: x.to(self.device, own) for n, x in held.items()})
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
        n, policies = len(sequences), [s.policy for s in sequences]
        state, lengths = self.state.first(n), [len(s.text) for s in sequences]
        self.drafter.announce(sequences)
        budget = self._chooser.choose(policies, sum(self.limit - length for length in lengths))
        prices = self._chooser.prices(policies, budget) if policies[0].may_skip_drafting and budget.nodes else ()
        for p in policies:
            p.taken(budget, prices)
        left = max(min(self.limit - length, self.drafter.left(length)) for length in lengths)
        budget = budget.clip(budget.nodes, min(most, left))
        fixed = self.fixed and all(self.drafter.fixed(length, budget) for length in lengths)
        draws = Draws.of([s.sampling for s in sequences], state.draw, fixed)
        if draws.kind != "greedy":
            for slot, sequence in enumerate(sequences):
                state.draw[slot] = pack(sequence.sampling)
        state.window[:n, 0] = torch.tensor([s.text[-1] for s in sequences])
        self._see(0)
        self._prefill(sequences, self.rows if fixed else CATCH_UP_ROWS)
        if fixed:
            self._send(sequences)
        shape = Shape(n, budget, fixed, self._see(max(lengths) + most) if fixed else 0, draws.kind)
        where: Lengths = state.length if fixed else lengths
        r = Round(sequences, state, shape, draws, where, self._graphs, policies[0].confident)
        r.graphs.counters.reset()
        with self._threads():
            r.draft = self.drafter.draft(r)
        self._round, drafted = r, [r.draft.count(slot) for slot in range(n)]
        fits = [max(0, min(count, most, self.limit - length)) for count, length in zip(drafted, lengths, strict=True)]
        host = state.window[:, 1 : r.draft.size + 1].cpu()
        rows_of, r.host["draft"] = host.tolist(), host
        self._tokens = [tokens[:count] for tokens, count in zip(rows_of, fits, strict=True)]
        return self._tokens

    def _see(self, columns: int) -> int:
        """Limit attention to the smallest KV bucket with `columns`; 0 for all columns. Returns the bucket."""
        if (cache := self.drafter.cache) is None:
            return 0
        bucket = next((b for b in KV_BUCKETS if 0 < columns <= b < cache.capacity), cache.capacity)
        cache.bucket(bucket)
        return bucket

    def _send(self, sequences: list[Request]) -> None:
        """Copy the lengths of the texts in slots 0, 1, .. and the last tokens, which a draft of fixed shape forwards
        again, to the device."""
        state, n, device = self.state, len(sequences), self.device
        lengths = torch.tensor([len(s.text) for s in sequences])
        count = min(self.rows, int(lengths.min()))
        tails = torch.tensor([s.text[-count:] for s in sequences])
        columns = lengths[:, None] + torch.arange(-count, 0)
        if device.type == "cuda":
            lengths, tails, columns = (x.pin_memory().to(device, non_blocking=True) for x in (lengths, tails, columns))
        state.length[:n] = lengths
        state.committed[:n].scatter_(1, columns, tails)

    def _prefill(self, sequences: list[Request], most: int) -> None:
        """Prefill new parts of texts of more than `most` tokens."""
        model, cache = self.drafter.model, self.drafter.cache
        if model is None or cache is None:
            return
        for slot, sequence in enumerate(sequences):
            known, length = cache.exact_len[slot], len(sequence.text)
            # A diffusion drafter's prompt must not see masks. Other short prompts share the first forward.
            if length - known > most or not (known or model.config.causal):
                self.drafter.prefill(slot, sequence.text)

    def _threads(self) -> AbstractContextManager[Any]:
        """Context manager for a draft: with compiled kernels, torch's operators run in one thread."""
        model = self.drafter.model
        alone = model is not None and model.stack is not None
        return native().one_torch_thread() if alone else nullcontext()


def _continues(text: Sequence[int], known: Sequence[int]) -> bool:
    n = len(known)
    return len(text) >= n and text[n - 1] == known[-1] and list(text[:n]) == known


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two texts."""
    shorter = min(len(a), len(b))
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), shorter)


def read_sizes(target: str | Path, max_context: int | None) -> ModelConfig:
    """The target's config. For an architecture that specker's decoder lacks, or for quantised weights, only the
    vocabulary, the number of layers, the hidden size, the positions and the stop ids are known. Raises
    CheckpointError."""
    try:
        return read_config(target, max_context=max_context)
    except CheckpointError:
        folder = folder_of(target, weights=False)
        raw = read_json(folder / "config.json")
    try:
        hf = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).get_text_config()
        sizes = hf.vocab_size, hf.hidden_size, hf.num_hidden_layers, hf.max_position_embeddings
    except Exception as error:  # validation raises several types; a config may lack a field
        raise CheckpointError(f"{folder / 'config.json'} lacks the model's sizes ({reason(error)})") from error
    vocab, hidden, layers, positions = sizes
    return ModelConfig(
        architecture=str((raw.get("architectures") or ["unknown"])[0]),
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=4 * hidden,
        rms_norm_eps=0.0,
        layer=LayerSpec(),
        tied=False,
        causal=True,
        shifted_logits=True,
        mask_token_id=None,
        max_context=min(max_context or positions, positions),
        eos_ids=eos_ids(folder, raw),
        bos_id=None,
    )


def no_weights(device: torch.device) -> Weights:
    none = torch.empty(0, device=device)
    names = ["embed", "qkv", "o", "gate_up", "down", "norm_in", "norm_post", "norm", "head"]
    absent = dict.fromkeys(["qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias"])
    return Weights(**dict.fromkeys(names, none), **absent, ropes=())  # type: ignore[arg-type]
