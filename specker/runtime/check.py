"""Compare a generation with plain decoding of the same prompt (`--check`).

When two tokens differ, the target's logits distinguish rounding from a bug. float64 allows no difference, and neither
do chains through batch-invariant kernels. Otherwise the two tokens' logits may differ by `rounding_bound`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specker.config import Sampling, from_kwargs
from specker.kernels.noise import gumbel
from specker.model.decoder import forward, prefill
from specker.runtime import strategies
from specker.runtime.text import token_ids

if TYPE_CHECKING:
    from specker.runtime.engine import Engine, Generation


@dataclass(frozen=True)
class CheckResult:
    """A generation compared with plain decoding of the same prompt."""

    ar: "Generation"
    identical: bool | None  # None: not compared, because of random weights or synthetic acceptance
    ok: bool  # identical, None, or a difference that rounding alone explains
    message: str
    first_difference: int | None = None
    gap: float | None = None  # between the two tokens' (perturbed) logits in the target's row at that position
    bound: float | None = None


def check(
    engine: "Engine",
    prompt: str | Sequence[int],
    generation: "Generation",
    max_new_tokens: int,
    stop: str | Sequence[str] = (),
    **sampling: Any,
) -> CheckResult:
    """Decode the prompt with `ar` and compare the tokens."""
    ar = engine.generate_ar(prompt, max_new_tokens, stop, **sampling)
    return compare(engine, prompt, generation, ar, **sampling)


def compare(
    engine: "Engine", prompt: str | Sequence[int], generation: "Generation", ar: "Generation", **sampling: Any
) -> CheckResult:
    """`check` against a finished plain decoding `ar`."""
    if engine.options.stand_ins:
        return CheckResult(ar, None, True, f"the tokens were not compared: {engine.remarks['sizing']}")
    pairs = zip(generation.tokens, ar.tokens, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        same = len(generation.tokens) == len(ar.tokens)
        counts = f"the text has {len(generation.tokens)} tokens, plain decoding's has {len(ar.tokens)}"
        message = "the tokens are those of plain decoding" if same else counts
        return CheckResult(ar, same, same, message, None if same else min(len(generation.tokens), len(ar.tokens)))
    ids = engine.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
    with engine.alone():
        between, bound = gap(engine, ids + ar.tokens[:first], ar.tokens[first], generation.tokens[first], sampling)
    exact = bit_equal(engine)
    ok = not exact and between <= bound
    verdict = "within" if between <= bound else "beyond"
    message = (
        f"the text differs from plain decoding's at token {first}: the two tokens' logits are {between:.2e} apart, "
        f"{verdict} the rounding bound {bound:.2e} of {str(engine.dtype).removeprefix('torch.')}"
    )
    if exact:
        message += "; there should be no difference at all"
    return CheckResult(ar, False, ok, message, first, between, bound)


def bit_equal(engine: "Engine") -> bool:
    """Whether tokens must equal plain decoding's bit for bit: in float64, and for chains through batch-invariant
    kernels, on a GPU or compiled for the CPU."""
    options, stack, ranks = engine.options, engine.model.stack, engine.ranks
    rows = options.batch_size * (engine.plan.largest.nodes + 1)  # of a verify pass
    compiled = stack is not None and rows <= stack.most
    kernels = compiled or (engine.device.type == "cuda" and strategies.of(options).chains(options))
    kernels = kernels and options.linear != "cublas" and (ranks is None or ranks.ordered)
    return engine.dtype == torch.float64 or kernels


@torch.inference_mode()
def gap(engine: "Engine", ids: list[int], plain: int, other: int, sampling: dict[str, Any]) -> tuple[float, float]:
    """(distance of two tokens' (perturbed) logits after `ids`, how far rounding could move them)."""
    params, model, cache, batch = from_kwargs(Sampling, sampling), engine.model, engine.cache, engine.batch
    batch.clear()
    batch.see(0)
    cache.take(0, len(ids) + 1)
    prefill(model, cache, ids[:-1])
    rows = cache.after([len(ids) - 1], [1])
    out = forward(model, cache, rows, model.embed_tokens(torch.tensor(ids[-1:], device=engine.device)))
    row = model.whole_logits(model.logits(out.final))[0]
    if len(cache.exact_len) > 1:
        cache.release(0)
    bound = rounding_bound(engine.dtype, row, params.temperature)
    if params.temperature > 0:
        row = row / params.temperature + gumbel(params.seed, rows.positions, len(row))[0]
    return abs(float(row[plain] - row[other])), bound


def rounding_bound(dtype: torch.dtype, logits: torch.Tensor, temperature: float) -> float:
    """How far two tokens' logits may drift apart in a batch of another size: a few dozen roundings of the dtype at the
    logits' scale (each of ~10 layers contributes some), divided by the temperature like the logits."""
    return 64 * torch.finfo(dtype).eps * float(logits.abs().max()) / (temperature or 1.0)
