"""`python -m specker.run`: refusals and their messages, and the contents of stdout, stderr and --json."""

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from make_checkpoint import edit, make

import specker
from specker import paths
from specker.cli import COMMANDS, calibrate, flags, run, serve
from specker.cli.decode import Decoding, samples_of
from specker.cli.prompts import read_conversations
from specker.cli.report import Result
from specker.cli.screen import Screen
from specker.command.parser import SHELLS
from specker.options import Common, Sampling, Tree, VocabKeep
from specker.paths import cache_root
from specker.runtime import strategies
from specker.runtime.control.stats import Stats
from specker.runtime.strategies.vocabtrim import TrimOptions

ROOT = Path(__file__).parents[2]
ROW = {"tokens", "text", "rounds", "drafted", "accepted", "acceptance_length", "accepted_per_position"}
ROW |= {"lengths", "rests", "drafting"}
ROW |= {"tokens_per_second", "decode_tokens_per_second", "prefill_tokens_per_second", "seconds"}
OWN = {"seed", "prompt_tokens", "finish_reason"}  # of a prompt
RUN = {"strategy", "target", "draft", "device", "dtype", "batch_size", "sampling", "settings", "versions"}
CHECKED = {"ar_tokens_per_second", "speedup", "speedups", "identical"}


def models(pair: tuple[str, str], *more: str) -> list[str]:
    return ["--target", pair[0], "--draft", pair[1], "--device", "cpu", "--max-new-tokens", "8", *more]


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], *words: str) -> None:
    """Exit code 2, one line that holds `words` on stderr, nothing on stdout."""
    assert run.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specker: error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err


# --- flags


def test_flags_are_the_dataclasses() -> None:
    argv = "--prompt p --strategy draft --draft-tokens 7 --tree 2x3 --temperature 0.7 --top-p 0.9 --top-k 5 --seed 3"
    job, options, sampling, named = flags.parse(
        [*argv.split(), "--max-context", "99", "--kv-tokens", "16", "--check", "--chat"]
    )
    assert (job.prompt, job.check, job.chat, job.max_new_tokens) == ("p", True, True, None)
    assert options == strategies.options(strategy="draft", draft_tokens=7, tree="2x3", max_context=99, kv_tokens=16)
    assert (options.base.name, options.draft_tokens, options.tree, options.policy) == ("draft", 7, Tree(2, 3), "fixed")
    assert sampling == Sampling(0.7, 0.9, 5, 3) and named == {"temperature", "top_p", "top_k", "seed"}
    assert flags.parse(["--prompt", "a"]) == (flags.Job(prompt="a"), strategies.options(), Sampling(), frozenset())
    assert flags.parse(["-"])[0].prompt == "-" and flags.parse(["--view"])[0].view == ""
    for text in ("some text", "def fib", "serve me", "view.py", "hello", "chat?"):
        assert flags.parse([text])[0].prompt == text
    for argv, strategy in (
        ("--target t", "lookup"),
        ("--target t --draft d", "vocabtrim+lookup"),
        ("--target t --strategy ar", "ar"),
    ):
        assert flags.parse(argv.split())[1].strategy == strategy


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--nonsense 1", ["unrecognized arguments: --nonsense"]),
        ("--temp 1", ["there is no flag --temp"]),  # no abbreviations: a later flag could change their meaning
        ("hello you there", ["unexpected 'you there'", "needs quotes"]),
        ("sevre", ["there is no command 'sevre'; did you mean serve? (--prompt sevre decodes it)"]),
        ("veiw trace.jsonl", ["there is no command 'veiw'; did you mean view? (--prompt veiw decodes it)"]),
        ("Serve --port 80", ["there is no command 'Serve'; did you mean serve?"]),
        ("chat --target x", ["there is no command 'chat'; did you mean --chat? (--prompt chat decodes it)"]),
        ("run hello", ["there is no command 'run'; did you mean specker PROMPT?"]),
        ("--seed 3 sevre", ["there is no command 'sevre'; did you mean serve?"]),
        ("--chat", ["the bundled toy has no chat template", "make real MODEL=coder", "--target"]),
        ("--chat --prompt hello --target hybrid-target", ["the bundled toy has no chat template"]),
        ("hello --prompt x", ["'hello' is a prompt and excludes --prompt and --prompts"]),
        ("--prompt x --prompts y", ["--prompt and --prompts"]),
        ("- --prompt x", ["'-' is a prompt", "--prompt"]),
        ("--json run.out --trace ./run.out", ["--json and --trace are both ./run.out: name two files"]),
        ("--trace run.html --view", ["--trace and --view are both run.html: name two files"]),
        ("--trace . --view", ["--trace .: is a directory"]),
        ("--max-new-tokens 0", ["--max-new-tokens must be at least 1", "got 0"]),
        ("--max-new-tokens -3", ["got -3"]),
        ("--max-new-tokens many", ["--max-new-tokens", "invalid int value: 'many'"]),
        ("--dtype float8", ["--dtype", "float32, bfloat16, float16, float64", "'float8'"]),
        ("--temperature -0.1", ["--temperature must be 0 or at least 1e-6", "-0.1"]),
        ("--temperature 1e-9", ["--temperature", "1e-09"]),
        ("--temperature nan", ["--temperature", "nan"]),
        ("--temperature inf", ["--temperature", "inf"]),
        ("--top-p 0", ["--top-p must be in (0, 1]", "0.0"]),
        ("--top-p 1.5", ["--top-p", "1.5"]),
        ("--top-k -1", ["--top-k must be at least 0", "-1"]),
        (f"--top-k {10**20}", ["--top-k must be at most 2147483647, got 1000"]),
        ("--seed -1", ["--seed", "-1"]),
        ("--strategy magic", ["unknown strategy 'magic' (available: ar, draft"]),
        ("--strategy vocabtrim+lokup", ["unknown strategy 'lokup'; did you mean lookup? (available: ar, draft"]),
        ("--strategy diffuspec --cps some", ["--cps must be one of off, chain, tree"]),
        ("--strategy draft+ar", ["do not compose"]),
        ("--strategy ar --draft-tokens 3", ["'ar' drafts nothing"]),
        ("--draft-tokens 0", ["--draft-tokens must be between 1 and 255", "got 0"]),
        ("--draft-tokens -2", ["got -2"]),
        ("--tree 0x5", ["--tree must be WIDTHxDEPTH", "'0x5'"]),
        ("--tree 4x0", ["'4x0'"]),
        ("--tree wide", ["'wide'"]),
        ("--tree 65x1", ["too large"]),
        ("--max-context 0", ["--max-context must be at least 1"]),
        ("--page-size 16", ["unrecognized arguments: --page-size"]),
        ("--batch-size 257", ["--batch-size must be between 1 and 256", "got 257"]),
        ("--kv-tokens 0", ["--kv-tokens must be at least 1", "got 0"]),
        ("--load dummy", ["unrecognized arguments: --load"]),  # an option of Python only
    ],
)
def test_refused_flags(capsys: pytest.CaptureFixture[str], argv: str, words: list[str]) -> None:
    refused(capsys, argv.split(), *words)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--stategy", "--strategy"), ("--temp", "--temperature"), ("--max-new-tokn", "--max-new-tokens")],
)
def test_a_misspelt_flag_has_a_suggestion(capsys: pytest.CaptureFixture[str], given: str, meant: str) -> None:
    refused(capsys, [given, "1"], f"there is no flag {given}; did you mean {meant}?")


