"""The trace that `specker.run --trace` writes and `specker.view` reads: JSON lines in UTF-8, of four kinds.

    {"specker_trace": 1, ...}   the header, the first line
    {"begin": 0, ...}           request 0 begins; a batch holds several at a time
    {"prompt": 0, ...}          one sequence's part of one round
    {"end": 0, ...}             request 0 is complete; missing after Ctrl-C

The header has `strategy`, `target`, `draft` (null without a draft model), `device`, `dtype`, `graphs`, `sampling`,
`settings` (the options in effect), `versions` and `remarks`.

`begin` has `where` (the prompt's file and line, or its flag), `turn` (from 1, of a conversation or of a line's
`turns`), `text` (the user's), `prompt_tokens` (with the chat template and the earlier turns) and `seed`.

A round's rows are the root (row 0) and the draft: draft token j is row j + 1.

    round        number of the round; the sequences of a batch share it
    position     committed tokens before the round
    tokens       ids that the round committed, without what follows a stop id or string
    pieces       the text that each of them completes; "" within a character, and for special tokens
    accepted     how many of them, from the first on, were draft tokens
    last         kind of the token after those: "recovered" (the target's, where its draft was refused), "bonus" (the
                 target's, after a wholly accepted path) or "own" (nothing was drafted, or the text's limit cut the
                 path); "accepted" if a stop id or string ended the text within the accepted path
    draft        ids; `parents`: the row of each one's parent
    probability  of each draft token after its parent, by the drafter. Above temperature 0 it includes the noise of the
                 draw. Missing where the drafter computes none: lookup, a diffusion model's blocks unless the policy
                 asks for it, and rounds of fixed shape (option `graphs`)
    agreed       of each draft token after its parent, by the target, before temperature and filters; `own`: of the
                 target's own token after each row. Missing where the target is split over ranks
    confidence   the drafter's probabilities in the order of drafting; [] unless the policy asks for them
    target       ids, the target's own token after each row
    path         accepted rows, from row 0
    exit         layers of the target that drafted (strategy del), else 0
    sequences    number of sequences that shared the round
    seconds      time of the whole round by stage: prefill (of a drafter that missed tokens), draft, verify, accept,
                 watch, commit
    outside      indices of `tokens` outside a trimmed head; missing without one
    diffusion    `runtime.stats.BlockStats` of a diffusion drafter's draft; missing without one
    source       what the draft comes from: "model" (a draft model), "head" (a head that reads the target), "layers"
                 (the target's first ones), or a copy from "prediction" (the request's), "text" (the text itself),
                 "past" (a text that ended) or "corpus" (files of the user); missing without a draft
    matched      tokens at the end of the text that occur before the copied ones; missing without a copied draft
    branch       of a draft with a copied branch: `row`, its first one, `source` and `matched`; missing without one
    names        text of the ids that this trace names for the first time, special tokens included; missing without any

`end` has `finished` (as `Generation`), `tail` (text that was held back as an unfinished character), `seconds` by stage
and `wall`. Without a tokenizer all texts are "".
"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specker.options import Sampling
from specker.runtime.control.stats import Stats
from specker.runtime.versions import settings, versions

if TYPE_CHECKING:  # it imports torch, which a command must not do before it has checked its flags
    from specker.runtime.round.state import Request

VERSION = 1


class Trace:
    """Formats what the loop reports; it decides nothing. `lines` grows with the run."""

    def __init__(self, engine: Any, sampling: Sampling):
        header = {
            "specker_trace": VERSION,
            "strategy": engine.strategy,
            "target": engine.target_name,
            "draft": engine.draft_name,
            "device": str(engine.device),
            "dtype": str(engine.dtype).removeprefix("torch."),
            "graphs": engine.loop.fixed,
            "sampling": asdict(sampling),
            "settings": settings(engine.options),
            "versions": versions(),
            "remarks": engine.remarks,
        }
        self.lines: list[str] = []
        self._tokenizer = engine.target.tokenizer_or_none
        self._open: dict[int, Request] = {}
        self._named: set[int] = set()
        self._put(header)

    def begin(self, request: "Request", where: str, turn: int, text: str) -> None:
        """Begin a request; the fields of its line are above."""
        self._open[request.index] = request
        place = {"begin": request.index, "where": where, "turn": turn}
        self._put({**place, "text": text, "prompt_tokens": request.prompt_length, "seed": request.sampling.seed})

    def round(self, row: dict[str, Any]) -> None:
        """A begun request's part of a round, as `runtime.record` makes it."""
        names = self._names({*row["tokens"], *row["draft"], *row["target"]})
        self._put(row | ({"names": names} if names else {}))

    def end(self, number: int, finished: str, stats: Stats) -> None:
        reader = self._open.pop(number).reader
        tail = "" if reader is None else reader.tail
        self._put({"end": number, "finished": finished, "tail": tail, "seconds": stats.seconds, "wall": stats.wall})

    def _names(self, ids: set[int]) -> dict[int, str]:
        if self._tokenizer is None:
            return {}
        new = sorted(ids - self._named)
        self._named.update(new)
        return {token: self._name(token) for token in new}

    def _name(self, token: int) -> str:
        """The token's text after another one: many tokenizers drop the space of a first token."""
        alone = self._tokenizer.decode([token])
        return self._tokenizer.decode([token, token])[len(alone) :] or alone

    def _put(self, line: dict[str, Any]) -> None:
        self.lines.append(json.dumps(line))
