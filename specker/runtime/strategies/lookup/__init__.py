"""Strategy `lookup`: copies the draft from known texts (prompt lookup decoding, Saxena 2023; LLMA, arXiv 2304.04487;
from other texts, SuffixDecoding, arXiv 2411.04975). It needs no second model.

The draft continues the longest recent suffix of the text that occurred before. With n tokens of suffix,

    draft = text[p : p + k]     p = the latest position with text[p - n : p] = text[-n:], for the largest possible n

where `text` is the text itself, one that the engine ended earlier, or a file of the user. Where several positions have
the longest suffix, the draft follows most of them at each token (cpu/suffixes.py). A tree merges common prefixes.

The published method always drafts the same k. But a match of one token is right in a third of the cases, one of eight
tokens in four of five, and a wrong token costs its row in the verify pass. Policy `auto` takes the k with the most
expected tokens for its measured cost (choose.py), or none. With a_n the share of right tokens after matches of n
tokens in this source, a draft of k tokens is expected to commit

    E(k) = 1 + a_n + .. + a_n^k
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specker.fields import check_fields, opt, option
from specker.options import Options
from specker.runtime.control.policy import AUTO, CONFIDENT, Budget, Policy
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy
from specker.runtime.strategies.lookup.ngram_policy import NgramPolicy

if TYPE_CHECKING:
    from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter

LENGTH = 8  # tokens of a draft chain, for policies that do not choose it
# Tokens of the shortest and of the longest suffix to look for. Policy `auto` learns what a match of each length is
# worth, so short ones do no harm, and copies after eight tokens are right as often as after seven (ngram_policy.py).
SUFFIXES = 1, 8
MEMORY = 64 << 20  # bytes for ended texts, and for a corpus: nearly two million tokens


@dataclass(frozen=True)
class LookupOptions:
    lookup_share: str = opt(
        "on", "also copy from the texts that this engine ended before, or not (off)", choices=("on", "off")
    )
    lookup_corpus: str | None = opt(
        None, "also copy from these files: a text, JSON lines with text, or a folder of them", "FILE|DIR"
    )
    lookup_file: str | None = opt(
        None, "keep the ended texts in this file, which is read at the start; only its owner can read it", "FILE"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lookup_corpus is not None and not Path(self.lookup_corpus).expanduser().exists():
            raise ValueError(f"{option('lookup_corpus', self.lookup_corpus)}: there is no such file or folder")
        if self.lookup_file is not None and self.lookup_share == "off":
            raise ValueError(f"{option('lookup_file')} keeps texts to copy, but {option('lookup_share', 'off')}")


class Lookup(Strategy):
    name = "lookup"
    summary = "copies what followed an earlier occurrence of the last tokens"
    paper = "prompt lookup (Saxena 2023), LLMA (2304.04487), SuffixDecoding (2411.04975)"
    options = LookupOptions
    no_head = "lookup runs no draft model, so it has no draft head"

    def check(self, options: Options) -> None:
        if options.policy in CONFIDENT:
            policy = option("policy", options.policy)
            raise ValueError(f"{policy} needs the confidence of a model, but lookup runs none")

    def drafter(self, context: DraftContext) -> LookupDrafter:
        """Raises ValueError for a corpus that is not text or too large, and for a file of kept texts that is none or of
        another model."""
        from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter
        from specker.runtime.strategies.lookup.corpus import read
        from specker.runtime.strategies.lookup.text_file import TextFile

        o, target, longest = context.options, context.target, context.depth(self)
        file = None if o.own.lookup_file is None else TextFile(o.own.lookup_file, target)
        return LookupDrafter(o.own.lookup_share == "on", o.width, longest, read(o.own, target), file)

    def auto(self, context: PolicyContext, size: Budget) -> Policy:
        assert context.history is not None
        return NgramPolicy(context.history.matches, size)

    def plan(self, context: PolicyContext) -> Plan:
        """A continuation may be short, so the warm-up verifies drafts of every size."""
        largest = super().plan(context).largest
        sizes = tuple(range(largest.nodes + 1))
        return Plan(largest, (), sizes, sizes)

    def size(self, options: Options) -> Budget:
        if options.tree is None and options.draft_tokens is None and options.policy != AUTO:
            return Budget(LENGTH, LENGTH)
        return super().size(options)
