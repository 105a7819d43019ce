"""grow and prune: the functions on a CPU and their kernels (in the interpreter) against plain Python."""

import math

import pytest
import torch
from compile_only import compilations
from windows import POISON, among

from specker.kernels.round.grow import Candidates, grow, grow_cost, launch_grow, launch_prune, prune, prune_cost

I64 = torch.int64


def buffers(B, N, dtype=torch.float32):
    """Tokens, parents and scores as row-strided views among poison, and the whole tensors."""
    (tokens, a), (parents, b) = (among([[0] * N] * B) for _ in "tp")
    around = torch.full((B + 2, N + 3), math.nan, dtype=dtype)
    return (tokens, parents, around[1:-1, 2:-1]), (a, b, around)


@pytest.mark.parametrize("go", [grow, launch_grow])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "depth", "B"), [(1, 3, 2), (2, 4, 1), (3, 3, 3), (7, 2, 2), (12, 3, 1)])
def test_a_tree_grows_by_its_best_nodes(go, dtype, width, depth, B):
    g, N = torch.Generator().manual_seed(width), width * depth
    (tokens, parents, scores), whole = buffers(B, N, dtype)
    leaves = [[(0.0, 0)] for _ in range(B)]  # score and row
    every = Candidates.empty(B, width, depth, dtype, torch.device("cpu")) if width > 1 else None
    begin = 0  # of the level's candidates
    for at in range(0, N, width):
        m = width if at else 1
        ids = torch.randperm(B * m * width, generator=g).view(B * m, width)
        logits = torch.randn(B * m, width, generator=g, dtype=dtype).sort(descending=True)[0]
        lse = torch.randn(B * m, generator=g, dtype=dtype)  # below some logits
        go(ids, logits, lse, tokens, parents, scores, at, every)
        for b in range(B):
            children = []
            for i, (score, row) in enumerate(leaves[b]):
                for token, logit in zip(ids[b * m + i].tolist(), logits[b * m + i], strict=True):
                    total = torch.clamp(logit - lse[b * m + i], max=0) + torch.tensor(score, dtype=dtype)
                    children.append((float(total), token, row))
            best = sorted(children, key=lambda child: -child[0])[:width]
            level = slice(at, at + width)
            got = scores[b, level].tolist(), tokens[b, level].tolist(), parents[b, level].tolist()
            if sum(child[0] == best[-1][0] for child in children) == 1 and len({child[0] for child in best}) == width:
                assert [list(x) for x in zip(*best, strict=True)] == list(got)
            else:  # a tie, in any order
                assert got[0] == [child[0] for child in best]
                assert set(zip(*got, strict=True)) <= set(children)
            leaves[b] = [(score, at + i + 1) for i, score in enumerate(got[0])]
            if every is not None:
                found = [x[b, begin : begin + m * width].tolist() for x in (every.scores, every.ids)]
                assert [(score, token) for score, token, _ in children] == list(zip(*found, strict=True))
                columns = every.columns[b, level]
                assert every.scores[b, columns].tolist() == got[0] and every.ids[b, columns].tolist() == got[1]
        begin += m * width
    for around, empty in zip(whole[:2], (POISON, POISON), strict=True):
        assert int((around != empty).sum()) == B * N, "written outside the view"
    assert int((~whole[2].isnan()).sum()) == B * N


def test_the_kernel_gives_ties_to_the_first_candidate():
    tokens, parents, scores = torch.zeros(2, 1, 6, dtype=I64).unbind(0) + (torch.zeros(1, 6),)
    equal = torch.zeros(3, 3), torch.zeros(3)
    launch_grow(torch.tensor([[4, 5, 6]]), *(x[:1] for x in equal), tokens, parents, scores, 0)
    launch_grow(torch.arange(9).view(3, 3), *equal, tokens, parents, scores, 3)
    assert tokens.tolist() == [[4, 5, 6, 0, 1, 2]] and parents.tolist() == [[0, 0, 0, 1, 1, 1]]


