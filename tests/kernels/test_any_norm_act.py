"""Every activation, norms with rows and statistics of groups, by the kernels of every library.

Without a GPU the CUDA kernels run on the host (`testbed/cuda_on_host/`).
"""

import re

import pytest
import torch

from preact_kernels.activations import ACTIVATIONS, Activation, activate, activation_gradient
from preact_kernels.kernels import reference
from preact_kernels.kernels.contract import (
    AffineStep,
    Gradient,
    Norm,
    pool_sums,
    statistics_dtype,
)
from preact_kernels.ops import dispatch
from testbed.host_compiler import ROOT
from tests.cases import INF, NAN, SERVED_DTYPES, gradient_on_gpu, served_by_vectors
from tests.kernels.cuda_conv_cases import set_schedule
from tests.kernels.op_cases import NORM_OPS, arguments, check_ops, random_images, run
from tests.oracle import assert_same_bits, assert_within_budget, same_bits, unit_roundoff

pytestmark = [
    pytest.mark.backends("cpu", "triton", "cuda"),
    pytest.mark.usefixtures("first_schedule"),
]

# Parameters other than 1. That of softplus is a power of two, so that beta * p is exact.
PARAMETERS = {"leaky_relu": 0.25, "elu": 1.5, "softplus": 2.0}
ALL_ROWS = "mean var weight bias"


def kernels():
    """The kernels of the backend under test."""
    return dispatch.kernels_for(torch.empty(1))


def nhwc(t):
    return t.contiguous(memory_format=torch.channels_last)


def of_kernels(p, dy, activation):
    """`act(p)` and `dy * act'(p)` for 1-d tensors, by a norm for which p is x."""
    x, gradient = (nhwc(t.view(1, 1, 1, -1)) for t in (p, dy))
    one = torch.ones(1, dtype=statistics_dtype(x.dtype))
    norm = Norm(0 * one, one, one, 0 * one, 0.0, *activation)
    y = kernels().norm_act_forward(x, norm)
    g, sums = kernels().norm_act_backward(gradient, x, norm, True)
    step = AffineStep(None, x, norm, sums, 0.0)
    assert same_bits(g, kernels().norm_input_gradient(Gradient(gradient, step), True))
    return y.flatten(), g.flatten()


def test_compiled_libraries_have_the_activations_of_python():
    rows = re.findall(r'^  macro\(\w+, "(\w+)"\)', (ROOT / "csrc/args.h").read_text(), re.M)
    assert rows == list(ACTIVATIONS)
    assert PARAMETERS.keys() == {name for name, row in ACTIVATIONS.items() if row.parameter}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_derivatives_over_the_whole_range(name, backend):
    activation = Activation(name, PARAMETERS.get(name, 0.0))
    for dtype in SERVED_DTYPES[backend]:
        check_special_values(activation, dtype, backend)
        check_values_and_derivatives(activation, dtype, backend)


def check_values_and_derivatives(activation, dtype, backend):
    name = activation.name
    sizes = torch.logspace(-320, 309, 4000, dtype=torch.float64)
    sizes = sizes.clamp(max=torch.finfo(dtype).max)
    p = torch.cat([torch.linspace(-110, 110, 9001, dtype=torch.float64), sizes, -sizes]).to(dtype)
    if backend == "triton":
        p = p[::4]
    dy = torch.ones_like(p)
    found = of_kernels(p, dy, activation)
    wide = p.double()
    truth = activate(wide, activation), activation_gradient(dy.double(), wide, activation)
    wide = p.to(statistics_dtype(dtype))
    eager = activate(wide, activation), activation_gradient(torch.ones_like(wide), wide, activation)
    u = unit_roundoff(statistics_dtype(dtype))
    for kind, ours, eagers, exact in zip(("value", "derivative"), found, eager, truth, strict=True):
        scale = exact.abs()
        if backend == "triton":  # does not keep the last bits of values near 0
            scale = torch.maximum(scale, p.double().abs().clamp(max=1))
        if "gelu" in name:  # a difference of two numbers
            scale = torch.maximum(scale, p.double().abs().clamp(max=8))
        if kind == "derivative":  # some multiply 1 - tanh^2 by up to 50
            scale = scale.clamp(min=50 if name in ("gelu_tanh", "mish") else 1)
        tiny = torch.finfo(dtype).smallest_normal * unit_roundoff(dtype)
        bound = 2 * (eagers.double() - exact).abs() + 6 * u * scale
        bound += unit_roundoff(dtype) * exact.abs() + 2 * tiny
        error = (ours.double() - exact).abs()
        finite = eagers.isfinite() & exact.to(dtype).isfinite()
        assert not ours[finite].isnan().any()
        worst = (error - bound)[finite].argmax()
        assert (error <= bound)[finite].all(), (kind, p[finite][worst], ours[finite][worst])


