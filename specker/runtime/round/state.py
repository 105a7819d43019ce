"""State that a round passes to the next: tensors at fixed addresses, sequences first, and each request on the host."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specker.model.sampling import pack, rules
from specker.options import MAX_BIASES, MAX_STOP_IDS, Sampling
from specker.runtime.control.policy import Policy
from specker.runtime.control.stats import Stats
from specker.runtime.detokenize import Detokenizer
from specker.runtime.round.grammars import Guide


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt that is being decoded, on the host."""

    index: int  # of its prompt
    token_ids: list[int]  # committed tokens: the prompt and the emitted tokens; the last one is the root
    limit: int  # number of committed tokens at which decoding ends
    sampling: Sampling
    policy: Policy
    speculates: bool = True  # False: plain decoding
    asked: str | None = None  # the policy that it asks for (Params.policy)
    prediction: list[int] = field(default_factory=list)  # tokens that probably follow the prompt (Params.prediction)
    prefixes: str | None = None  # which K/V of earlier texts it takes over (slots.py); None: as the engine says
    salt: str | None = None  # of the texts that it may copy from and joins when it ends (Params.cache_salt)
    reader: Detokenizer | None = None  # streaming detokenizer
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # before which no stop id is drawn
    logprobs: int = 0  # of the most probable tokens, that each emitted token comes with
    traced: bool = True  # whether the trace holds its rounds
    on_progress: Callable[[int, int], None] | None = None  # called with (prefilled tokens, of all) of its prompt
    deliver: Callable[[Any], None] | None = None  # called with its events (Session.submit)
    call: object = None  # the requests of one call are awaited together; None: others may follow
    ends: str = "length"
    """What the limit is: "length", the number of tokens that were asked for, or "context", the end of the context."""
    guide: Guide | None = None  # its text in a grammar
    stats: Stats = field(default_factory=Stats)
    finished: str | None = None  # None, `ends`, or another reason (Event.finished)
    fault: Exception | None = None  # what `on_progress` or `deliver` raised; the session then ends the request
    prompt_length: int = field(init=False)  # tokens of the prompt
    prefilled: int = 0  # columns that a prefill wrote, in its whole chunks
    saves: tuple[int, ...] = ()  # columns of the prompt after which recurrent states are saved (slots.py), ascending
    draft_saves: tuple[int, ...] = ()  # the same of a draft model

    def __post_init__(self) -> None:
        self.prompt_length = len(self.token_ids)

    def progress(self, done: int) -> None:
        """So many tokens of the prompt are prefilled."""
        if self.on_progress is not None and self.fault is None:
            try:
                self.on_progress(done, self.prompt_length - 1)
            except Exception as error:
                self.fault = error

    @property
    def mode(self) -> str | None:
        """How it drafts. The requests of a round have one mode, since policies of one kind choose its shape."""
        return self.asked if self.speculates else "off"

    @cached_property
    def _salted(self) -> int:
        """The first token with the salt in its upper bits, so that texts of other salts begin with another one."""
        digest = hashlib.sha256(str(self.salt).encode()).digest()
        return self.token_ids[0] + (int.from_bytes(digest[:16]) << 32)

    @property
    def cache_ids(self) -> list[int]:
        """The text as caches compare it with earlier ones: texts of different salts have no common beginning."""
        return [self._salted, *self.token_ids[1:]] if self.salt else self.token_ids

    @property
    def may_end(self) -> bool:
        """Whether the next token may be a stop id."""
        return len(self.token_ids) - self.prompt_length >= self.min_tokens

    @property
    def tokens(self) -> list[int]:
        """The emitted tokens."""
        return self.token_ids[self.prompt_length :]


