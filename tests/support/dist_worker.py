"""tests/runtime/test_dist.py runs this on every rank: `torchrun ... dist_worker.py CASES.json OUT`. A case says what to
load and decode; every rank writes the tokens of all cases to OUT.<rank>.json."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

import specker
from specker.model.sampling import GREEDY
from specker.runtime.ranks import dist

torch.set_num_threads(1)


def main(cases: Path, out: Path) -> None:
    found = []
    for case in json.loads(cases.read_text()):
        engine = specker.load(*case["models"], **case["options"])
        each, prompts = [], [case["prompt"], *case.get("beside", [])]
        for how in case["sampling"]:
            fast = engine.generate(prompts, case["count"], **how)
            each.append({"tokens": [f.tokens for f in fast], "accepted": fast[0].stats.accepted})
        kept = [cache.prefixes.match([*prompts[0], *fast[0].tokens]).columns for cache in engine.loop.slots.caches[1:]]
        plain = engine.generate_ar(prompts, case["count"], **case["sampling"][0])
        ranks = engine.ranks
        weights = sum(w.numel() for layer in engine.model.layers for w in layer.mixer.present().values())
        here = {"rank": ranks.rank, "drafts": ranks.drafts, "layer_elements": weights} if ranks else {}
        here |= {"draft_prefix": sum(kept), "compiled": engine.model.stack is not None}
        found.append({"runs": each, "ar": [p.tokens for p in plain], "head_rows": engine.model.head.shape[0], **here})
    rank = here.get("rank", 0)
    found.append(rows_apart(engine.ranks))
    out.with_suffix(f".{rank}.json").write_text(json.dumps(found))


def rows_apart(ranks: dist.Ranks) -> dict[str, bool]:
    """Whether a row's sum has the same bits alone and among 64, ranks are added in order, and of ids with equal logits
    the lowest is drawn."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float32)
    every = torch.stack([torch.randn(64, 96, generator=torch.Generator().manual_seed(r)) for r in range(ranks.size)])
    ordered = replace(ranks, ordered=True)
    alone, among = ordered.sum(x[5:6].clone()), ordered.sum(x.clone())
    by_rank = functools.reduce(torch.add, every)
    close = bool(torch.allclose(ranks.sum(x.clone()), by_rank, rtol=1e-5, atol=1e-5))
    logits = torch.tensor([[0.0, 1.0, 1.0], [float(ranks.rank > 0), 0.0, 0.0]])
    lowest = ranks.draw(GREEDY, logits, torch.arange(2), 3 * ranks.size).tolist() == [1, 3]
    found = {"alike": torch.equal(alone, among[5:6]), "by_rank": torch.equal(among, by_rank), "close": close}
    return found | {"lowest": lowest}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.leave(0)
