"""How messages call options: by their flags on a command line, by their names in Python."""

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import specker
from specker.cli import calibrate, flags, run
from specker.fields import named_by_flags, option
from specker.options import Sampling
from specker.runtime import strategies

PACKAGE = Path(specker.__file__).parent
# These run behind a command line only.
COMMANDS = {"cli", "command", "serve", "view", "zoo"}

# option -> value, the sentence in Python, the sentence on a command line
SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"batch_size": 257}, "batch_size must be between 1 and 256, got 257", "--batch-size must be between"),
    ({"tree": "abc"}, "tree must be WIDTHxDEPTH with both at least 1, such as 4x5; got 'abc'", "--tree must be"),
    ({"tree": "65x1"}, "tree='65x1' is too large", "--tree 65x1 is too large"),
    ({"vocab_keep": "some"}, "vocab_keep must be rows", "--vocab-keep must be rows"),
    ({"exit_layer": 2}, "exit_layer is for strategy del, not", "--exit-layer is for strategy del, not"),
    ({"policy": "best"}, "policy must be one of auto, ", "--policy must be one of auto, "),
    (
        {"policy": "adl"},
        "policy='adl' is for strategy dflash or diffuspec",
        "--policy adl is for strategy dflash or diffuspec",
    ),
    ({"policy": "auto", "tree": "2x2"}, "policy='auto' is for chains: leave out tree", "--policy auto is for"),
    (
        {"strategy": "ar", "draft_tokens": 2},
        "strategy 'ar' drafts nothing: tree, draft_tokens and policy do not apply",
        "strategy 'ar' drafts nothing: --tree, --draft-tokens and --policy do not apply",
    ),
    (
        {"strategy": "lookup", "lookup_file": "a", "lookup_share": "off"},
        "lookup_file keeps texts to copy, but lookup_share='off'",
        "--lookup-file keeps texts to copy, but --lookup-share off",
    ),
    ({"strategy": "lookup", "policy": "draft-and-verify"}, "policy='draft-and-verify' needs", "--policy draft-and-v"),
    ({"strategy": "del", "tree": "2x2"}, "drafts a chain: tree does", "drafts a chain: --tree does"),
    ({"strategy": "del", "exit_layer": 2}, "exit_layer is for policy='", "--exit-layer is for --policy "),
    ({"strategy": "easyspec", "layer_parallel": "x"}, "layer_parallel must be a width", "--layer-parallel must be a"),
    ({"strategy": "easyspec", "layer_parallel": "[[1]]"}, "layer_parallel must hold", "--layer-parallel must hold"),
    ({"strategy": "diffuspec", "adl": "9"}, "adl must be SHORTEST-LONGEST", "--adl must be SHORTEST-LONGEST"),
    (
        {"strategy": "diffuspec", "cps": "off", "ngram": "f"},
        "cps='off' disables the search: leave out ngram",
        "--cps off disables the search: leave out --ngram",
    ),
    (
        {"strategy": "diffuspec", "tree": "2x2"},
        "tree does not apply, but cps='tree' does",
        "--tree does not apply, but --cps tree does",
    ),
    (
        {"strategy": "diffuspec", "policy": "adl", "draft_tokens": 2},
        "policy='adl' chooses the block's length: adl bounds it, draft_tokens does not apply",
        "--policy adl chooses the block's length: --adl bounds it, --draft-tokens does not apply",
    ),
    (
        {"strategy": "diffuspec", "policy": "plus-minus-one", "cps": "tree"},
        "policy='plus-minus-one' is for chains: leave out cps='tree'",
        "--policy plus-minus-one is for chains: leave out --cps tree",
    ),
    ({"strategy": "diffuspec", "policy": "draft-and-verify"}, "policy='draft-", "--policy draft-and-verify ends"),
    # refusals of the models
    ({"target": ""}, "target is empty: give a folder", "--target is empty: give a folder"),
    ({"draft": "somewhere"}, "draft needs target: the bundled", "--draft needs --target: the bundled"),
    ({"strategy": "ar", "draft": "x"}, "leave out draft", "leave out --draft"),
    ({"max_context": 4096}, "max_context must be between 1 and this", "--max-context must be between 1 and this"),
    ({"strategy": "del", "policy": "fixed", "exit_layer": 99}, "exit_layer must be below", "--exit-layer must be"),
    (
        {"strategy": "easyspec", "layer_parallel": "[[0],[1]]"},
        "layer_parallel='[[0],[1]]' has 2 layers, but",
        "--layer-parallel [[0],[1]] has 2 layers, but",
    ),
    (
        {"tp": 2, "dp": 3},
        "tp=2 times dp=3 is 6, but this job has 1 process",
        "--tp 2 times --dp 3 is 6, but this job has 1 process",
    ),
    ({"kv_dtype": "int4"}, "kv_dtype must be one of float32, bf", "--kv-dtype must be one of float32, bf"),
    (
        {"kv_dtype": "int8", "dtype": "float64"},
        "kv_dtype='int8' needs a run in float32 or bfloat16: K/V of a run in float64 is in float64",
        "--kv-dtype int8 needs a run in float32 or bfloat16: K/V of a run in float64 is in float64",
    ),
    ({"draft_ranks": 2}, "draft_ranks=2 is more than the 1 ranks of tp", "--draft-ranks 2 is more than the 1"),
    (
        {"strategy": "easyspec", "draft_layout": "both"},
        "draft_layout='both' needs several ranks that draft (tp, draft_ranks)",
        "--draft-layout both needs several ranks that draft (--tp, --draft-ranks)",
    ),
    # refusals of a request
    ({"temperature": -1.0}, "temperature must be 0 or at least 1e-6", "--temperature must be 0 or"),
    ({"top_p": 1.5}, "top_p must be in (0, 1]", "--top-p must be in (0, 1]"),
    ({"stop": ""}, "stop must be a string or a list of strings", "--stop must be a string or a list of strings"),
    ({"seed": -1}, "seed must be in [0, 2**64)", "--seed must be in [0, 2**64)"),
    (
        {"batch_size": 2, "kv_tokens": 1, "max_new_tokens": 500},
        "lower max_new_tokens or raise kv_tokens",
        "lower --max-new-tokens or raise --kv-tokens",
    ),
]


