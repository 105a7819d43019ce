"""Cases of the ops on integers and of the router, which are of no model's dtype. Each op's first cases are small."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ptxsim import Case, Verdict
from torch import Tensor

from specker.kernels.accept_walk import accept_walk_ref
from specker.kernels.accept_walk import launch as launch_walk
from specker.kernels.round import grow as growing
from specker.kernels.round import lattice as lattices
from specker.kernels.round import place_rows as rounds
from specker.kernels.round import repeat_rows as repeat
from specker.kernels.round import settle as end
from specker.kernels.round import start_pairs as pair
from specker.kernels.round import start_rows as start
from specker.kernels.sample_rows import Splits

adjust = importlib.import_module("specker.kernels.adjust_rows")
route = importlib.import_module("specker.kernels.expert_route")


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
    return _equal(label, lambda: launch_walk(*args), lambda: accept_walk_ref(*args))


def expert_route(_: object) -> Iterator[Case]:
    for T, X, k, normalise in (
        (3, 8, 2, True),
        (2, 128, 8, True),
        (5, 60, 4, False),
        (2, 512, 16, False),
        (1, 3, 3, True),
        (400, 7, 3, True),
        (0, 8, 2, True),
    ):
        logits = torch.randn(T, X, generator=torch.Generator().manual_seed(X)).round(decimals=1)
        yield _route(f"T{T} X{X} k{k}{' normalise' * normalise}", (logits, k, normalise))
    for T in (8, 9):  # the most choices that the last program puts in order, and more
        yield _route(f"T{T} X128 k8 of 3 splits", (torch.randn(3, T, 128), 8, True))
    for T, splits, normalise, scale in ((3, 1, True, 1.0), (20, 2, False, 2.5)):
        g = torch.Generator().manual_seed(T)
        logits, bias = torch.randn(splits, T, 32, generator=g), torch.randn(32, generator=g) / 4
        idle = torch.tensor([False, True, False]) if T == 3 else None
        args = logits, 4, normalise, idle, "sigmoid", bias, scale, 1e-6
        yield _route(f"T{T} X32 k4 sigmoid bias{' normalise' * normalise} of {splits} splits", args)
    args = logits, 4, True, None, "softmax", bias
    yield _route(f"T{T} X32 k4 bias normalise of {splits} splits", args)
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(7))
    yield _route("T5 X7 k3 sigmoid normalise", (logits, 3, True, None, "sigmoid"))


def _route(label: str, args: tuple) -> Case:
    def judge(verdict: Verdict, got: Any) -> None:
        want = route.expert_route_ref(*args)
        wide = [x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args]
        exact = route.expert_route_ref(*wide)[1]
        for n in (0, 2, 3):
            verdict.same(f"result {n}", got[n], want[n])
        verdict.near("scores", got[1], exact, want[1], 1e-6)

    return Case(label, lambda: route.launch(*args), judge)


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
        window = rounds.Window(torch.tensor(lengths), 1, first, count, parents, table, 16, 5000)
        yield _place(f"rows {first}+{count}{' tree' * tree} lengths {lengths}", window)


def _place(label: str, window: rounds.Window) -> Case:
    return _equal(label, lambda: rounds.launch_place(window), lambda: rounds.place_rows(window))


def start_rows(_: object) -> Iterator[Case]:
    g = torch.Generator().manual_seed(4)
    for E, first, count, text, tree, lengths, step in (
        (96, 0, 6, False, True, [40, 7], None),
        (1030, 2, 1, False, False, [40, 300], None),
        (64, 0, 6, True, False, [40, 3], None),
        (64, 0, 2, False, False, [40, 7], 3),
    ):
        B = len(lengths)
        parents = torch.stack([_tree(first + count - 1, g) for _ in lengths]) if tree else None
        table = torch.randperm(80 * B, generator=g).view(B, 80)[:, :70].int()
        wide = 1000 if text else count + (step or 0)
        tokens = torch.randint(0, 70, (B, wide), generator=g)  # ids beyond the vocabulary, too
        window = rounds.Window(torch.tensor(lengths), count if text else 1, first, count, parents, table, 16, 5000)
        embedding = torch.randn(50, E, generator=g).bfloat16()
        ahead = None if step is None else torch.tensor([step])
        label = f"E{E} rows {first}+{count}{' text' * text}{' tree' * tree}{' ahead' * (step is not None)}"
        yield _start(label, (embedding, tokens, text, window), ahead)


def _start(label: str, args: tuple, ahead: torch.Tensor | None) -> Case:
    return _equal(label, lambda: start.launch(*args, ahead=ahead), lambda: start.start_rows(*args, ahead=ahead))


def start_pairs(_: object) -> Iterator[Case]:
    g = torch.Generator().manual_seed(5)
    for E, first, count, m, text, norms, normed, lengths in (
        (96, 3, 1, 1, False, True, False, [40, 7]),
        (1030, 5, 4, 4, False, True, True, [40]),
        (64, 1, 3, 1, False, True, False, [40, 300]),
        (64, 0, 6, 6, True, True, False, [40, 3]),
        (2048, 2, 1, 1, False, False, False, [40]),
    ):
        B, tree = len(lengths), count > 1 and not text
        parents = torch.stack([_tree(first + count - 1, g, near=m) for _ in lengths]) if tree else None
        table = torch.randperm(80 * B, generator=g).view(B, 80)[:, :70].int()
        tokens = torch.randint(0, 70, (B, 1000 if text else count), generator=g)  # ids beyond the vocabulary, too
        embedding, features = (torch.randn(n, E, generator=g).bfloat16() for n in (50, B * m))
        weights = tuple(1 + 0.1 * torch.randn(E, generator=g).bfloat16() for _ in range(2)) if norms else None
        window = rounds.Window(torch.tensor(lengths), 2, first, count, parents, table, 16, 5000)
        label = f"E{E} rows {first}+{count} of {m}{' text' * text}{' plain' * (not norms)}"
        yield _pairs(label, (embedding, tokens, text, features, weights, 1e-5, normed, window))


def _pairs(label: str, args: tuple) -> Case:
    """Norms may differ from torch's by the rounding of one step."""

    def judge(verdict: Verdict, got: Any) -> None:
        want = pair.start_pairs(*args)
        wide = pair.start_pairs(*(_doubled(x) for x in args[:-1]), args[-1])  # the window has only integers
        for n in range(2):
            verdict.near(f"result {n}", got[n], wide[n], want[n])
        for n in range(2, 6):
            verdict.same(f"result {n}", got[n], want[n])

    return Case(label, lambda: pair.launch(*args), judge)


