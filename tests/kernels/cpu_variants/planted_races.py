"""ThreadSanitizer reports the faults of planted.cpp. check.py runs these tests."""

import torch

planted = torch.ops.preact_kernels_planted


def test_tiles_that_write_the_same_value(reports):
    t = torch.zeros(64)
    planted.write_tiles(t, 64, 64)
    assert not reports.take()
    planted.write_tiles(t, 64, 1)
    assert "data race" in reports.take()
