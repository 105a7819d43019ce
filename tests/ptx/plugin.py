"""A pytest plugin that runs the kernels' own tests on compiled PTX instead of Triton's interpreter:

    PYTHONPATH=.:simulator:tests:tests/support python -m pytest -p ptx.plugin -m "gpu or not gpu" \
        tests/kernels/test_kv_calibrate.py

With "gpu" first in -m, tests/conftest.py leaves the interpreter off. PTX_ARCH is 80 or, by default, 90. A test also
fails where its launches have problems. Choose the tests with -k: those of the interpreter or the compiler itself
and those on a CUDA device do not work here.
"""

import os
from collections.abc import Iterator

import pytest

from ptx.launches import simulated

_launched: list[str] = []  # names of kernels, for the summary


@pytest.fixture(autouse=True)
def _on_ptx() -> Iterator[None]:
    with simulated(int(os.environ.get("PTX_ARCH", "90"))) as simulation:
        yield
    _launched.extend(launch.name for launch in simulation.launches)
    assert not simulation.problems(), "\n".join(simulation.problems())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"executed PTX: {len(_launched)} launches of {', '.join(sorted(set(_launched)))}")
