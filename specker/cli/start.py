"""A faster start of a command that decodes, by leaving out what its process never needs."""

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

METAS = "torch._meta_registrations"  # operators for tensors without values, which torch's compiler traces
COMPILER = "torch._dynamo"
ARENA_MAX = -8  # M_ARENA_MAX in malloc.h
ARENAS = 2  # what locks cost with so few was too little to measure


def quicken() -> None:
    """From here on, until `loaded`, Python collects no garbage: importing torch makes a million objects that stay, and
    looking through them takes a tenth of a start. torch's operators for its compiler, which take 0.2 s, are not
    imported before the compiler is. To be called before torch is imported, in a process of specker's own."""
    gc.disable()
    sys.meta_path.insert(0, _Finder())


def loaded() -> None:
    """Collect garbage again after `quicken`, but never look through what was made so far."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        atexit.register(_unfreeze)


def share_arenas() -> None:
    """Let all threads take memory from two of glibc's arenas. By default a thread that allocates may get one of its
    own, and what a request has freed stays in its arena. To be called before threads start. Does nothing with other C
    libraries, or if the user has set the number."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(ARENA_MAX, ARENAS)


def _unfreeze() -> None:
    """Triton reports its objects as leaks if the interpreter does not collect them at exit."""
    if "triton" in sys.modules:
        gc.unfreeze()


class _Finder:
    """Finds METAS as a module that is executed when one of its names is used, or before COMPILER is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER and isinstance(metas := sys.modules.get(METAS), _Later):
            metas.execute()
        spec = PathFinder.find_spec(name, path, target) if name == METAS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> "_Later":
        return _Later(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """`_Later.execute` does, later."""


class _Later(ModuleType):
    def execute(self) -> None:
        spec = self.__spec__
        assert spec is not None and isinstance(spec.loader, _Loader)
        self.__loader__ = spec.loader = spec.loader.loader
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and inspect look for these
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.execute()
        return getattr(self, name)
