"""Run what needs Triton's compiler and no GPU. This happens in a separate process, since a kernel's definition decides
whether it is interpreted or compiled.

`compilations(test_file)` says what `launches()` of a test file would compile, and `keys()` which entries of Triton's
cache all test files' launches would read. Both call launchers on CPU tensors; Triton specialises each launch for an
architecture as ever, and neither compiles nor runs it.
"""

import hashlib
import importlib.util
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import warm

ROOT = Path(__file__).parents[2]
PATHS = (str(ROOT), *(str(ROOT / folder) for folder in ("simulator", "tests", "tests/support")))


def python(*command: str) -> str:
    """The output of `python command...` without the interpreter; AssertionError with stdout and stderr if it fails."""
    done = warm.run(
        *command,
        env={"PYTHONPATH": os.pathsep.join(PATHS)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compilations(test_file: str) -> dict[str, int]:
    """{kernel: number of compilations}."""
    return _of_all_files(90)[str(Path(test_file).resolve().relative_to(ROOT))]


def keys(arch: int) -> dict[str, list[tuple[str, str]]]:
    """{kernel of specker: (key of a launch, key of `make static`'s compilation) of each variant} in Triton's cache. On
    AMD the launches' tensors take less than 2 GiB."""
    return _of_all_files(arch)["keys"]


@cache
def _of_all_files(arch: int) -> dict[str, Any]:
    """In one process, whose imports take longer than all the launches."""
    files = [path for path in sorted(ROOT.glob("tests/**/*.py")) if "\ndef launches(" in path.read_text("utf-8")]
    return json.loads(python(__file__, str(arch), *(str(path.relative_to(ROOT)) for path in files)).splitlines()[-1])


class _Driver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def _main(arch: int, test_files: list[str]) -> None:
    import triton

    from bench.builds import build
    from specker.kernels.variant import AMD, Variant

    found: dict[str, set[str]] = {}
    sources: list[Any] = []
    pairs: dict[str, dict[str, tuple[str, str]]] = {}

    def specialise(self: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        static = build(self, arch, below_2_gib=arch in AMD)
        triton.runtime.driver.set_active(_Driver(static.target))
        sources.clear()
        self.kernel.warmup(*arguments, grid=grid, **self.constants(arch), **self.compile_options(arch))
        if not self.kernel.fn.__module__.startswith("specker."):
            return
        known = pairs.setdefault(self.kernel.__name__, {})
        if self.name not in known:
            known[self.name] = _key(*sources), _key(static.source(), static.target, static.options)

    def instead_of_compiling(*, key: str, fn: Any, **_: Any) -> bool:
        found.setdefault(fn.name, set()).add(key)
        return False

    def compiled(source: Any, target: Any, options: dict[str, Any]) -> None:
        sources[:] = source, target, options

    Variant.__call__ = specialise  # type: ignore[method-assign]
    triton.knobs.runtime.jit_cache_hook = instead_of_compiling
    triton.compiler.compile = compiled
    counts: dict[str, Any] = {}
    for n, test_file in enumerate(test_files):
        found.clear()
        spec = importlib.util.spec_from_file_location(f"kernels_under_test_{n}", test_file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.launches()
        counts[test_file] = {name: len(keys) for name, keys in found.items()}
    print(json.dumps({**counts, "keys": {name: list(known.values()) for name, known in pairs.items()}}))


def _key(source: Any, target: Any, options: dict[str, Any]) -> str:
    """The key of a compilation in Triton's cache."""
    from triton.compiler.compiler import get_cache_key, make_backend

    backend = make_backend(target)
    return hashlib.sha256(get_cache_key(source, backend, backend.parse_options(dict(options)), {}).encode()).hexdigest()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
