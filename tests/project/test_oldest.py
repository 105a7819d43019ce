"""scripts/oldest.py: the constraints of `make oldest`."""

import tomllib
from pathlib import Path

import pytest

from scripts import oldest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_lower_bound_is_tested(command_line, capsys):
    """Of the package and of the extras that its users install."""
    command_line(["scripts/oldest.py", "2.11.0"])
    oldest.main()
    found = dict(line.split("==") for line in capsys.readouterr().out.splitlines())
    extras = PROJECT["optional-dependencies"]
    bounds = {}
    for line in PROJECT["dependencies"] + extras["gguf"] + extras["serve"]:  # an extra may ask for a newer version
        name, _, bound = line.partition(";")[0].partition(">=")
        bounds[name] = bound.strip()
    assert found == bounds | {"torch": "2.11.0"}


@pytest.mark.parametrize("line", ["numpy", "numpy<3", "numpy==2.0"])
def test_a_requirement_without_a_lower_bound_is_refused(line):
    with pytest.raises(ValueError, match=f"pyproject.toml has '{line}', expected a lower bound: NAME>=VERSION"):
        oldest.oldest([line])
