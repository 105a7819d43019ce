"""Grammars for requests (`Params.grammar`): JSON schemas, regular expressions, Lark, and tagged parts of a free text.

Each function returns what `engine.generate(prompt, grammar=...)` takes. The grammars are those of llguidance
(https://github.com/guidance-ai/llguidance), which says what its JSON schemas, regular expressions and Lark may hold. A
request checks its grammar before it is queued; see runtime/round/constrain.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specker.extras import install

Schema = Mapping[str, Any] | str
SPACE = r" |\r?\n[ \t]{0,64}"  # between JSON's tokens; without a limit, a model may write white space for ever


class Tag(NamedTuple):
    """A part of a text whose form is fixed, such as a tool call.

    Attributes:
        begin: the text that it begins with.
        schema: the JSON schema of what follows.
        end: the text that it ends with; may be empty.
    """

    begin: str
    schema: Schema
    end: str


def json_schema(schema: Schema, separators: tuple[str, str] | None = None) -> str:
    """JSON that is valid for a schema, as a dict or as JSON. `separators`: the texts between items and between key and
    value, as in `json.dumps`, with no other white space, which leaves fewer choices; None: wherever JSON allows white
    space, nothing, a space, or a line break and its indentation. Raises ValueError for what is no JSON object."""
    options: dict[str, Any] = {"defaults": {"whitespace_pattern": SPACE}}
    if separators is not None:
        item, key = separators
        options = {"overrides": {"whitespace_flexible": False, "item_separator": item, "key_separator": key}}
    return library().LLMatcher.grammar_from_json_schema(_checked(schema), **options)


def embedded(schema: Schema) -> str:
    """JSON that is valid for a schema, as a part of a Lark grammar. Raises ValueError for what is no JSON object."""
    return "%json " + _checked(schema, {"x-guidance": {"whitespace_pattern": SPACE}})


def after(lead: str, form: str) -> str:
    """A Lark grammar `lead` that refers to another grammar, `form`, as @form."""
    found = json.loads(form) if form.startswith("{") else {"grammars": [{"lark_grammar": form}]}
    first, *others = found["grammars"]
    return json.dumps(found | {"grammars": [{"lark_grammar": lead}, first | {"name": "form"}, *others]})


def json_object(separators: tuple[str, str] | None = None) -> str:
    """Any JSON object. `separators`: as in `json_schema`."""
    return json_schema({"type": "object"}, separators)


def regex(text: str) -> str:
    """Text that a regular expression matches as a whole."""
    return library().LLMatcher.grammar_from_regex(text)


def lark(text: str) -> str:
    """Text that a Lark grammar derives from its rule `start`."""
    return library().LLMatcher.grammar_from_lark(text)


def tagged(tags: Sequence[Tag], trigger: str | None = None, *, special: bool = False, required: bool = False) -> str:
    """Free text with parts in fixed form: where `trigger` occurs one of the tags must follow, which begins with it.

    `trigger`: the common beginning of all tags' `begin`, by default the longest. `special`: it is a special token of
    the tokenizer, such as <|python_tag|>, so that text can never spell it. `required`: the text is exactly one tag.
    Raises ValueError for tags that do not begin with the trigger, or without any."""
    trigger = _common([tag.begin for tag in tags]) if trigger is None else trigger
    if not tags or not trigger or not all(tag.begin.startswith(trigger) for tag in tags):
        raise ValueError(f"tags must begin with one trigger, got {trigger!r} and {[tag.begin for tag in tags]}")
    how = {"x-guidance": {"whitespace_pattern": SPACE}}
    parts = [(tag.begin, _checked(tag.schema, how), tag.end) for tag in tags]
    if not required:
        tag = library().StructTag
        made = [tag(trigger=trigger, begin=begin, grammar=schema, end=end) for begin, schema, end in parts]
        return tag.to_grammar(made, assume_special=special)
    first = trigger if special else json.dumps(trigger)
    rules = [
        f"tag_{i}: {first} {_quoted(begin.removeprefix(trigger))} %json {schema} {_quoted(end)}"
        for i, (begin, schema, end) in enumerate(parts)
    ]
    start = " | ".join(f"tag_{i}" for i in range(len(rules)))
    return "\n".join(("%llguidance {}", f"start: {start}", *rules, ""))


def library() -> Any:
    """llguidance. Raises ValueError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(f"a grammar needs llguidance: {install('serve')}") from None
    return llguidance


def _checked(schema: Schema, usual: Mapping[str, Any] | None = None) -> str:
    """The schema as JSON, with the keys of `usual` that it lacks."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if isinstance(found, dict):
            return json.dumps({**(usual or {}), **found})
        why = f"it is {type(found).__name__}"
    except RecursionError:
        why = "it is nested too deeply"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise ValueError(f"a JSON schema must be a JSON object: {why}")


def _common(texts: Sequence[str]) -> str:
    """The longest beginning of all texts."""
    first, last = min(texts, default=""), max(texts, default="")  # in the alphabet the others are between them
    return first[: next((n for n, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first))]


def _quoted(text: str) -> str:
    """A Lark literal; an empty one must be left out."""
    return json.dumps(text) if text else ""
