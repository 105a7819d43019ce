"""Run what needs Triton's compiler and no GPU. This happens in a separate process, since a kernel's definition decides
whether it is interpreted or compiled.

`compilations(test_file)` says what `launches()` of a test file would compile. It calls launchers on CPU tensors; Triton
specialises each launch for sm_90 as ever, and neither compiles nor runs it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def python(*command: str) -> str:
    """The output of `python command...` without the interpreter; AssertionError with stdout and stderr if it fails."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compilations(test_file: str) -> dict[str, int]:
    """{kernel: number of compilations}."""
    return _of_all_files()[str(Path(test_file).resolve().relative_to(ROOT))]


@cache
def _of_all_files() -> dict[str, dict[str, int]]:
    """In one process, whose imports take longer than all the launches."""
    files = [path for path in sorted(ROOT.glob("tests/**/*.py")) if "\ndef launches(" in path.read_text("utf-8")]
    return json.loads(python(__file__, *(str(path.relative_to(ROOT)) for path in files)).splitlines()[-1])


class _Driver:
    """The part of a Triton driver that compiling for sm_90 needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _main(test_files: list[str]) -> None:
    import triton

    from specker.kernels.variant import Variant

    triton.runtime.driver.set_active(_Driver())
    found: dict[str, set[str]] = {}

    def specialise(self: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        self.kernel.warmup(*arguments, grid=grid, **self.constants(90), **self.compile_options(90))

    def instead_of_compiling(*, key: str, fn: Any, **_: Any) -> bool:
        found.setdefault(fn.name, set()).add(key)
        return True

    Variant.__call__ = specialise  # type: ignore[method-assign]
    triton.knobs.runtime.jit_cache_hook = instead_of_compiling
    counts = {}
    for n, test_file in enumerate(test_files):
        found.clear()
        spec = importlib.util.spec_from_file_location(f"kernels_under_test_{n}", test_file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.launches()
        counts[test_file] = {name: len(keys) for name, keys in found.items()}
    print(json.dumps(counts))


if __name__ == "__main__":
    _main(sys.argv[1:])
