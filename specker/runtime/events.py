"""What a round adds to a request: tokens, text, log-probabilities, and why the text ends."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from specker.runtime.control.policy import PREDICTION
from specker.runtime.control.stats import CopyStats, Stats
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request

log = logging.getLogger(__name__)

NOT_FINITE = "prompt %d ends early: its logits are not finite; the weights may be damaged, or overflow in this dtype"


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability after the text before it, before temperature and filters.

    Attributes:
        token: id.
        logprob: natural logarithm.
        best: the most probable ids and theirs, as many as the request asked for.
    """

    token: int
    logprob: float
    best: list[tuple[int, float]]


class Event(NamedTuple):
    """The tokens and text that one round added to a request.

    Attributes:
        request: as `Session.submit` returned it.
        tokens: ids; a stop id, or the token that completes a stop string, is the last one.
        accepted: the first so many tokens were draft tokens, the others are the target's own.
        texts: the text that each token completes; "" within a character, for special tokens and without a tokenizer.
        rest: at the end, the text that was held back as an unfinished character or the beginning of a stop string.
        logprobs: one for each token; empty unless the request asked for them.
        finished: None, "stop" (a stop id or string), "length" (`max_new_tokens`), "context" (no room for more),
            "not finite" (the next token's logits), "grammar" (no token can follow), "cancelled" or "failed" (a function
            that the request calls raised an error).
    """

    request: Request
    tokens: list[int]
    accepted: int
    texts: list[str]
    rest: str
    logprobs: list[Logprob]
    finished: str | None

    @property
    def prompt_index(self) -> int:
        """Index of the prompt."""
        return self.request.index

    @property
    def stats(self) -> Stats:
        """Running totals of the request."""
        return self.request.stats

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The new text in order, and whether it came from a draft token."""
        own = [(self.rest, False)] if self.rest else []
        return [(text, n < self.accepted) for n, text in enumerate(self.texts) if text] + own

    @property
    def text(self) -> str:
        return "".join(self.texts) + self.rest


def cancelled(request: Request) -> Event:
    """The end of a cancelled request."""
    request.finished = "cancelled"
    rest = "" if request.reader is None else request.reader.flush()
    return Event(request, [], 0, [], rest, [], request.finished)


def emitted(r: Round, slot: int, path: list[int], tokens: list[int], known: set[int] | None) -> Event:
    """Cut the tokens after a stop id or string, update the counters and end the request if this is its end. `tokens`:
    those that the round committed, which the text holds already; `known`: the ids of a trimmed head."""
    request, broken = r.requests[slot], slot in r.broken
    stop = next((i for i, token in enumerate(tokens) if token in request.stop_ids), None)
    texts: list[str] = []
    if (reader := request.reader) is not None:
        for i, token in enumerate(tokens if stop is None else tokens[: stop + 1]):
            texts.append(reader.add(token))
            if reader.stopped:
                stop = i
                break
    ended = known is not None and bool(tokens) and tokens[-1] not in known
    lost = ended and not r.batch.budget.part and len(path) - 1 < r.draft.depth
    if stop is not None:
        del request.token_ids[len(request.token_ids) - len(tokens) + stop + 1 :]
        tokens = tokens[: stop + 1]
        request.finished = "stop"
    elif request.guide is not None and request.guide.ended:
        request.finished = request.guide.ended
    elif broken:
        request.finished = "not finite"
        log.warning(NOT_FINITE, request.index)
    elif len(request.token_ids) >= request.limit:
        request.finished = request.ends
    accepted = max(0, min(len(path) - 1, len(tokens)))
    rest = "" if reader is None or not request.finished else reader.flush()
    request.stats.observe(r.draft.drafted(slot) + r.draft.forced(slot), accepted, len(tokens))
    copied = r.draft.outcome(slot, path, tokens).copied
    if isinstance(copied.note, CopyStats) and copied.note.source == PREDICTION:
        request.stats.predicted += copied.drafted
        request.stats.predicted_right += max(0, min(accepted, len(copied.path) - 1))
    request.stats.token_times += [request.stats.wall] * len(tokens)
    request.stats.forced += max(0, accepted + 1 - len(r.draft.own(slot, path)))
    if known is not None:
        request.stats.kept += sum(token in known for token in tokens)
        request.stats.lost += lost
    logprobs = _logprobs(r, slot, path, tokens) if request.logprobs else []
    return Event(request, tokens, accepted, texts or [""] * len(tokens), rest, logprobs, request.finished)


def _logprobs(r: Round, slot: int, path: list[int], tokens: list[int]) -> list[Logprob]:
    """Token i was drawn after row path[i]."""
    most, host = r.requests[slot].logprobs, r.host
    own, ids, best = (host[name][slot] for name in ("own_logprob", "best_ids", "best_logprobs"))
    return [
        Logprob(token, float(own[row]), list(zip(ids[row, :most].tolist(), best[row, :most].tolist(), strict=True)))
        for row, token in zip(path, tokens, strict=False)
    ]
