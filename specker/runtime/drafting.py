"""What a round drafts: the shape that policies and measured costs agree on, and what each round teaches them."""

import time

from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.choose import NONE, Chooser
from specker.runtime.control.policy import Budget, Outcome
from specker.runtime.ranks.dist import Ranks
from specker.runtime.round.drafter import Drafter
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request

LEAST = 4  # the fewest rows of a prompt that the drafter prefills before a round
BEHIND = "prefill"  # why a round drafts nothing: the drafter is prefilling a prompt


class Drafting:
    def __init__(
        self,
        drafter: Drafter,
        known: AcceptanceHistory,
        largest: Budget,
        chunk: int,
        ranks: Ranks | None = None,
        captures: bool = False,
    ):
        """`largest`: of the policies' drafts. `chunk`: rows of a prompt that the drafter prefills before a round of
        several requests, unless `stall` is set. `captures`: rounds are CUDA graphs, beside which the host's own time
        does not count."""
        self.drafter, self.known, self.largest, self.chunk = drafter, known, largest, chunk
        self.ranks, self.captures = ranks, captures
        self.chooser = Chooser(known.costs)
        self.stall = 0.0  # seconds that the drafter may prefill before a round of several requests
        self._delayed: Budget | None = None  # to draft once the drafter has prefilled the texts

    def shape(self, requests: list[Request]) -> tuple[Budget, str]:
        """The shape that the chooser takes of the policies' proposals, and why it drafts nothing. Rank 0 decides, since
        measured times differ by rank."""
        policies = [s.policy for s in requests]
        budget, reason = self._delayed, self.chooser.reason
        if budget is None:
            self.drafter.announce(requests)
            remaining = sum(s.limit - len(s.text) for s in requests)
            budget = self.chooser.choose(policies, remaining, self.drafter.behind(requests))
            reason = self.chooser.reason
        self._delayed = None
        if not self._caught_up(requests, budget):
            self._delayed, budget, reason = budget, NONE, BEHIND
        if self.ranks is not None and (policies[0].may_skip_drafting or policies[0].layers or len(policies) > 1):
            budget = self.ranks.budget(budget, len(policies[0].layers))
        prices = self.chooser.prices(policies, budget) if policies[0].may_skip_drafting and budget.nodes else ()
        for p in policies:
            p.taken(budget, prices)
        return budget, reason

    def _caught_up(self, requests: list[Request], budget: Budget) -> bool:
        """Whether the drafter may prefill what it lacks within the round. While several requests decode, a longer part
        of a prompt is prefilled in chunks, one before each round."""
        drafter = self.drafter
        if len(requests) == 1 or not budget.nodes or budget.part or drafter.cache is None:
            return True
        each = self.known.costs.prefill(1)
        chunk = max(LEAST, int(self.stall / each)) if each and self.stall else self.chunk
        if drafter.behind(requests) <= chunk:
            return True
        start = time.perf_counter()
        if not (count := drafter.advance(requests, chunk)):
            return True
        spent = time.perf_counter() - start
        self.known.costs.observe_prefill(count, spent)
        for request in requests:
            request.stats.seconds["prefill"] += spent / len(requests)
        return False

    def price(self, requests: list[Request], budget: Budget) -> float:
        """What a row costs in the verify pass of a batch whose policies rest; 0 where every draft is verified whole."""
        policies = [s.policy for s in requests]
        if len(policies) == 1 or not policies[0].may_skip_drafting or not budget.nodes or self.chooser.trial:
            return 0.0
        return self.chooser.row_price(policies, budget)

    def synchronous(self, request: Request) -> bool:
        """Whether the next draft needs the results of the previous round."""
        return self.drafter.synchronous or request.policy.confident

    def fixes(self, requests: list[Request], budget: Budget) -> bool:
        """Whether the draft can have a fixed shape."""
        return not budget.nodes or all(self.drafter.fixed(len(s.text), budget) for s in requests)

    def clipped(self, requests: list[Request], budget: Budget) -> Budget:
        """Limit a draft to the longest remaining text, less one for the target's token, and the drafter's context."""
        if not budget.nodes:
            return budget
        left = max(s.limit - len(s.text) - 1 for s in requests)
        own = max(self.drafter.left(len(s.text)) for s in requests)
        return budget.clip(min(budget.nodes, self.largest.nodes), min(left, own))

    def learn(self, r: Round, tokens: int) -> None:
        """Take the round's time and its `tokens` into account, but for those that grammars forced. Rounds that differ
        from later ones teach nothing: those in which layers were watched or grammars forced every text, and the last
        ones of texts, which their limits cut."""
        if r.forced:
            return
        n, costs, seconds = len(r.requests), self.known.costs, r.seconds
        drafted = max(map(r.draft.drafted, range(n))) if r.draft.constrained else r.draft.size
        verified = r.draft.size if r.places is None else len(r.places) / n - 1
        if r.behind:
            costs.observe_prefill(r.behind, seconds["prefill"])
        if "watch" not in seconds:
            rest = seconds["verify"] + seconds["accept"] + (0.0 if self.captures else seconds["commit"])
            if r.reason == "measured" and not r.draft.size:  # a grammar may have put tokens into some chains
                self.chooser.measured(n, rest)
            else:
                costs.observe(n, r.budget, drafted, seconds["draft"], rest, verified)
        if r.reason != BEHIND:
            verified = drafted if r.places is None else verified
            self.chooser.finished(n, r.budget, drafted, tokens, r.trial, r.behind, verified)


def account(r: Round, slot: int, path: list[int]) -> None:
    """Show one request's part of a round to its policy and its stats."""
    request, draft, drafted = r.requests[slot], r.draft, r.draft.drafted(slot)
    found = draft.found[slot] if draft.found else None
    confidence = [each[slot] for each in draft.confidence]
    request.policy.observe(Outcome(drafted, draft.own(slot, path), confidence, found))
    stats = request.stats
    stats.observe_budget(drafted, r.budget.exit if drafted else 0, r.reason)
    stats.copied += bool(drafted and r.budget.part)
    stats.experts += r.experts
    if found is not None:
        stats.observe_found(found, draft.depth, len(path) - 1)