def test_values_are_parsed_once() -> None:
    argv = "--strategy diffuspec+vocabtrim --adl 2-5 --cps tree --vocab-keep coverage:0.5"
    options = flags.parse(argv.split())[1]
    assert (options.base.name, options.policy) == ("diffuspec", "adl")
    assert (options.own.adl, options.own.search, options.trim.vocab_keep) == ((2, 5), "tree", VocabKeep(coverage=0.5))
    typed = {"adl": (2, 5), "cps": "tree", "vocab_keep": VocabKeep(coverage=0.5), "tree": None}
    assert strategies.options(strategy="diffuspec+vocabtrim", **typed) == options
    assert strategies.options(strategy="easyspec", layer_parallel=2, tree=Tree(2, 3)).own.layer_parallel == 2
    groups = strategies.options(strategy="easyspec", layer_parallel="[[0],[1,2]]").own.layer_parallel
    assert groups == ((0,), (1, 2))


MORE_HELP = ("--help", "--help-all", "--version", "--list-strategies", "--print-completion")
OWN_OPTIONS = [*(s.options for s in strategies.STRATEGIES.values() if s.options is not None), TrimOptions]


def with_flags(cls: type) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if f.metadata["flag"]]


def shown(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *argv: str) -> str:
    """What a flag prints that ends the command."""
    with pytest.raises(SystemExit) as stop:
        main([*argv])
    assert not stop.value.code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def flags_in(text: str) -> list[str]:
    return re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("wide")
def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags that a first run needs, and every strategy."""
    out = shown(capsys, run.main, "--help")
    assert {"--target", "--draft", "--strategy", "--prompt", "--chat", "--check"} <= set(flags_in(out))
    assert "--kv-tokens" not in out and "--cps" not in out, "flags for --help-all alone"
    for name in strategies.names():
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE), name
    assert shown(capsys, run.main, "-h") == out


@pytest.mark.usefixtures("wide")
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a module with a parser of that name."""
    out = shown(capsys, run.main, "--help")
    parsers = flags.commands()
    assert parsers.keys() == COMMANDS.keys()
    for name, about in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(about)}$", out, re.MULTILINE)
        assert parsers[name].prog in (f"specker {name}", f"specker-{name}")


