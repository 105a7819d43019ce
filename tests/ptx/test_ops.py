"""Compiled ops, executed without a GPU: values against the references, rows alone and among others, no hazard.

The command exits with 1 if a case fails, and `python` then raises with its output. Kernels are compiled in another
process, since a kernel's definition decides whether it is interpreted or compiled.
"""

import re

import pytest
from compile_only import python
from since import since

pytestmark = since("triton", "3.7", "writes no proxy fence between copies and wgmma on sm_90, which PTX asks for")

FLOAT = [
    "residual_merge",
    "row_linear",
    "quantised_linear",
    "expert_linear",
    "quantised_experts",
    "tree_attention",
    "vocab_topk",
    "cluster_topk",
    "drawn_tokens",
    "sample_rows",
    "conv_rows",
    "delta_rows",
    "kv_calibrate",
    "kv_project",
    "kv_commit",
]
INTEGER = [
    "accept_walk",
    "adjust_rows",
    "expert_route",
    "place_rows",
    "start_rows",
    "start_pairs",
    "grow",
    "prune",
    "cut_lattice",
    "search_lattice",
    "settle",
    "repeat_rows",
]


def run(*flags: str) -> list[str]:
    """The ops of the cases that passed."""
    *rows, end = python("-m", "ptx", "--jobs", "1", *flags).splitlines()
    assert end == f"{len(rows)} cases, 0 wrong" and all(": pass" in row for row in rows)
    return [row.split()[0] for row in rows]


def test_the_first_case_of_each_op_on_sm_90() -> None:
    ops = run("--arch", "90", "--dtype", "bf16", "--what", "check", "--first", "1")
    assert sorted(ops) == sorted([*FLOAT, *INTEGER])


@pytest.mark.parametrize("ops", ["row_linear,quantised_linear,tree_attention", "delta_rows"])
def test_rows_are_invariant(ops: str) -> None:
    flags = "--arch", "90", "--dtype", "bf16", "--what", "invariance", "--first", "1"
    assert run(*flags, "--only", ops) == ops.split(",")


def test_a_row_of_delta_rows_takes_few_serial_steps() -> None:
    """One row after 49 columns, which with one step for each column took 11,796 instructions."""
    flags = "--arch", "90", "--dtype", "bf16", "--what", "counters", "--first", "1", "--only", "delta_rows"
    barriers, instructions = re.findall(r"([0-9.]+) barriers a CTA, (\d+) instructions", python("-m", "ptx", *flags))[0]
    assert float(barriers) < 100 and int(instructions) < 4500


def test_products_on_sm_80() -> None:
    flags = "--what", "check", "--first", "1", "--only", "row_linear,tree_attention"
    assert run("--arch", "80", "--dtype", "bf16", *flags) == ["row_linear", "tree_attention"]


def test_every_number_is_exact_in_bfloat16() -> None:
    """Rows of the identity give all numbers, of mxfp4 times all scales that leave them finite. Compiled kernels decode
    two at a time, the interpreter one by one (tests/kernels/test_quantised.py)."""
    program = """
import torch
from ptx.ops import linear
from ptx.launches import simulated
from specker.kernels.quant import Quantized, packed
numbers = packed(torch.arange(128, dtype=torch.uint8).remainder(16).expand(64, 128))
eights = torch.arange(64 * 128).view(64, 128).to(torch.int8)
ones = torch.ones(64, 1)
fours = packed(torch.arange(16, dtype=torch.uint8).repeat(64, 8))
torch.manual_seed(0)
scale = (torch.randn(64, 4) * 2.0 ** torch.randint(-30, 17, (64, 4))).bfloat16()
scale[0] = 0
weights = (
    Quantized(numbers, torch.arange(256).remainder(253).to(torch.uint8).view(64, 4), None),
    Quantized(eights, ones, None),
    Quantized(fours, ones, None),
    Quantized(fours, scale, None),
    Quantized(fours, scale, (scale * torch.randn(64, 4) * 8).bfloat16()),
    Quantized(torch.where(eights & 127 == 127, 0, eights).view(torch.float8_e4m3fn), ones, None),  # without NaN
)
for weight in weights:
    for arch in (80, 90):
        with simulated(arch) as simulation:
            y = linear.launch(torch.eye(128, dtype=torch.bfloat16), weight, None, "none")
        equal = torch.equal(y.T, weight.dequantised(torch.bfloat16))
        print(weight.kind, equal, y.isfinite().all().item(), *simulation.problems())
"""
    rows = [line.split() for line in python("-c", program).splitlines()]
    assert rows == [
        [kind, "True", "True"] for kind in ("mxfp4", "int8", "int4", "int4", "int4", "fp8") for _ in range(2)
    ]


def test_a_norms_weight_is_read_before_the_wait_only_if_it_is_constant() -> None:
    program = """
import torch
from formulas import randn
from ptx.launches import simulated
from specker.kernels.residual_merge import launch
x, weight = (randn(n, 4096, dtype=torch.bfloat16) for n in (2, 1))
for constant in (False, True):
    with simulated(90) as simulation:  # which takes no norm's weight for constant
        launch(x, x[None], weight, 1e-5, constant=constant)
    print(*simulation.problems())
"""
    without, early = python("-c", program).split("\n")[:2]
    assert without == ""
    assert "_residual_merge_kernel: reads storage of (1, 4096) torch.bfloat16 byte 0 of 8192 before" in early


