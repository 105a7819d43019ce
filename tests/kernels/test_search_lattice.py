"""cut_lattice and search_lattice: their kernels (in the interpreter) against torch's forms, ties, and what is refused.
tests/strategies/test_lattice.py compares both forms with all paths of small lattices."""

import math

import pytest
import torch
from compile_only import compilations
from windows import POISON, among

from specker.kernels.round.lattice import (
    Lattice,
    Paths,
    cut_lattice,
    cut_lattice_cost,
    launch_cut,
    launch_search,
    search_lattice,
    search_lattice_cost,
)

I64 = torch.int64
CPU = torch.device("cpu")
ENDS = torch.tensor([3, 11])


def guessed(B, k, K, dtype=torch.float32, seed=0):
    """ids, logits, descending, and lse, as vocab_topk finds them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(K + 9, generator=g)[:K] for _ in range(B * k)]).view(B, k, K)
    logits = 2 * torch.randn(B, k, K, generator=g, dtype=dtype).sort(descending=True)[0]
    return ids, logits, logits.logsumexp(2) + 0.1


def lattice(B, k, K, dtype=torch.float32, share=0.9):
    return cut_lattice(*guessed(B, k, K, dtype), ENDS, torch.empty(B, 3, dtype=dtype), share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("B", "k", "K", "extra", "share"), [(2, 5, 17, 2, 0.8), (1, 1, 1, 0, 0.5), (3, 300, 9, 1, 1.0), (1, 7, 80, 16, 0.0)]
)
def test_the_kernel_cuts_the_candidates_that_torch_cuts(dtype, B, k, K, extra, share):
    ids, logits, lse = guessed(B, k, K, dtype)
    ids[:, -1, -1:] = ids[:, -1, :1]  # an extra candidate that is the best one, too
    reports = torch.full((2, B + 1, 4), math.nan, dtype=dtype)
    got, want = (go(ids, logits, lse, ENDS, r[1:, 1:], share, extra) for go, r in zip(FORMS, reports, strict=True))
    assert torch.equal(got.ids, ids) and torch.equal(got.log_p, want.log_p)
    assert torch.allclose(got.mass, want.mass, atol=1e-6) and (got.mass <= 0).all()
    assert torch.allclose(reports[0], reports[1], equal_nan=True)
    assert int((~reports[0].isnan()).sum()) == 2 * B, "written outside the view"
    kept = got.log_p.isfinite()
    assert kept[..., 0].all() and (kept.any() if share == 1.0 else not kept[..., : K - extra].all() or K == 1)
    assert extra == 0 or (K - extra == 1) or not kept[:, -1, -1].any()


FORMS = launch_cut, cut_lattice


def terms(kind, B, k, K, w, dtype):
    """What is added: nothing, a table, or what depends on a level's nodes, [B, k, m, K] for all levels."""
    g = torch.Generator().manual_seed(w)
    rows = {"": 0, "table": K, "rows": w}[kind]
    return torch.randn(B, k, rows, K, generator=g, dtype=dtype) if rows else None


def searched(go, found, kind, added, w, beam, at_once):
    """Paths, scores and the beam's paths, in one call or level by level."""
    B, k, _ = found.ids.shape
    paths = Paths.empty(B, w, k, found.log_p.dtype, CPU)
    for x in (*paths[:3], *paths.candidates[:3]):
        x.fill_(-7)
    score = torch.full((B, 3), math.nan, dtype=found.log_p.dtype)
    out, around = among([[0] * k] * B)
    steps = [(0, k)] if at_once else [(first, 1) for first in range(k)]
    for first, levels in steps:
        more = added[:, first, : w if first else 1] if kind == "rows" else added
        go(found, more, ENDS, paths, score[:, 2], first, levels, out if beam else None)
    assert score[:, :2].isnan().all() and int((around != POISON).sum()) == B * k
    return paths, score[:, 2], out


SIZES = [(2, 5, 17, 8), (1, 3, 2, 5), (3, 4, 6, 1), (1, 2, 70, 3), (2, 1, 4, 4)]


