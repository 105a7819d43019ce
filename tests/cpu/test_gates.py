"""The compiled activations against float64."""

import ctypes

import pytest
import torch

from specker.cpu.library import GATES, native


def gated(name: str, z: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """activation(z) up by the library; z and up [n] float32, n a multiple of 16."""
    out = z.clone()
    call = ctypes.c_int64(GATES[name]), ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(up.data_ptr())
    native().gated(*call, ctypes.c_int64(len(z)))
    return out


def exact(name: str, z: torch.Tensor) -> torch.Tensor:
    z = z.double()
    if name == "silu":
        return z / (1 + torch.exp(-z))
    if name == "gelu":
        return z * torch.special.ndtr(z)
    return z / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))


SPAN = torch.cat((torch.linspace(-12, 12, 48000), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 30, -30, 88, -88] * 2)))


@pytest.mark.parametrize("name", GATES)
def test_values(name: str) -> None:
    """Within a few units in the last place of z, and of the result where it is not small."""
    want = exact(name, SPAN)
    error = (gated(name, SPAN, torch.ones_like(SPAN)) - want).abs()
    assert (error <= 3e-7 * SPAN.abs()).all()
    assert (error <= 8e-7 * want.abs())[SPAN > -2].all()
    up = torch.randn(len(SPAN), generator=torch.Generator().manual_seed(1))
    error = (gated(name, SPAN, up) - want * up).abs()
    assert (error <= 4e-7 * (SPAN * up).abs()).all()


@pytest.mark.parametrize("name", GATES)
def test_a_number_has_the_same_bits_in_any_place(name: str) -> None:
    order = torch.randperm(len(SPAN), generator=torch.Generator().manual_seed(1))
    up = SPAN.flip(0)
    assert torch.equal(gated(name, SPAN[order], up[order]), gated(name, SPAN, up)[order])


@pytest.mark.parametrize("name", GATES)
def test_extremes(name: str) -> None:
    """Large numbers and a NaN."""
    z = torch.tensor([3e38, 1e20, -3e38, torch.nan] * 4)
    out = gated(name, z, torch.ones(16))
    assert torch.equal(out[:3], torch.tensor([3e38, 1e20, 0])) and out[3].isnan()