def test_the_next_matrix_is_prefetched_whole_before_the_wait_and_no_bit_changes() -> None:
    program = """
import torch
from formulas import randn
from ptx import ops
from ptx.launches import simulated
from specker.kernels import prefetch
w, x, norm = (randn(n, E, seed=n, dtype=torch.bfloat16) for n, E in ((700, 4096), (2, 512), (1, 512)))
lengths = {"one": ((90, 5),), "several": ((33, 20), (0, 4))}
calls = {name: ops.ragged().ragged(2, torch.bfloat16, Hq=4, Hkv=2, D=64, page=16, lengths=at)[0]
         for name, at in lengths.items()}
work = [lambda args=args: ops.attention.launch(**args, following=w) for args in calls.values()]
for call in (*work, lambda: ops.residual.launch(x, x[None], norm, 1e-5, constant=False, following=w)):
    outs = []
    for prefetch.MEBIBYTES in (0, 3, 8):
        with simulated(90) as simulation:
            outs.append(call())
        assert not simulation.problems(), simulation.problems()
        reports = [each.report for each in simulation.launches]
        same = all(map(torch.equal, outs[0], outs[-1]))
        print(len(reports), sum(r.prefetched for r in reports) / w.nbytes, sum(r.read_bytes for r in reports), same)
"""
    rows = [line.split() for line in python("-c", program).splitlines()]
    for off, part, whole in (rows[:3], rows[3:6], rows[6:]):
        assert (off[0], *off[2:]) == (part[0], *part[2:]) == (whole[0], *whole[2:]) and off[3] == "True"
        assert float(off[1]) == 0 and 0.53 < float(part[1]) <= 0.55 and abs(float(whole[1]) - 1) < 0.01


def test_the_chosen_experts_next_matrices_are_prefetched_and_no_bit_changes() -> None:
    program = """
import torch
from formulas import randn
from ptx import ops
from ptx.launches import simulated
from specker.kernels import prefetch
X, k = 6, 2
gate_up, down = randn(X, 128, 192, dtype=torch.bfloat16), randn(X, 700, 1000, seed=1, dtype=torch.bfloat16)
for T in (1, 70):
    chosen, _, *places = ops.choices(T, X, k)
    outs, bytes_ = [], len(chosen.unique()) * down[0].nbytes
    for prefetch.MEBIBYTES in (0, 1, 16):
        with simulated(90) as simulation:
            outs.append(ops.experts.launch(randn(T, 192, dtype=torch.bfloat16), gate_up, chosen, *places, "silu_mul",
                following=down))
        assert not simulation.problems(), simulation.problems()
        (report,) = [each.report for each in simulation.launches]
        print(report.prefetched / bytes_, report.prefetched / 2**20, report.read_bytes, torch.equal(outs[0], outs[-1]))
"""
    rows = [line.split() for line in python("-c", program).splitlines()]
    for off, part, whole in (rows[:3], rows[3:]):
        assert off[2:] == part[2:] == whole[2:] and off[3] == "True"
        assert float(off[0]) == 0 and 0.5 < float(part[1]) <= 1 and abs(float(whole[0]) - 1) < 0.01


def test_a_text_is_read_once_a_sequence_and_not_by_each_row() -> None:
    program = """
import torch
from ptx.launches import simulated
from specker.kernels.adjust_rows import launch
numbers = torch.tensor([[1.1, 0.5, 0.25, torch.inf]])
for rows, tokens in ((1, 8000), (8, 8000), (8, 100)):
    text, length = torch.arange(tokens)[None], torch.tensor([tokens])
    with simulated(90) as simulation:
        launch(torch.zeros(rows, 8192), text, length // 2, length, text[:, :rows], numbers)
    print(*(each.report.read_bytes for each in simulation.launches), *simulation.problems())
"""
    one, eight, short = (list(map(int, line.split())) for line in python("-c", program).splitlines())
    assert one[0] == eight[0] < 1.5 * 8 * 8000 and eight[1] == short[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("op", FLOAT)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("arch", ["80", "90"])
def test_all_cases(arch: str, dtype: str, op: str) -> None:
    ops = run("--arch", arch, "--dtype", dtype, "--what", "check,invariance", "--only", op)
    assert set(ops) == {op} and len(ops) >= 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ["80", "90"])
def test_all_cases_of_integers(arch: str) -> None:
    ops = run("--arch", arch, "--dtype", "bf16", "--what", "check", "--only", ",".join(INTEGER))
    assert set(ops) == set(INTEGER)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_counters_are_printed() -> None:
    """The bytes that a launch must move are those of the op's cost."""
    out = python("-m", "ptx", "--arch", "90", "--dtype", "bf16", "--what", "counters", "--only", "residual_merge")
    assert "residual_merge T8 P1 Q1 E4096 sm_90 bf16: least 270.3 KB by _cost" in out
    assert "distinct 139.3 and 131.1 KB" in out


@pytest.mark.slow
def test_the_kernels_own_tests_run_on_ptx() -> None:
    which = "tests/kernels/test_residual_merge.py", "-k", "test_kernel and 2-1"
    out = python("-m", "pytest", "-p", "ptx.plugin", "-n", "0", "-m", "gpu or not gpu", *which)
    assert "executed PTX: 16 launches of _residual_merge_kernel" in out
