"""The forms in which models write tool calls: for each one a grammar, and a reader for what matches it. The chat
template shows which form its model knows.

A tag such as [TOOL_CALLS] may be a special token, which text cannot spell. `special` has the ids of those."""

import json
import random
import re
import string
import sys
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar
from urllib.parse import unquote

from specker import grammar

Functions = Mapping[str, dict[str, Any]]  # the schemas of their arguments, by their names
Special = Mapping[str, int]
Read = tuple[list[tuple[str, Any]], int]  # names and arguments of calls, and the characters that they take

TEXT = r"TEXT: /(.|\n)*/"
NEXT = r'"\n"'  # before an argument of Qwen3-Coder's
LAST = r'"\n</parameter>\n"'  # behind it
PARAMETERS = '%s", "parameters": '
LONGEST = 16 << 20  # characters of the grammar of a request's tools
CHAIN = 8  # definitions that refer to one another, at most
DEFINITIONS = "$defs", "definitions"  # where a schema keeps those that it refers to


def _finite(text: str) -> float:
    """A number of a call. One that is too large is the largest that there is: JSON has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


JSON = json.JSONDecoder(parse_float=_finite)


class Format:
    """Attributes:
    known: what the chat template has, all of it.
    begins: the texts with which a call may begin.
    first: whether calls come at the beginning of a text only.
    between: characters that may stand after a call.
    closing: a call's last character.
    """

    known: ClassVar[tuple[str, ...]]
    begins: ClassVar[tuple[str, ...]]
    first: ClassVar[bool] = False
    between: ClassVar[str] = " \n"
    closing: ClassVar[str] = ">"

    def grammar(self, functions: Functions, required: bool, several: bool, special: Special) -> str:
        """A free text with calls, or if they are `required` one that begins with a call. Unless there may be `several`,
        the text ends with the first one."""
        [begin] = self.begins
        bodies = (self.body(name, schema, special, f"f{n}") for n, (name, schema) in enumerate(functions.items()))
        if required:
            start = [f"start: {spelled(begin, special)} body"]
        elif begin in special:
            call = f"TEXT {spelled(begin, special)} body"
            start = [f"start: ({call})* TEXT" if several else f"start: TEXT | {call}", TEXT]
        else:
            rule = "start: (head body)* TEXT" if several else "start: TEXT | head body"
            start = [rule, TEXT, f"head[lazy]: TEXT {spelled(begin, special)}"]
        return written(start, "body", bodies)

    def body(self, name: str, schema: dict[str, Any], special: Special, prefix: str) -> list[str]:
        """What follows the beginning of a function's call: the content of a Lark rule, and further rules, whose names
        begin with `prefix`."""
        raise NotImplementedError

    def read(self, text: str, functions: Functions) -> Read | None:
        """The calls with which a text begins; None if they are not whole yet."""
        raise NotImplementedError

    def call_id(self) -> str:
        return new_id()


class Hermes(Format):
    """Hermes, Qwen2.5, Qwen3: a JSON object between two tags."""

    known = begins = ("<tool_call>",)

    def body(self, name: str, schema: dict[str, Any], special: Special, prefix: str) -> list[str]:
        begin, end = spelled(f'\n{{"name": "{name}", "arguments": ', special), spelled("}\n</tool_call>", special)
        return [f"{begin} {grammar.embedded(schema)} {end}"]

    def read(self, text: str, functions: Functions) -> Read | None:
        start = _past(text, len("<tool_call>"))
        if (found := _json(text, start)) is None:
            return None
        call, end = found
        end = _past(text, end)
        if not text.startswith("</tool_call>", end):
            return None
        return [(call["name"], call["arguments"])], end + len("</tool_call>")


class QwenCoder(Format):
    """Qwen3-Coder: an element for each argument. Strings stand there as they are, other values as JSON."""

    known = ("<tool_call>", "<function=")
    begins = ("<tool_call>",)

    def body(self, name: str, schema: dict[str, Any], special: Special, prefix: str) -> list[str]:
        rules = [rf"{prefix}_text[suffix={LAST}]: /(.|\n)*/"]
        shared = Definitions(schema)
        properties, needed = _arguments(name, schema)
        parts, size = [], 0
        for n, (key, one) in enumerate(properties.items()):
            value = f"{grammar.embedded({**one, **shared.of(one)} if isinstance(one, dict) else {})} {LAST}"
            if _is_text(one):
                choices = one.get("enum") or ([one["const"]] if "const" in one else None)
                ends = [json.dumps(f"{choice}\n</parameter>\n") for choice in choices or ()]
                value = f"({' | '.join(ends)})" if choices else f"{prefix}_text"
            rules.append(f"{prefix}_{n}: {spelled(f'<parameter={key}>', {})} {NEXT} {value}")
            parts.append(f"{prefix}_{n}" if key in needed else f"{prefix}_{n}?")
            size = bounded(size + len(value))
        begin, end = spelled(f"\n<function={name}>\n", special), spelled("</function>\n</tool_call>", special)
        return [" ".join((begin, *parts, end)), *(rules if parts else [])]

    def read(self, text: str, functions: Functions) -> Read | None:
        begin, end = "<tool_call>\n<function=", "</function>\n</tool_call>"
        at = text.find(">\n", len(begin)) + 2
        if at < 2 or not text.startswith(begin):
            return None
        name = text[len(begin) : at - 2]
        properties, _ = _arguments(name, functions.get(name, {}))
        arguments: dict[str, Any] = {}
        while text.startswith("<parameter=", at):
            begun = text.find(">\n", at) + 2
            ends = text.find("\n</parameter>\n", begun)
            if begun < 2 or ends < 0:
                return None
            key, value = text[at + len("<parameter=") : begun - 2], text[begun:ends]
            arguments[key] = value if _is_text(properties.get(key)) else JSON.decode(value)
            at = ends + len("\n</parameter>\n")
        return ([(name, arguments)], at + len(end)) if text.startswith(end, at) else None


class Llama(Format):
    """Llama 3.1 and newer: JSON objects, perhaps after <|python_tag|>, in place of a text."""

    known = ('{"name": ', '"parameters": ')
    begins = ("<|python_tag|>", '{"name": "')
    first, between, closing = True, " \n;", "}"

    def grammar(self, functions: Functions, required: bool, several: bool, special: Special) -> str:
        tag, begin = self.begins
        calls = f"{spelled(tag, special)}? calls" if tag in special else "calls"
        start = [f"start: {calls}" if required else f"start: PLAIN | {calls}"]
        if not required:
            start.append(r'PLAIN: /(.|\n)*/ & ~/\{"name": "(.|\n)*/')
        more = ' ("; " call)*' if several else ""
        start.append(f"calls: call{more}\ncall: {json.dumps(begin)} body")
        return written(start, "body", (self.body(name, schema, special, "") for name, schema in functions.items()))

    def body(self, name: str, schema: dict[str, Any], special: Special, prefix: str) -> list[str]:
        return [f"{spelled(PARAMETERS % name, {})} {grammar.embedded(schema)} {spelled('}', {})}"]

    def read(self, text: str, functions: Functions) -> Read | None:
        tag, _ = self.begins
        if (found := _json(text, len(tag) if text.startswith(tag) else 0)) is None:
            return None
        call, end = found
        return ([(call["name"], call["parameters"])], end) if {"name", "parameters"} <= {*call} else None


class Mistral(Format):
    """Mistral until 2024: a JSON list after a tag."""

    known: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    begins, closing = ("[TOOL_CALLS]",), "]"

    def grammar(self, functions: Functions, required: bool, several: bool, special: Special) -> str:
        begin, more = spelled(self.begins[0], special), '(", " call)* ' if several else ""
        calls = f'{begin} / ?/ "[" call {more}"]"'
        if required:
            start = [f"start: {calls}"]
        elif self.begins[0] in special:
            start = [f"start: TEXT | TEXT {calls}", TEXT]
        else:
            start = [f"start: TEXT | head {calls.removeprefix(begin)}", TEXT, f"head[lazy]: TEXT {begin}"]
        return written(start, "call", (self.body(name, schema, special, "") for name, schema in functions.items()))

    def body(self, name: str, schema: dict[str, Any], special: Special, prefix: str) -> list[str]:
        begin = json.dumps(f'{{"name": "{name}", "arguments": ')
        return [f'{begin} {grammar.embedded(schema)} "}}"']

    def read(self, text: str, functions: Functions) -> Read | None:
        found = _json(text, _past(text, len("[TOOL_CALLS]")))
        return None if found is None else ([(call["name"], call["arguments"]) for call in found[0]], found[1])

    def call_id(self) -> str:
        return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))  # templates ask for it


class NamedMistral(Mistral):
    """Mistral since 2025: each call has a tag, its name and another tag."""

    known, closing = ("[TOOL_CALLS]", "[ARGS]"), "}"
    grammar = Format.grammar

    def body(self, name: str, schema: dict[str, Any], special: Special, prefix: str) -> list[str]:
        return [f"{spelled(f'{name}[ARGS]', special)} {grammar.embedded(schema)}"]

    def read(self, text: str, functions: Functions) -> Read | None:
        name, tag, _ = text.removeprefix("[TOOL_CALLS]").partition("[ARGS]")
        if not tag or (found := _json(text, text.index(tag) + len(tag))) is None:
            return None
        return [(name, found[0])], found[1]


FORMATS = (QwenCoder(), Hermes(), NamedMistral(), Mistral(), Llama())  # the first one that the template knows
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


def new_id() -> str:
    """The id of a call."""
    return f"call_{uuid.uuid4().hex}"


def format_of(template: str) -> Format:
    """Raises ValueError if the chat template knows none."""
    for form in FORMATS:
        if all(text in template for text in form.known):
            return form
    raise ValueError(
        'tools need a chat template with <tool_call>, [TOOL_CALLS] or {"name": .., "parameters": ..}, and the model\'s '
        "has none"
    )


def spelled(text: str, special: Special) -> str:
    """A text as a Lark grammar has it, with its special tokens by their ids."""
    parts = re.split("|".join(f"({re.escape(tag)})" for tag in special), text) if special else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def written(start: Iterable[str], name: str, bodies: Iterable[list[str]]) -> str:
    """A Lark grammar with a rule `name` that is one of the bodies. Raises ValueError if it is too long."""
    rules: list[str] = []
    more: list[str] = []
    size = 0
    for n, (body, *others) in enumerate(bodies):
        rules.append(f"{name}_{n}: {body}")
        more += others
        size = bounded(size + len(body) + sum(map(len, others)))
    either = f"{name}: " + " | ".join(f"{name}_{n}" for n in range(len(rules)))
    return "\n".join(("%llguidance {}", *start, either, *rules, *more, ""))


def bounded(size: int) -> int:
    """Return a number of characters. Raises ValueError if a grammar must not have so many."""
    if size > LONGEST:
        raise ValueError(f"the tools are too complex: their grammar has more than {LONGEST:,} characters")
    return size


class Definitions:
    """The definitions of a schema, of which each argument's own schema takes those that it needs. All of them for each
    argument would be the square of what was sent."""

    def __init__(self, schema: dict[str, Any]):
        self._all = {key: found for key in DEFINITIONS if isinstance(found := schema.get(key), dict)}
        self._needs = {(key, name): self._named(one) for key, found in self._all.items() for name, one in found.items()}

    def of(self, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Those to which a schema refers, also through others, as it has to hold them."""
        found: dict[str, dict[str, Any]] = {}
        left = self._named(schema)
        while left:
            key, name = left.pop()
            if name not in found.setdefault(key, {}):
                found[key][name] = self._all[key][name]
                left |= self._needs[key, name]
        return found

    def _named(self, schema: Any) -> set[tuple[str, str]]:
        """The definitions that a schema names; all if it refers to something else, such as the whole."""
        named: set[tuple[str, str]] = set()
        inside = [schema]
        while inside:
            one = inside.pop()
            if isinstance(one, dict | list):
                inside += one.values() if isinstance(one, dict) else one
            if isinstance(one, dict) and isinstance(ref := one.get("$ref"), str):
                _, key, name, *_ = [*unquote(ref).split("/"), "", ""]
                name = name.replace("~1", "/").replace("~0", "~")
                if not ref.startswith("#/") or key not in DEFINITIONS:
                    return {(key, name) for key, found in self._all.items() for name in found}
                if name in self._all.get(key, ()):
                    named.add((key, name))
        return named


