"""What kernels compile to, and how a fault of it is reported."""

import json
from dataclasses import replace

from command import python

from ptxsim import Build, StaticReport, side_by_side, static


def test_each_problem_is_reported():
    program = """
import dataclasses, json
import bad_builds, ptxsim
for build in bad_builds.builds():
    print(json.dumps(dataclasses.asdict(ptxsim.static_report(build))))
try:
    bad_builds.specialising().compile()
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


def test_limits_and_left_operands():
    used, build = {"STACK": 0, "LOCAL": 0}, Build("x", None, (), {}, 90, dot=True)
    found = [
        static.problems(replace(build, left=left), used, 0, {"matrix": m, "wide": 1.0})
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
    greedy = [
        static.problems(replace(build, arch=arch, dot=False), used, 164 * 1024, {"matrix": "", "wide": 1.0})
        for arch in (80, 90, 100)
    ]
    assert greedy == [("167936 bytes of shared memory, a block may have 166912",), (), ()]


def test_occupancy_is_bounded_by_each_resource():
    assert static.blocks_per_sm(90, warps=4, registers=32, shared=0) == 16  # warps
    assert static.blocks_per_sm(90, warps=1, registers=32, shared=0) == 32  # blocks
    assert static.blocks_per_sm(90, warps=4, registers=168, shared=0) == 3  # registers
    assert static.blocks_per_sm(90, warps=4, registers=32, shared=75 * 1024) == 3  # shared memory
    assert static.blocks_per_sm(80, warps=4, registers=32, shared=75 * 1024) == 2


def reported(shared: int = 0, tensor: int = 0, registers: int = 32) -> StaticReport:
    counts = {"matrix": "", "loads": 0, "wide": 1.0, "asynchronous": 0, "stores": 0, "blocks": 1, "loop": 0}
    return StaticReport("kernel", "v", 100, 4, 1, registers, 0, shared, tensor=tensor, problems=(), **counts)


def test_kernels_share_an_sm_if_their_blocks_fit():
    half = 113 * 1024  # with 1 KiB for the system, half of an SM
    assert side_by_side([reported(half)] * 2) == []
    more = [reported(half), reported(half + 1)]
    assert side_by_side(more) == ["233473 bytes of shared memory, an SM has 233472"]
    assert side_by_side([reported(registers=255)] * 2) == []
    assert side_by_side([reported(registers=255)] * 3) == ["98304 registers, an SM has 65536"]
    more = [reported(tensor=256), reported(tensor=512)]
    assert side_by_side(more) == ["768 columns of tensor memory, an SM has 512"]
