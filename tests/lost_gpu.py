"""A pytest plugin that replaces a worker whose GPU context is broken.

After an illegal memory access every CUDA call of the process fails, and so would every later test.
pytest-xdist starts a new worker in place of one that ends, and names the test that was running.
"""

import os
import sys

import pytest


def is_lost() -> bool:
    """Whether the GPU context of this process is broken."""
    import torch  # here: a process that only hands out tests does without

    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Ends a worker whose GPU context a failed test has broken."""
    if call.excinfo is not None and "PYTEST_XDIST_WORKER" in os.environ and is_lost():
        report = call.excinfo.getrepr(style="short")
        print(f"{item.nodeid} lost the GPU of its worker:\n{report}", file=sys.stderr, flush=True)
        os._exit(1)
    return (yield)