@pytest.mark.usefixtures("wide")
def test_help_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    """It names the server's own defaults, each once."""
    out = " ".join(shown(capsys, serve.main, "--help").split())
    assert f"sequences decoded at once (default: {serve.BATCH})" in out
    assert "0 decodes greedily (default: what the checkpoint recommends, else 0.7)" in out
    assert out.count("else 0.7") == 1 and out.count("decodes greedily") == 1
    assert serve.parse([])[1].batch_size == serve.BATCH


@pytest.mark.parametrize(
    ("argv", "data", "prompt"),
    [([], b"hi", "-"), ([], b"", "-"), (["--prompts", "f"], b"hi", None), (["text"], b"hi", "text")],
)
def test_a_pipe_is_a_prompt(monkeypatch: pytest.MonkeyPatch, argv: list[str], data: bytes, prompt: str | None) -> None:
    """Unless the command line has one. An empty pipe is refused, and /dev/null is none."""
    reads, writes = os.pipe()
    os.write(writes, data)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert flags.parse(argv)[0].prompt == prompt
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", "2")
            assert flags.parse(argv)[0].prompt == (prompt if argv else None)
        if prompt == "-" and data:
            assert [each.turns for each in read_conversations("-")] == [("hi",)]
        elif prompt == "-":
            with pytest.raises(ValueError, match=r"^stdin: the prompt is empty \(without .*, </dev/null decodes the b"):
                read_conversations("-")
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert flags.parse([])[0].prompt is None


@pytest.mark.usefixtures("wide")
def test_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag once, with its values."""
    out = shown(capsys, run.main, "--help-all")
    names = {f.name for cls in (flags.Job, Common, *OWN_OPTIONS, Sampling) for f in with_flags(cls)}
    listed = [flag for flag in flags_in(out) if flag not in MORE_HELP]
    assert sorted(listed) == sorted("--" + name.replace("_", "-") for name in names)
    for cls in (flags.Job, Common, *OWN_OPTIONS):
        for f in with_flags(cls):
            if values := f.metadata["choices"] or f.metadata["offers"]:
                assert f"--{f.name.replace('_', '-')} {{{','.join(values)}}}" in out
    for policy in strategies.policies():
        assert policy in " ".join(out.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, run.main, "--version") == f"specker {specker.__version__}\n"


def test_list_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    """Each strategy with what it needs, its paper and its own flags; no line is wider than a terminal."""
    out = shown(capsys, run.main, "--list-strategies")
    assert all(len(line) <= 100 for line in out.splitlines())
    for name in strategies.names():
        assert re.search(rf"^{name} ", out, re.MULTILINE), name
    own = [field.name for cls in OWN_OPTIONS for field in dataclasses.fields(cls)]
    assert sorted(re.findall(r"--[a-z][a-z-]*", out)) == sorted("--" + name.replace("_", "-") for name in own)
    papers = [strategy.paper for strategy in strategies.listed()]
    assert set(re.findall(r"\d{4}\.\d{5}", out)) == set(re.findall(r"\d{4}\.\d{5}", " ".join(papers)))
    assert "a draft model" in out and "a diffusion" in out


@pytest.mark.parametrize("module", [flags, calibrate])
def test_examples_of_the_help_parse(module: Any) -> None:
    lines = re.findall(r"^  (specker.*)$", module.EPILOG, re.MULTILINE)
    assert lines
    for line in lines:
        command, *argv = shlex.split(line, comments=True)
        assert command == module.parser().prog
        module.parse(argv)
    assert f"  source <({command} --print-completion bash) " in module.EPILOG


@pytest.mark.usefixtures("wide")
def test_help_of_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, calibrate.main, "--help")
    names = [f.name for cls in (calibrate.Calibration, Sampling) for f in dataclasses.fields(cls)]
    assert sorted(flags_in(out)) == sorted(
        ["--help", "--print-completion", *("--" + name.replace("_", "-") for name in names)]
    )
    assert "--source {target,draft}" in out


def test_help_into_a_closed_pipe() -> None:
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m specker.run --help | true"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_takes_nothing(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m specker.run --version {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_size_of_the_job_that_is_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused(capsys, ["--prompt", "hi"], "WORLD_SIZE", "'two'")


def test_a_cache_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECKER_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(ValueError, match="set SPECKER_CACHE"):
        cache_root()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("main", "module"), [(run.main, flags), (calibrate.main, calibrate)])
def test_completion(capsys: pytest.CaptureFixture[str], main: Any, module: Any, shell: str, tmp_path: Path) -> None:
    """Each script names every flag and every value; bash accepts and uses it."""
    script = shown(capsys, main, "--print-completion", shell)
    words = set(re.findall(r"[\w+-]+", script.replace("\\+", "+")))
    long = (lambda flag: flag.removeprefix("--")) if shell == "fish" else str
    assert {long(flag) for flag in flags_in(module.parser().format_help())} <= words
    classes = (flags.Job, Common, *OWN_OPTIONS) if module is flags else (calibrate.Calibration,)
    for f in (f for cls in classes for f in with_flags(cls)):
        values = f.metadata["choices"] or f.metadata["offers"]
        assert not values or " ".join(values) in script, f.name
    if module is flags:
        assert " ".join((*strategies.names(), "draft+vocabtrim", "easyspec+vocabtrim")) in script
        assert " ".join(strategies.policies()) in script and " ".join(SHELLS) in script
        assert {"ar+vocabtrim", "ar+lookup", "lookup+vocabtrim", "lookup+lookup"}.isdisjoint(words)  # refused
    if shell == "bash":
        (tmp_path / "script").write_text(script)
        subprocess.run(["bash", "-n", str(tmp_path / "script")], check=True)
        (tmp_path / "a.jsonl").touch()
        name = module.parser().prog
        expected = {("--max-new", ""): ["--max-new-tokens"], ("bf", "--dtype"): ["bfloat16"]}
        expected |= {("a", "--prompts"): ["a.jsonl"], ("c", "--device"): ["cpu", "cuda"]}
        if module is flags:
            expected |= {
                ("draft+", "--strategy"): ["draft+vocabtrim", "draft+lookup", "draft+vocabtrim+lookup"],
                ("vi", ""): ["view"],
                ("--port", "serve"): ["--port"],
                ("loo", "serve --strategy"): ["lookup"],
                ("--list", ""): ["--list-strategies"],
            }
        for (word, before), completed in expected.items():
            assert completions(tmp_path, name, before, word) == completed


def completions(folder: Path, name: str, before: str, word: str) -> list[str]:
    """What bash offers, in `folder` with its `script`, for `word` after the flag `before`."""
    typed = [name, *before.split(), word]
    code = f"""source ./script
        read -ra found <<< "$(complete -p {name})"
        [[ "${{found[-1]}}" == {name} ]] || exit 3
        COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(typed) - 1}
        "${{found[-2]}}" {name} {word} {typed[-2]}
        printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "--norc", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", [run, calibrate])
