"""Tools: the functions that a request's texts may call, and the grammar that makes calls valid."""

from specker.answers.tool_formats import Functions, Special, format_of
from specker.serve.api import Chat, Choice

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
