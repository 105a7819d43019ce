"""tree_attention against a plain softmax over random forests, ragged batches and poisoned caches: the reference in
float64, the kernel in Triton's interpreter (`gpu`: on a device, in bfloat16)."""

import importlib
import itertools
import math

import cases
import pytest
import torch
from compile_only import compilations
from reads_only import reads
from torch._subclasses.fake_tensor import FakeTensorMode

from specker.kernels.kv_calibrate import kv_calibrate, rope_table
from specker.kernels.narrow import narrowed
from specker.kernels.quant import as_bytes
from specker.kernels.tree_attention import (
    ancestor_words,
    chain_words,
    pack_bits,
    split_count,
    tree_attention,
    tree_attention_cost,
)
from specker.kernels.variant import tl, triton

op = importlib.import_module("specker.kernels.tree_attention")  # the package's attribute of this name is the function


SHAPES = ("chain", "star", "hub", "mixed")


def forest(generator, nodes, shape=None):
    """Random parents, by default of a random shape: a chain, a star (the root's children), a hub (a chain, then
    children of its last row), or mixed (each row's parent is the row before it, with a random bias, or any row)."""

    def below(n):
        return int(torch.randint(0, n, (), generator=generator))

    shape = shape or SHAPES[below(len(SHAPES))]
    bias = torch.rand((), generator=generator)
    if shape == "mixed":
        parents = [n if torch.rand((), generator=generator) < bias else below(n + 1) for n in range(nodes)]
    else:
        hub = {"chain": nodes, "star": 0, "hub": below(nodes + 1)}[shape]
        parents = [min(n, hub) for n in range(nodes)]
    return torch.tensor(parents, dtype=torch.int64)


def ancestors_of(parents):
    """The definition: row r, its parent, its parent's parent, ..."""
    seen = []
    for row in range(len(parents) + 1):
        mine = {row}
        while row > 0:
            row = int(parents[row - 1])
            mine.add(row)
        seen.append(mine)
    return seen


