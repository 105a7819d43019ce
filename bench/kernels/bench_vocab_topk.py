"""vocab_topk against a matmul with topk and logsumexp, over the kept rows and over a whole vocabulary of 128,256.

The limit is one read of the kept rows: at an H200's 4.3 TB/s 62 us for 32,768 of 4096 in bfloat16, 244 for all 128,256.
Each program ends by selecting its tile's candidates, which the last wave cannot hide, and the merge is a second launch,
except for "tokens": there the whole head draws the tokens of T verify rows in one launch. Its baseline writes float32
logits, reads them again and merges, T * 1 MB of traffic and two launches more.
The baselines write the logits and read them back several times, which is little next to the weight at one row, but not
at 64. "whole head" is the cost without trimming: the same matmul and topk over all rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.noise import pack_draw
from specker.kernels.quant import quantised
from specker.kernels.row_linear import row_linear
from specker.kernels.sample_rows import sample_rows
from specker.kernels.vocab_topk import Noise, vocab_topk, vocab_topk_cost

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
E = 4096 if DEVICE == "cuda" else 128
KEPT = 32768 if DEVICE == "cuda" else 1024  # rows of a trimmed head
WHOLE = 128256 if DEVICE == "cuda" else 4096  # rows of the whole head


def build(T: int, k: int, noisy: bool = False, kind: str | None = None) -> Built:
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(T, E, dtype=DTYPE, device=DEVICE, generator=g)
    whole = torch.randn(WHOLE, E, dtype=DTYPE, device=DEVICE, generator=g) / E**0.5
    kept = torch.randperm(WHOLE, device=DEVICE, generator=g)[:KEPT].sort().values
    plain = whole[kept].contiguous()
    weight = plain if kind is None else quantised(plain, kind).for_bfloat16()
    noise: Noise | None = (1, torch.arange(T, device=DEVICE), 0.7) if noisy else None

    def ours() -> tuple[Tensor, Tensor, Tensor]:
        return vocab_topk(hidden, weight, kept, k, None, noise)

    def matmul(rows: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        z = (hidden @ rows.T).float()
        logits, at = z.topk(k)
        return at if ids is None else ids[at], logits, z.logsumexp(-1)

    def check() -> None:
        ids, logits, lse = ours()
        restored = weight if isinstance(weight, Tensor) else weight.dequantised(DTYPE)
        exact = hidden.double() @ restored.double().T
        if noise is not None:
            from specker.kernels.noise import gumbel_ref

            exact = exact / noise[2] + gumbel_ref(noise[0], noise[1], WHOLE).double()[:, kept]
        # A matrix unit may truncate its float32 sum at each of E / 16 steps, by up to 2^-22 of the sum.
        error = max(1e-5, E / 16 * 2**-22) * exact.abs().max()
        at = torch.searchsorted(kept, ids)
        assert torch.equal(kept[at], ids), "an id that was not kept"
        assert (exact.gather(1, at) - logits).abs().max() <= error, "logits are not those of the ids"
        assert (exact.topk(k).values - logits).abs().max() <= error, "not the largest"
        assert (exact.logsumexp(-1) - lse).abs().max() <= error, "lse"

    ways: dict[str, Callable[[], Any]] = {
        "specker": ours,
        "matmul + topk": lambda: matmul(plain, kept),
        "whole head": lambda: matmul(whole, None),
    }
    if kind is not None:
        ways["bfloat16"] = lambda: vocab_topk(hidden, plain, kept, k, None, noise)
    return Built(ways, check, vocab_topk_cost(hidden, weight, kept, k, None, noise))


def tokens(T: int) -> Built:
    """The tokens of T rows of two sequences, sampled and greedy."""
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(T, E, dtype=DTYPE, device=DEVICE, generator=g)
    whole = torch.randn(WHOLE, E, dtype=DTYPE, device=DEVICE, generator=g) / E**0.5
    draw = torch.stack([pack_draw(1, 0.7), pack_draw(2, 0.0)]).to(DEVICE)
    positions = torch.arange(T, device=DEVICE)
    noise = Noise(0, positions, 1.0, draw)

    def ours() -> Tensor:
        return vocab_topk(hidden, whole, None, 1, None, noise, with_lse=False)[0][:, 0]

    def apart() -> Tensor:
        return sample_rows(row_linear(hidden, whole, epilogue="float32"), 1.0, 0, 1.0, 0, positions, draw)

    def check() -> None:
        assert torch.equal(ours(), apart()), "other tokens"

    cost = vocab_topk_cost(hidden, whole, None, 1, None, noise, False)
    return Built({"specker": ours, "row_linear + sample_rows": apart}, check, cost)


def cases() -> Iterator[Case]:
    few = Goal(share=0.80, over=(("matmul + topk", 1.15), ("whole head", 3.7)))
    for T in (1, 8):
        yield Case(f"T {T}, k 10", lambda T=T: build(T, 10), few)
    yield Case("T 1, k 1", lambda: build(1, 1))
    yield Case("T 8, k 10, noise", lambda: build(8, 10, noisy=True))
    for kind, share in (("int8", 0.70), ("fp8", 0.65), ("int4", 0.40)):
        goal = Goal(share=share, over=(("bfloat16", 1.3),))
        yield Case(f"{kind}, T 8, k 10", lambda kind=kind: build(8, 10, kind=kind), goal)
    yield Case("T 64, k 64", lambda: build(64, 64))
    for T in (2, 8, 64):
        yield Case(f"T {T}, tokens", lambda T=T: tokens(T), Goal(over=(("row_linear + sample_rows", 1.0),)))


test_vocab_topk = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("vocab_topk", cases())
