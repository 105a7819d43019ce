"""expert_route: the router of a mixture of experts: each row's best experts, and the rows of each expert.

One program per row finds its experts. The last of them to finish puts few choices in order, by counting the smaller
ones before each; for many, a second kernel has one program per expert, whose choices a running sum puts in order.
Nothing depends on the order in which programs run.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.registry import register, takes
from specker.kernels.variant import Variant, counters, is_last, same_device, start_after_previous, tl, triton
from specker.kernels.vocab_topk import NO_KEY, id_of, rank_key, take_best, value_of

# Most choices per row and most experts that the kernels serve; the reference serves more.
MAX_CHOSEN = 16  # experts of a row
MAX_EXPERTS = 512
FEW = 64  # most choices that the last program puts in order, in about 1 us: 8 rows of 8
SCORING = "softmax", "sigmoid"


def expert_route(
    logits: Tensor,
    chosen: int,
    normalise: bool = True,
    idle: Tensor | None = None,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row's best experts with their scores, and the rows of each expert.

        p          = softmax(logits + bias) or sigmoid(logits); of their sum over S
        experts[t] = the `chosen` experts of largest p[t] (for sigmoid + bias), in falling order; the lower id first
                     among equals
        scores     = scale * p[t, experts[t]], with `normalise` divided by (the sum of these p + eps)
        order      = the choices t * chosen + j, sorted by experts[t, j]; in falling order of nothing else (stable)

    Without a bias of p, experts are ranked by their logits, which rank as p does; NaN ranks first. Scores are computed
    in float32 (float64 for float64), and a row's bits depend on that row alone. The kernels serve up to 16 choices of
    512 experts, and take one launch for up to 64 choices, otherwise two. Memory moves the logits once.

    Args:
        logits: [T, X] float32 or float64; or [S, T, X], which add up to the logits, in order: what `row_linear` returns
            for "split".
        chosen: the number k of experts per row, 1 to X.
        normalise: whether a row's scores are divided by their sum. Then they add up to `scale`, but for eps.
        idle: [B] bool, or None. The rows belong to B sequences of T / B adjacent rows each. Those of an idle sequence,
            which pads a batch, get row 0's experts and scores, so that no expert is read for them alone.
        scoring: "softmax", or "sigmoid" of each logit by itself.
        bias: [X] of logits' dtype, or None. With "softmax" it is added to the logits (gpt-oss); with "sigmoid" it
            decides which experts are chosen, and is no part of their scores.
        scale: factor of the scores, above 0.
        eps: added to the sum by which `normalise` divides, at least 0. Only with "sigmoid".

    Returns:
        experts [T, k] int32; scores [T, k] of logits' dtype; order [T * k] int32; starts [X + 1] int32, where each
        expert's choices begin in `order`. `expert_linear` takes all four.

    Raises:
        TypeError: an argument of another type.
        ValueError: another shape, dtype or device, `chosen` outside 1..X, another scoring, scale or eps.

    Source: Mixtral, arXiv 2401.04088, section 2.1; Switch Transformer, arXiv 2101.03961, without `normalise`;
    DeepSeek-V3, arXiv 2412.19437, section 2.1.2, with "sigmoid" and a bias.

    Examples:
        >>> import torch
        >>> from specker.kernels import expert_route
        >>> experts, scores, order, starts = expert_route(torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]), 2)
        >>> experts.tolist(), order.tolist(), starts.tolist()
        ([[1, 0], [2, 0]], [1, 3, 0, 2], [0, 2, 3, 4])
    """
    return _expert_route(logits, chosen, normalise, idle, scoring, bias, scale, eps)


class Arguments(NamedTuple):
    logits: Tensor
    chosen: int
    normalise: bool = True
    idle: Tensor | None = None
    scoring: str = "softmax"
    bias: Tensor | None = None
    scale: float = 1.0
    eps: float = 0.0


