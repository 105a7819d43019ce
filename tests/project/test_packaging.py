"""The distributions: one version everywhere, and light imports."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import specker_models
import yaml

import specker
from specker import extras

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("scripts_dist", ROOT / "scripts" / "dist.py")
assert spec is not None and spec.loader is not None
dist = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dist)


def test_one_version_everywhere():
    """Of the package, the models, the citation and the newest entry of the changelog; with one date."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entries = re.findall(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert specker.__version__ == specker_models.__version__ == citation["version"] == entries[0][0]
    assert citation["date-released"] == entries[0][1]
    assert [date for _, date in entries] == sorted((date for _, date in entries), reverse=True)
    required = {"cff-version", "message", "title", "authors"}  # of schema 1.2.0
    assert required <= citation.keys() and citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_checkout_is_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 60 << 20


@pytest.mark.slow
def test_built_distributions_work_outside_the_repository(tmp_path):
    wheels = dist.build(tmp_path)
    assert [len(list(tmp_path.glob(f"*.{kind}"))) for kind in ("whl", "tar.gz")] == [2, 2]
    for wheel in wheels:
        dist.check_contents(wheel)
    dist.check_installed(wheels)


SPECKER = (
    "specker_decoding-0.2.0-py3-none-any.whl",
    (
        "specker/__init__.py",
        "specker/py.typed",
        "specker_decoding-0.2.0.dist-info/METADATA",
        *(f"specker/cpu/csrc/{path.name}" for path in sorted((ROOT / "specker" / "cpu" / "csrc").iterdir())),
    ),
)
MODELS = "specker_models-0.2.0-py3-none-any.whl", (*sorted(dist.PYTHON), "specker_models/code-draft/config.json")


@pytest.mark.parametrize(
    ("wheel", "more", "error"),
    [
        (SPECKER, (), None),
        (MODELS, (), None),
        (SPECKER, ("tests/cli/test_cli.py", "bench/e2e.py"), "holds bench, tests, expected specker alone"),
        (SPECKER, ("specker/zoo/code-draft/model.safetensors",), "bundled models belong to specker-models"),
        (MODELS, ("specker_models/train.py",), "holds specker_models/train.py, expected data"),
        ((SPECKER[0], SPECKER[1][:1]), (), "lacks py.typed"),
        ((SPECKER[0], SPECKER[1][:-1]), (), "lacks specker/cpu/csrc/vector.h"),
    ],
)
def test_contents_of_a_wheel(tmp_path, wheel, more, error):
    name, files = wheel
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        for file in (*files, *more):
            archive.writestr(file, "")
    if error is None:
        dist.check_contents(tmp_path / name)
    else:
        with pytest.raises(ValueError, match=error):
            dist.check_contents(tmp_path / name)


def test_a_wheel_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(dist.MOST, "specker", 100)
    with zipfile.ZipFile(tmp_path / SPECKER[0], "w") as archive:
        for file in SPECKER[1]:
            archive.writestr(file, "")
    with pytest.raises(ValueError, match="bytes, expected at most 100"):
        dist.check_contents(tmp_path / SPECKER[0])


HEAVY = ("transformers", "tokenizers", "huggingface_hub", "prompt_toolkit")


def test_heavy_packages_are_imported_only_when_they_are_used():
    modules = "specker", "specker.kernels", "specker.runtime", "specker.runtime.strategies", "specker.run"
    shown = f"print(*sorted({{*{HEAVY!r}}} & set(sys.modules)))"
    code = "\n".join(["import sys", *(f"import {module}; {shown}" for module in modules)])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n" * len(modules)


def test_the_ops_import_in_a_second_beside_torch():
    """CPU time of a fresh process, since other tests may run on the same cores."""
    code = "import torch; from time import process_time as now; t = now(); import specker.kernels; print(now() - t)"
    assert float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)) < 1.0


def test_messages_name_the_packages_of_the_extras():
    """The distribution has a name of its own, which an extra of it needs, and the messages need none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] != "specker", "on PyPI this is another project"
    for name, packages in extras.EXTRAS.items():
        assert list(packages) == project["optional-dependencies"][name]
        assert extras.install(name).split() == ["pip", "install", *map(shlex.quote, packages)]
        assert extras.missing(name) == []
    own = *ROOT.glob("specker/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"
    assert not [path for path in own if re.search(r"pip install '?specker", path.read_text(encoding="utf-8"))]


def test_a_package_that_is_too_old_is_missing(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "gguf", ("gguf>=0.18", "transformers>=999.1"))
    assert extras.missing("gguf") == ["transformers"]
