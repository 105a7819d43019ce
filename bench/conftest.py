"""`pytest bench --benchmark-only` times every op on a GPU. Without one it skips them before it imports torch, unless
`--small` asks for small shapes on a CPU, which show that the benches work."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

NO_GPU = "there is no GPU here; --small runs small shapes on a CPU"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--small", action="store_true", help="run the kernel benches on a CPU, with small shapes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name.startswith("bench_") and not (parent.config.getoption("--small") or has_driver()):
        return Skipped.from_parent(parent, path=module_path)
    return None


def has_driver() -> bool:
    """Whether the driver of a GPU is installed. Where it finds no device, `common.benchmarks` skips."""
    for name in ("libcuda.so.1", "libamdhip64.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


class Skipped(pytest.Module):
    """A bench that is not imported."""

    def collect(self) -> Iterator[pytest.Item]:
        yield NeedsGpu.from_parent(self, name="gpu")


class NeedsGpu(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(NO_GPU)
