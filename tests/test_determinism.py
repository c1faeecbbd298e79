"""Two runs give the same bits."""

import math
from functools import partial

import pytest
import torch

import preact_kernels as pk
from tests.cases import CONV_CASES, ConvCase, conv_inputs, in_dtype, random_stage
from tests.oracle import assert_same_bits, evaluate

LARGE = ConvCase("large", (8, 32, 19, 17), 32, padding=1, residual=True)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", CONV_CASES, ids=lambda c: c.name)
def test_two_runs_of_bn_relu_conv2d(case, training_dtype):
    inputs = conv_inputs(case, training_dtype)
    call = partial(pk.bn_relu_conv2d, training=True, **case.conv)
    assert_same_bits(evaluate(call, inputs), evaluate(call, inputs))


@pytest.mark.parametrize("kernel", [1, 3])
def test_two_runs_on_several_threads(kernel, threads, training_dtype):
    case = LARGE._replace(kernel=kernel, padding=kernel // 2)
    inputs = conv_inputs(case, training_dtype)
    call = partial(pk.bn_relu_conv2d, training=True, **case.conv)
    first = evaluate(call, inputs)
    assert_same_bits(evaluate(call, inputs), first)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("threads", [2, 3, 70])
def test_threads_change_no_more_than_the_order_of_weight_gradients(kernel, threads, training_dtype):
    case = ConvCase("many", (80, 16, 5, 6), 16, kernel, padding=kernel // 2, residual=True)
    inputs = conv_inputs(case, training_dtype)
    call = partial(pk.bn_relu_conv2d, training=True, **case.conv)
    single = evaluate(call, inputs)
    torch.set_num_threads(threads)
    try:
        several = evaluate(call, inputs)
    finally:
        torch.set_num_threads(1)
    one, other = single.pop("dconv_weight"), several.pop("dconv_weight")
    assert_same_bits(several, single)
    # A weight's gradient is a sum of as many values as there are pixels, here in another order.
    rounding = torch.finfo(training_dtype).eps
    assert (other - one).norm() <= rounding * math.sqrt(80 * 5 * 6) * one.norm()


@pytest.mark.parametrize("width", [6, 16])
@pytest.mark.parametrize("memory", ["store", "rebuild", "checkpoint"])
def test_two_runs_of_a_stage_on_several_threads(memory, width, threads, training_dtype):
    stage = in_dtype(random_stage(width=width, memory=memory), training_dtype)
    inputs = {"x": torch.randn(8, 10, 17, 13).to(training_dtype)}
    first = evaluate(stage, inputs)
    assert_same_bits(evaluate(stage, inputs), first)


def test_an_image_does_not_depend_on_its_batch_in_evaluation(training_dtype):
    inputs = conv_inputs(LARGE._replace(residual=False), training_dtype)
    call = partial(pk.bn_relu, training=False)
    names = ("bn_weight", "bn_bias", "running_mean", "running_var")
    norm = {n: inputs[n] for n in names}
    whole = call(inputs["x"], **norm)
    for i in range(len(whole)):
        assert torch.equal(call(inputs["x"][i : i + 1], **norm), whole[i : i + 1])
