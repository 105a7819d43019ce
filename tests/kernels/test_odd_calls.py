"""Odd calls of all ops: a right result or a sentence of specker, never an error of torch or numpy, and no crash."""

import re
from typing import Any

import pytest
import torch
from odd_calls import every
from op_calls import attention, convolved, eight_bits, grown, op, paired, pruned, recurrent, repeated, settled, started
from op_calls import experts as expert_rows
from op_calls import sample as drawn
from torch import Tensor

from specker import kernels
from specker.kernels.noise import pack_draw

SIZE = 472  # eight calls of each


@pytest.mark.parametrize("calls", [SIZE, pytest.param(24_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_odd_calls(calls: int) -> None:
    ends, faults = every(calls, 0)
    assert not faults, "\n".join(faults)
    assert min(ends["served"], ends["refused"]) > 0.2 * calls, ends


def changed(x: Tensor, at: int, value: int) -> Tensor:
    x = x.clone()
    x.view(-1)[at] = value
    return x


@pytest.mark.parametrize(
    ("name", "given", "argument", "at", "value", "said"),
    [
        ("conv_rows", convolved(3, True, True), "kv_len", 0, 2**31 - 1, "kv_len must be in 3..128, from its rows to"),
        ("conv_rows", convolved(3, True, True), "kv_len", 0, 2, "its table's columns, got 2"),
        ("conv_rows", convolved(3, True, True), "window", 0, -1, "window must be in 0..23 in sequence 0, got -1"),
        ("conv_rows", convolved(3, True, True), "slots", 0, 128, "slots must be in 0..127, got 45..128"),
        ("conv_rows", convolved(3, True, True), "slots", 1, -1, "slots must be in 0..127, got -1.."),
        (
            "conv_rows",
            convolved(3, True, True),
            "cu_rows",
            1,
            2**31 - 1,
            "cu_rows must rise from 0 to 3 rows, got [0, 2",
        ),
        ("conv_rows", convolved(3, True, True), "block_table", 1, -1, "block_table must be in 0..15, got -1.."),
        ("delta_rows", recurrent(3, True, True), "kv_len", 0, 2**31 - 1, "kv_len must be in 3..128, from its rows to"),
        (
            "delta_rows",
            recurrent(3, True, True),
            "positions",
            0,
            2**62,
            "positions must be in 0..42, got 41..46116860184",
        ),
        (
            "delta_rows",
            recurrent(3, True, True),
            "anchors",
            2,
            -(2**62),
            "anchors must be multiples of block 16, at least",
        ),
        ("delta_rows", recurrent(3, True, True), "state_of", 0, 3, "state_of must be in 0..2, got 3..3"),
        ("expert_linear", expert_rows(3, 3), "order", 0, 6, "order must hold each of the choices 0..5 once, got [6,"),
        ("expert_linear", expert_rows(3, 3), "order", 0, -1, "order must hold each of the choices 0..5 once, got [-1,"),
        ("expert_linear", expert_rows(3, 3), "starts", 4, 7, "starts must rise from 0 to the 6 choices, got [0,"),
        (
            "sample_rows",
            drawn(draw=pack_draw(7, 0.5)),
            "draw",
            1,
            -1,
            "a top_k of at least 0 and a top_p in (0, 1], from",
        ),
        ("settle", settled(True), "length", 0, -3, "length must be in 0..16, got -3..5"),
    ],
)
def test_numbers_that_point_outside(
    name: str, given: dict[str, Any], argument: str, at: int, value: int, said: str
) -> None:
    op(name)(**{key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()})
    with pytest.raises(ValueError, match=re.escape(said)):
        op(name)(**{**given, argument: changed(given[argument], at, value)})


@pytest.mark.parametrize(
    ("name", "given", "other", "said"),
    [
        ("start_rows", started(False), {"length": [9, 5]}, "length must be Tensor, got list"),
        ("start_pairs", paired(False), {"norms": 3}, "norms must be tuple[Tensor, Tensor] | None, got int"),
        ("grow", grown(3), {"scores": None}, "scores must be Tensor, got None"),
        ("prune", pruned(), {"kept": "x"}, "kept must be Tensor, got str"),
        ("settle", settled(False), {"limit": 9}, "limit must be Tensor, got int"),
        ("repeat_rows", repeated(), {"layers": 1.5}, "layers must be int, got float"),
        ("repeat_rows", repeated(), {"apart": 10**30}, "apart must be a number of 64 bits, got 1000000000000000000"),
        ("kv_commit", None, {}, "k_cache is written in place, so it must not require a gradient"),
    ],
)
def test_sentences(name: str, given: dict[str, Any] | None, other: dict[str, Any], said: str) -> None:
    if given is None:
        caches = [torch.zeros(1, 2, 4, 1, 8).requires_grad_(), torch.zeros(1, 2, 4, 1, 8)]
        given = {"k_cache": caches[0], "v_cache": caches[1], "src": torch.tensor([1]), "dst": torch.tensor([2])}
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        op(name)(**{**given, **other})


@pytest.mark.parametrize("argument", ["q", "k_cache", "v_cache"])
def test_attention_over_strided_heads(argument: str) -> None:
    """Torch's kernel for CPUs takes it for granted that the numbers of a head are adjacent."""
    given = attention(3, torch.float32)
    given = {key: torch.randn_like(x) if x.is_floating_point() else x for key, x in given.items() if key != "scale"}
    want = kernels.tree_attention(**given, scale=0.5)[0]
    strided = torch.stack((given[argument], given[argument]), -1).flatten(-2)[..., ::2]
    assert torch.allclose(kernels.tree_attention(**{**given, argument: strided}, scale=0.5)[0], want, atol=1e-6)
    with pytest.raises(ValueError, match="eight bits"):
        kernels.tree_attention(**{**eight_bits({**given, "scale": 0.5}), "k_scale": None})