def _doubled(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_doubled, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def grow(_: object) -> Iterator[Case]:
    for B, w, levels in ((2, 3, 2), (1, 1, 3), (3, 12, 2), (1, 64, 2)):
        g = torch.Generator().manual_seed(w)
        trees = torch.randint(0, 99, (2, B, w * levels + 5), generator=g)  # room for more
        scores = -torch.rand(B, w * levels + 5, generator=g)
        for at in range(0, w * levels, w):
            yield _grow(f"B{B} width {w} at {at}", _level(B, w, at, g), (trees[0], trees[1], scores), at, levels)


def _level(B: int, w: int, at: int, g: torch.Generator) -> tuple:
    rows = B * (w if at else 1)
    logits = torch.randn(rows, w, generator=g).sort(1, descending=True).values  # as vocab_topk gives them
    lse = logits.logsumexp(1) - (0.2 if at else 0.0)  # some children above their parents
    return torch.randint(0, 99, (rows, w), generator=g), logits, lse


def _grow(label: str, given: tuple, trees: tuple, at: int, levels: int) -> Case:
    B, w = len(trees[0]), given[0].shape[1]

    def both(op: Any) -> Any:
        mine = [x.clone() for x in trees]
        every = growing.Candidates.empty(B, w, levels, torch.float32, torch.device("cpu")) if w > 1 else None
        for x in every[:3] if every is not None else ():
            x.zero_()
        op(*given, *mine, at, every)
        return (*mine, *(every[:3] if every is not None else ()))

    return _equal(label, lambda: both(growing.launch_grow), lambda: both(growing.grow))


def prune(_: object) -> Iterator[Case]:
    for B, w, levels, count in ((2, 3, 2, 7), (1, 10, 7, 59), (3, 2, 1, 1), (1, 64, 2, 100)):
        g = torch.Generator().manual_seed(w)
        every = growing.Candidates.empty(B, w, levels, torch.float32, torch.device("cpu"))
        tokens, parents = torch.zeros((2, B, w * levels), dtype=torch.int64).unbind(0)
        scores = torch.zeros(B, w * levels)
        for at in range(0, w * levels, w):
            ids, logits, lse = _level(B, w, at, g)
            growing.grow(ids, logits.round(), lse.round(), tokens, parents, scores, at, every)  # ties
        yield _prune(f"B{B} {w}x{levels} keep {count}", every, count)


def _prune(label: str, every: Any, count: int) -> Case:
    def both(op: Any) -> Any:
        kept, up = every.ids.new_zeros(2, len(every.ids), count).unbind(0)
        return *op(every, kept, up), kept, up

    return _equal(label, lambda: both(growing.launch_prune), lambda: both(growing.prune))


def _guessed(B: int, k: int, K: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, logits, descending, and lse of blocks, as vocab_topk gives them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(K + 9, generator=g)[:K] for _ in range(B * k)]).view(B, k, K)
    logits = 2 * torch.randn(B, k, K, generator=g).sort(descending=True).values
    return ids, logits, logits.logsumexp(2) + 0.1


