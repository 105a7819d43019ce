"""Decode prompts from the command line: `python -m specker.run --help`.

The text streams to stdout as it is accepted; on a terminal the accepted draft tokens are coloured, elsewhere a title
precedes each of several texts. The closing table follows, or goes to stderr when stdout is a pipe or a file. Exit
codes: 0 for success; 1 if `--check` or specker itself failed; 2 for an error that the user can correct; 130 after
Ctrl-C, with partial results in table and `--json`.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import specker
from specker import grammar, zoo
from specker.cli.exits import run_cli, silence
from specker.cli.parser import SHELLS, Parser, completion
from specker.cli.report import Result, report
from specker.cli.screen import Screen
from specker.fields import check_fields, make, not_json, opt
from specker.options import DTYPES, Common, Options, Params, Sampling, stop_strings
from specker.paths import probe, write_file
from specker.runtime import strategies
from specker.runtime.control.stats import Stats
from specker.view.trace import Trace


@dataclass(frozen=True)
class Job:
    """What to decode, on which device, and where to write the results."""

    target: str | None = opt(None, "the model to decode (default: the bundled code-target)", "DIR|HUB_ID")
    draft: str | None = opt(
        None,
        "the model or head that drafts; auto chooses a known one for the target (default without --target: the bundled "
        "one); see specker drafts",
        "DIR|HUB_ID|auto",
    )
    prompt: str | None = opt(None, "one prompt; - reads it from stdin, without its last newline", "TEXT|-")
    prompts: str | None = opt(
        None,
        "JSON lines with `prompt`, with Spec-Bench's `turns` (one conversation with --chat, else separate prompts) or, "
        "with --chat, `messages`",
        "FILE|-",
    )
    chat: bool = opt(
        False, "wrap prompts in the target's chat template; in a terminal, without a prompt: a conversation"
    )
    max_new_tokens: int | None = opt(
        None,
        "tokens to decode for each prompt (default: 128; 1024 in a conversation)",
        least=1,
    )
    stop: tuple[str, ...] = opt((), "end each text before the first of these strings", "STRING")
    json_schema: str | None = opt(None, "each text is JSON that is valid for this JSON schema", "FILE")
    grammar: str | None = opt(None, "each text matches this Lark grammar, or another one of llguidance", "FILE")
    samples: int = opt(1, "independent draws of each prompt, with seeds --seed, --seed + 1, ...", least=1)
    dtype: str | None = opt(
        None, "of weights and K/V (default: bfloat16; on a CPU without kernels for it float32)", choices=DTYPES
    )
    device: str | None = opt(None, "where to run (default: cuda if available)", offers=("cpu", "cuda"))
    check: bool = opt(False, "also decode with ar, compare the tokens and print both speeds")
    trace: str | None = opt(
        None, "write JSON lines: each round's draft and the target's tokens, for specker view", "FILE"
    )
    view: str | None = opt(
        None,
        "write the trace as an HTML page and open it (default: a new file beside --trace, else trace.html)",
        "FILE",
        bare="",
    )
    json: str | None = opt(None, "write the results as one JSON object; with -, stdout holds nothing else", "FILE|-")

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("--prompt and --prompts exclude each other")
        if self.json_schema is not None and self.grammar is not None:
            raise ValueError("--json-schema and --grammar exclude each other")
        check_fields(self)
        stop_strings(self.stop)

    @property
    def built_in(self) -> bool:
        """Whether the toy model continues its own prompts."""
        return self.target is None and self.prompt is None and self.prompts is None and not self.chat


COMMON = {
    "common flags": (
        *("target", "draft", "strategy", "prompt", "prompts", "chat", "max_new_tokens", "temperature", "seed", "check"),
    )
}
MORE = {
    "sampling": ("top_p", "top_k", "samples", "stop", "json_schema", "grammar"),
    "drafts": ("draft_tokens", "tree", "policy"),
    "output": ("json", "trace"),
    "batches and memory": ("batch_size", "kv_tokens", "max_context", "page_size", "prefix_cache"),
    "device and precision": ("device", "dtype", "quantize", "draft_quantize", "activations", "linear", "graphs"),
    "several GPUs, in a torchrun job": ("tp", "dp", "draft_ranks", "reduce"),
    "sizing without trained weights": ("load", "acceptance"),
}
EPILOG = """\
examples:
  specker --check                                            # built-in prompts
  specker --target Qwen/Qwen3-1.7B --chat --temperature 0.7  # a conversation
  specker --target Qwen/Qwen3-1.7B --draft Qwen/Qwen3-0.6B --prompt "Hello" --chat
  specker --prompts questions.jsonl --batch-size 8 --json out.json
  specker --strategy easyspec+vocabtrim --temperature 0.8 --seed 7
  source <(specker --print-completion bash)                  # completion in this shell

