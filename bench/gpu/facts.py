"""What torch and Triton say about this machine, as one JSON object on stdout: the fields of preflight.Facts.

A process of its own, since asking for a GPU's properties makes a CUDA context, which would take memory beside the parts
that measure. It imports nothing of specker until every module that the parts need is there.
"""

import ctypes
import hashlib
import importlib
import json
import re
import shutil
import sys
import sysconfig
import warnings
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEEDED = ("torch", "triton", "transformers", "safetensors", "rich", "pytest")  # modules that the parts import
LOADED = ("torch", "triton")  # those that may be there and not fit the system
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    print(json.dumps(facts()))


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {
        "executable": sys.executable,
        "missing": [],
        "versions": {"python": sys.version.split()[0]},
    }
    for name in NEEDED:
        try:
            if find_spec(name) is None:
                found["missing"].append(name)
            elif name in LOADED:
                importlib.import_module(name)
        except Exception as error:  # a library that does not load raises whatever it likes
            found["missing"].append(f"{name} that loads ({error})")
    found["versions"] |= {name: installed(name) for name in NEEDED}
    found["required"] = required()
    found["pinned_triton"] = pinned(requires_of("torch"), "triton")
    found["driver_cuda"] = driver_cuda()
    found["compiler"] = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    found["headers"] = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    if not found["missing"]:
        found |= torch_facts()
        found |= triton_facts(found.get("capability"))
    if found.get("available"):
        from bench import harness
        from specker.kernels.deferred import HAS_GPU

        found |= {"folder": harness.folder("cuda").name, "commit": harness.commit(), "device_file": HAS_GPU}
    return found


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def requires_of(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def required() -> dict[str, str]:
    """The least version of each needed module, as pyproject.toml says."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    least = dict(re.findall(r'"([\w-]+)>=([\d.]+)[";]', text[: text.index("[project.optional-dependencies]")]))
    return {name: least[name] for name in NEEDED if name in least}


def pinned(requirements: list[str], name: str) -> str | None:
    """The version that requirements such as "triton==3.7.1; platform_system == 'Linux'" pin; of "triton~=3.8.0", as
    torch names it from 2.14 on, the part that does not change: "3.8"."""
    for line in requirements:
        if match := re.match(rf"{name}\s*\(?([=~]=)\s*([\w.+]+)", line):
            return match[2] if match[1] == "==" else match[2].rpartition(".")[0]
    return None


def driver_cuda() -> str | None:
    """The newest CUDA that the driver supports."""
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def torch_facts() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        found: dict[str, Any] = {"available": available, "devices": torch.cuda.device_count() if available else 0}
    found |= {"torch_cuda": torch.version.cuda, "hip": torch.version.hip}
    found["torch_says"] = " ".join(str(warning.message) for warning in said).split("\n")[0]
    if available:
        about = torch.cuda.get_device_properties(0)
        found |= {"name": about.name, "capability": [about.major, about.minor], "memory": about.total_memory}
        found |= {"sms": about.multi_processor_count, "uuid": str(getattr(about, "uuid", ""))}
    return found


def triton_key() -> str:
    """Triton's files as a short hash: kernels that another Triton compiled are not found in the cache."""
    from triton.runtime.cache import triton_key as whole

    return hashlib.sha256(whole().encode()).hexdigest()[:16]


def triton_facts(capability: list[int] | None) -> dict[str, Any]:
    """The ptxas that Triton runs for this GPU, and all that it brings."""
    import triton

    tools: dict[str, Any] = {}
    for name in ("ptxas", "ptxas_blackwell"):
        try:
            tool = getattr(triton.knobs.nvidia, name)
            tools[name] = [tool.path, tool.version]
        except (AttributeError, RuntimeError):
            continue
    found: dict[str, Any] = {"assemblers": tools, "cache": triton.knobs.cache.dir, "triton_key": triton_key()}
    if capability is not None:
        try:
            from triton.backends.nvidia.compiler import get_ptxas

            tool = get_ptxas(10 * capability[0] + capability[1])
            found["ptxas"] = [tool.path, tool.version]
        except (ImportError, AttributeError, TypeError, RuntimeError):
            pass
    return found


if __name__ == "__main__":
    main()
