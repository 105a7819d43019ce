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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from specker.cli import start
from specker.cli.decode import Decoding, Sample, samples_of, several
from specker.cli.flags import Job, parse
from specker.cli.prompts import Conversation, encode, read_conversations, read_grammar, read_prediction
from specker.cli.report import Result, report
from specker.cli.screen import Screen
from specker.command.exits import run_cli, silence
from specker.options import Options, Sampling, check_least
from specker.paths import probe, replaceable, write_file
from specker.runtime import strategies
from specker.torchrun import rank, world_size
from specker.view.trace import Trace

REAL = 'specker --target "$(python -m specker.zoo.real)" --chat'  # fetches it


def run(job: Job, options: Options, sampling: Sampling, named: frozenset[str]) -> int:
    """Decode every prompt; returns the exit code. Checks all input before decoding starts. `named`: the fields of
    `sampling` that the user gave."""
    rank_0 = world_size() == 1 or rank() == 0
    chatting = job.chat and job.prompt is None and job.prompts is None and sys.stdin.isatty()
    _check_job(job, options, chatting)
    job = replace(job, max_new_tokens=job.max_new_tokens or (1024 if chatting else 128))
    check_least(job.min_tokens, job.max_new_tokens or 0)
    if job.view == "":
        beside = Path(job.trace or "trace.jsonl")
        job = replace(job, view=_unused(beside.parent / f"{beside.stem}.html"))
    if chatting:
        conversations = [Conversation((), "this turn")]  # the user adds the turns
    else:
        conversations = read_conversations(job.prompt, job.prompts, job.chat)
    grammar, text = read_grammar(job.json_schema, job.grammar), read_prediction(job.prediction)
    for name in ("json", "trace", "view"):
        path = getattr(job, name)
        if path is not None and (name, path) != ("json", "-"):
            probe(path, f"--{name}")
    _check_files(job)
    screen = Screen(job.json == "-", quiet=not rank_0 or options.dp > 1)

    engine = start.load(job, options, screen)
    if engine.ranks is not None:
        _agree(job, sampling, conversations, grammar, text)
    if grammar is not None and job.json_schema is not None and job.chat:
        grammar = _of_answers(engine, grammar)
    conversations = _encoded(engine, job, conversations, chatting)
    prediction = None if text is None else tuple(engine.session.prediction(text))  # raises ValueError
    if grammar is not None:
        engine.session.guide(grammar)  # raises ValueError for an invalid one
    screen.remarks(engine)
    _warm_up(engine, job, screen)
    if chatting:
        sampling = replace(sampling, **{n: value for n, value in engine.usual_sampling.items() if n not in named})

    samples = samples_of(conversations, job.samples, sampling)
    ranks = engine.ranks
    mine = samples if ranks is None else samples[ranks.replica :: ranks.replicas]
    trace = Trace(engine, sampling) if job.trace is not None or job.view is not None else None
    if trace is not None:
        engine.trace = trace.round
    _introduce(engine, job, sampling, screen, chatting)
    if chatting:
        screen.render_answers()
    decoding = Decoding(
        engine, job, screen, mine, echo=not chatting, trace=trace, grammar=grammar, prediction=prediction
    )
    interrupted = _decode(decoding, chatting)
    results = [result for sample in mine for result in sample.results if result.stats.rounds or not interrupted]
    if ranks is not None and ranks.replicas > 1 and not interrupted:
        screen = Screen(job.json == "-", quiet=not rank_0)
        results = _of_all_replicas(engine, job, screen, samples, mine)
    if rank_0:
        if results or not chatting:
            screen.table(engine, results)
        found = None if job.json is None else report(engine, results, sampling, interrupted)
        _write(job, found, trace, engine, screen)
        if interrupted:
            screen.note("interrupted", "yellow")
    return 130 if interrupted else int(any(map(failed, results)))


def failed(result: Result) -> bool:
    """Whether a text is wrong or could not be decoded to its end."""
    return result.finished in ("not finite", "grammar") or bool(result.check and not result.check.ok)


