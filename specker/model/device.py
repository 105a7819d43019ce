"""The current CUDA device. It belongs to a thread, and streams, events, captures and copies to pinned memory use it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager in which `device`, if it is a GPU, is this thread's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
