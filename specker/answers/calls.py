"""Calls: taken out of a text that grows."""

import json

from specker.answers.parts import Part
from specker.answers.scanner import Scanner
from specker.answers.tool_formats import Format, Functions, Read


class Calls:
    """Takes the calls out of one text that grows. Text that could be the beginning of a call is held back until it is
    or is not one; so is white space, which is dropped before a call.

    Attributes:
        found: how many calls the text has so far.
    """

    def __init__(self, form: Format, functions: Functions):
        self._form, self._functions = form, functions
        self._scanner = Scanner(form.begins, trims=True)
        self._place = "begin"  # at the "begin" of the text, "after" a call, or in a "text"
        self.found = 0

    def add(self, text: str, last: bool = False) -> list[Part]:
        """More of the text -> the texts beside calls and the calls that are complete, in their order. `last`: nothing
        follows."""
        parts: list[Part] = []
        closes = self._form.closing in text  # only then a long call is read anew
        while True:
            if self._place == "after" and not self._scanner.held:
                text = text.lstrip(self._form.between)
            before = self._scanner.add(text)
            if self._form.first and (before or self._place == "text" or self._scanner.held[:1].isspace()):
                before += self._scanner.flush()
            read = self._read(self._scanner.marked) if closes and self._scanner.found else None
            if read is None and last:
                before += self._scanner.flush()
            if before:
                parts.append(Part("text", before))
                self._place = "text"
            if read is None:
                return parts
            parts += [self._call(*call) for call in read[0]]
            text, self._place = self._scanner.marked[read[1] :], "after"
            self._scanner.flush()

    def _read(self, text: str) -> Read | None:
        try:
            return self._form.read(text, self._functions)
        except (ValueError, LookupError, TypeError):  # ordinary text that looks like a call whose tags are tokens
            return None

    def _call(self, name: str, arguments: object) -> Part:
        self.found += 1
        written = json.dumps(arguments, ensure_ascii=False)
        return Part("call", written, name, number=self.found - 1, id=self._form.call_id())