def check_special_values(activation, dtype, backend):
    """NaN, infinities, kinks, very large and very small values are as in PyTorch."""
    special = [NAN, INF, -INF, 0.0, 3.0, -3.0, 6.0, 20.0, 10.0, 1e30, -1e30, -750.0, -1e-320]
    special = served_by_vectors(activation.name, special, dtype)
    p = torch.tensor(special, dtype=dtype).repeat(64)  # PyTorch has another formula for a rest
    derivative = activation_gradient if backend == "cpu" else gradient_on_gpu
    for dy in (2.0, NAN):
        gradient = torch.full_like(p, dy)
        wide = p.to(statistics_dtype(dtype))
        eager = activate(wide, activation), derivative(gradient.to(wide), wide, activation)
        for ours, expected in zip(of_kernels(p, gradient, activation), eager, strict=True):
            assert torch.equal(ours.isnan(), expected.isnan()), (dtype, p, ours, expected)
            assert torch.equal(ours.isinf(), expected.to(dtype).isinf())
            near = torch.isclose(ours.double(), expected.double(), 0.01, 1e-6, equal_nan=True)
            assert near.all(), p[~near]


# Dtype, shape, elements that memory is off, tables with rows, activation. Among the shapes are odd
# channels, images of one pixel and of several tiles, and more images and channels than a block has.
CASES = (
    (torch.float32, (3, 1, 5, 7), 0, "mean", "silu"),
    (torch.bfloat16, (5, 17, 5, 4), 0, ALL_ROWS, "gelu"),
    (torch.float16, (2, 100, 3, 5), 0, "weight bias", "mish"),
    (torch.float32, (2, 16, 9, 11), 0, "bias", "gelu_tanh"),
    (torch.bfloat16, (3, 16, 9, 11), 0, "mean var", "elu"),
    (torch.float16, (33, 24, 1, 1), 0, ALL_ROWS, "leaky_relu"),
    (torch.bfloat16, (2, 520, 2, 3), 0, "mean var weight", "hardswish"),
    (torch.float16, (2, 16, 3, 5), 4, ALL_ROWS, "softplus"),
    (torch.float32, (2, 16, 3, 5), 1, ALL_ROWS, "sigmoid"),
    (torch.float32, (2, 12, 31, 33), 0, "mean var bias", "relu"),
    (torch.bfloat16, (2, 40, 5, 3), 0, "", "silu"),
    (torch.float16, (3, 7, 5, 3), 0, "", "tanh"),
    (torch.bfloat16, (3, 12, 5, 3), 0, "bias", "gelu_tanh"),
    (torch.float16, (2, 10, 9, 5), 0, ALL_ROWS, "silu"),
    (torch.float32, (2, 24, 17, 9), 0, "", "relu6"),
    (torch.float32, (2, 24, 5, 3), 0, "weight", "identity"),
    (torch.float32, (1, 1041, 9, 8), 0, "", "relu"),
)


@pytest.mark.parametrize(("dtype", "shape", "offset", "rows", "activation"), CASES, ids=str)
def test_norm_ops_equal_their_specification(dtype, shape, offset, rows, activation, backend):
    given = arguments(shape, dtype, None, offset, rows, activation)
    found = check_ops(given, NORM_OPS, kernels())
    for op in ("norm_act_backward", "norm_act_backward from y"):
        assert_same_bits({"sums": found[f"{op} without g 1"]}, {"sums": found[f"{op} 1"]})


