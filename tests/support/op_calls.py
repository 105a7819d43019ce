"""Valid calls of every op, small ones, for tests that change their arguments."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from paths import Signal, World, gates, inputs
from torch import Tensor

from specker import kernels
from specker.kernels.ancestors import chain_words
from specker.kernels.conv_rows import conv_rows
from specker.kernels.delta_rows import delta_rows
from specker.kernels.noise import pack_draw
from specker.kernels.quant import quantised
from specker.kernels.round.grow import Candidates, grow, prune
from specker.kernels.round.lattice import Lattice, Paths, cut_lattice, search_lattice
from specker.kernels.round.place_rows import Window, place_rows
from specker.kernels.round.repeat_rows import repeat_rows
from specker.kernels.round.settle import Texts, settle
from specker.kernels.round.start_pairs import start_pairs
from specker.kernels.round.start_rows import start_rows
from specker.kernels.sample_rows import Splits

F32, BF16 = torch.float32, torch.bfloat16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(T: int, dtype: torch.dtype, B: int = 1) -> dict[str, Any]:
    n = T // B
    return {
        "q": torch.ones(T, 2, 32, dtype=dtype),
        "k_cache": torch.ones(8, 16, 1, 32, dtype=dtype),
        "v_cache": torch.ones(8, 16, 1, 32, dtype=dtype),
        "block_table": torch.arange(8, dtype=torch.int32).view(B, -1),
        "kv_len": ints(*[n + 3] * B),
        "window": ints(*[n] * B),
        "cu_rows": ints(*range(0, T + 1, n)),
        "ancestors": torch.full((T, 2), -1),
        "scale": 0.5,
    }


def eight_bits(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The arguments with caches in eight bits."""
    caches = {name: given[name].to(torch.int8) for name in ("k_cache", "v_cache")}
    scale = torch.ones(1, caches["k_cache"].shape[2])
    return {**given, **caches, **more, "k_scale": scale, "v_scale": scale}


def calibration(T: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "qkv": torch.ones(T, 8 * 32, dtype=dtype),
        "positions": torch.arange(T),
        "slots": torch.arange(T),
        "rope": kernels.rope_table(torch.ones(16), 1.0, 128, dtype),
        "k_cache": torch.zeros(8, 16, 2, 32, dtype=dtype),
        "v_cache": torch.zeros(8, 16, 2, 32, dtype=dtype),
        "q_norm": torch.ones(1, 32, dtype=dtype),
        "k_norm": torch.ones(1, 32, dtype=dtype),
        "eps": 1e-6,
    }


def projection(T: int, dtype: torch.dtype, kind: str | None = None) -> dict[str, Any]:
    weight, rest = torch.ones(256, 64, dtype=dtype), calibration(T, dtype)
    del rest["qkv"]
    own = {"x": torch.ones(T, 64, dtype=dtype), "weight": quantised(weight, kind) if kind else weight}
    return {**own, "bias": torch.ones(256, dtype=dtype), **rest}


def walk(*shape: int) -> dict[str, Any]:
    tokens, rows = torch.ones(shape, dtype=torch.int64), (*shape[:-1], shape[-1] + 1)
    return {"tokens": tokens, "parents": tokens * 0, "target": torch.ones(rows, dtype=torch.int64)}


def commit() -> dict[str, Any]:
    cache, slots = torch.ones(2, 4, 4, 1, 8), torch.tensor([1, 2])
    return {"k_cache": cache, "v_cache": cache, "src": slots, "dst": slots}


def linear(*shape: int, **more: Any) -> dict[str, Any]:
    *layers, T, O, E = shape
    return {"x": torch.ones(*layers, T, E), "weight": torch.ones(*layers, O, E), **more}


def merge(T: int, **more: Any) -> dict[str, Any]:
    x = torch.ones(T, 16)
    return {"x": x, "deltas": torch.ones(2, T, 16), "norm_weight": torch.ones(2, 16), "eps": 1e-6, **more}


