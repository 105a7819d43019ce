"""An empty cache of specker's that is not the user's, without the seconds that compiling the CPU kernels would take."""

import contextlib
from pathlib import Path

from specker.cpu import build


def empty(folder: Path) -> Path:
    """Make `folder` a cache that holds the compiled CPU kernels alone, those of the cache in use; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(build.Unavailable):
        (folder / "cpu").symlink_to(build.library().parent)
    return folder
