"""Compare the speed of two commits: two checkouts decode the same prompts in turn, each in its own process.

`python bench/versus.py --commit COMMIT` compares the working tree with COMMIT, checked out into a temporary folder.
Both decode every prompt one after the other, and the order alternates, so that a slow phase of the machine affects
both. Every round restarts both processes, since a process's memory layout changes its speed by about 5%. Each process
decodes all prompts `repeats` times.

Reported for each strategy and temperature, as seconds of COMMIT over seconds of the working tree (above 1: the working
tree is faster): the median of all pairs with p20 and p80, and `best`, the sum over prompts of the shortest time of
each. Other programs can only lengthen a run, so `best` is the steadier number on a noisy machine.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import harness
from bench.processes import Process

STRATEGIES: dict[str, dict[str, Any]] = {
    "ar": {"strategy": "ar"},
    "draft": {"draft_tokens": 4},
    "draft tree 4x4": {"tree": "4x4"},
    **{
        name: {"strategy": name} for name in ("easyspec", "del", "diffuspec", "vocabtrim", "lookup", "vocabtrim+lookup")
    },
}

WORKER = """
import json, sys, time
import torch, specker
options, threads, models = json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
drafts = options.get("strategy", "draft") not in ("ar", "del", "lookup")
models = models if drafts else models[:1]
torch.set_num_threads(threads)
lookup = "lookup" in options.get("strategy", "")
for more in ([{"prefix_cache": "off", "lookup_share": "off"}] if lookup else []) + [{"prefix_cache": "off"}, {}]:
    try:  # the prompts come several times; older commits lack some of these options
        engine = specker.load(*models, device="cpu", **more, **options)
        break
    except TypeError:
        pass
engine.warmup()
for line in sys.stdin:
    prompts, count, temperature = json.loads(line)
    start = time.perf_counter()
    out = engine.generate(prompts, count, temperature=temperature)
    print(json.dumps([time.perf_counter() - start, [each.tokens for each in out]]), flush=True)
"""


@dataclass(frozen=True)
class Args:
    commit: str = field(metadata={"help": "what to compare the working tree with"})
    prompts: int = 8
    max_new_tokens: int = 64
    rounds: int = 4
    repeats: int = 4
    temperatures: str = field(default="0,0.7", metadata={"help": "comma-separated"})
    strategies: str = field(default=",".join(STRATEGIES), metadata={"help": "comma-separated"})
    threads: int = 1
    batch_size: int = field(default=1, metadata={"help": "prompts that are decoded at once"})
    idle: float = field(
        default=0.0, metadata={"help": "seconds before a turn; with several threads 0.3: the last turn's still spin"}
    )
    target: str | None = field(default=None, metadata={"help": "folder or GGUF file (default: the bundled target)"})
    draft: str | None = field(default=None, metadata={"help": "of --target, for the strategies that need one"})
    questions: str | None = field(
        default=None,
        metadata={"help": "JSON lines with `prompt` or `turns` (default: the bundled pair's held-out texts)"},
    )
    save: bool = harness.save_flag()


def worker(folder: Path, options: dict[str, Any], args: Args) -> Process:
    """A checkout that decodes in its own process: asked for [prompts, count, temperature], it answers [seconds,
    tokens]."""
    models = [path for path in (args.target, args.draft) if path is not None]
    command = [sys.executable, "-c", WORKER, json.dumps(options), str(args.threads), json.dumps(models)]
    return Process(command, cwd=folder, PYTHONPATH=str(folder))


def compare(folders: tuple[Path, Path], name: str, args: Args, prompts: list[str]) -> list[dict[str, Any]]:
    """A row for each temperature; `folders`: the old checkout and the new one."""
    temperatures = [float(t) for t in args.temperatures.split(",")]
    groups = [tuple(prompts[i : i + args.batch_size]) for i in range(0, len(prompts), args.batch_size)]
    seconds: dict[float, dict[Any, list[tuple[float, float]]]] = {t: {p: [] for p in groups} for t in temperatures}
    same = dict.fromkeys(temperatures, True)
    for n in range(args.rounds):
        options = {**STRATEGIES[name], "batch_size": args.batch_size}
        pair = [worker(folder, options, args) for folder in (folders if n % 2 else folders[::-1])]
        workers = pair if n % 2 else pair[::-1]
        for each in workers:
            each.ask([groups[0], args.max_new_tokens, 0.0])
        turns = itertools.product(range(args.repeats), temperatures, groups)
        for i, (_, temperature, prompt) in enumerate(turns):
            found = {}
            for k in (0, 1) if (i + n) % 2 else (1, 0):
                time.sleep(args.idle)
                found[k] = workers[k].ask([prompt, args.max_new_tokens, temperature])
            same[temperature] &= found[0][1] == found[1][1]
            seconds[temperature][prompt].append((found[0][0], found[1][0]))
        for each in workers:
            each.end()
    rows = []
    for temperature, times in seconds.items():
        each = [old / new for pairs in times.values() for old, new in pairs]
        old, new = (sum(min(pair[k] for pair in pairs) for pairs in times.values()) for k in (0, 1))
        row = {
            "strategy": name,
            "temperature": temperature,
            "against": args.commit,
            "batch_size": args.batch_size,
            "same": same[temperature],
        }
        rows.append({**row, "best": old / new, **harness.quantiles(each), "pairs": len(each)})
    return rows


def main() -> None:
    args = harness.arguments(Args)
    from specker import zoo

    new = Path(__file__).resolve().parents[1]
    if args.questions is None:
        texts = [row["prompt"] for row in zoo.heldout()]
    else:
        lines = [json.loads(line) for line in Path(args.questions).read_text().splitlines()]
        texts = [line["prompt"] if "prompt" in line else line["turns"][0] for line in lines]
    prompts = texts[: args.prompts]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", str(old), args.commit], cwd=new, check=True)
        try:
            for name in args.strategies.split(","):
                rows += compare((old, new), name, args, prompts)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=new, check=True)
    table = Table("strategy", "T", "speed, new over old: best", "median", "p20", "p80", "same tokens")
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("best", "median", "p20", "p80")]
        table.add_row(row["strategy"], f"{row['temperature']:g}", *numbers, "yes" if row["same"] else "NO")
    Console().print(table)
    if args.save:
        print(harness.save("versus", rows))


if __name__ == "__main__":
    main()
