"""scripts/oldest.py: the constraints of `make oldest`."""

import sys
import tomllib
from pathlib import Path

import pytest

from scripts import oldest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def printed(monkeypatch, capsys, *argv, platform="linux", there=False):
    asked = []
    monkeypatch.setattr(sys, "argv", ["scripts/oldest.py", *argv])
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(oldest, "can_be_had", lambda version: asked.append(version) or there)
    oldest.main()
    out, err = capsys.readouterr()
    return dict(line.split("==") for line in out.splitlines()), asked, err


def test_every_lower_bound_is_tested(monkeypatch, capsys):
    """Of the package and of the extras that its users install."""
    found, asked, err = printed(monkeypatch, capsys, "2.11.0")
    lines = PROJECT["dependencies"] + [
        line for name in ("gguf", "serve") for line in PROJECT["optional-dependencies"][name]
    ]
    assert not asked and not err
    bounds = {}
    for line in lines:  # an extra may ask for a newer version than the package
        name, _, bound = line.partition(";")[0].partition(">=")
        bounds[name] = bound.strip()
    assert found == bounds | {"torch": "2.11.0"}


def test_torch_is_a_build_for_cpus_or_the_pinned_one(monkeypatch, capsys):
    bound = next(line for line in PROJECT["dependencies"] if line.startswith("torch>=")).removeprefix("torch>=")
    found, asked, err = printed(monkeypatch, capsys, there=True)
    assert found["torch"] == f"{bound}+cpu" == asked[0] and not err
    found, _, err = printed(monkeypatch, capsys)
    pinned = found["torch"]
    assert f"torch=={pinned}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert err == (
        f"oldest: no build of torch {bound} for CPUs can be had here, so torch {pinned} of constraints.txt is tested; "
        f"make oldest TORCH={bound}.0 takes PyPI's build, gigabytes of CUDA included\n"
    )
    found, asked, err = printed(monkeypatch, capsys, platform="darwin")
    assert found["torch"] == bound and not asked and not err


@pytest.mark.parametrize("line", ["numpy", "numpy<3", "numpy==2.0"])
def test_a_requirement_without_a_lower_bound_is_refused(line):
    with pytest.raises(ValueError, match=f"pyproject.toml has '{line}', expected a lower bound: NAME>=VERSION"):
        oldest.oldest([line])
