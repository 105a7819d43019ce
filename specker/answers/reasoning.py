"""Reasoning: what a model writes between <think> and </think> before its answer, taken out of a text that grows. It is
looked for only if the chat template names the closing tag."""

from typing import Literal

from specker import grammar
from specker.answers.scanner import Scanner
from specker.answers.tool_formats import TEXT, Special, spelled

OPEN, CLOSE = "<think>", "</think>"


def opened(template: str, prompt: str, continued: str) -> bool | None:
    """Whether a prompt ends within reasoning; None if the model's texts have none. `continued`: the message that the
    answer continues, else empty."""
    if CLOSE not in template:
        return None
    return prompt.rstrip().endswith(OPEN) or continued.rfind(OPEN) > continued.rfind(CLOSE)


def preceded(form: str, special: Special) -> str:
    """A grammar for the rest of reasoning that the prompt has begun, and then what the grammar `form` matches."""
    close = spelled(CLOSE, special)
    thought = f"thought: TEXT {close}" if CLOSE in special else f"thought[suffix={close}]: TEXT"
    rules = "%llguidance {}", "start: thought gap @form", thought, TEXT, r"gap: /\n{0,2}/", ""
    return grammar.after("\n".join(rules), form)


Place = Literal["before", "inside", "between", "beside"]  # "between": in the white space behind the reasoning


class Reasoning:
    """Takes the reasoning out of one text that grows. Text that could be the beginning of a tag is held back, and so is
    white space at both ends of the reasoning.

    Attributes:
        place: of the end of the text.
    """

    def __init__(self, inside: bool):
        """`inside`: the prompt has the opening tag already."""
        self.place: Place = "inside" if inside else "before"
        self._opening, self._closing = Scanner([OPEN], trims=True), Scanner([CLOSE], trims=True)
        self._begun = False

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """More of the text -> more of the reasoning, and of the text beside it. `last`: nothing follows."""
        reasoning = ""
        if self.place == "before":
            text = self._opening.add(text)
            if self._opening.found and not text:
                self.place, text = "inside", self._opening.marked.removeprefix(OPEN)
            elif text or last:
                self.place, text = "beside", text + self._opening.flush()
        if self.place == "inside":
            reasoning, text = self._closing.add(text), ""
            if self._closing.found:
                self.place, text = "between", self._closing.marked.removeprefix(CLOSE)
            elif last:
                reasoning = (reasoning + self._closing.flush()).rstrip()
            reasoning = reasoning if self._begun else reasoning.lstrip()
            self._begun = self._begun or bool(reasoning)
        if self.place == "between":
            text = text.lstrip()
            self.place = "beside" if text else "between"
        return reasoning, text
