"""Tools: the grammar that makes calls valid, and the calls taken out of a text. The form of a call is that of Hermes
and Qwen: a JSON object with `name` and `arguments` between two tags, which the chat template must name."""

import json
import uuid
from typing import Any

from specker import grammar
from specker.serve.api import Chat, Choice

BEGIN, END = "<tool_call>", "</tool_call>"
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}  # the arguments of a function without any


def grammar_of(asked: Chat, template: str) -> str | None:
    """What a text with the request's tools must match; None if there are none. Raises ValueError if the chat template
    knows no such calls, and for a tool_choice that names no tool."""
    if not asked.tools or asked.tool_choice == "none":
        return None
    if BEGIN not in template:
        raise ValueError(f"tools need a chat template with {BEGIN}, and the model's has none")
    tools = {tool.function.name: tool.function for tool in asked.tools}
    if isinstance(asked.tool_choice, Choice):
        chosen = asked.tool_choice.function.name
        if chosen not in tools:
            raise ValueError(f"tool_choice names {chosen!r}, which is none of the tools")
        tools = {chosen: tools[chosen]}
    tags = [
        grammar.Tag(f'{BEGIN}\n{{"name": "{name}", "arguments": ', function.parameters or NOTHING, f"}}\n{END}")
        for name, function in tools.items()
    ]
    return grammar.tagged(tags, BEGIN, required=asked.tool_choice not in (None, "auto"))


class Calls:
    """Takes the calls out of one text that grows. What may be the beginning of one is held back, and so is white space,
    which may stand before one."""

    def __init__(self) -> None:
        self._held = ""
        self.found = 0

    def add(self, text: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """More of the text -> the text beside calls, and the calls that are complete. `last`: nothing follows."""
        self._held += text
        beside, calls = "", []
        while (at := self._held.find(BEGIN)) >= 0 and (end := self._held.find(END, at)) >= 0:
            beside += self._held[:at].rstrip()
            calls.append(self._parsed(self._held[at + len(BEGIN) : end]))
            self._held = self._held[end + len(END) :].lstrip()
        if last:
            return beside + self._held, calls
        cut = at if at >= 0 else len(self._held) - begun(self._held, BEGIN)
        cut = len(self._held[:cut].rstrip())
        beside, self._held = beside + self._held[:cut], self._held[cut:]
        return beside, calls

    def _parsed(self, text: str) -> dict[str, Any]:
        call = json.loads(text)  # the grammar has seen to it
        self.found += 1
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        return {"index": self.found - 1, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def begun(text: str, tag: str) -> int:
    """Characters at the end of `text` that may begin `tag`."""
    return max((n for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)
