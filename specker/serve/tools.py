"""Tools: the grammar that makes calls valid, and the calls taken out of a text."""

import json
from typing import Any, NamedTuple

from specker.runtime.harmony import Kind
from specker.serve.api import Chat, Choice
from specker.serve.tool_formats import Format, Functions, Read, Special, format_of, new_id

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}  # the arguments of a function without any


def functions_of(asked: Chat) -> Functions:
    """The functions that a text may call; empty if there are none. Raises ValueError for a tool_choice that names no
    tool."""
    if not asked.tools or asked.tool_choice == "none":
        return {}
    functions = {tool.function.name: tool.function.parameters or NOTHING for tool in asked.tools}
    if isinstance(asked.tool_choice, Choice):
        chosen = asked.tool_choice.function.name
        if chosen not in functions:
            raise ValueError(f"tool_choice names {chosen!r}, which is none of the tools")
        return {chosen: functions[chosen]}
    return functions


def may_call(asked: Chat) -> bool:
    """Whether a text may be a call, and need not."""
    return bool(asked.tools) and asked.tool_choice in (None, "auto")


def grammar_of(asked: Chat, template: str, special: Special) -> str | None:
    """What a text with the request's tools must match; None if there are none. `special`: as in tool_formats.py. Raises
    ValueError as `functions_of`, and if the chat template knows no calls."""
    functions = functions_of(asked)
    several = asked.parallel_tool_calls is not False
    return format_of(template).grammar(functions, not may_call(asked), several, special) if functions else None


class Segment(NamedTuple):
    """A stretch of an answer.

    Attributes:
        kind: what it is.
        text: of a call, its arguments as JSON.
        call: as the chat API has it.
    """

    kind: Kind
    text: str
    call: dict[str, Any] | None = None


class Calls:
    """Takes the calls out of one text that grows. Text that could be the beginning of a call is held back until it is
    or is not one; so is white space, which is dropped before a call."""

    def __init__(self, form: Format, functions: Functions):
        self._form, self._functions = form, functions
        self._held = ""
        self._place = "begin"  # of what is held: at the "begin" of the text, "after" a call, or in a "text"
        self.found = 0

    def add(self, text: str, last: bool = False) -> list[Segment]:
        """More of the text -> the texts beside calls and the calls that are complete, in their order. `last`: nothing
        follows."""
        self._held += text
        found: list[Segment] = []
        closes = self._form.closing in text  # only then a long call is read anew
        while True:
            if self._place == "after":
                self._held = self._held.lstrip(self._form.between)
            at, sure = self._begins()
            if not (sure and closes) or (read := self._read(self._held[at:])) is None:
                break
            if before := self._held[:at].rstrip():
                found.append(Segment("text", before))
            found += [self._call(*call) for call in read[0]]
            self._held, self._place = self._held[at + read[1] :], "after"
        cut = len(self._held) if last else len(self._held[:at].rstrip())
        if cut:
            found.append(Segment("text", self._held[:cut]))
            self._held, self._place = self._held[cut:], "text"
        return found

    def _read(self, text: str) -> Read | None:
        try:
            return self._form.read(text, self._functions)
        except (ValueError, LookupError, TypeError):  # ordinary text that looks like a call whose tags are tokens
            return None

    def _begins(self) -> tuple[int, bool]:
        """Where a call begins in what is held, or may begin if more follows, and whether it does."""
        held, begins = self._held, self._form.begins
        if self._form.first:
            if self._place == "text" or not any(begun(held, b) == len(held) or held.startswith(b) for b in begins):
                return len(held), False
            return 0, held.startswith(begins)
        found = [at for at in map(held.find, begins) if at >= 0]
        if found:
            return min(found), True
        return len(held) - max(begun(held, tag) for tag in begins), False

    def _call(self, name: str, arguments: Any) -> Segment:
        self.found += 1
        return called(self.found - 1, name, json.dumps(arguments, ensure_ascii=False), self._form.call_id())


def called(index: int, name: str, arguments: str, id: str | None = None) -> Segment:
    """A call. `arguments`: as JSON. `id`: default: a new one."""
    function = {"name": name, "arguments": arguments}
    call = {"index": index, "id": id or new_id(), "type": "function", "function": function}
    return Segment("call", arguments, call)


def begun(text: str, tag: str) -> int:
    """Characters at the end of `text` that may begin `tag`."""
    return max((n for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)
