"""No random call of an op is reported by a sanitizer. check.py runs these tests.

They print the number of each call before it runs: the last one is of the call that ended the
process. `draw` of tests/ops/random_calls.py makes it again.
"""

import os

from tests.ops import random_calls
from tests.ops.random_calls import NAMESPACES, Namespace, native, registered

CALLS = 1500


def faults(name, ops, calls, reports, monkeypatch):
    """The faults of random calls, in this process: the sanitizers must be loaded before torch."""
    # An allocation that is too large ends the process.
    monkeypatch.setitem(NAMESPACES, name, Namespace("cpu", "auto", ops, has_huge=False))
    found = []

    def report(index, outcome, fault):
        if outcome == "started":
            os.write(2, f"{index} ".encode())
        fault = reports.take() or fault
        if fault:
            found.append(f"{random_calls.draw(name, ops(), 0, index)}: {fault}")

    random_calls.run_calls(name, 0, range(calls), report)
    return found


def test_a_read_past_a_short_storage(reports, monkeypatch):
    """In an op of planted.cpp. AddressSanitizer reports an instruction once."""

    def ops():
        return [op for op in registered("preact_kernels_planted") if op.name == "read_last"]

    found = faults("planted", ops, 100, reports, monkeypatch)
    reported = [fault for fault in found if "AddressSanitizer" in fault]
    assert len(reported) == 1
    assert reported[0].startswith("read_last(x=<") and "READ of size 1" in reported[0]


def test_random_calls(reports, monkeypatch):
    found = faults("sanitized", lambda: native("cpu"), CALLS, reports, monkeypatch)
    assert not found, "\n".join(found)