def cut_lattice(_: object) -> Iterator[Case]:
    ends = torch.tensor([3, 11])
    for B, k, K, extra, share in ((2, 3, 6, 2, 0.8), (1, 1, 1, 0, 0.5), (1, 130, 17, 1, 1.0), (2, 5, 80, 16, 0.9)):
        ids, logits, lse = _guessed(B, k, K, k)

        def both(op: Any, given: tuple = (ids, logits, lse), share: float = share, extra: int = extra) -> Any:
            report = torch.zeros(len(given[0]), 3)
            return *op(*given, ends, report, share, extra), report

        yield _scored(
            f"B{B} {k}x{K} and {extra}", lambda b=both: b(lattices.launch_cut), lambda b=both: b(lattices.cut_lattice)
        )


def search_lattice(_: object) -> Iterator[Case]:
    ends = torch.tensor([3, 11])
    for n, (B, k, K, w) in enumerate(((2, 3, 5, 3), (1, 4, 17, 8), (1, 2, 3, 5), (1, 2, 70, 2))):
        found = lattices.cut_lattice(*_guessed(B, k, K, n), ends, torch.empty(B, 3), 0.9)
        table = torch.randn(B, k, K, K, generator=torch.Generator().manual_seed(n))
        for added, beam in ((None, False), (table, False), (None, True), (table[:, :, :w], True)):
            kind = "" if added is None else " table" if added is table else " rows"

            def both(op: Any, found: Any = found, added: Any = added, beam: bool = beam, w: int = w) -> Any:
                B, k, K = found.ids.shape
                paths = lattices.Paths.empty(B, w, k, torch.float32, torch.device("cpu"))
                for x in (*paths[:3], *paths.candidates[:3]):
                    x.zero_()
                score, out = torch.zeros(B), torch.zeros(B, k + 1, dtype=torch.int64)
                path = out[:, 1:] if beam else None
                if added is None or added.shape[2] == K:
                    op(found, added, ends, paths, score, 0, k, path)
                else:
                    for depth in range(k):
                        rows = added[:, depth, : w if depth else 1].contiguous()
                        op(found, rows, ends, paths, score, depth, 1, path)
                lives = paths.scores.isfinite()  # other nodes tie
                return *(x.where(lives, 0) for x in (*paths[:2], paths.candidates.columns)), paths.scores, score, out

            label = f"B{B} {k}x{K} width {w}{kind}{' beam' * beam}"
            yield _scored(label, lambda b=both: b(lattices.launch_search), lambda b=both: b(lattices.search_lattice))


def _scored(label: str, kernel: Callable[[], Any], reference: Callable[[], Any]) -> Case:
    """A kernel whose integers must be those of the reference, and whose scores may differ by rounding."""

    def judge(verdict: Verdict, got: Any) -> None:
        for n, (x, y) in enumerate(zip(got, reference(), strict=True)):
            if x.is_floating_point():
                lives = y.isfinite()
                verdict.same(f"result {n}, finite", x.isfinite(), lives)
                verdict.near(f"result {n}", x[lives], y[lives], y[lives], slack=1e-5)
            else:
                verdict.same(f"result {n}", x, y)

    return Case(label, kernel, judge)


