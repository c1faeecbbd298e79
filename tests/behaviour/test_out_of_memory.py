"""Each allocation of a training step fails once: an error, and no trace of it.

The CPU library and PyTorch's own allocator run out of memory alike; see failing_allocation.py.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from preact_kernels.kernels import cpu
from testbed import host_compiler
from tests.behaviour.failing_allocation import MEMORY_FORMATS, MODULES, Attempt

pytestmark = [
    pytest.mark.not_under_sanitizer,
    pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"),
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__libc_memalign"), reason="needs glibc"),
]

SOURCE = Path(__file__).with_name("failing_allocation.cpp")
# The quick ones have an output in NCHW order, the last allocation of a forward.
QUICK = [f"{name}-nchw" for name in ("bn_relu", "bn_relu_conv2d", "bottleneck", "rebuild")]
SLOW = [f"{name}-{order}" for name in MODULES for order in MEMORY_FORMATS]


@pytest.fixture(scope="module")
def attempts_of(tmp_path_factory):
    """A function of the number of threads and cases: their attempts, by case."""
    library = tmp_path_factory.mktemp("failing_allocation") / "library.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared"]
    host_compiler.run([*host_compiler.CXX, *flags, str(SOURCE), "-o", str(library)])

    def attempts(threads, cases):
        command = [sys.executable, "-m", "tests.behaviour.failing_allocation", str(threads), *cases]
        environment = os.environ | {"LD_PRELOAD": str(library)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return {case: [Attempt(*values) for values in found[case]] for case in cases}

    return attempts


@pytest.mark.parametrize(
    ("threads", "cases"),
    [
        pytest.param(1, QUICK, id="quick"),
        pytest.param(3, ["bn_relu_conv2d-nhwc"], id="quick_3_threads"),  # buffers of threads
        pytest.param(1, SLOW, id="every_case", marks=pytest.mark.slow),
        pytest.param(3, SLOW, id="3_threads", marks=pytest.mark.slow),
    ],
)
def test_a_step_without_memory_is_an_error_that_leaves_no_trace(threads, cases, attempts_of):
    wrong = []
    for case, attempts in attempts_of(threads, cases).items():
        *failed, last = attempts
        assert not last.error and last.has_counted
        directions = [a.error.split()[3].strip(":") for a in failed if a.error]
        least = 1 if case == "bn_relu-nhwc" else 3  # whose output is its only allocation
        assert min(directions.count("forward"), directions.count("backward")) >= least, case
        for index, attempt in enumerate(attempts):
            faults = list(attempt.faults)
            if attempt.failed_bytes and not is_out_of_memory(attempt.error):
                faults.append(attempt.error or "no error")
            wrong += [f"{case}, allocation {index} of {len(failed)}: {fault}" for fault in faults]
    assert not wrong, "\n".join(wrong)


def is_out_of_memory(error):
    """Whether a program that retries with a smaller batch knows the error as such."""
    return re.search("MemoryError|out of memory|can't allocate memory", error)
