"""Where specker keeps what it makes or fetches: converted checkpoints, compiled kernels, token counts."""

import os
from pathlib import Path


def root() -> Path:
    """`$SPECKER_CACHE`, by default ~/.cache/specker."""
    return Path(os.environ.get("SPECKER_CACHE") or Path.home() / ".cache" / "specker")
