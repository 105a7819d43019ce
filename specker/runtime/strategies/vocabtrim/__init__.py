"""Strategy `vocabtrim`: the drafter's LM head keeps only the rows of frequent tokens (VocabTrim, arXiv 2506.22694).

It trims the head of another strategy's drafter: `+vocabtrim` after that strategy's name. Alone it means
draft+vocabtrim. The paper's metric is the memory-bound speed-up

    MBSU = tau / (c gamma + 1)

with tau the acceptance length, c the bytes of a draft step over those of a target step and gamma the draft steps per
round. Noise depends on a token's id in the full vocabulary, so trimming can cost acceptance but never changes the text.
Beyond the paper, a few rows follow the text (head.py), and no score file is needed. Without one, ids rank by what
targets with this tokenizer wrote in earlier runs (counts.py), then in the order in which the tokenizer learnt them
(order.py). Counted ids go first even if few tokens were counted: an id that occurred once is more probable than one
that never did, and the few ids of a short count only replace the last kept rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specker.fields import check_fields, opt
from specker.options import VocabKeep

TRIM = "vocabtrim"
LEARN = "SPECKER_VOCAB_LEARN"  # the environment's variable: "off" neither counts what targets write nor ranks by it


@dataclass(frozen=True)
class TrimOptions:
    vocab_scores: str | None = opt(
        None,
        "file with token frequencies (default: the bundled one for the target's tokenizer, if any); see specker "
        "calibrate",
        "FILE",
    )
    vocab_keep: VocabKeep | None = opt(
        None,
        "rows of the draft's head to keep: 8192, 0.25 of them, or coverage:0.98 of a score file's tokens (default: "
        "0.125, 0.25 without a score file, or all ids of a file without counts)",
        "ROWS|X|coverage:X",
        parse=VocabKeep.parse,
    )
    # In documents of up to 4,000 tokens, beside an eighth of the rows, 256 more cover 4 to 6 points more of the text,
    # and 1,024 no more than 256 (bench/LOG.md).
    vocab_text: int = opt(
        256, "further rows for tokens of the text that are not in the kept rows; 0: none", least=0, flag=False
    )

    def __post_init__(self) -> None:
        check_fields(self)


class VocabTrim:
    """What lists of strategies say of it. It drafts nothing itself, so it is no `Strategy`."""

    name = TRIM
    summary = "a smaller LM head for the drafter of another strategy (alone: of draft)"
    paper = "VocabTrim (2506.22694)"
    needs = "a draft model"
    options = TrimOptions
    published: Mapping[str, Any] = MappingProxyType({"vocab_keep": "0.25", "vocab_text": 0})
    """See `Strategy.published`. The paper keeps about 33,000 of 128,256 rows."""
