"""What would travel to another machine: `python -m bench.gpu.pack [--cache DIR]`, before a run there.

The checkout travels as git has it: tracked files and those that git does not ignore. It must be a clean commit, which
the rows then name, and small when it is packed.

`--cache DIR`: take along what Triton compiled here (docs/gpus.md, Compiling beforehand), in build/triton, which git
ignores. Of each kernel only the machine code and what Triton knows of it go along. Paths in Triton's groups of files
are relative on the way; `make gpu` makes them absolute again, and says if its Triton is another one.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench.gpu.facts import triton_key
from bench.gpu.running import ROOT

MOST = 60 << 20  # bytes when packed
CARRIED = ROOT / "build" / "triton"
KEY = "key"  # a file with `triton_key`
GROUP = "__grp__"  # begins the name of a file that lists a kernel's files
NEEDED = (".cubin", ".json")


def travels(root: Path) -> list[Path]:
    """Tracked files and those that git does not ignore."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    return [root / name for name in listed if name and (root / name).is_file()]


def packed_bytes(files: list[Path]) -> Counter[Path]:
    """The size of each file when it is packed fast."""
    return Counter({file: len(gzip.compress(file.read_bytes(), 1)) for file in files})


def carry(cache: Path, to: Path) -> list[Path]:
    """Copy what launches need of a Triton cache. ValueError if there is nothing."""
    shutil.rmtree(to, ignore_errors=True)
    made = []
    for group in sorted(cache.glob(f"*/{GROUP}*.json")):
        files = {name: Path(path) for name, path in json.loads(group.read_text())["child_paths"].items()}
        files = {name: group.parent / path.name for name, path in files.items() if path.suffix in NEEDED}
        folder = to / group.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        for file in files.values():
            made.append(Path(shutil.copy(file, folder / file.name)))
        made.append(folder / group.name)
        made[-1].write_text(json.dumps({"child_paths": {name: file.name for name, file in files.items()}}))
    if not made:
        raise ValueError(
            f"{cache} holds no kernel that Triton compiled: make one with TRITON_CACHE_DIR={cache} make static"
        )
    (to / KEY).write_text(triton_key())
    return [*made, to / KEY]


def placed(folder: Path = CARRIED) -> Path | None:
    """The cache that was carried here, with absolute paths; None if there is none."""
    for group in folder.glob(f"*/{GROUP}*.json"):
        names = json.loads(group.read_text())["child_paths"]
        paths = {name: str(group.parent / Path(path).name) for name, path in names.items()}
        group.write_text(json.dumps({"child_paths": paths}))
    return folder if (folder / KEY).exists() else None


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu.pack", description="Check what would travel to another machine."
    )
    parser.add_argument("--cache", type=Path, help="a cache of Triton's to take along, in build/triton")
    args = parser.parse_args()
    files = travels(ROOT)
    dirty = _git(ROOT, "status", "--porcelain").splitlines()
    print(f"commit {_git(ROOT, 'rev-parse', '--short=12', 'HEAD').strip()}, {len(files)} files")
    if args.cache:
        try:
            files += carry(args.cache, CARRIED)
        except ValueError as error:
            sys.exit(f"pack: {error}")
        print(f"build/triton, which git ignores, goes along; triton_key {triton_key()}")
    sizes = packed_bytes(files)
    print(
        f"{sizes.total() / 2**20:.1f} MiB packed, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB on disk"
    )
    print("there: make gpu SHORT=1 ARGS='--out DIR', then SHORT=2; DIR/run.tar.gz unpacks in bench/results")
    problems = [f"{len(dirty)} files differ from the commit, as {dirty[0][3:]}: commit them"] if dirty else []
    if sizes.total() > MOST:
        folders: Counter[str] = Counter()
        for file, size in sizes.items():
            folders["/".join(file.relative_to(ROOT).parts[:2])] += size
        most = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in folders.most_common(5))
        problems.append(f"more than {MOST >> 20} MiB, most of them in {most}")
    if problems:
        sys.exit("\n".join(f"pack: {problem}" for problem in problems))


if __name__ == "__main__":
    main()
