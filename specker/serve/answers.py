"""Answers: the events of a call's requests as the API writes them, whole or as server-sent events."""

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar, NamedTuple

from specker.runtime.control.stats import Stats
from specker.runtime.events import Logprob
from specker.serve import logprobs
from specker.serve.api import Asked, Chat, Completion
from specker.serve.errors import detail
from specker.serve.tools import Calls
from specker.serve.worker import Call, Failed

log = logging.getLogger(__name__)

REASONS = {"context": "length", "grammar": "length"}  # where the API has another word: the text is not complete


class Piece(NamedTuple):
    """What an event adds to one of the texts."""

    choice: int
    text: str
    calls: list[dict[str, Any]]
    logprobs: list[Logprob]
    reason: str | None  # why the text ends


class Answer:
    """The answer to one call. `kinds`: the names of a whole answer, of a chunk, and the beginning of its id."""

    kinds: ClassVar[tuple[str, str, str]]
    tools = False  # whether texts may hold tool calls

    def __init__(self, call: Call, asked: Asked, name: str, tokenizer: Any):
        self.call, self.asked, self.tokenizer = call, asked, tokenizer
        self._about = {"id": f"{self.kinds[2]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A chunk's choice."""
        raise NotImplementedError

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole text's choice."""
        raise NotImplementedError

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises as `Call.events`."""
        places = {request: n for n, request in enumerate(self.call.requests)}
        readers = [Calls() if self.tools else None for _ in places]
        async for event in self.call.events():
            n, text, reason = places[event.request], event.text, event.finished
            calls: list[dict[str, Any]] = []
            if (reader := readers[n]) is not None:
                text, calls = reader.add(text, last=reason is not None)
                reason = "tool_calls" if reason == "stop" and reader.found else reason
            yield Piece(n, text, calls, event.logprobs, REASONS.get(reason or "", reason))

    async def whole(self) -> dict[str, Any]:
        """Raises as `Call.events`."""
        texts: list[list[Piece]] = [[] for _ in self.call.requests]
        async for piece in self.pieces():
            texts[piece.choice].append(piece)
        choices = [
            Piece(
                n,
                "".join(piece.text for piece in pieces),
                [call for piece in pieces for call in piece.calls],
                [each for piece in pieces for each in piece.logprobs],
                pieces[-1].reason,
            )
            for n, pieces in enumerate(texts)
        ]
        made = [self.choice(choice) for choice in choices]
        return self._about | {"object": self.kinds[0], "choices": made, "usage": usage(self.call)}

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events; an error is the last one. Cancels the call if they are not read to their end."""
        begun: set[int] = set()
        try:
            async for piece in self.pieces():
                if isinstance(self.asked, Chat) and piece.choice not in begun:
                    begun.add(piece.choice)
                    said = {"index": piece.choice, "delta": {"role": "assistant", "content": ""}}
                    yield self._event([said | {"finish_reason": None}])
                if any(piece[1:]):
                    yield self._event([self.delta(piece)])
            if self.asked.usage:
                yield self._event([], usage(self.call))
            yield "data: [DONE]\n\n"
        except (Failed, TimeoutError) as error:
            yield f"data: {json.dumps({'error': detail(*self.call.why(error))})}\n\n"
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what has not ended, and log a line, which has nothing of the texts."""
        how = " ".join(request.finished or "cancelled" for request in self.call.requests)
        self.call.close()
        total, seconds = sum((r.stats for r in self.call.requests), Stats()), time.monotonic() - self.call.began
        prompt, drafts = usage(self.call)["prompt_tokens"], f"{total.acceptance_length:.2f} tokens a round"
        log.info(f"{self._about['id']}: {prompt} + {total.tokens} tokens, {seconds:.2f} s, {drafts}, {how}")

    def _event(self, choices: list[dict[str, Any]], total: dict[str, Any] | None = None) -> str:
        body = self._about | {"object": self.kinds[1], "choices": choices}
        return f"data: {json.dumps(body | ({'usage': total} if self.asked.usage else {}), ensure_ascii=False)}\n\n"


class ChatAnswer(Answer):
    kinds = "chat.completion", "chat.completion.chunk", "chatcmpl"
    asked: Chat

    @property
    def tools(self) -> bool:  # type: ignore[override]
        return bool(self.asked.tools) and self.asked.tool_choice != "none"

    def delta(self, piece: Piece) -> dict[str, Any]:
        said: dict[str, Any] = {"content": piece.text} if piece.text else {}
        return {
            "index": piece.choice,
            "delta": said | ({"tool_calls": piece.calls} if piece.calls else {}),
        } | self._end(piece)

    def choice(self, piece: Piece) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": piece.text or (None if piece.calls else "")}
        if piece.calls:
            said["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in piece.calls]
        return {"index": piece.choice, "message": said} | self._end(piece)

    def _end(self, piece: Piece) -> dict[str, Any]:
        most = self.asked.top_logprobs or 0
        shown = logprobs.of_chat(self.tokenizer, piece.logprobs, most) if self.asked.logprobs else None
        return {"logprobs": shown, "finish_reason": piece.reason}


class TextAnswer(Answer):
    kinds = "text_completion", "text_completion", "cmpl"
    asked: Completion

    def __init__(self, call: Call, asked: Completion, name: str, tokenizer: Any):
        super().__init__(call, asked, name, tokenizer)
        self._written = [0] * len(call.requests)  # characters of each text so far
        self._echoes: dict[int, str] = {}  # the prompts of texts that have not begun, if texts begin with them
        if asked.echo:
            prompts = [p if isinstance(p, str) else tokenizer.decode(p) for p in asked.prompts]
            self._echoes = {n: prompts[n // asked.n] for n in range(len(call.requests))}

    def delta(self, piece: Piece) -> dict[str, Any]:
        piece = piece._replace(text=self._echoes.pop(piece.choice, "") + piece.text)
        start, most = self._written[piece.choice], self.asked.logprobs
        self._written[piece.choice] += len(piece.text)
        shown = None if most is None else logprobs.of_text(self.tokenizer, piece.logprobs, most, start)
        return {"index": piece.choice, "text": piece.text, "logprobs": shown, "finish_reason": piece.reason}

    choice = delta


def usage(call: Call) -> dict[str, Any]:
    """Token counts. Accepted and refused draft tokens are in OpenAI's fields for predictions."""
    first = {
        tuple(r.token_ids[: r.prompt_length]): r for r in call.requests
    }.values()  # a prompt of several texts counts once
    stats = [request.stats for request in call.requests]
    prompt, emitted = sum(r.prompt_length for r in first), sum(s.tokens for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    found = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": emitted,
        "total_tokens": prompt + emitted,
        "prompt_tokens_details": {"cached_tokens": sum(max(0, r.prompt_length - 1 - r.stats.prefilled) for r in first)},
        "completion_tokens_details": found,
    }
