"""One request's part of a round, as a trace shows it (specker/view/trace.py documents the fields)."""

import math
from dataclasses import asdict
from typing import Any

from specker.runtime.control.stats import BlockStats, CopyStats
from specker.runtime.events import Event
from specker.runtime.round.branches import Branches
from specker.runtime.round.round import Round

SPANS = ("prefill", "draft", "verify", "accept", "watch", "commit")


def record(
    r: Round, number: int, slot: int, path: list[int], event: Event, known: set[int] | None, source: str
) -> dict[str, Any]:
    """The row of the request in `slot`, to whose text the round added `event`. `number`: of the round. `known`: the ids
    of a trimmed head. `source`: what drafts that are no copies come from."""
    request, tokens, draft, rows = event.request, event.tokens, r.draft, r.host
    N = draft.count(slot) if draft.first is draft else draft.size
    parents = rows["parents"][slot, :N].tolist() if draft.tree else list(range(N))
    if len(path) > len(tokens):
        last = "accepted"
    elif not N or slot in r.cut:
        last = "own"
    else:
        last = "recovered" if path[-1] in parents else "bonus"
    confidence = [each[slot] for each in draft.confidence]
    if slot in draft.constrained:
        del confidence[draft.constrained[slot].kept :]
    row: dict[str, Any] = {
        "prompt": request.index,
        "round": number,
        "position": len(request.token_ids) - len(tokens),  # committed tokens before the round
        "draft": rows["draft"][slot, :N].tolist(),
        "parents": parents,
        "confidence": confidence,
        "target": rows["target"][slot, : N + 1].tolist(),
        "path": path,
        "tokens": tokens,
        "pieces": event.texts,
        "accepted": event.accepted,
        "last": last,
        "exit": r.batch.budget.exit,
        "sequences": len(r.requests),
        "seconds": {stage: r.seconds.get(stage, 0.0) for stage in SPANS},
    }
    for name, count in (("probability", N), ("agreed", N), ("own", N + 1)):
        if name in rows:
            row[name] = [math.exp(min(0.0, x)) for x in rows[name][slot, :count].tolist()]
    if "probability" not in row and len(confidence) >= N > 0:
        row["probability"] = confidence[:N]
    if known is not None and request.speculates:
        row["outside"] = [n for n, token in enumerate(tokens) if token not in known]
    note = draft.note(slot)
    if N:
        row["source"] = note.source if isinstance(note, CopyStats) else source
    if N and isinstance(note, CopyStats):
        row["matched"] = note.matched
    if isinstance(draft, Branches) and isinstance(copied := draft.chain.note(slot), CopyStats):
        row["branch"] = {"row": draft.base.size + 1, **asdict(copied)}
    if isinstance(note, BlockStats):
        row["diffusion"] = asdict(note)
    return row