def test_nodes_without_numbers_stay_inside():
    """A context that is full may give NaN, for which any draft will do."""
    tokens, parents, scores = buffers(1, 4)[0]
    nothing = torch.full((2, 2), math.nan), torch.full((2,), math.nan)
    launch_grow(torch.tensor([[5, 6]]), *(x[:1] for x in nothing), tokens, parents, scores, 0)
    launch_grow(torch.tensor([[5, 6], [7, 8]]), *nothing, tokens, parents, scores, 2)
    assert {*tokens[0].tolist()} <= {5, 6, 7, 8} and {*parents[0, 2:].tolist()} <= {1, 2}
    (kept, around), (up, _) = among([[0] * 3]), among([[0] * 3])
    every = Candidates(torch.tensor([[5, 6, 7, 8, 9, 9]]), torch.full((1, 6), math.nan), torch.arange(4)[None], 2)
    launch_prune(every, kept, up)
    assert {*kept[0].tolist()} <= {5, 6, 7, 8, 9} and int((around != POISON).sum()) == 3
    assert all(0 <= parent <= i for i, parent in enumerate(up[0].tolist()))


def candidates(B, width, depth, dtype=torch.float32, steps=3):
    """Trees whose candidates have scores with many ties."""
    g = torch.Generator().manual_seed(width)
    every = Candidates.empty(B, width, depth, dtype, torch.device("cpu"))
    (tokens, parents, scores), _ = buffers(B, width * depth, dtype)
    for at in range(0, width * depth, width):
        rows = B * (width if at else 1)
        logits = -torch.randint(0, steps, (rows, width), generator=g).sort()[0].to(dtype)
        grow(
            torch.randint(0, 999, (rows, width), generator=g),
            logits,
            0 * logits[:, 0],
            tokens,
            parents,
            scores,
            at,
            every,
        )
    return every


