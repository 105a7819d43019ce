"""Compile kernels without a GPU. This runs in a separate process, since a kernel's definition decides whether it is
interpreted or compiled.

`compilations(test_file, function)` runs `function()` of a test file there. The function calls launchers on CPU tensors;
a launch compiles for sm_90 through Triton's own cache and runs nothing. Returns {kernel: number of compilations}.
"""

import importlib.util
import json
import os
import subprocess
import sys
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


def compilations(test_file: str, function: str) -> dict[str, int]:
    return json.loads(python(__file__, test_file, function).splitlines()[-1])


class _Driver:
    """The part of a Triton driver that compiling for sm_90 needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _main(test_file: str, function: str) -> None:
    import triton

    from specker.kernels.variant import Variant

    triton.runtime.driver.set_active(_Driver())
    kernels = set()

    def compile_only(self: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        self.kernel.warmup(*arguments, grid=grid, **self.constants(90), **self.compile_options(90))
        kernels.add(self.kernel)

    Variant.__call__ = compile_only  # type: ignore[method-assign]
    spec = importlib.util.spec_from_file_location("kernels_under_test", test_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)()
    print(json.dumps({k.__name__: len(k.device_caches[0][0]) for k in kernels}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
