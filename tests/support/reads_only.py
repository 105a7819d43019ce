"""Check a kernel's reads in the interpreter, which does not notice a load beyond a tensor."""

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
    """AssertionError if a kernel reads outside `tensors` and the results of `new_empty` and `empty_like`."""
    allowed = [(x, x.data_ptr(), x.numel() * x.element_size()) for x in tensors]  # the tensor is kept alive
    load = interpreter.InterpreterBuilder.create_masked_load

    def checked(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        at = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64)
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(at.shape, bool)
        for _, first, count in allowed:
            inside |= (at >= first) & (at + size <= first + count)
        assert inside.all(), "a load outside every tensor"
        return load(self, ptrs, mask, *rest, **options)

    def kept(make: Any) -> Any:
        def call(*args: Any, **options: Any) -> Tensor:
            x = make(*args, **options)  # the interpreter turns empty tensors into views of its arguments
            allowed.append((x, x.data_ptr(), x.numel() * x.element_size()))
            return x

        return call

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", checked)
        patch.setattr(Tensor, "new_empty", kept(Tensor.new_empty))
        patch.setattr(torch, "empty_like", kept(torch.empty_like))
        yield
