"""What docs/ops.md says of gradients and of fake tensors."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from defaults import calls
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specker import kernels

CALLS = [(name, op, inspect.signature(op).bind(*given, **named).arguments) for name, op, given, named in calls()]
ROWS = [name for name, op, given in CALLS if op.__name__ not in ("kv_commit", "sample_rows")]


def floats(x: Any) -> list[Tensor]:
    found = x if isinstance(x, tuple) else (x,)
    return [each for each in found if isinstance(each, Tensor) and each.is_floating_point()]


@pytest.mark.parametrize("name", ROWS)
def test_gradients_reach_rows_and_weights_on_a_cpu(name: str) -> None:
    [(op, given)] = [(op, given) for each, op, given in CALLS if each == name]
    first = next(iter(given))
    if not floats(given[first]):
        return
    copies = {key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()}
    asked = [key for key in (first, "weight") if isinstance(given.get(key), Tensor)]
    for key in asked:
        copies[key].requires_grad_()
    loss = sum(y.float().sum() for y in floats(op(**copies)) if y.requires_grad)
    gradients = torch.autograd.grad(loss, [copies[key] for key in asked])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_fake_tensors_outside_of_compilers() -> None:
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            logits, positions = torch.ones(3, 50, device=device), torch.arange(3, device=device)
            drawn = torch.ops.specker.sample_rows(logits, 0.5, 3, 0.9, 7, positions)
            assert (drawn.shape, drawn.dtype, drawn.device.type) == ((3,), torch.int64, device)


def test_the_page_names_every_op() -> None:
    page = (Path(__file__).parents[2] / "docs/ops.md").read_text()
    table = page[page.index("## Which op") : page.index("## All ops")]
    assert all(f"[`{op}`](#{op})" in table for op in kernels.__all__)
