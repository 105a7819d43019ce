"""Write the ops as a kernel for Hugging Face's `kernels`: a folder that `get_local_kernel` loads and that
`kernel-builder` can build and upload.

    python scripts/hub_kernel.py OUT

    OUT/build.toml, flake.nix      the kernel's project: Python and Triton only, so nothing is compiled ("torch-noarch")
    OUT/torch-ext/specker/         its source: specker/kernels with relative imports
    OUT/build/torch-{cpu,cuda}/    its builds: the source, `_ops.py` and `metadata.json`

Several versions of a kernel may be loaded in one process, and beside specker itself. So a kernel imports its files
relatively, and its ops are not in torch.ops.specker but in a namespace that ends with a hash of the source: `_ops.py`,
which kernel-builder would generate, holds its name. The compiled CPU kernels (specker/cpu) stay out, because a kernel
may depend on nothing but torch, and on what torch installs: numpy and Triton. torch's operators replace them.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "specker" / "kernels"
DEPENDENCIES = ("torch", "triton", "numpy")
BACKENDS = ("cpu", "cuda")
VERSION = 0  # Hugging Face's convention for an interface that may still change
NAMESPACE = {  # the places of registry.py that name the ops' namespace
    "from torch import Tensor\n": "from torch import Tensor\n\nfrom ._ops import add_op_namespace_prefix, ops\n",
    'Library("specker", "FRAGMENT")': 'Library(add_op_namespace_prefix("").removesuffix("::"), "FRAGMENT")',
    'f"specker::{name}"': "add_op_namespace_prefix(name)",
    "getattr(torch.ops.specker, name)": "getattr(ops, name)",
}

BUILD = f"""\
[general]
name = "specker"
version = {VERSION}
edition = 5
license = "Apache-2.0"
backends = {json.dumps(BACKENDS)}

[torch-noarch]
"""
FLAKE = """\
{
  description = "Fused ops for speculative decoding";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
OPS = """\
import torch

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
"""


def sources() -> dict[str, str]:
    """File name -> text of the kernel's source. Raises ValueError if a file needs what a kernel may not import."""
    files = {path.name: relative(path.read_text()) for path in KERNELS.glob("*.py")}
    files["registry.py"] = namespaced(files["registry.py"])
    for name, text in sorted(files.items()):
        if foreign := sorted(imports(text) - set(DEPENDENCIES) - set(sys.stdlib_module_names)):
            raise ValueError(f"{name} imports {', '.join(foreign)}; a kernel may import {', '.join(DEPENDENCIES)} only")
    return files


def relative(text: str) -> str:
    """`from specker.kernels.x import y` -> `from .x import y`, `from specker.kernels import x` -> `from . import x`."""
    return re.sub(r"^( *)from specker\.kernels(?:\.(\w+))? import", r"\1from .\2 import", text, flags=re.MULTILINE)


def namespaced(registry: str) -> str:
    """registry.py with the ops in the namespace of `_ops.py`. Raises ValueError if it names the namespace elsewhere."""
    for old, new in NAMESPACE.items():
        if registry.count(old) != 1:
            raise ValueError(f"expected {old} once in registry.py, found it {registry.count(old)} times")
        registry = registry.replace(old, new)
    return registry


def imports(text: str) -> set[str]:
    """The packages that a module imports absolutely, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def write(out: Path) -> None:
    """Write the project and its builds into `out`, an empty or new folder. Raises ValueError for another."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} must be an empty folder")
    files = sources()
    put(out, {"build.toml": BUILD, "flake.nix": FLAKE})
    put(out / "torch-ext" / "specker", files)
    unique = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:12]
    for backend in BACKENDS:
        namespace = f"_specker_{backend}_{unique}"
        build = {**files, "_ops.py": OPS.format(namespace=namespace)}
        digests = {
            name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in build.items()
        }
        metadata = {
            "name": "specker",
            "id": namespace,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": dict(sorted(digests.items()))},
        }
        put(out / "build" / f"torch-{backend}", {**build, "metadata.json": json.dumps(metadata, indent=2) + "\n"})


def put(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="an empty or new folder")
    write(parser.parse_args().out)
