"""tree_attention on the heads of four models, and against SDPA with a dense mask, FlexAttention and FlashInfer on those
of Llama-3-8B (32 of 8, D 128).

Up to 16 rows the limit is one read of K and V, 4 KiB per column and sequence: 8 us at an H200's 4.3 TB/s for 8,192
columns. The overheads are the start (lengths, then the page, then the first tiles: three round trips to memory), the
merge by the last program of each KV head, and the partials: for 16 rows 32 KiB per split and KV head, against 1 MiB of
K and V at 1,024 columns. At 64 rows four tiles of 64 (row, head) pairs share K and V through the L2 cache, and the
matrix units and exponentials take as long as the read. The baselines get K and V gathered and contiguous, and the mask
built, at no cost; "sdpa" has the query heads of a KV head packed as rows, which reads K and V once.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.kernels.narrow import NARROW, narrowed
from specker.kernels.quant import LARGEST
from specker.kernels.tree_attention import ancestor_words, tree_attention, tree_attention_cost

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
HEADS = (32, 8, 128) if DEVICE == "cuda" else (4, 2, 32)
MODELS = ((32, 8, 64), HEADS, (16, 4, 256), (32, 4, 512))  # Llama-3.2-1B, 3-8B, Qwen3.5-9B, full layers of Gemma 4 31B
SHARES = {8192: 0.50, 32768: 0.72, 131072: 0.85}  # goals of one tile of rows with D 128, by columns
PAGE = 256


def build(
    rows: int,
    lengths: tuple[int, ...],
    page: int = PAGE,
    kind: torch.dtype | None = None,
    sinks: bool = False,
    heads: tuple[int, int, int] = HEADS,
    alone: bool = False,
) -> Built:
    """One random tree per sequence, `rows` rows with the root, at the end of its `lengths` columns; pages permuted.
    With a `kind` of eight bits the baselines read the same numbers in sixteen. They have no sinks. `heads`: query
    heads, KV heads and their size. `alone`: without baselines, two of which compile for seconds."""
    Hq, Hkv, D = heads
    g = torch.Generator().manual_seed(0)
    B, widest = len(lengths), -(-max(lengths) // page)
    scale = D**-0.5
    q = torch.randn(B * rows, Hq, D, dtype=DTYPE, device=DEVICE)
    k, v = torch.randn(2, B * widest, page, Hkv, D, dtype=DTYPE, device=DEVICE).unbind(0)
    cache, scales = (k, v), {}
    if kind is not None:
        by = torch.full((1, Hkv), 4 / LARGEST[NARROW[kind]], device=DEVICE)
        cache = narrowed(k.flatten(0, 1), by, kind).view(k.shape), narrowed(v.flatten(0, 1), by, kind).view(v.shape)
        k, v = ((x.float() * by[0, :, None]).to(DTYPE) for x in cache)
        scales = {"k_scale": by, "v_scale": by}
    sink = torch.linspace(-2, 2, Hq, device=DEVICE)[None] if sinks else None
    table = torch.randperm(B * widest, generator=g).view(B, widest).to(DEVICE, torch.int32)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    window = torch.full((B,), rows, dtype=torch.int32, device=DEVICE)
    cu_rows = torch.arange(B + 1, dtype=torch.int32, device=DEVICE) * rows
    parents = [torch.tensor([int(torch.randint(n + 1, (), generator=g)) for n in range(rows - 1)]) for _ in lengths]
    words = torch.cat([ancestor_words(p.long()) for p in parents])
    column = torch.arange(rows)
    seen = (words[:, column // 64] >> column % 64 & 1).bool().view(B, rows, rows).to(DEVICE)
    words = words.to(DEVICE)

    def ours() -> tuple[Tensor, Tensor]:
        return tree_attention(q, *cache, table, kv_len, window, cu_rows, words, scale, sinks=sink, **scales)

    # Inputs of the baselines, per sequence: [1, heads, length, D] and a mask [rows, length].
    q_of = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in q.split(rows)]
    k_of, v_of = (
        [c[table[b].long()].flatten(0, 1)[:n].transpose(0, 1).unsqueeze(0).contiguous() for b, n in enumerate(lengths)]
        for c in (k, v)
    )
    masks = [torch.cat((s.new_ones(rows, n - rows), s), dim=1) for s, n in zip(seen, lengths, strict=True)]
    packed_q = [x.unflatten(1, (Hkv, -1)).flatten(2, 3) for x in q_of]  # heads of a KV head, then rows
    packed_masks = [torch.zeros(m.shape, dtype=DTYPE, device=DEVICE).masked_fill_(~m, -torch.inf) for m in masks]
    packed_masks = [None if rows == 1 else m.repeat(Hq // Hkv, 1)[None, None] for m in packed_masks]

    def dense() -> list[Tensor]:
        return [
            sdpa(x, y, z, attn_mask=m, scale=scale)
            for x, y, z, m in zip(packed_q, k_of, v_of, packed_masks, strict=True)
        ]

    def check() -> None:
        out, lse = ours()
        if sink is not None:  # as if the sinks were not there
            out = out / (1 - (sink - lse).exp()).unsqueeze(-1)
        out = out.split(rows)
        for b, theirs in enumerate(dense()):
            theirs = theirs.reshape(Hq, rows, D)
            ours_error = theirs_error = 0.0
            for h in range(Hq):
                kv = h * Hkv // Hq
                score = (q_of[b][0, h].double() @ k_of[b][0, kv].double().T * scale).masked_fill(~masks[b], -torch.inf)
                exact = score.softmax(-1) @ v_of[b][0, kv].double()
                ours_error = max(ours_error, float((out[b][:, h] - exact).abs().max()))
                theirs_error = max(theirs_error, float((theirs[h] - exact).abs().max()))
            assert ours_error <= max(2 * theirs_error, 5e-7), (
                f"sequence {b}: error {ours_error:.2e}, torch's {theirs_error:.2e}"
            )

    ways: dict[str, Callable[[], Any]] = {"specker": ours} | ({} if alone else {"sdpa": dense})
    if DEVICE == "cuda" and B == 1 and not alone:
        ways |= flex(q_of[0], k_of[0], v_of[0], seen[0], scale) | flashinfer(q, k_of[0], v_of[0], masks[0], scale)
    return Built(ways, check, tree_attention_cost(q, cache[0], lengths, [rows] * B))


def flex(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> dict[str, Callable[[], Any]]:
    rows, columns = q.shape[2], k.shape[2]
    prefix = columns - rows

    def visible(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column < prefix) | seen[row, (column - prefix).clamp(min=0)]

    @cache
    def built() -> Callable[[], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # dynamo stops compiling a function after eight shapes
        mask = create_block_mask(visible, None, None, rows, columns, device=q.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)

    return {"flex_attention": lambda: built()()}


def flashinfer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> dict[str, Callable[[], Any]]:
    """FlashInfer with a custom mask, if installed."""
    k, v = (x[0].transpose(0, 1).contiguous() for x in (k, v))

    @cache
    def built() -> Callable[[], Any]:
        from flashinfer import packbits, single_prefill_with_kv_cache

        bits = packbits(mask.flatten(), bitorder="little")
        return lambda: single_prefill_with_kv_cache(q, k, v, packed_custom_mask=bits, sm_scale=scale)

    return {"flashinfer": lambda: built()()}


def cases() -> Iterator[Case]:
    if DEVICE == "cpu":
        for rows, lengths in ((1, (300,)), (16, (300,)), (64, (1024,)), (16, (40, 300))):
            yield Case(f"B {len(lengths)}, {rows} rows, {max(lengths)}", lambda r=rows, n=lengths: build(r, n))
        yield Case("B 1, 16 rows, 300, fp8", lambda: build(16, (300,), kind=torch.float8_e4m3fn))
        yield Case("B 1, 16 rows, 300, sinks", lambda: build(16, (300,), sinks=True))
        yield Case("B 1, 8 rows, 300, D 64", lambda: build(8, (300,), heads=(4, 1, 64), alone=True))
        return
    for heads in MODELS:
        for length, share in SHARES.items():
            for rows in (1, 8, 48, 64):
                goal = Goal(share=share) if heads == HEADS and rows <= 8 else Goal()
                given = rows, (length,), PAGE, None, False, heads, True
                yield Case(f"B 1, {rows} rows, {length}, D {heads[-1]}", lambda given=given: build(*given), goal)
    goal = Goal(share=0.65, over=(("sdpa", 2.0), ("flex_attention", 1.0)))
    yield Case("B 1, 64 rows, 32768", lambda: build(64, (32768,)), goal)
    yield Case("B 1, 16 rows, 32768, pages of 16", lambda: build(16, (32768,), 16))
    for kind in NARROW:
        name = f"B 1, 16 rows, 32768, {NARROW[kind]}"
        yield Case(name, lambda n=kind: build(16, (32768,), kind=n), Goal(share=0.6, over=(("sdpa", 1.5),)))
    yield Case("B 1, 16 rows, 32768, sinks", lambda: build(16, (32768,), sinks=True), Goal(share=0.72))
    mixed = (512, 1000, 2048, 3000, 4096, 6000, 8192, 10000, 12000, 16384, 20000, 24000, 32768, 777, 1500, 5000)
    yield Case("B 16, 16 rows, mixed", lambda: build(16, mixed), Goal(share=0.75))


test_tree_attention = common.benchmarks(cases())

if __name__ == "__main__":
    common.main("tree_attention", cases())
