"""A draft chain in one call of the compiled library. test_recurrent.py has those of layers with a state."""

import torch
from stacks import cache_of, model_of

from specker.cpu import Vocabulary, draft_chain

STEPS = 9


def drafted(model, cache, length, slots):
    """The tokens that each sequence of `slots` drafts after one more token, all in one call."""
    count = len(slots)
    rows = cache.after([length] * 8, [1] * 8)
    some = torch.tensor(slots)
    bounds = torch.arange(count + 1, dtype=torch.int32)
    layers = list(range(len(model.layers) + 1))
    tokens, _ = draft_chain(
        model.stack,
        Vocabulary(model.embed, 1.0, model.head, None, None, "float32"),
        tokens=some + 5,
        rows=(
            (cache.k, cache.v),
            (rows.positions[some], rows.slots[some]),
            (bounds, rows.kv_len[some], rows.window[some]),
            None,
            rows.table[some],
        ),
        groups=(layers, layers),
        columns=[length + 1] * count,
        last_position=length + STEPS,
        steps=STEPS,
        sampling=[(0.0, 0)] * count,
        rules=None,
    )
    return tokens.T.tolist()


def test_chains_that_pass_the_end_of_a_span(tmp_path):
    """From the second token on, threads divide the columns, for which the first one needs no memory. Several sequences
    draft what each drafts alone."""
    model = model_of(tmp_path, heads=16, kv_heads=16, layers=2, max_context=1400)
    cache = cache_of(model, 8, 832)
    for x in cache.kv:
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    with torch.inference_mode():
        alone = [drafted(model, cache, 766, [b])[0] for b in range(8)]
        assert drafted(model, cache, 766, list(range(8))) == alone
    assert len({*map(tuple, alone)}) == 8