def related(relation, parents, generator):
    """(the set of window columns that each row sees, words): a forest, a directed acyclic graph, or all ones."""
    rows = len(parents) + 1
    if relation in ("forest", *SHAPES):
        return ancestors_of(parents), ancestor_words(parents)
    if relation == "dag":
        draws = torch.rand(rows, rows, generator=generator) < torch.rand(rows, 1, generator=generator)
        seen = [{r, *(c for c in range(r) if draws[r, c])} for r in range(rows)]
        return seen, pack_bits([sum(1 << c for c in mine) for mine in seen], rows)
    ones = torch.full((rows, -(-rows // 64)), -1)  # bits beyond the window are ignored
    return [set(range(rows))] * rows, ones


def ragged(
    seed,
    dtype=torch.float64,
    Hq=4,
    Hkv=2,
    D=16,
    page=8,
    lengths=((0, 1), (21, 9), (5, 40)),
    relation="forest",
    reach=0,
    cap=0.0,
    sinks=False,
    kind=None,
):
    """Sequences of (prefix, draft nodes), with pages permuted and NaN in every slot that must not be read (rubbish, in
    eight bits). Returns the arguments, and out and lse by the formula in float64."""
    g = torch.Generator().manual_seed(seed)
    widest = max(-(-(p + n + 1) // page) for p, n in lengths)
    count = widest * len(lengths) + 2
    k, v = (torch.full((count, page, Hkv, D), math.nan, dtype=dtype) for _ in range(2))
    scales = None
    if kind:
        k, v = (torch.full(k.shape, 77, dtype=torch.int8).view(kind) for _ in "kv")
        scales = torch.rand(2, 1, Hkv, generator=g) / 20 + 0.01
    sink = torch.randn(1, Hq, generator=g, dtype=torch.float64).to(dtype) if sinks else None
    pages = torch.randperm(count, generator=g)[: widest * len(lengths)].view(len(lengths), widest).int()
    q, words, cu, want, lse = [], [], [0], [], []
    W = max(-(-(n + 1) // 64) for _, n in lengths)
    for b, (prefix, n) in enumerate(lengths):
        seen, own = related(relation, forest(g, n, relation if relation in SHAPES else None), g)
        S = prefix + n + 1
        keys, values = (torch.randn(S, Hkv, D, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
        slots = pages[b].long().repeat_interleave(page)[:S], torch.arange(S) % page
        if kind:
            keys, values = (narrowed(x, by, kind) for x, by in zip((keys, values), scales, strict=True))
        as_bytes(k)[slots], as_bytes(v)[slots] = as_bytes(keys), as_bytes(values)
        if kind:
            keys, values = (x.double() * by[0, :, None] for x, by in zip((keys, values), scales, strict=True))
        rows = torch.randn(n + 1, Hq, D, generator=g, dtype=torch.float64).to(dtype)
        visible = torch.zeros(n + 1, S, dtype=torch.bool)
        visible[:, :prefix] = True
        for r, mine in enumerate(seen):
            visible[r, [prefix + m for m in mine]] = True
            if reach:
                visible[r, visible[r].nonzero()[:-reach]] = False
        shared = torch.arange(Hq) * Hkv // Hq  # KV head of each query head
        score = torch.einsum("thd,shd->ths", rows.double(), keys.double()[:, shared]) / math.sqrt(D)
        if cap:
            score = cap * (score / cap).tanh()
        score = score.masked_fill(~visible[:, None], -math.inf)
        whole = score if sink is None else torch.cat((score, sink.double().T.expand(n + 1, -1, -1)), dim=-1)
        want.append(torch.einsum("ths,shd->thd", whole.softmax(-1)[..., :S], values.double()[:, shared]))
        lse.append(whole.logsumexp(-1))
        q.append(rows)
        words.append(torch.nn.functional.pad(own, (0, W - own.shape[1])))
        cu.append(cu[-1] + n + 1)
    args = {
        "q": torch.cat(q),
        "k_cache": k,
        "v_cache": v,
        "block_table": pages,
        "kv_len": torch.tensor([p + n + 1 for p, n in lengths], dtype=torch.int32),
        "window": torch.tensor([n + 1 for _, n in lengths], dtype=torch.int32),
        "cu_rows": torch.tensor(cu, dtype=torch.int32),
        "ancestors": torch.cat(words),
        "scale": 1 / math.sqrt(D),
        **({"reach": reach} if reach else {}),
        **({"cap": cap} if cap else {}),
        **({} if sink is None else {"sinks": sink}),
        **({} if scales is None else {"k_scale": scales[0], "v_scale": scales[1]}),
    }
    return args, torch.cat(want), torch.cat(lse)


E4M3 = torch.float8_e4m3fn
MORE = {
    "sinks": {"sinks": True},
    "soft cap": {"cap": 1.5},
    "int8": {"kind": torch.int8},
    "fp8": {"kind": E4M3},
    "all in fp8": {"kind": E4M3, "sinks": True, "cap": 2.0, "reach": 64, "page": 5},
    "all in int8": {"kind": torch.int8, "sinks": True, "cap": 2.0, "reach": 64},
}


@pytest.mark.parametrize(("seed", "relation"), [(0, "forest"), (1, "forest"), (2, "forest"), (3, "dag"), (4, "ones")])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (3, 1)])
def test_equals_the_formula(seed, relation, heads):
    args, out, lse = ragged(seed, Hq=heads[0], Hkv=heads[1], relation=relation)
    got, got_lse = tree_attention(**args)
    assert (got - out).abs().max() < 1e-12 and (got_lse - lse).abs().max() < 1e-12


@pytest.mark.parametrize("reach", [1, 2, 7, 20, 1000])
@pytest.mark.parametrize("relation", ["forest", "chain", "dag"])
def test_a_reach_hides_all_but_the_last_columns(relation, reach):
    """Before the window, and within it where a row's path there is longer."""
    for seed in range(3):
        args, out, lse = ragged(seed, relation=relation, reach=reach)
        got, got_lse = tree_attention(**args)
        assert (got - out).abs().max() < 1e-12 and (got_lse - lse).abs().max() < 1e-12
        whole = tree_attention(**args | {"reach": 0})[0]
        assert reach == 1000 or (got - whole).abs().max() > 1e-3


@pytest.mark.parametrize("launch", [tree_attention, torch.ops.specker.tree_attention])
def test_a_reach_counts_the_columns_of_a_rows_path(launch):
    """Column c holds c, and all scores are equal, so a row gets the mean of the columns that it sees. Siblings use up
    nothing of its reach."""
    values = torch.arange(16.0)[None, :, None, None].repeat(1, 1, 1, 32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [14], [5], [0, 5])]
    tree = ancestor_words(torch.tensor([0, 0, 0, 3]))  # the root in column 9; 10, 11 and 12 below it; 13 below 12
    given = dict(zip(("block_table", "kv_len", "window", "cu_rows"), ints, strict=True), ancestors=tree, scale=1.0)
    paths = [[*range(9), 9], [*range(10), 10], [*range(10), 11], [*range(10), 12], [*range(10), 12, 13]]
    for reach in (1, 2, 3, 11, 12):
        args = {"q": torch.zeros(5, 1, 32), "k_cache": torch.zeros_like(values), "v_cache": values, **given}
        out, _ = launch(**args, reach=reach)
        want = [sum(path[-reach:]) / len(path[-reach:]) for path in paths]
        assert out[:, 0, 0].tolist() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("more", MORE)
def test_sinks_caps_and_eight_bits_equal_the_formula(more):
    args, out, lse = ragged(7, **MORE[more])
    got, got_lse = tree_attention(**args)
    assert (got - out).abs().max() < 1e-12 and (got_lse - lse).abs().max() < 1e-12
    without = {n: x for n, x in args.items() if n not in ("sinks", "cap")}
    assert more in ("int8", "fp8") or (tree_attention(**without)[0] - out).abs().max() > 1e-3


def random_windows(seed, relation, dtype=torch.float64):
    """Two sequences with 1 to 64 nodes each."""
    g = torch.Generator().manual_seed(100 * seed + len(relation))
    lengths = [(int(torch.randint(0, 40, (), generator=g)), int(torch.randint(1, 65, (), generator=g))) for _ in "ab"]
    return ragged(seed, dtype, Hq=2, Hkv=1, lengths=lengths, relation=relation)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("relation", [*SHAPES, "dag"])
def test_random_windows_equal_the_formula(relation, seed):
    args, out, lse = random_windows(seed, relation)
    got, got_lse = tree_attention(**args)
    assert (got - out).abs().max() < 1e-12 and (got_lse - lse).abs().max() < 1e-12


def test_random_forests_are_stars_chains_and_between():
    g = torch.Generator().manual_seed(0)
    chain, star = list(range(20)), [0] * 20
    hubs = [[min(n, hub) for n in range(20)] for hub in range(1, 19)]
    drawn = [forest(g, 20).tolist() for _ in range(60)]
    kinds = {"chain" if p == chain else "star" if p == star else "hub" if p in hubs else "mixed" for p in drawn}
    assert kinds == set(SHAPES) and all(0 <= up <= n for p in drawn for n, up in enumerate(p))
    for shape, known in (("chain", [chain]), ("star", [star]), ("hub", [chain, star, *hubs])):
        assert all(forest(g, 20, shape).tolist() in known for _ in range(20))


@pytest.mark.parametrize("more", ["", "all in int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_stays_within_the_dtypes_rounding(dtype, more):
    args, out, lse = ragged(9, dtype=dtype, **MORE.get(more, {}))
    got, got_lse = tree_attention(**args)
    assert got.dtype == dtype
    assert (got.double() - out).abs().max() < 4 * torch.finfo(dtype).eps * out.abs().max()
    assert (got_lse - lse).abs().max() < 16 * torch.finfo(dtype).eps * lse.abs().max()


def test_a_window_of_256_columns():
    args, out, _ = ragged(3, lengths=((30, 255), (0, 70)))
    assert args["ancestors"].shape[1] == 4
    assert (tree_attention(**args)[0] - out).abs().max() < 1e-12


def test_rows_need_not_be_the_whole_window():
    args, out, _ = ragged(5, lengths=((13, 30),))
    rows = slice(11, 20)
    args |= {"q": args["q"][rows], "ancestors": args["ancestors"][rows]}
    args["cu_rows"] = torch.tensor([0, 9], dtype=torch.int32)
    assert (tree_attention(**args)[0] - out[rows]).abs().max() < 1e-12


def test_ancestor_words_match_the_definition():
    g = torch.Generator().manual_seed(0)
    for nodes, shape in itertools.product((0, 1, 5, 63, 64, 130, 255), SHAPES):
        parents = forest(g, nodes, shape)
        words = ancestor_words(parents).tolist()
        for row, mine in enumerate(ancestors_of(parents)):
            assert {j for j in range(nodes + 1) if words[row][j // 64] >> (j % 64) & 1} == mine
    chain = torch.arange(70)
    assert torch.equal(ancestor_words(chain), chain_words(71))
    assert torch.equal(chain_words(3, first=2), chain_words(5)[2:])


def test_cost_counts_each_byte_once():
    q, cache = torch.empty(5, 4, 16), torch.empty(2, 8, 2, 16)
    assert tree_attention_cost(q, cache, [10], [5]) == (2 * 10 * 2 * 16 * 4 + 2 * 5 * 4 * 16 * 4, 4 * 10 * 5 * 4 * 16)
    assert tree_attention_cost(q, cache, [300], [5])[0] == 2 * 300 * 2 * 16 * 4 + 2 * 5 * 4 * 16 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 8)}, "expected q"),
        ({"q": torch.zeros(53, 5, 16, dtype=torch.float64)}, "cannot share"),
        ({"q": torch.zeros(53, 4, 16)}, "caches must both have the floating dtype"),
        ({"kv_len": torch.ones(2, dtype=torch.int32)}, r"expected block_table \[B, P\], kv_len \[B\]"),
        ({"ancestors": torch.ones(5, 1, dtype=torch.int64)}, "ancestors must be"),
        ({"ancestors": torch.ones(53, 1, dtype=torch.int32)}, "int64"),
        ({"kv_len": torch.ones(3, dtype=torch.int64)}, "must be int32"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"reach": -1}, "reach must be at least 0, got -1"),
        ({"cap": -1.0}, "cap must be at least 0"),
        ({"sinks": torch.zeros(4)}, r"sinks must be \[G, 4\] floating, got \(4,\)"),
        ({"sinks": torch.zeros(2, 4)}, "sinks must have G rows for G equal runs of 3 sequences"),
        ({"k_scale": torch.ones(1, 2)}, "k_scale belongs to a cache in eight bits, got torch.float64 with it"),
        (
            {"k_cache": torch.zeros(20, 8, 2, 16, dtype=torch.int8)},
            "caches must both have the floating dtype of the input, int8 or",
        ),
    ],
)
def test_bad_arguments_are_refused(change, message):
    args, *_ = ragged(0)
    assert len(args["q"]) == 53
    with pytest.raises(ValueError, match=message):
        tree_attention(**{**args, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_rows": [0, 1, 20, 40]}, r"cu_rows must rise from 0 to q's 53 rows, got \[0, 1, 20, 40\]"),
        ({"cu_rows": [0, 20, 10, 53]}, "cu_rows must rise"),
        ({"cu_rows": [1, 2, 20, 53]}, "cu_rows must rise"),
        ({"window": [1, 32, 41]}, "window must be in 0..kv_len, got 32 of 31 columns in sequence 1"),
        ({"window": [1, 10, -1]}, "window must be in 0..kv_len, got -1 of 46 columns in sequence 2"),
        ({"block_table": [[20] * 6] * 3}, "block_table must hold page ids in 0..19, got 20..20"),
        ({"block_table": [[-1] * 6] * 3}, "block_table must hold page ids in 0..19, got -1..-1"),
    ],
)
def test_values_out_of_range_are_refused_on_a_cpu(change, message):
    args, *_ = ragged(0)
    assert args["kv_len"].tolist() == [2, 31, 46] and args["k_cache"].shape[0] == 20
    with pytest.raises(ValueError, match=message):
        tree_attention(**args | {n: torch.tensor(x, dtype=torch.int32) for n, x in change.items()})


@pytest.mark.parametrize("name", ["kv_len", "window", "block_table", "cu_rows"])
def test_one_sequence_is_checked_as_several_are(name):
    """The CPU's fast form declines it."""
    args, *_ = ragged(0, lengths=((3, 6),))
    with pytest.raises(ValueError, match="must be int32"):
        tree_attention(**{**args, name: args[name].long()})
    for scale in (0.0, -1.0):
        with pytest.raises(ValueError, match="scale must be positive"):
            tree_attention(**{**args, "scale": scale})
    for words in (0, 5):
        with pytest.raises(ValueError, match="ancestors must be"):
            tree_attention(**{**args, "ancestors": args["ancestors"].repeat(1, 5)[:, :words]})


def test_scales_belong_to_caches_in_eight_bits():
    args, *_ = ragged(0, kind=torch.int8)
    for change, message in (
        ({"k_scale": None}, "k_scale belongs to a cache in eight bits, got torch.int8 without it"),
        ({"v_scale": args["v_scale"][:, :1]}, r"v_scale must be \[G, 2\], got \(1, 1\)"),
        ({"k_scale": args["k_scale"].double()}, "k_scale must be contiguous float32"),
        ({"v_scale": args["v_scale"].repeat(3, 1)}, "k_scale and v_scale must have one shape"),
        (
            {"k_scale": args["k_scale"].repeat(2, 1), "v_scale": args["v_scale"].repeat(2, 1)},
            "k_scale must have G rows",
        ),
        ({"sinks": torch.zeros(3, 4)}, "sinks and k_scale must have as many rows, got 3 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_attention(**{**args, **change})


def test_bad_trees_are_refused():
    with pytest.raises(ValueError, match=r"parents\[1\] must be a row in 0..1, got 2"):
        ancestor_words(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="at most 256 columns"):
        pack_bits([1], 257)


# The kernel, in the interpreter. CUDA tensors reach `op.launch`.

CASES = {
    "ragged": {},
    "one split, one sequence": {"lengths": ((3, 6),), "Hq": 2, "Hkv": 1},
    "empty prefix, 65 rows": {"lengths": ((0, 64),), "Hq": 2, "Hkv": 1},
    "three splits, pages of 64": {"lengths": ((300, 9),), "page": 64},
    "two words across tiles and splits": {"lengths": ((90, 70), (0, 3)), "Hq": 3, "Hkv": 1, "page": 16},
    "page 5, D 20, 3 heads": {"lengths": ((140, 3), (64, 0)), "page": 5, "D": 20, "Hq": 3, "Hkv": 1},
    "dag": {"lengths": ((61, 64),), "relation": "dag", "Hkv": 1},
    "all ones": {"lengths": ((0, 70), (130, 2)), "relation": "ones", "Hq": 1, "Hkv": 1},
    "reach within a tile": {"lengths": ((300, 9), (20, 3), (0, 0)), "reach": 70, "Hkv": 1},
    "reach of whole splits": {"lengths": ((620, 30),), "reach": 64, "Hq": 2, "Hkv": 1},
    "reach of a window of two words": {"lengths": ((90, 70), (0, 100)), "reach": 128, "Hq": 1, "Hkv": 1, "page": 5},
    **MORE,
    "three splits, all in fp8": {"lengths": ((300, 9),), "page": 64, **MORE["all in fp8"]},
}


@pytest.mark.parametrize(("case", "dtype"), cases.one_in(2, CASES, [torch.float32, torch.float16]))
def test_kernel_equals_the_formula(poisoned, case, dtype):
    args, out, lse = ragged(len(case), dtype=dtype, **CASES[case])
    got, got_lse = op.launch(**args)
    assert got.dtype == dtype and got_lse.dtype == torch.float32
    cap = args.get("cap", 0) * 2 * torch.finfo(torch.float32).eps  # the error of a tanh near 0
    assert (got.double() - out).abs().max() < 8 * torch.finfo(dtype).eps * out.abs().max() + cap
    assert (got_lse - lse).abs().max() < 16 * torch.finfo(torch.float32).eps * lse.abs().max().clamp(min=1) + cap


@pytest.mark.parametrize(("relation", "dtype"), cases.one_in(2, [*SHAPES, "dag"], [torch.float32, torch.float16]))
def test_kernel_equals_the_reference_over_random_windows(poisoned, relation, dtype):
    """The reference runs in float64 on the kernel's inputs."""
    for seed in range(2):
        args, *_ = random_windows(seed, relation, dtype)
        got, got_lse = op.launch(**args)
        want, want_lse = tree_attention(**args | {n: args[n].double() for n in ("q", "k_cache", "v_cache")})
        assert (got - want).abs().max() < 8 * torch.finfo(dtype).eps * want.abs().max()
        assert (got_lse - want_lse).abs().max() < 16 * torch.finfo(torch.float32).eps * want_lse.abs().max().clamp(
            min=1
        )


def test_kernel_takes_a_window_of_256_columns():
    args, out, _ = ragged(3, torch.float16, Hq=1, Hkv=1, lengths=((30, 255),))
    assert args["ancestors"].shape[1] == 4
    assert (op.launch(**args)[0].double() - out).abs().max() < 4e-3 * out.abs().max()


@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_kernel_takes_head_sizes(D):
    args, out, _ = ragged(D, torch.float16, D=D, Hq=2, Hkv=1, lengths=((40, 5),))
    assert (op.launch(**args)[0].double() - out).abs().max() < 4e-3 * out.abs().max()


def only(args, rows, **change):
    """`args` of one sequence with some of its rows."""
    q, words = args["q"][rows], args["ancestors"][rows]
    cu_rows = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    return {**args, "q": q, "ancestors": words, "cu_rows": cu_rows, **change}


def same(a, b):
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_a_row_has_the_same_bits_alone_and_among_others():
    args, *_ = ragged(1, torch.float16, Hq=2, Hkv=1, lengths=((120, 64),))
    out, lse = op.launch(**args)
    assert len(out) == 65
    for rows in (slice(0, 1), slice(64, 65), slice(33, 35), slice(20, 27), slice(1, 65)):
        assert same(op.launch(**only(args, rows)), (out[rows], lse[rows]))


def test_a_sequence_has_the_same_bits_alone_and_beside_others():
    args, *_ = ragged(2, torch.float16, lengths=((33, 6), (0, 40), (150, 2)))
    out, lse = op.launch(**args)
    for b in range(3):
        rows = slice(int(args["cu_rows"][b]), int(args["cu_rows"][b + 1]))
        alone = {n: args[n][b : b + 1] for n in ("block_table", "kv_len", "window")}
        assert same(op.launch(**only(args, rows, **alone)), (out[rows], lse[rows]))


@pytest.mark.parametrize("launch", [tree_attention, op.launch])
def test_a_ring_of_pages_has_the_bits_of_all_columns(launch):
    """A table may repeat its pages: a column then stands in the place of one that the reach hides from all rows."""
    args, *_ = ragged(5, torch.float32, Hq=2, Hkv=1, page=16, lengths=((330, 20),), relation="mixed", reach=64)
    ring = [3, 0, 5, 1, 6, 2]
    table = torch.tensor([[ring[n % 6] for n in range(22)]], dtype=torch.int32)
    columns = torch.arange(351 - 96, 351)
    caches = {}
    for name in ("k_cache", "v_cache"):
        caches[name] = torch.full((7, *args[name].shape[1:]), math.nan)
        rows = args[name][args["block_table"][0, columns // 16].long(), columns % 16]
        caches[name][table[0, columns // 16].long(), columns % 16] = rows
    assert same(launch(**args | caches | {"block_table": table}), launch(**args))


@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs_share_the_work_of_many_sequences(monkeypatch, launched, programs):
    lengths = ((33, 6), (0, 40), (900, 2), (0, 0), *((n, 1) for n in range(1, 15)))
    args, *_ = ragged(2, torch.float16, lengths=lengths)
    want = op.launch(**args)
    del launched[:]
    monkeypatch.setattr(op, "PROGRAMS", programs)
    monkeypatch.setattr(op, "sms", lambda device: 1)
    assert same(op.launch(**args), want)
    assert [grid for _, grid in launched] == [(programs,), (len(args["q"]), 1)]


MERGES = {
    "one sequence": ({"lengths": ((700, 30),), "Hq": 6, "Hkv": 2}, torch.float16),
    "several, some of one split": ({"lengths": ((33, 6), (900, 2), (0, 0), (300, 40))}, torch.float16),
    "reach": ({"lengths": ((500, 9), (700, 3)), "reach": 64}, torch.float32),
    "sinks, cap and int8": ({"lengths": ((33, 6), (400, 9)), **MORE["all in int8"]}, torch.float16),
}


@pytest.mark.parametrize("name", MERGES)
def test_a_kernel_of_its_own_merges_splits_to_the_same_bits(monkeypatch, launched, name):
    """For many pairs, whichever their number, and with the sinks of each layer. A length beyond the table is NaN there,
    too."""
    how, dtype = MERGES[name]
    args, out, lse = ragged(3, dtype, **how)
    for cache in ("k_cache", "v_cache"):
        args[cache] = args[cache] if args[cache].dtype == torch.int8 else args[cache].nan_to_num(0)
    layers = {n: args[n].repeat(2, 1) for n in ("sinks", "k_scale", "v_scale") if n in args}
    if layers:  # two of one sequence
        layers["sinks"][1] += 2
    beyond = {**args, "kv_len": args["kv_len"] + args["block_table"].shape[1] * args["k_cache"].shape[1]}
    found = []
    for most in (1 << 20, 0):
        del launched[:]
        with monkeypatch.context() as patch:
            patch.setattr(op, "MERGED", most)
            found.append([op.launch(**each) for each in [args, args | layers][: 1 + bool(layers)]])
            assert len(launched) == len(found[0]) * (2 - (most > 0))
            assert all(x.isnan().all() for x in op.launch(**beyond))
    assert all(map(same, *found)) and not any(same(found[0][0], x) for x in found[0][1:])
    one = found[0][0]
    assert torch.allclose(one[0].double(), out, atol=3e-3) and torch.allclose(one[1].double(), lse, atol=3e-3)


def chain_and_decoding(args, prefix, rows, launch):
    """(out, lse) of the chain, and of plain decoding row by row, with one more cached column each time."""
    chain = launch(**{**args, "ancestors": chain_words(rows).to(args["q"].device)})
    one = torch.ones(1, dtype=torch.int32, device=args["q"].device)
    words = chain_words(1).to(args["q"].device)
    steps = [
        launch(**only(args, slice(r, r + 1), kv_len=one * (prefix + r + 1), window=one, ancestors=words))
        for r in range(rows)
    ]
    return chain, tuple(torch.cat(parts) for parts in zip(*steps, strict=True))


# Across a tile, from one split to two, and from splits of 128 columns to splits of 256 with another tile.
@pytest.mark.parametrize(
    ("prefix", "nodes", "dtype", "more"),
    [
        (60, 6, torch.float32, {}),
        (60, 6, torch.float16, {}),
        (123, 8, torch.float32, {}),
        (4094, 2, torch.float16, {}),
        (123, 8, torch.float16, MORE["all in fp8"]),
    ],
)
def test_a_chain_has_the_bits_of_plain_decoding(prefix, nodes, dtype, more):
    args, *_ = ragged(prefix, dtype, **{"Hq": 2, "Hkv": 1, "page": 64, "lengths": ((prefix, nodes),), **more})
    assert same(*chain_and_decoding(args, prefix, nodes + 1, op.launch))


def test_the_width_of_the_block_table_changes_no_bit():
    args, *_ = ragged(6, torch.float16, Hq=2, Hkv=1, lengths=((120, 3),))
    wide = torch.cat((args["block_table"], torch.zeros(1, 500, dtype=torch.int32)), dim=1)
    one_split = only(args, slice(0, 1), kv_len=torch.tensor([121], dtype=torch.int32))
    one_split |= {"window": torch.ones(1, dtype=torch.int32), "ancestors": chain_words(1)}
    for call in (args, one_split):
        assert same(op.launch(**call), op.launch(**{**call, "block_table": wide}))
    narrow = {**one_split, "block_table": wide[:, :16]}  # a single split: the merge is not launched
    assert same(op.launch(**one_split), op.launch(**narrow))


@pytest.mark.parametrize(
    ("launch", "dtype", "bound"), [(tree_attention, torch.float64, 1e-12), (op.launch, torch.float32, 2e-6)]
)
def test_each_branch_of_a_tree_is_the_chain_of_its_path(launch, dtype, bound):
    prefix, nodes, page = 130, 12, 8
    args, *_ = ragged(8, dtype, Hq=2, Hkv=1, lengths=((prefix, nodes),))
    g = torch.Generator().manual_seed(3)
    parents = forest(g, nodes)
    seen = ancestors_of(parents)
    tree, _ = launch(**{**args, "ancestors": ancestor_words(parents)})
    slot = (
        args["block_table"][0].long().repeat_interleave(page) * page
        + torch.arange(args["block_table"].numel() * page) % page
    )
    for leaf in sorted(set(range(nodes + 1)) - set(parents.tolist()))[:3]:
        path = sorted(seen[leaf])
        caches = {}
        for name in ("k_cache", "v_cache"):
            cache = args[name].clone()
            flat = cache.flatten(0, 1)
            flat[slot[prefix : prefix + len(path)]] = flat[slot[[prefix + r for r in path]]]
            caches[name] = cache
        lengths = {"kv_len": prefix + len(path), "window": len(path)}
        lengths = {n: torch.tensor([x], dtype=torch.int32) for n, x in lengths.items()}
        chain, _ = launch(**only(args, path, **caches, **lengths, ancestors=chain_words(len(path))))
        assert (chain - tree[path]).abs().max() < bound


@pytest.mark.parametrize("more", [{}, {"kind": torch.int8, "sinks": True}])
@pytest.mark.parametrize(
    ("launch", "dtype", "bound"), [(tree_attention, torch.float64, 1e-12), (op.launch, torch.float32, 0)]
)
def test_layers_are_a_batch_of_sequences(launch, dtype, bound, more):
    """Each with its own sinks and scales."""
    layers = [ragged(seed, dtype, lengths=((30, 7),), **more)[0] for seed in (1, 2, 3)]
    pages = layers[0]["k_cache"].shape[0]
    rows = len(layers[0]["q"])
    together = {n: torch.cat([x[n] for x in layers]) for n in layers[0] if n not in ("cu_rows", "scale")}
    together["block_table"] = torch.cat([x["block_table"] + l * pages for l, x in enumerate(layers)])
    cu_rows = torch.arange(4, dtype=torch.int32) * rows
    out, lse = launch(**together, cu_rows=cu_rows, scale=layers[0]["scale"])
    for l, layer in enumerate(layers):
        rows_of_l = slice(l * rows, (l + 1) * rows)
        alone = launch(**layer)
        assert (alone[0] - out[rows_of_l]).abs().max() <= bound and (alone[1] - lse[rows_of_l]).abs().max() <= bound


def odd(x, by=3):
    """`x` as a view at an offset into a larger tensor of rubbish."""
    rubbish = torch.full((x.numel() + by,), 7777 if x.dtype in (torch.int32, torch.int64) else math.nan, dtype=x.dtype)
    rubbish[by:] = x.flatten()
    return rubbish[by:].view(x.shape)


@pytest.mark.parametrize("launch", [tree_attention, op.launch])
def test_strided_views_give_the_same_result(launch):
    args, *_ = ragged(4, torch.float32)
    plain = launch(**args)
    # BLAS may round the reference's products differently for a view.
    equal = same if launch is op.launch else lambda a, b: all(map(torch.allclose, a, b))
    assert equal(launch(**{n: x if n == "scale" else odd(x) for n, x in args.items()}), plain)
    pairs = torch.stack((args["k_cache"], args["v_cache"]), dim=1)  # [pages, 2, page, Hkv, D]
    qkv = torch.cat((args["q"], args["q"] * math.nan), dim=1)
    view = {"q": qkv[:, :4], "k_cache": pairs[:, 0], "v_cache": pairs[:, 1]}
    view["block_table"] = torch.stack((args["block_table"], args["block_table"] * 0), dim=-1)[..., 0]
    assert not view["q"].is_contiguous() and not view["k_cache"].is_contiguous()
    assert equal(launch(**{**args, **view}), plain)


@pytest.mark.parametrize("launch", [tree_attention, op.launch])
def test_sequences_may_be_empty(launch):
    args, *_ = ragged(4, torch.float32)
    plain = launch(**args)
    # A sequence without rows between the first and the second, and another at the end.
    more = {n: args[n][[0, 1, 1, 2, 2]] for n in ("block_table", "kv_len", "window")}
    assert same(launch(**{**args, **more, "cu_rows": args["cu_rows"][[0, 1, 1, 2, 3, 3]]}), plain)
    none = {**args, "q": args["q"][:0], "ancestors": args["ancestors"][:0], "cu_rows": args["cu_rows"] * 0}
    out, lse = launch(**none)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
    no_sequence = {n: none[n][:0] for n in ("block_table", "kv_len", "window")} | {"cu_rows": none["cu_rows"][:1]}
    assert launch(**{**none, **no_sequence})[0].shape == (0, 4, 16)


@triton.jit
def _splits_kernel(
    column_ptr,  # [n]
    split_ptr,  # [n]
    start_ptr,  # [n]
    n,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o = tl.arange(0, BLOCK)
    b_split = op._split_of(tl.load(column_ptr + o, mask=o < n, other=0), UNIT)
    tl.store(split_ptr + o, b_split, mask=o < n)
    tl.store(start_ptr + o, op._split_start(b_split, UNIT), mask=o < n)


@pytest.mark.parametrize("unit", [128, 1024])
def test_split_starts_have_four_mantissa_bits(unit):
    starts = [*range(16), *((16 + r) << e for e in range(11) for r in range(16))]
    edges = torch.tensor([unit * s for s in starts if unit * s < 2**30])
    columns = torch.cat((edges, edges[1:] - 1, edges + 1)).int()
    split, start = torch.empty_like(columns), torch.empty_like(columns)
    _splits_kernel[(1,)](columns, split, start, len(columns), UNIT=unit, BLOCK=1024)
    want = torch.searchsorted(edges, columns.long(), right=True) - 1
    assert torch.equal(split.long(), want) and torch.equal(start.long(), edges[want])
    assert [split_count(c + 1, unit) for c in columns.tolist()] == (want + 1).tolist()


@pytest.mark.parametrize("page", [8, 128])
def test_a_length_beyond_the_table(monkeypatch, page):
    """The kernel reads nothing beyond the table and gives NaN; other sequences keep their results."""
    args, *_ = ragged(0, torch.float32, page=page)
    for cache in ("k_cache", "v_cache"):
        args[cache] = args[cache].nan_to_num(0)
    want, _ = op.launch(**args)
    assert not want.isnan().any()
    args["kv_len"][1] = args["block_table"].shape[1] * page + 1
    with reads(monkeypatch, *(x for x in args.values() if isinstance(x, torch.Tensor))):
        out, lse = op.launch(**args)
    beyond = torch.zeros(len(out), dtype=torch.bool)
    beyond[slice(*args["cu_rows"][1:3].tolist())] = True
    assert out[beyond].isnan().all() and lse[beyond].isnan().all() and torch.equal(out[~beyond], want[~beyond])
    with pytest.raises(ValueError, match="exceeds block_table"):
        op.tree_attention_ref(**args)


def test_the_launcher_reads_no_tensor(unlaunched):
    """Fake tensors have no values to read."""
    args, *_ = ragged(0, torch.float32)
    with FakeTensorMode() as mode:
        fake = {n: x if n == "scale" else mode.from_tensor(x) for n, x in args.items()}
        assert op.launch(**fake)[0].shape == (53, 4, 16)
        op.launch(**{**fake, "block_table": mode.from_tensor(torch.zeros(3, 60, dtype=torch.int32))})
    # 53 rows of 2 heads are 106 pairs: 106 // 16 + 3 slots; 48 columns are one split, 480 are four.
    assert unlaunched[0] == ("_tree_attention_kernel", (9 * 2,))
    apart = ("_tree_attention_merge_kernel", (53, 1))  # 35 pairs a sequence
    assert unlaunched[1:] == [("_tree_attention_kernel", (9 * 2 * 4,)), apart]


def launches():
    """Vary what decoding varies on one model: rows, sequences up to 16, lengths, words, widths and offsets."""
    k, v = torch.zeros(2, 40, 256, 2, 128, dtype=torch.bfloat16)
    table = torch.zeros(17, 41, dtype=torch.int32)
    lengths = torch.ones(64, dtype=torch.int32)
    for T, B, W, width in ((2, 2, 1, 1), (3, 3, 1, 16), (16, 7, 2, 40), (17, 16, 3, 32), (256, 5, 4, 17)):
        q, words = torch.zeros(T, 8, 128, dtype=torch.bfloat16), torch.ones(T, W, dtype=torch.int64)
        some = table[1 : B + 1, 1 : width + 1], lengths[B : 2 * B], lengths[1 : B + 1], lengths[3 : B + 4]
        op.launch(q, k, v, *some, words, 0.1 * T)
    for T in (1, 2, 16):
        q, words = torch.zeros(T, 8, 128, dtype=torch.bfloat16), torch.ones(T, 1, dtype=torch.int64)
        op.launch(q, k, v, table[:1], lengths[T : T + 1], lengths[5:6], lengths[7:9], words, 0.1)


def test_no_length_recompiles():
    """Two compilations, for one sequence and up to 16, and as many where another kernel merges the splits."""
    assert compilations(__file__) == {"_tree_attention_kernel": 4, "_tree_attention_merge_kernel": 2}


def test_the_operator_is_registered():
    args, *_ = ragged(0, torch.float32)
    torch.library.opcheck(torch.ops.specker.tree_attention.default, tuple(args.values()))
    one, *_ = ragged(0, torch.float32, lengths=((9, 3),))
    torch.library.opcheck(torch.ops.specker.tree_attention.default, tuple(one.values()))
    one["q"] = one["q"].transpose(0, 1).contiguous().transpose(0, 1)  # [Hq, T, D] in memory, as in most models
    torch.library.opcheck(torch.ops.specker.tree_attention.default, tuple(one.values()))


def test_compiles_into_one_graph():
    args, *_ = ragged(0, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def doubled(q, rest):
        out, lse = tree_attention(q * 2, **rest)
        return out + 1, lse

    got = doubled(args["q"], {n: x for n, x in args.items() if n != "q"})
    out, lse = tree_attention(**{**args, "q": args["q"] * 2})
    assert torch.equal(got[0], out + 1) and torch.equal(got[1], lse)


def test_the_launcher_needs_one_layout():
    args, *_ = ragged(0, torch.float32)
    assert args["v_cache"].shape == (20, 8, 2, 16)
    with pytest.raises(ValueError, match="one layout with adjacent elements"):
        op.launch(**{**args, "v_cache": torch.zeros(20, 8, 16, 2).mT})


# On a device, in bfloat16.


def on_gpu(args):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in args.items()}


def torch_error(args, out):
    """The largest error of SDPA in the same dtype, over all sequences."""
    worst = 0.0
    page = args["k_cache"].shape[1]
    words = args["ancestors"]
    for b, n in enumerate(args["kv_len"].tolist()):
        rows = slice(*args["cu_rows"][b : b + 2].tolist())
        window = int(args["window"][b])
        column = torch.arange(window, device=words.device)
        mask = torch.ones(rows.stop - rows.start, n, dtype=torch.bool, device=words.device)
        mask[:, n - window :] = words[rows][:, column // 64] >> column % 64 & 1
        used = args["block_table"][b, : -(-n // page)].long()
        k, v = (args[c][used].flatten(0, 1)[:n].transpose(0, 1)[None] for c in ("k_cache", "v_cache"))
        q = args["q"][rows].transpose(0, 1)[None]
        got = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=args["scale"], enable_gqa=True
        )
        worst = max(worst, float((got[0].transpose(0, 1) - out[rows]).abs().max()))
    return worst


@pytest.mark.gpu
@pytest.mark.parametrize("relation", ["forest", "dag", "ones"])
@pytest.mark.parametrize(
    ("heads", "D", "page"),
    [((8, 2), 128, 256), ((14, 2), 64, 256), ((4, 4), 96, 16), ((8, 1), 128, 5), ((2, 2), 256, 64), ((3, 1), 40, 8)],
)
def test_gpu_error_is_at_most_twice_that_of_torch(relation, heads, D, page):
    lengths = ((1000, 16), (0, 63), (300, 0), (5, 200))
    shape = {"Hq": heads[0], "Hkv": heads[1], "D": D, "page": page}
    args, out, lse = ragged(D, torch.bfloat16, lengths=lengths, relation=relation, **shape)
    args, out, lse = on_gpu(args), out.cuda(), lse.cuda()
    got, got_lse = tree_attention(**args)
    assert (got - out).abs().max() <= 2 * torch_error(args, out)
    assert (got_lse - lse).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize(("D", "page"), [(64, 256), (128, 256), (128, 5), (256, 64)])
def test_gpu_sinks_caps_and_eight_bits_equal_the_formula(more, D, page):
    how = {"Hq": 8, "Hkv": 2, "D": D, "lengths": ((1000, 16), (0, 63), (5, 40)), **MORE[more], "page": page}
    args, out, lse = ragged(D, torch.bfloat16, **how)
    got, got_lse = tree_attention(**on_gpu(args))
    assert (got.cpu().double() - out).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * out.abs().max()
    assert (got_lse.cpu() - lse).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 7, 64, 65])
def test_gpu_rows_have_the_same_bits_alone_and_among_others(T):
    args = on_gpu(ragged(1, torch.bfloat16, Hq=8, Hkv=2, D=128, page=256, lengths=((2000, 64),))[0])
    out, lse = tree_attention(**args)
    for rows in {slice(0, T), slice((65 - T) // 2, (65 - T) // 2 + T), slice(65 - T, 65)}:
        assert same(tree_attention(**only(args, rows)), (out[rows], lse[rows]))


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 60, 123, 1000, 4090, 8190])
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_a_chain_has_the_bits_of_plain_decoding(prefix, D):
    args = on_gpu(ragged(prefix, torch.bfloat16, Hq=8, Hkv=2, D=D, page=256, lengths=((prefix, 15),))[0])
    assert same(*chain_and_decoding(args, prefix, 16, tree_attention))


@pytest.mark.gpu
def test_gpu_a_graph_follows_the_lengths_without_a_host_read():
    args = on_gpu(ragged(1, torch.bfloat16, Hq=8, Hkv=2, D=128, page=64, lengths=((900, 9),))[0])
    want = tree_attention(**args)
    shorter = {"kv_len": args["kv_len"] - 300, "window": args["window"] - 9, "ancestors": args["ancestors"] | 1}
    want_shorter = tree_attention(**{**args, **shorter})
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree_attention(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        got = tree_attention(**args)
    captured.replay()
    assert same(got, want)
    for name, x in shorter.items():
        args[name].copy_(x)
    captured.replay()
    assert same(got, want_shorter)


@pytest.mark.gpu
def test_gpu_pages_beyond_2_31_elements():
    """kv_calibrate writes the same rows to the cache's first pages and to its last ones, beyond 32-bit offsets;
    attention reads the same bits from both."""
    Hq, Hkv, D, page, T, prefix = 8, 2, 128, 256, 9, 600
    pages = 2**31 // (page * Hkv * D) + 8
    try:
        k, v = (torch.zeros(pages, page, Hkv, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    except torch.OutOfMemoryError:
        pytest.skip("needs 9 GB")
    assert k[-4].storage_offset() > 2**31
    g = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(prefix + T, (Hq + 2 * Hkv) * D, generator=g, device="cuda").bfloat16()
    positions = torch.arange(prefix + T, device="cuda")
    rope = rope_table(torch.tensor([0.9**i for i in range(D // 2)]), 1.0, prefix + T, torch.bfloat16).cuda()
    rest = {
        "kv_len": torch.tensor([prefix + T], dtype=torch.int32, device="cuda"),
        "window": torch.tensor([T], dtype=torch.int32, device="cuda"),
        "cu_rows": torch.tensor([0, T], dtype=torch.int32, device="cuda"),
        "ancestors": chain_words(T).cuda(),
        "scale": D**-0.5,
    }
    results = []
    for first in (0, pages - 4):
        table = torch.arange(first, first + 4, dtype=torch.int32, device="cuda")
        slots = first * page + positions
        q = kv_calibrate(qkv, positions, slots, rope, k, v, None, None, 1e-5)
        results.append((q, *tree_attention(q[prefix:], k, v, table[None], **rest)))
    assert all(map(torch.equal, *results)) and results[0][1].abs().max() > 0
    assert torch.equal(k[:4], k[-4:]) and torch.equal(v[:4], v[-4:]) and not k[4:-4].any() and not v[4:-4].any()
    del k, v, results
    torch.cuda.empty_cache()
