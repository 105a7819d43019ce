"""adjust_rows against eager torch at Qwen2.5's vocabulary: a chain of four drafts in a text of 2,000 or 8,000 tokens.

Five rows of 151,936 float32 logits are 3 MB, read and written once; min_p reads and writes them again. The text is 8
bytes a token, read once; the counts, 0.6 MB, are zeroed and read for each row. The torch baseline is what a user would
call: the counts of each row's text by `scatter_add_`, and an operator for each line of the formula.
"""

from collections.abc import Iterator

import torch

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.adjust_rows import adjust_rows, adjust_rows_cost, adjust_rows_ref

DRAFTS = 4


def build(V: int, length: int, min_p: bool) -> Built:
    made = torch.Generator().manual_seed(length)
    R, prompt = DRAFTS + 1, length // 2
    logits = 2.5 * torch.randn(R, V, generator=made)
    text = torch.randint(0, V, (1, length), generator=made)
    window = torch.cat((text[:, -1:], torch.randint(0, V, (1, DRAFTS), generator=made)), 1)
    numbers = torch.tensor([[1.1, 0.5, 0.25, 3.0 if min_p else torch.inf]])
    args = (logits, text, torch.tensor([prompt]), torch.tensor([length]), window, numbers)
    logits, text, prompts, lengths, window, numbers = (x.to(DEVICE) for x in args)
    on = logits, text, prompts, lengths, window, numbers, None, None, None, None, min_p

    def eager() -> torch.Tensor:
        each = torch.cat([text.expand(R, -1), window[:, 1:].expand(R, -1)], 1)
        counted = torch.arange(length + DRAFTS, device=DEVICE) < length + torch.arange(R, device=DEVICE)[:, None]
        seen = torch.zeros_like(logits).scatter_add_(1, each, counted.float()) > 0
        said = torch.zeros_like(logits).scatter_add_(1, each[:, prompt:], counted[:, prompt:].float())
        z = torch.where(seen, torch.where(logits > 0, logits / 1.1, logits * 1.1), logits)
        z = z - 0.5 * (said > 0) - 0.25 * said
        return z.masked_fill_(z < z.amax(1, keepdim=True) - 3.0, float("-inf")) if min_p else z

    def check() -> None:
        assert torch.equal(adjust_rows(*on).cpu(), adjust_rows_ref(*args, None, None, None, None, min_p))

    ways = {"specker": lambda: adjust_rows(*on), "torch": eager}
    return Built(ways, check, adjust_rows_cost(*on))


def cases() -> Iterator[Case]:
    V, lengths = (151936, (2000, 8000)) if DEVICE == "cuda" else (512, (100, 300))
    for length in lengths:
        for min_p in (False, True):
            name = f"adjust{', min_p' if min_p else ''}, text {length}"
            yield Case(name, lambda length=length, min_p=min_p: build(V, length, min_p), Goal())


test_adjust_rows = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("adjust_rows", cases())
