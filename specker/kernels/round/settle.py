"""settle: commit the accepted paths of B sequences after a verify pass, and set the new roots, in one launch.

Sequence b has N drafts under its root. Row 0 is the root, draft j is row j + 1 with parent row parents[b, j] <= j, or
row j in a chain. target[b, r] is the target's own token after row r. The accepted path, as in accept_walk: from row 0,
take the first child whose token is target[row], until there is none. With `count` rows on the path:

    emitted   = target[path[i]], i < count       the target's own tokens: the accepted ones and the next
    committed[length + i] = emitted[i] and length += count, both up to `limit`
    window[0] = emitted[count - 1]               the new root
    report    = count, path, emitted             [1 + 2 R] with R = N + 1, padded with -1: the only copy to the host
    src, dst  = slots of rows path[i] and of rows i, for kv_commit; equal for i >= count

Instead of target [B, R], `sample_splits` may give its `Splits`: the best logit and id of each part of a row of logits.
The row's token is then the id of the largest value, ties to the lower id, as in sample_rows. The target's tokens
are returned in either case. The tensors of sequences may be row-strided views.

All values but the splits are integers, a few hundred bytes per sequence; on a GPU the host reads nothing. A slot is the
flattened cache row of a column, as in place_rows. On a CPU a decoding step of a small model takes only a millisecond,
so the work is done with Python integers there, which are cheaper than torch operations.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specker.kernels.accept_walk import follow
from specker.kernels.registry import check_written, explained, takes
from specker.kernels.round.place_rows import MAX_ROWS, check_table, slot, slots
from specker.kernels.sample_rows import Splits
from specker.kernels.variant import Variant, check_within, rowwise, same_device, start_after_previous, tl, triton


class Texts(NamedTuple):
    """The texts of B sequences and where their columns are; "!" marks tensors that settle updates."""

    committed: Tensor  # ! [B, C] int64
    length: Tensor  # ! [B] int64
    window: Tensor  # ! [B, >= 1] int64
    limit: Tensor  # [B] int64
    block_table: Tensor  # [B, P] int32
    page_size: int


class Arguments(NamedTuple):
    tokens: Tensor
    parents: Tensor | None
    target: Tensor | Splits
    texts: Texts
    report: Tensor | None = None
    drawn: Tensor | None = None


@takes(Arguments)
def _explain(args: Arguments) -> None:
    _check(args)
    tokens, parents, target, texts, report, drawn = args
    committed, length, window, limit, block_table, page_size = texts
    same_device(tokens, parents=parents, committed=committed, length=length, window=window, limit=limit)
    value, ids = target if isinstance(target, Splits) else (target, None)
    same_device(tokens, target=value, target_ids=ids, block_table=block_table, report=report, drawn=drawn)
    for name, x in (("committed", committed), ("length", length), ("window", window)):
        check_written(name, x)
    check_within("length", length, committed.shape[1] + 1)
    if not block_table.shape[1] or page_size >= 1 << 31:
        raise ValueError(f"block_table must have pages of less than 2^31, got {block_table.shape[1]} of {page_size}")


@explained(_explain)
@takes(Arguments)
def settle(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [B, N] and parents [B, N] or None, target [B, R = N + 1] or `Splits` of B * R rows, all int64 but the
    splits' values -> report [B * (1 + 2 R)], drawn [B * R], src [B * R], dst [B * R] int64. Without parents (a chain's
    accepted rows are in place already) src and dst are empty. `report` and `drawn`: memory for these results.

    Raises ValueError for other shapes and dtypes and, on a CPU, for parents that are not rows before their child. On a
    GPU such a draft is never accepted. Never writes beyond a row of `committed`.
    """
    B, R = _check(args)
    tokens, parents, target, texts, report, drawn = args
    report = tokens.new_empty(B * (1 + 2 * R)) if report is None else report
    drawn = tokens.new_empty(B * R) if drawn is None else drawn
    if tokens.is_cuda:
        return report, drawn, *launch(*args._replace(report=report, drawn=drawn))
    drawn.copy_(target.tokens() if isinstance(target, Splits) else target.reshape(-1))
    moved: tuple[list[int], list[int]] = [], []
    committed, length, window, limit, block_table, page_size = texts
    rows, lengths, roots, reports = committed.numpy(), length.numpy(), window.numpy(), report.view(B, -1).numpy()
    capacity = rows.shape[1]
    ups = [None] * B if parents is None else parents.tolist()
    each = zip(tokens.tolist(), ups, drawn.view(B, R).tolist(), lengths.tolist(), limit.tolist(), strict=True)
    for b, (draft, up, wanted, at, last) in enumerate(each):
        if at < 0:
            raise ValueError(f"length must be in 0..{capacity}, got {at}")
        path = follow(draft, up, wanted)
        n, emitted = len(path), [wanted[row] for row in path]
        pad = [-1] * (R - n)
        reports[b] = [n, *path, *pad, *emitted, *pad]
        written = max(0, min(n, min(last, capacity) - at))
        rows[b, at : at + written] = emitted[:written]
        lengths[b] = at + written
        roots[b, 0] = emitted[-1]
        if parents is not None:
            in_place = slots(range(at - 1, at - 1 + R), block_table, b, page_size)
            moved[0].extend([in_place[row] for row in path] + in_place[n:])
            moved[1].extend(in_place)
    src, dst = (torch.from_numpy(np.array(x, np.int64)) for x in moved)
    return report, drawn, src, dst


