"""A user's type checker knows what `specker.load` takes and returns."""

import inspect
import re
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import specker
from specker.arguments import EachSampling, LoadOptions, SamplingOptions
from specker.config import Common, Sampling
from specker.runtime.strategies import STRATEGIES, TrimOptions

ROOT = Path(__file__).parents[1]
USER = """\
import specker

engine = specker.load("a", strategy="lookup", ngram_least=2, tree="2x6", batch_size=4, quantize="int8")
reveal_type(engine)
reveal_type(engine.max_context)
reveal_type(specker.zoo.path("code-draft"))
specker.load(batchsize=4)
specker.load(batch_size="4")
specker.load(reduce="slow")
engine.generatee("x")
reveal_type(engine.generate("x", temperature=0.5))
reveal_type(engine.generate([1, 2], 5, seed=3))
texts = ["a", "b"]
reveal_type(engine.generate(texts, [3, 4], temperature=[0.0, 0.5]))
reveal_type(engine.generate([[1, 2], [3]]))
engine.generate("x", temprature=0.5)
"""


def test_the_typed_options_are_the_options():
    owners = [Common, TrimOptions, *(s.options for s in STRATEGIES.values() if s.options is not None)]
    want = {}
    for cls in owners:
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            kinds = set(typing.get_args(hints[f.name])) or {hints[f.name]}
            if typing.get_origin(hints[f.name]) is tuple:
                kinds = {hints[f.name]}
            choices = f.metadata["choices"]
            if choices:
                kinds = (kinds - {str}) | set(choices)
            want[f.name] = kinds | ({str} if f.metadata["parse"] else set())
    del want["strategy"]  # a parameter
    assert {name: flat(kind) for name, kind in typing.get_type_hints(LoadOptions).items()} == want


def flat(kind: object) -> set[object]:
    """The members of a union, and the values of a Literal among them."""
    if typing.get_origin(kind) is typing.Literal:
        return set(typing.get_args(kind))
    if typing.get_origin(kind) in (tuple, None):
        return {kind}
    return set().union(*map(flat, typing.get_args(kind)))


def test_the_typed_sampling_is_the_sampling():
    hints = typing.get_type_hints(Sampling)
    assert typing.get_type_hints(SamplingOptions) == hints
    assert {name: typing.get_args(kind)[0] for name, kind in typing.get_type_hints(EachSampling).items()} == hints


def test_load_takes_what_the_loader_takes():
    """The two signatures have the same parameters, in the same order."""
    from specker.runtime.load import load

    ours, theirs = (inspect.signature(f).parameters.values() for f in (specker.load, load))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_a_users_mypy_sees_the_types(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    # The options of `make lint`, whose cache then holds the package's types; with others mypy would check it again.
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "user.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    told: dict[int, str] = {}
    for line, said in re.findall(r"user\.py:(\d+): \w+: (.*)", done.stdout):
        told[int(line)] = told.get(int(line), "") + said
    assert told.keys() == {*range(4, 13), 14, 15, 16}, done.stdout + done.stderr
    assert '"specker.runtime.engine.Engine"' in told[4] and '"int"' in told[5] and '"pathlib.Path"' in told[6]
    assert 'Unexpected keyword argument "batchsize"' in told[7] and '"batch_size"' in told[8]
    assert "'slow'" in told[9] and 'no attribute "generatee"' in told[10]
    assert all("specker.runtime.text.Generation" in told[n] for n in (11, 12)), told
    assert all("list[specker.runtime.text.Generation]" in told[n] for n in (14, 15)), told
    assert "temprature" in told[16]
