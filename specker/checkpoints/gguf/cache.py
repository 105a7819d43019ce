"""A GGUF file as a checkpoint: it is converted once, into a folder of the cache.

The folder has Hugging Face's format (config, tokenizer with chat template, safetensors), so all later code is the same
for both formats. It lies under `$SPECKER_CACHE` (default: ~/.cache/specker/gguf). Its name contains the file's SHA-256,
so a changed file never uses an old folder. The cache remembers the SHA-256 of each file, so that a start does not read
the whole file.
"""

import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from specker.checkpoints.gguf import convert
from specker.extras import install, missing
from specker.model.config import CheckpointError
from specker.paths import cache_root, write_cached

log = logging.getLogger("specker.steps")  # slow steps, which `Screen.progress` shows
DONE = "converted.json"  # written last: source, its SHA-256, and of the folder's files the sizes and digests
ENDS = 1 << 20  # bytes at each end of a file that every start looks at, such as the header of the weights
TOKENIZER = 50_000_000  # bytes that a tokenizer and the other files take at most


def file_of(source: str | Path) -> Path | None:
    """The GGUF file that `source` names: itself, or the only one in a folder without config.json. None if `source` is
    no GGUF checkpoint. Raises CheckpointError for a folder with several."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files; name one, such as {files[0]}")
    return files[0] if files else None


def converted(path: Path, dense: bool = False) -> Path:
    """The folder with the converted checkpoint, made on first use; with `dense` all in float32. Raises CheckpointError
    if packages or disk space are missing, or if the file is damaged or of an unsupported architecture."""
    digest = remembered_sha256(path)
    folder = cache_root() / "gguf" / f"{path.stem}-{digest[:16]}{'' if dense else '-packed'}"
    if _complete(folder):
        return folder
    lacks = missing("gguf")
    if lacks:
        raise CheckpointError(f"{path} is a GGUF file, and reading it needs {', '.join(lacks)}: {install('gguf')}")
    locks = cache_root() / "locks"
    try:
        for made in (folder.parent, locks):
            made.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=made):  # a folder that is there may be read-only
                pass
    except OSError as error:
        raise CheckpointError(
            f"{path} is converted into {cache_root()}, which cannot be written ({error.strerror}): set SPECKER_CACHE "
            "to another folder"
        ) from error
    with FileLock(locks / f"{folder.name}.lock"):  # another process waits for the copy instead of making its own
        return folder if _complete(folder) else _converted(path, folder, digest, dense)


def origin(folder: Path) -> str | None:
    """The name of the GGUF file that was converted into the folder; None if it is another checkpoint."""
    try:
        return str(json.loads((folder / DONE).read_text())["source"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _converted(path: Path, folder: Path, digest: str, dense: bool) -> Path:
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    file = convert.read(path)
    size = convert.converted_size(convert.kept(path, file), dense)
    _check_space(path, folder.parent, size)
    log.info("converting %s once into %s (%.2f GB)", path.name, folder, size / 1e9)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        convert.convert(path, part, file, dense)
        files = sorted(part.iterdir())
        about: dict[str, Any] = {"sizes": {file.name: file.stat().st_size for file in files}}
        about |= {"ends": {file.name: _ends(file) for file in files}, "files": {f.name: sha256(f) for f in files}}
        (part / DONE).write_text(json.dumps({"source": path.name, "sha256": digest, **about}, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """The file's SHA-256. Computing it takes about a second per GB, so that happens on first use, and again only if the
    path, size, modification time or inode has changed."""
    path = path.resolve()
    note = cache_root() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    identity = _identity(path)
    with suppress(OSError, ValueError, LookupError, TypeError):  # no note yet, or a damaged one
        known = json.loads(note.read_text())
        if known["file"] == identity and len(bytes.fromhex(known["sha256"])) == 32:
            return str(known["sha256"])
    log.info("computing the SHA-256 of %s, once", path.name)
    digest = sha256(path)
    if _identity(path) == identity:  # it did not change meanwhile
        with suppress(OSError):  # without the note, the next start hashes again
            write_cached(note, json.dumps({"file": identity, "sha256": digest}).encode())
    return digest


def _identity(path: Path) -> dict[str, Any]:
    about = path.stat()
    return {"path": str(path), "size": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino}


def verify(folder: Path) -> str | None:
    """Compare all of a converted checkpoint with what was written, about a second per GB. Returns what is wrong with
    it, None if nothing is. Raises LookupError if an earlier version made it, which kept no digests."""
    if (wrong := _damage(folder)) is not None:
        return wrong
    known = json.loads((folder / DONE).read_text())["files"]
    if not isinstance(known, dict):
        return f"{DONE} is damaged"
    changed = [name for name, digest in known.items() if sha256(folder / name) != digest]
    return f"{changed[0]} has changed" if changed else None


def _complete(folder: Path) -> bool:
    """Whether the folder is as it was written, by a glance that takes milliseconds. `verify` looks at everything."""
    return _damage(folder) is None


def _damage(folder: Path) -> str | None:
    """The first thing that is wrong by sizes and ends; None if there is nothing."""
    try:
        known = json.loads((folder / DONE).read_text())
        sizes, ends = known["sizes"], known.get("ends", {})  # earlier versions had no digests
        changed = [name for name, size in sizes.items() if (folder / name).stat().st_size != size]
        changed += [name for name, digest in ends.items() if _ends(folder / name) != digest]
    except OSError as error:
        return f"{Path(error.filename or DONE).name} cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{DONE} is damaged"
    return f"{changed[0]} has changed" if changed else None


def _ends(path: Path) -> str:
    """A SHA-256 of the first and the last MiB of a file."""
    with path.open("rb") as file:
        first = file.read(ENDS)
        file.seek(max(0, path.stat().st_size - ENDS))
        return hashlib.sha256(first + file.read()).hexdigest()


def _check_space(path: Path, root: Path, size: int) -> None:
    """Raise CheckpointError if the disk has no room for weights of `size` bytes and a tokenizer."""
    free = shutil.disk_usage(root).free
    if size + TOKENIZER > free:
        raise CheckpointError(
            f"converting {path} takes {(size + TOKENIZER) / 1e9:.2f} GB, but {root} has {free / 1e9:.2f} GB free; set "
            "SPECKER_CACHE to a folder on a larger disk"
        )
