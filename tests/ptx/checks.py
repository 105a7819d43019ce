"""Checks of every op: its values against the reference, and its rows alone against rows among others, bit for bit."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from formulas import randn
from paths import Signal, Text, World, gates, inputs
from torch import Tensor

from ptx import ops, rounds
from ptx.launches import simulated
from ptx.ops import weight
from specker.kernels.ancestors import ancestor_words, chain_words

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """The result of one case, or of one comparison."""

    op: str
    arch: int
    dtype: str
    label: str
    wrong: tuple[str, ...]  # nothing, where it passed
    error: float = 0.0  # the largest
    benign: int = 0  # oddities that cannot change a result

    def __str__(self) -> str:
        result = "FAIL" if self.wrong else f"pass, error {self.error:.3g}" if self.error else "pass"
        note = f", {self.benign} benign" * (self.benign > 0)
        head = f"{self.op:14} sm_{self.arch} {self.dtype:4} {self.label}: {result}{note}"
        return "\n      ".join((head, *self.wrong))


def check(arch: int, dtype: str, only: list[str], first: int | None, turn: int | None = None) -> Iterator[Row]:
    """The first cases of each op against the reference, with every hazard reported. `turn`: 0 or 1, every second one
    from this one on."""
    for op in (*rounds.OPS, *ops.OPS):
        if only and op.__name__ not in only:
            continue
        for case in itertools.islice(op(TYPES[dtype]), turn, first, 1 if turn is None else 2):
            verdict = case.verdict(simulated(arch, case.constant))
            kind = dtype if op in ops.OPS else "int"
            yield Row(op.__name__, arch, kind, case.label, tuple(verdict.wrong), verdict.error, verdict.benign)


def invariance(arch: int, dtype: str, only: list[str], first: int | None) -> Iterator[Row]:
    """What must be equal bit for bit: a row alone and among others, and the CTAs in another order."""
    ways = _residual_merge, _row_linear, _quantised_linear, _tree_attention, _vocab_topk, _sample_rows, _kv_calibrate
    for op in (*ways, _cluster_topk, _kv_project, _expert_linear, _conv_rows, _delta_rows):
        name = op.__name__[1:]
        if only and name not in only:
            continue
        for label, comparisons in itertools.islice(op(arch, TYPES[dtype]), first):
            wrong = [f"{what}: different bits" for what, same in comparisons.items() if not same]
            yield Row(name, arch, dtype, f"{label}: {', '.join(comparisons)}", tuple(wrong))


Comparisons = Iterator[tuple[str, dict[str, bool]]]  # label, what was compared -> whether it is equal


def _run(arch: int, work: Callable[[], Any], **options: Any) -> Any:
    """RuntimeError if the launches have problems."""
    with simulated(arch, **options) as simulation:
        out = work()
    if problems := simulation.problems():
        raise RuntimeError(f"expected no problems, found {problems}")
    return out


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return all(map(_equal, a, b))
    return a.shape == b.shape and torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


def _parts(call: Callable[[slice], Any], many: tuple[Tensor, ...], *spans: tuple[int, int]) -> dict[str, bool]:
    """Rows first..end - 1 on their own, against the same rows of `many`."""
    same = {}
    for first, end in spans:
        name = f"row {first}" if end == first + 1 else f"rows {first}-{end - 1}"
        same[name] = _equal(call(slice(first, end)), tuple(x[first:end] for x in many))
    return same


def _residual_merge(arch: int, dtype: torch.dtype) -> Comparisons:
    for E in (1023, 4096):
        x, deltas, norms = (randn(*shape, seed=E, dtype=dtype) for shape in ((5, E), (1, 5, E), (1, E)))

        def call(rows: slice, x: Tensor = x, deltas: Tensor = deltas, norms: Tensor = norms) -> Any:
            y, normed = _run(arch, lambda: ops.residual.launch(x[rows], deltas[:, rows], norms, 1e-5))
            return y, normed[0]

        yield f"E{E}", _parts(call, call(slice(0, 5)), (3, 4), (1, 5))


def _row_linear(arch: int, dtype: torch.dtype) -> Comparisons:
    for O, E, epilogue, bias, at in (
        (128, 640, "none", True, (0, 64, 69)),
        (256, 512, "silu_mul", True, (3, 65)),
        (96, 8192, "none", False, (1, 66)),
    ):
        x, w = randn(70, E, dtype=dtype), weight(O, E, dtype=dtype)
        b = randn(O, seed=2, dtype=dtype) if bias else None

        def call(rows: slice, x: Tensor = x, rest: Any = (w, b, epilogue), **options: Any) -> Any:
            return (_run(arch, lambda: ops.linear.launch(x[rows], *rest), **options),)

        many = call(slice(0, 70))
        same = _parts(call, many, *((r, r + 1) for r in at), (5, 14))
        same["CTAs backwards"] = _equal(call(slice(0, 70), backwards=True), many)
        same["CTAs one by one"] = _equal(call(slice(0, 70), threads=1), many)
        yield f"{E}->{O} {epilogue}", same


def _quantised_linear(arch: int, dtype: torch.dtype) -> Comparisons:
    for O, E, kind, group in (
        (256, 512, "int8", None),
        (96, 1152, "int4", 32),
        (256, 512, "int4", 128),
        (128, 288, "mxfp4", 32),
        (128, 8224, "fp8", 32),
    ):
        x, w = randn(70, E, dtype=dtype), ops.quantised_weight(kind, group, (kind, group) == ("int4", 32), O, E)

        def call(rows: slice, x: Tensor = x, w: Any = w, **options: Any) -> Any:
            return (_run(arch, lambda: ops.linear.launch(x[rows], w, None, "silu_mul"), **options),)

        many = call(slice(0, 70))
        same = _parts(call, many, (0, 1), (65, 66), (5, 14), (0, 16), (0, 17), (0, 64))
        same["CTAs backwards"] = _equal(call(slice(0, 70), backwards=True), many)
        yield f"{E}->{O} silu_mul {w.format}", same


def _tree_attention(arch: int, dtype: torch.dtype) -> Comparisons:
    tests = ops.ragged()

    def launch(**args: Any) -> Any:
        return _run(arch, lambda: ops.attention.launch(**args))

    eight = {"kind": torch.float8_e4m3fn, "sinks": True, "cap": 4.0}
    for D, prefix, nodes, page, more in (
        (128, 60, 6, 64, {}),
        (64, 123, 8, 64, {}),
        (128, 250, 7, 16, {}),
        (128, 123, 8, 64, eight),
        (512, 123, 9, 64, {}),
    ):
        args, *_ = tests.ragged(prefix, dtype, Hq=4, Hkv=1, D=D, page=page, lengths=((prefix, nodes),), **more)
        chain, steps = tests.chain_and_decoding(args, prefix, nodes + 1, launch)
        yield (
            f"D{D}" + " in eight bits" * bool(more),
            {f"a chain of {nodes + 1} after {prefix} and decoding": _equal(chain, steps)},
        )
    args, *_ = tests.ragged(4, dtype, Hq=8, Hkv=2, D=64, page=64, lengths=((700, 20),))
    want = launch(**args)
    orders: dict[str, Any] = {
        "backwards": {"backwards": True},
        "shuffled": {"shuffled": 3},
        "one by one": {"threads": 1},
    }
    yield (
        "six splits",
        {
            f"CTAs {name}": _equal(_run(arch, lambda: ops.attention.launch(**args), **how), want)
            for name, how in orders.items()
        },
    )
    args, *_ = tests.ragged(2, dtype, Hq=8, Hkv=2, D=64, page=16, lengths=((33, 20), (0, 40), (150, 2)))
    out, lse = launch(**args)
    same = {}
    for b in range(3):
        rows = slice(int(args["cu_rows"][b]), int(args["cu_rows"][b + 1]))
        own = {name: args[name][b : b + 1] for name in ("block_table", "kv_len", "window")}
        same[f"sequence {b}"] = _equal(launch(**tests.only(args, rows, **own)), (out[rows], lse[rows]))
    table = torch.cat((args["block_table"], torch.zeros(3, 40, dtype=torch.int32)), dim=1)
    same["a wider table"] = _equal(launch(**{**args, "block_table": table}), (out, lse))
    with patch.object(ops.attention, "sms", lambda device: 1):
        same["few programs"] = _equal(launch(**args), (out, lse))
    yield "three sequences", same


def _vocab_topk(arch: int, dtype: torch.dtype) -> Comparisons:
    for E, K, k, kind in ((64, 300, 64, ""), (256, 1000, 10, ""), (128, 12032, 4, ""), (256, 1000, 10, "int8")):
        h, positions = randn(70, E, dtype=dtype), torch.arange(70) + 5
        w = ops.quantised_weight(kind, 32, False, K, E) if kind else weight(K, E, dtype=dtype)

        def call(rows: slice, h: Tensor = h, w: Any = w, k: int = k, positions: Tensor = positions) -> Any:
            noisy = ops.topk.Noise(9, positions[rows], 0.9)
            return _run(arch, lambda: ops.topk.launch(h[rows], w, None, k, None, noisy, True))

        yield f"E{E} K{K} k{k} {kind}".strip(), _parts(call, call(slice(0, 70)), (0, 1), (69, 70), (60, 67), (0, 17))


def _cluster_topk(arch: int, dtype: torch.dtype) -> Comparisons:
    for E, C, R, k in ((64, 70, 5, 10), (256, 40, 40, 1)):
        h, w, centres = randn(66, E, dtype=dtype), weight(C * R, E, dtype=dtype), weight(C, E, seed=9, dtype=dtype)
        positions, ids = torch.arange(66) + 5, torch.arange(C * R).view(C, R)

        def call(rows: slice, given: tuple = (w, centres, ids, 5, k), h: Tensor = h, at: Tensor = positions) -> Any:
            noisy = ops.topk.Noise(9, at[rows], 0.9)
            return _run(arch, lambda: ops.clusters.launch(h[rows], *given, None, noisy, True))

        yield f"E{E} 5 of {C}x{R} k{k}", _parts(call, call(slice(0, 66)), (0, 1), (65, 66), (60, 63))


def _sample_rows(arch: int, dtype: torch.dtype) -> Comparisons:
    z, positions = randn(6, 9000).mul(3).to(dtype), torch.arange(6) + 77
    for how in ((0.0, 0, 1.0), (0.8, 0, 1.0), (0.8, 40, 0.9)):

        def call(rows: slice, how: tuple = how, **options: Any) -> Any:
            return (_run(arch, lambda: ops.sample.launch(z[rows], *how, 5, positions[rows]), **options),)

        many = call(slice(0, 6))
        same = _parts(call, many, (0, 1), (5, 6), (2, 4))
        same["CTAs backwards"] = _equal(call(slice(0, 6), backwards=True), many)
        same["CTAs shuffled"] = _equal(call(slice(0, 6), shuffled=3), many)
        yield "t{} k{} p{}".format(*how), same


def _kv_calibrate(arch: int, dtype: torch.dtype) -> Comparisons:
    table = ops.kv.rope_table(1e4 ** -(torch.arange(0, 64, 2).float() / 64), 1.0, 64, dtype)
    qkv, norm, at = randn(9, 12 * 64, dtype=dtype), randn(1, 64, seed=3, dtype=dtype), torch.arange(9) * 3

    def call(rows: slice) -> Any:
        caches = [torch.zeros(2, 16, 2, 64, dtype=dtype) for _ in "kv"]
        q = _run(arch, lambda: ops.kv.launch(qkv[rows], at[rows], at[rows], table, *caches, norm, norm, 1e-6))
        return q, *(c.view(32, 2, 64)[at[rows]] for c in caches)

    yield "8/2 D64", _parts(call, call(slice(0, 9)), (0, 1), (8, 9), (3, 6))


def _kv_project(arch: int, dtype: torch.dtype) -> Comparisons:
    table = ops.kv.rope_table(1e4 ** -(torch.arange(0, 64, 2).float() / 64), 1.0, 256, dtype)
    x, norm = randn(70, 1600, dtype=dtype), randn(1, 64, seed=3, dtype=dtype)
    plain, at = weight(6 * 64, 1600, dtype=dtype), torch.arange(70) * 3
    for name, w in (("", plain), (" int8", ops.quantised_weight("int8", 32, False, 6 * 64, 1600))):

        def call(rows: slice, w: Any = w, **options: Any) -> Any:
            caches = [torch.zeros(16, 16, 1, 64, dtype=dtype) for _ in "kv"]
            rest = at[rows], at[rows], table, *caches, norm, norm, 1e-6
            q = _run(arch, lambda: ops.project.launch(x[rows], w, None, *rest), **options)
            return q, *(c.view(256, 1, 64)[at[rows]] for c in caches)

        many = call(slice(0, 70))
        same = _parts(call, many, (0, 1), (69, 70), (60, 67), (0, 17))
        same["CTAs backwards"] = _equal(call(slice(0, 70), backwards=True), many)
        same["CTAs shuffled"] = _equal(call(slice(0, 70), shuffled=5), many)
        yield f"1600->4/1 D64{name}", same


def _expert_linear(arch: int, dtype: torch.dtype) -> Comparisons:
    T, X, k = 70, 3, 2
    chosen, scores, *_ = ops.choices(T, X, k)
    for O, E, epilogue, kind in ((128, 192, "silu_mul", ""), (64, 1152, "split", ""), (64, 8224, "split", "fp8")):
        x, bias = randn(T, E, dtype=dtype), randn(X, O, seed=2, dtype=dtype)
        w = ops.quantised_weight(kind, 32, False, X, O, E) if kind else weight(X, O, E, dtype=dtype)
        given = x, w, bias, epilogue

        def call(rows: slice, given: tuple[Any, ...] = given, **options: Any) -> Any:
            x, w, bias, how = given
            flat = chosen[rows].flatten()
            order = flat.argsort(stable=True)
            starts = torch.searchsorted(flat[order], torch.arange(X + 1))
            own = how, scores[rows] if how == "split" else None, bias
            args = x[rows], w, chosen[rows], order.int(), starts.int(), *own
            y = _run(arch, lambda: ops.experts.launch(*args), **options)
            return (y.transpose(0, 1) if how == "split" else y,)

        many = call(slice(0, T))
        same = _parts(call, many, (0, 1), (69, 70), (5, 14))
        same["CTAs backwards"] = _equal(call(slice(0, T), backwards=True), many)
        same["CTAs one by one"] = _equal(call(slice(0, T), threads=1), many)
        yield f"{E}->{O} {epilogue} {kind}".strip(), same


def _paths(arch: int, text: Callable[[Any], Text], ref: Any, launch: Any, length: int, n: int) -> dict[str, bool]:
    """n tokens after `length` others, of which the reference makes the state: decoded one by one, and in other ways."""

    def start() -> Text:
        world = text(ref)
        world.run(list(range(length)), 0, torch.arange(length), None)
        return world

    def run(world: Text, rows: list[int], first: int, where: list[int], words: Any, **options: Any) -> Tensor:
        world.op = lambda *args: _run(arch, lambda: launch(*args), **options)
        return world.run(rows, first, torch.tensor(where), words)

    def chain(size: int, chained: bool = True, **options: Any) -> tuple[Tensor, ...]:
        world, out = start(), []
        for at in range(length, length + n, size):
            rows = list(range(at, at + size))
            out.append(run(world, rows, at, rows, chain_words(size) if chained else None, **options))
        return torch.cat(out), *(x.flatten(0, 1)[world.slots[: length + n]] for x in world.records)

    def tree() -> tuple[Tensor, ...]:
        """The chain as every second row of a tree, whose other rows are wrong tokens after each."""
        world, both = start(), range(n)
        rows = [x for i in both for x in (length + i, i)]
        steps = [length + i + wrong for i in both for wrong in (0, 1)]
        parents = [parent for i in both for parent in (2 * i - 2, 2 * i)][1:]
        out = run(world, rows, length, steps, ancestor_words(torch.tensor(parents)))
        slots = torch.cat((world.slots[:length], world.slots[length : length + 2 * n : 2]))
        return out[::2], *(x.flatten(0, 1)[slots] for x in world.records)

    many = chain(n)
    return {
        f"a chain of {n} and decoding": _equal(many, chain(1)),
        "a chunk of a prompt": _equal(chain(n, False), many),
        f"a tree of {2 * n}": _equal(tree(), many),
        "CTAs backwards": _equal(chain(n, backwards=True), many),
        "CTAs shuffled": _equal(chain(n, shuffled=3), many),
    }


def _conv_rows(arch: int, dtype: torch.dtype) -> Comparisons:
    for K, activation, gated, length, n in ((4, "silu", False, 9, 5), (3, "none", True, 20, 18)):

        def text(op: Any, how: tuple = (K, activation, not gated, gated)) -> Text:
            return Signal(op, *how, dtype, C=70)

        same = _paths(arch, text, ops.conv.conv_rows_ref, ops.conv.launch, length, n)
        yield f"K{K} {activation}{' gates' * gated}", same


def _delta_rows(arch: int, dtype: torch.dtype) -> Comparisons:
    for D, length, n in ((32, 30, 5), (64, 44, 18)):
        given, gate = inputs(length + n, 1, 2, D, D, dtype), gates(length + n, 2, D, dtype)

        def text(op: Any, given: Any = given, gate: Any = gate) -> Text:
            return World(op, given, gate=gate)

        yield f"D{D}", _paths(arch, text, ops.delta.delta_rows_ref, ops.delta.launch, length, n)