def settle_cost(tokens: Tensor, parents: Tensor | None, target: Tensor | Splits, *_: object) -> tuple[int, int]:
    """(bytes, operations) of one call that accepts nothing; each accepted token adds 8 bytes to its text."""
    B, N = tokens.shape
    R = N + 1
    read = 8 * target.id.numel() if isinstance(target, Splits) else 8 * B * R
    results = 8 * (R + 1 + 2 * R)  # drawn and report
    texts = 8 * 5  # length read and written, limit, a token of the text, the root
    moves = 0 if parents is None else 8 * (N + 2 * R) + 4  # parents, src, dst, and a page
    return read + B * (8 * N + results + texts + moves), 2 * B * N


_NONE = tl.constexpr(2**31 - 1)  # no id, no row


@triton.jit(
    do_not_specialize=[
        *("rows", "capacity", "columns", "page_size", "token_stride", "up_stride", "target_stride", "text_stride"),
        *("window_stride", "table_stride"),
    ],
    do_not_specialize_on_alignment=[
        *("tokens_ptr", "parents_ptr", "target_ptr", "id_ptr", "committed_ptr", "length_ptr", "window_ptr"),
        *("limit_ptr", "table_ptr", "report_ptr", "drawn_ptr"),
    ],
)
def _settle_kernel(
    tokens_ptr,  # [B, rows - 1]
    parents_ptr,  # like tokens
    target_ptr,  # [B, rows]; with S the splits' values [B * rows, S] fp32
    id_ptr,  # the splits' ids [B * rows, S] int32
    committed_ptr,  # [B, capacity]
    length_ptr,  # [B]
    window_ptr,  # [B, >= 1]
    limit_ptr,  # [B]
    table_ptr,  # [B, P]
    report_ptr,  # [B, 1 + 2 rows]
    drawn_ptr,  # [B, rows]
    src_ptr,  # [B, rows]
    dst_ptr,  # [B, rows]
    rows,
    capacity,
    columns,  # P * page_size
    page_size,
    token_stride,  # from one sequence to the next
    up_stride,
    target_stride,
    text_stride,
    window_stride,
    table_stride,
    BLOCK: tl.constexpr,  # a power of two, at least rows
    CHAIN: tl.constexpr,  # if true, parents are not read, and there are no src and dst
    S: tl.constexpr,  # splits of a row of logits; 0: target holds the tokens
    S_PAD: tl.constexpr,  # a power of two
    SOME: tl.constexpr,  # rows whose splits are held at a time; divides BLOCK
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < rows
    length = tl.load(length_ptr + i_b)
    last = tl.minimum(tl.load(limit_ptr + i_b), capacity)
    p_drawn = drawn_ptr + i_b * rows

    # The target's tokens.
    if S == 0:
        tl.store(p_drawn + o, tl.load(target_ptr + i_b * target_stride + o, mask=m), mask=m)
    else:
        o_s = tl.arange(0, S_PAD)[None, :]
        for i in tl.range(0, rows, SOME):
            o_r = i + tl.arange(0, SOME)
            m_s = (o_r < rows)[:, None] & (o_s < S)
            o_split = (i_b * rows + o_r)[:, None] * S + o_s
            b_value = tl.load(target_ptr + o_split, mask=m_s, other=float("-inf"))
            b_id = tl.load(id_ptr + o_split, mask=m_s, other=_NONE)
            best = tl.max(b_value, axis=1)[:, None]
            b_best = tl.min(tl.where(m_s & (b_value == best), b_id, _NONE), axis=1)
            b_best = tl.where(b_best == _NONE, 0, b_best)  # NaN: id 0
            tl.store(p_drawn + o_r, b_best.to(tl.int64), mask=o_r < rows)
    tl.debug_barrier()  # other threads read these values

    # The path: element o of b_row is the path's o-th row, -1 after its end.
    m_draft = o < rows - 1
    b_token = tl.load(tokens_ptr + i_b * token_stride + o, mask=m_draft, other=0)
    if CHAIN:
        same = m_draft & (tl.load(p_drawn + o, mask=m_draft, other=0) == b_token)
        count = tl.min(tl.where(same, _NONE, o), axis=0) + 1  # row rows - 1 has no child
        b_row = tl.where(o < count, o, -1)
    else:
        b_up = tl.load(parents_ptr + i_b * up_stride + o, mask=m_draft, other=-1)
        m_draft = m_draft & (b_up >= 0) & (b_up <= o)
        m_draft = m_draft & (tl.load(p_drawn + b_up, mask=m_draft, other=0) == b_token)
        b_up = b_up.to(tl.int32)
        b_row = tl.where(o == 0, 0, -1)
        count = tl.full([], 1, tl.int32)
        child = tl.min(tl.where(m_draft & (b_up == 0), o, _NONE), axis=0)
        while child < rows:
            row = child + 1
            b_row = tl.where(o == count, row, b_row)
            count += 1
            child = tl.min(tl.where(m_draft & (b_up == row), o, _NONE), axis=0)

    # The committed tokens.
    inside = o < count
    b_emitted = tl.load(p_drawn + b_row, mask=inside, other=-1)
    tl.store(committed_ptr + i_b * text_stride + length + o, b_emitted, mask=inside & (length + o < last))
    tl.store(window_ptr + i_b * window_stride + o * 0, b_emitted, mask=o == count - 1)
    p_report = report_ptr + i_b * (1 + 2 * rows)
    tl.store(p_report, count.to(tl.int64))
    tl.store(p_report + 1 + o, b_row.to(tl.int64), mask=m)
    tl.store(p_report + 1 + rows + o, b_emitted, mask=m)
    if not CHAIN:
        p_table = table_ptr + i_b * table_stride
        b_from = tl.where(inside, b_row, o)
        tl.store(src_ptr + i_b * rows + o, slot(length - 1 + b_from, p_table, columns, page_size), mask=m)
        tl.store(dst_ptr + i_b * rows + o, slot(length - 1 + o, p_table, columns, page_size), mask=m)
    tl.debug_barrier()  # every thread has read the length
    tl.store(length_ptr + i_b, tl.maximum(length, tl.minimum(length + count, last)))


@lru_cache
def _variant(block: int, chain: bool, splits: int) -> Variant:
    """One program of one warp per sequence, because a minimum over several warps would wait at a barrier: a step of the
    walk is a comparison and a minimum in registers. Up to 1,024 splits are held at a time, 32 per thread."""
    pad = triton.next_power_of_2(max(splits, 1))
    return Variant(
        name=f"{'chain' if chain else 'tree'} {block}" + f" splits {splits}" * (splits > 0),
        kernel=_settle_kernel,
        arguments=(
            *("*i64", "*i64", "*fp32" if splits else "*i64", "*i32" if splits else "*i64", "*i64", "*i64", "*i64"),
            *("*i64", "*i32", "*i64", "*i64", "*i64", "*i64", *("i32",) * 10),
        ),
        constexprs={
            "BLOCK": block,
            "CHAIN": chain,
            "S": splits,
            "S_PAD": pad,
            "SOME": min(block, max(1, 1024 // pad)),
        },
        num_warps=1,
        wide=False,
        smoke=block == 16 and splits == 32,
    )


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`."""
    for block in (1, 8, 16, 64, 256):
        for chain in (False, True):
            for splits in (0, 32):
                yield _variant(block, chain, splits)
    yield _variant(16, True, 64)


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor]:
    """Launch the kernel, with memory for report and drawn; returns src and dst."""
    tokens, parents, target, texts, report, drawn = args
    committed, length, window, limit, block_table, page_size = texts
    (B, N), splits = tokens.shape, target.id.shape[1] if isinstance(target, Splits) else 0
    R = N + 1
    ours = target.value if isinstance(target, Splits) else rowwise(target)
    ids = target.id if isinstance(target, Splits) else ours  # a dummy, not read
    others = {"parents": parents, "target": ours, "committed": committed, "length": length, "window": window}
    same_device(tokens, **others, limit=limit, block_table=block_table, report=report, drawn=drawn)
    src = tokens.new_empty(0 if parents is None else B * R)
    dst = torch.empty_like(src)
    tokens, table = rowwise(tokens), rowwise(block_table)
    up = tokens if parents is None else rowwise(parents)
    variant = _variant(triton.next_power_of_2(R), parents is None, splits)
    variant(
        (B,),
        tokens,
        up,
        ours,
        ids,
        committed,
        length,
        window,
        limit.contiguous(),
        table,
        report,
        drawn,
        src,
        dst,
        R,
        committed.shape[1],
        table.shape[1] * page_size,
        page_size,
        tokens.stride(0),
        up.stride(0),
        ours.stride(0),
        committed.stride(0),
        window.stride(0),
        table.stride(0),
    )
    return src, dst


def _check(args: Arguments) -> tuple[int, int]:
    """Raise ValueError unless settle takes these arguments. Returns B and R."""
    tokens, parents, target, texts, report, drawn = args
    committed, length, window, limit, block_table, page_size = texts
    shape = tokens.shape
    if len(shape) != 2 or not shape[0] or shape[1] >= MAX_ROWS:
        raise ValueError(f"tokens must be [B >= 1, N < {MAX_ROWS}], got {tuple(shape)}")
    B, R = shape[0], shape[1] + 1
    if parents is not None and parents.shape != shape:
        raise ValueError(f"parents must be {list(shape)} like tokens, got {tuple(parents.shape)}")
    if isinstance(target, Splits):
        if target.value.shape != target.id.shape or target.value.dim() != 2 or len(target.id) != B * R:
            raise ValueError(f"expected splits of {B * R} rows: {tuple(target.value.shape)}, {tuple(target.id.shape)}")
        if target.value.dtype != torch.float32 or target.id.dtype != torch.int32:
            raise ValueError(f"splits must be float32 and int32, got {target.value.dtype} and {target.id.dtype}")
    elif target.shape != (B, R):
        raise ValueError(f"target must be [{B}, {R}], a token after each row, got {tuple(target.shape)}")
    if not length.shape == limit.shape == shape[:1] or not length.is_contiguous():
        raise ValueError(
            f"length and limit must be [{B}], length contiguous: {tuple(length.shape)}, {tuple(limit.shape)}"
        )
    for x in (committed, window):
        apart = x.dim() == 2 and (B == 1 or x.stride(0) >= x.shape[1])  # a sequence's numbers from another's
        if not apart or x.shape[0] != B or x.stride(1) != 1 or not x.shape[1]:
            raise ValueError(f"committed and window must be [{B}, n >= 1] with contiguous rows, got {tuple(x.shape)}")
    for result, size in ((report, B * (1 + 2 * R)), (drawn, B * R)):
        if result is not None and (result.shape != (size,) or not result.is_contiguous()):
            raise ValueError(
                f"expected report [{B * (1 + 2 * R)}] and drawn [{B * R}], contiguous, got {tuple(result.shape)}"
            )
    whole: tuple = tokens, parents, target, committed, length, window, limit, report, drawn
    types = [x.dtype for x in whole if isinstance(x, Tensor)]
    if set(types) != {torch.int64}:
        raise ValueError(f"all but the table must be int64: {types}")
    check_table(block_table, B, page_size)
    return B, R
