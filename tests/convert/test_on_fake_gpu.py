"""Converted models on a GPU of fake tensors, which need no GPU."""

import os
import subprocess
import sys

import pytest

from testbed import fake_cuda


@pytest.mark.skipif(bool(fake_cuda.missing()), reason=fake_cuda.missing())
def test_results_have_the_dtypes_and_strides_of_plain_models():
    environment = os.environ | fake_cuda.environment()
    command = [sys.executable, "-m", "tests.convert.on_fake_gpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "56 trainings\n"), done.stdout + done.stderr
