"""sample_rows against eager torch at Llama-3-8B's vocabulary.

8 rows of 128,256 bfloat16 logits are 2 MB, which memory reads in half a microsecond. A call's time is therefore its
launches, each with a round trip or two, and ten rounds of Philox for four ids. So the goals are microseconds over an
empty kernel, not shares of the limit. The torch baseline is what a user would call: `multinomial`, with a sort for
top-p; its noise and so its tokens differ.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.sample_rows import sample_rows, sample_rows_cost, sample_rows_ref

SEED = 7


def build(T: int, V: int, dtype: torch.dtype, temperature: float, top_k: int, top_p: float) -> Built:
    logits = (2.5 * torch.randn(T, V, device=DEVICE)).to(dtype)
    positions = torch.arange(1000, 1000 + T, device=DEVICE)
    setting = temperature, top_k, top_p

    def eager() -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        z = logits.float() / temperature
        if top_k:
            z = z.masked_fill(z < z.topk(top_k).values[:, -1:], float("-inf"))
        p = z.softmax(-1)
        if top_p < 1:
            p, ids = p.sort(-1, descending=True)
            p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
            return ids.gather(1, p.multinomial(1))[:, 0]
        return p.multinomial(1)[:, 0]

    def check() -> None:
        want = sample_rows_ref(logits.cpu(), *setting, SEED, positions.cpu())
        wrong = (sample_rows(logits, *setting, SEED, positions).cpu() != want).sum().item()
        # Two ids may lie within rounding of the noise, or the mass within rounding of top_p.
        assert wrong <= (1 if temperature else 0), f"{wrong} of {T} tokens"

    ways = {"specker": lambda: sample_rows(logits, *setting, SEED, positions), "torch": eager}
    return Built(ways, check, sample_rows_cost(logits, *setting, SEED, positions))


def cases() -> Iterator[Case]:
    T, V = (8, 128256) if DEVICE == "cuda" else (8, 512)
    for dtype in (torch.bfloat16, torch.float32) if DEVICE == "cuda" else (torch.float32,):
        for setting, goal in (
            ((0.7, 0, 0.9), Goal(seconds=60e-6)),
            ((0.7, 50, 0.9), Goal()),
            ((0.7, 50, 1.0), Goal()),
            ((0.7, 0, 1.0), Goal()),
            ((0.0, 0, 1.0), Goal()),
        ):
            temperature, top_k, top_p = setting
            kind = f"{', top-k' if top_k else ''}{', top-p' if top_p < 1 else ''}" if temperature else ", greedy"
            name = f"{str(dtype)[6:]}{kind}, T {T}"
            yield Case(name, lambda dtype=dtype, setting=setting: build(T, V, dtype, *setting), goal)


test_sample_rows = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("sample_rows", cases())