@pytest.mark.parametrize(("given", "python", "command"), SHARED, ids=lambda x: x if isinstance(x, str) else "")
def test_one_refusal_two_spellings(
    given: dict[str, Any], python: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("max_new_tokens", "stop", *(f.name for f in fields(Sampling)))
    request = {name: value for name, value in given.items() if name in asked}
    loading = {name: value for name, value in given.items() if name not in request}
    with pytest.raises(ValueError) as caught:
        specker.load(device="cpu", **loading).generate("def fib", **request)
    assert python in str(caught.value) and "--" not in str(caught.value).partition("torchrun")[0]

    argv = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert run.main(["--device", "cpu", "--prompt", "def fib", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and command in err.splitlines()[-1]
    assert not any(f"{name}=" in err for name in given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree": 5}, "tree must be WIDTHxDEPTH with both at least 1, such as 4x5; got 5"),
        ({"tree": (4, 5)}, r"tree must be .* got \(4, 5\)"),
        ({"vocab_keep": []}, r"vocab_keep must be .* got \(\)"),
        ({"strategy": 5}, "strategy must be a name, a Strategy or a list of these, got 5"),
        ({"strategy": "diffuspec", "adl": 5}, "adl must be .* got 5"),
        ({"strategy": "diffuspec", "adl": (8,)}, r"adl must be .* got \(8,\)"),
        ({"strategy": "diffuspec", "adl": ("a", "b")}, r"adl must be .* got \('a', 'b'\)"),
        ({"strategy": "easyspec", "layer_parallel": {1}}, "layer_parallel must be .* got "),
        ({"batch_size": "2"}, "batch_size must be a whole number, got '2'"),
        ({"load": 5}, "load must be a string, got 5"),
    ],
)
def test_values_of_another_type(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        strategies.options(**options)


def test_models_of_another_type() -> None:
    for name in ("target", "draft"):
        with pytest.raises(ValueError, match=f"{name} must be a folder, a GGUF file or a hub id, got 5"):
            specker.load(**{name: 5})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown device '\[\]': use cpu or cuda"):
        specker.load(device=[])  # type: ignore[arg-type]


def test_none_is_no_value_of_a_request() -> None:
    with pytest.raises(ValueError, match="seed must be a whole number, got None"):
        Sampling(seed=None)  # type: ignore[arg-type]
    assert strategies.options(batch_size=None) == strategies.options()  # but leaves out an option of an engine


def test_an_option_of_python_alone_has_no_spelling_as_a_flag() -> None:
    for given, said in (
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"graphs": "maybe"}, "graphs must be one of on, off, got 'maybe'"),
    ):
        with named_by_flags(), pytest.raises(ValueError, match=f"^{said}$"):
            strategies.options(**given)
    with named_by_flags():
        assert (option("page_size", 8), option("kv_tokens", 8)) == ("page_size=8", "--kv-tokens 8")


def test_the_environment_sets_graphs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For a whole program, unless it names the option itself."""
    assert flags.parse([])[1].graphs is None
    monkeypatch.setenv("SPECKER_GRAPHS", "on")
    assert flags.parse([])[1].graphs == "on" and strategies.options(graphs="off").graphs == "off"
    with specker.load(device="cpu", strategy="ar", max_context=64) as engine:
        assert engine.loop.fixed
    monkeypatch.setenv("SPECKER_GRAPHS", "1")
    assert run.main(["--device", "cpu", "--prompt", "x"]) == 2
    said = "specker: error: the environment variable SPECKER_GRAPHS must be on or off, got '1'\n"
    assert capsys.readouterr() == ("", said)


def test_a_command_ends_with_its_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    """After a refusal and after help, for each command."""
    count = ["--text", "x", "--out", "x.safetensors", "--batch-size", "0"]
    for main, argv, said in (
        (run.main, ["--vocab-keep", "0"], "--vocab-keep must be rows"),
        (calibrate.main, count, "--batch-size must be between"),
    ):
        assert main(argv) == 2
        assert said in capsys.readouterr().err
        assert option("vocab_keep", 1) == "vocab_keep=1"
        with pytest.raises(SystemExit):
            main(["--help"])
        assert option("vocab_keep", "0.5") == "vocab_keep='0.5'"


def test_the_library_writes_no_flags() -> None:
    """Its strings take the spelling of an option from `option`. Help texts belong to the command line, and a whole
    command is one in Python, too."""
    paths = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in COMMANDS]
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text())
        free: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "opt":
                free.update(map(id, ast.walk(node)))
            if isinstance(node, ast.Expr):
                free.add(id(node.value))  # a docstring
        texts = [str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in free]
        flags = [text for text in texts if re.search(r"(?<![\w-])--[a-z]", text)]
        assert [text for text in flags if not re.search("python -m|torchrun|specker calibrate", text)] == [], path
