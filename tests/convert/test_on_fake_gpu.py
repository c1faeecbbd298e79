"""Converted models on a GPU of fake tensors, which need no GPU."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from testbed import fake_cuda, host_compiler


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA device of its own")
@pytest.mark.skipif(shutil.which(host_compiler.CXX[0]) is None, reason="no C++ compiler")
def test_results_have_the_dtypes_and_strides_of_plain_models():
    environment = os.environ | fake_cuda.environment()
    command = [sys.executable, "-m", "tests.convert.on_fake_gpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "56 trainings\n"), done.stdout + done.stderr
