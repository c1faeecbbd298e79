"""Tests for which Triton compiles, or seems to: in processes without its interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def printed_by(module):
    """What a module of this folder prints."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}"],
        cwd=Path(__file__).parents[2],
        env={n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_the_report_finds_planted_faults():
    *found, by_allowed_stack = printed_by("planted_triton").splitlines()
    expected = (
        ("product_kernel", "1 buffers where 2 stages were asked for"),
        ("product_kernel", "bytes of shared memory"),
        ("product_kernel", "0 resident programs, not 1"),
        ("early_kernel", "loads of 2 bytes"),
        ("early_kernel", "does not wait for the kernels before it first"),
        ("spilling_kernel", "a stack frame of"),
    )
    assert len(found) == len(expected)
    for line, parts in zip(found, expected, strict=True):
        assert all(part in line for part in parts)
    assert by_allowed_stack == "[True, False]"


def test_launches_of_known_kernels_are_those_that_triton_would_choose():
    result = json.loads(printed_by("prepared_launches"))
    for is_apart in (True, False):
        reused, lookups = result[f"apart {is_apart}"]
        assert reused == [
            "finish_sums_kernel",
            "norm_act_conv_backward_kernel",
            "norm_act_conv_backward_weight_kernel",
            "norm_act_conv_forward_kernel",
            "norm_input_gradient_kernel",
            "pack_weights_kernel",
            "sum_partials_kernel",
        ]
        first, *_, other, again = lookups
        assert other < first  # some launches are for any number of blocks
        assert again == 4  # one for each affine step of a caller
