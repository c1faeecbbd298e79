"""`residual_add` equals `x + branch` on every backend."""

import pytest
import torch

import preact_kernels as pk
from tests.oracle import assert_same_bits, evaluate, same_bits


def plain(x, branch):
    return x + branch


@pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))
@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(3, 17, 5, 7), (2, 16, 33, 31), (0, 4, 3, 5)], ids=str)
def test_equals_the_sum_to_the_bit(shape, dtype):
    inputs = {"x": torch.randn(shape).to(dtype), "branch": torch.randn(shape).to(dtype)}
    assert_same_bits(evaluate(pk.residual_add, inputs), evaluate(plain, inputs))


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("narrow", ["x", "branch"])
def test_mixed_dtypes_are_promoted_as_in_eager(narrow, backend):
    inputs = {"x": torch.randn(2, 4, 3, 5), "branch": torch.randn(2, 4, 3, 5)}
    inputs[narrow] = inputs[narrow].bfloat16()
    assert_same_bits(evaluate(pk.residual_add, inputs), evaluate(plain, inputs))


def test_nan_and_inf_pass_through_and_inputs_are_left_as_they_were(backend):
    x, branch = torch.randn(2, 4, 3, 5), torch.full((2, 4, 3, 5), -torch.inf)
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None, None]
    x = x.contiguous(memory_format=torch.channels_last)  # which no kernel copies
    before = x.clone(), branch.clone()
    assert same_bits(pk.residual_add(x, branch), x + branch)
    assert same_bits(x, before[0])
    assert same_bits(branch, before[1])
