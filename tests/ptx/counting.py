"""Counters of the ops in typical shapes: traffic beside the least that `<op>_cost` states, bank conflicts, and the mix
of instructions."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from formulas import randn
from paths import World, inputs

from ptx import ops
from ptx.launches import simulated
from specker.kernels import narrow
from specker.kernels.ancestors import chain_words

adjust = importlib.import_module("specker.kernels.adjust_rows")

Counted = tuple[str, Callable[[], Any], int]  # label, what launches, the least bytes


def counters(arch: int, dtype: str, only: list[str], first: int | None) -> Iterator[str]:
    for op in (
        _row_linear,
        _expert_linear,
        _tree_attention,
        _vocab_topk,
        _cluster_topk,
        _sample_rows,
        _adjust_rows,
        _conv_rows,
        _delta_rows,
        _kv_calibrate,
        _kv_commit,
        _residual_merge,
    ):
        if only and op.__name__[1:] not in only:
            continue
        for label, work, least in itertools.islice(op({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]), first):
            with simulated(arch, races=False) as simulation:
                work()
            yield f"\n{op.__name__[1:]} {label} sm_{arch} {dtype}: least {least / 1e3:.1f} KB by _cost\n{simulation}"


def _row_linear(dtype: torch.dtype) -> Iterator[Counted]:
    for T, O, E, epilogue in (
        (1, 4096, 4096, "none"),
        (8, 4096, 4096, "none"),
        (8, 2048, 14336, "none"),
        (8, 28672, 1024, "silu_mul"),
    ):
        args = randn(T, E, dtype=dtype), torch.zeros(O, E, dtype=dtype), None, epilogue
        yield (
            f"T{T} {E}->{O} {epilogue}",
            lambda args=args: ops.linear.launch(*args),
            ops.linear.row_linear_cost(*args)[0],
        )


def _expert_linear(dtype: torch.dtype) -> Iterator[Counted]:
    for T, X, k, O, E, epilogue in (
        (1, 16, 4, 512, 1024, "silu_mul"),
        (8, 16, 4, 512, 1024, "silu_mul"),
        (8, 16, 4, 1024, 256, "split"),
        (96, 4, 2, 256, 512, "silu_mul"),
        (2048, 8, 2, 64, 128, "silu_mul"),  # a chunk of a prompt reads each expert once
    ):
        chosen, scores, *places = ops.choices(T, X, k)
        own = scores if epilogue == "split" else None
        x, w = randn(T, E, dtype=dtype), torch.zeros(X, O, E, dtype=dtype)
        args = x, w, chosen, *places, epilogue, own
        label = f"T{T} X{X} k{k} {E}->{O} {epilogue}, {len(chosen.unique())} experts"
        yield label, lambda args=args: ops.experts.launch(*args), ops.experts.expert_linear_cost(*args)[0]


def _tree_attention(dtype: torch.dtype) -> Iterator[Counted]:
    for T, S, page in ((1, 1024, 256), (9, 1024, 256), (64, 1024, 256), (9, 1024, 16)):
        how = {"Hq": 32, "Hkv": 8, "D": 128, "page": page, "lengths": ((S - T, T - 1),), "relation": "chain"}
        args, *_ = ops.ragged().ragged(1, dtype, **how)
        least = ops.attention.tree_attention_cost(args["q"], args["k_cache"], [S], [T])[0]
        yield f"T{T} S{S} 32/8 D128 page {page}", lambda args=args: ops.attention.launch(**args), least
        if (T, page) == (9, 256):
            for kind, to in narrow.NARROW.items():
                codes = [args[name].clamp(-3, 3).mul(20).to(kind) for name in ("k_cache", "v_cache")]
                own = args | dict(zip(("k_cache", "v_cache"), codes, strict=True))
                own |= dict.fromkeys(("k_scale", "v_scale"), torch.full((1, 8), 0.05))
                least = ops.attention.tree_attention_cost(args["q"], codes[0], [S], [T])[0]
                yield f"T{T} S{S} {to} cache", lambda own=own: ops.attention.launch(**own), least


def _vocab_topk(dtype: torch.dtype) -> Iterator[Counted]:
    for T, E, K, k, noisy in ((1, 1024, 16384, 10, True), (8, 1024, 16384, 10, True), (8, 1024, 16384, 64, False)):
        noise = ops.topk.Noise(3, torch.arange(T), 0.8) if noisy else None
        args = randn(T, E, dtype=dtype), randn(K, E, seed=1, dtype=dtype), None, k, None, noise, True
        label = f"T{T} E{E} K{K} k{k}{' noise' * noisy}"
        yield label, lambda args=args: ops.topk.launch(*args), ops.topk.vocab_topk_cost(*args)[0]


def _cluster_topk(dtype: torch.dtype) -> Iterator[Counted]:
    for T, k, noisy in ((1, 1, True), (8, 10, True)):
        noise = ops.topk.Noise(3, torch.arange(T), 0.8) if noisy else None
        parts = (randn(n, 256, seed=seed, dtype=dtype) for seed, n in enumerate((T, 512 * 32, 512)))
        args = *parts, torch.arange(512 * 32).view(512, 32), 32, k, None, noise, True
        yield f"T{T} E256 32 of 512x32 k{k}", lambda args=args: ops.clusters.launch(*args), _cluster_bytes(args)


def _cluster_bytes(args: tuple[Any, ...]) -> int:
    return int(ops.clusters.cluster_topk_cost(*args)[0])


def _sample_rows(dtype: torch.dtype) -> Iterator[Counted]:
    for T, V, temperature, top_k, top_p in (
        (2, 128256, 0.0, 0, 1.0),
        (2, 128256, 0.8, 0, 1.0),
        (2, 128256, 0.8, 50, 0.95),
    ):
        args = randn(T, V).mul(2).to(dtype), temperature, top_k, top_p, 7, torch.arange(T)
        label = f"T{T} V{V} t{temperature} k{top_k} p{top_p}"
        yield label, lambda args=args: ops.sample.launch(*args), ops.sample.sample_rows_cost(*args)[0]


def _adjust_rows(_: torch.dtype) -> Iterator[Counted]:
    for V, C, floors in ((32768, 2000, False), (32768, 2000, True)):
        text, length = torch.arange(C)[None] * 7, torch.tensor([C])
        numbers = torch.tensor([[1.1, 0.5, 0.25, 3.0]])
        args = torch.zeros(5, V), text, length // 2, length, text[:, -5:], numbers, None, None, None, None, floors
        label = f"V{V} text {C}{', floors' * floors}"
        yield label, lambda args=args: adjust.launch(*args), adjust.adjust_rows_cost(*args)[0]


def _conv_rows(dtype: torch.dtype) -> Iterator[Counted]:
    for T in (1, 16, 512):
        x, weight, cache = randn(T, 1024, dtype=dtype), torch.ones(1024, 4), torch.zeros(16, 64, 1024, dtype=dtype)
        ints = [torch.tensor(n, dtype=torch.int32) for n in ([128 + T], [0 if T > 64 else T], [0, T])]
        places = torch.arange(128, 128 + T), torch.arange(16, dtype=torch.int32)[None], *ints
        args = x, weight, None, cache, *places, None if T > 64 else chain_words(T)
        yield f"T{T} C1024 K4", lambda args=args: ops.conv.launch(*args), ops.conv.conv_rows_cost(*args)[0]


def _delta_rows(dtype: torch.dtype) -> Iterator[Counted]:
    """One key head of Qwen3.5-9B's layer, whose other 15 read as much."""
    block, length = ops.delta.BLOCK, 113
    for T in (1, 5, 16, 60):
        world = World(ops.delta.delta_rows_ref, inputs(length + T, 1, 2, 128, 128, dtype), 64, 256)
        every, own = (list(range(*span)) for span in ((length,), (length, length + T)))
        before = [*world.arguments(every, 0, torch.tensor(every), None)]
        args = [*world.arguments(own, length, torch.tensor(own), chain_words(T))]
        before[20] = args[20] = block
        ops.delta.delta_rows_ref(*before)
        least = ops.delta.delta_rows_cost(*args)[0]
        yield f"T{T} after {length} 1/2 D128 block {block}", lambda args=args: ops.delta.launch(*args), least


