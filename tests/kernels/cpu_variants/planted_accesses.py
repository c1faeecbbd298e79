"""AddressSanitizer reports the faults of planted.cpp. check.py runs these tests."""

import pytest
import torch

planted = torch.ops.preact_kernels_planted


def of_torch():
    return torch.zeros(3, 5)


def of_library():
    """A tensor that csrc/cpu/memory.cpp allocates."""
    x = torch.zeros(1, 5, 3, 1).contiguous(memory_format=torch.channels_last)
    return torch.ops.preact_kernels_cpu.norm_act_forward(x, *torch.ones(4, 5), 1e-5, "relu", 0.0)


@pytest.mark.parametrize("make", [of_torch, of_library])
def test_reads_beside_a_tensor(make, reports):
    t = make()
    for offset in range(t.nbytes):
        planted.read_byte(t, offset)
    assert not reports.take()
    for offset in (-16, -1, t.nbytes, t.nbytes + 15):
        planted.read_byte(t, offset)
        assert "READ of size 1" in reports.take(), offset


def test_a_read_past_the_end_of_a_buffer_that_was_larger_before(reports):
    planted.read_buffer(4096, 100, 99)
    planted.read_buffer(100, 4096, 4095)
    assert not reports.take()
    planted.read_buffer(4096, 100, 100)
    assert "use-after-poison" in reports.take()