def test_completion_of_an_unknown_shell(capsys: pytest.CaptureFixture[str], module: Any) -> None:
    assert module.main(["--print-completion", "ksh"]) == 2
    assert "--print-completion: invalid choice: 'ksh'" in capsys.readouterr().err


SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_scripts_are_the_commands() -> None:
    assert set(SCRIPTS) == {module.parser().prog for module in (flags, calibrate)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_the_modules(name: str, tmp_path: Path) -> None:
    """As with `python -m specker`: same output and exit code."""
    module, function = SCRIPTS[name].split(":")
    script = tmp_path / name  # as pip writes it
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    one, other = (
        subprocess.run([sys.executable, *start, "--nonsense"], env=env, cwd=ROOT, capture_output=True, text=True)
        for start in ([str(script)], ["-m", *name.split("-")])
    )
    assert one.returncode == other.returncode == 2
    assert (one.stdout, one.stderr) == (other.stdout, other.stderr)
    assert one.stderr.startswith("specker: error: unrecognized")


# --- prompts


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", ["contains no prompts"]),
        ('{"prompt": "a"}\n\n{"prompt": ', ["p.jsonl line 3", "not JSON: Expecting value at column 12"]),
        ('{"prompt": "a', ["p.jsonl line 1: not JSON: Unterminated string starting at column 12"]),
        ("[" * 10**5, ["p.jsonl line 1: the JSON has a number of too many digits or is nested too deeply"]),
        (f'{{"prompt": {"1" * 5000}}}', ["p.jsonl line 1: the JSON has a number of too many digits"]),
        ('{"prompt": "a"}\n["b"]', ["p.jsonl line 2", "one of `prompt`, `turns`"]),
        ('{"text": "a"}', ["line 1", "one of `prompt`, `turns`"]),
        ('{"prompt": "a", "turns": ["b"]}', ["line 1", "one of"]),
        ('{"messages": [{"role": "user", "content": "a"}]}', ["line 1", "`messages` need --chat"]),
        ('{"prompt": 3}', ["line 1", "`prompt` must be a string"]),
        ('{"turns": []}', ["line 1", "`turns` a list of at least one"]),
        ('{"turns": ["a", 1]}', ["line 1", "`turns`"]),
        ('{"prompt": "a"}\n{"prompt": ""}', ["line 2", "the prompt is empty"]),
        ('{"prompt": "\\ud800"}', ["line 1", "not valid Unicode"]),
        (b'{"prompt": "\xff"}', ["p.jsonl", "not UTF-8 at byte 12"]),
    ],
)
def test_refused_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: Any, words: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    refused(capsys, ["--prompts", str(path)], *words)


def test_refused_prompt_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused(capsys, ["--prompt", ""], "--prompt: the prompt is empty")
    refused(capsys, ["--prompts", str(tmp_path / "none.jsonl")], "none.jsonl", "No such file")
    refused(capsys, ["--prompts", str(tmp_path)], str(tmp_path), "directory")
    for argv in (["-"], ["--prompt", "-"]):
        stdin(monkeypatch, b"\n")
        refused(capsys, argv, "stdin: the prompt is empty")
    stdin(monkeypatch, b"{}\n")
    refused(capsys, ["--prompts", "-"], "stdin line 1")


