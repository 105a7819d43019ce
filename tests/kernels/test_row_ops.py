"""row_linear against its float64 formula."""

import importlib

import pytest
import torch
from formulas import close, randn
from torch.nn import functional as F

from specker.kernels.row_linear import row_linear, row_linear_cost

linear = importlib.import_module("specker.kernels.row_linear")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [0, 1, 7, 65])
@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_row_linear(dtype, T, epilogue):
    x, w, b = randn(T, 33, dtype=dtype), randn(46, 33, dtype=dtype, seed=1), randn(46, dtype=dtype, seed=2)
    for bias in (None, b):
        want = x.double() @ w.double().T + (0 if bias is None else bias.double())
        if epilogue == "silu_mul":
            gate, up = want[:, :23], want[:, 23:]
            want = gate / (1 + torch.exp(-gate)) * up
        assert close(row_linear(x, w, bias, epilogue), want, dtype, 8)


def test_row_linear_refuses():
    x, w = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match="expected x"):
        row_linear(x, torch.zeros(6, 7))
    with pytest.raises(ValueError, match="weight must be like x"):
        row_linear(x, w.double())
    with pytest.raises(ValueError, match="bias must be"):
        row_linear(x, w, torch.zeros(5))
    with pytest.raises(ValueError, match="epilogue must be"):
        row_linear(x, w, epilogue="gelu")
    for odd in (1, 3, 5):
        with pytest.raises(ValueError, match="even number"):
            row_linear(x, torch.zeros(odd, 8), epilogue="silu_mul")
    with pytest.raises(ValueError, match="expected x"):
        row_linear(x, w[0])
    assert row_linear_cost(x, w) == ((2 * 8 + 6 * 8 + 2 * 6) * 4, 2 * 2 * 6 * 8)
    x, w = torch.zeros(8, 14336, dtype=torch.bfloat16), torch.zeros(4096, 14336, dtype=torch.bfloat16)
    once = (8 * 14336 + 4096 * 14336 + 8 * 4096) * 2
    assert row_linear_cost(x, w)[0] == once


@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear_takes_float32_rows_beside_bfloat16_weights(epilogue, bias):
    torch.manual_seed(0)
    for w in (torch.randn(600, 512).bfloat16(), torch.randn(30, 33).bfloat16()):  # compiled; torch's own
        x, b = torch.randn(5, w.shape[1]), torch.randn(len(w)) if bias else None
        y = F.linear(x, w.float(), b)
        if epilogue == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        got = row_linear(x, w, b, epilogue)
        assert got.dtype == torch.float32 and (got - y).abs().max() < 0.02 * y.abs().max()


def test_a_cpu_without_bfloat16_products_rounds_only_the_weight(monkeypatch):
    w, x = torch.randn(30, 33).bfloat16(), torch.randn(5, 33)
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    torch.testing.assert_close(row_linear(x, w), x @ w.float().T)
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: True)
    assert (row_linear(x, w) - x @ w.float().T).abs().max() > 1e-3
