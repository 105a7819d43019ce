"""The parts of an answer, and what its readers need of an event."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["text", "reasoning", "call"]


class Event(Protocol):
    """What a round adds to a text: see runtime/events.py."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def accepted(self) -> int: ...
    @property
    def texts(self) -> list[str]: ...
    @property
    def rest(self) -> str: ...
    @property
    def finished(self) -> str | None: ...


class Part(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: what it is.
        text: of a call, its arguments as JSON.
        name: of a call, the function.
        drafted: whether it came from a draft token.
        number: of a call, how many precede it.
        id: of a call.
    """

    kind: Kind
    text: str
    name: str = ""
    drafted: bool = False
    number: int = 0
    id: str = ""

    @property
    def call(self) -> dict[str, Any] | None:
        """A call as the chat API has it; None for other parts."""
        if self.kind != "call":
            return None
        function = {"name": self.name, "arguments": self.text}
        return {"index": self.number, "id": self.id, "type": "function", "function": function}


def joined(parts: Iterable[Part], kind: Kind) -> str:
    """The text of the parts of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)
