"""Counts of instructions in machine code."""

import pytest

from bench.instructions import Count, count, functions, issue_us

# A loop over tiles. In it: a loop of 3 rounds, a branch around one instruction, and two branches
# with equal products, of which the longer one is for rare values. Before it a loop of unknown
# length, after it a rare case that leads back, and a function.
CODE = """
  S2R R0, SR_TID.X
  IADD3 R1, R1, -0x1, RZ
  ISETP.NE.AND P0, PT, R1, RZ, PT
  @P0 BRA 0x10
  LDC R2, c[0x0][0x210]
  VIADD R3, R3, 0x8
  FADD R4, R4, R4
  ISETP.GE.U32.AND P1, PT, R3.reuse, 0x11, PT
  @!P1 BRA 0x50
  @P2 BRA 0xb0
  FADD R5, R5, R5
  @P3 BRA 0x100
  FSEL R6, R6, RZ, P4
  FSEL R7, R7, RZ, P4
  HMMA.16816.F32.BF16 R8, R6, R7, R8
  BRA 0x110
  HMMA.16816.F32.BF16 R8, R6, R7, R8
  ISETP.GE.U32.AND P4, PT, R9, 0x7, PT
  ISETP.LE.AND P4, PT, R2, UR4, PT
  @!P4 BRA 0x40
  @P5 BRA 0x170
  STG.E [R10], R8
  EXIT
  CALL.REL.NOINC 0x1a0
  BRA 0x150
  NOP
  FMUL R0, R0, R0
  RET.REL.NODEC R20 0x0
"""


def counted(code):
    """Counts a listing as cuobjdump prints it."""
    texts = enumerate(code.strip().splitlines())
    body = "\n".join(f"        /*{16 * i:04x}*/   {t.strip()} ;  /* 0x0 */" for i, t in texts)
    ((name, found),) = functions(f"\t\tFunction : kernel\n{body}\n\t\t.....\n")
    assert name == "kernel"
    return count(found)


def test_instructions_count_as_often_as_a_warp_issues_them():
    first, inner, rest, product, end = 1, 3 * 4, 3, 1, 3
    assert counted(CODE) == Count(once=4 + 3, tile=first + inner + rest + product + end)


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        # A loop of unknown length counts once:
        ("R3.reuse, 0x11", "R3.reuse, R12", -8),  # the bound is not constant
        ("VIADD R3, R3, 0x8", "VIADD R3, R3, R13", -8),  # nor is the step
        ("VIADD R3, R3, 0x8", "VIADD R3, R3, 0xfffffff8", -8),  # counts down
        ("ISETP.GE.U32.AND P1", "ISETP.GE.U32.AND P2", -8),  # of another branch
        # A branch with fewer products is not taken:
        ("BRA 0x110\n  HMMA.16816.F32.BF16 R8, R6, R7", "BRA 0x110\n  FADD R8, R8, R8", 3),
    ],
)
def test_what_the_code_does_not_say_counts_once(before, after, more):
    changed = CODE.replace(before, after)
    assert changed != CODE
    assert counted(changed).tile - counted(CODE).tile == more


def test_a_loop_may_count_in_64_bits_or_test_its_condition_first():
    wide = CODE.replace("VIADD R3, R3, 0x8", "IADD3 R3, P2, R3, 0x8, RZ")
    upper = "0x11, PT\n  ISETP.GE.U32.AND.EX P1, PT, R13, RZ, PT, P1\n"
    wide = wide.replace("  FADD R4, R4, R4\n", "").replace("0x11, PT\n", upper)
    assert counted(wide) == counted(CODE)
    loop = "MOV R1, R2\nISETP.GE.AND P0, PT, R1, R3, PT\n@P0 BRA 0x50\nIADD3 R1, R1, R4, RZ\n"
    assert counted(loop + "BRA 0x10\nEXIT") == Count(once=2, tile=4)
    no_loop = "MOV R1, R2\n@P0 EXIT\nSTG.E [R1], R2\nEXIT\nBRA 0x40"
    assert counted(no_loop) == Count(once=4, tile=0)


def test_products_behind_an_exit_after_the_loop_are_for_rare_values():
    usual = """
  @P0 EXIT
  S2R R0, SR_TID.X
  HMMA.16816.F32.BF16 R8, R6, R7, R8
  ISETP.GE.AND P1, PT, R2, UR4, PT
  @!P1 BRA 0x20
  STG.E [R10], R8
  @P0 EXIT
"""
    product, end = "  HMMA.16816.F32.BF16 R8, R6, R7, R8\n", "  STG.E [R10], R8\n  EXIT"
    assert counted(usual + product + end) == Count(once=2 + 2, tile=3)
    assert counted(usual + end) == Count(once=2 + 4, tile=3)


def test_the_busiest_multiprocessor_issues_for_all_its_blocks():
    shape = {"columns": 2, "warps": 8, "multiprocessors": 100}
    # 3 of 300 blocks, each with 2 of 200 tiles; 4 instructions a cycle.
    us = issue_us(Count(100, 50), blocks=150, tiles=200, **shape)
    assert us == pytest.approx(3 * 8 * (100 + 2 * 50) / (4 * 1755))
    assert issue_us(Count(100, 0), blocks=1, tiles=0, **shape) == pytest.approx(8 * 100 / 7020)
