"""integrations/sglang.py: masks and K/V in SGLang's layouts, against constructions by its documented semantics and,
where the sglang wheel is installed, against its own mask builder."""

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from specker.integrations.sglang import (
    TreeMask,
    ancestors_from_mask,
    ancestors_from_packed,
    mask_from_ancestors,
    packed_from_ancestors,
    paged,
    read_token_map,
    table_from_indices,
    table_from_requests,
    verify_lengths,
    write_token_map,
)
from specker.kernels import ancestor_words, tree_attention
from specker.kernels.tree_attention import launch

FULL = TreeMask.FULL_MASK
QLEN = TreeMask.QLEN_ONLY
BITS = TreeMask.QLEN_ONLY_BITPACKING
LENGTHS = [(5,), (0,), (3, 0, 17, 8), (1, 64, 2)]  # of the prefixes


def forest(B: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random trees: parents [B, rows - 1] (rows, 0 = root) and their ancestor words [B * rows, W]."""
    generator = random.Random(seed)
    parents = [[generator.randint(max(0, n - 6), n) for n in range(rows - 1)] for _ in range(B)]
    tensor = torch.tensor(parents, dtype=torch.int64).view(B, rows - 1)
    return tensor, torch.cat([ancestor_words(tree) for tree in tensor])


def sees(parents: list[int], row: int, column: int) -> bool:
    """Whether `row` is `column` or descends from it."""
    while row > column:
        row = parents[row - 1]
    return row == column


def naive_full(parents: torch.Tensor, lengths: tuple[int, ...], rows: int) -> list[list[bool]]:
    """Each request's FULL_MASK, cell by cell: rows by (prefix + rows) columns."""
    return [
        [c < prefix or sees(tree, r, c - prefix) for r in range(rows) for c in range(prefix + rows)]
        for tree, prefix in zip(parents.tolist(), lengths, strict=True)
    ]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_masks(rows, lengths):
    parents, words = forest(len(lengths), rows)
    seq_lens = torch.tensor(lengths, dtype=torch.int32 if rows % 2 else torch.int64)
    cells = naive_full(parents, lengths, rows)
    full = torch.tensor(list(itertools.chain(*cells)))
    trees = [mask[r * (n + rows) + n :][:rows] for mask, n in zip(cells, lengths, strict=True) for r in range(rows)]
    square = torch.tensor(list(itertools.chain(*trees)))
    expected = {FULL: full, QLEN: square}
    if rows <= 32:
        dtype = torch.uint8 if rows <= 8 else torch.uint16 if rows <= 16 else torch.uint32
        expected[BITS] = torch.tensor([sum(bit << c for c, bit in enumerate(row)) for row in trees], dtype=dtype)
    for mode, mask in expected.items():
        made = mask_from_ancestors(words, mode, seq_lens, rows)
        assert made.dtype == mask.dtype and made.tolist() == mask.tolist(), mode
        assert torch.equal(ancestors_from_mask(mask, mode, seq_lens, rows), words), mode
        longer = torch.cat((mask, mask.new_ones(9)))  # a preallocated buffer
        assert torch.equal(ancestors_from_mask(longer, int(mode), seq_lens, rows), words), mode
    assert torch.equal(ancestors_from_mask(square.to(torch.uint8), QLEN, seq_lens, rows), words)

    segments = [np.packbits(np.array(mask, dtype=bool), bitorder="little") for mask in cells]
    packed, indptr = packed_from_ancestors(words, seq_lens, rows)
    assert packed.tolist() == np.concatenate(segments).tolist() and packed.dtype == torch.uint8
    assert indptr.tolist() == [0, *itertools.accumulate(map(len, segments))] and indptr.dtype == torch.int32
    assert torch.equal(ancestors_from_packed(packed, indptr, seq_lens, rows), words)


def test_the_prefix_of_a_mask_is_not_read():
    _, words = forest(2, 5)
    seq_lens = torch.tensor([7, 3])
    mask = mask_from_ancestors(words, FULL, seq_lens, 5)
    for b, start in enumerate((0, 5 * 12)):
        n = int(seq_lens[b])
        mask[start:][: 5 * (n + 5)].view(5, n + 5)[:, :n] = False
    assert torch.equal(ancestors_from_mask(mask, FULL, seq_lens, 5), words)


def test_an_empty_batch():
    words, none = torch.empty(0, 1, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    for mode in TreeMask:
        mask = mask_from_ancestors(words, mode, none, 4)
        assert mask.shape == (0,) and torch.equal(ancestors_from_mask(mask, mode, none, 4), words)
    packed, indptr = packed_from_ancestors(words, none, 4)
    assert packed.shape == (0,) and indptr.tolist() == [0]


def test_refused_masks():
    _, words = forest(1, 4)
    one, mask = torch.tensor([3]), torch.ones(16, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"FULL_MASK \(0\), QLEN_ONLY \(1\), QLEN_ONLY_BITPACKING \(2\), got 3"):
        ancestors_from_mask(mask, 3, one, 4)
    with pytest.raises(ValueError, match="at most 32 rows, got 33"):
        ancestors_from_mask(mask, BITS, one, 33)
    with pytest.raises(ValueError, match="1 to 256 rows, got 257"):
        mask_from_ancestors(words, QLEN, one, 257)
    with pytest.raises(ValueError, match="1 to 256 rows, got 0"):
        packed_from_ancestors(words, one, 0)
    with pytest.raises(ValueError, match=r"QLEN_ONLY must be \[16 or more\] torch.bool or torch.uint8, got \[15\]"):
        ancestors_from_mask(mask[1:], QLEN, one, 4)
    with pytest.raises(
        ValueError, match=r"QLEN_ONLY_BITPACKING must be \[12 or more\] torch.uint16, got \[16\] torch.b"
    ):
        ancestors_from_mask(mask, BITS, one, 12)
    with pytest.raises(ValueError, match=r"ancestor words \[8, 1\] int64, got \[4, 1\] torch.int64"):
        mask_from_ancestors(words, QLEN, torch.tensor([3, 3]), 4)
    with pytest.raises(ValueError, match=r"\[bytes\] uint8 and indptr \[2\], got \[16\] torch.bool and \[2\]"):
        ancestors_from_packed(mask, torch.tensor([0, 2]), one, 4)


# --- K/V

HEADS = 4
KV_HEADS = 2
D = 16


def pool(page_size: int, lengths: tuple[int, ...], rows: int, dtype: torch.dtype) -> SimpleNamespace:
    """K/V of one layer as SGLang keeps it: slots in whole pages, given out in random order, and NaN in all others."""
    generator = torch.Generator().manual_seed(page_size)
    pages = [-(-(n + rows) // page_size) for n in lengths]
    free = iter((torch.randperm(sum(pages) + 3, generator=generator) + 1).tolist())  # SGLang pads with page 0
    slots = (sum(pages) + 4) * page_size
    k, v = (torch.full((slots, KV_HEADS, D), float("nan"), dtype=dtype) for _ in "kv")
    req_to_token = torch.full((len(lengths) + 2, 40), -1, dtype=torch.int32)
    req_pool_indices = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    keys, values = [], []
    for request, n, count in zip(req_pool_indices, lengths, pages, strict=True):
        tokens = [page * page_size + offset for page in itertools.islice(free, count) for offset in range(page_size)]
        tokens = torch.tensor(tokens[: n + rows])
        req_to_token[request, : n + rows] = tokens.int()
        keys.append(torch.randn(n + rows, KV_HEADS, D, generator=generator, dtype=dtype))
        values.append(torch.randn(n + rows, KV_HEADS, D, generator=generator, dtype=dtype))
        k[tokens], v[tokens] = keys[-1], values[-1]
    return SimpleNamespace(**{name: value for name, value in locals().items() if name in
        ("k", "v", "req_to_token", "req_pool_indices", "keys", "values")})  # fmt: skip


def direct(q: torch.Tensor, held: SimpleNamespace, parents: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Attention in float64 with a mask built cell by cell."""
    rows, out = parents.shape[1] + 1, []
    for b, mask in enumerate(naive_full(parents, lengths, rows)):
        k, v = (x[b].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (held.keys, held.values))
        scores = torch.einsum("rhd,chd->hrc", q[b * rows :][:rows].double(), k) * 0.3
        seen = torch.tensor(mask).view(rows, -1)
        out.append(torch.einsum("hrc,chd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_attention_over_the_pool(page_size):
    """tree_attention on SGLang's own memory, with either table, equals attention over each request's K/V."""
    lengths, rows = (9, 0, 21), 6
    held = pool(page_size, lengths, rows, torch.float64)
    parents, words = forest(3, rows, seed=3)
    q = torch.randn(3 * rows, HEADS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k, v = paged(held.k, page_size), paged(held.v, page_size)
    assert k.data_ptr() == held.k.data_ptr() and v.data_ptr() == held.v.data_ptr()
    assert k.shape == (len(held.k) // page_size, page_size, KV_HEADS, D)
    seq_lens = torch.tensor(lengths)
    mask = mask_from_ancestors(words, FULL, seq_lens, rows)
    words = ancestors_from_mask(mask, FULL, seq_lens, rows)
    ends = torch.tensor([0, *itertools.accumulate(n + rows for n in lengths)])
    indices = torch.cat([held.req_to_token[r, : n + rows] for r, n in zip(held.req_pool_indices, lengths, strict=True)])
    expected = direct(q, held, parents, lengths)
    for table in (
        table_from_requests(held.req_to_token, held.req_pool_indices, page_size),
        table_from_requests(held.req_to_token, held.req_pool_indices, page_size, max_len=27),
        table_from_indices(ends, indices, 27, page_size),
    ):
        assert table.dtype == torch.int32 and table.shape[0] == 3
        out, _ = tree_attention(q, k, v, table, *verify_lengths(seq_lens, rows), words, 0.3)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_kernel_reads_the_pool(page_size):
    """The Triton kernel takes pages of one token; its interpreter computes in float32 here."""
    lengths, rows = (9, 21), 5
    held = pool(page_size, lengths, rows, torch.float32)
    parents, words = forest(2, rows, seed=4)
    q = torch.randn(2 * rows, HEADS, D, generator=torch.Generator().manual_seed(1))
    table = table_from_requests(held.req_to_token, held.req_pool_indices, page_size, max_len=26)
    place = table, *verify_lengths(torch.tensor(lengths), rows)
    out, _ = launch(q, paged(held.k, page_size), paged(held.v, page_size), *place, words, 0.3)
    torch.testing.assert_close(out.double(), direct(q, held, parents, lengths), rtol=0, atol=2e-6)


def test_refused_pools():
    with pytest.raises(ValueError, match=r"in pages of 4 slots, got \[10, 2, 16\]"):
        paged(torch.zeros(10, 2, 16), 4)
    with pytest.raises(ValueError, match=r"in pages of 1 slots, got \[10, 16\]"):
        paged(torch.zeros(10, 16))


# --- token maps


def test_token_maps(tmp_path):
    """SGLang loads a list with torch.load(weights_only=True) and makes an int64 tensor of it."""
    ids = torch.tensor([40, 2, 17, 0])
    write_token_map(tmp_path / "freq_4.pt", ids)
    loaded = torch.load(tmp_path / "freq_4.pt", weights_only=True)
    assert loaded == ids.tolist()
    assert torch.equal(read_token_map(tmp_path / "freq_4.pt"), ids)
    torch.save(torch.tensor([5, 9, 1], dtype=torch.int32), tmp_path / "freq_3.pt")
    assert read_token_map(tmp_path / "freq_3.pt").tolist() == [5, 9, 1]
    with pytest.raises(ValueError, match=r"must have the suffix \.pt, got freq\.npy"):
        write_token_map(tmp_path / "freq.npy", ids)
    with pytest.raises(ValueError, match="no such token map"):
        read_token_map(tmp_path / "absent.pt")
    data = (tmp_path / "freq_4.pt").read_bytes()
    (tmp_path / "freq_4.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="cannot be read as a list of ids"):
        read_token_map(tmp_path / "freq_4.pt")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([4, 9, 4], "has the id 4 2 times"),
        ([4, -1], "has the id -1"),
        ([0.5, 1.0], "vector of integers"),
        ({"a": 1}, "not a list of integers"),
        ([], "ranks no ids"),
    ],
)
def test_a_file_that_is_no_token_map(tmp_path, value, words):
    torch.save(value, tmp_path / "freq.pt")
    with pytest.raises(ValueError, match=words):
        read_token_map(tmp_path / "freq.pt")


class Thing:
    """What a list of ids is not."""


def test_a_pickle_is_not_read(tmp_path):
    torch.save(Thing(), tmp_path / "freq.pt")
    with pytest.raises(ValueError, match="was not read: it holds Python objects besides tensors") as caught:
        read_token_map(tmp_path / "freq.pt")
    assert "weights_only" not in str(caught.value)


# --- SGLang's own builder


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """sglang's spec_tree.py, with its Triton kernel in the interpreter. What it imports from sglang only detects the
    platform, and would import all of SGLang."""
    found = importlib.util.find_spec("sglang")
    file = found and Path(found.submodule_search_locations[0]) / "kernels/ops/speculative/spec_tree.py"
    if not file or not file.is_file():
        pytest.skip("sglang with kernels/ops/speculative/spec_tree.py is not installed: pip install --no-deps sglang")
    names = ("is_cpu", "is_cuda", "is_hip", "is_musa", "is_npu", "is_xpu")
    dummy_parts = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.utils": {name: lambda: False for name in names},
        "sglang.srt.platforms": {"current_platform": None},
        "sglang.srt.platforms.interface": {"reject_out_of_tree_path": None},
    }  # fmt: skip
    for name, members in dummy_parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("sglang_spec_tree", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def beam(B: int, topk: int, depth: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A draft as SGLang keeps it: parent_list [B, topk * (depth - 1) + 1], the chosen tokens' places [B, rows - 1] in
    the list of all candidates; and parents [B, rows - 1] as rows."""
    lists, chosen, parents = [], [], []
    generator = random.Random(7)
    for _ in range(B):
        score = {place: generator.random() for place in range(topk)}
        up: dict[int, int | None] = dict.fromkeys(range(topk))
        front, listed = list(range(topk)), [-1, *range(topk)]
        for level in range(1, depth):
            first = topk + topk * topk * (level - 1)
            for n, place in enumerate(front):
                for child in range(first + n * topk, first + (n + 1) * topk):
                    score[child], up[child] = score[place] * generator.random(), place
            front = sorted(range(first, first + topk * topk), key=score.get, reverse=True)[:topk]
            listed += front
        places = sorted(sorted(score, key=score.get, reverse=True)[: rows - 1])
        lists.append(listed[: topk * (depth - 1) + 1])
        chosen.append(places)
        parents.append([0 if up[place] is None else 1 + places.index(up[place]) for place in places])
    return torch.tensor(lists), torch.tensor(chosen), torch.tensor(parents)


@pytest.mark.parametrize(("topk", "depth", "rows"), [(1, 4, 5), (3, 3, 8), (4, 4, 20)])
def test_equals_sglangs_builder(builder, topk, depth, rows):
    seq_lens = torch.tensor([4, 0, 11])
    parent_list, chosen, parents = beam(3, topk, depth, rows)
    words = torch.cat([ancestor_words(tree) for tree in parents])
    for mode in (builder.TreeMaskMode.FULL_MASK, builder.TreeMaskMode.QLEN_ONLY):
        size = 3 * rows * rows + (int(seq_lens.sum()) * rows if mode == FULL else 0)
        mask = torch.ones(size, dtype=torch.bool)
        positions = torch.zeros(3 * rows, dtype=torch.int64)
        links = torch.full((3, 3, rows), -1)
        tree = parent_list, chosen, seq_lens, mask, positions, *links
        builder.sgl_build_tree_kernel_triton(*tree, topk, depth, rows, mode)
        assert torch.equal(ancestors_from_mask(mask, mode, seq_lens, rows), words)
        assert torch.equal(mask_from_ancestors(words, mode, seq_lens, rows), mask)
