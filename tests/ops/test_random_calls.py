"""No call of an op ends the process: `random_calls` says what a call must do."""

import pytest

from preact_kernels.kernels import cpu
from testbed.cuda_on_host import serve_cpu
from tests.ops import random_calls


@pytest.mark.not_under_sanitizer
@pytest.mark.parametrize("name", random_calls.NAMESPACES)
@pytest.mark.parametrize("calls", [150, pytest.param(8500, marks=pytest.mark.slow)])
def test_every_op_returns_or_names_an_argument(calls, name):
    if "cuda" in name and not serve_cpu.install():
        pytest.skip("the CUDA kernels do not run on the host here")
    if "cpu" in name and cpu.load_error():
        pytest.skip(f"backend cpu: {cpu.load_error()}")
    text, has_faults = random_calls.summary(name, 0, calls)
    assert not has_faults, text
