"""Compiles csrc/ once for this processor.

specker's cache keeps the library under a name made from the sources, the flags and the level of instructions, and its
SHA-256 beside it: loading a damaged library would end the process with a signal. Code is loaded only from files and a
folder that no other user may have written to.

Any C compiler with GNU's vector extensions works: $CC, cc, gcc, clang, or the PyPI package ziglang. Without a compiler,
the slower reference operators decode.
"""

import atexit
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from specker.paths import cache_root, write_file

REMEDY = "install gcc or clang, or pip install ziglang"
OTHER = "set CC to another compiler, such as clang, or 'python -m ziglang cc' after pip install ziglang"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Wno-psabi", "-pthread")
V3 = {"avx2", "fma", "f16c", "bmi2"}
V4 = V3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
# Levels from best to least: the features that /proc/cpuinfo must list, and the compiler's flags.
LEVELS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "amx": (
        V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8"},
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8"),
    ),
    "avx512bf16": (V4 | {"avx512_vnni", "avx512_bf16"}, ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")),
    "avx512vnni": (V4 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
    "avx512": (V4, ("-march=x86-64-v4",)),
    "avxvnni": (V3 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    "avx2": (V3, ("-march=x86-64-v3",)),
    "dotprod": ({"asimddp"}, ("-march=armv8.2-a+dotprod",)),
    "portable": (set(), ()),
}


class Unavailable(Exception):
    """The library cannot be compiled; the message gives the reason and a remedy."""


def level() -> str:
    """The best level that this processor has, or the one in SPECKER_CPU. Raises ValueError for an unknown name and
    for a level that this processor does not have."""
    asked, has = os.environ.get("SPECKER_CPU"), _features()
    if asked:
        if asked not in LEVELS:
            raise ValueError(f"SPECKER_CPU must be one of {', '.join(LEVELS)}, got {asked!r}")
        if missing := LEVELS[asked][0] - has:
            raise ValueError(f"SPECKER_CPU={asked} needs a processor with {', '.join(sorted(missing))}")
        return asked
    return next(name for name, (needed, _) in LEVELS.items() if needed <= has)


@cache
def _features() -> set[str]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {"asimddp"} if platform.machine() == "arm64" else set()  # macOS: every Apple processor has dot products
    lines = (line.split(":", 1) for line in info.read_text(errors="replace").splitlines() if ":" in line)
    return next((set(value.split()) for key, value in lines if key.strip() in ("flags", "Features")), set())


def compiler() -> list[str] | None:
    """The command of a C compiler; None if there is none."""
    given = os.environ.get("CC", "")
    try:
        asked = shlex.split(given)  # such as "ccache gcc"
    except ValueError:  # an open quotation
        asked = [given]
    for command in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        if (program := shutil.which(command[0])) is not None:
            return [program, *command[1:]]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else None


def library(on_progress: Callable[[str], None] | None = None) -> Path:
    """The compiled library. `on_progress` gets a sentence if it has to compile. Raises Unavailable."""
    command = compiler()
    name, files = level(), sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files))
    digest.update(repr((FLAGS, LEVELS[name][1])).encode())  # without the set, whose order differs by process
    folder, once = cache_root() / "cpu", "once on this machine"
    path = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    foreign = _foreign(folder)
    if foreign is None and _intact(path):
        return path
    if command is None:
        also = "" if foreign is None else f", and {foreign}"
        if (given := os.environ.get("CC", "")).strip():
            raise Unavailable(f"CC is {given!r}, which is no command{also}: unset CC, or set it to a C compiler")
        raise Unavailable(f"there is no C compiler{also}: {REMEDY}")
    foreign = foreign or _unusable(folder)
    if foreign is not None:  # keep the library until this process ends
        once = f"at each start, because {foreign}: set SPECKER_CACHE to another folder"
        folder = Path(tempfile.mkdtemp(prefix="specker-cpu-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = folder / path.name
    with FileLock(folder / "lock"):
        if not _intact(path):
            if on_progress is not None:
                on_progress(f"compiling the CPU kernels ({name}): some seconds, {once}")
            _compile(command, name, path)
            write_file(_note(path), _sha256(path))
            for file in (path, _note(path)):
                file.chmod(0o755)  # whatever the umask
    return path


def _foreign(path: Path) -> str | None:
    """Why another user may have written the file or folder; None if none may, or if it does not exist."""
    try:
        about = path.stat()
    except OSError:
        return None
    if about.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user"
    return f"other users may write to {path}" if about.st_mode & 0o022 else None


def _unusable(folder: Path) -> str | None:
    """Why the library cannot be kept in the folder, which is made if it is missing; None if it can."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    try:
        with FileLock(folder / "lock"):
            return None
    except (OSError, NotImplementedError) as error:  # a network file system without locks; both, by filelock's version
        return f"{folder} cannot be locked ({getattr(error, 'strerror', error)})"


def _intact(path: Path) -> bool:
    """Whether the library is as it was compiled, by this user or root."""
    note = _note(path)
    try:
        return not _foreign(path) and not _foreign(note) and note.read_text() == _sha256(path)
    except (OSError, ValueError):
        return False


def _note(path: Path) -> Path:
    """The file with the library's SHA-256."""
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(command: list[str], name: str, path: Path) -> None:
    """Compile each source in a process of its own and link them. A failure leaves no file. Raises Unavailable."""
    with tempfile.TemporaryDirectory(dir=path.parent) as there:
        flags = [*FLAGS, *LEVELS[name][1]]
        objects = {source: Path(there) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.c"))}
        jobs = [
            subprocess.Popen(
                [*command, *flags, "-c", str(source), "-o", str(target)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, target in objects.items()
        ]
        errors = [job.communicate()[1] for job in jobs]
        linked = Path(there) / path.name
        if all(job.returncode == 0 for job in jobs):
            link = [*command, *flags, "-shared", *map(str, objects.values()), "-lm", "-o", str(linked)]
            done = subprocess.run(link, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                linked.rename(path)
                return
            errors.append(done.stderr)
        lines = [line.strip() for text in errors for line in text.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise Unavailable(f"{' '.join(command)} fails ({said}): {OTHER}")
