"""UndefinedBehaviorSanitizer reports the fault of planted.cpp. check.py runs this test."""

import torch

planted = torch.ops.preact_kernels_planted


def test_a_product_that_overflows(reports):
    planted.multiply(2**31, 2**31)
    assert not reports.take()
    planted.multiply(2**32, 2**31)
    assert "signed integer overflow" in reports.take()
