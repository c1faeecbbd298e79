"""No call that an op refuses is reported by a sanitizer. check.py runs these tests.

They print each call before it runs: the last one is the call that ended the process.
"""

import os

from tests.ops.damaged_calls import damaged_calls, valid_calls


def reported(valid_calls, reports):
    """Generates what is damaged in the calls that a sanitizer reports, with the reports."""
    for valid in valid_calls:
        for text, call, _ in damaged_calls(valid, is_native=True):
            os.write(2, f"{text}\n".encode())
            call.error()
            report = reports.take()
            if report:
                yield f"{text}: {report}"


def test_a_read_past_a_short_storage(reports):
    """In an op of planted.cpp, by one byte: reads far past a storage may end the process."""
    planted = [call for call in valid_calls("preact_kernels_planted") if call.op == "read_last"]
    found = next(reported(planted, reports))
    assert "AddressSanitizer" in found and "READ of size 1" in found


def test_damaged_calls(reports):
    found = [*reported(valid_calls("preact_kernels_cpu"), reports)]
    assert not found, "\n".join(found)
