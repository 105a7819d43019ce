"""What tests/test_dist.py runs on every rank of a job: `torchrun ... dist_worker.py CASES.json OUT`. A case is what to
load and what to decode; every rank writes the tokens of all cases to OUT.<rank>.json."""

import json
import sys
from pathlib import Path

import torch

import specker
from specker.runtime import dist

torch.set_num_threads(1)


def main(cases: Path, out: Path) -> None:
    found = []
    for case in json.loads(cases.read_text()):
        engine = specker.load(*case["models"], **case["options"])
        each = []
        for how in case["sampling"]:
            fast = engine.generate(case["prompt"], case["count"], **how)
            plain = engine.generate_ar(case["prompt"], case["count"], **how)
            each.append({"tokens": fast.tokens, "ar": plain.tokens, "accepted": fast.stats.accepted})
        ranks = engine.ranks
        weights = sum(w.numel() for layer in engine._model.layers for w in layer if w is not None)
        here = {"rank": ranks.rank, "drafts": ranks.drafts, "layer_elements": weights} if ranks else {}
        found.append({"runs": each, "head_rows": engine._model.head.shape[0], **here})
    rank = here.get("rank", 0)
    out.with_suffix(f".{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.leave(0)
