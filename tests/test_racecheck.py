"""What racecheck.py lets through: one pair of instructions of one kernel, and nothing beside it."""

from __future__ import annotations

import pytest

from racecheck import Switch, switch_of, unexplained

RAN = "hopper B2,H4,L200,D64,bf16,causal ran"
FOUND = Switch(0x120, (0x8590, 0xE920))
RACE = """========= Error: Race reported between Read access at hopper_attention_forward+0x120 in kernels.py:709
=========     and Write access at hopper_attention_forward+0x8590 in kernels.py:709 [38 hazards]
=========     and Write access at hopper_attention_forward+0xe920 in kernels.py:752 [57 hazards]
=========
"""
SUMMARY = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"
REPORT = f"========= COMPUTE-SANITIZER\n{RACE}{RAN}\n{SUMMARY.format(1)}"
CODE = """
        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0120*/                   LDS.U8 R3, [R3+UR6+0x2818c] ;
        /*0180*/               @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*01e0*/                   BRX R2 -0x1f0 (*"BRANCH_TARGETS .L_x_2"*);
        /*04a0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*1030*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*6c80*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*8580*/              @!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x28188], RZ ;
        /*8590*/                   STS.64 [UR4+0x28190], R2 ;
        /*85a0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*85c0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*9030*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*e900*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*e920*/                   STS.64 [UR4+0x28190], R2 ;
        /*e930*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
"""


def test_what_triton_does_is_told_by_instruction() -> None:
    assert switch_of(CODE) == FOUND
    assert unexplained(REPORT, {RAN: FOUND}) == []
    assert unexplained(SUMMARY.format(0), {RAN: FOUND}) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("+0x120", "+0x130"), ("+0xe920", "+0xe930"), ("Read", "Write"), ("+0x8590", "+0x120"),
        ("hopper_attention_forward+0x8590", "another+0x8590"), (RAN, RAN.replace("D64", "D128")), (f"{RAN}\n", ""),
        ("SUMMARY: 1", "SUMMARY: 2"), ("1 errors, 0 warnings", "1 errors, 1 warnings"), ("RACECHECK", "NOTHING"),
        ("========= COMPUTE", "========= Error: No device\n========= COMPUTE"),
    ],
)  # fmt: skip
def test_everything_else_is_a_complaint(before: str, after: str) -> None:
    assert before in REPORT
    assert unexplained(REPORT.replace(before, after), {RAN: FOUND}) != []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ", "/*0110*/ BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 "),
        ("/*85a0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ", "/*85a0*/ NOP "),
        ("/*e900*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ", "/*e900*/ BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 "),
        ("/*e930*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ", "/*e930*/ EXIT "),
        ("[UR4+0x28188]", "[UR4+0x28194]"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", "STS.64 [UR4+0x28190], R4"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", "LDS.U8 R4, [R3+UR6+0x2818c]"),
    ],
)
def test_code_in_another_order_is_not_accepted(before: str, after: str) -> None:
    assert before in CODE
    with pytest.raises((AssertionError, ValueError)):
        switch_of(CODE.replace(before, after))
