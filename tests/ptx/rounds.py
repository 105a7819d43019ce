"""Cases of the ops on integers, which have no dtype. Each op's first cases are small."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ptx.cases import Case, Verdict
from specker.kernels.accept import _launch_walk, accept_walk_ref
from specker.runtime.ops import repeat, rounds


def _equal(label: str, kernel: Callable[[], Any], reference: Callable[[], Any]) -> Case:
    """A kernel whose results must be those of the reference."""

    def judge(verdict: Verdict, got: Any) -> None:
        for n, (x, y) in enumerate(zip(got, reference(), strict=True)):
            verdict.same(f"result {n}", x, y)

    return Case(label, kernel, judge)


def _tree(n: int, g: torch.Generator, near: int = 1 << 30) -> Tensor:
    """Parents of n drafts: rows at most `near` before their own."""
    rows = [int(torch.randint(max(0, j - near), j + 1, (), generator=g)) for j in range(n)]
    return torch.tensor(rows, dtype=torch.int64)


def accept_walk(_: object) -> Iterator[Case]:
    g = torch.Generator().manual_seed(0)
    for sizes, starts in (((3, 0, 40), torch.int32), ((6,), None), ((0,), None), ((7, 290), torch.int64)):
        N, B = sum(sizes), len(sizes)
        parents = torch.cat([_tree(n, g, near=3) for n in sizes])
        tokens, target = (torch.randint(0, 2, (n,), generator=g) for n in (N, N + B))
        cu = None if starts is None else torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=starts)
        yield _walk(f"trees of {sizes}", tokens, parents, target, cu)
    tokens = torch.randint(0, 9, (300,), generator=g)
    yield _walk("an accepted chain of 300", tokens, torch.arange(300), torch.cat((tokens, tokens[:1])), None)
    tokens = torch.randint(0, 2, (3, 20), generator=g)
    target, parents = torch.randint(0, 2, (3, 21), generator=g), torch.stack([_tree(20, g) for _ in range(3)])
    yield _walk("three trees of 20", tokens, parents, target, None)
    yield _walk("three chains of 20", tokens, None, target, None)


def _walk(label: str, *args: Tensor | None) -> Case:
    return _equal(label, lambda: _launch_walk(*args), lambda: accept_walk_ref(*args))


def place_rows(_: object) -> Iterator[Case]:
    g = torch.Generator().manual_seed(1)
    for first, count, tree, lengths in (
        (0, 6, True, [40, 7]),
        (0, 6, False, [40]),
        (3, 200, True, [900]),
        (0, 256, False, [77, 700, 1]),
        (64, 3, True, [1]),
    ):
        B = len(lengths)
        parents = torch.stack([_tree(first + count - 1, g) for _ in lengths]) if tree else None
        table = torch.randperm(80 * B, generator=g).view(B, 80)[:, :70].int()
        args = torch.tensor(lengths), 1, first, count, parents, table, 16, 5000
        yield _place(f"rows {first}+{count}{' tree' * tree} lengths {lengths}", args)


def _place(label: str, args: tuple) -> Case:
    return _equal(label, lambda: rounds._launch_place(*args), lambda: rounds.place_rows(*args))


def advance(_: object) -> Iterator[Case]:
    for rows, count, length, limit, B in (
        (6, 3, 40, 1000, 2),
        (1, 1, 9, 100, 1),
        (200, 150, 30, 120, 1),
        (16, 16, 90, 90, 3),
        (9, 4, 99, 200, 1),
    ):
        g = torch.Generator().manual_seed(rows)
        path = torch.full((B, rows), -1)
        for b in range(B):
            path[b, 1:count] = torch.randperm(rows - 1, generator=g)[: count - 1].sort().values + 1
        path[:, 0] = 0
        target, table = torch.randint(0, 1000, (B, rows), generator=g), torch.randperm(40 * B, generator=g)
        given = path, torch.full((B,), count), target
        then = torch.full((B,), limit), table.view(B, 40).int(), 16
        state = torch.arange(100 * B).view(B, 100), torch.full((B,), length), torch.zeros(B, 3, dtype=torch.int64)
        yield _advance(f"R{rows} count {count} length {length} B{B}", given, state, then)


def _advance(label: str, given: tuple, state: tuple, then: tuple) -> Case:
    def both(op: Any) -> Any:
        mine = [x.clone() for x in state]
        return *op(*given, *mine, *then), *mine

    return _equal(label, lambda: both(rounds._launch_advance), lambda: both(rounds.advance))


def repeat_rows(_: object) -> Iterator[Case]:
    for T, W, layers, B in ((5, 3, 2, 2), (1, 1, 4, 1), (40, 2, 3, 1), (70, 4, 2, 5)):
        g = torch.Generator().manual_seed(T)
        positions, slots = (torch.randint(0, 1 << 30, (T,), generator=g) for _ in "ps")
        ancestors = torch.randint(-(1 << 62), 1 << 62, (T, W), generator=g)
        kv_len, window, *table = torch.randint(0, 1000, (8, B), generator=g, dtype=torch.int32)
        args = positions, slots, kv_len, window, ancestors, torch.stack(table, 1), layers, 4096, 256
        yield _repeat(f"T{T} W{W} L{layers} B{B}", args)


def _repeat(label: str, args: tuple) -> Case:
    return _equal(label, lambda: repeat._launch(*args), lambda: repeat.repeat_rows(*args))


OPS = (accept_walk, place_rows, advance, repeat_rows)
