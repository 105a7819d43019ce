"""Every op against its reference, on a GPU where there is one: `python bench/gpu/ops.py`, or `... row_linear grow`, or
`... 0/3` for the first of three processes.

The checks are those of the kernels' benches. `make gpu` runs them first, and also under Triton's and NVIDIA's
sanitizers, so they stay small and capture no graph.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from bench.kernels import (
    bench_accept_walk,
    bench_adjust_rows,
    bench_cluster_topk,
    bench_conv_rows,
    bench_delta_rows,
    bench_expert_linear,
    bench_grow,
    bench_kv_calibrate,
    bench_kv_commit,
    bench_kv_project,
    bench_lattice,
    bench_residual_merge,
    bench_row_linear,
    bench_sample_rows,
    bench_settle,
    bench_start_pairs,
    bench_start_rows,
    bench_tree_attention,
    bench_vocab_topk,
)
from bench.kernels.common import DEVICE, Built
from specker.kernels.expert_route import expert_route, expert_route_ref
from specker.kernels.kv_calibrate import rope_table
from specker.kernels.kv_project import kv_project
from specker.kernels.round.place_rows import place_rows
from specker.kernels.round.repeat_rows import repeat_rows
from specker.kernels.tree_attention import ancestor_words, tree_attention, tree_attention_ref

SIZE = 4096 if DEVICE == "cuda" else 256
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
GEMMA4 = (32, 4, 512) if DEVICE == "cuda" else (4, 1, 512)  # heads of a full layer of Gemma 4 31B
MIXTURE = next(iter(bench_expert_linear.MODELS))


def as_on_a_cpu(op: Callable[..., Any], *args: Any) -> None:
    """Integers on the device equal those on a CPU."""
    want = op(*args)
    moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]
    for ours, theirs in zip(op(*moved), want, strict=True):
        assert torch.equal(ours.cpu(), theirs), f"{ours} is not {theirs}"


def places() -> None:
    """A tree's second level in three sequences."""
    parents = torch.tensor([0, 0, 1, 1, 2, 5]).expand(3, 6)
    table = torch.arange(3 * 20, dtype=torch.int32).view(3, 20)
    as_on_a_cpu(place_rows, torch.tensor([5, 130, 300]), 1, 3, 4, parents, table, 16, 320)


def repeats() -> None:
    """Two rows of two sequences, for three layers."""
    table = torch.arange(2 * 20, dtype=torch.int32).view(2, 20)
    words = torch.tensor([[1], [3], [1], [3]])
    ints = torch.tensor([7, 9], dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    as_on_a_cpu(
        repeat_rows, torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 327, 328]), *ints, words, table, 3, 640, 40
    )