def test_turns(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 81, "turns": ["a", "b"]}\r\n{"prompt": "c\u2028d"}\r\n', encoding="utf-8")
    apart = [each.turns for each in read_conversations(prompts=str(path))]
    assert apart == [("a",), ("b",), ("c\u2028d",)]
    together = read_conversations(prompts=str(path), chat=True)
    assert [each.turns for each in together] == [("a", "b"), ("c\u2028d",)]


def test_built_in_prompts_have_sampling_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    import specker
    from specker import zoo

    assert flags.parse([])[2] == Sampling(temperature=0.7, top_p=0.9, seed=7)
    assert flags.parse(["--top-k", "0"])[2] == flags.parse(["--prompt", "a"])[2] == Sampling()
    assert run.main(["--strategy", "ar", "--max-new-tokens", "40"]) == 0
    out, said = capsys.readouterr()
    assert "a toy model writes this" in said and "specker.zoo.real" in said
    engine = specker.load(strategy="ar")
    texts = [engine.generate(prompt, 40, temperature=0.7, top_p=0.9, seed=7).text for prompt in zoo.PROMPTS]
    titled = (f"==> built-in prompt {n} <==\n{text}\n" for n, text in enumerate(texts, 1))
    assert out == "\n".join(titled) and all(texts)
    assert run.main(["--prompt", zoo.PROMPTS[0], "--max-new-tokens", "2"]) == 0
    assert "a toy model" not in capsys.readouterr().err


