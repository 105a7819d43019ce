"""Prompts: a context to decide on, after the contexts and decisions of other records."""

from collections.abc import Sequence
from typing import Any

from examples.adr.records import Record

SYSTEM = (
    "You are a software architect. The user describes the context of an architecture decision. "
    "Answer with the decision and its reasons, as in the Decision section of an architecture decision record."
)


def messages(context: str, examples: Sequence[Record], title: str = "") -> list[dict[str, str]]:
    """A conversation: each example's context and, as the answer, its decision; then the context to decide on. The best
    example comes last, beside the question."""
    said = [{"role": "system", "content": SYSTEM}]
    for record in reversed(examples):
        said.append({"role": "user", "content": asked(record.title, record.context)})
        said.append({"role": "assistant", "content": record.decision})
    return [*said, {"role": "user", "content": asked(title, context)}]


def asked(title: str, context: str) -> str:
    return f"# {title}\n\n{context}" if title else context


def encode(tokenizer: Any, said: list[dict[str, str]]) -> list[int]:
    """Token ids up to the assistant's turn. Raises ValueError if the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model's tokenizer has no chat template: choose an instruction-tuned model")
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def fit(tokenizer: Any, context: str, examples: Sequence[Record], room: int, title: str = "") -> tuple[list[int], int]:
    """The prompt with as many of the examples, the best first, as `room` tokens hold, and their number. Raises
    ValueError if not even the context fits."""
    for count in range(len(examples), -1, -1):
        ids = encode(tokenizer, messages(context, examples[:count], title))
        if len(ids) <= room:
            return ids, count
    raise ValueError(f"the context takes {len(ids)} tokens with its instructions, but the model has room for {room}")
