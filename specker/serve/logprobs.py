"""Log-probabilities in the forms of the two endpoints. `most`: how many of the best tokens to name."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from specker.checkpoints.tokenizer import Tokens
from specker.runtime.events import Logprob

LEAST = -9999.0  # JSON has no infinity; OpenAI writes this number


def of_chat(tokens: Tokens, each: list[Logprob], most: int, begun: bool) -> dict[str, Any]:
    """The bytes of the tokens joined are those of the text. `begun`: whether it has any before these."""
    content = []
    for p in each:
        named = [_named(tokens, token, logprob, begun) for token, logprob in [(p.token, p.logprob), *p.best[:most]]]
        begun = begun or bool(named[0]["bytes"])
        content.append(named[0] | {"top_logprobs": named[1:]})
    return {"content": content}


def _named(tokens: Tokens, token: int, logprob: float, begun: bool) -> dict[str, Any]:
    text, spelled = tokens.tokenizer.decode([token]), tokens.bytes_of(token)
    if not begun and not text.startswith(" "):
        spelled = spelled.removeprefix(b" ")  # which sentencepiece leaves out at the beginning of a text
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": [*spelled]}


def of_text(tokenizer: Any, each: list[Logprob], texts: Sequence[str], most: int, start: int) -> dict[str, Any]:
    """`texts`: what each token completes. `start`: characters of the text before the first token."""
    return {
        "tokens": [tokenizer.decode([p.token]) for p in each],
        "token_logprobs": [max(p.logprob, LEAST) for p in each],
        "top_logprobs": [{tokenizer.decode([token]): max(x, LEAST) for token, x in p.best[:most]} for p in each],
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=start)] if each else [],
    }
