"""`residual_add` equals `x + branch` on every backend."""

import operator

import pytest
import torch

import preact_kernels as pk
from tests.cases import SHAPES
from tests.oracle import assert_same_bits, evaluate, same_bits


def plain(x, branch):
    return operator.add(x, branch)


@pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))
@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES[1::2], ids=lambda s: "x".join(map(str, s)))
def test_equals_the_sum_to_the_bit(shape, dtype):
    inputs = {"x": torch.randn(shape).to(dtype), "branch": torch.randn(shape).to(dtype)}
    assert_same_bits(evaluate(pk.residual_add, inputs), evaluate(plain, inputs))


@pytest.mark.backends("cpu")
def test_an_empty_batch_is_as_in_eager(dtype):
    inputs = {n: torch.randn(0, 4, 3, 5).to(dtype) for n in ("x", "branch")}
    assert_same_bits(evaluate(pk.residual_add, inputs), evaluate(plain, inputs))


@pytest.mark.backends("cpu")
def test_mixed_dtypes_are_promoted_as_in_eager(backend):
    inputs = {"x": torch.randn(2, 4, 3, 5), "branch": torch.randn(2, 4, 3, 5).bfloat16()}
    assert_same_bits(evaluate(pk.residual_add, inputs), evaluate(plain, inputs))


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("wanted", ["x", "branch"])
def test_a_single_wanted_gradient_comes_alone(wanted, backend):
    inputs = {"x": torch.randn(2, 4, 3, 5), "branch": torch.randn(2, 4, 3, 5)}
    frozen = [name for name in inputs if name != wanted]
    results = evaluate(pk.residual_add, inputs, frozen=frozen)
    assert_same_bits(results, evaluate(plain, inputs, frozen=frozen))
    assert results[f"d{frozen[0]}"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_pass_through(value, backend):
    inputs = {"x": torch.randn(2, 4, 3, 5), "branch": torch.full((2, 4, 3, 5), -float("inf"))}
    inputs["x"][0, 1] = value
    assert_same_bits(evaluate(pk.residual_add, inputs), evaluate(plain, inputs))


def test_inputs_are_left_as_they_were(backend):
    x, branch = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    before = x.clone(), branch.clone()
    pk.residual_add(x, branch)
    assert same_bits(x, before[0])
    assert same_bits(branch, before[1])
