"""3x3 convolutions of the CPU library by Winograd's minimal filtering (kernels/winograd.h)."""

import itertools
from functools import partial

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu, pytorch_conv
from tests.cases import INF, NAN, ConvCase, conv_inputs, enough, plain_bn_relu_conv2d
from tests.oracle import (
    assert_finite_as_in_eager,
    assert_same_bits,
    assert_within_budget,
    check_conv,
    eager_errors,
    evaluate,
    evaluate_all,
    same_bits,
)

pytestmark = [
    pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"),
    pytest.mark.backends("cpu"),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# On every instruction set: channels of one vector, whose products replace their operands, and of
# several; sums over more channels than one sum may have. Rows of more tiles than are multiplied at
# once; strips of different lengths; strips of several images; one tile left of four.
CASES = (
    ConvCase("one_vector", (5, 16, 8, 6), 16, padding=1, conv_bias=True, residual=True),
    ConvCase("smallest_image", (3, 32, 4, 4), 48, padding=1),
    ConvCase("wide_image", (2, 32, 4, 70), 48, padding=1),
    ConvCase("tall_image", (1, 16, 38, 4), 32, padding=1, residual=True),
    ConvCase("strips_of_images", (33, 64, 4, 6), 48, padding=1),
    ConvCase("channels_288_to_16", (4, 288, 8, 8), 16, padding=1),
    ConvCase("channels_16_to_288", (4, 16, 8, 8), 288, padding=1),
    ConvCase("large_weight", (3, 128, 14, 14), 96, padding=1, residual=True),
)


@pytest.fixture(autouse=True)
def is_fused(monkeypatch):
    """On every instruction set: a convolution of PyTorch fails."""
    for name in ("norm_act_conv_forward", "norm_act_conv_backward"):
        monkeypatch.delattr(pytorch_conv, name)
    monkeypatch.setattr(cpu.CPUKernels, "_is_faster", lambda *_: True)


def has_winograd(x, weight):
    """Whether the library computes a convolution of stride 1 by minimal filtering."""
    x = x.contiguous(memory_format=torch.channels_last)
    return torch.ops.preact_kernels_cpu.has_winograd(x, weight, [1, 1])


def has_dot_products(dtype):
    return dtype == torch.bfloat16 and "bf16" in cpu.kernels().instruction_set


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_so(dtype):
    expected = not has_dot_products(dtype)
    for case in CASES:
        inputs = conv_inputs(case, dtype)
        assert has_winograd(inputs["x"], inputs["conv_weight"]) == expected, case.name
    weight = torch.empty(32, 16, 3, 3, dtype=dtype)
    assert has_winograd(torch.empty(1, 16, 4, 4, dtype=dtype), weight) == expected
    for size in ((2, 4), (4, 2), (5, 4), (4, 5)):
        assert not has_winograd(torch.empty(1, 16, *size, dtype=dtype), weight)
    for kernel in ((1, 1), (3, 5), (5, 3), (5, 5)):
        other = torch.empty(32, 16, *kernel, dtype=dtype)
        assert not has_winograd(torch.empty(1, 16, 8, 8, dtype=dtype), other)
    strided = torch.ops.preact_kernels_cpu.has_winograd
    x = torch.empty(1, 16, 8, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert not strided(x, weight, [2, 2]) and not strided(x, weight, [1, 2])


# `make test` runs each case in one dtype.
QUICK = [*zip(CASES, itertools.cycle((torch.float32, torch.float32, torch.float16)))]
PROBLEMS = [
    pytest.param(p, id=f"{p[0].name}-{p[1]}", marks=[pytest.mark.slow] * (p not in QUICK))
    for p in itertools.product(CASES, DTYPES)
]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.covering(1)
def test_forward_and_backward(problem, training):
    case, dtype = problem
    problems = [conv_inputs(case, dtype) for _ in range(enough(case.x))]
    check_conv(problems, training=training, **case.conv)


IMAGES = ConvCase("", (4, 32, 8, 8), 48, padding=1)


def assert_near(inputs, dy, case=IMAGES):
    """Within the budget, with this gradient and the running statistics."""
    options = {"training": False, **case.conv}
    plain, problems = partial(plain_bn_relu_conv2d, **options), [(inputs, dy)]
    found = evaluate_all(partial(pk.bn_relu_conv2d, **options), problems)
    truth = evaluate_all(plain, problems, dtype=torch.float64)
    assert_within_budget(found, truth, eager_errors(plain, problems, truth))


def test_strips_of_zeros_beside_others():
    """Zeros are out of the range: their strips have direct sums, and all add to one gradient."""
    inputs, dy = conv_inputs(IMAGES), torch.randn(4, 48, 8, 8)
    inputs["x"][1] = -1e4  # the ReLU returns zeros
    dy[2] = 0
    assert_near(inputs, dy)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("which", ["x", "dy", "conv_weight"])
def test_magnitudes(which, scale):
    inputs, dy = conv_inputs(IMAGES), torch.randn(4, 48, 8, 8)
    inputs["running_mean"].zero_()
    inputs["bn_bias"].zero_()
    inputs["dy"] = dy
    inputs[which] = inputs[which] * scale
    dy = inputs.pop("dy")
    assert_near(inputs, dy)


@pytest.mark.parametrize("which", ["x", "dy", "conv_weight"])
@pytest.mark.parametrize("value", [NAN, INF, 3e38])
@pytest.mark.parametrize("place", [0, 27, 63])
def test_a_value_out_of_range_stays_where_it_is_read(place, value, which):
    """A tile would add the largest numbers to others, and spread what is not finite."""
    inputs, dy = conv_inputs(IMAGES), torch.randn(4, 48, 8, 8) / 1000
    inputs["conv_weight"] /= 1000
    inputs["running_mean"].zero_()
    inputs["running_var"].fill_(1)
    inputs["bn_weight"].fill_(1)
    if which == "conv_weight":
        inputs["x"] /= 1000
        inputs["bn_bias"] /= 1000
        inputs[which][-1, -1].view(-1)[place % 9] = value
    else:
        {"x": inputs["x"], "dy": dy}[which][1, 5].view(-1)[place] = value
    assert_finite_as_in_eager(inputs, dy, training=False, **IMAGES.conv)


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.name)
@pytest.mark.covering(1)
def test_threads_change_no_activation_and_no_input_gradient(case):
    inputs, before, found = conv_inputs(case), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results = evaluate(partial(pk.bn_relu_conv2d, training=True, **case.conv), inputs)
            del results["dconv_weight"]  # in the order of the threads' parts
            found.append(results)
    finally:
        torch.set_num_threads(before)
    assert "y" in found[0] and "dx" in found[0]
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=lambda case: case.name)
def test_negated_weights_negate_every_bit(case):
    """A block's input is rebuilt so."""
    inputs = {**conv_inputs(case), "conv_bias": None, "residual": None}
    y = pk.bn_relu_conv2d(**inputs, training=False, **case.conv)
    inputs["conv_weight"] = -inputs["conv_weight"]
    assert same_bits(-pk.bn_relu_conv2d(**inputs, training=False, **case.conv), y)


def test_small_integers_are_exact():
    inputs = conv_inputs(IMAGES)
    inputs["x"] = torch.randint(-8, 9, IMAGES.x).float()
    for name, value in {"running_mean": 0.0, "running_var": 1.0, "bn_weight": 1.0}.items():
        inputs[name].fill_(value)
    inputs["bn_bias"].zero_()
    inputs["conv_weight"] = torch.randint(-8, 9, inputs["conv_weight"].shape).float()
    arguments = {"training": False, "eps": 0.0, **IMAGES.conv}
    y = pk.bn_relu_conv2d(**inputs, **arguments)
    assert torch.equal(y, plain_bn_relu_conv2d(**inputs, **arguments))
