"""Read and check prompts, files of prompts and grammars."""

import json
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specker import grammar, zoo
from specker.fields import not_json
from specker.torchrun import world_size


@dataclass(frozen=True)
class Conversation:
    """One user's turns. Each turn is sent after the answer to the previous one."""

    turns: tuple[str, ...]
    where: str  # the file and line, or the flag, for error messages
    before: tuple[dict[str, str], ...] = ()  # chat messages before the first turn
    part: int = 0  # number of this prompt among its line's `turns`, from 1; 0 unless each turn is a prompt
    ids: tuple[int, ...] = ()  # the prompt of its first turn, once it is encoded


def piped() -> bool:
    """Whether stdin is a pipe or a file, which may be empty."""
    if world_size() > 1:  # several processes cannot share it
        return False
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(kind) or stat.S_ISREG(kind)
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a file
        return False


def read_conversations(prompt: str | None = None, prompts: str | None = None, chat: bool = False) -> list[Conversation]:
    """Read and check what the flags --prompt, --prompts and --chat name; without a prompt, the built-in ones. Raises
    ValueError with the file and the line."""
    if prompts is not None:
        name = "stdin" if prompts == "-" else prompts
        lines = enumerate(_read(prompts).split("\n"), 1)  # not splitlines(): JSON strings may hold U+2028
        found = [each for n, line in lines if line.strip() for each in _parse(line, f"{name} line {n}", chat)]
        if not found:
            raise ValueError(f"{name} contains no prompts")
        return found
    if prompt == "-":
        text = _read("-").removesuffix("\n")
        if not text:
            raise ValueError("stdin: the prompt is empty (without a prompt, </dev/null decodes the built-in ones)")
        return [Conversation((_checked(text, "stdin"),), "stdin")]
    if prompt is not None:
        return [Conversation((_checked(prompt, "--prompt"),), "--prompt")]
    return [Conversation((text,), f"built-in prompt {i}") for i, text in enumerate(zoo.PROMPTS, 1)]


def read_prediction(path: str | None) -> str | None:
    """The text in the file that --prediction names, if any. Raises ValueError for a file that holds none."""
    text = None if path is None else _read(path)
    if text == "":
        raise ValueError(f"{path}: the prediction is empty")
    return text


def read_grammar(json_schema: str | None, lark: str | None) -> str | None:
    """The grammar in the file that --json-schema or --grammar names, if any. Raises ValueError for a file that holds
    none, or without llguidance."""
    path = json_schema or lark
    if path is None:
        return None
    try:
        return grammar.json_schema(_read(path)) if json_schema else grammar.lark(_read(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def encode(engine: Any, messages: list[dict[str, str]], where: str, chat: bool, max_new_tokens: int = 1) -> list[int]:
    """The token ids of a prompt: of the last message or, with `chat`, of all messages in the target's chat template.
    Raises ValueError, which begins with `where`, for a prompt that leaves no room for `max_new_tokens`."""
    try:
        ids = engine.encode_chat(messages) if chat else engine.encode(messages[-1]["content"])
        return engine.validate(ids, max_new_tokens)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read(path: str) -> str:
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{'stdin' if path == '-' else path}: not UTF-8 at byte {error.start}") from None


def _parse(line: str, where: str, chat: bool) -> list[Conversation]:
    """The conversations of one line of a file of prompts."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise not_json(where, error) from None
    if not isinstance(row, dict) or sum(name in row for name in ("prompt", "turns", "messages")) != 1:
        raise ValueError(f"{where}: expected an object with one of `prompt`, `turns` and `messages`")
    if "messages" in row:
        if not chat:
            raise ValueError(f"{where}: `messages` need --chat")
        return [_from_messages(row["messages"], where)]
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{where}: `prompt` must be a string, `turns` a list of at least one")
    checked = tuple(_checked(turn, where) for turn in turns)
    if chat or len(checked) == 1:
        return [Conversation(checked, where)]
    return [Conversation((turn,), where, part=n) for n, turn in enumerate(checked, 1)]


def _from_messages(messages: Any, where: str) -> Conversation:
    """A conversation whose last message is to be answered."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: `messages` must be a list of at least one")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise ValueError(f"{where}: each of `messages` must have a `role` and a `content`, both strings")
        _checked(message["content"], where)
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: the last of `messages` must be the user's")
    before = tuple({name: message[name] for name in ("role", "content")} for message in messages[:-1])
    return Conversation((messages[-1]["content"],), where, before)


def _checked(text: str, where: str) -> str:
    """`text`. Raises ValueError if it is empty or no valid Unicode."""
    if not text:
        raise ValueError(f"{where}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the prompt is not valid Unicode (a lone surrogate)") from None
    return text