def sample(**more: Any) -> dict[str, Any]:
    numbers = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}
    return {"logits": torch.ones(4, 50), **numbers, "positions": torch.arange(4), **more}


def adjusted(T: int, **more: Any) -> dict[str, Any]:
    lengths = {"prompt": torch.tensor([1, 2]), "length": torch.tensor([4, 5])}
    texts = {"text": torch.ones(2, 6, dtype=torch.int64), **lengths, "window": torch.ones(2, 2, dtype=torch.int64)}
    biases = {"bias_ids": torch.tensor([[1, 2], [3, -1]]), "bias": torch.ones(2, 2)}
    parents = torch.zeros(2, 1, dtype=torch.int64)
    return {"logits": torch.ones(T, 50), **texts, "numbers": torch.ones(2, 4), "parents": parents, **biases, **more}


def head(weight: Any, **more: Any) -> dict[str, Any]:
    return {"hidden": torch.ones(3, 32), "weight": weight, "token_ids": torch.arange(40), "k": 3, **more}


def experts(T: int, *shape: int, **more: Any) -> dict[str, Any]:
    chosen, scores, order, starts = kernels.expert_route(torch.arange(4.0).expand(T, 4), 2)
    rows = {"experts": chosen, "order": order, "starts": starts}
    x, weight = torch.ones(*shape, 64), torch.ones(4, 32, 64)
    return {"x": x, "weight": weight, **rows, **({"scores": scores} if "epilogue" in more else {}), **more}


def clusters(weight: Any, **more: Any) -> dict[str, Any]:
    ids = {"centroids": torch.ones(8, 32), "token_ids": torch.arange(40).view(8, 5), "clusters": 2}
    return {"hidden": torch.ones(3, 32), "weight": weight, **ids, "k": 3, **more}


NORM, NOISE = (torch.ones(32), 0.0), (7, torch.arange(3), 0.5)
# Few rows (numpy), many rows and bfloat16 (torch) take different paths.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("accept_walk", walk(2, 3)),
    ("accept_walk", walk(3)),
    ("accept_walk", {**walk(3), "target": torch.arange(5), "cu_drafts": ints(0, 2, 3)}),
    ("adjust_rows", adjusted(4)),
    ("adjust_rows", adjusted(3, places=torch.tensor([0, 2, 3]), floors=True)),
    ("ancestor_words", {"parents": torch.tensor([0, 0, 1])}),
    ("cluster_topk", clusters(torch.ones(40, 32), norm=NORM, noise=NOISE, out=torch.zeros(3, 3, dtype=torch.int64))),
    ("cluster_topk", clusters(quantised(torch.ones(40, 32), "int4"))),
    ("expert_linear", experts(3, 3)),
    ("expert_linear", experts(3, 3, 2, epilogue="sum")),
    ("expert_linear", {**experts(3, 3), "weight": quantised(torch.ones(4, 32, 64), "int4")}),
    ("expert_route", {"logits": torch.ones(3, 4), "chosen": 2}),
    (
        "expert_route",
        {
            "logits": torch.ones(3, 4),
            "chosen": 2,
            "scoring": "sigmoid",
            "bias": torch.ones(4),
            "scale": 2.0,
            "eps": 0.1,
        },
    ),
    *(("kv_calibrate", calibration(*how)) for how in ((3, F32), (100, F32), (3, BF16))),
    ("kv_commit", commit()),
    *(("kv_project", projection(*how)) for how in ((3, F32), (100, F32), (3, BF16), (3, F32, "int8"))),
    *(("residual_merge", merge(T, last=torch.ones(T, 16))) for T in (3, 100)),
    ("residual_merge", merge(3, split=True)),
    ("rope_table", {"inv_freq": torch.ones(16), "scale": 1.0, "length": 20, "dtype": F32}),
    ("row_linear", linear(3, 32, 64)),
    ("row_linear", linear(3, 32, 64, bias=torch.ones(32), epilogue="silu_mul")),
    ("row_linear", linear(3, 32, 64, epilogue="split", out=torch.zeros(1, 3, 32))),
    ("row_linear", linear(3, 512, 1024, bias=torch.ones(512))),
    ("row_linear", linear(2, 3, 32, 64, bias=torch.ones(2, 32), epilogue="float32")),
    ("row_linear", {"x": torch.ones(3, 64), "weight": quantised(torch.ones(32, 64), "int4")}),
    ("sample_rows", sample(draw=pack_draw(7, 0.5))),
    *(("tree_attention", attention(*how)) for how in ((3, F32), (100, F32), (3, BF16), (4, F32, 2), (4, BF16, 2))),
    ("tree_attention", eight_bits(attention(3, F32), reach=9, cap=2.0, sinks=torch.ones(1, 2))),
    ("kv_calibrate", eight_bits(calibration(3, F32))),
    ("kv_project", eight_bits(projection(3, BF16))),
    ("vocab_topk", head(torch.ones(40, 32), norm=NORM, noise=NOISE, out=torch.zeros(3, 3, dtype=torch.int64))),
    ("vocab_topk", head(quantised(torch.ones(40, 32), "int4"))),
]


