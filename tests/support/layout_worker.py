"""tests/runtime/test_draft_layouts.py runs this on every rank: `layout_worker.py CASES.json OUT`. A case says what to
load and decode; every rank writes the texts, the drafts and the collectives of each draft to OUT.<rank>.json."""

import json
import os
import sys
from pathlib import Path

import torch

import specker
from specker.runtime.ranks import dist

torch.set_num_threads(1)


def counted(name: str, calls: list[str]) -> None:
    """Add the collective's name to `calls` whenever the drafting ranks run it."""
    inner = getattr(dist.Ranks, name)

    def outer(ranks: dist.Ranks, x: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return inner(ranks, x)

    setattr(dist.Ranks, name, outer)


def main(cases: Path, out: Path) -> None:
    calls: list[str] = []
    for name in ("sum", "gather"):
        counted(name, calls)
    found = []
    for case in json.loads(cases.read_text()):
        engine = specker.load(*case["models"], device="cpu", dtype="float64", **case["options"])
        rows: list[dict] = []
        steps: set[tuple[int, int]] = set()
        propose = engine.drafter.propose

        def proposed(batch, propose=propose, steps=steps):
            before = len(calls)
            draft = propose(batch)
            steps.add((draft.depth, len(calls) - before))
            return draft

        engine.drafter.propose = proposed
        engine.trace = rows.append
        runs = []
        for how in case["sampling"]:
            rows.clear()
            texts = engine.generate(case["prompts"], case["count"], **how)
            drafts = [(row["prompt"], row["position"], row["draft"], row["parents"]) for row in rows]
            runs.append({"tokens": [text.tokens for text in texts], "drafts": drafts})
        found.append({"runs": runs, "steps": sorted(steps)})
    out.with_suffix(f".{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.leave(0)
