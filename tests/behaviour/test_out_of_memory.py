"""Each allocation of a training step fails once: see failing_allocation.py."""

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
# Outputs in NCHW order are the last allocation of a forward; several threads have buffers.
QUICK = ["bn_relu-nchw-1", "bn_relu_conv2d-nhwc-3", "rebuild-nchw-1"]
SLOW = [f"{name}-{order}-{n}" for name in MODULES for order in MEMORY_FORMATS for n in (1, 3)]


# Programs that retry with smaller batches look for these.
MESSAGES = "MemoryError|out of memory|can't allocate memory"


def attempts_of(cases, library):
    """The attempts of each case, in one process."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared"]
    host_compiler.run([*host_compiler.CXX, *flags, str(SOURCE), "-o", str(library)])
    command = [sys.executable, "-m", "tests.behaviour.failing_allocation", *cases]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {case: [Attempt(*values) for values in found[case]] for case in cases}


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "every_case"]
)
def test_a_step_without_memory_is_an_error_that_leaves_no_trace(cases, tmp_path):
    wrong = []
    for case, attempts in attempts_of(cases, tmp_path / "library.so").items():
        *failed, last = attempts
        assert not last.error
        directions = [a.error.split()[3].strip(":") for a in failed if a.error]
        # The only allocation of this forward is its output.
        least = 1 if case.startswith("bn_relu-nhwc") else 3
        assert min(directions.count("forward"), directions.count("backward")) >= least, case
        for index, attempt in enumerate(attempts):
            faults = list(attempt.faults)
            if attempt.failed_bytes and not re.search(MESSAGES, attempt.error):
                faults.append(attempt.error or "no error")
            wrong += [f"{case}, allocation {index} of {len(failed)}: {fault}" for fault in faults]
    assert not wrong, "\n".join(wrong)
