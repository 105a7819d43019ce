"""Ten bugs that speculative decoders have had. Each is injected here and caught by a named check.

A check passes without its bug and fails with it. The expected tokens are independent of the runtime: transformers'
model, recomputed from scratch for every token, and the sampling formula written out in this file.
"""

import pytest
import torch
from make_checkpoint import make, oracle
from one_round import after_every_round, apart
from pairs import perturbed

import specker
from specker.kernels.noise import gumbel
from specker.model import cache, sampling
from specker.model import rows as begins
from specker.model.decoder import Final
from specker.model.prefixes import Match, Prefixes
from specker.options import Sampling
from specker.runtime import loop
from specker.runtime.round import lm_head as head
from specker.runtime.round import round
from specker.runtime.strategies import growth
from specker.runtime.strategies.model_drafter import AutoregressiveDrafter
from specker.runtime.strategies.vocabtrim.head import TrimmedHead

PROMPT, COUNT = [5, 9, 40, 77], 24
HOT = {"temperature": 0.6, "top_p": 0.7, "seed": 11}


def truth(model, sampling: dict) -> list[int]:
    """Plain decoding without a cache."""
    s, ids = Sampling(**sampling), list(PROMPT)
    for _ in range(COUNT):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        if s.temperature > 0:
            p, order = (logits / s.temperature).softmax(0).sort(descending=True)
            inside = p.cumsum(0) - p < s.top_p
            noise = gumbel(s.seed, torch.tensor([len(ids) - 1]), len(logits))[0]
            kept = order[inside]
            ids.append(int(kept[(p[inside].log() + noise[kept]).argmax()]))
        else:
            ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), layers=2)
    draft = perturbed(target, tmp_path_factory.mktemp("draft"))
    model = oracle(target, torch.float64)
    return {"target": target, "draft": draft, "greedy": truth(model, {}), "hot": truth(model, HOT)}


@pytest.fixture(params=["off", "on"], ids=["by the host", "by the device"])
def world(made, request):
    """Rows placed by the host and, once the text is long enough, by the device. The bugs are the same."""
    return {**made, "graphs": request.param}


def engine(world, draft="draft", **options):
    how = {"strategy": "draft", "dtype": "float64", "device": "cpu", "page_size": 8, "graphs": world["graphs"]}
    return specker.load(world["target"], world[draft], **how | options)


def greedy_tree_tokens(world):
    assert engine(world, tree="3x3").generate(PROMPT, COUNT).tokens == world["greedy"]


def sampled_chain_tokens(world):
    assert engine(world, draft_tokens=4).generate(PROMPT, COUNT, **HOT).tokens == world["hot"]


def a_request_after_another_text(world):
    chain = engine(world, draft_tokens=4)
    chain.generate([7, 7, 7], 8)
    for _ in range(2):
        assert chain.generate(PROMPT, COUNT).tokens == world["greedy"]


def perfect_draft_is_always_accepted(world):
    stats = engine(world, draft="target", tree="8x2").generate(PROMPT, COUNT).stats
    assert stats.rounds == COUNT // 3


def drafter_cache_is_exact(world):
    fast, worst = engine(world, tree="3x3"), 0.0

    def look(_, r):
        nonlocal worst
        own = fast.drafter
        worst = max(worst, apart(own.model, own.cache, r.requests[0].token_ids, own.cache.exact_len[0]))

    with after_every_round(pytest.MonkeyPatch(), look):
        fast.generate(PROMPT, COUNT)
    assert worst < 1e-12


def stop_ends_the_text(world):
    fast = engine(world, draft="target", draft_tokens=5)
    stop = world["greedy"][2]  # the third token of the first accepted path
    assert fast.generate(PROMPT, COUNT, stop_ids=[stop]).tokens == world["greedy"][: world["greedy"].index(stop) + 1]


def trimmed_head_speaks_full_ids(world):
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(12, 8, generator=generator), torch.randn(2, 8, generator=generator)
    ids = torch.arange(12) * 2 + 1
    head, final = TrimmedHead(weight, torch.ones(8), 1e-6, ids=ids), Final(hidden)
    got, _ = head.candidates(final, 1, sampling.GREEDY, torch.arange(2))
    assert got[:, 0].tolist() == ids[(hidden @ weight.T).argmax(1)].tolist()


def root_off_by_one(patch):
    original = round._verify

    def verify(r, *rest):
        r.batch.window[:, 0] ^= 1
        original(r, *rest)
        r.batch.window[:, 0] ^= 1

    patch.setattr(round, "_verify", verify)


