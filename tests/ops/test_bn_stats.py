"""Batch statistics are accurate over many samples, also where the mean is large.

The truth is computed from the samples as they are rounded. A sum of squares minus the square of the
sum would lose `mean**2 / var` roundings.
"""

import math

import pytest
import torch

from preact_kernels.kernels.contract import Conv, Epilogue, Inputs, Norm
from preact_kernels.ops import dispatch as backends
from tests.cases import device_of, unit_of
from tests.oracle import unit_roundoff

pytestmark = pytest.mark.backends("cpu", "triton", "cuda", slow=("reference",))

SAMPLES = (8, 4, 128, 128)  # 131,072 a channel


def kernels(name, dtype):
    return backends.select(name, device_of(name), dtype)


def samples(mean_over_std, shape=SAMPLES, dtype=torch.float32):
    x = (torch.randn(shape) + mean_over_std).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def relative_error(value, truth):
    return float((value.double() - truth).norm() / truth.norm())


def assert_are_statistics(found, x):
    """Errors of a sum of m terms, each rounded at random, grow as the square root of m."""
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    for value, truth in zip(found, (mean, var), strict=True):
        assert value.dtype == torch.float32
        assert relative_error(value, truth) <= allowed(x)


def allowed(x):
    return math.sqrt(x.numel() / x.shape[1]) * unit_roundoff(torch.float32)


@pytest.mark.covering(1, cpu=2)
@pytest.mark.parametrize("mean_over_std", [0.5, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_and_variance_of_many_samples(mean_over_std, dtype, backend):
    x = samples(mean_over_std, dtype=dtype)
    assert_are_statistics(kernels(backend, dtype).bn_stats(x), x)


def test_a_mean_near_zero_is_not_biased(backend):
    """Differences from one float32 number, the pivot, may be rounded alike."""
    x = samples(0, (16, 64, 32, 32))
    true_mean = x.double().mean((0, 2, 3))
    found, plain = (kernels(name, x.dtype).bn_stats(x).mean for name in (backend, "reference"))
    assert relative_error(found, true_mean) <= 2 * relative_error(plain, true_mean)


@pytest.mark.backends("cpu", "triton", "cuda")
def test_the_statistics_of_large_constants(backend):
    assert_are_statistics_of_constants(backend, [1e18, -1e15, 1e12, -1e11, 1000.3, -0.1])


@pytest.mark.backends("cuda")  # others have no such pivot, and a smaller range
def test_a_pivot_near_large_constants_has_all_bits(backend):
    """The squares of differences from a rounded one are infinite."""
    assert_are_statistics_of_constants(backend, [1e25, -3e25])


def assert_are_statistics_of_constants(backend, constants):
    values = torch.tensor(constants, device="cpu")
    x = values.view(1, -1, 1, 1).expand(4, -1, 16, 16)
    x = x.contiguous(memory_format=torch.channels_last)
    mean, var = (t.cpu() for t in kernels(backend, x.dtype).bn_stats(x.to(device_of(backend))))
    torch.testing.assert_close(mean, values, rtol=1e-6, atol=0)
    assert (var.double().sqrt() <= 1e-6 * values.abs().double()).all()


def test_statistics_that_a_convolution_yields_are_of_its_rounded_output(backend):
    """An identity 1x1 behind an identity batch norm and a ReLU of positive samples."""
    x = samples(1000, (4, 16, 64, 64)).abs()
    zero, one = torch.zeros(16), torch.ones(16)
    weight = torch.eye(16).view(16, 16, 1, 1)
    unit = unit_of(weight, Conv((1, 1), (0, 0), (1, 1), 1))
    inputs = Inputs(x, Norm(zero, one, one, zero, 0.0), weight)
    y, statistics = kernels(backend, x.dtype).norm_act_conv_forward(
        unit, inputs, Epilogue(with_stats=True)
    )
    assert relative_error(y, x.double()) <= unit_roundoff(x.dtype) * 2
    assert_are_statistics(statistics, y)


def test_statistics_that_an_addition_yields_are_of_the_rounded_sum(backend):
    x, branch = (samples(mean, dtype=torch.bfloat16) for mean in (1000, 0))
    y, statistics = kernels(backend, x.dtype).residual_add_forward(x, branch, True)
    assert_are_statistics(statistics, y)


def test_any_number_of_samples(backend):
    for count in (2, 63, 65, 1001):
        x = samples(1000, (1, 17, 1, count))
        assert_are_statistics(kernels(backend, x.dtype).bn_stats(x), x)


def test_a_constant_channel_has_no_variance(backend):
    x = torch.full((4, 5, 3, 3), 1234.5).contiguous(memory_format=torch.channels_last)
    _, var = kernels(backend, x.dtype).bn_stats(x)
    assert torch.equal(var, torch.zeros(5))
