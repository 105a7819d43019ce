"""cluster_topk: LM head over clusters of the vocabulary: each row reads centroids, then the rows of its best clusters.

Two launches. The first multiplies the rows with the centroids, and the last program of a tile of rows chooses each
row's clusters. The second has a program for each row and tile of a chosen cluster's rows; the last program of a row
merges the tiles' candidates. The products are row_linear's (64 rows for any T, K in order), of which the second launch
uses one row: no two rows need have a cluster in common. A norm is residual_merge's kernel, launched first.

The weight's rows are ordered by cluster, so a cluster is one contiguous run: a program streams its tile like any other
weight, and the formats that store rows in blocks (specker/cpu/packed.py) stay as they are. By id, each row of 256
numbers would be a read of 512 bytes elsewhere. Checkpoints store rows by id; the loader permutes them once.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.cpu import eager, native
from specker.kernels.noise import check_draw, drawn, gumbel_at, gumbel_of, signed, unpack_draw
from specker.kernels.quant import Matrix, Quantized, arguments_of, constexprs_of, streams, types_of
from specker.kernels.registry import register, takes
from specker.kernels.row_linear import row_linear
from specker.kernels.stream import stream_rows
from specker.kernels.tiles import COMMON, columns_of, stages_of, weight_left, wide_rows
from specker.kernels.variant import (
    SMS,
    TYPES,
    Variant,
    counters,
    is_last,
    let_next_start,
    same_device,
    sum_dtype,
    tl,
    triton,
    wait_for_previous,
)
from specker.kernels.vocab_topk import (
    MAX_K,
    NO_KEY,
    Noisy,
    Norm,
    Search,
    _power,
    check_head,
    check_ids,
    flat_noise,
    id_of,
    largest,
    nested_noise,
    noise_of,
    normed,
    rank_key,
    results_of,
    value_of,
    write_out,
)

MAX_CLUSTERS = 256  # most clusters that a row may choose
SOME = 1024  # keys that a program ranks at a time: a sort of 2,048 spills


def cluster_topk(
    hidden: Tensor,
    weight: Matrix,
    centroids: Tensor,
    token_ids: Tensor,
    clusters: int,
    k: int,
    norm: Norm | None = None,
    noise: Noisy | None = None,
    with_lse: bool = True,
    *,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LM head over clusters of ids: each row's k best tokens among its best clusters, without reading other rows.

    Cluster c holds the R tokens token_ids[c], and the weight's rows c R .. c R + R - 1 are theirs. For row t:

        h      = hidden[t], or with `norm` hidden[t] * rsqrt(mean(hidden[t]^2) + eps) * norm weight
        S      = the `clusters` largest of centroids . h, ties to the lower cluster
        z[i]   = h . (row of i)                                              without noise, or at temperature 0
        z[i]   = h . (row of i) / temperature + g(seed, positions[t], i)     with noise, i in the clusters S
        logits = the k largest z, descending, ties to the lower i
        ids    = their i
        lse    = log(sum over S of exp(z[i]))

    The noise g (kernels/noise.py) is the whole head's, so a draft shares the target's noise. Without noise in the first
    step, the choice of clusters is that of the greedy head. With `clusters` = C this is `vocab_topk`. The op is
    batch-invariant: a row's bits depend on that row, weight, centroids, ids, `clusters`, k and the architecture alone.
    Memory moves the centroids and, for each row, `clusters` of the C clusters. The kernel takes ids below 2^32; float64
    runs in plain torch. Sums are in float32 and are not rounded. On a CPU, float32 rows with an unquantised weight run
    in compiled code (specker/cpu). There a bfloat16 weight and bfloat16 centroids serve them, too, with the rounding of
    `row_linear`.

    Args:
        hidden: [T, E].
        weight: [C R, E] of hidden's dtype, ordered by cluster, or a `Quantized` matrix; on a CPU also bfloat16 beside
            float32.
        centroids: [C, E] of hidden's dtype; on a CPU also bfloat16 beside float32.
        token_ids: [C, R] distinct ids in 0..2^32 - 1, int32 or int64.
        clusters: clusters that a row reads, 1 to min(256, C).
        k: 1 to min(64, clusters R).
        norm: (weight [E] of any floating dtype, eps) of an RMSNorm before both products.
        noise: (seed, positions [T] int64, temperature 0 or >= 1e-6), or a `Noise`, whose `draw` holds seed and
            temperature in memory.
        with_lse: False returns an empty lse [0].
        out: [T, k] int64, any view; the ids are written there, and it is the first result. Or a pair of it and of
            contiguous memory for the logits, which is then the second result.

    Returns:
        ids [T, k] int64 in the full vocabulary, logits [T, k] and lse [T], float32 (float64 for float64).

    Raises:
        TypeError: an argument of another type.
        ValueError: other shapes, dtypes, devices or ranges.

    Source: the ordered embeddings of Gemma 4's assistants (`Gemma4AssistantMaskedEmbedder` in transformers); a softmax
    in two levels by classes is Goodman's, arXiv cs/0108006.

    Examples:
        >>> import torch
        >>> from specker.kernels import cluster_topk
        >>> head = torch.tensor([[1.0, 0.0], [5.0, 2.0], [0.0, 7.0], [0.0, 6.0]])  # tokens 10 and 20, then 30 and 40
        >>> ids = torch.tensor([[10, 20], [30, 40]])
        >>> best, logits, lse = cluster_topk(torch.tensor([[1.0, 0.0]]), head, torch.eye(2), ids, 1, 2)
        >>> best.tolist(), logits.tolist()
        ([[20, 10]], [[5.0, 1.0]])
    """
    found = _cluster_topk(hidden, weight, centroids, token_ids, clusters, k, norm, noise, with_lse, out)
    return found if out is None else write_out(found, out, hidden, k)