def _kv_calibrate(dtype: torch.dtype) -> Iterator[Counted]:
    qkv, at, norm = randn(8, 48 * 128, dtype=dtype), torch.arange(8), torch.ones(1, 128, dtype=dtype)
    table = ops.kv.rope_table(1e4 ** -(torch.arange(0, 128, 2).float() / 128), 1.0, 64, dtype)
    caches = [torch.zeros(4, 16, 8, 128, dtype=dtype) for _ in "kv"]
    args = qkv, at, at, table, *caches, norm, norm, 1e-6
    yield "T8 32/8 D128 norm", lambda: ops.kv.launch(*args), ops.kv.kv_calibrate_cost(*args)[0]


def _kv_commit(dtype: torch.dtype) -> Iterator[Counted]:
    args = *(torch.zeros(4, 4, 16, 8, 128, dtype=dtype) for _ in "kv"), torch.arange(5) + 7, torch.arange(5)
    yield "L4 M5", lambda: ops.kv_moves.launch(*args), ops.kv_moves.kv_commit_cost(*args)[0]


def _residual_merge(dtype: torch.dtype) -> Iterator[Counted]:
    args = randn(8, 4096, dtype=dtype), randn(1, 8, 4096, dtype=dtype), torch.ones(1, 4096, dtype=dtype), 1e-5
    yield "T8 P1 Q1 E4096", lambda: ops.residual.launch(*args), ops.residual.residual_merge_cost(*args)[0]
