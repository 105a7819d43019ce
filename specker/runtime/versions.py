"""What a result must name to be reproduced: the versions that computed it, the machine and the options in effect."""

import contextlib
import importlib.metadata
import os
import platform
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

import specker
from specker.cpu import build
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


def machine(device: str | torch.device = "cpu") -> str:
    """The GPU's name for a CUDA device, otherwise the processor's name, the level of its instructions in cpu/build.py
    (a name such as "AMD EPYC" serves several generations) and the number of usable cores."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        model = match[1].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model} ({build.level()}), {cores} cores"


def settings(options: Options) -> dict[str, Any]:
    """The options in effect, by their names as flags; omitted ones without a default are left out."""
    parts = [
        (options, fields(Common)),
        *((own, fields(own)) for s in options.sources for own in (s.options, s.trim) if own is not None),
    ]
    values = {f.name: getattr(part, f.name) for part, names in parts for f in names}
    plain = (bool, int, float, str, tuple)
    return {name: x if isinstance(x, plain) else str(x) for name, x in values.items() if x is not None}
