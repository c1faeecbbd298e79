"""Launches and bytes of single units on a GPU, counted without one."""

import subprocess
import sys

import pytest

from bench.records import read
from bench.units import CASES, UnitRow

# Bytes per element of x in bfloat16, without convolutions: 2 for each tensor that is read or
# written. By unit, in the forward and in the backward.
#   Forward: statistics 2, norm and activation 4, a bias 4, a residual 6.
#   Backward: the activation again and the sums 6, dx 6, the gradient of a bias 2. Without a
#   convolution: the sums 4, dx 6.
BYTES = {
    "GN-SiLU-Conv3": (10, 14),
    "GN-SiLU-Conv3 + residual": (12, 14),
    "GN-SiLU": (6, 10),
    "BN-ReLU-Conv3": (6, 12),
    "BN-ReLU-Conv3 + residual": (12, 12),
    # The first bias goes to a norm, the second to the addition; x has two gradients.
    "two GN-SiLU-Conv3 + residual, converted": (18, 34),
    "two BN-ReLU-Conv3 behind Conv3, converted": (12, 24),
    # The gradients of identity shortcuts; one addition also gives the statistics of its sum.
    "two basic blocks": (34, 52),
    "BN-ReLU": (6, 10),
}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_units_move_few_bytes_in_few_launches(backend, tmp_path, monkeypatch):
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter has no launches
    path = tmp_path / "units.csv"
    command = ["-m", "bench.units", "--backend", backend, "--no-instructions", "--csv", str(path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {(row.unit, row.direction): row for row in read(path, UnitRow)}
    assert {case.name for case in CASES} == BYTES.keys()
    for name, limits in BYTES.items():
        units = 4 if "blocks" in name else 2 if name.startswith("two") else 1
        for direction, least, launches in zip(("forward", "backward"), limits, (5, 8), strict=True):
            row = rows[name, direction]
            # Additions; or a convolution, and the running statistics of several norms.
            extra = 1 if "residual" in name else 5 if "behind" in name or "blocks" in name else 0
            assert row.kernels + row.operators <= launches * units + extra, row
            assert least <= row.bytes_per_element <= least + 0.3, row