def _check_job(job: Job, options: Options, chatting: bool) -> None:
    """ValueError for flags that exclude each other, and for a conversation with the toy model."""
    world = world_size()
    if world > 1 and "-" in (job.prompt, job.prompts):
        raise ValueError("several processes cannot share stdin: put the prompts in a file")
    if chatting and (world > 1 or job.samples > 1 or options.batch_size > 1):
        raise ValueError("a conversation in the terminal is one: leave out torchrun, --samples and --batch-size")
    if job.chat and job.bundled:
        raise ValueError(
            "the bundled toy has no chat template, which --chat needs: make real MODEL=coder fetches a model that has "
            f"one, and so does {REAL}"
        )
    for name in ("trace", "view"):
        if options.dp > 1 and getattr(job, name) is not None:
            raise ValueError(f"--{name} records one replica only: leave out --dp")


def _check_files(job: Job) -> None:
    """ValueError if one file would replace another one of the run."""
    known: dict[str, str] = {}
    for name in ("json", "trace", "view"):
        path = getattr(job, name)
        if path is None or (name, path) == ("json", "-") or not replaceable(Path(path)):
            continue
        if (other := known.setdefault(os.path.realpath(path), name)) != name:
            raise ValueError(f"--{other} and --{name} are both {path}: name two files")


def _agree(
    job: Job, sampling: Sampling, conversations: list[Conversation], grammar: str | None, prediction: str | None
) -> None:
    """ValueError, on every rank, if one of them has other settings or prompts. Files are compared by what they hold,
    since their paths may differ from machine to machine."""
    from specker.runtime.ranks.dist import agree

    files = {"prompts", "json_schema", "grammar", "prediction", "json", "trace", "view"}
    own_of_each = {*files, "target", "draft", "dtype", "device"}
    own = {f.name: getattr(job, f.name) for f in fields(job) if f.name not in own_of_each}
    own |= {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    read: dict[str, Any] = {} if job.prompt is not None else {"prompts": conversations}
    read |= {"grammar" if job.json_schema is None else "json_schema": grammar, "prediction": prediction}
    agree("run", own | read)


def _of_answers(engine: Any, grammar: str) -> str:
    """The grammar of answers whose text matches `grammar`: in Harmony, reasoning and headers stand before it."""
    from specker.answers import channels, harmony

    if (known := harmony.of(engine.target.tokens.special)) is None:
        return grammar
    prompt = engine.tokenizer.decode(engine.encode_chat([{"role": "user", "content": "Hi"}]), skip_special_tokens=False)
    return channels.schema_of(known, harmony.last_message(prompt), grammar)


def _encoded(engine: Any, job: Job, conversations: list[Conversation], chatting: bool) -> list[Conversation]:
    """The conversations with the token ids of their first turns. ValueError for one that cannot be decoded, and for a
    terminal's conversation with a target that has no chat template."""
    if chatting:
        engine.encode_chat([{"role": "user", "content": "Hi"}])
        return conversations
    found = []
    for each in conversations:
        messages = [*each.before, {"role": "user", "content": each.turns[0]}]
        ids = encode(engine, messages, each.where, job.chat, job.max_new_tokens or 0)
        found.append(replace(each, ids=tuple(ids)))
    return found


def _warm_up(engine: Any, job: Job, screen: Screen) -> None:
    """Compiling must not slow a printed speed or the first token. Ranks wait for one another longer until it ends."""
    if job.check or engine.captures or engine.ranks is not None:
        with screen.log_notes(), screen.progress("warming up") as on_progress:
            engine.warmup(on_progress)
    elif engine.model.stack is not None:
        engine.generate([0], 2, cache_salt=None)


def _introduce(engine: Any, job: Job, sampling: Sampling, screen: Screen, chatting: bool) -> None:
    """Print what a reader of the texts should know."""
    if screen.terminal and engine.speculates:
        prompt = "" if chatting else "[dim]the prompt,[/] "
        screen.notes.print(f"{prompt}[green]accepted draft tokens,[/] the target's own tokens\n")
    if job.built_in:
        screen.note(f"a toy model writes this; for a real one: {REAL}\n")
    if job.samples > 1 and not sampling.temperature:
        screen.note("at temperature 0 all samples of a prompt are alike: --temperature 0.7 draws them", "yellow")
    if (
        not chatting
        and sampling == replace(Sampling(), seed=sampling.seed)
        and (recommended := engine.target.recommended)
    ):
        asked = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in recommended.items())
        screen.note(f"decoding greedily; the checkpoint recommends {asked}")