in a pipe: a line such as ==> questions.jsonl line 2 <== before each of several
texts, none before a single one; --json - for programs

exit codes: 0 success; 1 --check, specker or the job failed; 2 a mistake in the
command or its files; 130 after Ctrl-C; 141 if the reader of stdout closed it
"""


def parser(full: bool = True) -> Parser:
    """The parser of the command line. `full` False: with the flags that --help shows."""
    usage = "specker [flags] [-]"
    top = Parser("specker", usage, "Speculative decoding that never changes the output.", EPILOG)
    words, offers = strategies.words(), strategies.offers()
    top.arrange(COMMON, Job, Common, Sampling, offers=offers, **words)
    (common,) = COMMON
    top.group(common).add_argument("stdin", nargs="?", metavar="-", help="read one prompt from stdin, as --prompt -")
    more = "more help"
    top.prints(more, "-h", "--help", help="show the common flags", text=lambda _: parser(full=False).format_help())
    top.prints(more, "--help-all", help="show every flag", text=lambda _: parser().format_help())
    # A folder `specker` in the working directory may hide the package itself, but not its modules.
    version = f"specker {getattr(specker, '__version__', '(hidden by a folder of this name)')}\n"
    top.prints(more, "--version", help="show the version", text=lambda _: version)
    about = "show what each strategy needs, its paper and its own flags"
    top.prints(more, "--list-strategies", help=about, text=lambda _: strategies.table())
    about = "print a script that completes this command in a shell"
    top.prints(more, "--print-completion", help=about, text=lambda shell: completion(parser(), shell), choices=SHELLS)
    if not full:
        top.group("strategies", strategies.summaries())
        return top
    top.arrange(MORE, Job, Common, Sampling, offers=offers, **words)
    named = [name for names in (*COMMON.values(), *MORE.values()) for name in names]
    top.add(Job, "output", only=[f.name for f in fields(Job) if f.name not in named])
    for cls, title, about, names in strategies.flag_groups():
        top.add(cls, title, about, only=names)
    return top


def parse(argv: Sequence[str] | None = None) -> tuple[Job, Options, Sampling]:
    """Parse a command line into the three dataclasses. Raises ValueError with a sentence for the user."""
    values = vars(parser().parse_args(argv))
    stdin = values.pop("stdin", None)
    if stdin is not None:
        if stdin != "-":
            raise ValueError(f"unexpected argument {stdin!r}; use --prompt to pass a prompt")
        if "prompt" in values or "prompts" in values:
            raise ValueError("- reads the prompt from stdin and excludes --prompt and --prompts")
        values["prompt"] = "-"

    job = make(Job, values)
    if job.built_in and not any(f.name in values for f in fields(Sampling)):
        values |= zoo.SAMPLING
    sampling = make(Sampling, values)
    values.setdefault("strategy", strategies.usual(job.target, job.draft, values))
    others = {f.name for cls in (Job, Sampling) for f in fields(cls)}
    return job, strategies.options(**{n: v for n, v in values.items() if n not in others}), sampling


# --- the prompts


@dataclass(frozen=True)
class Talk:
    """One user's turns. Each turn is sent after the answer to the previous one."""

    turns: tuple[str, ...]
    where: str  # the file and line, or the flag, for error messages
    before: tuple[dict[str, str], ...] = ()  # chat messages before the first turn
    part: int = 0  # number of this prompt among its line's `turns`, from 1; 0 unless each turn is a prompt


