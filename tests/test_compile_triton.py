"""The report of `tests/compile_triton.py` finds the faults that it is there to find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_report_finds_planted_faults():
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.planted_triton"],
        cwd=Path(__file__).parent.parent,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    expected = (
        ("product_kernel", "1 buffers where 2 stages were asked for"),
        ("product_kernel", "resident programs, not 64"),
        ("gather_kernel", "loads of 2 bytes"),
        ("spilling_kernel", "a stack frame of"),
    )
    assert len(found) == len(expected)
    for line, parts in zip(found, expected, strict=True):
        assert all(part in line for part in parts)
