"""Run a script or a module, and note what Triton compiles: `python -m bench.gpu.compiling NOTES SCRIPT|-m MODULE ...`.

NOTES gets a JSON line for each kernel that Triton compiles or finds in its cache on disk, with the seconds that took.
Every line is written at once, so that a command that is killed leaves them, and several processes may share NOTES.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def listen(notes: str) -> None:
    """Note what this process compiles from now on; nothing without Triton."""
    try:
        import triton
    except ImportError:
        return

    def compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        line = json.dumps({"kernel": src.name, "seconds": times.total * 1e-6, "cached": cache_hit}) + "\n"
        file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    triton.knobs.compilation.listener = compiled


def noted(notes: Path) -> dict[str, float]:
    """Kernels compiled, the seconds that took in all processes together, and kernels found in the cache."""
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    made = [row["seconds"] for row in rows if not row["cached"]]
    return {"compiled": len(made), "seconds": sum(made), "cached": len(rows) - len(made)}


def main() -> None:
    notes, *argv = sys.argv[1:]
    listen(notes)
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except KeyboardInterrupt:  # the end of the log shall show results, not a traceback
        sys.exit(130)


if __name__ == "__main__":
    main()
