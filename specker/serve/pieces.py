"""Pieces: what each event of a call adds to its texts, with reasoning and tool calls taken out of them. Every endpoint
writes its answer from them."""

import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from specker.answers.calls import Calls, Segment, called
from specker.answers.harmony import Harmony, Kind, Messages
from specker.answers.reasoning import Reasoning
from specker.answers.tool_formats import Format, Functions
from specker.runtime.control.stats import Stats
from specker.runtime.events import Event, Logprob
from specker.serve.api import Asked
from specker.serve.worker import Call

log = logging.getLogger(__name__)

REASONS = {"context": "length"}  # where the API has another word


class Piece(NamedTuple):
    """What an event adds to one of the texts."""

    choice: int
    segments: list[Segment]  # in the order of the text
    logprobs: list[Logprob]
    reason: str | None  # why the text ends

    @property
    def text(self) -> str:
        """Beside reasoning and calls."""
        return self._joined("text")

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [segment.call for segment in self.segments if segment.call is not None]

    def _joined(self, kind: Kind) -> str:
        return "".join(segment.text for segment in self.segments if segment.kind == kind)


@dataclass(frozen=True)
class Reading:
    """What the texts of a call may hold.

    Attributes:
        inside: whether they begin within reasoning; None if they have none.
        form: of tool calls; None if they have none.
        functions: that may be called.
        marks: special tokens with which reasoning or calls begin or end. They count as text here.
        harmony: the special tokens of answers in Harmony, which have reasoning and calls of their own.
        begun: the message that the prompt has begun, of such an answer.
    """

    inside: bool | None = None
    form: Format | None = None
    functions: Functions = field(default_factory=dict)
    marks: Mapping[int, str] = field(default_factory=dict)
    harmony: Harmony | None = None
    begun: str = ""

    @property
    def reasons(self) -> bool:
        """Whether texts may hold reasoning."""
        return self.inside is not None or self.harmony is not None


class Reader(Protocol):
    """Reads one text.

    Attributes:
        reasoned: tokens of its reasoning.
    """

    @property
    def reasoned(self) -> int: ...

    def read(self, choice: int, event: Event) -> Piece: ...


class ChannelReader:
    """Reads one answer in Harmony."""

    def __init__(self, reading: Reading):
        assert reading.harmony is not None
        self._messages = Messages(reading.harmony, reading.begun, reading.functions)
        self._found = 0

    @property
    def reasoned(self) -> int:
        return self._messages.reasoned

    def read(self, choice: int, event: Event) -> Piece:
        segments, reason = [], event.finished
        for part in self._messages.read(event):
            if part.kind == "call":
                segments.append(called(self._found, part.name, part.text))
                self._found += 1
            else:
                segments.append(Segment(part.kind, part.text))
        reason = "tool_calls" if reason == "stop" and self._found else reason
        return Piece(choice, segments, event.logprobs, REASONS.get(reason or "", reason))


class TagReader:
    """Reads one text in which tags surround reasoning and calls."""

    def __init__(self, reading: Reading):
        self._reasoning = None if reading.inside is None else Reasoning(reading.inside)
        self._calls = None if reading.form is None else Calls(reading.form, reading.functions)
        self._marks = reading.marks
        self._tokens = 0
        self.reasoned = 0  # tokens of the reasoning, with which a text begins

    def read(self, choice: int, event: Event) -> Piece:
        reasoning, reason = "", event.finished
        texts = [t + self._marks.get(token, "") for token, t in zip(event.tokens, event.texts, strict=True)]
        text = "".join(texts) + event.rest
        if self._reasoning is not None:
            reasoning, text = self._without_reasoning(self._reasoning, event, texts)
        segments = [Segment("reasoning", reasoning)] if reasoning else []  # only before all else
        if self._calls is not None:
            segments += self._calls.add(text, last=reason is not None)
            reason = "tool_calls" if reason == "stop" and self._calls.found else reason
        elif text:
            segments.append(Segment("text", text))
        return Piece(choice, segments, event.logprobs, REASONS.get(reason or "", reason))

    def _without_reasoning(self, found: Reasoning, event: Event, texts: list[str]) -> tuple[str, str]:
        parts = []
        for text in texts:  # token by token, to count them
            inside = found.inside
            parts.append(found.add(text))
            self._tokens += 1
            if inside or found.inside:
                self.reasoned = self._tokens
        parts.append(found.add(event.rest, last=event.finished is not None))
        return "".join(r for r, _ in parts), "".join(t for _, t in parts)


class Pieces:
    """The texts of one call. `kind`: the beginning of the answer's id."""

    kind: ClassVar[str]

    def __init__(self, call: Call, reading: Reading, asked: Asked):
        self.call, self.reading, self.asked = call, reading, asked
        self.id = f"{self.kind}{uuid.uuid4().hex}"
        kind = TagReader if reading.harmony is None else ChannelReader
        self.readers: list[Reader] = [kind(reading) for _ in call.requests]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises as `Call.events`."""
        places = {request: n for n, request in enumerate(self.call.requests)}
        async for event in self.call.events():
            n = places[event.request]
            yield self.readers[n].read(n, event)

    def events(self) -> AsyncIterator[str]:
        """Server-sent events; an error is the last one. Cancels the call if they are not read to their end."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        """Raises as `Call.events`."""
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        """Token counts. Accepted and refused draft tokens are in OpenAI's fields for predictions."""
        requests = self.call.requests
        first = requests[:: self.asked.n]  # a prompt counts once, as its first text found it
        stats = [request.stats for request in requests]
        prompt, emitted = sum(r.prompt_length for r in first), sum(s.tokens for s in stats)
        drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
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
