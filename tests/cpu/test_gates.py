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
    if name == "clamped_silu":
        z = z.clamp(max=7)
        return z / (1 + torch.exp(-1.702 * z))
    return z / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))


def factor(name: str, up: torch.Tensor) -> torch.Tensor:
    """What the activation is multiplied with."""
    return up if name != "clamped_silu" else up.double().clamp(-7, 7) + 1


SPAN = torch.cat((torch.linspace(-12, 12, 48000), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 30, -30, 88, -88] * 2)))


@pytest.mark.parametrize("name", GATES)
def test_values(name: str) -> None:
    """Within a few units in the last place of z, and of the result where it is not small."""
    want, one = exact(name, SPAN), torch.full_like(SPAN, 1 if factor(name, torch.ones(1)) == 1 else 0)
    error = (gated(name, SPAN, one) - want).abs()
    assert (error <= 3e-7 * SPAN.abs()).all()
    assert (error <= 8e-7 * want.abs())[SPAN > -2].all()
    up = 4 * torch.randn(len(SPAN), generator=torch.Generator().manual_seed(1))
    error = (gated(name, SPAN, up) - want * factor(name, up)).abs()
    most = up.abs() if name != "clamped_silu" else up.abs() + 1  # the sum of which is rounded
    assert (error <= 4e-7 * (SPAN * most).abs()).all()


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
    if name == "clamped_silu":
        assert torch.equal(out[:3], gated(name, torch.tensor([7.0, 7, -1e20, 0] * 4), torch.ones(16))[:3])
        assert out[0] == out[1] and out[0].item() == pytest.approx(14, abs=1e-3) and out[2] == 0
        assert gated(name, torch.ones(16), z)[3].isnan()
    else:
        assert torch.equal(out[:3], torch.tensor([3e38, 1e20, 0]))
    assert out[3].isnan()
