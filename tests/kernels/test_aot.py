"""Every op's kernels compile for sm_90 and gfx942 without a GPU and pass ptxsim's checks; the slow tests compile for
sm_80, sm_100 and gfx950 too. `make static` compiles all variants; these tests compile those marked `smoke`.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compile_only import compilations, keys, python
from since import since

from bench import overlap, static
from specker.kernels import variant
from specker.kernels.variant import Variant


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


MORE = [(942, 0), (942, 1), (80, "all"), (90, "all"), (100, "all"), (950, 0), (950, 1)]
AMD = pytest.param(942, "kernels", marks=since("triton", "3.7", "reads less at a time on AMD"))
EACH = [(90, "kernels"), AMD, *(slow(*each) for each in MORE)]


def reports_of(arch, part) -> list[dict]:
    """AMD's variants have two forms of addresses: each half has every variant in one of them. "kernels" has the first
    variant of each kernel, or on sm_90, where tests/ptx compiles others, the last; most of Triton's compiler does not
    know the architecture."""
    program = f"""
import json, dataclasses
from bench import static
items = static.items(({arch},), [], smoke=True)
if {part!r} == "kernels":
    kernels = [static.variants(op, arch)[n].kernel for op, arch, n, _ in items]
    first = {{kernel: kernels.index(kernel) for kernel in kernels}}
    last = {{kernel: n for n, kernel in enumerate(kernels)}}
    forms = [at + n % 2 for n, at in enumerate(first.values())]
    items = [items[n] for n in (last.values() if {arch} == 90 else forms)]
