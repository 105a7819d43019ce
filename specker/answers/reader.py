"""What an answer may hold by its prompt, and what reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specker.answers import harmony, reasoning
from specker.answers.calls import Calls
from specker.answers.harmony import Harmony, Messages
from specker.answers.parts import Event, Part
from specker.answers.reasoning import CLOSE, OPEN, Reasoning
from specker.answers.tool_formats import TAGS, Format, Functions, format_of


@dataclass(frozen=True)
class Reading:
    """What a text may hold.

    Attributes:
        inside: whether it begins within reasoning; None if it has none.
        form: of tool calls; None if it has none.
        functions: that may be called.
        marks: special tokens with which reasoning or calls begin or end. They count as text here.
        harmony: the special tokens of an answer in Harmony, which has reasoning and calls of its own.
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
        """Whether the text may hold reasoning."""
        return self.inside is not None or self.harmony is not None

    def reader(self) -> "Reader":
        return TagReader(self) if self.harmony is None else Messages(self.harmony, self.begun, self.functions)


def reading(
    special: Mapping[str, int], template: str, prompt: str, continued: str, functions: Functions | None = None
) -> Reading:
    """What the answer to a conversation may hold. `special`: the model's special tokens; `prompt`: what its chat
    template made of the conversation; `continued`: the message that the answer continues, else empty; `functions`:
    that may be called. Raises ValueError for functions if the template knows no calls."""
    functions = functions or {}
    if (known := harmony.of(special)) is not None:
        return Reading(functions=functions, harmony=known, begun=harmony.last_message(prompt))
    inside = reasoning.opened(template, prompt, continued)
    tags = (*TAGS, OPEN, CLOSE) if functions or inside is not None else ()
    marks = {special[tag]: tag for tag in tags if tag in special}
    return Reading(inside, format_of(template) if functions else None, functions, marks)


class TagReader:
    """Reads one text in which tags surround reasoning and calls.

    Attributes:
        reasoned: tokens of its reasoning so far, with which it begins.
    """

    def __init__(self, reading: Reading):
        self._reasoning = None if reading.inside is None else Reasoning(reading.inside)
        self._calls = None if reading.form is None else Calls(reading.form, reading.functions)
        self._marks = reading.marks
        self._tokens = self.reasoned = 0

    @property
    def found(self) -> int:
        """How many calls the text has so far."""
        return 0 if self._calls is None else self._calls.found

    def read(self, event: Event) -> list[Part]:
        """The parts that an event adds; the last event ends the text."""
        parts: list[Part] = []
        for n, (token, text) in enumerate(zip(event.tokens, event.texts, strict=True)):
            self._tokens += 1
            parts += self._add(text + self._marks.get(token, ""), drafted=n < event.accepted)
        return parts if event.finished is None else parts + self._add(event.rest, last=True)

    def _add(self, text: str, drafted: bool = False, last: bool = False) -> list[Part]:
        parts = []
        if self._reasoning is not None:
            before = self._reasoning.place
            thought, text = self._reasoning.add(text, last)
            if "inside" in (before, self._reasoning.place):
                self.reasoned = self._tokens
            if thought:
                parts.append(Part("reasoning", thought, drafted=drafted))
        if self._calls is not None:
            parts += self._calls.add(text, last)
        elif text:
            parts.append(Part("text", text, drafted=drafted))
        return parts


Reader = Messages | TagReader  # reads one text that grows
