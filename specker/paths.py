"""Where and how specker writes files: atomically, for a user or into its cache.

The cache holds converted checkpoints, compiled kernels, token counts, the history of conversations, and facts about
files that would take long to compute at each start."""

import hashlib
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path


def cache_root() -> Path:
    """`$SPECKER_CACHE`, by default ~/.cache/specker. Raises ValueError if the user has no home."""
    if named := os.environ.get("SPECKER_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "specker"
    except RuntimeError:
        raise ValueError("this user has no home folder for a cache: set SPECKER_CACHE to a folder") from None


def write_cached(path: Path, data: bytes) -> None:
    """`write_file`, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)


def remember(path: Path, data: bytes) -> None:
    """Write data that only saves time to the cache, with its SHA-256. An error costs nothing but that time."""
    with suppress(OSError):
        write_cached(path, hashlib.sha256(data).digest() + data)


def remembered(path: Path) -> bytes | None:
    """The data that `remember` wrote; None if there is no such file, or if it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def probe(path: str, flag: str) -> None:
    """Raise ValueError now, not after a long run, if `write_file` could not write to `path`. Leaves no file behind."""
    where = Path(path)
    if where.is_dir():
        raise ValueError(f"{flag} {path}: is a directory")
    try:
        with tempfile.TemporaryFile(dir=where.parent) if replaceable(where) else where.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written: {error.strerror}") from None


def write_file(path: str | Path, data: str | bytes, private: bool = False) -> None:
    """Write the file atomically: no reader sees half of it, and no crash leaves half of it. `private`: only its owner
    can read it. Raises OSError."""
    where, data = Path(path), data.encode() if isinstance(data, str) else data
    if not replaceable(where):
        where.write_bytes(data)
        return
    where = Path(os.path.realpath(where))
    part = where.with_name(f".{where.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        if private:
            os.close(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600))
        part.write_bytes(data)
        os.replace(part, where)
    finally:
        part.unlink(missing_ok=True)


def replaceable(path: Path) -> bool:
    """Whether `write_file` makes a new file in its place."""
    return path.is_file() or not path.exists()  # False for /dev/null, /dev/stdout and named pipes
