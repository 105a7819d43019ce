"""In SASS for sm_90, writes to the registers that a wgmma in flight may read are found."""

import pytest

from ptxsim import assembly, static

IN_FLIGHT = """
        /*0010*/                   LDS.128 R40, [R12+UR11] ;
.L_x_0:
        /*0020*/                   {before} ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR12], R24{first} ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, {left}, gdesc[UR16], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, {most} ;
        /*0060*/              @!P0 BRA `(.L_x_0) ;
        /*0070*/                   {after} ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0090*/                   LDS.U16 R40, [R12] ;
"""
QUIET = {"before": "NOP", "first": ", gsb0", "left": "R44", "most": "0x1", "after": "NOP"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"before": "LDS.U16 R44, [R12+UR11]"}, True),
        ({"before": "@P1 FMUL R47, R5.reuse, R53"}, True),
        ({"before": "LDS.U16 R44, [R12+UR11]", "most": "0x0"}, False),
        ({"before": "LDS.U16 R43, [R12+UR11]"}, False),  # of the group before the last
        ({"before": "LDS.U16 R43, [R12+UR11]", "first": ""}, True),  # of the last group's first product
        ({"before": "LDS.U16 R43, [R12+UR11]", "most": "0x2"}, True),
        ({"before": "LDS.128 R41, [R12+UR11]"}, True),
        ({"before": "LDS.64 R42, [R12+UR11]"}, False),
        ({"before": "LDSM.16.M88.4 R48, [R12]"}, False),
        ({"before": "IMAD.WIDE.U32 R46, R4, R5, R6"}, True),
        ({"before": "SHFL.BFLY PT, R45, R4, 0x1, 0x1f"}, True),
        ({"before": "STS.U16 [R44], R45"}, False),
        ({"before": "ISETP.GE.AND P1, PT, R44, R45, PT"}, False),
        ({"before": "LDS.U16 R44, [R12]", "left": "gdesc[UR20]"}, False),
        ({"after": "MOV R44, R3"}, True),
    ],
)
def test_writes_to_what_a_wgmma_in_flight_reads_are_found(change, found):
    """The one wait of a loop lets the last group of a pass run on in the next pass, and after the loop."""
    sass = IN_FLIGHT.format(**QUIET | change)
    written = change.get("before") or change["after"]
    assert assembly.overwritten(sass) == [written.removeprefix("@P1 ")] * found
    problems = static.warpgroups("wgmma.wait_group.sync.aligned 1;" * 2, sass)
    assert problems == (f"writes to registers that a wgmma in flight may read: {written.removeprefix('@P1 ')}",) * found


def test_the_loop_of_products_is_counted():
    sass = IN_FLIGHT.format(**QUIET)
    assert assembly.longest_loop(sass) == 5  # with the jump, without what stands before and after
    assert assembly.longest_loop(sass.replace("HGMMA", "FADD")) == 0
