"""What is read from PTX and assembly."""

import pytest

from ptxsim import Build, assembly, static


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
    assert assembly.mix(ptx) == {
        "matrix": "wgmma.rs 2, wgmma 1, mma 1",
        "loads": 4,
        "wide": 48 / 50,
        "asynchronous": 1,
        "stores": 1,
    }


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
    counts = assembly.amd_mix(text)
    assert counts == {"matrix": "mfma 1", "loads": 4, "wide": 32 / 38, "asynchronous": 1, "stores": 2}
    used = assembly.amd_resources(text)
    assert used == {"REG": 130, "STACK": 12, "LOCAL": 2}
    spilled, large = static.problems(Build("x", None, (), {}, 942), used, 65 * 1024, counts)
    assert spilled.startswith("spills") and large == "66560 bytes of shared memory, a block may have 65536"
    assert static.blocks_per_cu(942, 4, 130, 24576) == 2  # LDS; 512 / 136 registers: 3 waves a SIMD
    assert static.blocks_per_cu(950, 4, 130, 24576) == 3
    assert static.blocks_per_cu(942, 1, 20, 0) == 32


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
    assert assembly.published_early(WAVES.format(wait=wait, late=late)) == early


def test_a_single_wave_on_amd_waits_for_its_own_stores_alone():
    """Its barrier is left out, and its release waits."""
    asm = {"amdgcn": WAVES.format(wait="s_waitcnt lgkmcnt(0)", late="")}
    assert [len(static.misordered(942, warps, asm)) for warps in (1, 2)] == [0, 1]


def test_waits_that_ptxas_adds_are_found():
    product, wait = "HGMMA.64x64x16.F32.BF16 R56, R100, gdesc[UR28], R56, gsb0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    one = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    assert static.serialised(one, "\n".join([product, wait] * 4))
    assert not static.serialised(one, "\n".join([product] * 4 + [wait]))
    assert not static.serialised(one, "\n".join([product, wait]))  # as the PTX wants it
    assert not static.serialised(one, "")


def test_tensor_memory_is_counted_and_allocated_before_the_next_kernel_starts():
    alloc = "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], 256;\n"
    start, barrier = "griddepcontrol.launch_dependents ;\n", "bar.sync 0;\n"
    assert assembly.tensor_columns(alloc + barrier + alloc.replace("256", "0x80")) == 384
    assert not any(map(assembly.allocates_late, (alloc + barrier + start, barrier + start, alloc)))
    assert all(map(assembly.allocates_late, (alloc + start, barrier + start + alloc, barrier + alloc + start)))
    assert static.misordered(100, 4, {"ptx": alloc + start})
    assert not static.misordered(100, 4, {"ptx": alloc})
    assert static.blocks_per_sm(100, warps=4, registers=32, shared=0, tensor=256) == 2