def read_talks(job: Job) -> list[Talk]:
    """Read and check every prompt of the job. Raises ValueError with the file and the line."""
    if job.prompts is not None:
        name = "stdin" if job.prompts == "-" else job.prompts
        found = [talk for where, line in _lines(name, _read(job.prompts)) for talk in _record(line, where, job.chat)]
        if not found:
            raise ValueError(f"{name} contains no prompts")
        return found
    if job.prompt == "-":
        return [Talk((_text(_read("-").removesuffix("\n"), "stdin"),), "stdin")]
    if job.prompt is not None:
        return [Talk((_text(job.prompt, "--prompt"),), "--prompt")]
    return [Talk((text,), f"built-in prompt {i}") for i, text in enumerate(zoo.PROMPTS, 1)]


def read_grammar(job: Job) -> str | None:
    """The grammar of the job's texts. Raises ValueError for a file that holds none, or without llguidance."""
    path = job.json_schema or job.grammar
    if path is None:
        return None
    try:
        return grammar.json_schema(_read(path)) if job.json_schema else grammar.lark(_read(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path: str) -> str:
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{'stdin' if path == '-' else path}: not UTF-8 at byte {error.start}") from None


def _lines(name: str, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): JSON strings may hold U+2028
        if line.strip():
            yield f"{name} line {number}", line


def _record(line: str, where: str, chat: bool) -> list[Talk]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise not_json(where, error) from None
    if not isinstance(row, dict) or sum(name in row for name in ("prompt", "turns", "messages")) != 1:
        raise ValueError(f"{where}: expected an object with one of `prompt`, `turns` and `messages`")
    if "messages" in row:
        return [_conversation(row["messages"], where, chat)]
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{where}: `prompt` must be a string, `turns` a list of at least one")
    checked = tuple(_text(turn, where) for turn in turns)
    if chat or len(checked) == 1:
        return [Talk(checked, where)]
    return [Talk((turn,), where, part=n) for n, turn in enumerate(checked, 1)]


def _conversation(messages: Any, where: str, chat: bool) -> Talk:
    """A conversation whose last message is to be answered."""
    if not chat:
        raise ValueError(f"{where}: `messages` need --chat")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: `messages` must be a list of at least one")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise ValueError(f"{where}: each of `messages` must have a `role` and a `content`, both strings")
        _text(message["content"], where)
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: the last of `messages` must be the user's")
    before = tuple({name: message[name] for name in ("role", "content")} for message in messages[:-1])
    return Talk((messages[-1]["content"],), where, before)


def _text(text: str, where: str) -> str:
    if not text:
        raise ValueError(f"{where}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the prompt is not valid Unicode (a lone surrogate)") from None
    return text


# --- the run

MADE_UP = 128  # length of a made-up prompt, for targets without a tokenizer


def made_up(vocab_size: int, count: int) -> list[int]:
    """`count` ids (at least one), spread over the vocabulary."""
    return [n * 7919 % vocab_size for n in range(max(1, count))]


LONG = 512  # tokens; the prefill of a longer prompt shows its progress


class _Stop:
    """The first Ctrl-C stops the loop after the current chunk, so counts and text agree; the second one raises."""

    asked = False

    def __enter__(self) -> "_Stop":
        self.old: Any = None
        if threading.current_thread() is threading.main_thread():
            self.old = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        if self.old is not None:
            signal.signal(signal.SIGINT, self.old)


@dataclass(eq=False)
class Line:
    """One sample of one talk. Its turns are decoded one after another."""

    talk: Talk
    sampling: Sampling
    first: int  # the number of its first turn among all results
    messages: list[dict[str, str]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)  # results of the turns so far
    waiting: list[Callable[[], None]] = field(default_factory=list)  # what to print when the earlier lines are done

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.talk.turns) and self.results[-1].finished is not None

    @property
    def number(self) -> int:
        """The number of its last turn among all results."""
        return self.first + len(self.results) - 1

    def title(self, turn: int, samples: int) -> str:
        """The name of a turn's text among several. `turn`: from 1; `samples`: of each talk."""
        turns = f", turn {self.talk.part or turn}" if self.talk.part or len(self.talk.turns) > 1 else ""
        return f"{self.talk.where}{turns}" + (f", seed {self.sampling.seed}" if samples > 1 else "")

    def anew(self, before: tuple[dict[str, str], ...]) -> "Line":
        """Another conversation after this one, which starts with the messages `before`."""
        talk = replace(self.talk, turns=(), before=before)
        return Line(talk, self.sampling, self.first + len(self.results), list(before))