def test_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a", "name": "ann"}]
    path.write_text(json.dumps({"messages": said}))
    (conversation,) = read_conversations(prompts=str(path), chat=True)
    assert conversation.turns == ("a",)
    (sample,) = samples_of([conversation], 1, Sampling())
    assert sample.messages == said[:1]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "a list of at least one"),
        ([{"role": "user"}], "`role` and a `content`"),
        (["hello"], "`role` and a `content`"),
        ([{"role": "user", "content": ""}], "the prompt is empty"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "must be the user's"),
    ],
)
def test_refused_messages(capsys: pytest.CaptureFixture[str], tmp_path: Path, messages: Any, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    refused(capsys, ["--target", "x", "--chat", "--prompts", str(path)], "line 1", words)


def test_chat_grows(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specker.runtime.engine import Engine

    seen, real = [], Engine.encode_chat
    monkeypatch.setattr(Engine, "encode_chat", lambda self, said: seen.append(list(said)) or real(self, said))
    (tmp_path / "p.jsonl").write_text('{"turns": ["one", "two"]}')
    argv = models(pair, "--chat", "--prompts", str(tmp_path / "p.jsonl"), "--json", str(tmp_path / "o.json"))
    assert run.main(argv) == 0
    rows = json.loads((tmp_path / "o.json").read_text())["prompts"]
    assert len(rows) == 2
    assert [m["content"] for m in seen[-1]] == ["one", rows[0]["text"], "two"]
    assert [m["role"] for m in seen[-1]] == ["user", "assistant", "user"]


# --- checks that need the engine


def test_refused_models(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(capsys, models((str(tmp_path / "gone"), pair[1]), "--prompt", "x"), "gone")
    refused(capsys, models((pair[0], str(tmp_path)), "--prompt", "x"), str(tmp_path))
    refused(capsys, ["--target", pair[0], "--strategy", "draft", "--prompt", "x"], "--draft")
    refused(capsys, models(pair, "--prompt", "x" * 512), "--prompt", "512")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(capsys, [*models(pair, "--prompt", "x"), "--device", "cuda"], "cuda")
    refused(capsys, [*models(pair, "--prompt", "x"), "--device", "abacus"], "abacus")


def test_all_prompts_are_read_before_any_is_decoded(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "x" * 600}))
    refused(capsys, models(pair, "--prompts", str(path)), "p.jsonl line 2", "600")


def test_chat_without_a_template(capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path) -> None:
    shutil.copytree(pair[0], tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    refused(capsys, models((str(tmp_path / "bare"), pair[1]), "--chat", "--prompt", "x"), "chat template", "bare")


def test_messages_that_a_chat_template_refuses(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path
) -> None:
    shutil.copytree(pair[0], tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    argv = models((str(tmp_path / "strict"), pair[1]), "--chat", "--prompts", str(tmp_path / "p.jsonl"))
    refused(capsys, argv, "p.jsonl line 1: the chat template of strict refuses the conversation: no system role")


# --- results


def test_json_file_and_pipe(capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path) -> None:
    import specker

    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "def f("}\n{"prompt": "class A:"}\n')
    assert (
        run.main(
            models(
                pair,
                *("--prompts", str(path), "--json", str(tmp_path / "o.json"), "--check"),
                *("--strategy", "draft", "--policy", "fixed"),
            )
        )
        == 0
    )
    out, err = capsys.readouterr()
    got = json.loads((tmp_path / "o.json").read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.json", "p.jsonl"]  # no temporary file
    assert set(got) == RUN | {"prompts", "total", "cpu"}  # the remark on heads of 16, which are not compiled
    assert got["sampling"] == {**dataclasses.asdict(Sampling()), "logit_bias": []}
    assert got["settings"]["page_size"] == 256 and "tree" not in got["settings"]
    assert set(got["versions"]) == {"python", "specker", "torch", "triton", "transformers"}
    assert (got["strategy"], got["target"], got["draft"]) == ("draft", "tiny-target", "tiny-draft")
    assert (got["device"], got["dtype"]) == ("cpu", "float32")
    assert [row["prompt_tokens"] for row in got["prompts"]] == [len("def f("), len("class A:")]
    assert [row["finish_reason"] for row in got["prompts"]] == ["length", "length"]
    for row in (*got["prompts"], got["total"]):
        assert set(row) - OWN == ROW | CHECKED
        seconds = row["seconds"]["total"] - row["seconds"]["prefill"]
        assert row["decode_tokens_per_second"] == pytest.approx(len(row["tokens"]) / seconds)
        assert set(row["seconds"]) >= {"prefill", "draft", "verify", "accept", "commit"}
        assert row["identical"] is True
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["ar_tokens_per_second"])
        assert len(row["speedups"]) == 2 and min(row["speedups"]) <= row["speedup"] <= max(row["speedups"])
    first, second = got["prompts"]
    assert got["total"]["tokens"] == first["tokens"] + second["tokens"]
    assert got["total"]["drafted"] == first["drafted"] + second["drafted"] > 0
    engine = specker.load(*pair, device="cpu")
    assert first["tokens"] == engine.generate("def f(", max_new_tokens=8).tokens
    assert out == f"==> {path} line 1 <==\n{first['text']}\n\n==> {path} line 2 <==\n{second['text']}\n"
    assert "\x1b" not in out + err
    for word in ("def f(", "tokens/s", "acceptance length", "verify", "speedup", "identical", "yes"):
        assert word in err


def test_a_folder_named_like_the_package(pair: tuple[str, str], tmp_path: Path) -> None:
    """Such a folder in the working directory hides the package's own attributes, not its modules."""
    (tmp_path / "specker").mkdir()
    done = warm.run("-m", "specker.run", *models(pair, "--prompt", "x"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_json_to_stdout(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, "def é(".encode() + b"\n")
    assert run.main(models(pair, "-", "--json", "-", "--temperature", "0.8", "--seed", "5")) == 0
    out, err = capsys.readouterr()
    got = json.loads(out)
    assert set(got["total"]) == ROW
    assert got["prompts"][0]["text"] in err and "def é(" in err and "tokens/s" in err
    assert run.main(models(pair, "--prompt", "def é(", "--json", "-", "--temperature", "0.8", "--seed", "5")) == 0
    assert json.loads(capsys.readouterr().out)["total"]["tokens"] == got["total"]["tokens"]


def test_strategy_ar(capsys: pytest.CaptureFixture[str], pair: tuple[str, str]) -> None:
    argv = ["--target", pair[0], "--strategy", "ar", "--device", "cpu", "--max-new-tokens", "8"]
    assert run.main([*argv, "--prompt", "x", "--json", "-"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["draft"] is None
    assert got["total"]["drafted"] == got["total"]["accepted"] == 0


@pytest.mark.parametrize(
    "make_path", [lambda tmp: tmp, lambda tmp: tmp / "no" / "o.json", lambda tmp: Path("/dev/full/x")]
)
def test_unwritable_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, make_path: Any) -> None:
    refused(capsys, ["--prompt", "x", "--json", str(make_path(tmp_path))], "--json")  # before any model is loaded
    assert list(tmp_path.iterdir()) == []


def test_samples_at_temperature_0_are_alike(capsys: pytest.CaptureFixture[str], pair: tuple[str, str]) -> None:
    said = "at temperature 0 all samples of a prompt are alike: --temperature 0.7 draws them\n"
    argv = ["--target", pair[0], "--device", "cpu", "--max-new-tokens", "2", "--prompt", "a"]
    for more, expected in ((["--samples", "2"], 1), (["--samples", "2", "--temperature", "1"], 0), ([], 0)):
        assert run.main([*argv, *more]) == 0
        assert capsys.readouterr().err.count(said) == expected


def test_batches_and_samples(capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path) -> None:
    """Batched prompts with several samples each give the same tokens, text and order as one by one."""
    lines = [{"prompt": "one"}, {"turns": ["two", "three"]}, {"prompt": "four, longer"}]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = {}
    for size in ("1", "3"):
        argv = [*models(pair, "--prompts", str(tmp_path / "p.jsonl"), "--chat", "--batch-size", size, "--check")]
        argv += ["--samples", "2", "--seed", "5", "--temperature", "0.9", "--dtype", "float64"]
        trace, out = tmp_path / f"t{size}", tmp_path / f"o{size}"
        assert run.main([*argv, "--json", str(out), "--trace", str(trace)]) == 0
        found[size] = capsys.readouterr().out, json.loads(out.read_text())
        rounds = [json.loads(line) for line in trace.read_text().splitlines()]
        rounds = [row for row in rounds if "path" in row]
        emitted = [[t for row in rounds if row["prompt"] == n for t in row["tokens"]] for n in range(8)]
        assert emitted == [row["tokens"] for row in found[size][1]["prompts"]]
    (text, one), (same, three) = found.values()
    assert text == same and [row["tokens"] for row in one["prompts"]] == [row["tokens"] for row in three["prompts"]]
    assert [row["seed"] for row in three["prompts"]] == [5, 6, 5, 5, 6, 6, 5, 6] and three["total"]["identical"]
    assert one["prompts"][0]["tokens"] != one["prompts"][1]["tokens"], "two samples are two draws"
    assert three["total"]["tokens"] == [token for row in three["prompts"] for token in row["tokens"]]


def test_a_prompt_that_can_never_fit(capsys: pytest.CaptureFixture[str], pair: tuple[str, str]) -> None:
    argv = models(pair, "--prompt", "x" * 40, "--batch-size", "2", "--kv-tokens", "256")
    refused(capsys, argv, "the prompt has 40 tokens and 8 more are asked for", "lower --max-new-tokens or raise")


def test_failure_leaves_the_old_json(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(Decoding, "run", broken)
    (tmp_path / "o.json").write_text("old")
    argv = models(pair, "--prompt", "x", "--json", str(tmp_path / "o.json"))
    monkeypatch.delenv("SPECKER_DEBUG", raising=False)
    assert run.main(argv) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("specker: error: RuntimeError: two lines") and "SPECKER_DEBUG=1" in last
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("o.json", "old")]
    monkeypatch.setenv("SPECKER_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run.main(argv)


def test_write_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    paths.write_file(link, "one")
    assert link.is_symlink() and target.read_text() == "one"
    paths.write_file(os.devnull, "gone")
    assert not Path(os.devnull).is_file()  # was not replaced
    reading, writing = os.pipe()
    paths.probe(f"/dev/fd/{writing}", "--json")  # works although its folder accepts no new files
    paths.write_file(f"/dev/fd/{writing}", "piped")
    assert os.read(reading, 9) == b"piped"
    os.close(reading)
    os.close(writing)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        paths.write_file(target, "two")
    assert target.read_text() == "one" and len(list(tmp_path.iterdir())) == 2


def test_a_check_ignores_the_eos_too(tmp_path: Path) -> None:
    target = make(tmp_path, layers=1, tokenizer=True, eos=None)
    third = specker.load(target, strategy="ar", device="cpu", dtype="float64").generate("ab", 3).tokens[2]
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "eos_token_id": third}))
    argv = ["--target", str(target), "--strategy", "lookup", "--device", "cpu", "--dtype", "float64", "--prompt", "ab"]
    assert run.main([*argv, "--max-new-tokens", "8", "--check", "--ignore-eos"]) == 0


def test_failed_check(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specker.runtime.engine import Engine

    real = Engine.compare

    def differs(ok: bool) -> Any:
        def compare(*args: Any, **options: Any) -> Any:
            return dataclasses.replace(real(*args, **options), identical=False, ok=ok, message="differs at token 3")

        return compare

    for ok, code in ((False, 1), (True, 0)):
        monkeypatch.setattr(Engine, "compare", differs(ok))
        assert run.main(models(pair, "--prompt", "x", "--check", "--json", "-")) == code
        out, err = capsys.readouterr()
        assert json.loads(out)["total"]["identical"] is False
        assert "differs at token 3" in err


def test_a_remark_is_reported(capsys: pytest.CaptureFixture[str], pair: tuple[str, str]) -> None:
    assert run.main(models(pair, "--prompt", "x", "--check", "--json", "-")) == 0
    out, err = capsys.readouterr()
    got = json.loads(out)
    assert got["cpu"].startswith("decoding is slow, because") and got["total"]["identical"] is True
    assert err.splitlines().count(got["cpu"]) == 1
    assert run.main(["--device", "cpu", "--max-new-tokens", "8", "--prompt", "x", "--json", "-"]) == 0
    assert "cpu" not in json.loads(capsys.readouterr().out)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stdout by a colour terminal. A fixture could not: pytest replaces stdout when it resumes its capture."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    return out


def test_terminal(capsys: pytest.CaptureFixture[str], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    assert run.main(models((pair[0], pair[0]), "--prompt", "def [f](", "--check")) == 0  # its own draft: all accepted
    out = screen.getvalue()
    assert capsys.readouterr().err == ""
    assert out.index("accepted draft tokens") < out.index("\x1b[2mdef [f](\x1b[0m") < out.index("tokens/s")
    assert out.count("\x1b[32m") > 1


def test_pieces_are_coloured_and_controls_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    Screen(json_to_stdout=False).pieces([("draft", True), ("own\x1b[31m\x07\x9b31m\x7f\n", False)])
    assert screen.getvalue() == "\x1b[32mdraft\x1b[0mown␛[31m␇\N{REPLACEMENT CHARACTER}31m␡\n"


def fake_stats(tokens: int, wall: float) -> Stats:
    stats = Stats(tokens=tokens, rounds=tokens // 2, drafted=tokens * 2, accepted=tokens // 2, wall=wall)
    stats.hits = [tokens // 2]
    stats.seconds["verify"] = wall / 2
    return stats


@pytest.mark.parametrize(
    ("wall", "said"),
    [
        (2.0, "2.00x of ar on one text of 400 tokens"),
        (8.0, "0.50x of ar on one text of 400 tokens: plain decoding was faster here, try --strategy ar"),
    ],
)
def test_table(capsys: pytest.CaptureFixture[str], wall: float, said: str) -> None:
    engine = SimpleNamespace(strategy="draft", title="t + d, cpu, float32", speculates=True)
    engine.trim_report, engine.remarks, engine.options = lambda stats: {}, {}, strategies.options()
    plain = Stats(tokens=400, rounds=400, wall=4.0)
    check = SimpleNamespace(identical=True, ok=True, ar=SimpleNamespace(stats=plain))
    Screen(json_to_stdout=False).table(engine, [Result([], "", fake_stats(400, wall), check)])
    out, err = capsys.readouterr()
    assert out == ""
    rows = {cells[0].strip(): [c.strip() for c in cells[1:]] for line in err.splitlines() if (cells := line.split("│"))}
    assert rows["tokens"] == ["400", "400"]
    assert rows["tokens/s"] == [f"{400 / wall:.1f}", "100.0"]
    assert rows["acceptance length"] == ["2.00", "1.00"]
    assert rows["acceptance by position"] == ["100%", ""]
    assert rows["time"] == [f"{wall:.2f} s 100%", "4.00 s 100%"]
    assert rows["verify per round"] == [f"{1e3 * wall / 2 / 200:.2f} ms  50%", ""]
    assert "accept per round" not in rows  # it took no time
    assert rows["speedup"] == [f"{4 / wall:.2f}x", "1.00x"] and rows["identical tokens"] == ["yes", ""]
    assert err.splitlines()[1] == "t + d, cpu, float32" and err.splitlines()[-1] == said


# --- exits that need a process


def start(pair: tuple[str, str], *more: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "specker.run", *models(pair), "--max-new-tokens", "4000", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target without stop ids and with room for thousands of tokens, used as its own draft."""
    folder = make(tmp_path_factory.mktemp("endless") / "endless", tokenizer=True, max_context=8192)
    edit(folder, "tokenizer_config.json", eos_token=...)
    return str(folder), str(folder)


def test_interrupt(endless: tuple[str, str], tmp_path: Path) -> None:
    with start(endless, "--prompt", "x", "--json", str(tmp_path / "o.json"), "--check") as process:
        assert process.stdout and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"tokens/s" in err and b"interrupted" in err and b"Traceback" not in err
    got = json.loads((tmp_path / "o.json").read_text())
    assert got["interrupted"] is True
    row = got["prompts"][0]
    assert 0 < len(row["tokens"]) < 4000
    assert len(row["tokens"]) == row["rounds"] + row["accepted"]
    assert not CHECKED & set(row)


def test_closed_pipe(endless: tuple[str, str]) -> None:
    with start(endless, "--prompt", "x") as process:
        assert process.stdout and process.stderr and process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == 141
    assert b"Traceback" not in err and b"error" not in err


def test_interrupt_while_loading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specker.runtime.load.load", load)
    assert run.main(["--prompt", "x"]) == 130
    assert capsys.readouterr().err == "specker: interrupted\n"


def test_not_the_main_thread(pair: tuple[str, str]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run.main(models(pair, "--prompt", "x"))))
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize(
    ("env", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_waiting_threads_spin_briefly(env: dict[str, str], spins: str) -> None:
    """Set before torch is imported; a user's own setting counts."""
    code = "import sys, os, specker; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=own | env, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == spins, done.stderr


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_a_prompt_is_encoded_once(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, chat: tuple[str]) -> None:
    """Though several samples are decoded of it, each with --check by `ar`, too."""
    from specker.runtime.text import encode as original

    encoded: list[str] = []

    def encode(target: Any, prompt: str, special: bool = True) -> list[int]:
        encoded.append(prompt)
        return original(target, prompt, special)

    monkeypatch.setattr("specker.runtime.text.encode", encode)
    asked = models(pair, *chat, "--prompt", "once", "--samples", "3", "--temperature", "1", "--max-new-tokens", "4")
    assert run.main([*asked, "--check"]) == 0
    assert len(encoded) == 1 and "once" in encoded[0]
