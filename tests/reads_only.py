"""What a kernel reads, in the interpreter, where a load beyond a tensor would otherwise find whatever lies there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch, *tensors: Tensor) -> Iterator[None]:
    """AssertionError where a kernel reads beyond `tensors` and what `new_empty` and `empty_like` make meanwhile."""
    allowed = [(x, x.data_ptr(), x.numel() * x.element_size()) for x in tensors]  # the tensor is kept alive
    load = interpreter.InterpreterBuilder.create_masked_load

    def checked(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        at = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64)
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(at.shape, bool)
        for _, first, count in allowed:
            inside |= (at >= first) & (at + size <= first + count)
        assert inside.all(), "a load of what no tensor holds"
        return load(self, ptrs, mask, *rest, **options)

    def kept(make: Any) -> Any:
        def call(*args: Any, **options: Any) -> Tensor:
            x = make(*args, **options)  # the interpreter makes empty ones, which become views of its arguments
            allowed.append((x, x.data_ptr(), x.numel() * x.element_size()))
            return x

        return call

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", checked)
        patch.setattr(Tensor, "new_empty", kept(Tensor.new_empty))
        patch.setattr(torch, "empty_like", kept(torch.empty_like))
        yield
