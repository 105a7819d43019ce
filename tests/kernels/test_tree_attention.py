"""tree_attention against the softmax written out, over random forests, ragged batches and poisoned caches."""

import math

import pytest
import torch

from specker.kernels.tree_attention import ancestor_words, chain_words, pack_bits, tree_attention, tree_attention_cost


def forest(generator, nodes):
    """Random parents: stars, chains and everything between."""
    bias = torch.rand((), generator=generator)
    parents = []
    for n in range(nodes):
        deepest = torch.rand((), generator=generator) < bias
        parents.append(n if deepest else int(torch.randint(0, n + 1, (), generator=generator)))
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


def ragged(seed, dtype=torch.float64, Hq=4, Hkv=2, D=16, page=8, lengths=((0, 1), (21, 9), (5, 40))):
    """Sequences of (prefix, draft nodes), pages permuted, NaN in every slot that must not be read."""
    g = torch.Generator().manual_seed(seed)
    widest = max(-(-(p + n + 1) // page) for p, n in lengths)
    count = widest * len(lengths) + 2
    k, v = (torch.full((count, page, Hkv, D), math.nan, dtype=dtype) for _ in range(2))
    pages = torch.randperm(count, generator=g)[: widest * len(lengths)].view(len(lengths), widest).int()
    q, words, cu, want, lse = [], [], [0], [], []
    parents_all = [forest(g, n) for _, n in lengths]
    W = max(-(-(n + 1) // 64) for _, n in lengths)
    for b, ((prefix, n), parents) in enumerate(zip(lengths, parents_all, strict=True)):
        S = prefix + n + 1
        keys, values = (torch.randn(S, Hkv, D, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
        for c in range(S):
            k[pages[b, c // page], c % page], v[pages[b, c // page], c % page] = keys[c], values[c]
        rows = torch.randn(n + 1, Hq, D, generator=g, dtype=torch.float64).to(dtype)
        for r, mine in enumerate(ancestors_of(parents)):
            columns = [*range(prefix), *(prefix + m for m in sorted(mine))]
            for h in range(Hq):
                kv = h * Hkv // Hq
                score = keys[columns, kv].double() @ rows[r, h].double() / math.sqrt(D)
                want.append(score.softmax(0) @ values[columns, kv].double())
                lse.append(score.logsumexp(0))
        q.append(rows)
        own = ancestor_words(parents)
        words.append(torch.nn.functional.pad(own, (0, W - own.shape[1])))
        cu.append(cu[-1] + n + 1)
    T = cu[-1]
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
    }
    return args, torch.stack(want).view(T, Hq, D), torch.stack(lse).view(T, Hq)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (3, 1)])
def test_equals_the_formula(seed, heads):
    args, out, lse = ragged(seed, Hq=heads[0], Hkv=heads[1])
    got, got_lse = tree_attention(**args)
    assert (got - out).abs().max() < 1e-12 and (got_lse - lse).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_that_of_the_dtype(dtype):
    args, out, lse = ragged(9, dtype=dtype)
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


def test_ancestor_words_are_the_definition():
    g = torch.Generator().manual_seed(0)
    for nodes in (0, 1, 5, 63, 64, 130, 255):
        parents = forest(g, nodes)
        words = ancestor_words(parents)
        for row, mine in enumerate(ancestors_of(parents)):
            assert {j for j in range(nodes + 1) if words[row, j // 64] >> (j % 64) & 1} == mine
    chain = torch.arange(70)
    assert torch.equal(ancestor_words(chain), chain_words(71))
    assert torch.equal(chain_words(3, first=2), chain_words(5)[2:])


def test_cost_counts_each_byte_once():
    q, cache = torch.empty(5, 4, 16), torch.empty(2, 8, 2, 16)
    assert tree_attention_cost(q, cache, [10], [5]) == (2 * 10 * 2 * 16 * 4 + 2 * 5 * 4 * 16 * 4, 4 * 10 * 5 * 4 * 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 8)}, "expected q"),
        ({"q": torch.zeros(53, 5, 16, dtype=torch.float64)}, "cannot share"),
        ({"q": torch.zeros(53, 4, 16)}, "one dtype"),
        ({"kv_len": torch.ones(2, dtype=torch.int32)}, "for 2 sequences"),
        ({"ancestors": torch.ones(5, 1, dtype=torch.int64)}, "ancestors must be"),
        ({"ancestors": torch.ones(53, 1, dtype=torch.int32)}, "int64"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    args, *_ = ragged(0)
    assert len(args["q"]) == 53
    with pytest.raises(ValueError, match=message):
        tree_attention(**{**args, **change})


def test_bad_trees_are_refused():
    with pytest.raises(ValueError, match=r"parents\[1\] must be a row in 0..1, got 2"):
        ancestor_words(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="at most 256 columns"):
        pack_bits([1], 257)