def stale_kv_after_rejected_draft(patch):
    """Accepted rows count as exact, although a tree's rows may lie in another row's column."""
    made, accept = AutoregressiveDrafter.__init__, AutoregressiveDrafter.accept

    def init(self, model, cache, head, width=1, depth=0, layers=None):
        made(self, model, cache, head, width, 0, layers)  # fixed shapes: only the root is forwarded again

    def counted(self, batch, draft, accepted):
        if batch.fixed:
            accept(self, batch, draft, accepted)
        else:
            for slot, path in enumerate(accepted.paths):
                self.cache.exact_len[slot] += min(draft.forwarded, len(path) - 1)

    patch.setattr(AutoregressiveDrafter, "__init__", init)
    patch.setattr(AutoregressiveDrafter, "accept", counted)


def commit_of_the_wrong_branch(patch):
    original = cache.KVCache.shift
    patch.setattr(cache.KVCache, "shift", lambda self, src, dst: original(self, src + (src != dst).long(), dst))


def noise_keyed_by_row(patch):
    original = sampling.sample_rows

    def sample(logits, temperature, top_k, top_p, seed, positions, draw):
        return original(logits, temperature, top_k, top_p, seed, torch.arange(len(logits)), draw)

    patch.setattr(sampling, "sample_rows", sample)


def id_map_applied_twice(patch):
    original = head.vocab_topk

    def twice(hidden, weight, token_ids, *rest, **more):
        ids, scores, lse = original(hidden, weight, token_ids, *rest, **more)
        return token_ids[ids % len(token_ids)], scores, lse

    patch.setattr(head, "vocab_topk", twice)


def missing_mask_bit(patch):
    def missing(original):
        def place(*args, **more):
            *placed, words = original(*args, **more)
            words = words.clone()
            words[1:] &= ~1  # no row sees the root
            return *placed, words

        return place

    patch.setattr(cache, "place_rows", missing(cache.place_rows))
    patch.setattr(begins, "start_rows", missing(begins.start_rows))


def sibling_order_swapped(patch):
    original = growth._tree

    def swapped(batch, *rest):
        original(batch, *rest)
        batch.window[:, 1:3] = batch.window[:, 1:3].flip(1)

    patch.setattr(growth, "_tree", swapped)


def stop_ignored_inside_a_path(patch):
    original = loop.emitted

    def emitted(r, slot, path, tokens, known):
        stops = r.requests[slot].stop_ids
        if tokens[-1] not in stops:
            r.requests[slot].stop_ids = frozenset()
        event = original(r, slot, path, tokens, known)
        r.requests[slot].stop_ids = stops
        return event

    patch.setattr(loop, "emitted", emitted)


def top_p_before_temperature(patch):
    original = sampling.sample_rows

    def sample(logits, temperature, top_k, top_p, seed, positions, draw):
        p, order = logits.softmax(-1).sort(descending=True)
        outside = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, p.cumsum(-1) - p >= HOT["top_p"])
        cut = logits.masked_fill(outside, -1e30)
        if draw is None:
            return original(cut, temperature, top_k, 1.0, seed, positions)
        numbers = sampling.pack(Sampling(**{**HOT, "top_p": 1.0})).expand(len(draw), -1)
        return original(cut, temperature, top_k, 1.0, seed, positions, numbers)

    patch.setattr(sampling, "sample_rows", sample)


def prefix_of_another_text(patch):
    def match(self, text, chunks=None):  # the first column of an earlier text, whatever it was
        pages = [node.page for node in self.root.children.values()]
        return Match(1, (), pages[0]) if pages else Match()

    patch.setattr(Prefixes, "match", match)


BUGS = [
    (root_off_by_one, greedy_tree_tokens),
    (stale_kv_after_rejected_draft, drafter_cache_is_exact),
    (commit_of_the_wrong_branch, greedy_tree_tokens),
    (noise_keyed_by_row, sampled_chain_tokens),
    (id_map_applied_twice, trimmed_head_speaks_full_ids),
    (missing_mask_bit, greedy_tree_tokens),
    (sibling_order_swapped, perfect_draft_is_always_accepted),
    (stop_ignored_inside_a_path, stop_ends_the_text),
    (top_p_before_temperature, sampled_chain_tokens),
    (prefix_of_another_text, a_request_after_another_text),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in BUGS), ids=lambda c: c.__name__)
def test_the_check_passes_on_the_code_as_it_is(world, check):
    check(world)


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_the_bug_is_caught(world, monkeypatch, bug, check):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        check(world)