@pytest.mark.parametrize("beam", [False, True], ids=["tree", "beam"])
@pytest.mark.parametrize("kind", ["", "table", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("B", "k", "K", "w"), SIZES)
def test_the_kernel_finds_the_paths_that_torch_finds(dtype, kind, beam, B, k, K, w):
    found, added = lattice(B, k, K, dtype), terms(kind, B, k, K, w, dtype)
    got, want = (
        searched(go, found, kind, added, w, beam, go is launch_search and kind != "rows")
        for go in (launch_search, search_lattice)
    )
    finite = want[0].scores.isfinite()  # others tie
    assert finite[:, ::w].all() and torch.allclose(got[0].scores, want[0].scores, atol=1e-5)
    for x, y in zip(got[0][:2], want[0][:2], strict=True):
        assert torch.equal(x[finite], y[finite])
    assert torch.allclose(got[1], want[1], atol=1e-5)
    if beam:
        assert torch.equal(got[2], want[2])
        return
    ours, theirs = (x[0].candidates for x in (got, want))
    here = theirs.scores.isfinite()
    assert torch.allclose(ours.scores, theirs.scores, atol=1e-5) and torch.equal(ours.ids[here], theirs.ids[here])
    assert torch.equal(ours.columns[finite], theirs.columns[finite])
    assert torch.equal(ours.ids.gather(1, ours.columns), got[0].tokens)


@pytest.mark.parametrize("beam", [False, True], ids=["tree", "beam"])
def test_the_kernel_gives_ties_to_the_first_candidate(beam):
    ids = torch.tensor([[[5, 6, 7, 8], [4, 9, 10, 12]]])
    found = Lattice(ids, torch.full((1, 2, 4), -1.0), torch.zeros(1, 2))
    paths, _, out = searched(launch_search, found, "", None, 3, beam, True)
    assert paths.tokens.tolist() == [[5, 6, 7, 4, 9, 10]] and paths.up.tolist() == [[0] * 6]
    assert not beam or out.tolist() == [[5, 4]]


@pytest.mark.parametrize("kind", ["", "table"])
@pytest.mark.parametrize("beam", [False, True], ids=["tree", "beam"])
def test_nodes_without_numbers_stay_inside(beam, kind):
    """A context that is full may give NaN, for which any draft of known tokens will do."""
    ids = torch.arange(20, 32).view(1, 3, 4)
    found = Lattice(ids, torch.full((1, 3, 4), math.nan), torch.full((1, 3), math.nan))
    added = torch.full((1, 3, 4, 4), math.nan) if kind else None
    paths, _, out = searched(launch_search, found, kind, added, 5, beam, True)
    known = {0, *ids.flatten().tolist()}  # 0 where a level has fewer candidates than nodes
    assert {*paths.tokens[0].tolist(), *paths.candidates.ids[0].tolist()} <= known
    assert int(paths.up.min()) >= 0 and int(paths.up.max()) < 5 and (not beam or {*out[0].tolist()} <= known)


def test_costs():
    """Two sequences, three positions of four candidates, levels of two nodes."""
    ids, logits, lse = guessed(2, 3, 4)
    moved = 2 * (3 * 4 * (8 + 4 + 4) + 3 * (4 + 4) + 2 * 4) + 2 * 8  # ids, logits, results; lse, mass; counts; ends
    assert cut_lattice_cost(ids, logits, lse, ENDS, torch.empty(2, 3), 0.8)[0] == moved
    found, paths = lattice(2, 3, 4), Paths.empty(2, 2, 3, torch.float32, CPU)
    score, rows = torch.empty(2), 1 + 2 + 2
    moved = 3 * 4 * 12 + rows * 2 * 2 * 12 + 6 * (3 * 8 + 4)  # candidates; those after each node, twice; nodes
    assert search_lattice_cost(found, None, ENDS, paths, score, 0, 3)[0] == 2 * moved
    table, out = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, dtype=I64)
    assert search_lattice_cost(found, table, ENDS, paths, score, 0, 3)[0] == 2 * (moved + rows * 16)
    assert search_lattice_cost(found, None, ENDS, paths, score, 0, 3, out)[0] == 2 * (moved + 3 * 24)


def launches():
    """Runs in a compiling process: one width, many levels and sizes, as views at any offset."""
    for n, (B, k) in enumerate(((1, 2), (2, 5), (16, 16), (3, 9))):
        K, ends, report = 10 + n, torch.arange(9)[n:], torch.zeros(B + 1, 4)[1:, n % 2 :][:, :3]
        found = launch_cut(*guessed(B, k, K), ends, report, 0.5 + n / 9, n)
        for beam in (False, True):
            paths = Paths.empty(B, 3, k, torch.float32, CPU)
            out = torch.zeros(B, k + 9, dtype=I64)[:, n : n + k] if beam else None
            launch_search(found, None, ends, paths, report[:, 2], 0, k, out)
            for first in (0, k - 1):
                rows = torch.zeros(B, 3 if first else 1, K)
                launch_search(found, rows, ends, paths, report[:, 2], first, 1, out)


def test_no_size_recompiles():
    """Two numbers of positions at once, as many as there are up to 16; trees and beams, without and with rows."""
    assert compilations(__file__) == {"_cut_lattice_kernel": 3, "_search_lattice_kernel": 4}


def test_refusals():
    found, paths, score = lattice(2, 3, 4), Paths.empty(2, 2, 3, torch.float32, CPU), torch.zeros(2)
    good = dict(zip(("ids", "logits", "lse"), guessed(2, 3, 4), strict=True))
    good |= {"ends": ENDS, "report": torch.zeros(2, 3), "share": 0.8}
    for name, value, message in [
        ("ids", torch.zeros(2, 3, dtype=I64), "expected ids and logits"),
        ("lse", torch.zeros(2, 4), "expected ids and logits"),
        ("report", torch.zeros(2, 2), "expected ends"),
        ("extra", 4, "expected ends"),
        ("ends", torch.zeros(2), "ids must be int64"),
        ("report", torch.zeros(2, 3, dtype=torch.float64), "scores all float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            cut_lattice(**{**good, name: value})
    good = {"found": found, "added": None, "ends": ENDS, "paths": paths, "score": score, "first": 0, "levels": 3}
    for change, message in [
        ({"found": found._replace(mass=score)}, "expected ids and log_p"),
        ({"levels": 4}, "expected levels within 0..2"),
        ({"levels": 0}, "expected levels within 0..2"),
        ({"score": torch.zeros(3)}, "expected levels"),
        ({"paths": paths._replace(up=paths.up[:, :5])}, "paths must have room for 3 levels of 2 nodes"),
        ({"found": found._replace(log_p=found.log_p.mT.contiguous().mT)}, "must be contiguous"),
        ({"added": torch.zeros(2, 1, 4)}, "added must be a table"),
        ({"added": torch.zeros(2, 1, 4), "first": 1, "levels": 1}, "added must be a table"),
        ({"out": torch.zeros(2, 4, dtype=I64)}, r"out must be \[2, 3\]"),
        ({"out": torch.zeros(2, 3)}, "ids must be int64"),
        ({"score": score.double()}, "scores all float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            search_lattice(**{**good, **change})
    with pytest.raises(ValueError, match="must be adjacent"):
        launch_search(*good.values(), torch.zeros(3, 2, dtype=I64).T)
