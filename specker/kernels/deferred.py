"""deferred: `triton` and `tl` for op files. Triton is imported, and its kernels are made, when the first one is used.

Importing Triton and reading the source of a hundred kernels takes 0.4 s, and a run on a CPU needs none of them. So
`@triton.jit` and `tl.constexpr(...)` leave a `Deferred` in a module. Triton looks up the names in a kernel's source in
the globals of its module, so the first use of any kernel makes all of them and puts them in place of the `Deferred`.
On a machine with a GPU, and in a process that has imported Triton before, kernels are made at once. Elsewhere, kernels
of others that call device functions of this package take `triton` and `tl` from variant.py, too, or import Triton
first.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Deferred", "tl", "triton"]

# The devices of NVIDIA's and AMD's drivers, and of WSL.
HAS_GPU = any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
_LOCK = threading.RLock()
_waiting: list["Deferred"] = []


class Deferred:
    """Stands for what `make` returns: a kernel or a constant. `scope`: the globals of a kernel's module."""

    def __init__(self, make: Callable[[], Any], scope: dict[str, Any] | None = None):
        self._make, self._scope, self._real, self._ready = make, scope, None, False
        _waiting.append(self)

    def real(self) -> Any:
        """What it stands for. Raises ImportError where Triton is not installed."""
        if not self._ready:
            with _LOCK:
                if self._real is None:
                    _make_all()
        return self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def __getitem__(self, grid: Any) -> Any:
        return self.real()[grid]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.real()(*args, **kwargs)


class _Annotation:
    """A type of triton.language that op files name in signatures. A call makes a constant."""

    def __init__(self, name: str):
        self.name = name

    def real(self) -> Any:
        return getattr(_language(), self.name)

    def __call__(self, value: Any) -> Any:
        def make() -> Any:
            return self.real()(value)

        return Deferred(make)


class _Language:
    constexpr, int64 = _Annotation("constexpr"), _Annotation("int64")

    def __getattr__(self, name: str) -> Any:
        return getattr(_language(), name)


class _Triton:
    def jit(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """`triton.jit`, with or without options."""

        def decorate(function: Callable[..., Any]) -> Any:
            def make() -> Any:
                _resolve(function.__annotations__)
                return importlib.import_module("triton").jit(function, **options)

            return Deferred(make, function.__globals__)

        return decorate if function is None else decorate(function)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("triton"), name)


def _language() -> Any:
    return importlib.import_module("triton.language")


def _make_all() -> None:
    """Make all kernels and constants so far, then put them where modules with kernels have a `Deferred`."""
    for each in _waiting:
        each._real = each._make()
    for each in _waiting:
        if each._scope is not None:
            _resolve(each._scope)
    for each in _waiting:
        each._ready = True
    _waiting.clear()


def _resolve(names: dict[str, Any]) -> None:
    for name, value in names.items():
        if isinstance(value, (Deferred, _Annotation)):
            names[name] = value.real()
        elif value is tl:
            names[name] = _language()
        elif value is triton:
            names[name] = importlib.import_module("triton")


triton: Any = _Triton()
tl: Any = _Language()
if "triton" in sys.modules or (HAS_GPU and find_spec("triton")):
    triton, tl = importlib.import_module("triton"), _language()
