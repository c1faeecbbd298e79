"""Convolutions of the CPU library with large weights and few activations."""

import math
from functools import partial

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu
from preact_kernels.kernels.contract import Conv, Epilogue, Gradient, Inputs, Norm, Wanted
from tests.cases import (
    INF,
    NAN,
    ConvCase,
    conv2d_inside_the_image,
    conv_inputs,
    in_dtype,
    plain_bn_relu_conv2d,
    random_block,
    rounded_conv2d,
    unit_of,
)
from tests.oracle import (
    assert_finite_as_in_eager,
    assert_same_bits,
    check,
    check_conv,
    distance,
    evaluate,
    plain_copy,
)
from tests.reruns import threads

pytestmark = [
    pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"),
    pytest.mark.backends("cpu"),
    pytest.mark.usefixtures("every_weight_is_fused"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tiles of one pixel in 8 images or more, and of neighbours in a row; groups of images of equal and
# unequal size; an odd number of images, which dot products fill up; weights packed in one part and,
# on every instruction set, in several; channels that do not fill a task.
CASES = (
    ConvCase("3x3", (16, 64, 4, 5), 128, padding=1, residual=True, conv_bias=True),
    ConvCase("3x3_one_image", (1, 128, 5, 4), 64, padding=1),
    ConvCase("3x3_odd_images", (3, 96, 7, 5), 96, padding=1, residual=True),
    ConvCase("3x3_nine_images", (9, 128, 3, 3), 64, padding=1),
    ConvCase("3x3_two_groups", (17, 160, 8, 9), 48, padding=1),
    ConvCase("3x3_large_images", (3, 64, 16, 25), 128, padding=1),
    ConvCase("3x3_one_pixel", (5, 128, 1, 1), 64, padding=1, residual=True),
    ConvCase("3x3_one_column", (5, 128, 4, 1), 64, padding=1),
    ConvCase("3x3_channels_272_to_144", (2, 272, 3, 4), 144, padding=1),
    ConvCase("3x3_channels_576_to_48", (2, 576, 4, 5), 48, padding=1),
    ConvCase("3x3_channels_48_to_576", (2, 48, 4, 5), 576, padding=1),
    ConvCase("3x3_strided", (8, 64, 6, 8), 128, stride=2, padding=1, residual=True),
    ConvCase("3x3_strided_odd", (3, 64, 7, 5), 128, stride=2, padding=1),
    ConvCase("3x3_stride_4", (2, 64, 9, 6), 128, stride=4, padding=1),  # skips pixels
    ConvCase("1x3", (4, 160, 3, 5), 144, (1, 3), padding=(0, 1)),
    ConvCase("5x3_stride_3_2", (3, 64, 7, 6), 80, (5, 3), stride=(3, 2), padding=(2, 1)),
    ConvCase("1x1", (2, 272, 5, 5), 256, 1, residual=True, conv_bias=True),
    ConvCase("7x7", (2, 48, 5, 6), 48, 7, padding=3),
    ConvCase("1x7_strided", (3, 112, 3, 9), 112, (1, 7), stride=2, padding=(0, 3)),
    ConvCase("1x1_two_groups", (1, 544, 25, 43), 544, 1),
    ConvCase("1x1_channels_5136_to_16", (1, 5136, 3, 3), 16, 1),
)


def is_stationary(x, weight, stride=(1, 1)):
    """Whether the library calls a convolution weight-stationary."""
    if weight.shape[2:].numel() == 1:  # on the pixels that it reads
        x, stride = x[:, :, :: stride[0], :: stride[1]], (1, 1)
    x = x.contiguous(memory_format=torch.channels_last)
    return torch.ops.preact_kernels_cpu.conv_route(x, weight, list(stride))[0]


def is_stationary_case(case):
    inputs, stride = conv_inputs(case), case.conv["stride"]
    stride = stride if isinstance(stride, tuple) else (stride, stride)
    return is_stationary(inputs["x"], inputs["conv_weight"], stride)


def test_cases_are_weight_stationary():
    assert [c.name for c in CASES if not is_stationary_case(c)] == []


def test_the_limits_of_the_library():
    limits = cpu.kernels().limits
    few, few_per_weight = limits.few_values, limits.few_values_per_weight
    for shape, most in (
        ((512, 512, 3, 3), few // 1024),
        ((256, 64, 3, 3), few_per_weight * 256 * 64 * 9 // 320),
    ):
        weight = torch.empty(shape)
        at_most, more = (torch.empty(pixels, shape[1], 1, 1) for pixels in (most, most + 1))
        assert is_stationary(at_most, weight) and not is_stationary(more, weight)
    small = torch.empty(limits.small_weight // 1024, 1024, 1, 1)
    large = torch.empty(small.shape[0] + 16, 1024, 1, 1)
    x = torch.empty(1, 1024, 1, 1)
    assert is_stationary(x, large) and not is_stationary(x, small)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nhwc_weight", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.covering(1)
def test_forward_and_backward(training, nhwc_weight, dtype, case):
    inputs = conv_inputs(case, dtype)
    if nhwc_weight:
        weight = inputs["conv_weight"]
        inputs["conv_weight"] = weight.contiguous(memory_format=torch.channels_last)
    check_conv([inputs], conv2d=rounded_conv2d, training=training, **case.conv)


@pytest.mark.parametrize("kernel", [1, 3])
def test_sums_over_many_pixels(kernel):
    """Means far from 0: float32 sums over a whole image miss this bound, sums over tiles do not."""
    case = {
        1: ConvCase("", (1, 544, 32, 33), 544, 1),
        3: ConvCase("", (1, 128, 48, 47), 128, padding=1),
    }[kernel]
    assert is_stationary_case(case)
    inputs = conv_inputs(case)
    x = inputs["x"].contiguous(memory_format=torch.channels_last)
    weight = torch.randn_like(inputs["conv_weight"]) * 0.05 + 0.05
    channels = x.shape[1]
    norm = Norm(*(torch.full((channels,), v) for v in (0.0, 1.0, 1.0, 0.0)), 0.0)
    unit = unit_of(weight, Conv((1, 1), (kernel // 2, kernel // 2), (1, 1), 1))
    given = Inputs(x, norm, weight)
    output = cpu.kernels().norm_act_conv_forward(unit, given, Epilogue(with_stats=True))
    dy = torch.randn_like(output.y) + 1
    gradients = cpu.kernels().norm_act_conv_backward(unit, Gradient(dy), given, Wanted(True, True))
    y, g = output.y.double(), gradients.g.double()
    sums = torch.stack([g.sum((0, 2, 3)), (g * x).sum((0, 2, 3))])
    for found, expected in (
        (output.statistics.mean, y.mean((0, 2, 3))),
        (output.statistics.var, y.var((0, 2, 3), correction=0)),
        (gradients.sums, sums),
    ):
        assert distance(found, expected) < torch.finfo(torch.float32).eps / 2 * expected.norm()


@pytest.mark.parametrize("wanted", ["x", "conv_weight"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.covering(2)
def test_a_single_wanted_gradient(stride, dtype, wanted):
    case = ConvCase("", (9, 64, 5, 4), 128, stride=stride, padding=1, residual=True)
    inputs = conv_inputs(case, dtype)
    check_conv(inputs, [name for name in inputs if name != wanted], training=True, **case.conv)


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.covering(1)
def test_stages(dtype, kind):
    """Gradients of outputs with a deferred step, of blocks alone and in a run."""
    channels, width = (96, 96) if kind == "basic" else (576, 144)
    stage = in_dtype(pk.PreActStage([random_block(kind, channels, width) for _ in range(3)]), dtype)
    check(stage, plain_copy(stage), {"x": torch.randn(9, channels, 4, 3).to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.covering(1)
def test_threads_change_no_result(stride, dtype):
    case = ConvCase("", (17, 64, 9, 7), 128, stride=stride, padding=1, residual=True)
    inputs = conv_inputs(case, dtype)
    found = []
    for count in (1, 2, 5):
        with threads(count):
            found.append(evaluate(partial(pk.bn_relu_conv2d, training=True, **case.conv), inputs))
    assert "dconv_weight" in found[0] and "running_var" in found[0]
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


@pytest.mark.parametrize("images", [3, 8])
@pytest.mark.parametrize("tap", [0, 2, 6, 8])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.covering(2)
def test_a_weight_that_is_not_finite_stays_inside_the_image(training, stride, tap, value, images):
    case = ConvCase("", (images, 64, 4, 5), 128, stride=stride, padding=1)
    inputs = conv_inputs(case)
    inputs["conv_weight"].view(-1)[tap] = value
    assert_finite_as_in_eager(inputs, training=training, **case.conv)


@pytest.mark.parametrize(("channels", "out_channels"), [(640, 64), (64, 640)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.covering(1)
def test_a_last_channel_of_a_weight_that_is_not_finite(training, channels, out_channels):
    case = ConvCase("", (3, channels, 4, 5), out_channels, padding=1)
    inputs = conv_inputs(case)
    inputs["conv_weight"][-1, -1, 0, 0] = INF
    assert_finite_as_in_eager(inputs, training=training, **case.conv)


@pytest.mark.parametrize("images", [3, 8])
@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("column", [0, -1])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.covering(2)
def test_a_pixel_that_is_not_finite_stays_where_it_is_read(
    dtype, stride, column, row, where, images
):
    case = ConvCase("", (images, 64, 5, 5), 128, stride=stride, padding=1)
    inputs = conv_inputs(case, dtype)
    dy = torch.randn(images, 128, math.ceil(5 / stride), math.ceil(5 / stride)).to(dtype)
    {"x": inputs["x"], "dy": dy}[where][-1, 7, row, column] = INF
    arguments = {"training": False, **case.conv}
    found = evaluate(partial(pk.bn_relu_conv2d, **arguments), inputs, dy)
    plain = partial(plain_bn_relu_conv2d, conv2d=conv2d_inside_the_image, **arguments)
    for name, t in evaluate(plain, inputs, dy).items():
        assert torch.equal(found[name].isfinite(), t.isfinite()), name
