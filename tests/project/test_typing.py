"""A user's type checker knows what `specker.load` takes and returns."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import typing
import venv
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest

import specker
from specker.arguments import EachOption, LoadOptions, RequestOptions
from specker.options import Common, Params, Sampling
from specker.runtime.strategies import STRATEGIES, TrimOptions

ROOT = Path(__file__).parents[2]
USER = """\
import specker

engine = specker.load("a", strategy="lookup", lookup_share="off", tree="2x6", batch_size=4, quantize="int8")
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
import specker_models
reveal_type(specker_models.__version__)
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


def test_the_typed_options_of_a_request_are_its_parameters():
    """Besides those that are arguments by themselves. Of several prompts each may have its own, but for `stop_ids` and
    `logit_bias`, which also takes a mapping."""
    drawn, own = typing.get_type_hints(Sampling), {f.name for f in fields(Params)}
    hints, each = typing.get_type_hints(RequestOptions), typing.get_type_hints(EachOption)
    assert drawn.pop("logit_bias") == tuple[tuple[int, float], ...] and hints["logit_bias"] == each["logit_bias"]
    assert {name: hints[name] for name in drawn} == drawn
    assert {*hints} == {*each} == {*drawn, "logit_bias"} | own - {"sampling", "max_new_tokens", "stop"}
    assert {name: typing.get_args(each[name])[0] for name in drawn} == drawn


def test_load_takes_what_the_loader_takes():
    """The two signatures have the same parameters, in the same order."""
    from specker.runtime.load import load

    ours, theirs = (inspect.signature(f).parameters.values() for f in (specker.load, load))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The python of an environment where a clone is installed for development (`pip install -e . -e ./models`)."""
    clone, folder = tmp_path / "clone", tmp_path / "venv"
    large = shutil.ignore_patterns("*.safetensors", "*.jsonl", "__pycache__")
    for project, package in ((ROOT, "specker"), (ROOT / "models", "specker_models")):
        target = clone / project.relative_to(ROOT)
        shutil.copytree(project / package, target / package, ignore=large)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(project / name, target)
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    build = "import sys; from setuptools.build_meta import build_editable; print(build_editable(sys.argv[1]))"
    for project in (clone, clone / "models"):
        command = [sys.executable, "-c", build, str(tmp_path)]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
        with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
            wheel.extractall(site)
    return folder / "bin" / "python"


def test_a_users_mypy_sees_the_types(tmp_path: Path, environment: Path) -> None:
    """Outside of the clone, by what the installation leaves in the environment."""
    pytest.importorskip("mypy")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(environment), "user.py"]
    env = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(command, cwd=tmp_path / "user", env=env, capture_output=True, text=True)
    told: dict[int, str] = {}
    for line, said in re.findall(r"user\.py:(\d+): \w+: (.*)", done.stdout):
        told[int(line)] = told.get(int(line), "") + said
    assert told.keys() == {*range(4, 13), 14, 15, 16, 18}, done.stdout + done.stderr
    assert '"specker.runtime.engine.Engine"' in told[4] and '"int"' in told[5] and '"pathlib.Path"' in told[6]
    assert 'Unexpected keyword argument "batchsize"' in told[7] and '"batch_size"' in told[8]
    assert "'slow'" in told[9] and 'no attribute "generatee"' in told[10]
    assert all("specker.runtime.text.Generation" in told[n] for n in (11, 12)), told
    assert all("list[specker.runtime.text.Generation]" in told[n] for n in (14, 15)), told
    assert "temprature" in told[16] and '"str"' in told[18]


def test_an_installed_clone_hides_no_module(tmp_path: Path, environment: Path) -> None:
    """The environment finds the clone's folder after all others, and its folders beside the package are no packages."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {"specker"}
    (tmp_path / "user" / "bench").mkdir(parents=True)
    (tmp_path / "user" / "bench" / "own.py").write_text("")
    (tmp_path / "clone" / "bench").mkdir()
    (tmp_path / "clone" / "bench" / "own.py").write_text("raise ImportError")
    script = "import sys, bench.own, specker; print(bench.own.__file__, specker.__file__, *sys.path[-2:])"
    done = subprocess.run([environment, "-c", script], cwd=tmp_path / "user", capture_output=True, text=True)
    clone = tmp_path / "clone"
    own = tmp_path / "user" / "bench" / "own.py"
    assert done.stdout.split() == [str(x) for x in (own, clone / "specker/__init__.py", clone, clone / "models")]
