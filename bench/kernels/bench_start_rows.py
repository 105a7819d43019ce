"""start_rows against eager torch, at Llama-3-8B's embedding: places and embeddings of a forward's first launch.

9 rows of 4096 bfloat16 values are 74 KB each way. The call's time is therefore its launch and two dependent round trips
to memory (the row's token, then its embedding); a tree's row meanwhile walks to the root through its parents. So the
goals are microseconds over an empty kernel, not shares of the limit. torch gathers, clamps and divides in about ten
launches; for a tree it also squares the matrix of parents until every row has all of its ancestors. A chain's masks
never change, so torch's are prepared.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.round.place_rows import Window, place_rows
from specker.kernels.round.start_rows import start_rows, start_rows_cost

PAGE = 256  # columns
PAGES = 16  # of a sequence
LENGTH = 2000  # of the first text
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
V, E = (128256, 4096) if DEVICE == "cuda" else (512, 64)


def build(B: int, count: int, tree: bool) -> Built:
    """Rows 0..count - 1 of B windows of at most 64 rows; in a tree every node has up to three children."""
    embedding = torch.randn(V, E, dtype=DTYPE, device=DEVICE)
    length = LENGTH + 3 * torch.arange(B, device=DEVICE)
    tokens = torch.randint(V, (B, count), device=DEVICE)
    table = torch.randperm(B * PAGES, device=DEVICE).view(B, PAGES).int()
    parents = (torch.arange(count - 1, device=DEVICE) // 3).expand(B, -1).contiguous() if tree else None
    window = Window(length, 1, 0, count, parents, table, PAGE, 1 << 17)
    args = embedding, tokens, False, window
    row = torch.arange(count, device=DEVICE)
    bits = torch.ones(count, dtype=torch.int64, device=DEVICE) << row
    chain = ((row[:, None] >= row) * bits).sum(-1, keepdim=True).repeat(B, 1)

    def eager() -> tuple[torch.Tensor, ...]:
        columns = length[:, None] - 1 + row
        slots = table.gather(1, columns // PAGE).long() * PAGE + columns % PAGE
        if parents is None:
            positions, words = columns, chain
        else:
            # Row r has r and its parent; each square doubles the generations. bfloat16 holds such small counts exactly.
            seen = (F.pad(parents, (1, 0))[..., None] == row) | (row[:, None] == row)
            for _ in range((count - 1).bit_length()):
                seen = (seen.to(DTYPE) @ seen.to(DTYPE)) > 0
            positions, words = length[:, None] - 2 + seen.sum(-1), (seen * bits).sum(-1).view(-1, 1)
        positions = positions.clamp(0, 1 << 17).view(-1)
        hidden = F.embedding(tokens.clamp(0, V - 1).view(-1), embedding)
        return hidden, positions, slots.view(-1), (length - 1 + count).int(), words

    def check() -> None:
        places = place_rows(Window(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in window)))
        want = embedding[tokens.view(-1)].cpu(), *places
        for name, outputs in (("specker", start_rows(*args)), ("torch", eager())):
            for a, b in zip(outputs, want, strict=True):
                assert torch.equal(a.cpu(), b), f"{name}: embeddings, positions, slots, kv_len or ancestors"

    ways = {"specker": lambda: start_rows(*args), "torch": eager}
    return Built(ways, check, start_rows_cost(*args))


def cases() -> Iterator[Case]:
    for B, count, tree in ((1, 1, False), (1, 9, False), (8, 9, False), (1, 61, True), (8, 61, True)):
        name = f"{'tree' if tree else 'chain'}, {B} x {count} rows"
        # A tree of 61 nodes has 4 generations, each a dependent load from L1.
        yield Case(name, lambda B=B, n=count, tree=tree: build(B, n, tree), Goal(over_empty=3e-6))


test_start_rows = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("start_rows", cases())
