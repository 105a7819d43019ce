"""Harmony: the form in which gpt-oss answers, read token by token.

Source: OpenAI's description of the format, https://developers.openai.com/cookbook/articles/openai-harmony. An answer is
a list of messages, each with a header. The prompt ends with the beginning of the first header, <|start|>assistant:

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The channel analysis holds reasoning. Every other channel is for the user, also one that is not known here; a message to
a function is a call. The recipient (to=) may stand before the channel, too. <|return|> and <|call|> end an answer.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

from specker.answers.parts import Event, Kind, Part
from specker.answers.tool_formats import new_id
from specker.checkpoints.parse import HARMONY, HARMONY_ENDS

START = "<|start|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
CHANNEL, MESSAGE = HARMONY
CALL, RETURN = HARMONY_ENDS
MARKS = START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN
ROLE = "assistant"
FUNCTION = "functions."  # before the names of functions in recipients
GAP = "\n\n"  # between two messages that are shown as one text

Place = Literal["between", "header", "body"]


@dataclass(frozen=True)
class Harmony:
    """Attributes:
    ids: of the special tokens, by their texts.
    """

    ids: Mapping[str, int]

    @cached_property
    def marks(self) -> dict[int, str]:
        """The texts of the special tokens, by their ids."""
        return {token: text for text, token in self.ids.items()}

    @cached_property
    def parts(self) -> dict[int, bool]:
        """Whether each of the tokens stands before a body, or ends one: there a user's stop strings may occur."""
        return {token: text not in (START, CHANNEL, CONSTRAIN) for text, token in self.ids.items()}


def of(special: Mapping[str, int]) -> Harmony | None:
    """The form, if a model with the special tokens `special` knows it."""
    ids = {mark: special[mark] for mark in MARKS if mark in special}
    return Harmony(ids) if {CHANNEL, MESSAGE} <= {*ids} else None


