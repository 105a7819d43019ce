"""How a request's tokens are drawn, as the ops take it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specker.config import Sampling
from specker.kernels.noise import pack_draw
from specker.kernels.sample import sample_rows
from specker.kernels.topk import Noise

ALL = 2**31 - 1  # top_k of a draw that keeps all, where both filters run


@dataclass(frozen=True)
class Held(Sampling):
    """A request's sampling whose four numbers stand in device memory, too, and are read there when a kernel runs: one
    CUDA graph serves every request of the same `kind`."""

    memory: Any = None  # [4] int64 on the device, as `pack` gives it


def filtered(s: Sampling) -> bool:
    return s.temperature > 0 and (s.top_k > 0 or s.top_p < 1)


def kind(s: Sampling) -> str:
    """What is launched for a draw; all else are numbers."""
    return "filtered" if filtered(s) else "noise" if s.temperature > 0 else "greedy"


def pack(s: Sampling) -> Tensor:
    """The numbers for a `Held`, [4] int64 on the CPU."""
    return pack_draw(s.seed, s.temperature, min(s.top_k or ALL, ALL), s.top_p)


def draw_rows(s: Sampling, logits: Tensor, positions: Tensor) -> Tensor:
    """The target's token after each row: logits [T, V] at `positions` [T] -> [T]."""
    if not isinstance(s, Held):
        return sample_rows(logits, s.temperature, s.top_k, s.top_p, s.seed, positions)
    top_k, top_p = (1, 0.5) if filtered(s) else (0, 1.0)  # that both filters run, or none; the numbers are in memory
    return sample_rows(logits, s.temperature, top_k, top_p, s.seed, positions, s.memory)


def noise_of(s: Sampling, positions: Tensor) -> Noise | None:
    """The noise of the target's draw at `positions` [T], for a drafter's ranking; None when greedy."""
    if s.temperature == 0:
        return None
    return Noise(s.seed, positions, s.temperature, s.memory if isinstance(s, Held) else None)
