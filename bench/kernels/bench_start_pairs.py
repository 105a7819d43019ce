"""start_pairs against eager torch, at the widths of Llama 3's 8B and of 70B: how a step of an EAGLE-3 head begins.

A row of 8192 bfloat16 values is 16 KB, two of which are read and three written. As with start_rows the call's time is
its launch and two dependent round trips to memory, so the goals are microseconds over an empty kernel. torch takes a
gather, two norms and a concatenation beside the launches that place the rows; here start_rows places them for both.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.round.place_rows import Window
from specker.kernels.round.start_pairs import start_pairs, start_pairs_cost
from specker.kernels.round.start_rows import start_rows

PAGE = 256  # columns
PAGES = 16  # of a sequence
LENGTH = 2000  # of the first text
EPS = 1e-5
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
V = 128256 if DEVICE == "cuda" else 512


def build(B: int, width: int, E: int) -> Built:
    """`width` pairs of B sequences: a chain's, or the second level of a tree."""
    if DEVICE != "cuda":
        E //= 64
    embedding, features = (torch.randn(n, E, dtype=DTYPE, device=DEVICE) for n in (V, B * width))
    norms = tuple(torch.rand(E, device=DEVICE).to(DTYPE) + 0.5 for _ in range(2))
    length = LENGTH + 3 * torch.arange(B, device=DEVICE)
    tokens = torch.randint(V, (B, width), device=DEVICE)
    table = torch.randperm(B * PAGES, device=DEVICE).view(B, PAGES).int()
    parents = None
    if width > 1:
        level = torch.randint(1, width + 1, (B, width), device=DEVICE)
        parents = torch.cat((torch.zeros_like(level), level), 1)
    window = Window(length, 2, 1 + (width > 1) * width, width, parents, table, PAGE, 1 << 17)
    args = embedding, tokens, False, features, norms, EPS, False, window

    def eager() -> tuple[torch.Tensor, ...]:
        embedded, *placed = start_rows(embedding, tokens, False, window)
        stream = features
        if parents is not None:
            row = parents[:, width:] - 1 + width * torch.arange(B, device=DEVICE).unsqueeze(1)
            stream = features[row.view(-1)]
        joined = [F.rms_norm(x, (E,), w, EPS) for x, w in zip((embedded, stream), norms, strict=True)]
        return stream, torch.cat(joined, -1), *placed

    def check() -> None:
        for a, b in zip(start_pairs(*args), eager(), strict=True):
            torch.testing.assert_close(a, b)

    return Built({"specker": lambda: start_pairs(*args), "torch": eager}, check, start_pairs_cost(*args))


def cases() -> Iterator[Case]:
    for B, width, E in ((1, 1, 4096), (8, 1, 4096), (1, 10, 4096), (8, 10, 4096), (1, 1, 8192)):
        name = f"{'tree' if width > 1 else 'chain'}, {B} x {width} rows, {E}"
        yield Case(name, lambda B=B, width=width, E=E: build(B, width, E), Goal(over_empty=3e-6))


test_start_pairs = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("start_pairs", cases())
