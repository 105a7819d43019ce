"""parent_of: a row's parent from its ancestor bits, against Python's integers."""

import torch

from specker.kernels.ancestors import pack_bits, parent_of
from specker.kernels.variant import tl, triton


@triton.jit
def _parents_kernel(words_ptr, at_ptr, tile_ptr, each_ptr, T, W: tl.constexpr, ROWS: tl.constexpr):
    o_t = tl.arange(0, ROWS)
    m_t = o_t < T
    b_at = tl.load(at_ptr + o_t, mask=m_t, other=0)
    tl.store(tile_ptr + o_t, parent_of(words_ptr, o_t, m_t, b_at, W), mask=m_t)
    for t in tl.range(0, T):
        tl.store(each_ptr + t, parent_of(words_ptr, t, True, tl.load(at_ptr + t), W))


def test_the_highest_bit_below_a_row():
    """Single bits, runs of bits, which a float would round up, and windows of several words; a row's own bit and
    later ones do not count."""
    for W in (1, 2, 4):
        rows = [(b, 1 << b + 1 | 1 << b) for b in range(64 * W)]  # nothing before the row
        rows += [(b + 1, 7 << b) for b in range(64 * W - 3)]  # its parent is the column before it
        rows += [(b, (1 << b + 1) - 1) for b in range(64 * W)]  # a chain
        rows += [(64 * W - 1, (1 << b) - 1) for b in range(64 * W)]
        rows += [(b, 0) for b in (-1, 0, 64 * W)] + [(-1, 1)]
        bits = [b & ((1 << 64 * W) - 1) for _, b in rows]
        words = pack_bits(bits, 64 * W)
        at = torch.tensor([w for w, _ in rows], dtype=torch.int32)
        tile, each = (torch.full_like(at, 99) for _ in range(2))
        _parents_kernel[(1,)](words, at, tile, each, len(at), W, triton.next_power_of_2(len(at)))
        want = [(b & ((1 << max(w, 0)) - 1)).bit_length() - 1 for b, (w, _) in zip(bits, rows, strict=True)]
        assert tile.tolist() == want
        assert each.tolist() == want
