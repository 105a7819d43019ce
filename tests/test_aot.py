"""Every op's kernels compile for sm_90 and gfx942 without a GPU and pass bench/compilation.py's checks; the slow tests
compile for sm_80, sm_100 and gfx950 too. `make static` compiles all variants; these tests compile those marked `smoke`.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import bad_kernels
import pytest
import torch
from compile_only import compilations, keys, python
from since import since

from bench import compilation, instructions, overlap, static
from specker.kernels import variant
from specker.kernels.variant import Variant

ARCHES = (80, 90, 100)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


MORE = [(942, 0), (942, 1), (80, "all"), (100, "all"), (950, 0), (950, 1)]
AMD = pytest.param(942, "kernels", marks=since("triton", "3.7", "reads less at a time on AMD"))
EACH = [(90, "all"), AMD, *(slow(*each) for each in MORE)]


def reports_of(arch, part) -> list[dict]:
    """AMD's variants have two forms of addresses: each half has every variant in one of them, and "kernels" has one
    variant of each kernel. Most of Triton's compiler does not know the architecture; sm_90 tests it with all."""
    program = f"""
import json, dataclasses
from bench import static
items = static.items(({arch},), [], smoke=True)
if {part!r} == "kernels":
    kernels = [static.variants(op, arch)[n].kernel for op, arch, n, _ in items]
    items = [items[kernels.index(kernel) + n % 2] for n, kernel in enumerate(dict.fromkeys(kernels))]
elif {part!r} != "all":
    items = [item for n, item in enumerate(items) if (n + n // 2) % 2 == {part!r}]
for row in static.reports(items):
    print(json.dumps(dataclasses.asdict(row)))
"""
    return [json.loads(line) for line in python("-c", program).splitlines()]


@pytest.mark.parametrize(("arch", "part"), EACH)
def test_every_op_with_kernels_is_compiled_and_has_no_problems(arch, part):
    reports, found = reports_of(arch, part), set(static.ops())
    assert {"residual", "kv", "accept", "place", "repeat"} <= found
    assert {r["op"] for r in reports} == found
    assert [(r["op"], r["variant"], r["arch"], p) for r in reports for p in r["problems"]] == []
    for r in reports:
        assert (
            0 < r["registers"] <= (512 if r["arch"] in compilation.LDS else 255)
            and r["blocks"] >= 1
            and r["loads"] > 0
            and r["stores"] > 0
        ), r


@pytest.mark.parametrize("part", [0, slow(1), slow(2)])
def test_attentions_rows_stay_within_a_warp(part):
    """On sm_80 a tile of columns waits at the three barriers of its copies, and at none for a row's maximum and sum. It
    is Triton's choice, which the kernel only invites."""
    program = f"""
import re
from bench import compilation
from specker.kernels import attention
own = [v for v in attention.variants(80) if v.constexprs.get("OWN") and not v.constexprs["APART"]]
for variant in own[{part}::3]:
    ptx = compilation.compile_variant(variant, 80).asm["ptx"].splitlines()
    at = {{line.split(":")[0]: i for i, line in enumerate(ptx) if line.startswith("$L")}}
    jumps = ((i, re.search(r"bra(?:\\.uni)? \\s*([$]L\\w+);", line)) for i, line in enumerate(ptx))
    loops = [ptx[at[to[1]] : i] for i, to in jumps if to and at[to[1]] < i]
    tiles = [loop for loop in loops if any("mma.sync" in line for line in loop)]
    print(min(sum("bar.sync" in line for line in loop) for loop in tiles))
"""
    assert python("-c", program).split() == ["3"] * (4 if part == 0 else 3)


def test_each_problem_is_reported():
    program = """
import dataclasses, json
import bad_kernels
from bench import compilation
for variant in bad_kernels.variants():
    print(json.dumps(dataclasses.asdict(compilation.report("bad", variant, 80))))
try:
    compilation.compile_variant(bad_kernels.specialising(), 90)
except ValueError as error:
    print(error)
"""
    *reports, refusal = python("-c", program).splitlines()
    assert "recompiles with n: name it in do_not_specialize" in refusal
    rows = {row["variant"]: row for row in map(json.loads, reports)}
    texts = {name: " ".join(row["problems"]) for name, row in rows.items()}
    assert texts["good"] == texts["bfloat16 dot"] == "" and rows["bfloat16 dot"]["matrix"].startswith("mma ")
    assert "spills" in texts["spilling"]
    assert "no matrix instruction" in texts["float32 dot"]
    assert "come 16 at a time" in texts["narrow"]
    fine = {"STACK": 0, "LOCAL": 0}, {"matrix": "", "wide": 1.0}
    right = next(v for v in bad_kernels.variants() if v.name == "bfloat16 dot")
    found = [
        compilation.problems(replace(right, left=left), 90, fine[0], 0, {"matrix": m, "wide": 1.0})
        for left, m in (
            (True, "wgmma.rs 8"),
            (True, "wgmma 8"),
            (True, "wgmma.rs 8, wgmma 8"),
            (True, "mma 8"),
            (False, "wgmma 8"),
        )
    ]
    from_shared = ("the left operand does not come from registers",)
    assert found == [(), from_shared, from_shared, from_shared, ()]
    greedy = [compilation.problems(next(bad_kernels.variants()), arch, fine[0], 164 * 1024, fine[1]) for arch in ARCHES]
    assert greedy == [("167936 bytes of shared memory, a block may have 166912",), (), ()]


