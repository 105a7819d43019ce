"""A conversation in the terminal: `specker.run --chat` without a prompt. `run` imports this file only when one begins,
because prompt_toolkit takes long to import."""

import difflib
import json
import os
import re
from dataclasses import asdict, fields, replace
from typing import Any

from specker.cli.decode import Decoding, Sample
from specker.cli.report import Result
from specker.cli.terminal import KEYS, ask, keys_wait, reader, unquoted
from specker.options import Sampling, whole
from specker.paths import write_file

COMMANDS = {
    "/help": ("", "show this"),
    "/clear": ("", "begin anew; the system message stays"),
    "/system": ("TEXT", "set the system message (begins anew), or show it"),
    "/set": ("NAME VALUE", "change a setting, such as /set temperature 0.8, or show all"),
    "/seed": ("N", "the same as /set seed N"),
    "/retry": ("", "answer the last turn again, with the next seed"),
    "/save": ("FILE", "write the conversation, for --prompts FILE --chat"),
    "/exit": ("", "end the conversation, as /quit, exit, quit and Ctrl-D do"),
    "/quit": ("", "the same as /exit"),
}
WHOLE = "top_k", "seed", "max_new_tokens"
NAMES = "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
SETTINGS: dict[str, type[float]] = {n: int if n in WHOLE else float for n in (*NAMES, "seed", "max_new_tokens")}
ENDS = {
    "length": "the answer ends at max_new_tokens",
    "grammar": "no token can follow in this grammar",
    "context": "the context is full; /clear forgets the conversation",
}


def converse(decoding: Decoding) -> None:
    """Answer until the user ends the input. Each turn is decoded after the whole conversation so far, with the K/V that
    the previous turn kept. `decoding.samples` holds the first conversation, and gets each new one."""
    screen = decoding.screen
    session = reader(COMMANDS, SETTINGS, screen.notes_to)
    chat = Chat(decoding)
    screen.note(f"{chat.settings()}; /set changes them")
    screen.note("/help lists commands and keys; Ctrl-C ends an answer, Ctrl-D the conversation.")
    with keys_wait(session):
        while True:
            try:
                chat.take(ask(session))
            except KeyboardInterrupt:  # discards what was typed
                if not session.default_buffer.text:
                    screen.note("Ctrl-D ends the conversation.")
            except ValueError as error:
                screen.note(f"{error}", "yellow")
            except EOFError:
                return


