"""What a round drafts: the shape that policies and measured costs agree on, and what each round teaches them."""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from specker.runtime.control.auto import TEXT_DECAY, AcceptanceHistory, Share
from specker.runtime.control.choose import NONE, Chooser
from specker.runtime.control.costs import MANY
from specker.runtime.control.policy import UNLIMITED, WHOLE, Budget, Offer, Policy, Reading
from specker.runtime.control.reasons import BEHIND, FORCED, MEASURED, MISSING, PROMPTS, RESTS
from specker.runtime.control.stats import BlockStats, CopyStats
from specker.runtime.ranks.dist import Ranks
from specker.runtime.round.batch import Batch
from specker.runtime.round.drafter import Accepted, Draft, Drafter
from specker.runtime.round.round import Round
from specker.runtime.round.state import Request

READ = Budget(-1, 0)  # for other ranks: the drafters only read
LEAST = 4  # the fewest rows of a prompt that the drafter prefills before a round
PATIENCE = 4  # texts that were looked at in vain, until a round goes without a look for copies
LOOKING = 0.01  # of the time: what looking for copies may take where they are found rarely


class DraftRunner:
    """Runs the drafters of a batch, under the decoding loop and for other engines (integrations/drafts.py)."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        history: AcceptanceHistory,
        largest: Budget,
        chunk: int = UNLIMITED,
        ranks: Ranks | None = None,
        captures: bool = False,
        learns: bool = True,
    ):
        """`drafters`: as in `round.launch`, at least one. `largest`: of the policies' drafts. `chunk`: rows of
        a prompt that the drafter prefills before a round of several requests, unless `stall` is set. `captures`: rounds
        are CUDA graphs, beside which the host's own time does not count. `learns`: see `Chooser`."""
        self.drafters, self.history, self.largest, self.chunk = drafters, history, largest, chunk
        self.ranks, self.captures = ranks, captures
        self.chooser = Chooser(history.costs, learns)
        self.stall = 0.0  # seconds that the drafter may prefill before a round of several requests
        self.more = False  # whether requests wait for a slot, which the texts that end give to them
        self.offers: list[Offer] = []  # of each drafter for the texts of the last call of `shape`
        self.reading = WHOLE  # what the drafter with a model may prefill in this round
        self.reads = False  # whether it does, also if it drafts nothing
        self._plain_round_needs_no_drafter = False  # and no other rank's agreement
        self._gains = Share(TEXT_DECAY)  # plain rounds that looks have gained
        self._vain = 0  # texts that were looked at in vain since looks repaid their time
        self._unasked = 0  # plain rounds still to come without one

    @property
    def drafter(self) -> Drafter:
        """The one that may have a model."""
        return self.drafters[0]

    def shape(self, requests: list[Request], prompts: bool = False) -> tuple[Budget, str]:
        """The shape that the chooser takes of the policies' proposals, and why it drafts nothing. Rank 0 decides, since
        measured times differ by rank. `prompts`: rows of prompts come with the verify pass. A model then drafts nothing
        where policies allow that: a draft's rows take time from the prompts, and the round has no idle arithmetic."""
        policies, began = [s.policy for s in requests], time.perf_counter()
        self.offers = [drafter.prepare(requests) for drafter in self.drafters]
        found = next((offer.matches for offer in self.offers if offer.matches), ())
        self._plain_round_needs_no_drafter = self.ranks is None and not self.drafter.reads(NONE)
        for policy, each in zip(policies, found, strict=False):
            policy.announced(each)
        budget = self._chosen(requests, policies)
        reason = self.chooser.reason
        matches = self.offers[budget.part].matches
        if not reason and matches and not any(match.matched for each in matches for match in each):
            reason = MISSING  # which a policy that never rests does not ask
        if prompts and self.yields_to_prompts(requests):
            if not budget.part and (budget.nodes or reason == BEHIND):
                budget, reason = replace(budget, nodes=0, depth=0, extra=(), beside=None), PROMPTS
            self.reads = False
        if self.ranks is not None and (policies[0].may_skip_drafting or policies[0].layers or len(policies) > 1):
            if budget.nodes and self.offers[budget.part].missing:
                missing = self._after_reading(requests, range(len(requests)))
                budget = READ if all(missing) else budget
            budget = self.ranks.budget(budget, max(1, len(policies[0].layers)))
            if budget == READ:
                budget, reason = NONE, BEHIND
        # Ranks that draft together end a draft at the same token, and measured times differ by rank.
        priced = policies[0].may_skip_drafting and not (self.ranks is not None and policies[0].layers)
        prices = self.chooser.prices(policies, budget) if priced and budget.nodes else ()
        for p, worth in zip(policies, self.chooser.worths, strict=True):
            p.worth = worth
            p.taken(budget, prices)
        self._unasked = self._looked(len(requests), reason, began) if found else UNLIMITED
        return budget, reason

    def _looked(self, n: int, reason: str, began: float) -> int:
        """How many plain rounds of n requests may follow without a look for copies, after one that began at `began`.
        Rounds that measure plain decoding go without, as plain decoding's do. Where looks repaid their time of late,
        each round has one, and after a draft, which may go on. A trial says no more than the looks before it."""
        if reason == MEASURED:
            return UNLIMITED
        took = (time.perf_counter() - began) / self.history.costs.plain(n)
        if reason in (MISSING, RESTS):
            self._gains.add(0.0)
            self._vain += n
        elif self.chooser.trial or self._gains.mean(0.0, 1.0) < took:
            return 0
        else:
            self._vain = 0
        return min(self._vain // PATIENCE, int(took / LOOKING))

    def _chosen(self, requests: list[Request], policies: list[Policy]) -> Budget:
        """The chooser's shape, and which texts the drafter with a model is to read first. Ranks read all of them, in
        every round with a draft, because each of them must know what the others have read."""
        chooser, model, others = self.chooser, self.offers[0], self.offers[1:]
        most, share = self.most(requests), self.history.used.mean(1.0)
        self.reading, self.reads = Reading(most), False
        left = [share * (s.limit - len(s.token_ids)) for s in requests]
        if self.ranks is not None:
            return chooser.choose(policies, left, [replace(model, missing=()), *others])
        call = requests[0].call
        together = len(requests) > 1 and call is not None and not self.more and all(s.call is call for s in requests)
        spread = self.history.spread if together else None
        budget = chooser.choose(policies, left, self.offers, spread=spread)
        if not model.missing:
            return budget
        if slots := chooser.unread:
            after = replace(model, missing=self._after_reading(requests, slots))
            budget = chooser.choose(policies, left, [after, *others], False, spread=spread)
        known = [slot for slot in oldest_first(requests) if slot in slots or not model.missing[slot]]
        self.reading, self.reads = Reading(most, known), bool(slots)
        return budget

    def will_skip_drafter(self, n: int) -> bool:
        """Whether the next round of n requests is plain decoding's own: the chooser rests, and the drafter neither
        looks for text to copy nor reads hidden rows. The next draft catches up. Looking takes time, too: the more often
        nothing came of it, the more rounds go without, until it takes no more than LOOKING of the time."""
        if not self._plain_round_needs_no_drafter or not self._unasked or not self.chooser.keeps_resting(n):
            return False
        self._unasked -= 1
        return True

    def yields_to_prompts(self, requests: list[Request]) -> bool:
        """Whether a model drafts for these requests, which drafts nothing while rows of prompts come with the round."""
        return self.drafter.model is not None and requests[0].policy.may_skip_drafting

    def most(self, requests: list[Request]) -> int:
        """The most tokens that the drafter may prefill before it drafts in this round. While several requests decode,
        it reads prompts in chunks, one before each round, and drafts for the others. But ranks that split a draft read
        all texts, because they draft together; other ranks may not decide by measured times, which differ."""
        model = self.drafter.model
        if len(requests) == 1 or (model is not None and model.ranks is not None):
            return UNLIMITED
        each = self.history.costs.prefill(MANY) / MANY if self.ranks is None else 0.0
        return max(LEAST, int(self.stall / each)) if each and self.stall else self.chunk

    def _after_reading(self, requests: list[Request], slots: Collection[int]) -> list[int]:
        """`Offer.missing` of the drafter with a model once it has read texts of these slots, as far as `most` says."""
        missing, left = [*self.offers[0].missing], self.most(requests)
        for slot in oldest_first(requests):
            if slot in slots:
                count = min(left, missing[slot])
                missing[slot], left = missing[slot] - count, left - count
        return missing

    def row_prices(self, requests: list[Request], budget: Budget) -> tuple[float, ...]:
        """What further rows cost in the verify pass of a batch whose policies may skip drafting (`Costs.row_prices`);
        () where every draft is verified whole."""
        policies = [s.policy for s in requests]
        if len(policies) == 1 or not policies[0].may_skip_drafting or not budget.nodes or self.chooser.trial:
            return ()
        return self.chooser.row_prices(policies, budget)

    def synchronous(self, request: Request) -> bool:
        """Whether the next draft needs the results of the previous round."""
        return request.policy.confident or any(drafter.synchronous for drafter in self.drafters)

    def fixes(self, budget: Budget) -> bool:
        """Whether the draft can have a fixed shape, for the texts of the last call of `shape`."""
        return not budget.nodes or self.offers[budget.part].fixes(budget)

    def clipped(self, requests: list[Request], budget: Budget) -> Budget:
        """Limit a draft to the longest remaining text, less one for the target's token, and to its drafter's
        context."""
        if not budget.nodes:
            return budget
        most = min(max(s.limit - len(s.token_ids) - 1 for s in requests), self.offers[budget.part].most)
        return budget.clip(min(budget.nodes, self.largest.nodes), most)

    def draft(self, batch: Batch) -> Draft:
        """Prefill what the drafter lacks, and draft."""
        drafter = self.drafters[batch.budget.part]
        drafter.advance(batch.requests, fixed=batch.fixed)
        return drafter.propose(batch)

    def accept(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Tell the drafter of a round what was accepted; where hidden rows were read, they all follow every round."""
        for part, drafter in enumerate(self.drafters):
            if part == batch.budget.part or batch.aux_layers:
                drafter.accept(batch, draft, accepted)

    def usual(self, r: Round) -> float:
        """Seconds that rounds like this one usually take."""
        return self.history.costs.round(len(r.requests), r.batch.budget, r.draft.first.size, r.draft.size)

    def learn(self, r: Round, paths: Sequence[list[int]]) -> None:
        """Take the round's time and the tokens of its `paths`, of each text, into account, but for those that grammars
        forced. Rounds that differ from later ones teach nothing: those in which layers were watched or grammars forced
        every text, and the last ones of texts, which their limits cut. One with parts of prompts says nothing of what
        rounds cost."""
        if r.forced:
            return
        n, costs, seconds = len(r.requests), self.history.costs, r.seconds
        timed = "watch" not in seconds and not r.parts and r.reason != BEHIND
        rest = seconds["verify"] + seconds["accept"] + (0.0 if self.captures else seconds["commit"] + r.other)
        if r.reason in (RESTS, MEASURED) and not r.draft.size:  # a grammar may have put tokens into some chains
            if timed:
                self.chooser.measured(n, rest, r.reason == RESTS)
            return
        drafted = max(map(r.draft.drafted, range(n))) if r.draft.constrained else r.draft.first.size
        verified = r.draft.size if r.places is None else len(r.places) / n - 1
        if r.behind:
            costs.observe_prefill(r.behind, seconds["prefill"])
        if timed:
            costs.observe(
                n, r.batch.budget, drafted, seconds["draft"], rest, verified, r.warm, drafted > 0 and r.paired
            )
        if r.reason not in (BEHIND, PROMPTS) and r.requests[0].policy.may_skip_drafting:  # only these spend the credit
            own = (len(r.draft.own(slot, path)) for slot, path in enumerate(paths))
            tokens = sum(s.policy.worth * count for s, count in zip(r.requests, own, strict=True))
            verified = drafted if r.places is None and r.draft.constrained else verified
            gained = self.chooser.finished(n, r.batch.budget, drafted, tokens, r.trial, verified)
            if drafted and self.offers[r.batch.budget.part].matches:
                self._gains.add(gained)


def oldest_first(requests: Sequence[Request]) -> list[int]:
    """The slots of requests, that which decodes for longest first. A request that ends leaves its slot to another one,
    so slots are in no order."""
    return sorted(range(len(requests)), key=lambda slot: requests[slot].prompt_length - len(requests[slot].token_ids))


def account(r: Round, slot: int, path: list[int]) -> None:
    """Show one request's part of a round to its policy and its stats."""
    request, drafted = r.requests[slot], r.draft.drafted(slot)
    outcome = r.draft.outcome(slot, path, request.token_ids[-len(path) :])
    request.policy.observe(outcome)
    stats, beside = request.stats, outcome.beside
    stats.observe_budget(drafted, r.batch.budget.exit if drafted else 0, _why(r, slot))
    stats.experts += r.experts
    if isinstance(outcome.note, BlockStats):
        stats.observe_block(outcome.note, r.draft.first.depth, len(outcome.path) - 1)
    if isinstance(note := outcome.copied.note, CopyStats):
        stats.sources[note.source] = stats.sources.get(note.source, 0) + 1
        stats.copied += bool(beside or (drafted and r.batch.budget.part))
        stats.beside += beside is not None and outcome.drafted > 0


def _why(r: Round, slot: int) -> str:
    """The reason if a request's part of a round has no draft; "" if none is known."""
    if r.reason or r.forced:
        return r.reason or FORCED
    return r.draft.idle.get(slot, "")
