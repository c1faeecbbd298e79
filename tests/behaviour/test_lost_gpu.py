"""A worker whose GPU context is broken is replaced, and the tests behind it run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

TORCH = """
is_intact = True

class cuda:
    is_available = lambda: True

    def synchronize():
        if not is_intact:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
TESTS = """
import torch

def test_that_fails():
    raise ValueError

def test_that_strays():
    torch.is_intact = False
    torch.cuda.synchronize()

def test_behind_it():
    torch.cuda.synchronize()
"""


def test_a_worker_that_lost_its_gpu_is_replaced(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)  # in place of PyTorch, whose import takes seconds
    (tmp_path / "test_three.py").write_text(TESTS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    plugins = ["-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.lost_gpu"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", *plugins, "test_three.py"],
        cwd=tmp_path,
        env={
            **environment,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 1 passed" in process.stdout
    assert "crashed while running 'test_three.py::test_that_strays'" in process.stdout
    assert "test_that_strays lost the GPU of its worker" in process.stderr
    assert "RuntimeError: CUDA error: an illegal memory access" in process.stderr
    assert "test_that_fails lost" not in process.stderr