@pytest.mark.backends("cpu")
@pytest.mark.parametrize(("dtype", "shape", "offset", "rows", "activation"), CASES, ids=str)
def test_one_pass_gives_the_bits_of_two(dtype, shape, offset, rows, activation, backend):
    x, dy, norm, *_ = arguments(shape, dtype, None, offset, rows, activation)
    g, sums = kernels().norm_act_backward(dy, x, norm, True)
    a = kernels().norm_act_forward(x, norm)
    unchanged = dy.clone(memory_format=torch.preserve_format)
    *two, nothing = kernels().masked(dy, x, norm, False)
    assert nothing is None and same_bits(dy, unchanged)
    assert all(map(same_bits, two, (g, sums)))
    assert all(map(same_bits, kernels().masked(dy, x, norm, True), (g, sums, a)))


def test_norm_ops_with_rows_in_evaluation_mode_equal_their_specification(backend):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = arguments((2, 24, 5, 3), dtype, 0.0, 0, "weight bias", "silu")
        check_ops(given, NORM_OPS, kernels())
        given.x[0, 3] = INF
        assert kernels().norm_input_gradient(given.gradient).isfinite().all()


def test_no_gradient_passes_where_a_rounded_pre_activation_with_rows_is_zero(backend):
    given = arguments((2, 16, 3, 5), torch.float16, 0.0, 0, "weight")
    norm = given.norm._replace(weight=torch.full((2, 16), 1e-9), bias=torch.zeros(16))
    y = torch.zeros_like(given.y)
    step = given.step._replace(norm=norm, skip=torch.zeros_like(given.x))
    given = given._replace(norm=norm, step=step, y=y)
    for op in NORM_OPS:
        if "backward" in op or "activated" in op:
            assert not any(t.any() for t in run(kernels(), op, given).values()), op


def results_of_images(given):
    """The results of all ops and the statistics of groups, by image."""
    of_batch = kernels().group_stats(given.x, 1)._asdict()
    for op in NORM_OPS:
        of_batch |= run(kernels(), op, given)
    images = range(given.x.shape[0])
    return [{n: t[:, i] if t.dim() == 3 else t[i] for n, t in of_batch.items()} for i in images]


def test_an_image_has_the_same_bits_alone_and_beside_nan(backend):
    set_schedule(0, 8)
    size = (41, 31) if backend != "triton" else (13, 15)  # several blocks an image
    given = arguments((3, 20, *size), torch.float32, None, 0, ALL_ROWS, "silu")
    clean = results_of_images(given)
    (alone,) = results_of_images(given.image(2))
    assert_same_bits(clean[2], alone)
    for t in (given.x, given.dy, *given.norm[:4]):
        t[1] = NAN
    found = results_of_images(given)
    for image in (0, 2):
        assert_same_bits(found[image], clean[image])
    assert found[1]["norm_act_forward 0"].isnan().all()


# Shape, groups, dtype, elements that memory is off.
GROUP_CASES = (
    ((3, 12, 5, 7), 3, torch.float32, 0),
    ((2, 17, 5, 4), 17, torch.bfloat16, 0),
    ((2, 100, 3, 5), 1, torch.float16, 0),
    ((5, 24, 1, 1), 2, torch.bfloat16, 0),
    ((2, 1040, 2, 3), 2, torch.bfloat16, 0),
    ((1, 300, 2, 3), 300, torch.float32, 0),
    ((2, 20, 31, 29), 4, torch.bfloat16, 0),
    ((2, 6, 5, 3), 3, torch.float16, 0),
    ((2, 16, 57, 43), 4, torch.float16, 0),
    ((2, 16, 3, 5), 8, torch.float32, 1),
    ((9, 1, 3, 5), 1, torch.float32, 0),
)


