"""A launch through `Variant.__call__` passes on what Triton's own launch would: the same compiled kernel, grid, stream,
device and arguments."""

import json
import os
import shutil
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).parents[2]
NAMES = ["first", "a", "b", "none", "wide", "device", "again", "hook"]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler builds the libcuda that does nothing")


@pytest.fixture(scope="module")
def found():
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    done = warm.run(str(ROOT / "tests" / "support" / "launch_worker.py"), *NAMES, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_is_tritons_own(found, name):
    *ours, tritons = found["launches"][name]
    assert len(ours) == 3 and all(launch == tritons for launch in ours)
    grid, stream, _, arguments, device = tritons
    assert grid == [7, 2, 1] and device == int(name == "device") and stream == 100 + device
    assert arguments == [
        4096 + 4 * (name == "a"),
        None if name == "none" else 8192 + 4 * (name == "b"),
        12288,
        1 << 31 if name == "wide" else 1000,
        2.0,
    ]


def test_what_triton_specialises_selects_the_kernel(found):
    kernel = {name: launches[0][2] for name, launches in found["launches"].items()}
    assert kernel["first"] == kernel["b"] == kernel["again"] == kernel["hook"]
    assert len({kernel[name] for name in ("first", "a", "none", "wide")}) == 4
    assert found["compiled"] == 5  # these four, and one for the second device


def test_a_profiler_hears_every_launch(found):
    assert found["hooked"] == 4


def test_a_launch_follows_the_switches_of_dependent_launches(found):
    """The A/B of `make gpu` and tests/kernels/test_delay.py switch them within one process."""
    kernel = {name: set(functions) for name, functions in found["switched"].items()}
    assert all(len(functions) == 1 for functions in kernel.values())
    assert kernel["on"] == kernel["on again"] == kernel["another is late"] and kernel["off"] == kernel["off again"]
    assert len(kernel["on"] | kernel["off"] | kernel["late"]) == 3
