"""A pytest plugin: no test fails for what an earlier one did to the GPU.

After a kernel that strays, every CUDA call of its process fails. pytest-xdist starts another worker
in place of one that ends, and names the test that was running.
"""

import os
import sys

import pytest
import torch


def is_lost() -> bool:
    """Whether the GPU refuses all further work of this process."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Ends a worker that a failed test has cost its GPU."""
    if call.excinfo is not None and "PYTEST_XDIST_WORKER" in os.environ and is_lost():
        print(f"{item.nodeid} cost its worker the GPU: {call.excinfo.value}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    return (yield)
