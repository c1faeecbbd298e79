"""A pytest plugin: tests run on a variant of the CPU library and fail on reports of its sanitizer.

check.py sets the environment: PK_CPU_LIBRARY is the library, PK_REPORTS the file of reports, to
whose name the sanitizer appends the process id.
"""

import os
from pathlib import Path

import pytest

from preact_kernels.kernels import cpu, native
from tests.kernels.cuda_on_host import serve_cpu
from tests.kernels.each_instruction_set import differing

HERE = Path(__file__).parent
LIBRARY = Path(os.environ["PK_CPU_LIBRARY"])
native.PACKAGE = LIBRARY.parent  # read when the library is loaded
serve_cpu.install = lambda: False  # the CUDA library is not tested, and takes minutes to compile


class Reports:
    """What the sanitizer has reported in this process."""

    def __init__(self):
        self.file = Path(f"{os.environ['PK_REPORTS']}.{os.getpid()}")
        self.read = 0

    def take(self):
        """What is new since the last call."""
        text = self.file.read_text()[self.read :] if self.file.exists() else ""
        self.read += len(text)
        return text


REPORTS = Reports()


@pytest.fixture(scope="session")
def reports():
    """For tests that expect reports."""
    return REPORTS


def pytest_collection_finish(session):
    """Selects cases as for lesser instruction sets, after `-m` and `-k`."""
    session.items[:] = differing(os.environ["PREACT_KERNELS_CPU_ISA"], session.items)
    assert any(item.path.parent == HERE for item in session.items)  # planted faults
    assert not cpu.load_error()
    assert cpu.kernels().instruction_set == os.environ["PREACT_KERNELS_CPU_ISA"]
    mapped = Path("/proc/self/maps").read_text()
    assert str(LIBRARY.resolve()) in mapped and "/_cpu.so" not in mapped


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    report = REPORTS.take()
    if report:
        pytest.fail(report, pytrace=False)
    return result
