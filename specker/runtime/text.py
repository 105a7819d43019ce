"""Prompts as token ids, and the results of decoding: tokens with their text."""

import inspect
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specker.answers import harmony
from specker.checkpoints.checkpoint import Checkpoint
from specker.checkpoints.tokenizer import Tokenizer
from specker.fields import option
from specker.runtime.control.stats import Stats
from specker.runtime.events import Logprob

Prompt = str | Sequence[int]
Counts = Sequence[int]  # of new tokens, for several prompts
Stop = str | Sequence[str]  # where a text ends
Prompts = Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt]

UNFIT = TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError
"""What a template raises for messages of another form than it expects."""


ROLES = "system", "developer", "user", "assistant", "tool"


class TooLong(ValueError):
    """A prompt that can never fit."""


def several(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts: texts or lists of ids."""
    return isinstance(prompts, list | tuple) and bool(prompts) and not hasattr(prompts[0], "__index__")


def token_ids(prompt: Any) -> list[int]:
    """A prompt's ids as Python's integers; arrays and tensors of one dimension are lists of ids. Raises ValueError."""
    try:
        if isinstance(prompt, bytes):  # a sequence of numbers
            raise TypeError
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError:
        raise ValueError(f"a prompt must be a string or a list of token ids, got {repr(prompt)[:60]}") from None


def encode(target: Checkpoint, prompt: str, special: bool = True) -> list[int]:
    """Token ids of a text. `special`: with the tokenizer's own special tokens. Raises ValueError."""
    if not isinstance(prompt, str):
        raise ValueError(f"a prompt must be a string to be encoded, got {prompt!r}")
    return list(target.tokenizer(prompt, add_special_tokens=special)["input_ids"])


def encode_chat(target: Checkpoint, name: str, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    """Token ids of a conversation; see `rendered`."""
    return encode(target, rendered(target, name, messages, **more), special=False)


def rendered(
    target: Checkpoint,
    name: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **more: Any,
) -> str:
    """The text of a conversation by the tokenizer's chat template. `name`: the model, for the message.
    `add_generation_prompt`: begin the assistant's turn. `continue_final_message`: instead end within the last message,
    after its text. `more`: further variables of the template, such as `tools`. Messages of a model that answers in
    Harmony may have `reasoning_content` and several calls. Raises ValueError if there is no chat template, if it
    refuses the messages or changes the one to continue, or for messages without a known role."""
    if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(f"messages must be a list of dicts, each with its role and content, got {messages!r}")
    if not getattr(target.tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {name} has no chat template, which {option('chat')} needs")
    messages = _with_known_roles(messages, str(target.tokenizer.chat_template))
    from jinja2 import TemplateError  # torch depends on it

    how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    try:
        messages = harmony.conversation(messages) if harmony.of(target.tokens.special) else messages
        return target.tokenizer.apply_chat_template(messages, tokenize=False, **how, **more)
    except (TemplateError, *UNFIT) as error:  # such as a template without a place for a system message
        if "continue_final_message" in str(error):  # a long text, with the whole conversation
            said = f"the chat template of {name} changes the last message, so it has no continuation"
            raise ValueError(said) from None
        raise ValueError(f"the chat template of {name} refuses the conversation: {error}") from None


def _with_known_roles(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages as a chat template reads them: `developer`, OpenAI's later name of `system`, is that unless the
    template names it. Raises ValueError for a role that is none of ROLES and that the template does not name either."""
    named, made = {*re.findall(r"""['"](\w+)['"]""", template)}, []
    for n, message in enumerate(messages):
        role = message["role"]
        if role not in (*ROLES, *named):
            known = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
            raise ValueError(f"messages[{n}].role must be {known}, got {repr(role)[:60]}")
        made.append(message if role != "developer" or role in named else {**message, "role": "system"})
    return made


def reserved(tokenizer: Any) -> frozenset[str]:
    """Names that no further variable of a chat template may have in `rendered`: the arguments of what renders the
    template, one of which is the template itself, and what the tokenizer sets."""
    from specker.checkpoints import template

    calls = [rendered, tokenizer.apply_chat_template, template.render]
    if not isinstance(tokenizer, Tokenizer):
        from transformers.utils.chat_template_utils import render_jinja_template

        calls.append(render_jinja_template)
    arguments = (p for call in calls for p in inspect.signature(call).parameters.values())
    named = {p.name for p in arguments if p.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset({"self", "messages", *named, *tokenizer.special_tokens_map})


def checked(ids: list[int], target: Checkpoint, name: str) -> list[int]:
    """Return `ids`. Raises ValueError if the prompt is empty or has ids that the target lacks, TooLong if it fills the
    context."""
    if not ids:
        raise ValueError("the prompt is empty: there is no token to continue from")
    context, vocab = target.config.max_context, target.config.vocab_size
    if len(ids) >= context:
        raise TooLong(
            f"the prompt has {len(ids)} tokens, but the context of {name} is {context} and decoding needs room for one "
            "more"
        )
    if min(ids) < 0 or max(ids) >= vocab:
        raise ValueError(f"token ids must be in 0..{vocab - 1}, got {min(ids)}..{max(ids)}")
    return ids


def each(prompts: Any, options: dict[str, Any]) -> list[tuple[Prompt, dict[str, Any]]]:
    """Pair each prompt with its options. A list in `options` holds one value per prompt; other values apply to all.
    Raises ValueError for a list of another length."""
    prompts = list(prompts) if several(prompts) else [prompts]
    for name, value in options.items():
        if isinstance(value, list | tuple) and len(value) != len(prompts):
            raise ValueError(f"{name} has {len(value)} values for {len(prompts)} prompts")
    columns = {n: v if isinstance(v, list | tuple) else [v] * len(prompts) for n, v in options.items()}
    return [(prompt, {name: values[i] for name, values in columns.items()}) for i, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Generation:
    """A whole decoded text.

    Attributes:
        tokens: ids, a stop id or the token that completes a stop string included.
        text: what follows the prompt's text, without special tokens, stop strings and an unfinished character at the
            end; of `Engine.chat` without the reasoning.
        stats: counters and times.
        finished: "stop" (a stop id or string), "length" (`max_new_tokens`), "context" (no room for more), "not finite"
            (the next token's logits), "grammar" (no token can follow in it) or "cancelled".
        logprobs: one for each token; empty unless they were asked for.
        reasoning: of `Engine.chat`, if the model writes any before its answer.
    """

    tokens: list[int]
    text: str
    stats: Stats
    finished: str
    logprobs: list[Logprob] = field(default_factory=list)
    reasoning: str = ""