@takes(Arguments)
def expert_route_ref(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, chosen, normalise, idle, scoring, bias, scale, eps = args
    logits = logits.contiguous()  # so that the results are, as `_fake` promises
    if logits.dim() == 3:
        logits, *rest = logits
        for part in rest:
            logits = logits + part
    if idle is not None and len(logits):
        logits = torch.where(idle.repeat_interleave(len(logits) // len(idle))[:, None], logits[:1], logits)
    if bias is not None and scoring == "softmax":
        logits, bias = logits + bias, None
    p = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    rank = logits if bias is None else p + bias
    experts = rank.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    scores = p.gather(1, experts)
    if normalise:
        scores = scores / (scores.sum(-1, keepdim=True) + eps)
    scores = scores * scale
    by_expert, order = experts.flatten().sort(stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(logits.shape[1] + 1, dtype=torch.int64, device=logits.device))
    return experts.int(), scores, order.int(), starts.int()


@takes(Arguments)
def expert_route_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) that any implementation needs: the logits and the bias read once, the results written."""
    logits, bias, (T, X) = args.logits, args.bias, args.logits.shape[-2:]
    written = T * args.chosen * (4 + logits.element_size() + 4) + (X + 1) * 4
    read, adds = (0, 0) if bias is None else (bias.nbytes, T * X)
    return logits.nbytes + read + written, T * X * (3 + args.chosen) + adds + logits.numel() - T * X


@triton.jit
def _sigmoid(z):
    power = tl.exp(-tl.abs(z))
    return tl.div_rn(tl.where(z < 0, power, 1.0), 1.0 + power)


@triton.jit(do_not_specialize=["T", "each"], do_not_specialize_on_alignment=["idle_ptr", "bias_ptr"])
def _expert_route_kernel(
    logits_ptr,  # [SPLITS, T, X]
    experts_ptr,  # [T, K]
    scores_ptr,  # [T, K]
    order_ptr,  # [T * K]
    starts_ptr,  # [X + 1]
    count_ptr,  # [1] zero; reset to zero at the end
    idle_ptr,  # [sequences], or None
    bias_ptr,  # [X], or None
    T,
    each,  # rows of a sequence
    scale,
    eps,
    X: tl.constexpr,
    K: tl.constexpr,
    X_PAD: tl.constexpr,  # powers of two
    K_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,  # else softmax
    CHOICES: tl.constexpr,  # at least T * K: the last program writes their order; 0: another kernel does
    PDL: tl.constexpr,
    ON_AMD: tl.constexpr,
):
    start_after_previous(PDL)
    tl.static_assert(K <= K_PAD and K_PAD <= 16 and X <= X_PAD)
    i_t = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, X_PAD)[None, :]
    o_k = tl.arange(0, K_PAD)[None, :]
    m_x, m_k = o_x < X, o_k < K
    i_z = i_t
    if idle_ptr is not None:
        i_z = tl.where(tl.load(idle_ptr + i_t // each) != 0, 0, i_t)
    b_z = tl.load(logits_ptr + i_z * X + o_x, mask=m_x, other=float("-inf"))
    for i_s in tl.static_range(1, SPLITS):
        b_z += tl.load(logits_ptr + (i_s * T + i_z) * X + o_x, mask=m_x, other=0.0)
    if bias_ptr is not None and not SIGMOID:
        b_z += tl.load(bias_ptr + o_x, mask=m_x, other=0.0)
    b_z = tl.where(b_z == b_z, b_z, float("nan"))  # of either sign
    b_rank = b_z
    if bias_ptr is not None and SIGMOID:
        b_rank = _sigmoid(b_z) + tl.load(bias_ptr + o_x, mask=m_x, other=0.0)
        b_rank = tl.where(b_rank == b_rank, b_rank, float("nan"))
    b_top = take_best(tl.where(m_x, rank_key(b_rank, o_x.to(tl.int64)), NO_KEY), 1, K, K_PAD)
    b_best = tl.where(m_k, value_of(b_top), float("-inf"))
    if bias_ptr is not None and SIGMOID:  # their logits, added up as above
        b_best = tl.load(logits_ptr + i_z * X + id_of(b_top), mask=m_k, other=float("-inf"))
        for i_s in tl.static_range(1, SPLITS):
            b_best += tl.load(logits_ptr + (i_s * T + i_z) * X + id_of(b_top), mask=m_k, other=0.0)
    if SIGMOID:
        b_p = _sigmoid(b_best)
        b_sum = tl.sum(b_p, axis=1) + eps if NORMALISE else tl.full([1], 1.0, tl.float32)
    else:
        peak = tl.max(b_best, axis=1)[:, None]
        b_p = tl.exp(b_best - peak)
        b_sum = tl.sum(b_p if NORMALISE else tl.exp(b_z - peak), axis=1)
    tl.store(experts_ptr + i_t * K + o_k, id_of(b_top).to(tl.int32), mask=m_k)
    tl.store(scores_ptr + i_t * K + o_k, tl.div_rn(b_p, b_sum[:, None]) * scale, mask=m_k)
    if CHOICES:  # noqa: SIM102 - a constant
        if is_last(count_ptr, T, ON_AMD):
            o = tl.arange(0, CHOICES)
            b_key = tl.load(experts_ptr + o, mask=o < T * K, other=X) * CHOICES + o  # no two are equal
            for i in tl.static_range(0, CHOICES, 16):
                o_i = i + tl.arange(0, 16)
                b_own = tl.load(experts_ptr + o_i, mask=o_i < T * K, other=X) * CHOICES + o_i
                b_before = tl.sum((b_key[None, :] < b_own[:, None]).to(tl.int32), axis=1)
                tl.store(order_ptr + b_before, o_i, mask=o_i < T * K)
            for i in tl.range(0, X + 1, 16):
                o_i = i + tl.arange(0, 16)
                b_before = tl.sum((b_key[None, :] < (o_i * CHOICES)[:, None]).to(tl.int32), axis=1)
                tl.store(starts_ptr + o_i, b_before, mask=o_i <= X)


@triton.jit(do_not_specialize=["choices"])
def _expert_rows_kernel(
    experts_ptr,  # [choices]
    order_ptr,  # [choices]
    starts_ptr,  # [X + 1]
    choices,  # T * K
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program X finds none, after all others."""
    start_after_previous(PDL)
    i_x = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    before = tl.full([], 0, tl.int32)
    for i in tl.range(0, choices, BLOCK):
        b_x = tl.load(experts_ptr + i + o, mask=i + o < choices, other=2**31 - 1)
        before += tl.sum((b_x < i_x).to(tl.int32), axis=0)
    tl.store(starts_ptr + i_x, before)
    for i in tl.range(0, choices, BLOCK):
        b_x = tl.load(experts_ptr + i + o, mask=i + o < choices, other=2**31 - 1)
        b_own = (b_x == i_x).to(tl.int32)
        tl.store(order_ptr + before + tl.cumsum(b_own, axis=0) - 1, i + o, mask=b_own > 0)
        before += tl.sum(b_own, axis=0)


@lru_cache
def _variants(
    X: int, k: int, normalise: bool, splits: int, few: bool, idle: bool, sigmoid: bool = False, biased: bool = False
) -> tuple[Variant, Variant]:
    """A warp per row holds all its logits, so that each of the k reductions is a few shuffles. The rows of an expert
    are found in blocks of 1,024 choices: 128 rows of 8 choices are one block."""
    of = f"X{X} k{k}{' normalise' * normalise}" + f" S{splits}" * (splits > 1) + " few" * few + " idle" * idle
    of += " sigmoid" * sigmoid + " bias" * biased
    pad = triton.next_power_of_2(X)
    route = Variant(
        name=of,
        kernel=_expert_route_kernel,
        arguments=(
            *("*fp32", "*i32", "*fp32", "*i32", "*i32", "*i32", "*i8" if idle else None, "*fp32" if biased else None),
            *("i32", "i32", "fp32", "fp32"),
        ),
        constexprs={
            "X": X,
            "K": k,
            "X_PAD": pad,
            "K_PAD": triton.next_power_of_2(k),
            "SPLITS": splits,
            "NORMALISE": normalise,
            "SIGMOID": sigmoid,
            "CHOICES": FEW if few else 0,
        },
        num_warps=1,
        wide=False,
        smoke=(X == 128 and few == idle) or biased,
    )
    rows = Variant(
        name="rows",
        kernel=_expert_rows_kernel,
        arguments=("*i32", "*i32", "*i32", "i32"),
        constexprs={"BLOCK": 1024},
        num_warps=4,
        wide=False,
        smoke=X == 128,
    )
    return route, rows


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any X and k."""
    yield from _variants(128, 8, True, 4, False, False)  # Qwen3-30B-A3B; the second one serves all
    yield _variants(128, 8, True, 4, True, False)[0]
    yield _variants(128, 8, True, 4, True, True)[0]
    for X, k, normalise, splits, few in (
        (8, 2, True, 8, True),
        (512, 16, False, 1, True),
        (512, 16, False, 1, False),
        (1, 1, True, 1, True),
        (60, 4, False, 2, False),
    ):
        yield _variants(X, k, normalise, splits, few, not few)[0]
    for few, idle in ((True, True), (False, False)):
        yield _variants(32, 4, True, 8, few, idle, True, True)[0]  # LFM2-8B-A1B
    yield _variants(32, 4, False, 1, True, False, True)[0]
    yield _variants(32, 4, True, 8, True, True, False, True)[0]  # gpt-oss-20b


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, chosen, normalise, idle, scoring, bias, scale, eps = args
    experts, scores, order, starts = found = _fake(args)
    T, X = logits.shape[-2:]
    splits, few = len(logits) if logits.dim() == 3 else 1, 0 < experts.numel() <= FEW
    sigmoid, biased = scoring == "sigmoid", bias is not None
    route, rows = _variants(X, chosen, bool(normalise), splits, few, idle is not None, sigmoid, biased)
    if T:
        each, idle = (1, None) if idle is None else (T // len(idle), idle.contiguous().view(torch.int8))
        count = counters(logits.device, 1)
        bias = None if bias is None else bias.contiguous()
        logits, scale, eps = logits.contiguous(), float(scale), float(eps)
        route((T,), logits, experts, scores, order, starts, count, idle, bias, T, each, scale, eps)
    if not few:
        rows((len(starts),), experts, order, starts, experts.numel())
    return found


def _check(args: Arguments) -> None:
    logits, chosen, _, idle, scoring, bias, scale, eps = args
    if (
        logits.dim() not in (2, 3)
        or (logits.dim() == 3 and not len(logits))
        or logits.dtype not in (torch.float32, torch.float64)
    ):
        kinds = "[T, X] or [S, T, X], float32 or float64"
        raise ValueError(f"logits must be {kinds}, got {list(logits.shape)} {logits.dtype}")
    if not 1 <= chosen <= logits.shape[-1]:
        raise ValueError(f"chosen must be in 1..{logits.shape[-1]}, the number of experts, got {chosen}")
    T = logits.shape[-2]
    if idle is not None and (idle.dim() != 1 or idle.dtype != torch.bool or not len(idle) or T % len(idle)):
        raise ValueError(f"idle must be [B] bool, and B divide {T} rows, got {list(idle.shape)} {idle.dtype}")
    if scoring not in SCORING:
        raise ValueError(f"scoring must be one of {SCORING}, got {scoring!r}")
    X = logits.shape[-1]
    if bias is not None and (bias.shape != (X,) or bias.dtype != logits.dtype):
        raise ValueError(f"bias must be [{X}] {logits.dtype}, got {list(bias.shape)} {bias.dtype}")
    if not (scale > 0 and eps >= 0):
        raise ValueError(f"scale must be above 0 and eps at least 0, got {scale} and {eps}")
    if scoring == "softmax" and eps:
        raise ValueError("eps belongs to sigmoid, got 'softmax' with it")
    same_device(logits, idle=idle, bias=bias)


def _fake(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, chosen, (T, X) = args.logits, args.chosen, args.logits.shape[-2:]
    experts, order, starts = (
        logits.new_empty(size, dtype=torch.int32) for size in ((T, chosen), (T * chosen,), (X + 1,))
    )
    return experts, logits.new_empty(T, chosen), order, starts


def _fits(args: Arguments) -> bool:
    return args.chosen <= MAX_CHOSEN and args.logits.shape[-1] <= MAX_EXPERTS


_expert_route = register(
    expert_route, Arguments, check=_check, reference=expert_route_ref, launch=launch, fake=_fake, fits=_fits
)
