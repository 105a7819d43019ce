"""The folder where specker keeps what it makes or fetches.

It holds converted checkpoints, compiled kernels, token counts, the history of conversations, and facts about files
that would take long to compute at each start."""

import os
import tempfile
from pathlib import Path


def root() -> Path:
    """`$SPECKER_CACHE`, by default ~/.cache/specker."""
    return Path(os.environ.get("SPECKER_CACHE") or Path.home() / ".cache" / "specker")


def write(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old or the new content, never a part. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
