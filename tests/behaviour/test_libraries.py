"""The compiled libraries load with this torch, and have the ops of `ops/schema.py`."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from preact_kernels.ops.schema import SCHEMAS

PACKAGE = Path(importlib.util.find_spec("preact_kernels").origin).parent
OPTIONAL_OPS = {"running_stats_update"}  # PyTorch can update running statistics
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
LIBRARIES = {
    "cpu": (shutil.which("c++"), "no C++ compiler"),
    "cuda": (torch.version.cuda and NVCC, "no nvcc, or a torch without CUDA that cannot load it"),
}
# In a process of its own: tests/kernels/cuda_on_host registers ops of the same names.
LOAD = """
import sys
import torch
path, namespace, *names = sys.argv[1:]
torch.ops.load_library(path)
print(*(name for name in names if not hasattr(getattr(torch.ops, namespace), name)))
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_loads_and_has_the_ops_above_it(library):
    is_expected, reason = LIBRARIES[library]
    for variable in ("PREACT_KERNELS_NATIVE", f"PREACT_KERNELS_{library.upper()}"):
        if os.environ.get(variable) == "0":
            pytest.skip(f"{variable}=0")
    if not is_expected:
        pytest.skip(reason)
    command = [sys.executable, "-c", LOAD, PACKAGE / f"_{library}.so", f"preact_kernels_{library}"]
    process = subprocess.run([*command, *SCHEMAS], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert set(process.stdout.split()) <= OPTIONAL_OPS