def lines_of(talks: list[Talk], job: Job, sampling: Sampling) -> list[Line]:
    """Each talk --samples times, with consecutive seeds."""
    lines: list[Line] = []
    first = 0
    for talk in talks:
        for n in range(job.samples):
            seeded = replace(sampling, seed=(sampling.seed + n) % 2**64)
            lines.append(Line(talk, seeded, first, list(talk.before)))
            first += len(talk.turns)
    return lines


def several(lines: list[Line]) -> bool:
    """Whether there is more than one text, so that each needs a title."""
    return sum(len(line.talk.turns) for line in lines) > 1


class Decoding:
    """Decodes lines, up to --batch-size at once, and prints them one after another."""

    def __init__(
        self,
        engine: Any,
        job: Job,
        screen: Screen,
        lines: list[Line],
        encode: Callable[[Line], list[int]],
        echo: bool = True,
        trace: Trace | None = None,
        grammar: str | None = None,
    ):
        """`echo`: print the prompts; a user who typed them has seen them. `trace`: records where requests begin and
        end. `grammar`: of every text."""
        self.engine, self.job, self.screen, self.lines, self.encode = engine, job, screen, lines, encode
        self.echo, self.trace, self.grammar, self.several = echo, trace, grammar, several(lines)
        self._ar_first = False

    def run(self) -> None:
        """Decode every turn of the lines; with --check, compare with plain decoding. After Ctrl-C, raises
        KeyboardInterrupt at the end of a chunk; the lines keep their results so far."""
        size = self.engine.options.batch_size
        if size > 1 and not self.job.check:
            self._ask(self.lines)
            self._serve(self.lines, to_the_end=True)
            return
        for n in range(0, len(self.lines), size):
            group = self.lines[n : n + size]
            for turn in range(max(len(line.talk.turns) for line in group)):
                self.turn([line for line in group if turn < len(line.talk.turns)])

    def turn(self, lines: list[Line]) -> None:
        """Decode the next turn of the lines in one batch. With --check, `ar` decodes the same prompts in a batch of its
        own, before the strategy in every second call: whichever goes first pays for what both need, such as new
        memory."""
        self._ask(lines)
        plain = self._plain(lines) if self.job.check and self._ar_first else None
        self._serve(lines)
        if self.job.check:
            self._compare(lines, plain or self._plain(lines))
            self._ar_first = not self._ar_first

    def _ask(self, lines: list[Line]) -> None:
        """Begin the next turn of the lines, and print its prompt."""
        for line in lines:
            turn = line.talk.turns[len(line.results)]
            line.messages.append({"role": "user", "content": turn})
            line.results.append(Result([], "", Stats(), ids=self.encode(line), seed=line.sampling.seed))
            if self.echo:
                text, title = f"{turn}\n" if self.job.chat else turn, self._title(line)
                line.waiting.append(partial(self.screen.prompt, text, title))
        self._show()

    def _title(self, line: Line) -> str | None:
        """The name of the text of a line's last turn; None if there is only one text."""
        return line.title(len(line.results), self.job.samples) if self.several else None

    def _request(self, line: Line) -> Any:
        """The last turn of a line."""
        result, turn, seed = line.results[-1], len(line.results), line.sampling.seed
        if self.trace is not None:
            place = line.talk.where, line.talk.part or turn, line.talk.turns[turn - 1]
            self.trace.begin(line.number, *place, len(result.ids), seed)
        # With --check, both decoders prefill every prompt, for equal bits and a fair comparison of speed. Otherwise a
        # conversation prefills only its new tokens.
        keeps = self.job.chat and turn > 1 and self.engine.options.prefix_cache != "off"
        prefixes = "off" if self.job.check else "all" if keeps else None
        job, sampling = self.job, line.sampling
        params = Params(job.max_new_tokens or 0, sampling, job.stop, prefix_cache=prefixes, grammar=self.grammar)
        return self.engine.session.request(result.ids, params, index=line.number)

    def _serve(self, lines: list[Line], to_the_end: bool = False) -> None:
        """Decode the last turn of the lines in one batch; with `to_the_end` the turns after it, too."""
        owners = {line.number: line for line in lines}
        requests = [self._request(line) for line in lines]
        with _Stop() as stop, self.engine.session.stream(requests) as events:
            for event in self._prefilled(events, requests):
                line = owners[event.prompt]
                result = line.results[-1]
                result.tokens += event.tokens
                result.text += event.text
                result.stats, result.finished = event.stats, event.finished
                line.waiting.append(partial(self.screen.pieces, event.pieces))
                if event.finished:
                    if self.trace is not None:
                        self.trace.end(event.prompt, event.finished, event.stats)
                    line.waiting.append(self.screen.newline)
                    line.messages.append({"role": "assistant", "content": result.text})
                    if to_the_end and not line.done:
                        self._ask([line])
                        owners[line.number] = line
                        events.submit(self._request(line), first=True)
                self._show()
                if stop.asked:
                    break
        if stop.asked:
            self._show_all()
            raise KeyboardInterrupt

    def _prefilled(self, events: Iterator[Any], requests: list[Any]) -> Iterator[Any]:
        """`events`, with a progress bar during the prefill of a long conversation."""
        if self.job.chat and len(requests) == 1 and len(requests[0].text) > LONG:
            with self.screen.progress("prefill") as requests[0].on_progress:
                first = next(events)
            yield first
        yield from events

    def _show(self) -> None:
        """Print the first unfinished line as it grows; later lines wait for it."""
        for line in self.lines:
            self._put(line)
            if not line.done:
                break

    def _show_all(self) -> None:
        """Print what every line has so far."""
        for line in self.lines:
            begun = bool(line.results and line.results[-1].stats.rounds)
            if line.waiting and not begun:
                line.waiting.pop()  # the prompt
            self._put(line)
            if begun and line.results[-1].finished is None:
                self.screen.newline()

    def _put(self, line: Line) -> None:
        for show in line.waiting:
            show()
        line.waiting.clear()

    def _plain(self, lines: list[Line]) -> list[Any]:
        """The last turns of the lines as `ar` decodes them, in one batch."""
        options = {f.name: [getattr(line.sampling, f.name) for line in lines] for f in fields(Sampling)}
        prompts = [line.results[-1].ids for line in lines]
        how = {"grammar": self.grammar, **options}
        return self.engine.generate_ar(prompts, self.job.max_new_tokens, self.job.stop, **how)

    def _compare(self, lines: list[Line], plain: list[Any]) -> None:
        """Compare the last turns of the lines with `plain`."""
        from specker.runtime.engine import Generation

        for line, ar in zip(lines, plain, strict=True):
            result, title = line.results[-1], self._title(line)
            generation = Generation(result.tokens, result.text, result.stats, result.finished or "length")
            result.check = self.engine.compare(result.ids, generation, ar, **asdict(line.sampling))
            if result.check.identical is False:
                message = result.check.message if title is None else f"{title}: {result.check.message}"
                self.screen.note(message, "yellow" if result.check.ok else "red")