@dataclass(frozen=True)
class State:
    """Tensors of the sequences in slots 0..n-1. R rows per sequence: the root and the largest draft."""

    committed: Tensor  # [n, C] int64, the text
    length: Tensor  # [n] int64, committed tokens; the last is the root
    limit: Tensor  # [n] int64
    window: Tensor  # [n, R] int64: the root, then the draft
    parents: Tensor  # [n, R - 1] int64, rows, for trees
    draw: Tensor  # [n, 4] int64, sampling parameters (sampling.pack)
    prompt: Tensor  # [n] int64, tokens of the prompt
    rules: Tensor  # [n, 4] float32, penalties and min_p (sampling.rules)
    bias_ids: Tensor  # [n, MAX_BIASES] int64, then -1
    bias: Tensor  # [n, MAX_BIASES] float32, added to the logits of these ids
    stop_ids: Tensor  # [n, MAX_STOP_IDS] int64, if there is a minimum of tokens; the rest repeats the first
    earliest: Tensor  # [n] int64, the first position after which a stop id may be drawn
    unused: Tensor  # [n] bool, slots without a sequence, which pad a round of a fixed number of slots
    confidence: Tensor  # [n] float32, log-probability of the last draft token
    step: Tensor  # [1] int64: draft tokens in the window, when drafting one by one
    # Work space of one round; the rows of each sequence are adjacent.
    hidden: Tensor  # [n * R, E of the drafter]
    aux_hidden_states: Tensor  # [n * R, D, E of the target], the hidden rows that the drafter reads
    positions: Tensor  # [n * R] int64
    logits: Tensor  # [n * R, V]
    target: Tensor  # [n * R] int64, the target's token after each row
    peak: Tensor  # [n * R], that token's logit with its noise, if the verify pass drew it
    experts: Tensor  # [1] float32, experts that the verify pass read in a layer, on average
    report: Tensor  # [n * (1 + 2 R)] int64, of `settle`
    search: Tensor  # [n, 3], of blocks whose candidates were searched: `BlockStats`

    @classmethod
    def empty(
        cls,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sequences: int,
        rows: int,
        wide: int,
        vocab: int,
        columns: int,
        aux: tuple[int, int] = (0, 0),
    ) -> "State":
        """Allocate for drafts of up to rows - 1 tokens, hidden size `wide` of type `dtype`, `vocab` logits a row and
        texts of up to `columns` tokens. `aux`: D and E of the target's hidden rows that the drafter reads."""
        scores = torch.float64 if dtype == torch.float64 else torch.float32

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            committed=ints(sequences, columns + rows),
            length=ints(sequences),
            limit=ints(sequences),
            window=ints(sequences, rows),
            parents=ints(sequences, rows - 1),
            draw=ints(sequences, 4),
            prompt=ints(sequences),
            rules=rules(Sampling()).to(device).repeat(sequences, 1),
            bias_ids=ints(sequences, MAX_BIASES) - 1,
            bias=torch.zeros(sequences, MAX_BIASES, dtype=torch.float32, device=device),
            stop_ids=ints(sequences, MAX_STOP_IDS),
            earliest=ints(sequences),
            unused=torch.zeros(sequences, dtype=torch.bool, device=device),
            confidence=torch.zeros(sequences, dtype=scores, device=device),
            step=ints(1),
            hidden=torch.zeros(sequences * rows, wide, dtype=dtype, device=device),
            aux_hidden_states=torch.zeros((sequences * rows, *aux), dtype=dtype, device=device),
            positions=ints(sequences * rows),
            logits=torch.empty(sequences * rows, vocab, dtype=scores, device=device),
            target=ints(sequences * rows),
            peak=torch.zeros(sequences * rows, dtype=scores, device=device),
            experts=torch.zeros(1, dtype=torch.float32, device=device),
            report=ints(sequences * (1 + 2 * rows)),
            search=torch.zeros(sequences, 3, dtype=scores, device=device),
        )

    @cached_property
    def _per_sequence(self) -> dict[str, Tensor]:
        names = [f.name for f in fields(self)][: [f.name for f in fields(self)].index("step")]
        return {name: getattr(self, name) for name in names}

    def first(self, sequences: int) -> "State":
        """Views of the first `sequences` slots."""
        if sequences == len(self.length):
            return self
        return replace(self, **{name: x[:sequences] for name, x in self._per_sequence.items()})

    def write(self, slot: int, request: Request) -> None:
        """Copy a request's text and sampling parameters to `slot`."""
        n = len(request.token_ids)
        self.committed[slot, :n] = torch.tensor(request.token_ids, dtype=torch.int64, device="cpu")
        self.length[slot], self.limit[slot] = n, request.limit
        self.window[slot, 0] = request.token_ids[-1]
        self.prompt[slot] = request.prompt_length
        self._sample(slot, request.sampling)
        ids = sorted(request.stop_ids) if request.min_tokens else []
        self.earliest[slot] = request.prompt_length - 1 + (request.min_tokens if ids else 0)
        if ids:
            padded = [*ids, *ids[:1] * (MAX_STOP_IDS - len(ids))]
            self.stop_ids[slot] = torch.tensor(padded, dtype=torch.int64, device="cpu")
        self.unused[slot] = False

    def _sample(self, slot: int, sampling: Sampling) -> None:
        self.draw[slot], self.rules[slot] = pack(sampling), rules(sampling)
        count = len(sampling.logit_bias)
        self.bias_ids[slot, count:] = -1
        if count:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.bias_ids[slot, :count] = torch.tensor(ids, dtype=torch.int64, device="cpu")
            self.bias[slot, :count] = torch.tensor(values, dtype=torch.float32, device="cpu")

    def move(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        for x in self._per_sequence.values():
            x[target] = x[source]

    def idle(self, slot: int, length: int) -> None:
        """Prepare a slot without a sequence for rounds of a fixed number of slots: its text never grows."""
        self.length[slot] = self.limit[slot] = length
        self.window[slot, 0] = self.prompt[slot] = 0
        self._sample(slot, Sampling())
        self.unused[slot] = True


def to_host(x: Tensor) -> Tensor:
    """Start a copy to pinned memory, which torch reuses."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return host.copy_(x, non_blocking=True)
