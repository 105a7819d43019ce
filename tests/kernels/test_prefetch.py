"""prefetch: which part of a matrix is prefetched. tests/ptx/test_ops.py counts the bytes."""

import pytest
import torch

from specker.kernels import prefetch
from specker.kernels.prefetch import NONE, Prefetch, prefetch_of
from specker.kernels.quant import Quantized


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setattr(prefetch, "launched_on", lambda device: 90)
    monkeypatch.setattr(prefetch, "MEBIBYTES", 8)


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_part_of_each_row_or_all_of_a_matrix(on):
    assert prefetch_of(of(2048, 2048))[1] == Prefetch(132, 2048, 4096, 32)  # all of it
    assert prefetch_of(of(4096, 4096))[1] == Prefetch(132, 4096, 8192, 16)
    assert prefetch_of(of(3, 1000, 4096))[1] == Prefetch(132, 3000, 8192, 21)
    assert prefetch_of(of(5, 33))[1] == Prefetch(132, 5, 66, 13107)  # more than all of it
    assert prefetch_of(of(128, 2048, 768), experts=True)[1] == Prefetch(132, 2048, 1536, 32)
    assert prefetch_of(of(128256, 4096)) == (None, NONE)  # less than a line of each row
    scale = torch.ones(4096, 1)
    assert prefetch_of(Quantized(of(4096, 4096, dtype=torch.int8), scale, None))[1] == Prefetch(132, 4096, 4096, 16)


def test_it_is_off_by_default_and_without_an_nvidia_gpu(on, monkeypatch):
    assert prefetch_of(None) == (None, NONE)
    monkeypatch.setattr(prefetch, "launched_on", lambda device: 942)
    assert prefetch_of(of(2048, 2048)) == (None, NONE)
    monkeypatch.undo()
    assert prefetch.MEBIBYTES == 0 and prefetch_of(of(2048, 2048)) == (None, NONE)


def test_a_bad_setting_is_refused():
    with pytest.raises(ValueError, match="SPECKER_PREFETCH must be a number of MiB, got '-1'"):
        prefetch._mebibytes("-1")