elif {part!r} != "all":
    items = [item for n, item in enumerate(items) if (n + n // 2) % 2 == {part!r}]
for op, row in static.reports(items):
    print(json.dumps({{"op": op, **dataclasses.asdict(row)}}))
"""
    return [json.loads(line) for line in python("-c", program).splitlines()]


@pytest.mark.parametrize(("arch", "part"), EACH)
def test_every_op_with_kernels_is_compiled_and_has_no_problems(arch, part):
    reports, found = reports_of(arch, part), set(static.ops())
    assert {"residual_merge", "kv_calibrate", "kv_commit", "accept_walk", "place_rows", "repeat_rows"} <= found
    assert {r["op"] for r in reports} == found
    assert [(r["op"], r["variant"], r["arch"], p) for r in reports for p in r["problems"]] == []
    for r in reports:
        assert (
            0 < r["registers"] <= (512 if r["arch"] in variant.AMD else 255)
            and r["blocks"] >= 1
            and r["loads"] > 0
            and r["stores"] > 0
        ), r


@pytest.mark.parametrize("part", [0, *map(slow, range(1, 5))])
def test_attentions_rows_stay_within_a_warp(part):
    """On sm_80 a tile of columns waits at the three barriers of its copies, and at none for a row's maximum and sum. It
    is Triton's choice, which the kernel only invites."""
    program = f"""
import re
from bench.builds import build
from specker.kernels.tree_attention import variants
own = [v for v in variants(80) if v.constexprs.get("OWN") and not v.constexprs["APART"]]
for variant in own[{part}::5]:
    ptx = build(variant, 80).compile().asm["ptx"].splitlines()
    at = {{line.split(":")[0]: i for i, line in enumerate(ptx) if line.startswith("$L")}}
    jumps = ((i, re.search(r"bra(?:\\.uni)? \\s*([$]L\\w+);", line)) for i, line in enumerate(ptx))
    loops = [ptx[at[to[1]] : i] for i, to in jumps if to and at[to[1]] < i]
    tiles = [loop for loop in loops if any("mma.sync" in line for line in loop)]
    print(min(sum("bar.sync" in line for line in loop) for loop in tiles))
"""
    assert set(python("-c", program).split()) == {"3"}


@since("triton", "3.7", "has other keys in its cache for a launch")
@pytest.mark.parametrize("arch", [90, 942])
def test_a_launch_finds_what_static_compiled(arch):
    """Both have the same key in Triton's cache, which can therefore be filled on a machine without a GPU. Triton's
    marks of the arguments are part of it: alignment, and on AMD that a tensor takes less than 2 GiB."""
    found = keys(arch)
    kernels = {v.kernel.__name__ for module in static.ops().values() for v in module.variants(arch)}
    assert found.keys() == kernels
    assert {name for name, pairs in found.items() for launched, compiled in pairs if launched != compiled} == set()


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
    assert compilations("tests/support/bad_kernels.py") == {"_scale_kernel": 1, "_specialising_kernel": 3}


def test_neighbours_of_a_norm_are_together_too():
    kernels: list = [(name, None) for name in ("norm", "a", "b", "norm", "a")]
    groups = [" ".join(name for name, _ in group) for group in overlap.neighbours(kernels)]
    assert groups == ["norm a", "a b", "b norm", "b norm a"]


def test_products_of_eight_bits_are_safe_with_the_older_assembler():
    """Triton 3.9's wheel has two. With the older one, as with the only one of Triton 3.6 and 3.7, a loop of one product
    a tile would decode into registers that the last tile's product may read."""
    program = """
import os
import triton
os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = triton.knobs.nvidia.ptxas.path
from bench.builds import build
from ptxsim import static
from specker.kernels.row_linear import variants
for variant in variants(90):
    if variant.smoke and variant.name.endswith("int8/4096 few"):
        done = build(variant, 90).compile()
        print(static.warpgroups(done.asm["ptx"], static.disassembly(done.asm["cubin"])))
"""
    assert python("-c", program).splitlines() == ["()"]


def test_weights_are_decoded_in_few_instructions():
    """A tile of 64 rows and 128 columns leaves an H200's warps some 497 instructions each, by the time of its loads."""
    program = """
import torch
from bench.builds import build
from ptxsim import static_report
from specker.kernels.row_linear import Product, _variants
from specker.kernels.tiles import COMMON, MXFP4
for form in (*COMMON[:2], *COMMON[3:5], MXFP4):
    product = Product(torch.bfloat16, 28672, 4096, 90, form=form, few=True)
    report = static_report(build(_variants(product, "silu_mul")[0], 90))
    print(form.kind, form.group, report.loop, report.registers, report.problems)
"""
    most = {
        ("int8", "4096"): (245, 60),
        ("fp8", "4096"): (275, 72),
        ("int4", "32"): (230, 84),
        ("int4", "128"): (240, 96),
        ("mxfp4", "32"): (320, 96),
    }
    rows = [line.split(maxsplit=4) for line in python("-c", program).splitlines()]
    assert [(kind, group) for kind, group, *_ in rows] == [*most]
    for kind, group, loop, registers, problems in rows:
        instructions, own = most[kind, group]
        assert 100 < int(loop) <= instructions and int(registers) <= own and problems == "()", (kind, group)


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


def test_the_next_kernel_starts_after_the_loop():
    program = """
import itertools, re
from bench.builds import build
from specker.kernels.row_linear import variants
variant = next(v for v in variants(90) if v.smoke)
ptx = build(variant, 90).compile().asm["ptx"]
found = re.findall(r"griddepcontrol\\.(\\w+)|(wgmma)\\.mma", ptx)
print(*(name for name, _ in itertools.groupby("".join(each) for each in found)))
"""
    assert python("-c", program).split() == ["wait", "wgmma", "launch_dependents"]


def test_what_the_last_program_of_kv_project_needs_is_loaded_before_it_arrives():
    """Positions and slots, the only loads of 8 bytes; then the rope's rows need no further wait."""
    program = """
import re
from bench.builds import build
from specker.kernels.kv_project import variants
variant = next(v for v in variants(90) if v.name.endswith(" few"))
print(*re.findall(r"ld\\.global\\.b64|atom", build(variant, 90).compile().asm["ptx"]))
"""
    assert python("-c", program).split() == ["ld.global.b64", "ld.global.b64", "atom"]


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
from bench.builds import build
from specker.kernels import variant
from specker.kernels.residual_merge import variants
for variant.DELAYED in ("", "_residual_merge_kernel"):
    ptx = build(next(variants(90)), 90).compile().asm["ptx"]
    marks = {"griddepcontrol.launch_dependents": "start", "nanosleep.u32": "sleep", "st.global": "store"}
    found = [name for line in ptx.splitlines() for mark, name in marks.items() if mark in line]
    print(*dict.fromkeys(found))
"""
    assert python("-c", program).splitlines() == ["store start", "start sleep store"]
