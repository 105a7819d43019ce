"""A draft chain in one call of the compiled library. test_recurrent.py has those of layers with a state."""

import torch
from stacks import cache_of, model_of

from specker.cpu import CachedRows, Chains, Committed, Vocabulary, draft_chain
from specker.runtime.control.policy import StopRule

STEPS = 9


def drafted(model, cache, length, slots, rules=None):
    """The tokens that each sequence of `slots` drafts after one more token, in one call, and their probabilities."""
    count = len(slots)
    rows = cache.after([length] * 8, [1] * 8)
    some = torch.tensor(slots)
    bounds = torch.arange(count + 1, dtype=torch.int32)
    layers = list(range(len(model.layers) + 1))
    tokens, probability = draft_chain(
        model.stack,
        Vocabulary(model.embed, 1.0, model.head, None, None, "float32"),
        CachedRows(
            (cache.k, cache.v),
            rows.positions[some],
            rows.slots[some],
            bounds,
            rows.kv_len[some],
            rows.window[some],
            None,
            rows.table[some],
        ),
        Committed(some + 5),
        (layers, layers),
        Chains([length + 1] * count, length + STEPS, STEPS, [(0.0, 0)] * count, rules),
    )
    return tokens.T.tolist(), probability


def test_chains_that_pass_the_end_of_a_span(tmp_path):
    """From the second token on, threads divide the columns, for which the first one needs no memory. Several sequences
    draft what each drafts alone."""
    model = model_of(tmp_path, heads=16, kv_heads=16, layers=2, max_context=1400)
    cache = cache_of(model, 8, 832)
    for x in cache.kv:
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    with torch.inference_mode():
        alone = [drafted(model, cache, 766, [b])[0][0] for b in range(8)]
        assert drafted(model, cache, 766, list(range(8)))[0] == alone
    assert len({*map(tuple, alone)}) == 8


def test_a_sequence_without_a_vote_and_one_of_nan(tmp_path):
    """A text beyond the draft's context reads columns that nobody wrote. Its NaN are probabilities of 0, whether it has
    a vote or not."""
    model = model_of(tmp_path, heads=4, kv_heads=4, layers=2)
    cache = cache_of(model, 8, 96)
    for x in cache.kv:
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
        x[:, cache.table[0, :5].long()] = float("nan")
    on, off = StopRule(), StopRule(token=2.0)
    with torch.inference_mode():
        for rules, length in (
            ((None, on), STEPS),
            ((None, off), 1),
            ((off, on), STEPS),
            ((off, off), 1),
        ):
            tokens, probability = drafted(model, cache, 60, [0, 1], rules)
            assert len(tokens[0]) == length, rules
            assert (probability[:, 0] == 0).all() and (probability[:, 1] > 0).all()
        most = StopRule(token=0.7 * probability[0, 1])  # the other one's token is worth nothing
        assert len(drafted(model, cache, 60, [0, 1], (None, most))[0][0]) > 1
        assert len(drafted(model, cache, 60, [0, 1], (off, most))[0][0]) == 1