def settle(_: object) -> Iterator[Case]:
    for N, tree, length, limit, B, S in (
        (5, True, 40, 1000, 2, 0),
        (4, False, 40, 1000, 2, 7),
        (0, False, 9, 100, 1, 3),
        (199, True, 30, 120, 1, 0),
        (15, False, 90, 90, 3, 20),
        (8, True, 99, 200, 1, 33),
    ):
        g = torch.Generator().manual_seed(N)
        tokens = torch.randint(0, 2, (B, N), generator=g)
        parents = torch.stack([_tree(N, g, near=3) for _ in range(B)]) if tree else None
        target: Any = torch.randint(0, 2, (B, N + 1), generator=g)
        if S:  # the best of each part; equal ones in several parts
            value = torch.randint(0, 5, (B * (N + 1), S), generator=g).float()
            target = Splits(value, torch.randint(0, 3, (B * (N + 1), S), generator=g).int())
        table = torch.randperm(40 * B, generator=g).view(B, 40).int()
        state = torch.arange(100 * B).view(B, 100), torch.full((B,), length), torch.zeros(B, 3, dtype=torch.int64)
        then = torch.full((B,), limit), table, 16
        label = f"N{N}{' tree' * tree} length {length} B{B}{f' {S} splits' if S else ''}"
        yield _settle(label, (tokens, parents, target), state, then)


def _settle(label: str, given: tuple, state: tuple, then: tuple) -> Case:
    B, R = given[0].shape[0], given[0].shape[1] + 1

    def launched(*args: Any) -> Any:
        room = given[0].new_empty(B * (1 + 2 * R)), given[0].new_empty(B * R)
        return *room, *end.launch(*args, *room)

    def both(op: Any) -> Any:
        mine = [x.clone() for x in state]
        return *op(*given, end.Texts(*mine, *then)), *mine

    return _equal(label, lambda: both(launched), lambda: both(end.settle))


def repeat_rows(_: object) -> Iterator[Case]:
    for T, W, layers, B in ((5, 3, 2, 2), (1, 1, 4, 1), (40, 2, 3, 1), (70, 4, 2, 5)):
        g = torch.Generator().manual_seed(T)
        positions, slots = (torch.randint(0, 1 << 30, (T,), generator=g) for _ in "ps")
        ancestors = torch.randint(-(1 << 62), 1 << 62, (T, W), generator=g)
        kv_len, window, *table = torch.randint(0, 1000, (8, B), generator=g, dtype=torch.int32)
        args = positions, slots, kv_len, window, ancestors, torch.stack(table, 1), layers, 4096, 256
        yield _repeat(f"T{T} W{W} L{layers} B{B}", args)


def _repeat(label: str, args: tuple) -> Case:
    return _equal(label, lambda: repeat.launch(*args), lambda: repeat.repeat_rows(*args))


def adjust_rows(_: object) -> Iterator[Case]:
    for B, R, V, C, trees, placed, K, floors in (
        (2, 3, 300, 50, True, False, 5, True),
        (1, 5, 5000, 3000, False, False, 0, False),
        (3, 6, 200, 70, True, True, 0, False),
        (2, 1, 4097, 10, False, False, 300, True),
    ):
        g = torch.Generator().manual_seed(V)
        length = torch.randint(2, C, (B,), generator=g)
        text = torch.randint(0, 40, (B, C), generator=g) * (V // 40)
        window = torch.randint(0, 40, (B, R), generator=g) * (V // 40)
        numbers = torch.tensor([[1.3, 0.0, 0.0, torch.inf], [1.0, 0.5, 0.25, 3.0], [1.0, 0.0, 0.0, torch.inf]])[:B]
        parents = torch.stack([_tree(R - 1, g) for _ in range(B)]) if trees else None
        places = torch.arange(0, B * R, 2) if placed else None
        biased = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(B)]).clone() if K else None
        if biased is not None:
            biased[0, K // 2 :] = -1
        bias = torch.randn(B, K, generator=g) if K else None
        logits = torch.randn(B * R if places is None else len(places), V, generator=g)
        args = logits, text, length // 2, length, window, numbers, parents, places, biased, bias, floors
        yield _adjust(f"B{B} R{R} V{V}{' trees' * trees}{' placed' * placed} K{K}{' floors' * floors}", args)


def _adjust(label: str, args: tuple) -> Case:
    return _equal(label, lambda: (adjust.launch(*args),), lambda: (adjust.adjust_rows_ref(*args),))


OPS = (
    accept_walk,
    adjust_rows,
    expert_route,
    place_rows,
    start_rows,
    start_pairs,
    grow,
    prune,
    cut_lattice,
    search_lattice,
    settle,
    repeat_rows,
)