def sliding_window() -> None:
    """Two trees whose rows see the last 64 and 300 columns."""
    Hq, Hkv, D = bench_tree_attention.HEADS
    q = torch.randn(18, Hq, D, dtype=DTYPE, device=DEVICE)
    caches = [torch.randn(40, 32, Hkv, D, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    table = torch.randperm(40)[:40].view(2, 20).int()
    words = ancestor_words(torch.tensor([0, 0, 1, 1, 2, 3, 5, 7])).repeat(2, 1)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([500, 95], [9, 9], [0, 9, 18])]
    moved = [x.to(DEVICE) for x in (table, *ints, words)]
    for reach in (64, 300):
        ours, lse = tree_attention(q, *caches, *moved, D**-0.5, reach)
        given = [x.double().cpu() for x in (q, *caches)]
        exact, exact_lse = tree_attention_ref(*given, table, *ints, words, D**-0.5, reach)
        error = max(float((ours.cpu() - exact).abs().max()), float((lse.cpu() - exact_lse).abs().max()))
        assert error < 2e-2, f"reach {reach}: error {error:.2e}"


def eight_bits() -> None:
    """kv_project and kv_calibrate write the bytes that a CPU writes, but for roundings of the products."""
    Hq, Hkv, D, T = 4, 2, 64, 9
    table = rope_table(0.9 ** torch.arange(D / 2), 1.0, 64, DTYPE)
    x, weight = torch.randn(T, SIZE, dtype=DTYPE), torch.randn((Hq + 2 * Hkv) * D, SIZE, dtype=DTYPE) / SIZE**0.5
    scales = torch.full((2, 1, Hkv), 5 / 448).unbind()
    for kind in (torch.int8, torch.float8_e4m3fn):
        found = []
        for device in (DEVICE, "cpu"):
            caches = [torch.zeros(2, 16, Hkv, D, dtype=torch.int8, device=device).view(kind) for _ in "kv"]
            given = [t.to(device) for t in (x, weight, torch.arange(T), torch.arange(T) + 3, table, *scales)]
            kv_project(*given[:2], None, *given[2:5], *caches, k_scale=given[5], v_scale=given[6])
            found.append(torch.stack([c.float().cpu() for c in caches]))
        error = float((found[0] - found[1]).abs().max())
        assert error <= (2 if kind == torch.int8 else 32), f"{kind}: error {error}"


def biased_route() -> None:
    """Sigmoid scores, with a bias that chooses other experts than the logits."""
    logits, bias = torch.randn(3, 8, 32), torch.randn(32) / 4
    got = expert_route(logits.to(DEVICE), 4, True, None, "sigmoid", bias.to(DEVICE), 2.5, 1e-6)
    want = expert_route_ref(logits.double(), 4, True, None, "sigmoid", bias.double(), 2.5, 1e-6)
    for ours, theirs in zip(got, want, strict=True):
        assert float((ours.cpu() - theirs).abs().max()) < 1e-5, f"{ours} is not {theirs}"


def built(build: Callable[..., Built], *args: Any, **how: Any) -> Callable[[], None]:
    """The check of a bench's case."""
    return lambda: build(*args, **how).check()


# The first word is the op.
CHECKS: dict[str, Callable[[], None]] = {
    "row_linear": built(bench_row_linear.build, 8, SIZE, SIZE, "none", 1),
    "row_linear split": built(bench_row_linear.build, 8, SIZE, SIZE, "split", 1),
    "row_linear SiLU": built(bench_row_linear.build, 8, SIZE, 2 * SIZE, "silu_mul", 1),
    "row_linear GELU": built(bench_row_linear.build, 8, SIZE, 2 * SIZE, "gelu_tanh_mul", 1),
    "row_linear of four layers": built(bench_row_linear.build, 8, SIZE, SIZE, "none", 4),
    **{
        f"row_linear {kind}{f'/{group}' if group else ''}": built(
            bench_row_linear.build_quantised, 8, SIZE, 2 * SIZE, "silu_mul", kind, group
        )
        for kind, group in (("int8", None), ("fp8", None), ("int4", 32), ("int4", 128), ("mxfp4", 32))
    },
    "tree_attention": built(bench_tree_attention.build, 8, (1000,)),
    "tree_attention of many rows": built(bench_tree_attention.build, 40, (1000,)),
    "tree_attention of sequences": built(bench_tree_attention.build, 3, (40, 700, 9)),
    "tree_attention heads of 512": built(bench_tree_attention.build, 9, (1000, 60), heads=GEMMA4),
    "tree_attention sliding window": sliding_window,
    "tree_attention sinks": built(bench_tree_attention.build, 8, (1000,), sinks=True),
    "tree_attention int8": built(bench_tree_attention.build, 8, (1000,), kind=torch.int8),
    "tree_attention fp8": built(bench_tree_attention.build, 8, (1000,), kind=torch.float8_e4m3fn),
    "kv_project fp8 cache": eight_bits,
    "vocab_topk": built(bench_vocab_topk.build, 8, 10),
    "vocab_topk noise": built(bench_vocab_topk.build, 8, 10, True),
    **{f"vocab_topk {kind}": built(bench_vocab_topk.build, 8, 10, False, kind) for kind in ("int8", "fp8", "int4")},
    "cluster_topk": built(bench_cluster_topk.build, 8, 1),
    "cluster_topk noise": built(bench_cluster_topk.build, 8, 10, True),
    **{f"cluster_topk {kind}": built(bench_cluster_topk.build, 8, 10, False, kind) for kind in ("int8", "int4")},
    "kv_project": built(bench_kv_project.project, next(iter(bench_kv_project.WIDTHS)), 8),
    "kv_calibrate": built(bench_kv_calibrate.build, 8, True),
    "kv_commit": built(bench_kv_commit.build, 2, 12),
    "residual_merge": built(bench_residual_merge.build, 2, 1, 8, SIZE, False),
    "residual_merge apart": built(bench_residual_merge.build, 2, 1, 8, SIZE, True),
    "residual_merge of a group": built(bench_residual_merge.build, 1, 4, 8, SIZE, False),
    "conv_rows decoding": built(bench_conv_rows.build, 1, 128, DTYPE),
    "conv_rows chunk": built(bench_conv_rows.build, 512, 128, DTYPE),
    "delta_rows decoding": built(bench_delta_rows.build, 1, 128, DTYPE),
    "delta_rows chain": built(bench_delta_rows.build, 20, 128, DTYPE),
    "expert_linear gate and up": built(bench_expert_linear.build, MIXTURE, 8, "silu_mul"),
    "expert_linear down": built(bench_expert_linear.build, MIXTURE, 8, "sum"),
    **{
        f"expert_linear {kind}": built(bench_expert_linear.build, MIXTURE, 8, "silu_mul", kind)
        for kind in ("int4", "mxfp4")
    },
    "expert_route": built(bench_expert_linear.build_all, MIXTURE, 8),
    "expert_route sigmoid": biased_route,
    "sample_rows greedy": built(bench_sample_rows.build, 8, 8 * SIZE, DTYPE, 0.0, 0, 1.0),
    "sample_rows top-k and top-p": built(bench_sample_rows.build, 8, 8 * SIZE, DTYPE, 0.7, 50, 0.9),
    "adjust_rows": built(bench_adjust_rows.build, 8 * SIZE, 500, False),
    "adjust_rows min_p": built(bench_adjust_rows.build, 8 * SIZE, 500, True),
    "accept_walk chain": built(bench_accept_walk.build, 64, True),
    "accept_walk tree": built(bench_accept_walk.build, 64, False),
    "place_rows": places,
    "repeat_rows": repeats,
    "start_rows chain": built(bench_start_rows.build, 8, 9, False),
    "start_rows tree": built(bench_start_rows.build, 8, 61, True),
    "start_pairs chain": built(bench_start_pairs.build, 8, 1, SIZE),
    "start_pairs tree": built(bench_start_pairs.build, 8, 10, SIZE),
    "grow": built(bench_grow.level, 8, 4),
    "prune": built(bench_grow.best, 8, 10, 7, 59),
    "cut_lattice": built(bench_lattice.cut, 8, 16),
    "search_lattice tree": built(bench_lattice.search, 8, 16, 8, False, True),
    "search_lattice beam": built(bench_lattice.search, 8, 16, 3, True, False),
    "settle chain": built(bench_settle.build, 8, 8, 0, False),
    "settle splits": built(bench_settle.build, 8, 8, 0, True),
    "settle tree": built(bench_settle.build, 8, 60, 4, True),
}


def main(only: list[str]) -> None:
    """Check every op, also after one is wrong, and exit with the list of those."""
    torch.manual_seed(0)
    wrong = []
    part = next((word for word in only if "/" in word), "0/1")
    ops = set(only) - {part}
    first, step = map(int, part.split("/"))
    for name, check in list(CHECKS.items())[first::step]:
        if ops and name.split()[0] not in ops:
            continue
        try:
            check()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            print(f"{name}: as its reference", flush=True)
        except torch.AcceleratorError:  # no later call of this process would succeed
            raise
        except Exception as error:  # also errors of compilers
            traceback.print_exc()
            wrong.append(f"{name} is wrong: {type(error).__name__}: {error}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
