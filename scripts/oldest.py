"""Print the oldest versions that pyproject.toml allows, as constraints for pip; `make oldest` tests with them.

    python scripts/oldest.py [VERSION OF TORCH]

These are those of the package and of the extras that users install. On Linux the oldest torch is taken where a build
for CPUs can be had: PyPI's has gigabytes of CUDA. Otherwise it is the torch of constraints.txt, and a line says so.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("gguf", "serve")


def oldest(requirements: Iterable[str]) -> dict[str, str]:
    """The lowest version that each requirement allows; of several for a package, which rise, that of the last. Raises
    ValueError for one without a lower bound."""
    found = {}
    for requirement in requirements:
        parts = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)", requirement)
        if parts is None:
            raise ValueError(f"pyproject.toml has {requirement!r}, expected a lower bound: NAME>=VERSION")
        found[parts[1]] = parts[2]
    return found


def can_be_had(torch: str) -> bool:
    """Whether pip finds this version of torch."""
    command = ["-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", f"torch=={torch}"]
    return subprocess.run([sys.executable, *command], capture_output=True).returncode == 0


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for name in EXTRAS for line in project["optional-dependencies"][name]]
    versions = oldest([*project["dependencies"], *extras])
    wanted = versions["torch"]
    if len(sys.argv) > 1:
        versions["torch"] = sys.argv[1]
    elif sys.platform == "linux":
        versions["torch"] = f"{wanted}+cpu"
        if not can_be_had(versions["torch"]):
            pins = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
            assert pins is not None
            versions["torch"] = pins[1]
            print(
                f"oldest: no build of torch {wanted} for CPUs can be had here, so torch {pins[1]} of constraints.txt "
                f"is tested; make oldest TORCH={wanted}.0 takes PyPI's build, gigabytes of CUDA included",
                file=sys.stderr,
            )
    print("\n".join(f"{name}=={version}" for name, version in versions.items()))


if __name__ == "__main__":
    main()
