"""The compiled draw of the target's tokens against the reference."""

import pytest
import torch

from specker import cpu
from specker.kernels.noise import pack_draw
from specker.kernels.sample_rows import sample_rows, sample_rows_ref

FILTERS = [(0, 1.0), (1, 1.0), (40, 1.0), (0, 0.9), (0, 0.999), (0, 1e-6), (50, 0.8), (1 << 20, 0.95), (7, 0.5)]


def logits_of(T: int, V: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(T, V, generator=torch.Generator().manual_seed(T * V)) * spread


@pytest.mark.parametrize("V", [1, 3, 257, 8192, 50001])
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_rows_have_the_references_tokens(V: int, top_k: int, top_p: float) -> None:
    logits, positions = logits_of(6, V), torch.tensor([0, 1, 2, 77, 4000, 1 << 33])
    for temperature in (0.3, 1.0, 2.5):
        got = cpu.sample(logits, [(temperature, top_k, top_p, 11)], positions)
        assert got.tolist() == sample_rows_ref(logits, temperature, top_k, top_p, 11, positions).tolist()


def test_a_boundarys_ties_are_kept() -> None:
    logits = torch.zeros(64, 300)
    logits[:, :4] = 2.0
    positions = torch.arange(64)
    for top_k, top_p in ((2, 1.0), (0, 1e-3), (3, 0.2)):
        got = cpu.sample(logits, [(1.0, top_k, top_p, 5)], positions)
        assert set(got.tolist()) == {0, 1, 2, 3}
        assert got.tolist() == sample_rows_ref(logits, 1.0, top_k, top_p, 5, positions).tolist()


def test_logits_far_apart_and_infinite() -> None:
    logits = logits_of(5, 1000, 200.0)
    logits[1, 3:] = -torch.inf
    logits[2, :] = -torch.inf
    logits[2, 9] = 0.0
    positions = torch.arange(5)
    for filters in FILTERS:
        want = sample_rows_ref(logits, 0.7, *filters, 3, positions)
        assert cpu.sample(logits, [(0.7, *filters, 3)], positions).tolist() == want.tolist()


def test_a_row_of_nan_gives_an_id() -> None:
    logits = logits_of(3, 100)
    logits[1] = torch.nan
    for filters in FILTERS:
        ids = cpu.sample(logits, [(0.7, *filters, 3)], torch.arange(3)).tolist()
        assert ids[1] == 0
        others = sample_rows_ref(logits[::2], 0.7, *filters, 3, torch.tensor([0, 2]))
        assert ids[::2] == others.tolist()


def test_each_run_of_rows_has_its_own_numbers() -> None:
    logits, positions = logits_of(6, 500), torch.arange(6)
    draws = [(0.0, 0, 1.0, 1), (0.8, 0, 1.0, 2), (1.2, 5, 0.9, 2**64 - 1)]
    want = [
        token
        for i, (temperature, k, p, seed) in enumerate(draws)
        for token in sample_rows_ref(logits[2 * i : 2 * i + 2], temperature, k, p, seed, positions[2 * i : 2 * i + 2])
    ]
    assert cpu.sample(logits, draws, positions, 2).tolist() == want
    memory = torch.stack([pack_draw(seed, temperature, k or 2**31 - 1, p) for temperature, k, p, seed in draws])
    assert sample_rows(logits, 1.0, 1, 0.5, 0, positions, memory).tolist() == want


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (20, 1.0), (20, 0.5)])
def test_a_boundary_between_nearly_equal_logits(top_k: int, top_p: float) -> None:
    """So many draws of one row, whose logits differ by less than a bin of the tally, show every id that is kept."""
    logits, positions = (logits_of(1, 64) * 1e-3).expand(2000, -1), torch.arange(2000)
    got = cpu.sample(logits, [(1.0, top_k, top_p, 9)], positions)
    assert got.tolist() == sample_rows_ref(logits, 1.0, top_k, top_p, 9, positions).tolist()
    assert len(set(got.tolist())) < 40
