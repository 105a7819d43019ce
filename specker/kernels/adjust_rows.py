"""adjust_rows: add biases to logits, penalise the tokens of each row's own text, and drop the least probable.

The first launch counts how often each id occurs in each sequence's committed text, by atomic additions of integers,
whose order does not matter. In the second a program holds a tile of the vocabulary of one row, and adds the draft
tokens that lead to the row. Counts are not kept from round to round: a text is 8 bytes a token, where the attention of
one layer reads some thousand. So nothing has to be rolled back, moved or saved.

min_p needs the largest logit of a row. A last launch reads it of the parts of a row and drops the ids below.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.cpu import eager, native
from specker.kernels.registry import register, takes
from specker.kernels.variant import Variant, check_within, rowwise, same_device, start_after_previous, tl, triton


def adjust_rows(
    logits: Tensor,
    text: Tensor,
    prompt: Tensor,
    length: Tensor,
    window: Tensor,
    numbers: Tensor,
    parents: Tensor | None = None,
    places: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias: Tensor | None = None,
    floors: bool = False,
) -> Tensor:
    """The logits of draft rows after biases, penalties and min_p, each row by its own text: the committed text of its
    sequence, then the draft tokens from the root's child down to the row itself.

        z    = logits + bias                                  for the sequence's biased ids
        z    = z / repetition if z > 0 else z * repetition    for ids that occur in the text
        z    = z - (presence + frequency * count)             for ids that occur `count` times after the prompt
        z    = -inf where z < max(z) - range                  min_p: range = -temperature * log(min_p)

    A row's result depends on its logits and its text alone, so drafts do not change what is decoded. All but the counts
    is float32 (float64 for float64 logits), rounded after each operation. Penalties keep -inf. Memory moves the logits
    twice, with `floors` four times, and each sequence's text once. On a GPU counts, [B, V] int32, are zeroed, and read
    for each row.

    Args:
        logits: [T, V] float32 (float64: through the reference); -inf is allowed.
        text: [B, C] int64, committed tokens; those from `length` on are not read. Ids are below V.
        prompt: [B] int64, tokens of the prompt, at most `length`.
        length: [B] int64, committed tokens. The last one is the root.
        window: [B, R] int64, the root and the draft tokens; may be a row-strided view.
        numbers: [B, 4] float32: repetition > 0 (1: none), presence, frequency (0: none) and range (inf: none).
        parents: [B, R - 1] int64: entry j is the row of the parent of row j + 1, at most j; row 0 is the root. None:
            chains. May be a row-strided view.
        places: [T] int64, which entry of [B, R] each row is. None: all of them in order, T = B R.
        bias_ids: [B, K] int64, K <= 1024, distinct ids of each sequence, followed by -1. None: no biases.
        bias: [B, K] float32.
        floors: whether any range is finite.

    Returns:
        [T, V], of the dtype of logits.

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes or devices; on a CPU also lengths beyond the text, a prompt longer than its
            text, ids beyond V and places beyond [B, R]. On CUDA, where the host must not wait, nothing checks them.

    Source: repetition: CTRL (arXiv 1909.05858, section 4.1), as transformers applies it; presence and frequency:
    OpenAI's API; min_p: arXiv 2407.01082.

    Examples:
        >>> import torch
        >>> from specker.kernels import adjust_rows
        >>> text, one, two = torch.tensor([[2, 1, 0]]), torch.tensor([1]), torch.tensor([2])
        >>> numbers = torch.tensor([[2.0, 0.5, 0.25, torch.inf]])  # the prompt is 2; the text goes on with the root, 1
        >>> window = torch.tensor([[1, 1]])  # the draft is another 1
        >>> adjust_rows(torch.ones(2, 3), text, one, two, window, numbers).tolist()
        [[1.0, -0.25, 0.5], [1.0, -0.5, 0.5]]
    """
    return _adjust_rows(logits, text, prompt, length, window, numbers, parents, places, bias_ids, bias, floors)


class Arguments(NamedTuple):
    logits: Tensor
    text: Tensor
    prompt: Tensor
    length: Tensor
    window: Tensor
    numbers: Tensor
    parents: Tensor | None = None
    places: Tensor | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    floors: bool = False


@takes(Arguments)
def adjust_rows_ref(args: Arguments) -> Tensor:
    logits, text, prompt, length, window, numbers, parents, places, bias_ids, bias, floors = args
    V, (B, R) = logits.shape[1], window.shape
    at = torch.arange(text.shape[1], dtype=torch.int64, device=text.device)
    inside = at < length[:, None]
    said = inside & (at >= prompt[:, None])
    none = text.new_zeros(B, V + 1)  # the last column takes what does not count
    count = none.scatter_add(1, text.where(said, V), torch.ones_like(text))[:, :V]
    seen = none.scatter(1, text.where(inside, V), 1)[:, :V] > 0
    entries = torch.arange(B * R, dtype=torch.int64, device=text.device) if places is None else places
    which, rows = entries // R, entries % R
    count = count[which]
    for _ in range(R - 1):
        drafted = (rows > 0).long()
        count.scatter_add_(1, window[which, rows].where(drafted > 0, 0)[:, None], drafted[:, None])
        before = (rows - 1).clamp(min=0)
        rows = before if parents is None else parents[which, before].minimum(before).where(drafted > 0, 0)
    z = logits.clone()
    if bias_ids is not None and bias is not None:
        ids = bias_ids[which]
        z.scatter_add_(1, ids.clamp(min=0), bias[which].where(ids >= 0, 0.0).to(z.dtype))
    repetition, presence, frequency, reach = numbers[which].to(z.dtype).unsqueeze(-1).unbind(1)
    z = torch.where(seen[which] | (count > 0), torch.where(z > 0, z / repetition, z * repetition), z)
    z = torch.where(count > 0, z - (presence + frequency * count), z)
    return z.masked_fill_(z < z.amax(1, keepdim=True) - reach, float("-inf")) if floors else z


@takes(Arguments)
def adjust_rows_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, operations) of one call, which reads the lengths."""
    passes = 4 if args.floors else 2
    return args.logits.nbytes * passes + 8 * int(args.length.sum()), 6 * args.logits.numel()


