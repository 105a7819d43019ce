"""`pytest bench --benchmark-only` runs every kernel bench; on a CPU it runs the references on small shapes."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
