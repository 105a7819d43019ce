"""Log-probabilities in the forms of the two endpoints. `most`: how many of the best tokens to name."""

from itertools import accumulate
from typing import Any

from specker.runtime.events import Logprob

LEAST = -9999.0  # JSON has no infinity; OpenAI writes this number


def of_chat(tokenizer: Any, each: list[Logprob], most: int) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": [*text.encode("utf-8", "replace")]}

    return {"content": [one(p.token, p.logprob) | {"top_logprobs": [one(*b) for b in p.best[:most]]} for p in each]}


def of_text(tokenizer: Any, each: list[Logprob], most: int, start: int) -> dict[str, Any]:
    """`start`: characters of the text before the first token."""
    texts = [tokenizer.decode([p.token]) for p in each]
    return {
        "tokens": texts,
        "token_logprobs": [max(p.logprob, LEAST) for p in each],
        "top_logprobs": [{tokenizer.decode([token]): max(x, LEAST) for token, x in p.best[:most]} for p in each],
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=start)] if texts else [],
    }
