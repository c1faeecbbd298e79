"""A pytest plugin: tests run on a variant of the CPU library and fail on reports of sanitizers.

check.py sets the environment: PK_CPU_LIBRARY is the library, PK_RUNTIMES are the libraries of the
sanitizers, and PK_REPORTS is the folder that they write to.
"""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from preact_kernels.kernels import cpu, libraries
from testbed.cuda_on_host import serve_cpu
from tests.kernels.each_instruction_set import differing

LIBRARY = Path(os.environ["PK_CPU_LIBRARY"])
libraries.PACKAGE = LIBRARY.parent  # read when the library is loaded
serve_cpu.install = lambda: False  # the CUDA library is not tested, and takes minutes to compile
REPORTS = Path(os.environ["PK_REPORTS"])
RUNTIMES = [Path(runtime) for runtime in os.environ["PK_RUNTIMES"].split()]


class Reports:
    """What the sanitizers have reported in this process."""

    def __init__(self):
        self.read = {}

    def take(self):
        """What is new since the last call."""
        new = ""
        for file in REPORTS.iterdir():
            text = file.read_text()
            new += text[self.read.get(file, 0) :]
            self.read[file] = len(text)
        return new


_reports = Reports()


@pytest.fixture(scope="session")
def reports():
    """For tests that expect reports."""
    return _reports


def pytest_collection_finish(session):
    """Selects cases as for lesser instruction sets, after `-m` and `-k`."""
    session.items[:] = differing(os.environ["PREACT_KERNELS_CPU_ISA"], session.items)
    assert not cpu.load_error()
    assert cpu.kernels().instruction_set == os.environ["PREACT_KERNELS_CPU_ISA"]
    mapped = Path("/proc/self/maps").read_text()
    assert str(LIBRARY.resolve()) in mapped and "/_cpu.so" not in mapped
    # The first report of UndefinedBehaviorSanitizer sends those of AddressSanitizer to stderr.
    if any("ubsan" in runtime.name for runtime in RUNTIMES):
        torch.ops.preact_kernels_planted.add(2**63 - 1, 1)
    for runtime in RUNTIMES:
        ctypes.CDLL(str(runtime)).__sanitizer_set_report_path(bytes(REPORTS / runtime.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    report = _reports.take()
    if report:
        pytest.fail(report, pytrace=False)
    return result


def pytest_sessionfinish(session):
    """A report after the last test fails too."""
    report = _reports.take()
    if report:
        print(report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
