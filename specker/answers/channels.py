"""Grammars for answers in Harmony (answers/harmony.py): a form or calls hold for the last message, which any number of
thoughts may precede."""

from specker import grammar
from specker.answers.harmony import CONSTRAIN, FUNCTION, ROLE, Harmony, Messages
from specker.answers.tool_formats import TEXT, Functions, spelled

NEXT = f"<|end|><|start|>{ROLE}"  # between two messages


def schema_of(known: Harmony, begun: str, form: str) -> str:
    """The last message is final and matches the grammar `form`. `begun`: `harmony.last_message` of the prompt."""
    here = Messages(known, begun)
    if here.place == "body" and here.kind == "text":  # the prompt has begun the final message
        return form
    final = f"{spelled('<|channel|>final', known.ids)} {_type(known)} {spelled('<|message|>', known.ids)} @form"
    return grammar.after(_written(known, here, ["analysis"], [final], True), form)


def calls_of(known: Harmony, begun: str, functions: Functions, required: bool) -> str:
    """The last message is a call or, unless one is `required`, final. Texts may precede it, like thoughts."""
    rules, lasts = [], []
    for n, (name, schema) in enumerate(functions.items()):
        to = f"to={FUNCTION}{name}"
        behind = [spelled(f"<|channel|>{channel} {to}", known.ids) for channel in ("commentary", "analysis")]
        before = [spelled(f" {to}<|channel|>{channel}", known.ids) for channel in ("commentary", "analysis")]
        rules.append(f"header_{n}: {' | '.join((*behind, *before))}")
        lasts.append(f"header_{n} {_type(known)} {spelled('<|message|>', known.ids)} {grammar.embedded(schema)}")
    if not required:
        lasts.append(f"{spelled('<|channel|>final<|message|>', known.ids)} TEXT")
    lead = _written(known, Messages(known, begun), ["analysis", "commentary"], lasts, required)
    return "\n".join((lead, *rules, ""))


def _written(known: Harmony, here: Messages, channels: list[str], lasts: list[str], required: bool) -> str:
    """A Lark grammar for the rest of an answer from the end of its prompt on: messages of `channels`, then one of
    `lasts`. Unless that is `required`, a message that the prompt has begun may be the last one."""
    more, onward = "thought* last", spelled(NEXT, known.ids)
    start = {
        "header": more,
        "between": f"{spelled(f'<|start|>{ROLE}', known.ids)} {more}",
        "body": f"TEXT {onward} {more}" + ("" if required else " | TEXT"),
    }[here.place]
    thoughts = [spelled(f"<|channel|>{channel}<|message|>", known.ids) for channel in channels]
    return "\n".join(
        (
            "%llguidance {}",
            f"start: {start}",
            f"thought: ({' | '.join(thoughts)}) TEXT {onward}",
            "last: " + " | ".join(lasts),
            TEXT,
        )
    )


def _type(known: Harmony) -> str:
    """The type of a body, which its header may name, as a Lark grammar has it."""
    marked = f'| " "? {spelled(f"{CONSTRAIN}json", known.ids)}' if CONSTRAIN in known.ids else ""
    return f'(" json" {marked})?'