@pytest.mark.parametrize(("shape", "groups", "dtype", "offset"), GROUP_CASES, ids=str)
def test_group_stats_equal_their_specification(shape, groups, dtype, offset, backend):
    x = random_images(shape, dtype, offset) * 2 + torch.arange(shape[1]).view(-1, 1, 1) / 7
    x = nhwc(x.to(dtype))
    found = kernels().group_stats(x, groups)._asdict()
    truth = reference.group_stats(x.double(), groups)._asdict()
    eager = reference.group_stats(x, groups)._asdict()
    errors = {n: float((t.double() - truth[n]).norm()) for n, t in eager.items()}
    assert_within_budget(found, truth, errors)
    alone = kernels().group_stats(nhwc(x[-1:]), groups)._asdict()
    assert_same_bits({n: t[-1:] for n, t in found.items()}, alone)


@pytest.mark.parametrize(("shape", "groups", "dtype", "offset"), GROUP_CASES, ids=str)
def test_group_stats_with_a_bias_normalise_without_it(shape, groups, dtype, offset, backend):
    x, bias = random_images(shape, dtype, offset), torch.randn(shape[1]) * 3
    of_x = {t: x.to(t) for t in (dtype, torch.float64)}

    def normalised(statistics):
        mean, var = (t.double().view(*shape[:2], 1, 1) for t in statistics)
        return {"xhat": (of_x[torch.float64] - mean) * torch.rsqrt(var + 1e-3)}

    found = normalised(kernels().group_stats(x, groups, bias))
    truth = normalised(reference.group_stats(of_x[torch.float64], groups, bias.double()))
    eager = normalised(reference.group_stats(of_x[dtype], groups, bias))
    errors = {"xhat": float((eager["xhat"] - truth["xhat"]).norm())}
    assert_within_budget({"xhat": found["xhat"].float()}, truth, errors)
    bias[-1] = NAN
    nans = kernels().group_stats(x, groups, bias).mean.isnan()
    assert torch.equal(nans, reference.group_stats(x, groups, bias).mean.isnan())


def test_a_large_mean_and_an_outlier_cost_no_accuracy(backend):
    x = random_images((2, 8, 64, 64), torch.float32)
    x[0] += 1000
    x[1, 0, 0, 0] = 1e4
    mean, var = kernels().group_stats(x, 2)
    true_mean, true_var = reference.group_stats(x.double(), 2)
    allowed = 64 * unit_roundoff(torch.float32)
    assert ((mean - true_mean).abs() <= allowed * true_mean.abs().clamp(min=1)).all()
    assert ((var - true_var).abs() <= allowed * true_var).all()


# Images, channels and groups: groups of one channel, of few, of more than a warp, and one group.
@pytest.mark.parametrize(
    ("images", "channels", "groups"),
    [(2, 6, 6), (3, 32, 8), (70, 12, 4), (2, 80, 2), (5, 300, 1), (1, 17, 1)],
)
@pytest.mark.parametrize("has_rows", [False, True])
def test_pooled_sums(images, channels, groups, has_rows, backend):
    sums = torch.randn(2, images, channels) * 100
    weight = torch.randn((images, channels)[not has_rows :])
    for index, value in enumerate((NAN, INF)):
        if channels > 100:
            break
        special = sums.clone()
        special[index, -1, index] = value
        found = kernels().pool_sums(special, weight, groups)
        for result, expected in zip(found, pool_sums(special, weight, groups), strict=True):
            assert torch.equal(result.isnan(), expected.isnan())
    wide, names = (sums.double(), weight.double(), groups), ("pooled", "totals")
    truth = dict(zip(names, pool_sums(*wide), strict=True))
    eager = dict(zip(names, pool_sums(sums, weight, groups), strict=True))
    errors = {name: float((eager[name].double() - truth[name]).norm()) for name in names}
    found = dict(zip(names, kernels().pool_sums(sums, weight, groups), strict=True))
    assert all(t.is_contiguous() for t in found.values())
    assert_within_budget(found, truth, errors)
