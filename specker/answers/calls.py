"""Calls: taken out of a text that grows."""

import json
from typing import Any, NamedTuple

from specker.answers.harmony import Kind
from specker.answers.tool_formats import Format, Functions, Read, new_id


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
    """Takes the calls out of one text that grows. What may be the beginning of one is held back, and so is white space,
    which may stand before one."""

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
