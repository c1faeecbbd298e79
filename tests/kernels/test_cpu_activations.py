"""Activations and norms with rows in the CPU library, called below the ops."""

import itertools

import pytest
import torch

from preact_kernels.kernels import cpu, reference
from preact_kernels.kernels.contract import (
    ACTIVATIONS,
    Activation,
    AffineStep,
    Gradient,
    Norm,
    statistics_dtype,
)
from preact_kernels.kernels.reference.activations import activate, activation_gradient
from tests.cases import INF, NAN, served_by_vectors
from tests.oracle import same_bits, unit_roundoff

pytestmark = [
    pytest.mark.skipif(bool(cpu.load_error()), reason=f"backend cpu: {cpu.load_error()}"),
    pytest.mark.usefixtures("poisoned_memory"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Not of 1: a power of two, so that beta * p is exact.
PARAMETERS = {"leaky_relu": 0.25, "elu": 1.5, "softplus": 2.0}


def nhwc(t):
    return t.contiguous(memory_format=torch.channels_last)


def inputs_of(dtype):
    """Values over the whole range of a dtype, from the smallest to the largest, and near zero."""
    largest = torch.finfo(dtype).max
    sizes = torch.logspace(-320, 309, 4000, dtype=torch.float64).clamp(max=largest)
    p = torch.cat([torch.linspace(-110, 110, 9001, dtype=torch.float64), sizes, -sizes])
    return p.to(dtype)


def identity_norm(x, activation):
    """A norm for which p is x."""
    ones = torch.ones(x.shape[1], dtype=statistics_dtype(x.dtype))
    return Norm(0 * ones, ones, ones, 0 * ones, 0.0, *activation)


def of_kernels(p, dy, activation):
    """`act(p)` and `dy * act'(p)` of the library for 1-d tensors."""
    x, gradient = (nhwc(t.view(1, 1, 1, -1)) for t in (p, dy))
    norm = identity_norm(x, activation)
    kernels = cpu.kernels()
    y = kernels.norm_act_forward(x, norm)
    g, sums = kernels.norm_act_backward(gradient, x, norm, True)
    step = AffineStep(None, x, norm, sums, 0.0)
    dx = kernels.norm_input_gradient(Gradient(gradient, step), True)
    assert same_bits(g, dx)
    return y.flatten(), g.flatten()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_derivatives_over_the_whole_range(name):
    activation = Activation(name, PARAMETERS.get(name, 0.0))
    for dtype in DTYPES:
        check_special_values(activation, dtype)
        check_values_and_derivatives(activation, dtype)


def check_values_and_derivatives(activation, dtype):
    name = activation.name
    p = inputs_of(dtype)
    dy = torch.ones_like(p)
    found = of_kernels(p, dy, activation)
    wide = p.double()
    truth = activate(wide, activation), activation_gradient(dy.double(), wide, activation)
    wide = p.to(statistics_dtype(dtype))
    eager = activate(wide, activation), activation_gradient(torch.ones_like(wide), wide, activation)
    u = unit_roundoff(statistics_dtype(dtype))
    for kind, ours, eagers, exact in zip(("value", "derivative"), found, eager, truth, strict=True):
        scale = exact.abs()
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


def check_special_values(activation, dtype):
    """NaN, infinities, kinks, very large and very small values are as in PyTorch."""
    special = [NAN, INF, -INF, 0.0, 3.0, -3.0, 6.0, 20.0, 10.0, 1e30, -1e30, -750.0, -1e-320]
    special = served_by_vectors(activation.name, special, dtype)
    p = torch.tensor(special, dtype=dtype).repeat(64)  # PyTorch has another formula for a rest
    for dy in (2.0, NAN):
        gradient = torch.full_like(p, dy)
        wide = p.to(statistics_dtype(dtype))
        eager = activate(wide, activation), activation_gradient(gradient.to(wide), wide, activation)
        for ours, expected in zip(of_kernels(p, gradient, activation), eager, strict=True):
            assert torch.equal(ours.isnan(), expected.isnan()), (p, ours, expected)
            assert torch.equal(ours.isinf(), expected.to(dtype).isinf())
            near = torch.isclose(ours.double(), expected.double(), 0.01, 1e-6, equal_nan=True)
            assert near.all(), p[~near]


def rows_of(x, has_rows):
    return torch.rand(x.shape[:2] if has_rows else x.shape[1:2]) + 0.5


@pytest.mark.parametrize("tables", [*itertools.product([False, True], repeat=3)][1:], ids=str)
def test_any_table_may_have_rows(tables):
    """More than a tile of pixels in an image, fewer channels than a vector, one pixel."""
    inputs = ((3, 10, 33, 40), torch.float32), ((5, 40, 1, 1), torch.bfloat16)
    for activation, (shape, dtype) in itertools.product(("relu", "silu"), inputs):
        x, dy, skip = (nhwc(torch.randn(shape)).to(dtype) for _ in range(3))
        have_rows = tables[0], *tables  # mean and variance alike
        norm = Norm(*(rows_of(x, has_rows) for has_rows in have_rows), 1e-5, activation)
        kernels = cpu.kernels()
        truth_norm = norm._replace(
            **{n: getattr(norm, n).double() for n in ("mean", "var", "weight", "bias")}
        )
        close(kernels.norm_act_forward(x, norm), reference.norm_act_forward(x.double(), truth_norm))
        g, sums = kernels.norm_act_backward(dy, x, norm, True)
        none, same = kernels.norm_act_backward(dy, x, norm, False)
        true_g, true_sums = reference.norm_act_backward(dy.double(), x.double(), truth_norm, True)
        assert none is None and same_bits(sums, same)
        assert sums.shape == (2, *shape[:2])
        close(g, true_g)
        if dtype == torch.float32:  # sums of g as stored
            close(sums, true_sums)
        pooled = torch.randn_like(sums)
        for gradient, of_step, activated in ((g, skip, False), (g, None, False), (dy, None, True)):
            step = AffineStep(of_step, x, norm, pooled, 0.01)
            dx = kernels.norm_input_gradient(Gradient(gradient, step), activated)
            wide = None if of_step is None else of_step.double()
            step = AffineStep(wide, x.double(), truth_norm, pooled.double(), 0.01)
            true = reference.norm_input_gradient(Gradient(gradient.double(), step), activated)
            close(dx, true)


def close(ours, truth):
    budget = 4 * unit_roundoff(ours.dtype) * truth.norm()
    assert (ours.double() - truth).norm() <= budget


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_images_and_groups(dtype):
    for shape in ((3, 12, 37, 21), (4, 72, 1, 3), (2, 6, 1, 1)):
        x = nhwc(torch.randn(shape) * 3 + 100).to(dtype)
        for groups in (1, 3, shape[1]):
            check_statistics(x, groups)


def check_statistics(x, groups):
    mean, var = cpu.kernels().group_stats(x, groups)
    true_mean, true_var = reference.group_stats(x.double(), groups)
    u = unit_roundoff(mean.dtype)
    assert (mean - true_mean).abs().max() <= 2 * u * true_mean.abs().max()
    assert (var - true_var).abs().max() <= 64 * u * true_var.max()
    for image in range(len(x)):
        alone = cpu.kernels().group_stats(nhwc(x[image : image + 1]), groups)
        assert same_bits(alone.mean[0], mean[image]) and same_bits(alone.var[0], var[image])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_of_a_constant_group_is_its_value(dtype):
    """Channels of a group in several vectors, pixels in several tiles, the last of few pixels."""
    for shape in ((2, 24, 25, 41), (2, 24, 1, 3), (1, 9, 1, 1)):
        for value in (0.1, -1234.567, 3e-5, 1 / 3):
            x = nhwc(torch.full(shape, value, dtype=torch.float64).to(dtype))
            mean, var = cpu.kernels().group_stats(x, 3)
            assert (mean == x.flatten()[0]).all() and (var == 0).all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_value_that_is_not_finite_stays_in_its_image_and_group(value):
    x = nhwc(torch.randn(3, 24, 20, 30))
    expected = cpu.kernels().group_stats(x, 4)
    x[1, 7, 11, 13] = value
    for found, clean in zip(cpu.kernels().group_stats(x, 4), expected, strict=True):
        spoiled = ~torch.isfinite(found)
        assert spoiled[1, 6:12].all() and spoiled.sum() == 6
        assert same_bits(found[~spoiled], clean[~spoiled])
    assert found.isnan()[1, 6:12].all()  # the variance