@pytest.mark.parametrize("go", [prune, launch_prune])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("width", "depth", "count"), [(2, 1, 1), (5, 1, 5), (2, 5, 9), (3, 4, 12), (10, 7, 59), (12, 2, 156)]
)
def test_the_best_candidates_stay(go, dtype, width, depth, count):
    B = 2
    every = candidates(B, width, depth, dtype)
    (kept, a), (up, b_) = among([[0] * count] * B), among([[0] * count] * B)
    best, nodes = go(every, kept, up)
    for b in range(B):
        ids, score, grown = (x[b].tolist() for x in every[:3])
        want = sorted(range(len(score)), key=lambda c, score=score: (-score[c], c))[:count]
        row = {c: i + 1 for i, c in enumerate(want)}
        assert best[b].tolist() == want and kept[b].tolist() == [ids[c] for c in want]
        assert up[b].tolist() == [row[grown[(c - width) // width]] if c >= width else 0 for c in want]
        assert nodes[b].tolist() == [grown.index(c) if c in grown else len(grown) for c in want]
    assert all(int((around != POISON).sum()) == B * count for around in (a, b_)), "written outside the view"


@pytest.mark.parametrize("go", [prune, launch_prune])
def test_scores_of_zero_and_without_end(go):
    """0, -0 and numbers below the normal ones, -inf, and more candidates than numbers."""
    tiny = 1e-42
    scores = torch.tensor([[-tiny, 0.0, float("-inf"), -0.0, -3e38, -tiny / 2]])
    every = Candidates(torch.arange(6)[None], scores, torch.arange(4)[None], 2)
    want = [1, 3, 5, 0, 4, 2]
    for count in (1, 2, 3, 5, 6):
        kept = torch.zeros(1, count, dtype=I64)
        assert go(every, kept, kept.clone())[0].tolist() == [want[:count]] == kept.tolist()


def test_costs():
    """Two sequences, levels of three nodes in trees of six; then the five best of them."""
    tokens, scores = torch.zeros(2, 6, dtype=I64), torch.zeros(2, 6)
    node = 8 + (8 + 8 + 4)  # its id, then token, parent and score
    for at, m in ((0, 1), (3, 3)):
        given = torch.zeros(2 * m, 3, dtype=I64), torch.zeros(2 * m, 3), torch.zeros(2 * m)
        read = 4 * (3 * m + m + m * (at > 0))  # logits, lse, the parents' scores
        assert grow_cost(*given, tokens, tokens, scores, at)[0] == 2 * (read + 3 * node)
        every = Candidates.empty(2, 3, 2, torch.float32, torch.device("cpu"))
        more = 2 * (m * 3 * (8 + 4) + 3 * 8 + (m - 1) * 3 * 8)  # every candidate, the columns, the other ids
        assert grow_cost(*given, tokens, tokens, scores, at, every)[0] == 2 * (read + 3 * node) + more
    kept = tokens[:, :5]
    assert prune_cost(every, kept, kept) == (2 * (12 * 4 + 6 * 8 + 5 * (1 + 4) * 8), 2 * (32 * 12 + 5 * 5))


def launches():
    """Runs in a compiling process: one width, many levels and sizes, as views at any offset."""
    ids, numbers = torch.arange(4000), torch.zeros(4000)
    for n, at in enumerate((0, 0, 3, 6, 15, 48)):
        B, m = (1, 2, 16)[n % 3], 3 if at else 1
        tokens, scores = ids[n:][: B * 70].view(B, 70)[:, n:], numbers[n:][: B * 70].view(B, 70)[:, n:]
        given = torch.zeros(B * m, 3, dtype=I64), torch.zeros(B * m, 3), torch.zeros(B * m)
        every = Candidates.empty(B, 3, 16 + n, torch.float32, torch.device("cpu"))
        launch_grow(*given, tokens, tokens, scores, at, every)
        every.scores.zero_(), every.columns.zero_()
        launch_prune(every, tokens[:, : 1 + at], tokens[:, : 1 + at])


def test_no_size_recompiles():
    """One compilation for the first level, one for the others; one for trees of 129 to 256 candidates."""
    assert compilations(__file__) == {"_grow_kernel": 2, "_prune_kernel": 1}


def test_refusals():
    good = [torch.zeros(2, 3, dtype=I64), torch.zeros(2, 3), torch.zeros(2)]
    good += [torch.zeros(2, 6, dtype=I64), torch.zeros(2, 6, dtype=I64), torch.zeros(2, 6), 0]
    for at, value, message in [
        (0, torch.zeros(3, 3, dtype=I64), "expected ids and logits"),
        (1, torch.zeros(2, 2), "expected ids and logits"),
        (2, torch.zeros(3), "expected ids and logits"),
        (6, 3, "expected ids and logits"),  # needs three rows a sequence
        (6, 6, "expected ids and logits"),
        (4, torch.zeros(2, 5, dtype=I64), "tokens, parents and scores must be"),
        (4, torch.zeros(2, 6), "must be int64"),
        (5, torch.zeros(2, 6, dtype=I64), "must be int64"),
        (0, torch.zeros(2, 3), "ids must be int64"),
        (5, torch.zeros(2, 6, dtype=torch.float64), "scores like logits"),
    ]:
        bad = list(good)
        bad[at] = value
        with pytest.raises(ValueError, match=message):
            grow(*bad)
    every = candidates(2, 3, 2)
    for kept, up, message in [
        (torch.zeros(2, 13, dtype=I64), torch.zeros(2, 13, dtype=I64), "expected room"),
        (torch.zeros(2, 0, dtype=I64), torch.zeros(2, 0, dtype=I64), "expected room"),
        (torch.zeros(2, 3, dtype=I64), torch.zeros(2, 4, dtype=I64), "expected room"),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=I64), "nodes must be int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            prune(every, kept, up)
    for wrong, message in [
        (every._replace(scores=every.scores.double()), "scores torch.float32"),
        (every._replace(ids=every.ids[:, ::2].repeat(1, 2)[:, :12].T.contiguous().T), "must be contiguous"),
        (every._replace(ids=every.ids[:1]), "must have room"),
        (every._replace(width=2), "must have room"),
        (candidates(2, 3, 1), "must have room"),
        (candidates(2, 2, 4), "width is 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            grow(torch.zeros(6, 3, dtype=I64), torch.zeros(6, 3), torch.zeros(6), *good[3:6], 3, wrong)
    with pytest.raises(ValueError, match="must be adjacent"):
        launch_grow(*good[:3], torch.zeros(6, 2, dtype=I64).T, *good[4:])
