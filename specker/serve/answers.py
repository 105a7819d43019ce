"""Answers of the two older endpoints of OpenAI: chats and completions, whole or as server-sent events."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from specker.answers.reader import Reading
from specker.checkpoints.tokenizer import Tokens
from specker.runtime.detokenize import Detokenizer, prompt_text
from specker.serve import logprobs
from specker.serve.api import Asked, Chat, Completion
from specker.serve.errors import detail
from specker.serve.pieces import Piece, Pieces
from specker.serve.worker import Call, Failed


class Answer(Pieces):
    """The answer to one call. `kinds`: the names of a whole answer and of a chunk."""

    kinds: ClassVar[tuple[str, str]]

    def __init__(self, call: Call, reading: Reading, asked: Asked, name: str, tokens: Tokens):
        super().__init__(call, reading, asked)
        self.tokens = tokens
        self._readers: dict[int, Detokenizer] = {}  # of texts with log-probabilities
        self._about = {"id": self.id, "created": int(time.time()), "model": name}

    def reader(self, choice: int) -> Detokenizer:
        """What reads a text for its log-probabilities: after the same prompt, but to its end, without stop strings."""
        if choice not in self._readers:
            request = self.call.requests[choice]
            prompt, parts = request.token_ids[: request.prompt_length], request.reader.parts if request.reader else None
            self._readers[choice] = Detokenizer(self.tokens, prompt, parts=parts)
        return self._readers[choice]

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A chunk's choice."""
        raise NotImplementedError

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole text's choice."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        texts = [Piece(n, [], [], None) for n in range(len(self.call.requests))]
        async for piece in self.pieces():
            text = texts[piece.choice]
            text.parts.extend(piece.parts)
            text.logprobs.extend(piece.logprobs)
            texts[piece.choice] = text._replace(reason=piece.reason)
        choices = [self.choice(text) for text in texts]
        return self._about | {"object": self.kinds[0], "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        begun: set[int] = set()
        try:
            async for piece in self.pieces():
                if isinstance(self.asked, Chat) and piece.choice not in begun:
                    begun.add(piece.choice)
                    said = {"index": piece.choice, "delta": {"role": "assistant", "content": ""}}
                    yield self._event([said | {"finish_reason": None}])
                if piece.calls and piece.reason:  # openai's client looks for calls before the chunk with the reason
                    yield self._event([self.delta(piece._replace(reason=None))])
                    piece = piece._replace(parts=[], logprobs=[])
                if piece.parts or piece.logprobs or piece.reason:
                    yield self._event([self.delta(piece)])
            if self.asked.usage:
                yield self._event([], self.usage())
            yield "data: [DONE]\n\n"
        except (Failed, TimeoutError) as error:
            yield f"data: {json.dumps({'error': detail(*self.call.why(error))})}\n\n"
        finally:
            self.close()

    def _event(self, choices: list[dict[str, Any]], total: dict[str, Any] | None = None) -> str:
        body = self._about | {"object": self.kinds[1], "choices": choices}
        return f"data: {json.dumps(body | ({'usage': total} if self.asked.usage else {}), ensure_ascii=False)}\n\n"


class ChatAnswer(Answer):
    kind, kinds = "chatcmpl-", ("chat.completion", "chat.completion.chunk")
    asked: Chat

    def delta(self, piece: Piece) -> dict[str, Any]:
        said = {"reasoning_content": piece.reasoning, "content": piece.text, "tool_calls": piece.calls}
        delta = {name: value for name, value in said.items() if value}
        return {"index": piece.choice, "delta": delta} | self._end(piece)

    def choice(self, piece: Piece) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": piece.text or (None if piece.calls else "")}
        if piece.reasoning:
            said["reasoning_content"] = piece.reasoning
        if piece.calls:
            said["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in piece.calls]
        return {"index": piece.choice, "message": said} | self._end(piece)

    def _end(self, piece: Piece) -> dict[str, Any]:
        most = self.asked.top_logprobs or 0
        shown = None
        if self.asked.logprobs:
            shown = logprobs.of_chat(self.tokens, self.reader(piece.choice), piece.logprobs, most)
        return {"logprobs": shown, "finish_reason": piece.reason}


class TextAnswer(Answer):
    kind, kinds = "cmpl-", ("text_completion", "text_completion")
    asked: Completion

    def __init__(self, call: Call, reading: Reading, asked: Completion, name: str, tokens: Tokens):
        super().__init__(call, reading, asked, name, tokens)
        self._echoes: dict[int, str] = {}  # the prompts of texts that have not begun, if texts begin with them
        if asked.echo:
            prompts = [p if isinstance(p, str) else prompt_text(tokens, p) for p in asked.prompts]
            self._echoes = {n: prompts[n // asked.n] for n in range(len(call.requests))}

    def delta(self, piece: Piece) -> dict[str, Any]:
        text = self._echoes.pop(piece.choice, "") + piece.text
        shown, most = None, self.asked.logprobs
        if most is not None:
            shown = logprobs.of_text(self.tokens, self.reader(piece.choice), piece.logprobs, most)
        return {"index": piece.choice, "text": text, "logprobs": shown, "finish_reason": piece.reason}

    choice = delta
