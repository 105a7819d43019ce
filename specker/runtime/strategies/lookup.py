"""Strategy `lookup`: copies the draft from the text (prompt lookup decoding, Saxena 2023; LLMA, arXiv 2304.04487). It
needs no second model.

The draft continues the longest recent suffix of the text that occurred before. With n tokens of suffix,

    draft = text[p : p + k]     p = the latest position with text[p - n : p] = text[-n:], for the largest possible n

A tree takes the latest occurrences with different continuations, longest suffix first, and merges common prefixes.

The published method always drafts the same k. But a match of one token is right in a third of the cases, one of eight
tokens in four of five, and a wrong token costs its row in the verify pass. Policy `matched` therefore takes the k with
the most expected tokens for its cost. With a_n the share of right tokens after matches of n tokens and c the cost of a
row over a step of plain decoding,

    k = argmax (1 + a_n + .. + a_n^k) / (1 + c k)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from specker.config import Options
from specker.flags import opt, settle
from specker.runtime.draft import Drafter
from specker.runtime.policy import CONFIDENT, Budget, Outcome, Policy
from specker.runtime.round import Round
from specker.runtime.state import Sequence
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy

LENGTH = 8  # tokens of a draft chain, for policies that do not choose it
LONGEST_MATCHED = 12  # tokens of the longest draft of policy `matched`
# a_n before a text has shown its own, for n = 1, 2, ..; the last one for all longer matches.
RATES = (0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.8)
PRIOR, DECAY = 8.0, 0.9  # tokens that RATES count for; the decay of a_n's counts at each draft after such a match


@dataclass(frozen=True)
class LookupOptions:
    ngram_most: int = opt(8, "longest suffix of the text to look for", least=1, most=64)
    ngram_least: int = opt(1, "shortest suffix to look for", least=1, most=64)

    def __post_init__(self) -> None:
        settle(self)
        if self.ngram_least > self.ngram_most:
            raise ValueError(
                f"--ngram-least must be at most --ngram-most, got {self.ngram_least} and {self.ngram_most}"
            )


@dataclass
class Index:
    """The end positions of every n-gram of one text; grows with the text."""

    least: int
    most: int
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> positions after it, ascending
    seen: int = 0  # tokens whose n-grams are indexed

    def follow(self, text: list[int]) -> None:
        """Index the n-grams that end before the end of the text: a suffix must not find itself."""
        for end in range(max(self.seen, self.least), len(text)):
            for n in range(self.least, min(self.most, end) + 1):
                self.ends.setdefault(tuple(text[end - n : end]), []).append(end)
        self.seen = max(self.seen, len(text))

    def match(self, text: list[int]) -> int:
        """The length of the longest suffix that occurred before; 0 if none did."""
        lengths = range(min(self.most, len(text) - 1), self.least - 1, -1)
        return next((n for n in lengths if tuple(text[-n:]) in self.ends), 0)

    def continuations(self, text: list[int], length: int) -> Iterator[tuple[int, ...]]:
        """Up to `length` tokens after each earlier occurrence of the text's suffix: longest suffix first, then latest
        occurrence first."""
        for n in range(min(self.most, len(text) - 1), self.least - 1, -1):
            for end in reversed(self.ends.get(tuple(text[-n:]), ())):
                yield tuple(text[end : end + length])


@dataclass
class Matched(Policy):
    """The length of a chain by the length of the match (the module's docstring has the equation)."""

    row: float  # c
    matched: int = 0  # tokens of the last match
    counts: dict[int, tuple[float, float]] = field(default_factory=dict)  # n -> (right tokens, tokens), decayed

    def budget(self) -> Budget:
        return Budget(LONGEST_MATCHED, LONGEST_MATCHED)

    def length(self, matched: int) -> int:
        """Tokens to draft after a match of `matched` tokens."""
        self.matched = matched
        right, seen = self._counts(matched)
        a, tokens, best, found = right / seen, 1.0, 1.0, 0
        for k in range(1, LONGEST_MATCHED + 1):
            tokens += a**k
            if tokens / (1 + self.row * k) > best:
                best, found = tokens / (1 + self.row * k), k
        return max(1, found)  # a draft of one token keeps the statistics alive

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if outcome.drafted:
            right, seen = self._counts(self.matched)
            accepted = len(outcome.path) - 1
            compared = min(accepted + 1, outcome.drafted)  # what follows a wrong token is not compared
            self.counts[self.matched] = DECAY * right + accepted, DECAY * seen + compared

    def _counts(self, matched: int) -> tuple[float, float]:
        prior = RATES[min(matched, len(RATES)) - 1] * PRIOR, PRIOR
        return self.counts.get(matched, prior)


class LookupDrafter(Drafter):
    reads = True  # a draft needs the tokens of the previous round

    def __init__(self, options: LookupOptions, width: int):
        self.options, self.width = options, width
        self._indices: dict[Sequence, Index] = {}

    def fixed(self, length: int, budget: Budget) -> bool:
        return True

    def draft(self, r: Round) -> None:
        """Draft for all sequences. A text without a match drafts nothing; shorter drafts are padded."""
        depth, new = min(r.budget.depth, r.budget.nodes), Index(self.options.ngram_least, self.options.ngram_most)
        self._indices = {s: self._indices.get(s) or replace(new, ends={}) for s in r.sequences}
        found = [self._tree(sequence, depth, r.budget.nodes) for sequence in r.sequences]
        r.write([tokens for tokens, _ in found], [parents for _, parents in found])

    def _tree(self, sequence: Sequence, depth: int, nodes: int) -> tuple[list[int], list[int]]:
        """The tokens and parents (rows) of a sequence's draft."""
        text = sequence.text
        index = self._indices[sequence]
        index.follow(text)
        if isinstance(sequence.policy, Matched) and (matched := index.match(text)):
            depth = min(depth, sequence.policy.length(matched))
        row_of: dict[tuple[int, ...], int] = {(): 0}
        tokens: list[int] = []
        parents: list[int] = []
        paths = 0
        for path in index.continuations(text, depth):
            known = path in row_of
            for n in range(1, len(path) + 1):
                if path[:n] not in row_of and len(tokens) < nodes:
                    tokens.append(path[n - 1])
                    parents.append(row_of[path[: n - 1]])
                    row_of[path[:n]] = len(tokens)
            paths += not known
            if paths == self.width or len(tokens) == nodes:
                break
        return tokens, parents


class Lookup(Strategy):
    name = "lookup"
    summary = "copies what followed an earlier occurrence of the last tokens"
    paper = "prompt lookup (Saxena 2023), LLMA (2304.04487)"
    options = LookupOptions
    policies = ("matched",)
    no_head = "lookup runs no draft model, so it has no draft head"

    def default_policy(self, options: Options) -> str:
        return "matched" if options.draft_tokens is None and options.tree is None else "fixed"

    def check(self, options: Options) -> None:
        if options.policy == "matched" and options.draft_tokens is not None:
            raise ValueError("--policy matched chooses the length of a draft: --draft-tokens does not apply")
        if options.policy in CONFIDENT:
            raise ValueError(f"--policy {options.policy} needs the confidence of a model, but lookup runs none")

    def drafter(self, context: DraftContext) -> LookupDrafter:
        return LookupDrafter(context.options.own, context.options.width)

    def policy(self, context: PolicyContext) -> Policy:
        if context.options.policy == "matched":
            return Matched(context.row)
        return super().policy(context)

    def plan(self, context: PolicyContext) -> Plan:
        """A continuation may be short, so the warm-up verifies drafts of every size."""
        largest = super().plan(context).largest
        sizes = tuple(range(largest.nodes + 1))
        return Plan(largest, (), sizes, sizes)

    def size(self, options: Options) -> Budget:
        if options.policy == "matched":
            return Budget(LONGEST_MATCHED, LONGEST_MATCHED)
        if options.tree is None and options.draft_tokens is None:
            return Budget(LENGTH, LENGTH)
        return super().size(options)
