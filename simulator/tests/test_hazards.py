"""Faults that are put into PTX on purpose are reported, each by its own problem, and PTX as compiled has none."""

import json
from importlib.metadata import version

import pytest
from command import python

old = tuple(map(int, version("triton").split(".")[:2])) < (3, 7)
pytestmark = pytest.mark.skipif(old, reason="Triton before 3.7 writes no proxy fence between copies and wgmma on sm_90")

UNORDERED_READ = "race: read of global memory that another CTA of the launch writes"
UNORDERED_WRITE = "race: write to global memory that another CTA of the launch reads"
PLAIN = "race: plain write to what is accessed atomically in the same launch"
ATOMIC = "race: atomic on what is plainly accessed in the same launch"
NO_WAIT = "_second_kernel: a CTA ends without griddepcontrol.wait"
EXPECTED = {  # a fault of faults.py or grids.py -> what must be reported
    "copies are not awaited": ["read of shared memory while cp.async is in flight"],
    "copies are awaited late": ["read of shared memory while cp.async is in flight"],
    "copies are not committed": ["read of shared memory while cp.async is in flight"],
    "no barrier after the copies": ["race: read of shared memory that another warp wrote since the last barrier"],
    "copies for wgmma are not awaited": [
        "wgmma reads shared memory while cp.async is in flight",
        "wgmma reads shared memory that nobody wrote",
    ],
    "no barrier before wgmma": ["race: wgmma reads shared memory written since the last barrier"],
    "no proxy fence": ["wgmma reads what threads wrote, without a proxy fence"],
    "an accumulator is written after its fence": ["wgmma without wgmma.fence after its accumulators were written"],
    "wgmma is awaited late": [
        "accumulator of a wgmma in flight is touched",
        "cp.async to shared memory that a wgmma in flight reads",
    ],
    "no barrier in a sum": ["race: read of shared memory that another warp wrote since the last barrier"],
    "a store elsewhere": ["global write of 16 bytes out of bounds at offset"],
    "an odd address": ["misaligned global access"],
    "half of a warp shuffles": ["part of a warp executes a warp-wide instruction"],
    "no barrier before atomics in shared memory": [
        "race: atomic on shared memory that another warp wrote since the last barrier",
    ],
    "no barrier after atomics in shared memory": [
        "race: read of shared memory that another warp wrote since the last barrier",
    ],
    "a plain write after an atomic": [
        "race: write to shared memory that another warp wrote since the last barrier",
    ],
    "threads wait at two barriers": ["threads of a CTA wait at different barriers"],
    "a read beyond the end": ["global read of 4 bytes out of bounds at storage of (100,) torch.int32 byte 400 of 404"],
    "programs write one place": [
        "race: lanes write different values to one place of global memory",
        "race: global memory is written twice, with different values",
    ],
    "programs read what others write": [
        "race: write to global memory that another CTA of the launch reads",
        "race: read of global memory that another CTA of the launch writes",
    ],
    "warps write what others read": [
        "race: write to global memory that another warp read since the last barrier",
    ],
    "a read of new memory": ["read of global memory that nobody wrote, storage of (64,) torch.int32 byte 0 of 256"],
    "the last program, not the last to arrive": [UNORDERED_READ, UNORDERED_WRITE],
    "a relaxed counter": [UNORDERED_READ, UNORDERED_WRITE, PLAIN],
    "a counter without acquire": [UNORDERED_READ, UNORDERED_WRITE, PLAIN],
    "a counter without release": [UNORDERED_READ, UNORDERED_WRITE, PLAIN],
    "a counter for one CTA": [UNORDERED_READ, UNORDERED_WRITE, PLAIN],
    "no barrier before the counter": [UNORDERED_READ, UNORDERED_WRITE],
    "one warp without a barrier before the counter": [UNORDERED_READ, UNORDERED_WRITE],
    "a count one too small": [UNORDERED_READ, UNORDERED_WRITE, ATOMIC],
    "every program resets the counter": [PLAIN, ATOMIC],
    "a chain of flags with a relaxed one": [UNORDERED_READ],
    "no wait": ["byte 0 of 2048 before griddepcontrol.wait", NO_WAIT],
    "a kernel without griddepcontrol": ["_second_kernel: reads storage", NO_WAIT],
    "a read before the wait": ["_second_kernel: reads storage of (512,) torch.float32 byte 0 of 2048 before"],
    "a write before the wait": ["_second_kernel: writes storage of (512,) torch.float32 byte 0 of 2048 before"],
    "an atomic before the wait": ["byte 0 of 2048 before griddepcontrol.wait: PTX line"],
    "copies before the wait": ["_product_kernel: reads storage of (64, 256) torch.bfloat16 byte 0 of 32768 before"],
    "a program returns before it waits": [NO_WAIT],
    "a constant that a launch wrote": ["w_ptr is declared constant, but an earlier launch wrote it"],
    "a constant that the launch writes": ["_second_kernel: write to an argument that is declared constant"],
    "a loop without an end": ["a CTA has not ended after 200 basic blocks, PTX line"],
}


def test_each_fault_is_reported_and_the_original_is_not() -> None:
    rows = {row["name"]: row for row in map(json.loads, python("tests/faults.py").splitlines())}
    assert rows.keys() == EXPECTED.keys()
    assert {name: row["before"] for name, row in rows.items() if row["before"]} == {}
    assert {name: row["unequal"] for name, row in rows.items() if row.get("unequal")} == {}
    assert {name: row["missed"] for name, row in rows.items() if row.get("missed")} == {}
    for name, texts in EXPECTED.items():
        for text in texts:
            assert any(text in problem for problem in rows[name]["after"]), (name, text, rows[name]["after"])