@since("triton", "3.7", "has other keys in its cache for a launch")
@pytest.mark.parametrize("arch", [90, 942])
def test_a_launch_finds_what_static_compiled(arch):
    """Both have the same key in Triton's cache, which can therefore be filled on a machine without a GPU. Triton's
    marks of the arguments are part of it: alignment, and on AMD that a tensor takes less than 2 GiB."""
    found = keys(arch)
    kernels = {v.kernel.__name__ for module in static.ops().values() for v in module.variants(arch)}
    assert found.keys() == kernels
    assert {name for name, pairs in found.items() for launched, compiled in pairs if launched != compiled} == set()


def test_amd_assembly_is_counted():
    text = """
    buffer_load_dwordx4 v[2:5], v1, s[0:3], 0 offen
    global_load_dword v6, v[0:1], off
    global_load_lds_dwordx4 v[8:9], off
    buffer_load_ushort v7, v1, s[0:3], 0 offen
    v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
    global_store_dwordx4 v[0:1], v[2:5], off
    global_atomic_add_x2 v[0:1], v[2:3], off
    .vgpr_count:     130
    .vgpr_spill_count: 2
    .sgpr_spill_count: 1
    .private_segment_fixed_size: 12
    """
    counts = instructions.amd_mix(text)
    assert counts == {"matrix": "mfma 1", "loads": 4, "wide": 32 / 38, "asynchronous": 1, "stores": 2}
    used = instructions.amd_resources(text)
    assert used == {"REG": 130, "STACK": 12, "LOCAL": 2}
    fine = SimpleNamespace(dot=False, left=False, wide=False)
    spilled, large = compilation.problems(fine, 942, used, 65 * 1024, counts)
    assert spilled.startswith("spills") and large == "66560 bytes of shared memory, a block may have 65536"
    assert compilation.blocks_per_cu(942, 4, 130, 24576) == 2  # LDS; 512 / 136 registers: 3 waves a SIMD
    assert compilation.blocks_per_cu(950, 4, 130, 24576) == 3
    assert compilation.blocks_per_cu(942, 1, 20, 0) == 32


WAVES = """
    s_cbranch_execz .LBB0_2
    global_store_dwordx4 v[0:1], v[2:5], off
.LBB0_2:                                ; rows that do not exist
    {wait}
    s_barrier
    {late}
    s_and_saveexec_b64 s[6:7], s[0:1]
    s_cbranch_execz .LBB0_4
    buffer_wbl2 sc1
    s_waitcnt vmcnt(0)
    global_atomic_add v1, v1, v2, s[2:3] sc0
.LBB0_4:
    s_cbranch_scc1 .LBB0_2
    s_endpgm
"""


@pytest.mark.parametrize(
    ("wait", "late", "early"),
    [
        ("s_waitcnt vmcnt(0)", "", 0),
        ("s_waitcnt vmcnt(0) lgkmcnt(0)", "v_mov_b32_e32 v1, 0", 0),
        ("s_waitcnt lgkmcnt(0)", "", 1),
        ("s_waitcnt vmcnt(1)", "", 1),
        ("s_waitcnt vmcnt(0)", "buffer_store_dword v2, v3, s[4:7], 0 offen", 1),
        ("s_waitcnt vmcnt(0)", "buffer_atomic_add v2, v3, s[4:7], 0 offen\n    s_waitcnt vmcnt(0)", 1),
        ("s_cbranch_vccz .LBB0_3\n    s_waitcnt vmcnt(0)\n.LBB0_3:", "", 1),  # one path does not wait
    ],
)
def test_amd_waves_wait_for_their_stores_before_one_counts(wait, late, early):
    assert instructions.published_early(WAVES.format(wait=wait, late=late)) == early


