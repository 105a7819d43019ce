"""DiffuSpec: what path search (CPS) and adaptive length (ADL) add, chains and tries, block lengths, and an
autoregressive draft with as many parameters as the diffusion drafter.

The paper's mean accepted tokens (MAT) leave out the target's own token: they are the acceptance length - 1.
"""

from typing import Any

from bench.papers.measure import Row, Setting, turns
from bench.papers.models import Pair

PAPER = "diffuspec"
BLOCK = 8  # tokens of the fixed blocks that the parts of the method are added to


def diffuspec(**options: Any) -> dict[str, Any]:
    return {"strategy": "diffuspec", **options}


SETTINGS = (
    Setting("the default", diffuspec()),
    Setting("as published", diffuspec(as_published=True), "3.08", sampled=False),
    Setting("CPS, length by `auto`", diffuspec(cps="chain")),
    Setting("neither", diffuspec(draft_tokens=BLOCK), "2.69"),
    Setting("ADL", diffuspec(policy="adl", adl="2-8"), "2.73"),
    Setting("CPS", diffuspec(cps="chain", draft_tokens=BLOCK), "2.98"),
    Setting("CPS and ADL", diffuspec(cps="chain", policy="adl", adl="2-8")),
    Setting("a trie of 3 tokens a position", diffuspec(cps="tree", draft_tokens=4)),
    Setting("the trie, length by `auto`", diffuspec(cps="tree"), sampled=False),
    Setting("the trie and ADL", diffuspec(cps="tree", policy="adl", adl="2-8"), sampled=False),
    Setting("blocks of 2", diffuspec(draft_tokens=2), sampled=False),
    Setting("blocks of 4", diffuspec(draft_tokens=4)),
    Setting("blocks of 16", diffuspec(draft_tokens=16), sampled=False),
    Setting("blocks of 4, CPS", diffuspec(cps="chain", draft_tokens=4), sampled=False),
)
AUTOREGRESSIVE = (  # of the diffusion drafter's size
    Setting("autoregressive, chains of 4", {"strategy": "draft", "draft_tokens": 4}, "1.67", "large_draft"),
    Setting("autoregressive, length by `auto`", {"strategy": "draft"}, "", "large_draft", sampled=False),
)


def run(pair: Pair, temperatures: list[float], seconds: float) -> list[Row]:
    rows = []
    settings = (*SETTINGS, *(AUTOREGRESSIVE if pair.large_draft else ()))
    for temperature in temperatures:
        done = turns(PAPER, pair, settings, temperature, seconds / len(temperatures))
        for turn in done.values():
            found = {"blocks": turn.stats.diffusion} if turn.stats.found else {}
            rows.append(turn.row | found)
    return rows
