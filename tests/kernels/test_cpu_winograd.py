"""3x3 convolutions of the CPU library by Winograd's minimal filtering (kernels/winograd.h)."""

from functools import partial

import pytest
import torch

import preact_kernels as pk
from preact_kernels.kernels import cpu
from tests.cases import (
    INF,
    NAN,
    ConvCase,
    conv2d_inside_the_image,
    conv_inputs,
    plain_bn_relu_conv2d,
)
from tests.oracle import (
    assert_same_bits,
    assert_within_budget,
    check_conv,
    eager_errors,
    evaluate,
    evaluate_all,
    same_bits,
)
from tests.reruns import threads

pytestmark = [
    pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"),
    pytest.mark.backends("cpu"),
    pytest.mark.usefixtures("every_weight_is_fused"),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# On every instruction set: channels of one vector, whose products replace their operands, and of
# several. Rows of more tiles than are multiplied at once; strips of different lengths; strips of
# several images; one tile left of four.
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


def has_winograd(x, weight, stride=(1, 1)):
    """Whether minimal filtering serves a convolution of this shape, forward and backward."""
    x = x.contiguous(memory_format=torch.channels_last)
    return torch.ops.preact_kernels_cpu.conv_route(x, weight, list(stride))[1]


def has_dot_products(dtype):
    return dtype == torch.bfloat16 and "bf16" in cpu.kernels().instruction_set


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_that_are_served(dtype):
    expected = not has_dot_products(dtype)
    for case in CASES:
        inputs = conv_inputs(case, dtype)
        assert has_winograd(inputs["x"], inputs["conv_weight"]) == expected, case.name
    weight = torch.empty(32, 16, 3, 3, dtype=dtype)
    assert has_winograd(torch.empty(1, 16, 4, 4, dtype=dtype), weight) == expected
    for size in ((2, 4), (4, 2), (5, 4), (4, 5)):
        assert not has_winograd(torch.empty(1, 16, *size, dtype=dtype), weight)
    x = torch.empty(1, 16, 8, 8, dtype=dtype)
    for kernel in ((1, 1), (3, 5), (5, 3), (5, 5)):
        assert not has_winograd(x, torch.empty(32, 16, *kernel, dtype=dtype))
    assert not has_winograd(x, weight, (2, 2)) and not has_winograd(x, weight, (1, 2))


def test_few_values_of_a_large_weight_are_weight_stationary():
    """The limits, 0.4 and 0.8 activations per weight, are of 28.8 and 57.6 rows."""
    weight = torch.empty(128, 128, 3, 3)
    for height, route in ((28, (True, False)), (30, (False, False)), (58, (False, True))):
        x = torch.empty(1, 128, height, 8).contiguous(memory_format=torch.channels_last)
        assert torch.ops.preact_kernels_cpu.conv_route(x, weight, [1, 1]) == route


EXACT = {"training": False, "eps": 0.0, "padding": 1}


def exact_inputs(x, weight):
    """Arguments of a `bn_relu_conv2d` whose norm changes no number."""
    one = torch.ones(x.shape[1])
    return {
        "x": x,
        **{"bn_weight": one, "bn_bias": 0 * one, "running_mean": 0 * one, "running_var": one},
        "conv_weight": weight,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.covering(1)
def test_every_row_is_by_minimal_filtering(case):
    """A further column of zeros makes the width odd, and sums direct: other bits, alike numbers."""
    weight = conv_inputs(case)["conv_weight"]
    inputs = exact_inputs(torch.rand(case.x) + 0.5, weight)
    dy = torch.randn(case.x[0], case.out_channels, *case.x[2:])
    found = evaluate(partial(pk.bn_relu_conv2d, **EXACT), inputs, dy)
    wide = torch.nn.functional.pad(inputs["x"], (0, 1), value=-1.0)  # the ReLU returns 0
    direct = evaluate(
        partial(pk.bn_relu_conv2d, **EXACT),
        {**inputs, "x": wide},
        torch.nn.functional.pad(dy, (0, 1)),
    )
    for name in ("y", "dx"):
        a, b = found[name], direct[name][..., :-1]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
        assert (a != b).any(3).any(1).all(), name  # in every row of every image


def test_weight_gradients_are_by_minimal_filtering():
    """One pixel of dy: direct gradients of taps are the values of x there."""
    x = torch.full((2, 32, 8, 8), 1.5)
    x[0, :, 4, 4] = 2.0**30
    dy = torch.zeros(2, 16, 8, 8)
    dy[0, :, 4, 4] = 1.0
    inputs = exact_inputs(x, torch.randn(16, 32, 3, 3))
    found = evaluate(partial(pk.bn_relu_conv2d, **EXACT), inputs, dy)["dconv_weight"]
    exact = torch.full((16, 32, 3, 3), 1.5)
    exact[:, :, 1, 1] = 2.0**30
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0, atol=2.0**8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "dtype",  # some processors multiply bfloat16 otherwise
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.covering(1)
def test_forward_and_backward(training, dtype, case):
    check_conv([conv_inputs(case, dtype)], training=training, **case.conv)


IMAGES = ConvCase("", (4, 32, 8, 8), 48, padding=1)
SMALL_IMAGES = ConvCase("", (33, 64, 4, 6), 48, padding=1)  # several in a strip


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


MAGNITUDES = [
    *(
        {which: scale}
        for which in ("x", "dy", "conv_weight")
        for scale in (1e-42, 1e-30, 1e12, 1e30)
    ),
    *({"x": 2.0**60, "conv_weight": 2.0**60}, {"dy": 2.0**60, "conv_weight": 2.0**60}),
    {"x": 2.0**59, "dy": 2.0**59},
    *({"x": 1e-19, "conv_weight": 1e-20}, {"dy": 1e-19, "conv_weight": 1e-20}),
]


@pytest.mark.parametrize("scales", MAGNITUDES, ids=str)
def test_magnitudes(scales):
    """Sums of products of large numbers do not overflow, and small ones do not vanish."""
    inputs, dy = conv_inputs(IMAGES), torch.randn(4, 48, 8, 8)
    inputs["running_mean"].zero_()
    inputs["bn_bias"].zero_()
    if "x" in scales and "conv_weight" in scales and scales["x"] < 1:
        dy = dy * 1e19  # gradients of the parameters of denormal numbers
    inputs["dy"] = dy
    for which, scale in scales.items():
        inputs[which] = inputs[which] * scale
    dy = inputs.pop("dy")
    assert_near(inputs, dy)


def with_one_tap(kind):
    """Weights of which few taps count."""
    weight = torch.zeros(32, 32, 3, 3)
    if kind == "dirac":
        torch.nn.init.dirac_(weight)
    elif kind == "shift":
        weight[torch.arange(32), torch.arange(32), 0, 0] = 1.0
    elif kind == "causal":  # a masked convolution of a PixelCNN
        weight = torch.randn(32, 32, 3, 3) / 17
        weight[:, :, 1, 1:] = weight[:, :, 2] = 0
    elif kind == "corner":
        weight[:, :, 0, 2] = torch.randn(32, 32) / 6
    elif kind == "nearly_corner":
        weight = torch.randn(32, 32, 3, 3) / 1e4
        weight[:, :, 0, 2] = torch.randn(32, 32) / 6
    return weight


@pytest.mark.parametrize("kind", ["dirac", "shift", "causal", "corner", "nearly_corner"])
def test_weights_of_few_taps(kind):
    case = ConvCase("", (8, 32, 4, 4), 32, padding=1)
    inputs = {**conv_inputs(case), "conv_weight": with_one_tap(kind)}
    inputs["x"] = torch.distributions.StudentT(1.5).sample(case.x)  # large beside small values
    assert_near(inputs, torch.distributions.StudentT(1.5).sample((8, 32, 4, 4)), case)


def test_no_value_passes_through_a_weight_of_zero():
    weight, x = with_one_tap("causal"), torch.rand(1, 32, 8, 8)
    before = pk.bn_relu_conv2d(**exact_inputs(x.clone(), weight), **EXACT)
    x[0, :, 4, 4] = 1e6
    after = pk.bn_relu_conv2d(**exact_inputs(x, weight), **EXACT)
    assert torch.equal(after[:, :, :4], before[:, :, :4])
    assert torch.equal(after[:, :, 4, :5], before[:, :, 4, :5])
    assert not torch.equal(after[:, :, 4, 5], before[:, :, 4, 5])


@pytest.mark.parametrize("case", [IMAGES, SMALL_IMAGES], ids=["images", "small_images"])
@pytest.mark.parametrize("which", ["x", "dy", "conv_weight"])
@pytest.mark.parametrize("value", [NAN, INF, 3e38])
@pytest.mark.parametrize("place", [0, 11, -1])
@pytest.mark.covering(2)
def test_a_value_out_of_range_stays_where_it_is_read(place, value, which, case):
    inputs = conv_inputs(case)
    dy = torch.randn(case.x[0], 48, *case.x[2:]) / 1000
    inputs["conv_weight"] /= 1000
    inputs["running_mean"].zero_()
    inputs["running_var"].fill_(1)
    inputs["bn_weight"].fill_(1)
    if which == "conv_weight":
        inputs["x"] /= 1000
        inputs["bn_bias"] /= 1000
        inputs[which][place, place].view(-1)[place % 9] = value
    else:
        image = {"x": inputs["x"], "dy": dy}[which][min(6, case.x[0] - 1), 5]
        image.view(-1)[place] = value
        image.view(-1)[place - 1] = value  # a sum of neighbours overflows
    options = {"training": False, **case.conv}
    found = evaluate(partial(pk.bn_relu_conv2d, **options), inputs, dy)
    plain = partial(plain_bn_relu_conv2d, conv2d=conv2d_inside_the_image, **options)
    for name, t in evaluate(plain, inputs, dy).items():
        assert torch.equal(found[name].isnan(), t.isnan()), name
        assert torch.equal(found[name].isinf(), t.isinf()), name


@pytest.mark.parametrize("value", [1.0, INF, 3e12, 1e-25])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.covering(1)
def test_threads_change_no_activation_and_no_input_gradient(case, value):
    inputs, found = conv_inputs(case), []
    inputs["x"][-1] *= value
    for count in (1, 2, 5):
        with threads(count):
            results = evaluate(partial(pk.bn_relu_conv2d, training=False, **case.conv), inputs)
        del results["dconv_weight"]  # in the order of the threads' parts
        found.append(results)
    assert "y" in found[0] and "dx" in found[0]
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_an_image_does_not_depend_on_others():
    inputs = conv_inputs(SMALL_IMAGES)
    y = pk.bn_relu_conv2d(**inputs, training=False, **SMALL_IMAGES.conv)
    inputs["x"][5] *= 1e15
    after = pk.bn_relu_conv2d(**inputs, training=False, **SMALL_IMAGES.conv)
    others = torch.arange(33) != 5
    assert same_bits(after[others], y[others])


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=lambda case: case.name)
def test_negated_weights_negate_every_bit(case):
    """A block's input is rebuilt so."""
    inputs = {**conv_inputs(case), "conv_bias": None, "residual": None}
    y = pk.bn_relu_conv2d(**inputs, training=False, **case.conv)
    inputs["conv_weight"] = -inputs["conv_weight"]
    assert same_bits(-pk.bn_relu_conv2d(**inputs, training=False, **case.conv), y)
