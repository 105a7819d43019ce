"""Pieces: what each event of a call adds to its texts, with reasoning and tool calls taken out of them. Every endpoint
writes its answer from them."""

import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar, NamedTuple

from specker.answers.parts import Part, joined
from specker.answers.reader import Reading
from specker.runtime.control.stats import Stats
from specker.runtime.events import Logprob
from specker.serve.api import Asked
from specker.serve.worker import Call

log = logging.getLogger(__name__)

REASONS = {"context": "length"}  # where the API has another word


class Piece(NamedTuple):
    """What an event adds to one of the texts."""

    choice: int
    parts: list[Part]  # in the order of the text
    logprobs: list[Logprob]
    reason: str | None  # why the text ends

    @property
    def text(self) -> str:
        """Beside reasoning and calls."""
        return joined(self.parts, "text")

    @property
    def reasoning(self) -> str:
        return joined(self.parts, "reasoning")

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [part.call for part in self.parts if part.call is not None]


class Pieces:
    """The texts of one call. `kind`: the beginning of the answer's id."""

    kind: ClassVar[str]

    def __init__(self, call: Call, reading: Reading, asked: Asked):
        self.call, self.reading, self.asked = call, reading, asked
        self.id = f"{self.kind}{uuid.uuid4().hex}"
        self.readers = [reading.reader() for _ in call.requests]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises as `Call.events`."""
        places = {request: n for n, request in enumerate(self.call.requests)}
        async for event in self.call.events():
            n = places[event.request]
            parts, reason = self.readers[n].read(event), event.finished
            reason = "tool_calls" if reason == "stop" and self.readers[n].found else reason
            yield Piece(n, parts, event.logprobs, REASONS.get(reason or "", reason))

    def events(self) -> AsyncIterator[str]:
        """Server-sent events; an error is the last one. Cancels the call if they are not read to their end."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        """Raises as `Call.events`."""
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        """Token counts. Accepted and refused draft tokens are in OpenAI's fields for predictions: those from the
        prediction, if the request has one, else all."""
        requests = self.call.requests
        first = requests[:: self.asked.n]  # a prompt counts once, as its first text found it
        stats = [request.stats for request in requests]
        prompt, emitted = sum(r.prompt_length for r in first), sum(s.tokens for s in stats)
        drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
        if self.asked.prediction is not None:
            drafted, accepted = sum(s.predicted for s in stats), sum(s.predicted_right for s in stats)
        found = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        if self.reading.reasons:
            found["reasoning_tokens"] = sum(reader.reasoned for reader in self.readers)
        cached = sum(max(0, r.prompt_length - 1 - r.stats.prefilled) for r in first)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": emitted,
            "total_tokens": prompt + emitted,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": found,
        }

    def close(self) -> None:
        """Cancel what has not ended, and log a line, which has nothing of the texts."""
        how = " ".join(request.finished or "cancelled" for request in self.call.requests)
        self.call.close()
        total, seconds = sum((r.stats for r in self.call.requests), Stats()), time.monotonic() - self.call.began
        prompt, drafts = self.usage()["prompt_tokens"], f"{total.acceptance_length:.2f} tokens a round"
        log.info(f"{self.id}: {prompt} + {total.tokens} tokens, {seconds:.2f} s, {drafts}, {how}")