BLOCK = 2048  # ids per program
CHUNK = 1024  # tokens of a text that a program counts at a time
COUNTING = 32  # most programs that count a sequence's text
MAX_BIASES = 1024


@triton.jit(
    do_not_specialize=["text_stride"],
    do_not_specialize_on_alignment=["text_ptr", "prompt_ptr", "length_ptr", "numbers_ptr"],
)
def _count_text_kernel(
    text_ptr,  # [B, C]
    prompt_ptr,  # [B]
    length_ptr,  # [B]
    numbers_ptr,  # [B, 4] fp32
    counts_ptr,  # [B, V] zeros: becomes the count after the prompt, plus 2^30 for an id of the prompt
    text_stride,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(1).to(tl.int64)
    p_numbers = numbers_ptr + i_b * 4
    if (tl.load(p_numbers) != 1) | (tl.load(p_numbers + 1) != 0) | (tl.load(p_numbers + 2) != 0):
        prompt, length = tl.load(prompt_ptr + i_b), tl.load(length_ptr + i_b)
        for i in tl.range(tl.program_id(0) * CHUNK, length, tl.num_programs(0) * CHUNK):
            o = i + tl.arange(0, CHUNK)
            p_count = counts_ptr + i_b * V + tl.load(text_ptr + i_b * text_stride + o, mask=o < length, other=0)
            tl.atomic_or(p_count, 1 << 30, mask=o < prompt, sem="relaxed")
            tl.atomic_add(p_count, 1, mask=(o >= prompt) & (o < length), sem="relaxed")


@triton.jit(
    do_not_specialize=["R", "window_stride", "parents_stride"],
    do_not_specialize_on_alignment=[
        *("window_ptr", "parents_ptr", "places_ptr", "numbers_ptr", "bias_ids_ptr", "bias_ptr"),
    ],
)
def _adjust_rows_kernel(
    logits_ptr,  # [T, V]
    counts_ptr,  # [B, V]: see _count_text_kernel
    window_ptr,  # [B, R]
    parents_ptr,  # [B, R - 1]
    places_ptr,  # [T]
    numbers_ptr,  # [B, 4] fp32
    bias_ids_ptr,  # [B, K]
    bias_ptr,  # [B, K] fp32
    out_ptr,  # [T, V]
    peak_ptr,  # [T, S] fp32: the largest of each part, with FLOORS
    R,
    window_stride,
    parents_stride,
    V: tl.constexpr,
    S: tl.constexpr,  # parts of a row
    BLOCK: tl.constexpr,
    K: tl.constexpr,  # biases of a sequence; 0: none
    K_PAD: tl.constexpr,  # a power of two
    TREES: tl.constexpr,
    PLACED: tl.constexpr,
    FLOORS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places_ptr + i_t) if PLACED else i_t
    i_b, row = place // R, place % R
    first = i_s * BLOCK
    o_v = first + tl.arange(0, BLOCK)
    m_v = o_v < V
    b_z = tl.load(logits_ptr + i_t * V + o_v, mask=m_v, other=float("-inf"))
    if K > 0:
        o_k = tl.arange(0, K_PAD)
        b_ids = tl.load(bias_ids_ptr + i_b * K + o_k, mask=o_k < K, other=-1)
        for k in tl.range(0, tl.sum((b_ids >= 0).to(tl.int32), axis=0)):
            i_id = tl.load(bias_ids_ptr + i_b * K + k).to(tl.int32)
            if (i_id >= first) & (i_id < first + BLOCK):
                b_z += tl.where(o_v == i_id, tl.load(bias_ptr + i_b * K + k), 0.0)
    p_numbers = numbers_ptr + i_b * 4
    repetition, presence, frequency = tl.load(p_numbers), tl.load(p_numbers + 1), tl.load(p_numbers + 2)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        b_counts = tl.load(counts_ptr + i_b * V + o_v, mask=m_v, other=0)
        b_count = b_counts & ((1 << 30) - 1)
        while row > 0:
            i_id = tl.load(window_ptr + i_b * window_stride + row).to(tl.int32)
            b_count += (o_v == i_id).to(tl.int32)
            before = row - 1
            row = tl.minimum(tl.load(parents_ptr + i_b * parents_stride + before), before) if TREES else before
        m_said = b_count > 0
        if repetition != 1:
            m_seen = m_said | (b_counts != 0)
            b_z = tl.where(m_seen, tl.where(b_z > 0, tl.div_rn(b_z, repetition), b_z * repetition), b_z)
        b_z = tl.where(m_said, b_z - (presence + frequency * b_count.to(tl.float32)), b_z)
    tl.store(out_ptr + i_t * V + o_v, b_z, mask=m_v)
    if FLOORS:
        tl.store(peak_ptr + i_t * S + i_s, tl.max(b_z, axis=0))


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["places_ptr", "numbers_ptr"])
def _adjust_floor_kernel(
    out_ptr,  # [T, V]
    places_ptr,  # [T]
    numbers_ptr,  # [B, 4] fp32
    peak_ptr,  # [T, S] fp32
    R,
    V: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
    PLACED: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places_ptr + i_t) if PLACED else i_t
    reach = tl.load(numbers_ptr + place // R * 4 + 3)
    if reach < float("inf"):
        o_s = tl.arange(0, S_PAD)
        peak = tl.max(tl.load(peak_ptr + i_t * S + o_s, mask=o_s < S, other=float("-inf")), axis=0)
        o_v = i_s * BLOCK + tl.arange(0, BLOCK)
        p_z = out_ptr + i_t * V + o_v
        m_v = o_v < V
        b_z = tl.load(p_z, mask=m_v, other=float("inf"))
        tl.store(p_z, tl.full([BLOCK], float("-inf"), tl.float32), mask=m_v & (b_z < peak - reach))


@lru_cache
def _count_variant(V: int) -> Variant:
    return Variant(
        f"count V{V}",
        _count_text_kernel,
        ("*i64", "*i64", "*i64", "*fp32", "*i32", "i32"),
        {"V": V, "CHUNK": CHUNK},
        num_warps=4,
        wide=False,  # texts may begin anywhere
        smoke=V == 151936,
    )


@lru_cache
def _adjust_variants(V: int, K: int, trees: bool, placed: bool, floors: bool) -> tuple[Variant, ...]:
    """The launches of a call after `_count_variant`'s. V 151,936 makes 75 parts, so a chain of five rows is 375
    programs; their 16 warps hold four ids a lane."""
    block = min(BLOCK, max(128, triton.next_power_of_2(V)))
    S = -(-V // block)
    name = f"V{V}" + (f" K{K}" if K else "") + (" trees" if trees else "") + (" placed" if placed else "")
    shape = {"V": V, "S": S, "BLOCK": block, "PLACED": placed}
    adjust = Variant(
        name + (" floors" if floors else ""),
        _adjust_rows_kernel,
        (*("*fp32", "*i32", "*i64", "*i64", "*i64", "*fp32", "*i64", "*fp32", "*fp32", "*fp32"), *("i32",) * 3),
        {**shape, "K": K, "K_PAD": max(1, triton.next_power_of_2(K)), "TREES": trees, "FLOORS": floors},
        num_warps=block // 128,
        wide=False,  # single biases and ids
        smoke=floors and not placed and V == 151936,
    )
    if not floors:
        return (adjust,)
    floor = Variant(
        name + " floor",
        _adjust_floor_kernel,
        ("*fp32", "*i64", "*fp32", "*fp32", "i32"),
        {**shape, "S_PAD": triton.next_power_of_2(S)},
        num_warps=max(block // 256, 1),
        wide=block >= 1024 and V % 4 == 0,
    )
    return adjust, floor


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any V and T."""
    for V in (128256, 151936, 50257):
        yield _count_variant(V)
        for trees, placed in ((False, False), (True, False), (False, True)):
            yield from _adjust_variants(V, 300, trees, placed, True)
    yield from _adjust_variants(151936, 0, False, False, False)
    yield from _adjust_variants(151936, 0, True, False, False)


@takes(Arguments)
def launch(args: Arguments) -> Tensor:
    logits, text, prompt, length, window, numbers, parents, places, bias_ids, bias, floors = args
    logits, numbers = logits.contiguous(), numbers.contiguous()
    (T, V), (B, R) = logits.shape, window.shape
    out = torch.empty_like(logits)
    if T == 0:
        return out
    text, window, trees = rowwise(text), rowwise(window), parents is not None and R > 1
    up = rowwise(parents) if trees and parents is not None else window
    which = window if places is None else places.contiguous()
    K, ids, biases = 0, window, numbers  # the kernel ignores these ids and biases
    if bias_ids is not None and bias is not None and bias_ids.shape[1]:
        K, ids, biases = bias_ids.shape[1], bias_ids.contiguous(), bias.contiguous()
    launches = _adjust_variants(V, K, trees, places is not None, floors)
    S = launches[0].constexprs["S"]
    peak = logits.new_empty(T, S) if floors else out
    counts = logits.new_zeros((B, V), dtype=torch.int32)
    grid = min(1 + text.shape[1] // CHUNK, COUNTING), B
    _count_variant(V)(grid, text, prompt.contiguous(), length.contiguous(), numbers, counts, text.stride(0))
    own = counts, window, up, which, numbers, ids, biases
    launches[0]((T, S), logits, *own, out, peak, R, window.stride(0), up.stride(0))
    if floors:
        launches[1]((T, S), out, which, numbers, peak, R)
    return out


def _on_cpu(args: Arguments) -> Tensor:
    """The path without a Triton kernel (CPU or float64)."""
    if args.logits.dtype == torch.float32 and eager(args.logits) and (kernels := native()) is not None:
        return kernels.adjust(args)
    _check_numbers(args)
    return adjust_rows_ref(*args)


def _check(args: Arguments) -> None:
    logits, text, prompt, length, window, numbers, parents, places, bias_ids, bias, _ = args
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logits must be [T, V >= 1] float32 or float64, got {tuple(logits.shape)} {logits.dtype}")
    T = logits.shape[0]
    if window.dim() != 2 or window.shape[1] == 0:
        raise ValueError(f"window must be [B, R >= 1], got {tuple(window.shape)}")
    B, R = window.shape
    if text.dim() != 2 or text.shape[0] != B:
        raise ValueError(f"text must be [{B}, C], like window, got {tuple(text.shape)}")
    if prompt.shape != (B,) or length.shape != (B,):
        raise ValueError(f"prompt and length must be [{B}], got {tuple(prompt.shape)} and {tuple(length.shape)}")
    if parents is not None and parents.shape != (B, R - 1):
        raise ValueError(f"parents must be [{B}, {R - 1}], got {tuple(parents.shape)}")
    if places is not None and places.shape != (T,):
        raise ValueError(f"places must be [{T}], got {tuple(places.shape)}")
    if places is None and T != B * R:
        raise ValueError(f"without places there must be {B} * {R} rows of logits, got {T}")
    if numbers.shape != (B, 4) or numbers.dtype != torch.float32:
        raise ValueError(f"numbers must be [{B}, 4] float32, got {tuple(numbers.shape)} {numbers.dtype}")
    if (bias_ids is None) != (bias is None):
        raise ValueError("bias_ids and bias must come together")
    if bias_ids is not None and bias is not None:
        K = bias_ids.shape[1] if bias_ids.dim() == 2 else 0
        if not bias_ids.shape == bias.shape == (B, K) or K > MAX_BIASES or bias.dtype != torch.float32:
            raise ValueError(
                f"bias_ids and bias must be [{B}, K <= {MAX_BIASES}], bias float32, got {tuple(bias_ids.shape)} and "
                f"{tuple(bias.shape)} {bias.dtype}"
            )
    integers: dict[str, Tensor | None] = {"text": text, "prompt": prompt, "length": length, "window": window}
    integers |= {"parents": parents, "places": places, "bias_ids": bias_ids}
    for name, x in integers.items():
        if x is not None and x.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {x.dtype}")
    same_device(logits, **integers, numbers=numbers, bias=bias)


def _check_numbers(args: Arguments) -> None:
    """Raise ValueError for ids and places outside of the other arguments, on a CPU. It reads them all; compiled code
    refuses those that it reads."""
    if not args.logits.is_cpu:
        return
    V, prompt, length = args.logits.shape[1], args.prompt, args.length
    check_within("length", length, args.text.shape[1] + 1)
    if prompt.numel() and not ((prompt >= 0) & (prompt <= length)).all():
        raise ValueError(f"prompt must be in 0..length, got {prompt.tolist()} of {length.tolist()}")
    for own, count in zip(args.text, length.tolist(), strict=True):
        check_within("text", own[:count], V)
    check_within("window", args.window[:, 1:], V)  # the text ends with the root
    if args.places is not None:
        check_within("places", args.places, args.window.numel())
    if args.bias_ids is not None:
        check_within("bias_ids", args.bias_ids.clamp(min=-1), V, least=-1)


_adjust_rows = register(
    adjust_rows,
    Arguments,
    check=_check,
    reference=_on_cpu,
    launch=launch,
    fake=lambda args: torch.empty_like(args.logits, memory_format=torch.contiguous_format),
    check_values=_check_numbers,
)
