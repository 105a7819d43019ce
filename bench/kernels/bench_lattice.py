"""cut_lattice and search_lattice against eager torch: the candidates of a block, and the tree or the chain among them.

A few kilobytes, so a call's time is its launch and its dependent steps, of which a level of the search has two: the
candidates after each node are ordered, then the best of all. torch takes about ten launches for a level.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.round.lattice import (
    Lattice,
    Paths,
    cut_lattice,
    cut_lattice_cost,
    search_lattice,
    search_lattice_cost,
)

K = 15  # candidates of a position
ENDS = 2, 7


def guessed(B: int, depth: int) -> tuple[torch.Tensor, ...]:
    """ids, logits, descending, lse, and ids that end a path."""
    ids = torch.rand(B, depth, 128256).topk(K)[1].to(DEVICE)
    logits = 2 * torch.randn(B, depth, K, device=DEVICE).sort(descending=True)[0]
    return ids, logits, logits.logsumexp(2) + 0.1, torch.tensor(ENDS, device=DEVICE)


def on_cpu(x: object) -> object:
    if isinstance(x, tuple):
        return type(x)(*map(on_cpu, x)) if hasattr(x, "_fields") else tuple(map(on_cpu, x))
    return x.cpu() if isinstance(x, torch.Tensor) else x


def cut(B: int, depth: int) -> Built:
    args = *guessed(B, depth), torch.zeros(B, 3, device=DEVICE), 0.8

    def eager() -> Lattice:
        ids, logits, lse, *_ = args
        log_p = logits - lse.unsqueeze(2)
        before = log_p.exp().cumsum(2).roll(1, 2)
        before[..., 0] = -1.0
        log_p = log_p.masked_fill(before >= 0.8, float("-inf"))
        return Lattice(ids, log_p, log_p.logsumexp(2).clamp_(max=0.0))

    def check() -> None:
        for ours, theirs in zip(cut_lattice(*args), eager(), strict=True):
            torch.testing.assert_close(ours, theirs)

    return Built({"specker": lambda: cut_lattice(*args), "torch": eager}, check, cut_lattice_cost(*args))


def search(B: int, depth: int, width: int, beam: bool, table: bool) -> Built:
    """All levels in one call. On a CPU both are torch's."""
    *guess, ends = guessed(B, depth)
    found = cut_lattice(*guess, ends, torch.zeros(B, 3, device=DEVICE), 0.95)
    added = torch.randn(B, depth, K, K, device=DEVICE) if table else None

    def given(device: str) -> tuple:
        paths = Paths.empty(B, width, depth, torch.float32, torch.device(device))
        out = torch.zeros(B, depth, dtype=torch.int64, device=device) if beam else None
        return paths, torch.zeros(B, device=device), 0, depth, out

    ours, theirs = (found, added, ends, *given(DEVICE)), (*map(on_cpu, (found, added, ends)), *given("cpu"))

    def check() -> None:
        search_lattice(*ours)
        search_lattice(*theirs)
        (a, x), (b, y) = ((args[3], args[4].cpu()) for args in (ours, theirs))
        lives = b.scores.isfinite()  # other nodes tie
        torch.testing.assert_close(a.scores.cpu(), b.scores)
        torch.testing.assert_close(x, y)
        assert all(torch.equal(p.cpu()[lives], q[lives]) for p, q in zip(a[:2], b[:2], strict=True)), (
            "tokens or parents"
        )
        assert not beam or torch.equal(ours[-1].cpu(), theirs[-1]), "the best paths"

    ways = {"specker": lambda: search_lattice(*ours), "torch on the host": lambda: search_lattice(*theirs)}
    return Built(ways, check, search_lattice_cost(*ours))


def cases() -> Iterator[Case]:
    for B in (1, 8):
        yield Case(f"cut 16x{K}, B {B}", lambda B=B: cut(B, 16), Goal(over_empty=3e-6))
        yield Case(f"tree of 16 levels, B {B}", lambda B=B: search(B, 16, 8, False, False), Goal(seconds=40e-6))
        yield Case(f"tree, table, B {B}", lambda B=B: search(B, 16, 8, False, True), Goal(seconds=40e-6))
        yield Case(f"beam of 3, B {B}", lambda B=B: search(B, 16, 3, True, False), Goal(seconds=40e-6))


test_lattice = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("lattice", cases())
