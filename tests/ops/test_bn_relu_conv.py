"""`bn_relu_conv2d` and `BNReLUConv2d` equal plain PyTorch on every backend."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

import preact_kernels as pk
from preact_kernels import torch_compat
from preact_kernels.kernels import cpu, cuda
from preact_kernels.kernels.contract import Conv, Unit
from preact_kernels.ops import dispatch
from tests.cases import (
    CONV_CASES,
    INF,
    NAN,
    ConvCase,
    conv2d_inside_the_image,
    conv_inputs,
    enough,
    plain_bn_relu_conv2d,
    randomised,
    rounded_conv2d,
)
from tests.oracle import (
    assert_finite_as_in_eager,
    assert_same_bits,
    check,
    check_conv,
    distance,
    evaluate,
    is_fused,
)

TYPICAL = ConvCase("typical", (3, 16, 6, 5), 24, padding=1, conv_bias=True, residual=True)
SLOW = (pytest.mark.slow,)
on_kernels = pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))
both_modes = pytest.mark.parametrize("training", [True, False])
needs_library = pytest.mark.skipif(
    bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"
)


def check_unit(case, training, dtype, count=None):
    problems = [conv_inputs(case, dtype) for _ in range(count or enough(case.x))]
    check_conv(problems, training=training, **case.conv)


# The quick suite runs these in Triton's interpreter and in the emulated CUDA library: some of each
# path, and some that the backend leaves to PyTorch.
QUICK = {
    "triton": (
        *("1x1_channels_17_to_48", "1x1_stride_2", "1x1_padded", "3x3_unpadded", "3x3_groups"),
        *("3x3_stride_3_by_1", "3x3_dilated_2_by_3_strided", "1x3_channels_16", "one_row"),
        *("5x1_channels_32_to_16", "one_column", "one_pixel_images", "same_even_kernel"),
    ),
    "cuda": (
        *("1x1_channels_16_to_64", "1x1_channels_64_to_16", "one_pixel_images_1x1", "3x3_groups"),
        *("3x3_channels_3_to_17", "3x3_channels_64", "many_pixels", "one_row", "one_column"),
        *("batch_1", "same_even_kernel"),
    ),
}


def cases_of(backend):
    marks = {name: () for name in QUICK[backend]}
    cases = [pytest.param(c, id=c.name, marks=marks.get(c.name, SLOW)) for c in CONV_CASES]
    return pytest.mark.parametrize("case", cases)


@pytest.mark.backends("cpu", slow=("reference",))
@pytest.mark.parametrize("case", CONV_CASES, ids=lambda c: c.name)
@both_modes
@pytest.mark.covering(1)
def test_forward_backward_and_running_statistics(case, training, dtype):
    check_unit(case, training, dtype)


@pytest.mark.backends("triton")
@cases_of("triton")
@both_modes
@pytest.mark.covering(1)
def test_triton_in_forward_backward_and_running_statistics(case, training, dtype):
    check_unit(case, training, dtype, 4)


@pytest.mark.backends("cuda")
@cases_of("cuda")
@both_modes
@pytest.mark.covering(1)
def test_cuda_in_forward_backward_and_running_statistics(case, training, dtype):
    check_unit(case, training, dtype)


# Strips of several images, of several vector blocks, and of many pixels; weights that are packed
# by squares, in one piece and with a rest.
CPU_CASES = (
    ConvCase("3x3_many_images", (17, 32, 3, 5), 64, padding=1, residual=True),
    ConvCase("3x3_many_rows", (2, 16, 40, 33), 32, padding=1),
    ConvCase("3x3_width_32", (2, 16, 3, 32), 16, padding=1),
    ConvCase("3x3_seven_columns", (2, 16, 3, 7), 16, padding=1),
    ConvCase("3x3_three_columns", (3, 16, 4, 3), 16, padding=1),
    ConvCase("5x3_channels_16", (3, 16, 5, 6), 16, (5, 3), padding=(2, 1)),
    ConvCase("1x1_strided", (3, 16, 7, 6), 32, 1, stride=(2, 1), residual=True),
    ConvCase("3x3_two_columns", (5, 16, 4, 2), 16, padding=1, residual=True),
    ConvCase("3x3_one_column", (5, 16, 4, 1), 16, padding=1),
    ConvCase("3x3_channels_144_to_48", (2, 144, 3, 5), 48, padding=1),
    ConvCase("3x3_channels_48_to_144", (2, 48, 3, 5), 144, padding=1),
    ConvCase("5x3_channels_48_to_80", (3, 48, 5, 6), 80, (5, 3), padding=(2, 1)),
    ConvCase("1x1_many_pixels", (3, 16, 29, 23), 64, 1, residual=True),
    ConvCase("1x1_channels_160_to_64", (1, 160, 9, 7), 64, 1),
    ConvCase("3x3_long_sums", (2, 448, 4, 3), 16, padding=1),
    ConvCase("3x3_large_weight", (2, 64, 29, 27), 128, padding=1),
    ConvCase("3x3_strided", (3, 32, 8, 6), 64, stride=2, padding=1, residual=True),
    ConvCase("3x3_strided_odd", (3, 64, 7, 9), 112, stride=2, padding=1),
    ConvCase("3x3_strided_down", (2, 16, 5, 6), 16, stride=(2, 1), padding=1),
    ConvCase("3x3_strided_right", (2, 16, 6, 5), 48, stride=(1, 2), padding=1),
    ConvCase("3x3_strided_many_images", (17, 32, 4, 5), 32, stride=2, padding=1),
    ConvCase("3x3_strided_many_rows", (2, 16, 41, 66), 32, stride=2, padding=1),
    ConvCase("3x3_strided_one_row", (3, 16, 1, 34), 16, stride=2, padding=1),
    ConvCase("3x3_strided_two_columns", (3, 16, 6, 2), 32, stride=2, padding=1),
    ConvCase("3x3_stride_3", (2, 16, 8, 7), 32, stride=3, padding=1, residual=True),
    ConvCase("3x3_stride_4", (2, 16, 9, 11), 16, stride=4, padding=1),  # skips pixels
    ConvCase("3x3_stride_of_any_length", (2, 16, 5, 6), 16, stride=(2**40, 7), padding=1),
    ConvCase("5x3_stride_3_2", (2, 32, 9, 7), 16, (5, 3), stride=(3, 2), padding=(2, 1)),
    ConvCase("3x3_strided_long_sums", (2, 448, 4, 3), 16, stride=2, padding=1),
)


FLOAT16_CASES = (
    *("3x3_many_images", "3x3_three_columns", "1x1_many_pixels", "3x3_long_sums"),
    *("3x3_strided_odd", "5x3_stride_3_2"),
)
# Some in float16: its kernels are those of float32 with a conversion.
CPU_PROBLEMS = [
    *itertools.product(CPU_CASES, (torch.float32, torch.bfloat16)),
    *((case, torch.float16) for case in CPU_CASES if case.name in FLOAT16_CASES),
]


@pytest.mark.backends("cpu")
@needs_library
@pytest.mark.parametrize("problem", CPU_PROBLEMS, ids=lambda p: f"{p[0].name}-{p[1]}")
@pytest.mark.parametrize("nhwc_weight", [True, False])
@pytest.mark.covering(1)
def test_strips_and_packed_weights_on_the_cpu(problem, nhwc_weight, every_weight_is_fused):
    case, dtype = problem
    problems = [conv_inputs(case, dtype) for _ in range(enough(case.x))]
    for inputs in problems if nhwc_weight else ():
        weight = inputs["conv_weight"]
        inputs["conv_weight"] = weight.contiguous(memory_format=torch.channels_last)
    check_conv(problems, conv2d=rounded_conv2d, training=True, **case.conv)


@needs_library
@pytest.mark.parametrize(("channels", "out_channels"), [(448, 16), (512, 64)])
def test_long_sums_are_sums_of_short_ones(channels, out_channels, every_weight_is_fused):
    x, weight = torch.randn(1, channels, 3, 3), torch.randn(out_channels, channels, 3, 3)
    zeros, ones = torch.zeros(channels), torch.ones(channels)
    norm = (ones, zeros, zeros.clone(), ones * 0.75)
    with pk.use_backend("cpu"):
        y = pk.bn_relu_conv2d(x, weight, *norm, training=False, padding=1, eps=0.25)
    products = x.relu() * weight  # the taps of the middle pixel
    truth = products.double().flatten(1).sum(1)
    in_one_sum = torch.zeros(out_channels)
    for product in products.flatten(1).T:
        in_one_sum += product
    assert distance(y[0, :, 1, 1], truth) < distance(in_one_sum, truth) / 2


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["x", "dy", "conv_weight"])
@pytest.mark.parametrize("place", [(0, 0), (1, 4), (2, 4)])
def test_infinity_at_the_sides_of_an_odd_row(place, where, dtype):
    """No 0 * infinity beside the image, or after the last pixel of a product of several."""
    inputs = conv_inputs(ConvCase("odd", (2, 16, 3, 5), 16, padding=1), dtype)
    inputs["bn_weight"].abs_()
    inputs["bn_bias"] += 10  # no activation is 0
    row, column = place
    dy = torch.randn(2, 16, 3, 5).to(dtype)
    tensors = {**inputs, "dy": dy}
    tensors[where][0, :, row, column if where != "conv_weight" else column // 2] = INF
    op = partial(pk.bn_relu_conv2d, training=False, padding=1)
    with pk.use_backend("cpu"):
        found = evaluate(op, inputs, dy)
    plain = partial(plain_bn_relu_conv2d, conv2d=conv2d_inside_the_image, training=False, padding=1)
    full = {n: t if t is None else t.float() for n, t in inputs.items()}
    expected = evaluate(plain, full, dy.float())
    for name in ("y", "dx", "dconv_weight"):
        assert torch.equal(found[name].isinf(), expected[name].isinf()), name
        assert torch.equal(found[name].isnan(), expected[name].isnan()), name
    infinite = expected["y" if where == "conv_weight" else "dconv_weight"]
    assert infinite.isinf().any() and infinite.isfinite().any()


LARGE, POINTWISE, SMALL = (512, 512, 3, 3), (2048, 512, 1, 1), (64, 64, 3, 3)
HALF = (torch.bfloat16, torch.float16)
# Channels per vector, whether there is AMX, threads, weight, dtypes, and pixels that are fused or
# not. Activations are many from 2M, or from 4 times the weights.
FUSED = [
    (16, False, 2, LARGE, (torch.float32,), {None: True, 1: True, 2048: True, 2049: True}),
    (16, False, 2, LARGE, HALF[:1], {None: True, 2048: True, 2049: False, 9216: True}),
    (16, False, 2, SMALL, HALF, {10**9: True}),
    (16, False, 4, (256, 64, 3, 3), HALF[:1], {1843: True, 1844: False}),
    (16, False, 4, POINTWISE, (torch.float32,), {820: True}),
    (16, True, 4, LARGE, (torch.float32,), {None: True}),
    (16, True, 4, LARGE, HALF, {None: False}),
    (8, True, 4, SMALL, HALF[:1], {1: True}),
    (8, True, 4, LARGE, HALF[:1], {1: False}),
    (8, True, 4, POINTWISE, (torch.float32,), {819: True, 820: False}),
    (8, True, 4, (1032, 512, 1, 1), (torch.float32,), {10**9: False}),
    (8, True, 4, (1024, 512, 1, 1), (torch.float32,), {10**9: True}),
    (8, False, 4, POINTWISE, HALF[:1], {820: True}),
    (8, False, 64, LARGE, (torch.float32,), {7372: False, 7373: True}),
    (8, False, 64, LARGE, HALF, {2049: True}),
    (4, False, 64, LARGE, (torch.float32,), {1: False}),
    (4, False, 64, SMALL, (torch.float32,), {1: True}),
]


@needs_library
def test_which_large_weights_the_cpu_fuses(monkeypatch):
    kernels, device = cpu.kernels(), torch.device("cpu")
    for channels, has_amx, threads, shape, dtypes, expected in FUSED:
        monkeypatch.setitem(kernels.__dict__, "_channel_multiple", channels)
        kernels._refusals.clear()
        monkeypatch.setattr(torch_compat, "has_amx", lambda has_amx=has_amx: has_amx)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        conv = Conv((1, 1), (shape[2] // 2, shape[3] // 2), (1, 1), 1)
        for dtype in dtypes:
            unit = Unit(shape, conv, device, *[dtype] * 4)
            found = {pixels: not kernels.refusal(unit, pixels) for pixels in expected}
            assert found == expected, (shape, dtype)
    kernels._refusals.clear()


@pytest.mark.backends("cpu", "triton", "cuda")
def test_momentum_and_eps(backend):
    case = TYPICAL._replace(x=(2, 16, 4, 3))
    check_conv(conv_inputs(case), training=True, momentum=0.3, eps=1.0, **case.conv)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize(
    "missing", [("bn_weight",), ("bn_bias",), ("running_mean", "running_var")], ids="-".join
)
def test_without_parameters_or_running_statistics(missing, training_dtype):
    inputs = conv_inputs(TYPICAL, training_dtype) | dict.fromkeys(missing)
    check_conv(inputs, training=True, **TYPICAL.conv)


@pytest.mark.backends("cpu")
def test_parameters_in_the_dtype_of_half_precision_activations(backend):
    inputs = conv_inputs(TYPICAL, torch.bfloat16)
    check_conv({n: t.bfloat16() for n, t in inputs.items()}, training=True, **TYPICAL.conv)


# An infinite bn_weight is left out: eager forms x * weight + (bias - mean * weight) and gets NaN
# where (x - mean) * weight is an infinity.
# 24 and 32 output channels are those that some and that all instruction sets serve directly.
@pytest.mark.backends("cpu", "triton", "cuda")
@pytest.mark.covering(1, cpu=2)
@pytest.mark.parametrize(("kernel", "out_channels"), [(3, 24), (3, 32), (1, 24)])
@both_modes
@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(("x", value) for value in (NAN, INF, -INF)),
        *(("bn_weight", NAN), ("bn_bias", -INF), ("conv_weight", INF), ("residual", NAN)),
    ],
)
def test_nan_and_inf_spread_as_in_eager(where, value, training, kernel, out_channels, backend):
    case = TYPICAL._replace(kernel=kernel, padding=kernel // 2, out_channels=out_channels)
    inputs = conv_inputs(case)
    inputs[where].view(-1)[3] = value
    assert_finite_as_in_eager(inputs, training=training, **case.conv)


def not_finite(x, conv_weight, dy, **conv):
    """Which results are not finite if a tap outside of the image adds nothing."""
    bad_weight, bad_dy = (1.0 - t.isfinite().double() for t in (conv_weight, dy))
    x = torch.ones_like(x, dtype=torch.float64)
    both = ((bad_weight, torch.ones_like(bad_dy)), (torch.ones_like(bad_weight), bad_dy))
    return {
        "y": F.conv2d(x, bad_weight, **conv) > 0,
        "dx": sum(conv2d_input(x.shape, *pair, **conv) for pair in both) > 0,
        "dconv_weight": conv2d_weight(x, bad_weight.shape, bad_dy, **conv) > 0,
    }


# One row, one column: taps on the sides read nothing but the padding. 70 rows: several strips.
@pytest.mark.backends("cpu", "triton", "cuda")
@pytest.mark.covering(1, cpu=2)
@pytest.mark.parametrize("where", ["conv_weight", "dy"])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        *(((16, 3, 1), 1), ((16, 1, 3), 1), ((16, 6, 5), 1), ((16, 70, 5), 1)),
        *(((16, 6, 5), 2), ((16, 70, 5), 2)),
    ],
    ids=str,
)
def test_which_results_are_not_finite_for_taps_outside_of_the_image(
    shape, stride, where, dtype, monkeypatch
):
    check_taps_outside_of_the_image(shape, stride, where, dtype, monkeypatch)


# 96 channels: weight-stationary convolutions of the CPU library.
@pytest.mark.backends("cpu")
@pytest.mark.covering(2)
@pytest.mark.parametrize("where", ["conv_weight", "dy"])
def test_which_results_of_a_large_weight_are_not_finite(where, dtype, processor, monkeypatch):
    """In oneDNN's convolutions with AMX the padding takes part, as in PyTorch's without oneDNN."""
    for is_enabled in (True, False):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", is_enabled)
        check_taps_outside_of_the_image((96, 3, 3), 1, where, dtype, monkeypatch)


def check_taps_outside_of_the_image(shape, stride, where, dtype, monkeypatch):
    """The CPU library leaves them out; GPU backends may multiply weights by zeros there.

    Where PyTorch's convolution runs, they are what they are in plain PyTorch on this processor.
    """
    monkeypatch.setattr(cuda, "_may_round_to_tf32", lambda: True)  # else PyTorch's convolution
    channels, *size = shape
    case = ConvCase("padded", (2, *shape), channels, stride=stride, padding=1)
    inputs = conv_inputs(case, dtype)
    inputs["bn_bias"] = torch.full_like(inputs["bn_bias"], 100.0)  # ReLU passes all values
    dy = torch.randn(2, channels, *(math.ceil(n / stride) for n in size)).to(dtype)
    if where == "dy":
        dy[1, 3, -1, -1] = NAN
        dy[0, 7, 0, 0] = INF
    else:
        inputs["conv_weight"][3, 5, 1, 0] = NAN
        inputs["conv_weight"][7, 2, 0, 1] = INF
        inputs["conv_weight"][9, 1, 2, 2] = INF
    found = evaluate(partial(pk.bn_relu_conv2d, training=False, **case.conv), inputs, dy)
    if not is_fused(inputs, **case.conv):
        plain = evaluate(partial(plain_bn_relu_conv2d, training=False, **case.conv), inputs, dy)
        for name, expected in plain.items():
            assert torch.equal(found[name].isfinite(), expected.isfinite()), name
        return
    least = not_finite(inputs["x"], inputs["conv_weight"], dy, stride=stride, padding=1)
    most = dict(least)
    if dispatch.current() != "cpu":
        bad = ~inputs["conv_weight"].isfinite().flatten(2).all(2)
        most["y"] = least["y"] | bad.any(1)[:, None, None]
        most["dx"] = least["dx"] | bad.any(0)[:, None, None]
    for name in least:
        is_bad = ~found[name].isfinite()
        assert (is_bad >= least[name]).all() and (is_bad <= most[name]).all(), name


@pytest.mark.backends("cpu", "triton", "cuda")
@pytest.mark.covering(1)
@both_modes
@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (3, 4)])
def test_infinity_in_a_pixel_that_no_output_reads_spreads_as_in_eager(
    kernel, stride, training, backend
):
    padding = kernel // 2
    case = ConvCase("", (2, 16, 6, 5), 32, kernel, stride=stride, padding=padding)
    inputs = conv_inputs(case)
    inputs["x"][0, 3, stride - padding - 1, 1] = INF
    assert_finite_as_in_eager(inputs, training=training, **case.conv)


class PlainBNReLUConv2d(nn.Module):
    """The expression that `pk.BNReLUConv2d` equals."""

    def __init__(self, bn, conv):
        super().__init__()
        self.bn, self.conv = bn, conv
        self.training = bn.training

    def forward(self, x, residual=None):
        y = self.conv(F.relu(self.bn(x)))
        return y if residual is None else y + residual


MODULES = {
    "3x3": dict(in_channels=16, out_channels=24, kernel_size=3, padding=1),
    "strided_with_bias": dict(
        in_channels=16, out_channels=10, kernel_size=(3, 1), stride=2, padding=(1, 0), bias=True
    ),
    "groups_eps_momentum": dict(
        in_channels=16, out_channels=8, kernel_size=1, groups=4, eps=1e-3, momentum=0.5
    ),
    "cumulative_average": dict(
        in_channels=16, out_channels=8, kernel_size=3, dilation=2, padding="same", momentum=None
    ),
}


@pytest.mark.covering(1)
@pytest.mark.backends("cpu")
@both_modes
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_module_equals_its_children_called_in_turn(options, training, training_dtype):
    module = randomised(pk.BNReLUConv2d(**options)).train(training)
    module.conv.to(training_dtype)
    inputs = {"x": torch.randn(3, 16, 7, 6).to(training_dtype)}
    if options["kernel_size"] == 3:
        inputs["residual"] = torch.randn_like(module(inputs["x"]))
    check(module, PlainBNReLUConv2d(module.bn, module.conv), inputs)


def test_from_modules_shares_the_modules_given():
    bn, conv = nn.BatchNorm2d(4).eval(), nn.Conv2d(4, 6, 1)
    module = pk.BNReLUConv2d.from_modules(bn, conv)
    assert module.bn is bn and module.conv is conv
    assert not module.training


def test_modules_share_the_keys_and_initial_values_of_plain_ones():
    torch.manual_seed(3)
    module = pk.BNReLUConv2d(4, 6, 3, bias=True)
    torch.manual_seed(3)
    plain = PlainBNReLUConv2d(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3))
    assert_same_bits(module.state_dict(), plain.state_dict())