def run(job: Job, options: Options, sampling: Sampling) -> int:
    """Decode every prompt; returns the exit code. Checks all input before decoding starts."""
    world = int(os.environ.get("WORLD_SIZE", "1"))  # processes that torchrun started
    first = os.environ.get("RANK", "0") == "0" or world == 1
    if world > 1 and "-" in (job.prompt, job.prompts):
        raise ValueError("several processes cannot share stdin: put the prompts in a file")
    chatting = job.chat and job.prompt is None and job.prompts is None and sys.stdin.isatty()
    if chatting and (world > 1 or job.samples > 1 or options.batch_size > 1):
        raise ValueError("a conversation in the terminal is one: leave out torchrun, --samples and --batch-size")
    for name in ("trace", "view"):
        if options.dp > 1 and getattr(job, name) is not None:
            raise ValueError(f"--{name} records one replica only: leave out --dp")
    page = None if job.view is None else job.view or _free(Path(job.trace or "trace.jsonl").with_suffix(".html"))
    count = job.max_new_tokens or (1024 if chatting else 128)
    job = replace(job, max_new_tokens=count)
    talks = [] if chatting else read_talks(job)
    matches = read_grammar(job)
    if job.json is not None and job.json != "-":
        probe(job.json, "--json")
    screen = Screen(job.json == "-", quiet=not first or options.dp > 1)
    if job.trace is not None:
        probe(job.trace, "--trace")
    if page is not None:
        probe(page, "--view")

    with screen.progress("loading") as on_progress:  # torch alone takes more than a second
        from specker.cpu import on_compile
        from specker.runtime.load import load  # not specker.load: a folder `specker` here would hide the package
        from specker.runtime.ranks.dist import collect

        with on_compile(screen.note):
            engine = load(job.target, job.draft, options, device=job.device, dtype=job.dtype, on_progress=on_progress)
    ranks = engine.ranks

    bare = options.load == "dummy" and not engine.has_tokenizer
    if bare and job.prompt is None and job.prompts is None and not job.chat:
        talks = [Talk(("",), "made-up prompt")]
    elif bare:
        raise ValueError(
            f"{engine.target_name} has no tokenizer, so a prompt cannot be text: leave out the prompt and --chat, and "
            "--load dummy decodes made-up ids"
        )

    def encode(line: Line) -> list[int]:
        if bare:
            return made_up(engine.target.config.vocab_size, min(MADE_UP, engine.max_context // 2))
        text = line.messages[-1]["content"]
        try:
            return engine.validate(engine.encode_chat(line.messages) if job.chat else engine.encode(text), count)
        except ValueError as error:
            raise ValueError(f"{line.talk.where}: {error}") from None

    if chatting:
        engine.encode_chat([{"role": "user", "content": "Hi"}])  # refuses a target without a chat template
    for talk in talks:
        encode(Line(talk, sampling, 0, [*talk.before, {"role": "user", "content": talk.turns[0]}]))
    if matches is not None:
        engine.session.guide(matches)  # refuses one that is invalid
    screen.remarks(engine)
    if bare:
        count = len(encode(Line(talks[0], sampling, 0)))
        screen.note(f"{engine.target_name} has no tokenizer: the prompt is {count} made-up ids, and there is no text")
    if job.check or engine.captures:  # compiling must not slow a printed speed or the first token
        with screen.records(), screen.progress("warming up") as on_progress:
            engine.warmup(on_progress)
    elif engine.model.stack is not None:
        engine.generate([0], 2)
    lines = [Line(Talk((), "this turn"), sampling, 0)] if chatting else lines_of(talks, job, sampling)
    mine = lines if ranks is None else lines[ranks.replica :: ranks.replicas]
    sizing = "sizing" in engine.remarks
    trace = Trace(engine, sampling, job.stop) if job.trace is not None or page is not None else None
    if trace is not None:
        engine.trace = trace.round
    interrupted = False
    if screen.terminal and engine.speculates and not sizing:
        prompt = "" if chatting else "[dim]the prompt,[/] "
        screen.notes.print(f"{prompt}[green]accepted draft tokens,[/] the target's own tokens\n")
    if job.built_in and options.load != "dummy":
        real = '--target "$(python -m specker.zoo.real)" --chat --temperature 0.7'
        screen.note(f"a toy model writes this; for a real one: {real}\n")
    if sampling == replace(Sampling(), seed=sampling.seed) and (recommended := engine.target.recommended):
        asked = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in recommended.items())
        screen.note(f"decoding greedily; the checkpoint recommends {asked}")
    decoding = Decoding(engine, job, screen, mine, encode, not chatting, trace, matches)
    try:
        with screen.records():
            if chatting:
                from specker.cli.chat import converse

                converse(decoding, mine, screen)
            else:
                decoding.run()
    except KeyboardInterrupt:
        interrupted = True
    results = [result for line in mine for result in line.results if result.stats.rounds or not interrupted]
    if ranks is not None and ranks.replicas > 1 and not interrupted:
        dealt = collect(ranks, [line.results for line in mine]) or []
        results = [result for each in dealt for result in each]
        screen = Screen(job.json == "-", quiet=not first)
        screen.remarks(engine)
        for line, each in zip(lines, dealt, strict=first):
            for n, (turn, result) in enumerate(zip(line.talk.turns, each, strict=True), 1):
                title = line.title(n, job.samples) if several(lines) else None
                screen.prompt(f"{turn}\n" if job.chat else turn, title)
                screen.pieces([(result.text, False)])
                screen.newline()
    if not first:
        return 130 if interrupted else int(any(map(failed, results)))
    if results or not chatting:
        screen.table(engine, results)
    unwritten: list[str] = []  # a file that cannot be written must not prevent the others
    if job.json is not None:
        text = json.dumps(report(engine, results, sampling, interrupted), ensure_ascii=False) + "\n"
        with _kept("--json", job.json, unwritten):
            if job.json == "-":
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                write_file(job.json, text)
    if trace is not None:
        if job.trace is not None:
            with _kept("--trace", job.trace, unwritten):
                write_file(job.trace, "".join(f"{line}\n" for line in trace.lines))
        if page is not None:
            with _kept("--view", page, unwritten):
                _view(page, trace, job.trace or "this run", screen)
    if screen.failure is not None:
        unwritten.append(f"the text: {screen.failure.strerror}")
    if unwritten:
        raise OSError("; ".join(unwritten))
    if interrupted:
        screen.note("interrupted", "yellow")
        return 130
    return int(any(map(failed, results)))


@contextlib.contextmanager
def _kept(flag: str, path: str, unwritten: list[str]) -> Iterator[None]:
    """Add a sentence to `unwritten` if the file that `flag` names cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        unwritten.append(f"{flag} {path}: cannot be written: {error.strerror}")
        if path == "-":
            silence()


def failed(result: Result) -> bool:
    """Whether a text is wrong or could not be decoded to its end."""
    return result.finished in ("not finite", "grammar") or bool(result.check and not result.check.ok)


def _free(path: Path) -> str:
    """`path`, with a number before its suffix if the file exists, so that an earlier page is kept."""
    names = (path if n == 1 else path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(1))
    return str(next(name for name in names if not name.exists()))


def _view(path: str, trace: Trace, name: str, screen: Screen) -> None:
    """Write the trace as a page and open it in the user's browser. `name`: the page's title begins with it."""
    import webbrowser

    from specker.view.page import html
    from specker.view.read import parse as parse_trace

    write_file(path, html([parse_trace(trace.lines, name)]))
    screen.note(f"the rounds are in {path}")
    webbrowser.open(Path(path).resolve().as_uri())


def main(argv: Sequence[str] | None = None) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return run_cli(lambda: run(*parse(argv)))
    from specker.runtime.ranks.dist import leave, prints_errors

    return leave(run_cli(lambda: run(*parse(argv)), prints_errors))


def cli() -> NoReturn:
    sys.exit(main())
