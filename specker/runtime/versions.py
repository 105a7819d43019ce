"""What a result must name to be reproduced: the versions that computed it and the options in effect."""

import contextlib
import importlib.metadata
import platform
from dataclasses import fields
from functools import cache
from typing import Any

import specker
from specker.options import Common, Options


@cache
def versions() -> dict[str, str]:
    """The versions of Python, specker and the packages that compute."""
    found = {"python": platform.python_version()}
    # A folder `specker` in the working directory may hide the package itself, but not its modules.
    found |= {"specker": specker.__version__} if hasattr(specker, "__version__") else {}
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def settings(options: Options) -> dict[str, Any]:
    """The options in effect, by their names as flags; omitted ones without a default are left out."""
    parts = [
        (options, fields(Common)),
        *((own, fields(own)) for s in options.sources for own in (s.options, s.trim) if own is not None),
    ]
    values = {f.name: getattr(part, f.name) for part, names in parts for f in names}
    plain = (bool, int, float, str, tuple)
    return {name: x if isinstance(x, plain) else str(x) for name, x in values.items() if x is not None}