def recurrent(rows: int, tree: bool, gated: bool) -> dict[str, Any]:
    """delta_rows after 40 tokens of a text."""
    gate = gates(60, 2, 8, F32) if gated else None
    world = World(delta_rows, inputs(60, 1, 2, 16, 8, F32), gate=gate)
    world.run(list(range(40)), 0, torch.arange(40), None)
    for x in (world.states, *world.records):
        x.nan_to_num_(0.0)
    at = torch.arange(40, 40 + rows)
    args = world.arguments(at.tolist(), 40, at, chain_words(rows) if tree else None)
    return dict(zip(signature(delta_rows).parameters, args, strict=False))


def convolved(rows: int, tree: bool, bias: bool) -> dict[str, Any]:
    """conv_rows after 20 tokens of a text."""
    text = Signal(conv_rows, 4, "silu", bias, not bias, F32)
    text.run(list(range(20)), 0, torch.arange(20), None)
    text.records[0].nan_to_num_(0.0)
    at = torch.arange(20, 20 + rows)
    args = text.arguments(at.tolist(), 20, at, chain_words(rows) if tree else None)
    return dict(zip(signature(conv_rows).parameters, args, strict=False))


CALLS += [
    ("conv_rows", convolved(3, True, True)),
    ("conv_rows", convolved(9, False, False)),
    ("delta_rows", recurrent(3, True, True)),
    ("delta_rows", recurrent(20, False, False)),
]


def placed(first: int, count: int, tree: bool) -> dict[str, Any]:
    own = {"length": torch.tensor([9, 5]), "back": 1, "first": first, "rows": count}
    parents = torch.zeros(2, first + count - 1, dtype=torch.int64) if tree else None
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    return {**own, "parents": parents, "block_table": table, "page_size": 4, "last_position": 15}


def started(tree: bool, **more: Any) -> dict[str, Any]:
    tokens = {"embedding": torch.ones(20, 8), "tokens": torch.arange(6).view(2, 3), "text": False}
    return {**tokens, **placed(0, 3, tree), **more}


def paired(tree: bool) -> dict[str, Any]:
    norms = torch.ones(8), torch.ones(8)
    own = {"embedding": torch.ones(20, 8), "tokens": torch.arange(6).view(2, 3), "text": False}
    heads = {"features": torch.ones(6, 8), "norms": norms, "eps": 1e-6, "normed": False}
    return {**own, **heads, **placed(3 if tree else 0, 3, tree)}


def grown(at: int) -> dict[str, Any]:
    w = 3
    rows = 2 * (w if at else 1)
    every = Candidates.empty(2, w, 2, F32, torch.device("cpu"))
    for x in every[:3]:
        x.zero_()
    best = {"ids": torch.arange(rows * w).view(rows, w), "logits": torch.ones(rows, w), "lse": torch.ones(rows)}
    tree = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "parents": torch.zeros(2, 6, dtype=torch.int64)}
    return {**best, **tree, "scores": torch.zeros(2, 6), "at": at, "candidates": every}


