"""Blocks: an answer as a list of reasoning, texts and calls, one after the other. What the endpoints /v1/responses and
/v1/messages share: each turns its request into a `Chat`, and the blocks of the answer into its own form."""

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import PrivateAttr, ValidationError, model_validator

from specker.answers.parts import Kind
from specker.answers.reader import Reading
from specker.checkpoints.tokenizer import Tokens
from specker.serve.api import Body, Chat
from specker.serve.errors import sentence
from specker.serve.pieces import Piece, Pieces
from specker.serve.worker import Call, Failed


class Translated(Body):
    """A request of another API, which becomes a chat.

    Attributes:
        names: the request's names of the chat's fields where they differ, for messages.
    """

    names: ClassVar[Mapping[str, str]]
    _chat: Chat = PrivateAttr()

    def of_chat(self) -> dict[str, Any]:
        """The fields of the chat that differ from the request's."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _translated(self) -> Self:
        shared = {name: getattr(self, name) for name in Chat.model_fields if name in type(self).model_fields}
        try:
            self._chat = Chat(**shared | self.of_chat())
        except ValidationError as error:
            first = error.errors()[0]
            where = [name for name in first["loc"] if name != "function"]
            if where[:1] == ["messages"]:  # of which the request may have fewer
                where = ["messages", *where[-1:]][: len(where)]
            fields_in_text = rf"(?<!')\b({'|'.join(self.names)})\b(?!')"  # what the user sent stands in quotes
            said = sentence({**first, "loc": where})
            raise ValueError(re.sub(fields_in_text, lambda found: self.names[found[0]], said)) from None
        return self

    @property
    def chat(self) -> Chat:
        """The request as a chat."""
        return self._chat


def joined(content: Any, kinds: Sequence[str]) -> Any:
    """One text of a list of parts, which must have a type of `kinds`; other values as they are. Raises ValueError."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ValueError(f"a part must have a text, and its type must be {' or '.join(kinds)}")
    return "".join(part["text"] for part in content)


@dataclass
class Block:
    """Attributes:
    kind: what it is.
    text: so far; of a call, its arguments as JSON.
    call: as the chat API has it.
    id: of the block.
    """

    kind: Kind
    text: str = ""
    call: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Step(NamedTuple):
    """What happens to block `number`; `new` is added to its text."""

    what: Literal["begin", "more", "end"]
    number: int
    block: Block
    new: str = ""


class Blocks:
    """The blocks of one text that grows."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.reason: str | None = None  # why the text ended

    def add(self, piece: Piece) -> Iterator[Step]:
        self.reason = piece.reason
        for kind, parts in groupby(piece.parts, lambda part: part.kind):
            if kind != "call":
                yield from self._grow(kind, "".join(part.text for part in parts))
                continue
            for part in parts:
                yield from self._begin(Block(kind, call=part.call or {}))
                yield from self._more(part.text)
        if piece.reason is not None:
            yield from self._end()

    def _grow(self, kind: Kind, new: str) -> Iterator[Step]:
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._begin(Block(kind))
        yield from self._more(new)

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._end()
        self.blocks.append(block)
        yield Step("begin", len(self.blocks) - 1, block)

    def _more(self, new: str) -> Iterator[Step]:
        self.blocks[-1].text += new
        yield Step("more", len(self.blocks) - 1, self.blocks[-1], new)

    def _end(self) -> Iterator[Step]:
        if self.blocks:
            yield Step("end", len(self.blocks) - 1, self.blocks[-1])


class BlockAnswer(Pieces):
    """The answer to a call with one text. Its events have a `type`, which is also their name."""

    def __init__(self, call: Call, reading: Reading, asked: Chat, name: str, tokens: Tokens):
        super().__init__(call, reading, asked)
        self.name = name
        self.answer = Blocks()

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events."""
        raise NotImplementedError

    def step(self, step: Step) -> Iterator[dict[str, Any]]:
        """The events of a step."""
        raise NotImplementedError

    def end(self) -> Iterator[dict[str, Any]]:
        """The last events."""
        raise NotImplementedError

    def fail(self, status: int, message: str) -> dict[str, Any]:
        """The last event if the call fails."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """The whole answer, once the text has ended."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        async for piece in self.pieces():
            for _ in self.answer.add(piece):
                pass
        return self.body()

    async def events(self) -> AsyncIterator[str]:
        try:
            for event in self.begin():
                yield _line(event)
            async for piece in self.pieces():
                for step in self.answer.add(piece):
                    for event in self.step(step):
                        yield _line(event)
            for event in self.end():
                yield _line(event)
        except (Failed, TimeoutError) as error:
            yield _line(self.fail(*self.call.why(error)))
        finally:
            self.close()


def _line(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
