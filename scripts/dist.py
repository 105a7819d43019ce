"""Build the sdist and the wheel of both distributions, and run them outside the repository.

    python scripts/dist.py dist

prints the sizes. Exits with 1 and a sentence if a wheel holds what it should not, or an installed one does not work.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
PACKAGES = {"specker_decoding": "specker", "specker_models": "specker_models"}  # distribution -> its one package
MOST = {"specker": 1e6, "specker_models": 65e6}  # bytes of a wheel
PYTHON = {"specker_models/__init__.py", "specker_models/py.typed"}
DATA = {".safetensors", ".json", ".jsonl"}


def build(out: Path) -> list[Path]:
    """Build both distributions from a copy of the repository into `out`; returns the two wheels. Each wheel is made
    from its sdist, so an sdist that lacks a file fails. Nothing is downloaded: setuptools is in the environment."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        for source in (copy, copy / "models"):
            ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source), cwd=folder)
    return [newest(out, f"{name}-*.whl") for name in PACKAGES]


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda file: file.stat().st_mtime)


def check_contents(wheel: Path) -> None:
    """Raise ValueError if the wheel holds anything besides its package (specker: no weights; models: data alone)."""
    package = PACKAGES[wheel.name.split("-")[0]]
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    inside = [name for name in names if not name.parts[0].endswith(".dist-info")]
    if strange := {name.parts[0] for name in inside} - {package}:
        raise ValueError(f"{wheel.name} holds {', '.join(sorted(strange))}, expected {package} alone")
    if Path(package, "py.typed") not in inside:
        raise ValueError(f"{wheel.name} lacks py.typed")
    sources = {path.relative_to(ROOT) for path in (ROOT / package / "cpu" / "csrc").glob("*.[ch]")}
    if missing := sources - set(inside):
        raise ValueError(f"{wheel.name} lacks {min(missing)}")
    data = [name for name in inside if name.suffix in DATA]
    if package == "specker" and data:
        raise ValueError(f"{wheel.name} holds {data[0]}, but bundled models belong to specker-models")
    if package == "specker_models" and (strange := {str(name) for name in inside if name not in data} - PYTHON):
        raise ValueError(f"{wheel.name} holds {', '.join(sorted(strange))}, expected data")
    if wheel.stat().st_size > MOST[package]:
        raise ValueError(f"{wheel.name} has {wheel.stat().st_size:,} bytes, expected at most {MOST[package]:,.0f}")


def check_installed(wheels: list[Path]) -> None:
    """Install the wheels into a fresh environment that sees this one's packages, and run them in another folder: first
    specker alone, then with its models. Raises ValueError with the output of what failed."""
    specker, models = wheels
    with tempfile.TemporaryDirectory() as folder:
        venv, work = Path(folder) / "venv", Path(folder) / "elsewhere"
        work.mkdir()
        ran(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=work)
        python = venv / "bin" / "python"
        [site] = venv.glob("lib/python*/site-packages")
        # Of a path in a .pth file its own .pth files are not read, so an editable specker stays out of sight.
        (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))

        def install(wheel: Path) -> None:
            pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install")
            ran(*pip, "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel), cwd=work)

        install(specker)
        where = f"import specker.kernels as k; assert k.__file__.startswith({str(site)!r}), k.__file__"
        ran(str(python), "-c", where, cwd=work)
        job = (str(python), "-m", "specker.run", "--check", "--max-new-tokens", "8", "--prompt", "x", "--device", "cpu")
        said = ran(*job, cwd=work, code=2)
        if "pip install ./models" not in said or len(said.splitlines()) != 1:
            raise ValueError(f"without specker-models, expected one sentence that says how to install it, got {said}")
        install(models)
        if "identical" not in (said := ran(*job, cwd=work)):
            raise ValueError(f"expected the table of --check, got {said}")


def ran(*command: str, cwd: Path | str, code: int = 0) -> str:
    """The output of a command, which must end with `code`. Raises ValueError with that output."""
    hidden = ("PYTHONPATH", "TRITON_INTERPRET", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != code:
        raise ValueError(f"{' '.join(command)} ended with {done.returncode}, not {code}: {done.stdout}")
    return done.stdout


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python scripts/dist.py FOLDER", file=sys.stderr)
        return 2
    out = Path(sys.argv[1]).resolve()
    try:
        wheels = build(out)
        for wheel in wheels:
            check_contents(wheel)
        check_installed(wheels)
    except ValueError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    for file in sorted(out.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