class Arguments(NamedTuple):
    hidden: Tensor
    weight: Matrix
    centroids: Tensor
    token_ids: Tensor
    clusters: int
    k: int
    norm: Norm | None = None
    noise: Noisy | None = None
    with_lse: bool = True
    out: Tensor | tuple[Tensor, Tensor] | None = None


@takes(Arguments)
def cluster_topk_ref(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, centroids, token_ids, clusters, k, norm, noise, with_lse, _ = args
    if isinstance(weight, Quantized):
        weight.check()  # what does not fit may lie in rows that no cluster of these names
    if norm is not None:
        hidden = F.rms_norm(hidden, hidden.shape[-1:], norm[0], norm[1])
    R = token_ids.shape[1]
    _, chosen = largest(row_linear(hidden, centroids, epilogue="float32"), None, clusters)
    within = torch.arange(R, dtype=torch.int64, device=hidden.device)
    rows = (chosen.unsqueeze(-1) * R + within).flatten(1)  # [T, clusters R]
    each = zip(hidden.unsqueeze(1), rows, strict=True)
    found = [row_linear(x, weight[at], epilogue="float32") for x, at in each]
    z = torch.cat(found) if found else hidden.new_empty(rows.shape, dtype=sum_dtype(hidden.dtype))
    return _largest_of_rows(z, token_ids.flatten()[rows].long(), k, noise, with_lse)


def _largest_of_rows(
    z: Tensor, ids: Tensor, k: int, noise: Noisy | None, with_lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`largest_of` (vocab_topk.py) for rows with ids of their own: z and ids [T, K]."""
    _, positions, temperature, draw = noise_of(noise)
    if positions is not None and temperature > 0:
        run = max(1, len(z)) if draw is None else check_draw(draw, len(z))
        parts = zip(draws_of(noise), z.split(run), positions.split(run), ids.split(run), strict=False)
        z = torch.cat([_noisy(rows, heat, seed, at, its) for (heat, seed), rows, at, its in parts])
    by_id = ids.argsort(-1)
    values, order = z.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    best = ids.gather(1, by_id.gather(1, order[:, :k]))
    return best, values[:, :k].contiguous(), z.logsumexp(-1) if with_lse else z.new_empty(0)


def _noisy(z: Tensor, temperature: float, seed: int, positions: Tensor, ids: Tensor) -> Tensor:
    return z if temperature == 0 else z / temperature + gumbel_at(seed, positions, ids)


@takes(Arguments)
def cluster_topk_cost(args: Arguments) -> tuple[int, int]:
    """(bytes, flops) that any implementation needs: centroids, hidden and norm read once, and the rows and ids of each
    row's clusters, the results written; two flops per weight and row. Rows are counted as if no two had a cluster in
    common, until all C clusters are read: exact for one row, the most for several."""
    hidden, weight, centroids, token_ids, clusters, k, norm, noise, with_lse, _ = args
    (T, E), (C, R) = hidden.shape, token_ids.shape
    read = min(C, T * clusters)
    size = sum_dtype(hidden.dtype).itemsize
    bytes_ = centroids.nbytes + (T * E + (E if norm is not None else 0)) * hidden.element_size()
    bytes_ += read * (weight.nbytes // C + R * token_ids.element_size())
    bytes_ += (8 * T if noise is not None else 0) + T * k * (8 + size) + T * size * with_lse
    return bytes_, 2 * T * E * (C + clusters * R)


def _compiled(args: Arguments) -> tuple[Tensor, Tensor, Tensor] | None:
    """The compiled CPU form for float32 rows; None if it does not serve the arguments."""
    hidden, weight, norm = args.hidden, args.weight, args.norm
    if hidden.dtype != torch.float32 or not eager(hidden) or not isinstance(weight, Tensor):
        return None
    if norm is not None and norm[0].dtype != torch.float32:
        return None
    kernels = native()
    if kernels is None or not (kernels.serves(hidden, weight) and kernels.serves(hidden, args.centroids)):
        return None
    return kernels.clusters(args, draws_of(args.noise))


def draws_of(noise: Noisy | None) -> list[tuple[float, int]]:
    """Temperature and seed, one pair for all rows or for each of as many equal runs; read on the host."""
    seed, _, temperature, draw = noise_of(noise)
    if temperature == 0:
        return [(0.0, 0)]
    return [(temperature, seed)] if draw is None else [unpack_draw(each)[1::-1] for each in draw.view(-1, 4)]


@triton.jit
def _largest(key, TOP: tl.constexpr, C: tl.constexpr):
    """`take_best` for one row, key [n] -> [C]. A row of [1, n] spills or fails to compile with Triton 3.7."""
    if C <= 16:
        o_c = tl.arange(0, C)
        b_top = tl.full([C], NO_KEY, tl.int64)
        for i in tl.range(TOP):
            best = tl.max(key, axis=0)
            b_top = tl.where(o_c == i, best, b_top)
            key = tl.where(key == best, NO_KEY, key)
    else:
        b_top = tl.topk(key, C)
    return b_top


@triton.jit
def _best_of(
    p_keys,  # COUNT distinct keys
    COUNT: tl.constexpr,
    SOME: tl.constexpr,  # keys at a time; a power of two, at least C
    TOP: tl.constexpr,
    C: tl.constexpr,  # a power of two, at least TOP
):
    """The TOP largest of COUNT keys in memory, descending, in [C]; the rest is unspecified."""
    o_some = tl.arange(0, SOME)
    b_best = _largest(tl.load(p_keys + o_some, mask=o_some < COUNT, other=NO_KEY), TOP, C)
    for i in tl.range(SOME, COUNT, SOME):
        b_some = _largest(tl.load(p_keys + i + o_some, mask=i + o_some < COUNT, other=NO_KEY), TOP, C)
        b_best = _largest(tl.reshape(tl.join(b_best, b_some), (2 * C,)), TOP, C)
    return b_best


@triton.jit(do_not_specialize=["T"])
def _cluster_choose_kernel(
    x_ptr,  # [T, E]
    w_ptr,  # [CLUSTERS, E], the centroids
    keys_ptr,  # [T, CLUSTERS]
    chosen_ptr,  # [T, TOP] int32
    count_ptr,  # [row tiles] zeros, to find the last program
    T,
    CLUSTERS: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,  # rows of x per program
    N: tl.constexpr,  # centroids per program
    BLOCK_E: tl.constexpr,
    TOP: tl.constexpr,  # clusters that a row reads
    C: tl.constexpr,  # a power of two, at least TOP
    SOME: tl.constexpr,
    ON_AMD: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(C <= SOME and N * E < 2**31 and M * E < 2**31)
    i_tile = tl.program_id(1)
    o_m = tl.program_id(0) * M + tl.arange(0, M)
    o_n = i_tile * N + tl.arange(0, N)
    m_m, m_n = o_m < T, o_n < CLUSTERS
    wait_for_previous(PDL)
    b_z = stream_rows(
        x_ptr + tl.program_id(0).to(tl.int64) * (M * E),
        w_ptr + i_tile.to(tl.int64) * (N * E),
        None,
        None,
        i_tile * N,
        tl.arange(0, M),
        m_m,
        tl.arange(0, N),
        m_n,
        0,
        E,
        E,
        M,
        N,
        BLOCK_E,
        E % BLOCK_E == 0,
        CLUSTERS % N == 0,
        "plain",
        0,
        False,
        0,
    )
    let_next_start(PDL)
    p_keys = keys_ptr + o_m.to(tl.int64)[:, None] * CLUSTERS + o_n[None, :]
    tl.store(p_keys, rank_key(b_z, o_n.to(tl.int64)[None, :]), mask=m_m[:, None] & m_n[None, :])
    if not is_last(count_ptr + tl.program_id(0), (CLUSTERS + N - 1) // N, ON_AMD):
        return
    o_c = tl.arange(0, C)
    for i_m in tl.range(0, tl.minimum(T - tl.program_id(0) * M, M)):
        i_t = (tl.program_id(0) * M + i_m).to(tl.int64)
        b_best = _best_of(keys_ptr + i_t * CLUSTERS, CLUSTERS, SOME, TOP, C)
        tl.store(chosen_ptr + i_t * TOP + o_c, id_of(b_best).to(tl.int32), mask=o_c < TOP)


@triton.jit(
    do_not_specialize=["T", "temperature", "seed", "run", "apart", "stride", "id_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "positions_ptr", "draw_ptr", "best_ptr", "logits_ptr"],
)
def _cluster_rows_kernel(
    x_ptr,  # [T, E]
    w_ptr,  # [clusters R, E]; four bits: int16 [clusters R, E / 4]
    scale_ptr,  # [clusters R, E / GROUP], or None
    shift_ptr,  # like scale_ptr, or None
    ids_ptr,  # [clusters, R]
    chosen_ptr,  # [T, CHOSEN] int32
    positions_ptr,  # [T], `apart` elements from one to the next
    draw_ptr,  # [B, 4]: one set per run of rows
    keys_ptr,  # [T, tiles, C]: the tile's largest, descending
    stats_ptr,  # [2, T, tiles]: the tile's maximum, and its sum of exp(z - maximum)
    best_ptr,  # [T, TOP] ids, of any strides
    logits_ptr,  # [T, TOP]
    lse_ptr,  # [T]
    count_ptr,  # [T] zeros, to find a row's last program
    T,
    temperature,
    seed: tl.int64,
    run,  # rows per set of the draw's numbers
    apart,
    stride,  # from one row's ids to the next row's
    id_stride,  # from one id of a row to the next
    CHOSEN: tl.constexpr,  # clusters of a row
    R: tl.constexpr,  # rows of a cluster
    E: tl.constexpr,
    M: tl.constexpr,  # rows of a product, of which one exists
    N: tl.constexpr,  # rows of the weight per program
    BLOCK_E: tl.constexpr,
    TOP: tl.constexpr,  # k
    C: tl.constexpr,  # candidates per tile; a power of two, at least k
    SOME: tl.constexpr,
    TILES_PAD: tl.constexpr,  # a power of two, at least the number of tiles
    NOISE: tl.constexpr,
    DRAWN: tl.constexpr,
    LSE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    ON_AMD: tl.constexpr,
    SM: tl.constexpr,
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = (R + N - 1) // N  # tiles of a cluster
    TILES: tl.constexpr = CHOSEN * PARTS
    ROW: tl.constexpr = E // 4 if w_ptr.dtype.element_ty == tl.int16 else E  # elements of a row of the weight
    tl.static_assert(C <= N and C <= SOME and N * E < 2**31)
    i_t = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    m_n = i_tile % PARTS * N + o_n < R
    wait_for_previous(PDL)
    i_row = tl.load(chosen_ptr + i_t * CHOSEN + i_tile // PARTS) * R + i_tile % PARTS * N  # the tile's first
    b_id = tl.load(ids_ptr + i_row + o_n, mask=m_n, other=0).to(tl.int64)  # loaded early, to overlap with the stream
    b_all = stream_rows(
        x_ptr + i_t * E,
        w_ptr + i_row.to(tl.int64) * ROW,
        scale_ptr,
        shift_ptr,
        i_row,
        o_m,
        o_m < 1,
        o_n,
        m_n,
        0,
        E,
        E,
        M,
        N,
        BLOCK_E,
        E % BLOCK_E == 0,
        R % N == 0,
        KIND,
        GROUP,
        LEFT,
        SM,
    )
    let_next_start(PDL)
    b_z = tl.sum(tl.where(o_m[:, None] == 0, b_all, 0.0), axis=0)  # summing with zeros is exact
    if T > 0:  # always: without a branch between this sum and the maxima below, Triton 3.7 fails on sm_100
        b_z = tl.where(m_n, b_z, float("-inf"))
    if NOISE:
        position = tl.load(positions_ptr + i_t * apart)
        if DRAWN:
            own_seed, t, _top_p = drawn(draw_ptr + i_t // run * 4, seed, temperature, 1.0, DRAWN)
            if t > 0:
                b_z = tl.div_rn(b_z, t) + gumbel_of(b_id, position, own_seed)
        else:
            b_z = tl.div_rn(b_z, temperature) + gumbel_of(b_id, position, seed)
    o_tile = i_t * TILES + i_tile
    if LSE:
        top = tl.max(b_z, axis=0)
        tl.store(stats_ptr + o_tile, top)
        tl.store(stats_ptr + T.to(tl.int64) * TILES + o_tile, tl.sum(tl.where(m_n, _power(b_z, top), 0.0), axis=0))
    b_key = tl.where(m_n, rank_key(b_z, b_id), NO_KEY)
    if C == 1:
        tl.store(keys_ptr + o_tile, tl.max(b_key, axis=0))
    else:
        o_c = tl.arange(0, C)
        tl.store(keys_ptr + o_tile * C + o_c, _largest(b_key, TOP, C))
    if not is_last(count_ptr + i_t, TILES, ON_AMD):
        return
    o_k = tl.arange(0, C)
    b_best = _best_of(keys_ptr + i_t * (TILES * C), TILES * C, SOME, TOP, C)
    tl.store(best_ptr + i_t * stride + o_k * id_stride, id_of(b_best), mask=o_k < TOP)
    tl.store(logits_ptr + i_t * TOP + o_k, value_of(b_best), mask=o_k < TOP)
    if LSE:
        o_all = tl.arange(0, TILES_PAD)
        p_all = stats_ptr + i_t * TILES + o_all
        b_max = tl.load(p_all, mask=o_all < TILES, other=float("-inf"))
        b_sum = tl.load(p_all + T.to(tl.int64) * TILES, mask=o_all < TILES, other=0.0)
        most = tl.max(b_max, axis=0)
        tl.store(lse_ptr + i_t, most + tl.log(tl.sum(b_sum * _power(b_max, most), axis=0)))


@lru_cache(maxsize=256)
def _variants(search: Search, C: int, R: int, clusters: int) -> tuple[Variant, Variant]:
    """The kernel that chooses clusters, and the one that reads their rows.

    Gemma 4's assistants: 2,048 centroids of 256 are 32 tiles of 64 rows, which fill no GPU, but the whole is 1 MB. 32
    clusters of 128 rows are 128 programs of 32 rows a row of x, about one per SM. A product has 64 rows, as
    in row_linear, and one of them exists: its zeros are written to shared memory and multiplied there, but not read.
    Where rows are many, tiles of 64 rows halve the selections. A tile holds k candidates. The rows of a cluster are not
    known before the wait, so nothing is prefetched."""
    dtype, E, k, ids, noise, held, lse, arch, sms, form = search
    assert ids is not None
    t, half = TYPES[dtype], dtype != torch.float32
    even = dtype.itemsize * E % 16 == 0
    m = 64 if half else 16
    top = triton.next_power_of_2(clusters)
    count = triton.next_power_of_2(C)
    centres, block = (64, columns_of(64, even, E, arch)) if half else (32, 32)
    name = f"{t} {E}->{clusters} of {C}x{R}"
    smoke = dtype == torch.bfloat16 and form is None and k in (1, 10) and (C, E) == (2048, 256) and held
    choose = Variant(
        name=f"{name} choose",
        kernel=_cluster_choose_kernel,
        arguments=(f"*{t}", f"*{t}", "*i64", "*i32", "*i32", "i32"),
        constexprs={
            "CLUSTERS": C,
            "E": E,
            "M": m,
            "N": centres,
            "BLOCK_E": block,
            "TOP": clusters,
            "C": top,
            "SOME": max(min(count, SOME), top),
        },
        num_warps=4,
        num_stages=stages_of(m, centres, block, True, arch) if half else 2,
        dot=half,
        wide=False,  # the keys, which the last program reads, are as many bytes as the tile
        smoke=dtype == torch.bfloat16 and (C, E) == (2048, 256),
        options={"maxnreg": 255} if half else {},
    )
    best = triton.next_power_of_2(k)
    n = 64 if -(-R // 64) * clusters * 10 >= 7 * (sms or SMS[arch]) or (form is not None and form.four_bits) else 32
    n = max(min(n, triton.next_power_of_2(R)), best, 16)
    tiles = clusters * -(-R // n)
    size = dtype.itemsize * E if form is None else form.size(E)
    block = columns_of(n, size % 16 == 0, E, arch, form) if half else 32
    block = block if form is None else form.block(block, E)
    left = half and form is not None and form.four_bits and weight_left(n, arch, form)
    name += f" k{k} ids {TYPES[ids]}" + " noise" * noise + " drawn" * held + " lse" * lse
    rows = Variant(
        name=name + ("" if form is None else f" {form}"),
        kernel=_cluster_rows_kernel,
        arguments=(
            f"*{t}",
            *types_of(t, form),
            f"*{TYPES[ids]}",
            "*i32",
            *(("*i64" if there else f"*{t}") for there in (noise, held)),
            *("*i64", "*fp32", "*i64", "*fp32", "*fp32", "*i32"),
            *("i32", "fp32", "i64", "i32", "i32", "i32", "i32"),
        ),
        constexprs={
            "CHOSEN": clusters,
            "R": R,
            "E": E,
            "M": m,
            "N": n,
            "BLOCK_E": block,
            "TOP": k,
            "C": best,
            "SOME": max(min(triton.next_power_of_2(tiles * best), SOME), best),
            "TILES_PAD": triton.next_power_of_2(tiles),
            "NOISE": noise,
            "DRAWN": held,
            "LSE": lse,
            **constexprs_of(form),
            "LEFT": left,
        },
        num_warps=4,
        num_stages=stages_of(m, n, block, True, arch, form) if half else 2,
        dot=half,
        left=left,
        wide=half and wide_rows(dtype, E, arch, form) and k == 1,  # otherwise the candidates are read by the key
        smoke=smoke,
        options={"maxnreg": 255} if half else {},
    )
    return choose, rows


def variants(arch: int) -> Iterator[Variant]:
    """The variants that the compile-only checks compile for sm_`arch`; the launcher takes any sizes."""
    bf16, f16, f32, i32, i64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
    gemma, chosen = (2048, 128, 256, 32), set()
    for dtype, (C, R, E, clusters), k, ids, noise, held, lse in (
        (bf16, gemma, 1, i64, True, True, False),
        (bf16, gemma, 10, i64, True, True, True),
        (bf16, gemma, 64, i64, True, False, True),
        (bf16, gemma, 4, i32, False, False, True),
        (bf16, (4096, 32, 4096, 100), 10, i64, True, False, True),
        (bf16, (100, 77, 1023, 7), 10, i64, True, False, True),
        (f16, gemma, 10, i64, False, False, True),
        (f32, gemma, 10, i64, True, False, True),
    ):
        choose, rows = _variants(Search(dtype, E, k, ids, noise, held, lse, arch), C, R, clusters)
        yield from (rows,) if choose.name in chosen else (choose, rows)  # k does not change which clusters are chosen
        chosen.add(choose.name)
    for form in COMMON:
        yield _variants(Search(bf16, 4096, 10, i64, False, False, True, arch, form=form), 2048, 128, 32)[1]
    yield _variants(Search(f32, 4096, 1, i64, False, False, False, arch, form=COMMON[0]), 2048, 128, 32)[1]


@takes(Arguments)
def launch(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    clusters, T, (C, R) = args.clusters, len(args.hidden), args.token_ids.shape
    best, logits, lse = found = results_of(args)
    if T == 0:
        return found
    search = Search.of(args)
    choose, rows = _variants(search, C, R, clusters)
    hidden, (w, scale, shift) = normed(args.hidden, args.norm), arguments_of(args.weight)
    seed, positions, temperature, draw = noise_of(args.noise)
    M, N = choose.constexprs["M"], choose.constexprs["N"]
    grid = -(-T // M), -(-C // N)
    chosen = hidden.new_empty((T, clusters), dtype=torch.int32)
    keys = hidden.new_empty((T, C), dtype=torch.int64)
    choose(grid, hidden, args.centroids.contiguous(), keys, chosen, counters(hidden.device, grid[0]), T)
    tiles = clusters * -(-R // rows.constexprs["N"])
    rows(
        (T, tiles),
        hidden,
        w,
        scale,
        shift,
        args.token_ids.contiguous(),
        chosen,
        positions if search.noise and positions is not None else hidden,  # hidden is a dummy for absent tensors
        draw.contiguous() if search.held and draw is not None else hidden,
        hidden.new_empty((T, tiles, rows.constexprs["C"]), dtype=torch.int64),
        hidden.new_empty((2, T, tiles) if args.with_lse else 0, dtype=torch.float32),
        best,
        logits,
        lse,
        counters(hidden.device, T),
        T,
        float(temperature),
        signed(seed),
        check_draw(draw, T),
        1 if positions is None else positions.stride(0),
        *best.stride(),
    )
    return found


def _check(args: Arguments) -> None:
    hidden, weight, centroids, token_ids, clusters, k, norm, noise, _, _ = args
    check_head(hidden, weight, norm, noise)
    if token_ids.dim() != 2 or token_ids.numel() != len(weight) or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids must be [C, R] int32 or int64 with C R = {len(weight)}, one for each row of the weight, "
            f"got {tuple(token_ids.shape)} {token_ids.dtype}"
        )
    (C, R), E = token_ids.shape, hidden.shape[1]
    alike = centroids.dtype == hidden.dtype
    alike |= hidden.is_cpu and (hidden.dtype, centroids.dtype) == (torch.float32, torch.bfloat16)
    if centroids.shape != (C, E) or not alike:
        raise ValueError(f"centroids must be [{C}, {E}] {hidden.dtype}, got {tuple(centroids.shape)} {centroids.dtype}")
    if not 1 <= clusters <= min(MAX_CLUSTERS, C):
        raise ValueError(f"clusters must be in 1..min({MAX_CLUSTERS}, C = {C}), got {clusters}")
    if not 1 <= k <= min(MAX_K, clusters * R):
        raise ValueError(f"k must be in 1..min({MAX_K}, clusters R = {clusters * R}), got {k}")
    same_device(hidden, centroids=centroids, token_ids=token_ids)


class Flat(NamedTuple):
    """The arguments of the registered op."""

    hidden: Tensor
    weight: Matrix
    centroids: Tensor
    token_ids: Tensor
    clusters: int
    k: int
    norm_weight: Tensor | None
    eps: float
    seed: int  # signed
    positions: Tensor | None
    temperature: float
    draw: Tensor | None
    with_lse: bool

    @staticmethod
    def of(args: Arguments) -> tuple[Any, ...]:
        return *args[:6], *flat_noise(args.norm, args.noise), args.with_lse  # from hidden to k

    def nested(self) -> Arguments:
        return Arguments(*self[:6], *nested_noise(self), self.with_lse)


_cluster_topk = register(
    cluster_topk,
    Arguments,
    check=_check,
    reference=lambda args: _compiled(args) or cluster_topk_ref(*args),
    launch=launch,
    fake=results_of,
    fits=lambda args: streams(args.weight),
    check_values=check_ids,
    flat=Flat,
)
