"""row_linear against its float64 formula."""

import pytest
import torch
from formulas import close, randn

from specker.kernels.linear import row_linear, row_linear_cost

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