def test_a_single_wave_on_amd_waits_for_its_own_stores_alone():
    """Its barrier is left out, and its release waits."""
    asm = {"amdgcn": WAVES.format(wait="s_waitcnt lgkmcnt(0)", late="")}
    for warps, dot, found in ((1, False, 0), (2, False, 0), (2, True, 1), (4, False, 1)):
        assert len(compilation.misordered(Variant("x", None, (), {}, warps, dot=dot), 942, asm)) == found


def test_amd_gets_its_own_settings(monkeypatch):
    v = Variant("x", SimpleNamespace(arg_names=["x_ptr"]), (), {}, num_warps=8, options={"maxnreg": 128})
    assert v.compile_options(90)["num_warps"] == 8 and v.compile_options(90)["maxnreg"] == 128
    assert v.compile_options(942)["num_warps"] == 4 and "maxnreg" not in v.compile_options(942)
    assert replace(v, dot=True).warps(True) == 8 and replace(v, num_warps=1).warps(True) == 1
    monkeypatch.setattr(variant, "ON_AMD", True)
    for n, (name, arch) in enumerate({"gfx942:sramecc+:xnack-": 942, "gfx950:sramecc+": 950, "gfx1100": 942}.items()):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, name=name: SimpleNamespace(gcnArchName=name))
        assert variant.arch(torch.device("cuda", n)) == arch
    variant.arch.cache_clear()
    assert variant.arch(torch.device("cpu")) == 90


def test_a_launch_that_specialises_is_counted():
    assert compilations("tests/bad_kernels.py") == {"_scale_kernel": 1, "_specialising_kernel": 3}


def test_instructions_are_counted_in_the_ptx():
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.L2::cache_hint.v2.b64 { %rd2, %rd3 }, [ %rd4 + 0 ], %rd5;
    ld.global.b16 { %rs1 }, [ %rd6 + 0 ];
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd7 + 0 ], 0x10, %r6;
    cp.async.commit_group ;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { }, { }, { }, { };
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {
      %r1,%r2,%r3,%r4 }, %rd82, %rd83, %p5, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, {%r5,%r6,%r7,%r8}, %rd83, %p5, 1, 1, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {
      %r1,%r2,%r3,%r4 }, { %r5,%r6,%r7,%r8 }, %rd83, %p5, 1, 1, 0;
    st.global.b32 [ %rd8 + 0 ], { %r7 };
    """
    assert instructions.mix(ptx) == {
        "matrix": "wgmma.rs 2, wgmma 1, mma 1",
        "loads": 4,
        "wide": 48 / 50,
        "asynchronous": 1,
        "stores": 1,
    }


def test_waits_that_ptxas_adds_are_found():
    product, wait = "HGMMA.64x64x16.F32.BF16 R56, R100, gdesc[UR28], R56, gsb0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    one = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    assert compilation.serialised(one, "\n".join([product, wait] * 4))
    assert not compilation.serialised(one, "\n".join([product] * 4 + [wait]))
    assert not compilation.serialised(one, "\n".join([product, wait]))  # as the PTX wants it
    assert not compilation.serialised(one, "")


def test_occupancy_is_bounded_by_each_resource():
    assert compilation.blocks_per_sm(90, warps=4, registers=32, shared=0) == 16  # warps
    assert compilation.blocks_per_sm(90, warps=1, registers=32, shared=0) == 32  # blocks
    assert compilation.blocks_per_sm(90, warps=4, registers=168, shared=0) == 3  # registers
    assert compilation.blocks_per_sm(90, warps=4, registers=32, shared=75 * 1024) == 3  # shared memory
    assert compilation.blocks_per_sm(80, warps=4, registers=32, shared=75 * 1024) == 2


def reported(shared: int = 0, tensor: int = 0, registers: int = 32) -> compilation.Report:
    counts = {"matrix": "", "loads": 0, "wide": 1.0, "asynchronous": 0, "stores": 0, "blocks": 1, "problems": ()}
    return compilation.Report("op", "kernel", "v", 100, 4, 1, registers, 0, shared, tensor=tensor, **counts)


def test_kernels_share_an_sm_if_their_blocks_fit():
    half = 113 * 1024  # with 1 KiB for the system, half of an SM
    assert overlap.side_by_side([reported(half)] * 2) == []
    more = [reported(half), reported(half + 1)]
    assert overlap.side_by_side(more) == ["233473 bytes of shared memory, an SM has 233472"]
    assert overlap.side_by_side([reported(registers=255)] * 2) == []
    assert overlap.side_by_side([reported(registers=255)] * 3) == ["98304 registers, an SM has 65536"]
    more = [reported(tensor=256), reported(tensor=512)]
    assert overlap.side_by_side(more) == ["768 columns of tensor memory, an SM has 512"]
    kernels = [(name, reported()) for name in ("norm", "a", "b", "norm", "a")]
    groups = [" ".join(name for name, _ in group) for group in overlap.neighbours(kernels)]
    assert groups == ["norm a", "a b", "b norm", "b norm a"]


@pytest.mark.parametrize(
    ("arch", "model"),
    [(90, "Llama-3-8B"), *(slow(*each) for each in ((90, "Llama-3.2-1B"), (100, "Llama-3-8B"), (100, "Llama-3.2-1B")))],
)
def test_kernels_of_a_layer_fit_beside_the_next_one(arch, model):
    program = f"""