class Chat:
    """Answers what the user types, and carries out commands."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding, self.screen = decoding, decoding.screen

    @property
    def sample(self) -> Sample:
        """The conversation since the last /clear, /system TEXT or /retry."""
        return self.decoding.samples[-1]

    @property
    def first(self) -> tuple[dict[str, str], ...]:
        """The system message, if there is one."""
        return tuple(m for m in self.sample.conversation.before[:1] if m["role"] == "system")

    def settings(self) -> str:
        """What /set changes, with its values; penalties and min_p only where there are any."""
        values = asdict(self.sample.sampling) | {"max_new_tokens": self.decoding.job.max_new_tokens}
        rare = {f.name: f.default for f in fields(Sampling) if f.name == "min_p" or f.name.endswith("_penalty")}
        return ", ".join(
            f"{name} {values[name]}" for name in SETTINGS if name not in rare or values[name] != rare[name]
        )

    def take(self, text: str) -> None:
        """Carry out a command, or answer. Raises EOFError at the end of the conversation, and ValueError with a
        sentence for the user."""
        if re.search("[\ud800-\udfff]", text):  # a lone surrogate stands for a byte that is not valid text
            raise ValueError("what you typed is not valid text in the terminal's encoding")
        if text.strip() in ("exit", "quit"):
            raise EOFError
        command, *rest = text.split(maxsplit=1) or [""]
        if not re.fullmatch(r"/[^\s/*]*", command):  # a path, or a comment of pasted code, is no command
            self.answer(unquoted(text[1:] if re.match(r"//\S", text) else text).strip("\n"))
            return
        argument = unquoted(rest[0].strip()) if rest else ""
        match command:
            case "/help":
                rows = {f"{name} {what}": about for name, (what, about) in COMMANDS.items()}
                rows |= {"//TEXT": "send a text that starts with a slash", **KEYS}
                self.screen.note("\n".join(f"  {name:<22}{about}" for name, about in rows.items()))
            case "/clear":
                self.begin(self.first)
                self.screen.note("the conversation is forgotten")
            case "/system":
                self.system(argument)
            case "/set":
                self.set(*argument.split())
            case "/seed":
                self.set("seed", *argument.split())
            case "/retry":
                self.retry()
            case "/save":
                self.save(os.path.expanduser(argument))
            case "/exit" | "/quit":
                raise EOFError
            case _:
                near = difflib.get_close_matches(command, COMMANDS, 1)
                hint = f"did you mean {near[0]}?" if near else "see /help"
                raise ValueError(f"there is no {command}; {hint} (/{command} sends it to the model)")

    def answer(self, text: str) -> None:
        """Decode a turn. Ctrl-C ends it: the answer so far stays in the conversation, but a turn without any answer is
        dropped."""
        if not text.strip():
            return
        sample, earlier = self.sample, len(self.sample.results)
        sample.conversation = replace(sample.conversation, turns=(*sample.conversation.turns, text))
        try:
            self.decoding.turn([sample])
        except ValueError:  # the turn does not fit
            self.keep(earlier)
            raise
        except KeyboardInterrupt:
            result = sample.results[earlier] if len(sample.results) > earlier else None
            if result is None or not result.stats.rounds:  # with --check, plain decoding may go first
                self.keep(earlier)
            elif result.finished is None:
                result.finished = "interrupted"
                sample.messages.append({"role": "assistant", "content": result.text})
        finally:
            if self.screen.answer is not None:
                self.screen.answer.end()  # after an error, too: the cursor is hidden
        if len(sample.results) > earlier:
            self.about(sample.results[earlier])

    def about(self, result: Result) -> None:
        """Print how fast an answer came, and why it ended if it did not end by itself."""
        stats = result.stats
        speed = f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tokens/s"
        drafts = f", acceptance length {stats.acceptance_length:.2f}" if self.decoding.engine.speculates else ""
        why = f"; {ENDS[result.finished]}" if result.finished in ENDS else ""
        self.screen.note(f"{speed}{drafts}{why}")

    def retry(self) -> None:
        """Answer the last turn again, in a conversation that has the same messages before it. The results keep both
        answers."""
        sample = self.sample
        if not sample.results:
            raise ValueError("there is no answer to replace yet")
        if not sample.sampling.temperature:
            raise ValueError("at temperature 0 the answer would be the same: /set temperature 0.7 before /retry")
        *before, turn, _ = sample.messages
        self.begin(tuple(before))
        self.set("seed", str((sample.sampling.seed + 1) % 2**64))
        self.answer(turn["content"])

    def set(self, name: str = "", *value: str) -> None:
        """Change a setting for the answers to come; without a name, show all."""
        name = name.lower().replace("-", "_")
        if name and name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SETTINGS)}"
            raise ValueError(f"there is no setting {name}; {hint}")
        if name:
            try:
                (number,) = map(SETTINGS[name], value)
            except ValueError:
                kind = "a number" if SETTINGS[name] is float else "a whole number"
                raise ValueError(f"{name} must be {kind}, got {' '.join(value) or 'nothing'}") from None
            if name == "max_new_tokens":
                self.decoding.job = replace(self.decoding.job, max_new_tokens=whole(number, name, 1))
            else:
                try:
                    changed: Any = {name: number}
                    self.sample.sampling = replace(self.sample.sampling, **changed)
                except ValueError as error:  # it names the flag
                    raise ValueError(re.sub(r"^--[\w-]+", name, f"{error}")) from None
        self.screen.note(self.settings())

    def keep(self, turns: int) -> None:
        """Forget the turns after the first `turns`."""
        sample = self.sample
        sample.conversation = replace(sample.conversation, turns=sample.conversation.turns[:turns])
        del sample.results[turns:], sample.messages[len(sample.conversation.before) + 2 * turns :]

    def begin(self, before: tuple[dict[str, str], ...]) -> None:
        """Begin a new conversation with the messages `before`."""
        samples, last = self.decoding.samples, self.sample
        if not last.results:
            samples.pop()
        conversation = replace(last.conversation, turns=(), before=before)
        samples.append(Sample(conversation, last.sampling, last.first + len(last.results)))

    def system(self, text: str) -> None:
        """Begin a new conversation with this system message; without `text`, show the present one."""
        if not text:
            self.screen.note(
                self.first[0]["content"] if self.first else "none is set; the chat template may have its own"
            )
            return
        message, engine = {"role": "system", "content": text}, self.decoding.engine
        ids = engine.encode_chat([message, {"role": "user", "content": "Hi"}])  # templates may refuse the role
        engine.validate(ids, self.decoding.job.max_new_tokens)
        begins = "; the conversation begins anew" if self.sample.results else ""
        self.screen.note(f"the system message is set{begins}")
        self.begin((message,))

    def save(self, path: str) -> None:
        """Write the messages up to the last turn, and that turn's answer in a field of its own, so that --prompts can
        answer the turn again."""
        if not path or not self.sample.results:
            raise ValueError("there is no answer to save yet" if path else "/save needs the name of a file")
        *messages, answer = self.sample.messages
        row = {"messages": messages, "answer": answer["content"]}
        try:
            write_file(path, json.dumps(row, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"/save {path}: cannot be written: {why}") from None
        self.screen.note(f"saved: {path}")