def last_message(prompt: str) -> str:
    """The message with which a prompt ends, as far as it goes; "" for a prompt of another form."""
    at = prompt.rfind(START)
    return prompt[at:] if at >= 0 else ""


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat as the chat templates of such models read them: reasoning as `thinking`, one call in a
    message, and its result behind it.

    Templates refuse a text beside the reasoning before a call, so the text follows the reasoning there."""
    made: list[dict[str, Any]] = []
    n = 0
    while n < len(messages):
        message, n = dict(messages[n]), n + 1
        calls = message.get("tool_calls")
        if thought := message.pop("reasoning_content", None):
            message["thinking"] = thought
        if calls and message.get("thinking") and message.get("content"):
            message |= {"thinking": message["thinking"] + GAP + message["content"], "content": ""}
        if not calls or len(calls) < 2:
            made.append(message)
            continue
        results = [*takewhile(lambda each: each["role"] == "tool", messages[n:])]
        n += len(results)
        for i, call in enumerate(calls):
            made.append({**(message if i == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]})
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            made += map(dict, own)
            results = [each for each in results if each not in own]
        made += map(dict, results)
    return made


class Messages:
    """Reads one answer that grows. A header is never shown, and a call is held back until it is whole: if its body is
    no JSON object in the end, it is text. An answer without a header is text, too.

    Attributes:
        place: of the end of what was read.
        kind: of the message there, if it is in a body.
        reasoned: tokens of the reasoning, its headers included.
        found: how many calls the answer has so far.
    """

    def __init__(self, harmony: Harmony, begun: str = "", functions: Collection[str] = ()):
        """`begun`: `last_message` of the prompt. `functions`: the names of those that may be called."""
        self._marks, self._functions = harmony.marks, functions
        self.place: Place = "between"
        self.kind: Kind = "text"
        self.reasoned = self.found = 0
        self._header = ""  # of this message, its special tokens included
        self._header_tokens = 0
        self._name, self._body = "", ""  # of a call
        self._shown: set[Kind] = set()  # the kinds of earlier messages that had a text
        self._fresh = True  # nothing of this message was shown
        for piece in re.split(f"({'|'.join(map(re.escape, MARKS))})", begun):
            if piece:
                [*(self._mark(piece) if piece in MARKS else self._text(piece))]
        self._shown.clear()
        self._fresh, self._body = True, ""

    def read(self, event: Event) -> list[Part]:
        """The parts that an event adds to the answer; the last event ends it."""
        parts: list[Part] = []
        for n, (token, text) in enumerate(zip(event.tokens, event.texts, strict=True)):
            parts += [part._replace(drafted=n < event.accepted) for part in self.add(text, token)]
        if event.finished is not None:
            parts += self.end(event.rest)
        return parts

    def add(self, text: str, token: int) -> list[Part]:
        """The parts that a token adds. `text`: what it completes, without special tokens."""
        mark = self._marks.get(token)
        parts = [*self._text(text), *(self._mark(mark) if mark else ())]
        if self.place == "header":
            self._header_tokens += 1
        elif self.kind == "reasoning" and (self.place == "body" or mark):
            self.reasoned += 1 + self._header_tokens
            self._header_tokens = 0
        return parts

    def end(self, rest: str = "") -> list[Part]:
        """The last parts. `rest`: the end of the text."""
        parts = [*self._text(rest)]
        if self._plain and "to=" not in self._header:  # it was the beginning of a text
            parts += self._open("text", self._beside())
        return parts + [*self._close()]

    def _text(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self.place == "header":
            self._header += text
            if self._plain and not _recipient(self._beside()):
                yield from self._open("text", self._beside())
        elif self.place == "between":
            yield from self._open("text", text)
        elif self.kind == "call":
            self._body += text
        else:
            yield from self._show(self.kind, text)

    def _mark(self, mark: str) -> Iterator[Part]:
        if mark == MESSAGE and self.place != "body":
            yield from self._open(self._described())
        elif mark == CHANNEL and self.place == "header":
            self._header += mark
        elif mark in (START, CHANNEL):
            yield from self._close()
            self.place, self._header, self._header_tokens = "header", "" if mark == START else mark, 0
        elif mark == CONSTRAIN and self.place == "header":
            self._header += mark
        elif mark in (END, CALL, RETURN):
            yield from self._close()

    def _beside(self) -> str:
        """A header without its role."""
        return self._header.removeprefix(ROLE)

    @property
    def _plain(self) -> bool:
        """Whether this is a header of the assistant without a channel, as far as it goes."""
        return self.place == "header" and CHANNEL not in self._header and self._header.startswith(ROLE)

    def _described(self) -> Kind:
        """The kind of the message whose header has ended."""
        recipient = re.search(rf"\bto={re.escape(FUNCTION)}([\w.-]+)", self._header)
        self._name = recipient[1] if recipient else ""
        if self._name in self._functions:
            return "call"
        channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w*)", self._header)
        return "reasoning" if channel and channel[1] == "analysis" else "text"

    def _open(self, kind: Kind, text: str = "") -> Iterator[Part]:
        self.place, self.kind, self._fresh, self._header = "body", kind, True, ""
        yield from self._show(kind, text)

    def _close(self) -> Iterator[Part]:
        if self.place == "body" and self.kind == "call":
            body, self._body = self._body, ""
            if _is_object(body):
                yield Part("call", body, self._name, number=self.found, id=new_id())
                self.found += 1
            else:
                yield from self._show("text", body)
        if self.place == "body" and not self._fresh:
            self._shown.add("text" if self.kind == "call" else self.kind)
        self.place, self._header = "between", ""

    def _show(self, kind: Kind, text: str) -> Iterator[Part]:
        if text:
            gap = GAP if self._fresh and kind in self._shown else ""
            self._fresh = False
            yield Part(kind, gap + text)


def _recipient(text: str) -> bool:
    """Whether a header may go on as this text does after its role."""
    bare = text.lstrip()
    return bare.startswith("to=") or "to=".startswith(bare)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
