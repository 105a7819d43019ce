"""Compare a generation with plain decoding of the same prompt (`--check`).

When two tokens differ, the target's logits distinguish rounding from a bug. float64 allows no difference, and neither
do chains through batch-invariant kernels. Otherwise the two tokens' logits may differ by `rounding_bound`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specker.kernels.adjust_rows import adjust_rows
from specker.kernels.noise import gumbel
from specker.kernels.quant import streams
from specker.model.decoder import Model, forward
from specker.model.prefill import prefill
from specker.model.sampling import adjusting, rules
from specker.options import Sampling
from specker.runtime.loop import Loop
from specker.runtime.text import Generation


@dataclass(frozen=True)
class CheckResult:
    """A generation compared with plain decoding of the same prompt."""

    ar: Generation
    identical: bool
    ok: bool  # identical, or a difference that rounding alone explains
    message: str
    first_difference: int | None = None
    gap: float | None = None  # between the two tokens' (perturbed) logits in the target's row at that position
    bound: float | None = None


def first_difference(tokens: Sequence[int], ar: Sequence[int]) -> int | None:
    """The first position at which the texts differ, also by their length; None if they are equal."""
    first = next((i for i, (a, b) in enumerate(zip(tokens, ar, strict=False)) if a != b), None)
    return min(len(tokens), len(ar)) if first is None and len(tokens) != len(ar) else first


def compared(
    generation: Generation,
    ar: Generation,
    first: int | None,
    apart: tuple[float, float] = (0.0, 0.0),
    exact: bool = False,
    dtype: torch.dtype = torch.float64,
) -> CheckResult:
    """The result for texts that differ first at token `first` (None: nowhere). `apart`: of `gap`, if there are two
    tokens to compare. `exact`: see `bit_equal`."""
    if first is None:
        return CheckResult(ar, True, True, "the tokens are those of plain decoding")
    lengths = len(generation.tokens), len(ar.tokens)
    if first >= min(lengths):
        message = f"the text has {lengths[0]} tokens, plain decoding's has {lengths[1]}"
        return CheckResult(ar, False, False, message, first)
    between, bound = apart
    verdict = "within" if between <= bound else "beyond"
    message = (
        f"the text differs from plain decoding's at token {first}: the two tokens' logits are {between:.2e} apart, "
        f"{verdict} the rounding bound {bound:.2e} of {str(dtype).removeprefix('torch.')}"
    )
    if exact:
        message += "; there should be no difference at all"
    return CheckResult(ar, False, not exact and between <= bound, message, first, between, bound)


def bit_equal(model: Model, chains: bool, ordered: bool) -> bool:
    """Whether tokens must equal plain decoding's bit for bit: in float64, and in rounds of any size through
    batch-invariant kernels, compiled for the CPU or, for chains, on a GPU. `chains`: drafts are chains. `ordered`:
    ranks add their partial sums in order."""
    kernels = model.stack is not None or (model.device.type == "cuda" and chains and all(map(streams, model.matrices)))
    return model.dtype == torch.float64 or (kernels and ordered)


@torch.inference_mode()
def gap(loop: Loop, ids: list[int], prompt: int, plain: int, other: int, sampling: Sampling) -> tuple[float, float]:
    """(distance of two tokens' (perturbed) logits after `ids`, of which `prompt` are the prompt's, how far rounding
    could move them)."""
    model, cache = loop.target, loop.cache
    loop.clear(forget=True)
    loop.batches.see(0)
    cache.take(0, len(ids) + 1)
    prefill(model, cache, ids[:-1])
    rows = cache.after([len(ids) - 1], [1])
    root = torch.tensor(ids[-1:], dtype=torch.int64, device=model.device)
    out = forward(model, cache, rows, model.embed_tokens(root))
    logits = model.whole_logits(model.logits(out.final))
    cache.release(0)
    bound = rounding_bound(model.dtype, logits, sampling.temperature)
    row = _adjusted(logits, ids, prompt, sampling)[0]
    if sampling.temperature > 0:
        row = row / sampling.temperature + gumbel(sampling.seed, rows.positions, len(row))[0]
    return abs(float(row[plain] - row[other])), bound


def _adjusted(logits: torch.Tensor, ids: list[int], prompt: int, sampling: Sampling) -> torch.Tensor:
    """logits [1, V] after biases, penalties and min_p by the text `ids`."""
    if not adjusting(sampling):
        return logits

    def ints(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=logits.device)

    text, prompts, lengths = ints(ids)[None], ints([prompt]), ints([len(ids)])
    biased, values = zip(*(sampling.logit_bias or ((-1, 0.0),)), strict=True)
    biases = torch.tensor([values], dtype=torch.float32, device=logits.device)
    numbers = rules(sampling).to(logits.device)[None]
    return adjust_rows(
        logits, text, prompts, lengths, text[:, -1:], numbers, None, None, ints(biased)[None], biases, floors=True
    )


def rounding_bound(dtype: torch.dtype, logits: torch.Tensor, temperature: float) -> float:
    """How far two tokens' logits may drift apart in a batch of another size: a few dozen roundings of the dtype at the
    logits' scale (each of ~10 layers contributes some), divided by the temperature like the logits."""
    return 64 * torch.finfo(dtype).eps * float(logits.abs().max()) / (temperature or 1.0)
