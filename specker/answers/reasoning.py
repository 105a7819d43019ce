"""Reasoning: what a model writes between <think> and </think> before its answer, taken out of a text that grows. It is
looked for only if the chat template names the closing tag."""

from enum import Enum, auto

from specker import grammar
from specker.answers.calls import begun
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


class Place(Enum):
    """Where the end of a text is."""

    BEFORE = auto()  # nothing but white space yet, or the beginning of the opening tag
    INSIDE = auto()
    BETWEEN = auto()  # in the white space after the reasoning
    BESIDE = auto()


class Reasoning:
    """What may be the beginning of a tag is held back, and so is white space at both ends of the reasoning."""

    def __init__(self, inside: bool):
        """`inside`: the prompt has the opening tag already."""
        self._place, self._held = Place.INSIDE if inside else Place.BEFORE, ""
        self._begun = False

    @property
    def inside(self) -> bool:
        return self._place is Place.INSIDE

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """More of the text -> more of the reasoning, and of the text beside it. `last`: nothing follows."""
        self._held += text
        reasoning = ""
        if self._place is Place.BEFORE:
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._place, self._held = Place.INSIDE, start.removeprefix(OPEN)
            elif last or not OPEN.startswith(start):
                self._place = Place.BESIDE
        if self._place is Place.INSIDE:
            reasoning = self._inside(last)
        if self._place is Place.BETWEEN:
            self._held = self._held.lstrip()
            if self._held:
                self._place = Place.BESIDE
        beside = ""
        if self._place is Place.BESIDE:
            beside, self._held = self._held, ""
        return reasoning, beside

    def _inside(self, last: bool) -> str:
        text, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._place, self._held = Place.BETWEEN, rest
        else:
            end = len(text) if last else len(text) - begun(text, CLOSE)
            self._held = text[len(text[:end].rstrip()) :]
            text = text[:end]
        text = text.rstrip() if self._begun else text.strip()
        self._begun = self._begun or bool(text)
        return text