def _decode(decoding: Decoding, chatting: bool) -> bool:
    """Decode everything, or what the user types; returns whether Ctrl-C ended it."""
    try:
        with decoding.screen.log_notes():
            if chatting:
                from specker.cli.chat import converse  # prompt_toolkit takes long to import

                converse(decoding)
            else:
                decoding.run()
    except KeyboardInterrupt:
        return True
    return False


def _of_all_replicas(engine: Any, job: Job, screen: Screen, samples: list[Sample], mine: list[Sample]) -> list[Result]:
    """Gather the results of all replicas and print their texts; [] on other ranks than 0. `mine`: those of `samples`
    that this replica decoded."""
    from specker.runtime.ranks.dist import collect

    gathered = collect(engine.ranks, [sample.results for sample in mine])
    if gathered is None:
        return []
    screen.remarks(engine)
    for sample, results in zip(samples, gathered, strict=True):
        for n, (turn, result) in enumerate(zip(sample.conversation.turns, results, strict=True), 1):
            screen.prompt(f"{turn}\n" if job.chat else turn, sample.title(n, job.samples) if several(samples) else None)
            screen.pieces([(result.text, False)])
            screen.newline()
    return [result for results in gathered for result in results]


def _write(job: Job, found: dict[str, Any] | None, trace: Trace | None, engine: Any, screen: Screen) -> None:
    """Write the files that the job names. One that cannot be written does not prevent the others; raises OSError with
    all reasons at the end. `found`: the object for --json."""
    unwritten: list[str] = []
    copying = strategies.copier(engine.drafters)
    if copying is not None and copying.file is not None:
        with _kept("--lookup-file", str(copying.file.path), unwritten):
            engine.save_lookup()
    if job.json is not None:
        text = json.dumps(found, ensure_ascii=False) + "\n"
        with _kept("--json", job.json, unwritten):
            if job.json == "-":
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                write_file(job.json, text)
    if trace is not None and job.trace is not None:
        with _kept("--trace", job.trace, unwritten):
            write_file(job.trace, "".join(f"{line}\n" for line in trace.lines))
    if trace is not None and job.view is not None:
        with _kept("--view", job.view, unwritten):
            _view(job.view, trace, job.trace or "this run", screen)
    if screen.failure is not None:
        unwritten.append(f"the text: {screen.failure.strerror}")
    if unwritten:
        raise OSError("; ".join(unwritten))


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


def _view(path: str, trace: Trace, name: str, screen: Screen) -> None:
    """Write the trace as a page and open it in the user's browser. `name`: the page's title begins with it."""
    import webbrowser

    from specker.view.page import html
    from specker.view.read import parse as parse_trace

    write_file(path, html([parse_trace(trace.lines, name)]))
    screen.note(f"the rounds are in {path}")
    webbrowser.open(Path(path).resolve().as_uri())


def _unused(path: Path) -> str:
    """`path`, with a number before its suffix if the file exists, so that an earlier page is kept."""
    names = (path if n == 1 else path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(1))
    return str(next(name for name in names if not name.exists()))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        alone = world_size() == 1
    except ValueError:  # `run` says it
        alone = True
    if alone:
        return run_cli(lambda: run(*parse(argv)))
    from specker.runtime.ranks.dist import leave, prints_errors

    code = run_cli(lambda: run(*parse(argv)), prints_errors)
    return run_cli(lambda: leave(code), prints_errors)  # another process may have failed meanwhile


def cli() -> NoReturn:
    sys.exit(main())