def _arguments(name: str, schema: Any) -> tuple[dict[str, Any], list[Any]]:
    """The schemas of a function's arguments and the names of those that a call needs. A schema that refers to one of
    its own definitions, as those of recursive types do, is that one. Raises ValueError for a schema of another form."""
    whole = schema
    for _ in range(CHAIN):
        parts = str(schema.get("$ref")).split("/") if isinstance(schema, dict) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in DEFINITIONS:
            break
        found = whole.get(parts[1])
        schema = found.get(parts[2]) if isinstance(found, dict) else None
    about = f"the parameters of {name}"
    if not isinstance(schema, dict):
        raise ValueError(f"{about} are no JSON schema of an object")
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise ValueError(f"{about}: properties must be an object of schemas")
    if not isinstance(needed, list):
        raise ValueError(f"{about}: required must be a list")
    for key, one in properties.items():
        if isinstance(one, dict) and not isinstance(one.get("enum", []), list):
            raise ValueError(f"{about}: enum of {key!r} must be a list")
    return properties, needed


def _is_text(schema: Any) -> bool:
    """Whether a schema has strings only."""
    if not isinstance(schema, dict):
        return False
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return schema.get("type") == "string" or (bool(choices) and all(isinstance(choice, str) for choice in choices))


def _past(text: str, at: int) -> int:
    """The place of what follows white space."""
    return at + len(text[at:]) - len(text[at:].lstrip())


def _json(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON at a place, and where it ends; None if it is not whole."""
    try:
        return JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
