"""Chat templates: Jinja programs of a checkpoint that write a conversation as the model's text.

The variables, filters and limits are those of transformers' `apply_chat_template`, for which these templates are
written.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks in the rendered text where the message to continue ends
REASONING = "reasoning_content", "thinking", "reasoning"  # names of a message's reasoning, which templates expect


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    tools: list[Any] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation.

    Args:
        template: the Jinja program.
        messages: dicts with `role`, `content` and whatever else the template reads; fields that are None are left out.
        tools: JSON schemas, or functions whose type hints and docstrings describe them.
        documents: for templates that read some.
        add_generation_prompt: begin the assistant's turn.
        continue_final_message: end the text within the last message instead, after its content.
        variables: the template's further variables.

    Raises:
        jinja2.TemplateError: the template is invalid, or refuses the conversation.
        TypeError, ValueError: the arguments do not fit each other or the template.
    """
    if not messages:
        raise ValueError("the conversation is empty")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message excludes add_generation_prompt")
    program = _compiled(template)
    chat = [_with_reasoning({k: plain(v) for k, v in message.items() if v is not None}) for message in messages]
    last = _tag(chat[-1], template) if continue_final_message else ""
    text = program.render(
        messages=chat,
        tools=None if tools is None else [plain(_schema(tool)) for tool in tools],
        documents=plain(documents),
        add_generation_prompt=add_generation_prompt,
        **plain(variables),
    )
    return _continued(text, last) if continue_final_message else text


def plain(value: Any) -> Any:
    """The value as JSON has it. A template is a stranger's program, and other objects may have methods that do harm, so
    it sees only their type's name."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (str, int, float):  # a subclass, such as an enum, may have further methods
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else [*map(plain, value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic's
        return plain(dump())
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return plain(value.item())
    return f"<{type(value).__name__}>"


def _schema(tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict):
        return tool
    if not callable(tool):
        raise ValueError(f"a tool must be a JSON schema or a function, got {tool!r}")
    from transformers.utils import get_json_schema

    found: dict[str, Any] = get_json_schema(tool)
    return found


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read; gpt-oss's reads `thinking`."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _tag(message: dict[str, Any], template: str) -> str:
    """Mark the end of the message's content in place, and return the content."""
    content = message.get("content")
    if content is None or "content" not in template:
        raise ValueError("continue_final_message needs a last message with content, and a template that reads it")
    if isinstance(content, str):
        message["content"] = content + TAG
        return content
    for part in reversed(content):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + TAG
            return text
    raise ValueError("continue_final_message needs a last message with text")


def _continued(text: str, last: str) -> str:
    """The text up to the mark after the last message."""
    if last.strip() not in text or (end := text.rfind(TAG.strip())) < 0:
        raise ValueError("continue_final_message needs a template that keeps the last message as it is")
    kept = text[:end]
    return kept if text.startswith(TAG, end) else kept.rstrip()  # the template trimmed the message


class _Generation(Extension):
    """The tags `generation` and `endgeneration`, which mark the assistant's words for training, change no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """Stands for `dict` in templates: without the class's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, which a template may not use to reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have a variable `self`
        self, *given = args
        for name in (values := dict(*given, **kwargs)):
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models learnt it; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    """Raises jinja2.TemplateError."""
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    world.filters["tojson"] = _tojson
    world.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return world.from_string(template)
