"""A worker whose GPU context is broken is replaced, and the tests behind it run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

TESTS = """
import torch

def test_that_strays():
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = synchronize
    synchronize()

def test_behind_it():
    assert torch.cuda.synchronize.__module__ == "torch.cuda"
"""


def test_a_worker_that_lost_its_gpu_is_replaced(tmp_path):
    (tmp_path / "test_two.py").write_text(TESTS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "tests.lost_gpu", "test_two.py"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in process.stdout
    assert "crashed while running 'test_two.py::test_that_strays'" in process.stdout
    assert "test_that_strays lost the GPU of its worker" in process.stderr
    assert "RuntimeError: CUDA error: an illegal memory access" in process.stderr
