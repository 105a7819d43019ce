"""Which request occupies which slot of a batch, and the K/V pages that it holds.

Active requests occupy slots 0..n-1, since a round runs over the first slots. Requests whose prompts are being prefilled
stand in slots behind them, which no round touches: in any if rounds run over the active requests alone (`several`),
otherwise one request in the last slot, which a batch of several has for it. A request is admitted when a slot is free
and every K/V pool has pages for its longest text, so memory never runs out for an admitted request.
"""

from collections.abc import Sequence

from specker.fields import option
from specker.kernels.delta_rows import BLOCK
from specker.model.cache import KVCache
from specker.model.chunks import Chunks
from specker.model.prefixes import Match, common
from specker.runtime.round.drafter import Drafter
from specker.runtime.round.state import Request, State
from specker.runtime.text import TooLong

SAVE_EVERY = 4096  # columns of a prompt between two whose recurrent states are saved, at least
WORTH_WAITING_COLUMNS = 16  # that another prompt's prefill must still compute for a request to wait for them


class Slots:
    def __init__(
        self,
        caches: Sequence[KVCache],
        drafter: Drafter,
        state: State,
        size: int,
        reserved: int,
        prefixes: str,
        chunks: Chunks | None,
        lookahead: int,
        several: bool = False,
    ):
        """`caches`: the target's and, if a draft model has one of its own, that. `drafter`: the one that may have a
        model. `size`: requests that decode at once. `reserved`: columns of a sequence beyond its text. `prefixes`:
        which K/V of earlier texts a request takes over, "exact", "all" or "off" (`--prefix-cache`). `chunks`: the
        exact ones end with a whole chunk; None if rows are bit-equal wherever they are computed. `lookahead`: the most
        columns that rounds write behind a text. `several`: prompts of several requests are prefilled at once, which
        needs rounds that leave the slots behind the active ones alone."""
        self.caches, self.cache, self.drafter, self.state = caches, caches[0], drafter, state
        self.size, self.reserved, self.lookahead = size, reserved, lookahead
        self.prefixes, self.chunks, self.several = prefixes, chunks, several
        self.active: list[Request] = []
        self.filling: dict[Request, int] = {}  # those whose prompts are being prefilled, the oldest first, and its slot
        for cache in self.caches:
            cache.release(0)

    def _free_slot(self) -> int:
        """A slot for a request whose prompt is to be prefilled."""
        if not self.several:
            return self.size if self.size > 1 else 0
        taken = {*range(len(self.active)), *self.filling.values()}
        return next(slot for slot in range(self.size + 1) if slot not in taken)

    def columns(self, limit: int) -> int:
        """The K/V columns of a sequence whose text has up to `limit` tokens."""
        return limit + self.reserved

    def check_fits(self, prompt: int, limit: int) -> None:
        """Raise TooLong if an empty pool cannot hold a text of `limit` tokens, `prompt` of them in the prompt."""
        for cache in self.caches:
            if cache.pages_for(self.columns(limit)) > cache.spare:
                most = max(0, cache.spare * cache.page_size - self.reserved)
                raise TooLong(
                    f"the prompt has {prompt} tokens and {limit - prompt} more are asked for, but the K/V pool holds "
                    f"at most {most} of one sequence: lower {option('max_new_tokens')} or raise "
                    f"{option('kv_tokens')}"
                )

    def admits(self, request: Request) -> bool:
        """Whether there is a slot and memory now. Requests that draft in different ways take turns, and one waits while
        another's prefill computes columns of its own prompt."""
        admitted = [*self.active, *self.filling]
        if len(admitted) == self.size or (self.filling and not self.several):
            return False
        if admitted and admitted[0].mode != request.mode:
            return False
        return all(cache.fits(self.columns(request.limit)) for cache in self.caches) and not self._awaits(request)

    def _awaits(self, request: Request) -> bool:
        """Whether a prefill computes columns now that the request can take over later: of a prompt that begins like its
        own. A prefill that has computed them shares them at once, but for the columns in rings, which only requests
        that have ended share."""
        if not self._shares(request):
            return False
        text, known = request.cache_ids[:-1], None
        for other, slot in self.filling.items():
            shared = common(text, other.cache_ids[:-1]) if self._shares(other) else 0
            known = self._columns_known(request) if known is None else known
            if shared - known < WORTH_WAITING_COLUMNS:
                continue
            if self.cache.rings is not None or self.cache.exact_len[slot] < shared:
                return True
            self._remember(slot, other)
            known = None
        return False

    def _shares(self, request: Request) -> bool:
        """Whether the request takes over K/V of other texts, and others its own."""
        return (request.prefixes or self.prefixes) != "off"

    def _columns_known(self, request: Request) -> int:
        """The columns of the target's cache that the request could take over now."""
        match = self._matches(request)[0]
        return 0 if match is None else match.columns

    def begin(self, request: Request) -> int:
        """Give the request pages and the K/V of earlier texts, before its prompt is prefilled. Returns the number of
        columns of the target's cache that need no prefill."""
        slot = self.filling[request] = self._free_slot()
        known = self._known(request)  # its pages may take the place of the known texts
        columns = self.columns(request.limit)
        pairs = list(zip(self.caches, self._matches(request), strict=True))
        matches = [match if cache.fits(columns, match) else None for cache, match in pairs]
        if self.drafter.aux_layers and request.speculates and None in matches:
            matches = [None] * len(pairs)  # such a drafter needs the target's rows of all columns that it lacks
        for cache, match in zip(self.caches, matches, strict=True):
            cache.take(slot, columns, match)
        request.saves, request.draft_saves = self._saves(slot, request, known)
        if request.speculates:
            self.drafter.reset(slot)
        return self.cache.exact_len[slot]

    def stop(self, request: Request, begun: int) -> int:
        """The column at which a prefill that goes on from `begun` ends at the latest: the prompt's end, or a column
        after which recurrent states are saved. Those near the end are saved then."""
        end = len(request.token_ids) - 1
        return min((n for n in request.saves if begun < n <= end - BLOCK), default=end)

    def prefilled(self, request: Request, begun: int) -> None:
        """A prefill of the request went on from column `begun`: save the recurrent states where they are to be."""
        slot, exact = self.filling[request], (request.prefixes or self.prefixes) != "all"
        end = self.cache.exact_len[slot]
        for columns in request.saves:
            if begun < columns <= end:
                self.cache.save(slot, request.cache_ids[:columns], exact)

    def activate(self, request: Request) -> None:
        """The prompt is prefilled: its request joins the active ones."""
        source, target = self.filling[request], len(self.active)
        for other, slot in self.filling.items():
            if slot == target and other is not request:  # a younger prompt stands where this request goes
                self.filling[other] = self._free_slot()
                self._move(slot, self.filling[other], other)
        del self.filling[request]
        if source != target:
            self._move(source, target, request)
        self.active.append(request)
        self.state.write(target, request)
        self._remember(target, request)

    def retire(self, request: Request) -> None:
        """Return a request's pages; the last slot's request moves to its slot."""
        if request in self.filling:
            self._release(self.filling.pop(request), request)
        else:
            slot, last = self.active.index(request), len(self.active) - 1
            self._release(slot, request)
            if slot < last:
                self.active[slot] = self.active[last]
                self._move(last, slot, self.active[slot])
                self.state.move(last, slot)
            self.active.pop()
            head = self.drafter.head
            if head is not None and request.speculates:  # plain decoding often writes the same text again (--check)
                head.count(request.token_ids[request.prompt_length :])

    def clear(self, forget: bool = False) -> None:
        """Remove all requests; with `forget` also the K/V of earlier texts and what a step that failed has left."""
        for request in [*self.filling, *reversed(self.active)]:  # in this order none moves
            self.retire(request)
        for cache in self.caches if forget else []:
            for slot in range(len(cache.exact_len)):
                cache.release(slot)
            cache.forget()

    def _matches(self, request: Request) -> Sequence[Match | None]:
        """What each cache has of the prompt. A draft's K/V decides no token, so any of it will do."""
        prefixes, text = request.prefixes or self.prefixes, request.cache_ids[:-1]
        if prefixes == "off":
            return [None] * len(self.caches)
        chunks = None if prefixes == "all" else self.chunks
        if len(self.caches) == 1:
            needs_row = self.drafter.needs_row and request.speculates
            return [self.cache.match(text[: len(text) - needs_row], chunks)]
        target = self.cache.match(text, chunks)
        if not self.drafter.keeps_prefix or not request.speculates:
            return [target, None]
        own = self.caches[1].match(self.drafter.cache_ids(request)[:-1])
        if not self.drafter.aux_layers:
            return [target, own]
        # The drafter can compute no column without the target's rows, which only a prefill has, and a column may depend
        # on later tokens, too: both caches take over the same columns.
        columns = min(target.columns, max(0, own.columns - self.drafter.tokens_ahead))
        target = self.cache.match(text[:columns], chunks)
        return [target, self.caches[1].match(text[: target.columns])]

    def _known(self, request: Request) -> int | None:
        """The columns after which the prompt leaves the known texts; None if no states are saved."""
        if not self._shares(request) or not any(cache.saves for cache in self.caches):
            return None
        return self.cache.prefixes.match(request.cache_ids[:-1]).columns

    def _saves(self, slot: int, request: Request, known: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The columns after which a prefill saves recurrent states, of the target and of a draft model: the prompt's
        end; `known`, where it leaves earlier texts, since others may do so, too; and some between, if it is long.
        None of the first BLOCK, which are computed fast. Drafters of the target's rows lack the last columns of a
        beginning (`_matches`)."""
        if known is None:
            return (), ()
        text, drafter = request.token_ids[:-1], self.drafter

        def saves(cache: KVCache, chunks: Chunks | None = None, behind: int = 0) -> tuple[int, ...]:
            least = max(BLOCK, cache.exact_len[slot] + 1)
            spacing = max(SAVE_EVERY, 2 * len(text) // max(2, cache.saves))
            found = {len(text) - behind, known - behind, *range(spacing, len(text), spacing)} if cache.saves else ()
            ends = found if chunks is None else map(chunks.whole, found)
            return tuple(sorted({end for end in ends if end >= least}))

        behind = drafter.tokens_ahead if drafter.aux_layers else 0
        drafts = len(self.caches) > 1 and drafter.keeps_prefix and request.speculates
        own = saves(self.caches[1]) if drafts else ()
        return saves(self.cache, self.chunks, behind), own

    def _remember(self, slot: int, request: Request) -> None:
        if not self._shares(request) or request.finished in ("not finite", "failed"):
            return
        prefilled = len(request.token_ids) if self.chunks is None else request.prefilled
        self.cache.remember(slot, request.cache_ids, prefilled, self.lookahead)
        if len(self.caches) > 1 and request.speculates and self.drafter.keeps_prefix:
            self.caches[1].remember(slot, self.drafter.cache_ids(request), 0, self.lookahead)

    def _release(self, slot: int, request: Request) -> None:
        self._remember(slot, request)
        for cache in self.caches:
            cache.release(slot)

    def _move(self, source: int, target: int, request: Request) -> None:
        for cache in self.caches:
            cache.move(source, target)
        if request.speculates:
            self.drafter.move(source, target)
