"""Log-probabilities in the forms of the two endpoints. `reader`: reads the text, whose next tokens these are. `most`:
how many of the best tokens to name."""

from typing import Any

from specker.checkpoints.tokenizer import Tokens
from specker.runtime.detokenize import Detokenizer
from specker.runtime.events import Logprob

LEAST = -9999.0  # JSON has no infinity; OpenAI writes this number


def of_chat(tokens: Tokens, reader: Detokenizer, each: list[Logprob], most: int) -> dict[str, Any]:
    """The bytes of the tokens joined are those of the text."""
    content = []
    for p in each:
        named = [_named(tokens, reader, token, x) for token, x in [(p.token, p.logprob), *p.best[:most]]]
        content.append(named[0] | {"top_logprobs": named[1:]})
        reader.add(p.token)
    return {"content": content}


def _named(tokens: Tokens, reader: Detokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokens.bytes_of(token, reader.before)
    text = tokens.tokenizer.decode([token]) if spelled is None else spelled.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": [*(spelled or b"")]}


def of_text(tokens: Tokens, reader: Detokenizer, each: list[Logprob], most: int) -> dict[str, Any]:
    """A token's offset is the number of characters that were whole before it. As with OpenAI, the best tokens are keys
    of an object, to which the token itself always belongs."""
    names, offsets, tops = [], [], []
    for p in each:
        names.append(_key(tokens, reader, p.token))
        top = {names[-1]: p.logprob}
        for token, logprob in p.best[:most]:
            key = _key(tokens, reader, token)
            if token != p.token:
                top[f"token_id:{token}" if key in top else key] = logprob
        tops.append({key: max(x, LEAST) for key, x in sorted(top.items(), key=lambda item: -item[1])})
        offsets.append(reader.written)
        reader.add(p.token)
    values = [max(p.logprob, LEAST) for p in each]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _key(tokens: Tokens, reader: Detokenizer, token: int) -> str:
    """A token's text, or its bytes as OpenAI writes them if they are no text alone."""
    spelled = tokens.bytes_of(token, reader.before)
    if spelled is None:
        return str(tokens.tokenizer.decode([token]))
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