from bench import overlap
overlap.MODELS = {{"it": overlap.MODELS[{model!r}]}}
for group in overlap.groups({arch}):
    print(group.kernels, group.problems, sep=": ")
"""
    rows = python("-c", program).splitlines()
    assert len(rows) == 9 and "attention, o: []" in rows and "o, norm, gate_up: []" in rows
    assert [row for row in rows if not row.endswith(": []")] == []


def test_tensor_memory_is_counted_and_allocated_before_the_next_kernel_starts():
    alloc = "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], 256;\n"
    start, barrier = "griddepcontrol.launch_dependents ;\n", "bar.sync 0;\n"
    assert instructions.tensor_columns(alloc + barrier + alloc.replace("256", "0x80")) == 384
    assert not any(map(instructions.allocates_late, (alloc + barrier + start, barrier + start, alloc)))
    assert all(map(instructions.allocates_late, (alloc + start, barrier + start + alloc, barrier + alloc + start)))
    assert compilation.misordered(None, 100, {"ptx": alloc + start})
    assert not compilation.misordered(None, 100, {"ptx": alloc})
    assert compilation.blocks_per_sm(100, warps=4, registers=32, shared=0, tensor=256) == 2


def test_the_next_kernel_starts_after_the_loop():
    program = """
import itertools, re
from bench import compilation
from specker.kernels import linear
variant = next(v for v in linear.variants(90) if v.smoke)
ptx = compilation.compile_variant(variant, 90).asm["ptx"]
found = re.findall(r"griddepcontrol\\.(\\w+)|(wgmma)\\.mma", ptx)
print(*(name for name, _ in itertools.groupby("".join(each) for each in found)))
"""
    assert python("-c", program).split() == ["wait", "wgmma", "launch_dependents"]


@pytest.mark.parametrize(
    ("arch", "switch", "on"), [(90, True, True), (100, True, True), (80, True, False), (90, False, False)]
)
def test_programmatic_launches_need_hopper_and_the_switch(monkeypatch, arch, switch, on):
    """Every kernel of a forward starts early, waits, and lets the next one start; others are launched as always."""
    monkeypatch.setattr(variant, "PDL", switch)
    for module in static.ops().values():
        kinds = {v.kernel: v for v in module.variants(arch)}
        for v in kinds.values():
            assert (v.constants(arch)["PDL"] > 0) is on and v.compile_options(arch).get("launch_pdl", False) is on
    v = Variant("x", SimpleNamespace(arg_names=["x_ptr"]), (), {}, num_warps=1)
    assert v.constants(arch) == {} and "launch_pdl" not in v.compile_options(arch)
    assert variant.launched_on(torch.device("cpu")) == 0


def test_one_kernel_at_a_time_sleeps_after_it_let_the_next_start(monkeypatch):
    monkeypatch.setattr(variant, "DELAYED", "_settle_kernel")
    values = {v.kernel.__name__: v.constants(90)["PDL"] for m in static.ops().values() for v in m.variants(90)}
    assert values.pop("_settle_kernel") == 2 and set(values.values()) == {1}
    assert all(v.constants(80)["PDL"] == 0 for m in static.ops().values() for v in m.variants(80))


def test_the_sleep_is_compiled_only_into_the_delayed_kernel():
    program = """
from bench import compilation
from specker.kernels import residual, variant
for variant.DELAYED in ("", "_residual_merge_kernel"):
    ptx = compilation.compile_variant(next(residual.variants(90)), 90).asm["ptx"]
    marks = {"griddepcontrol.launch_dependents": "start", "nanosleep.u32": "sleep", "st.global": "store"}
    found = [name for line in ptx.splitlines() for mark, name in marks.items() if mark in line]
    print(*dict.fromkeys(found))
"""
    assert python("-c", program).splitlines() == ["store start", "start sleep store"]
