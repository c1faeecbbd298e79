"""AddressSanitizer reports the faults of planted.cpp. check.py runs these tests."""

import torch

planted = torch.ops.preact_kernels_planted


def reads_beside(t, sites, reports):
    for offset in range(t.nbytes):
        planted.read_byte(t, offset, sites[0])
    assert not reports.take()
    for offset, site in zip((-1, t.nbytes), sites, strict=True):
        planted.read_byte(t, offset, site)
        assert "READ of size 1" in reports.take(), offset


def test_reads_beside_a_tensor_of_torch(reports):
    reads_beside(torch.zeros(3, 5), (0, 1), reports)


def test_reads_beside_a_tensor_of_the_library(reports):
    """csrc/cpu/memory.cpp allocates it."""
    x = torch.zeros(1, 5, 3, 1).contiguous(memory_format=torch.channels_last)
    op = torch.ops.preact_kernels_cpu.norm_act_forward
    reads_beside(op(x, *torch.ones(4, 5), 1e-5, "relu", 0.0, None), (2, 3), reports)


def test_a_read_past_the_end_of_a_buffer_that_was_larger_before(reports):
    planted.read_buffer(4096, 100, 99)
    planted.read_buffer(100, 4096, 4095)
    assert not reports.take()
    planted.read_buffer(4096, 100, 100)
    assert "use-after-poison" in reports.take()