def pruned() -> dict[str, Any]:
    every = Candidates(torch.arange(24).view(2, 12), -torch.rand(2, 12), torch.arange(6).repeat(2, 1), 3)
    kept = torch.zeros(2, 5, dtype=torch.int64)
    return {"candidates": every, "kept": kept, "up": kept.clone()}


def guessed() -> dict[str, Any]:
    blocks = {"ids": torch.arange(24).view(2, 3, 4), "logits": torch.randn(2, 3, 4), "lse": torch.ones(2, 3)}
    return {**blocks, "ends": torch.tensor([2]), "report": torch.zeros(2, 3), "share": 0.9, "extra": 1}


def latticed(beam: bool, table: bool) -> dict[str, Any]:
    found = Lattice(torch.arange(24).view(2, 3, 4), -torch.rand(2, 3, 4), torch.zeros(2, 3))
    paths = Paths.empty(2, 2, 3, F32, torch.device("cpu"))
    for x in (*paths[:3], *paths.candidates[:3]):
        x.zero_()
    own = {"found": found, "added": torch.randn(2, 3, 4, 4) if table else None, "ends": torch.tensor([2])}
    out = torch.zeros(2, 3, dtype=torch.int64) if beam else None
    return {**own, "paths": paths, "score": torch.zeros(2), "first": 0, "levels": 3, "out": out}


def settled(tree: bool, splits: bool = False) -> dict[str, Any]:
    tokens, parents = torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    target: Any = torch.ones(2, 4, dtype=torch.int64)
    if splits:
        target = Splits(torch.rand(8, 5), torch.arange(40, dtype=torch.int32).view(8, 5))
    own = {"tokens": tokens, "parents": parents if tree else None, "target": target}
    state = {"committed": torch.zeros(2, 16, dtype=torch.int64), "length": torch.tensor([4, 5])}
    ends = {"window": torch.zeros(2, 4, dtype=torch.int64), "limit": torch.tensor([9, 12])}
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    room = {"report": torch.zeros(18, dtype=torch.int64), "drawn": torch.zeros(8, dtype=torch.int64)}
    return {**own, **state, **ends, "block_table": table, "page_size": 4, **room}


def repeated() -> dict[str, Any]:
    rows = {"positions": torch.arange(6), "slots": torch.arange(6), "kv_len": ints(7, 9), "window": ints(3, 3)}
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    return {**rows, "ancestors": torch.ones(6, 1, dtype=torch.int64), "block_table": table} | {
        "layers": 2,
        "apart": 32,
        "pages": 8,
    }


# The ops that only the runtime uses.
ROUND_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("place_rows", placed(0, 3, True)),
    ("place_rows", placed(2, 2, False)),
    ("start_rows", started(True)),
    ("start_rows", started(False, text=True, ahead=torch.tensor([1]))),
    ("start_pairs", paired(True)),
    ("start_pairs", paired(False)),
    ("grow", grown(0)),
    ("grow", grown(3)),
    ("prune", pruned()),
    ("cut_lattice", guessed()),
    ("search_lattice", latticed(False, True)),
    ("search_lattice", latticed(True, False)),
    ("settle", settled(True)),
    ("settle", settled(False, splits=True)),
    ("repeat_rows", repeated()),
]


def by_field(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, called with the fields of its window or texts instead of that record."""
    records = {p: kind for p, kind in (("window", Window), ("texts", Texts)) if signature(op).parameters.get(p)}

    def call(**given: Any) -> Any:
        made = {p: kind(**{field: given.pop(field) for field in kind._fields}) for p, kind in records.items()}
        return op(**given, **made)

    return call


ROUND: dict[str, Callable[..., Any]] = {
    **{op.__name__: by_field(op) for op in (place_rows, start_rows, start_pairs, settle)},
    **{op.__name__: op for op in (cut_lattice, grow, prune, repeat_rows, search_lattice)},
}


def op(name: str) -> Callable[..., Any]:
    return ROUND[name] if name in ROUND else getattr(kernels, name)
