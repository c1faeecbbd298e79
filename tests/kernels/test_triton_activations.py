"""The formulas of activations in Triton whose results are stored in half precision."""

import pytest
import torch

import preact_kernels as pk
from tests.cases import device_of

if "triton" not in pk.available_backends():
    pytest.skip("neither a GPU nor the interpreter of Triton", allow_module_level=True)

import triton
import triton.language as tl

from preact_kernels.activations import (
    ACTIVATIONS,
    Activation,
    activate,
    activation_gradient,
)
from preact_kernels.kernels.triton import activations
from tests.oracle import same_bits

# Absolute errors that are allowed, too: `activations.normal_cdf` is approximate below -5.8, and so
# is PyTorch's gelu_tanh of large negative numbers.
TAILS = {"gelu": 2.0**-27, "gelu_tanh": 2.0**-48}
PARAMETERS = {"leaky_relu": 0.25, "elu": 1.5, "softplus": 2.0}


@triton.jit
def activation_kernel(
    p, value, slope, parameter, count, dtype: tl.constexpr, ACTIVATION: tl.constexpr
):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    mask = at < count
    tile = tl.load(p + at, mask=mask, other=0.0)
    one = tl.full([1024], 1.0, tl.float32)
    tl.store(value + at, activations.activate(tile, parameter, dtype, ACTIVATION), mask=mask)
    gradient = activations.activation_gradient(one, tile, parameter, dtype, ACTIVATION)
    tl.store(slope + at, gradient, mask=mask)


def of_kernel(p, name, dtype):
    """The value and the derivative in float32 before they are rounded to `dtype`."""
    value, slope = torch.empty_like(p), torch.empty_like(p)
    grid = (triton.cdiv(len(p), 1024),)
    parameter = PARAMETERS.get(name)
    activation_kernel[grid](p, value, slope, parameter, len(p), dtype, name)
    return value, slope


def numbers():
    """Every 4th bfloat16 up to 1e30, and float16 numbers around 0 and in the tails."""
    bits = torch.arange(0, 2**16, 4, dtype=torch.int32).to(torch.int16)
    wide = bits.view(torch.bfloat16).float()
    fine = torch.cat([torch.linspace(-20, 20, 8001), torch.linspace(-0.2, 0.2, 2001)]).half()
    p = torch.cat([wide, fine.float()])
    return p[p.abs() < 1e30].to(device_of("triton"))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_error_before_rounding_is_a_16th_of_half_a_float16_ulp(name):
    p = numbers()
    activation = Activation(name, PARAMETERS.get(name, 0.0))
    wide = p.double()
    value, slope = of_kernel(p, name, tl.float16)
    true_value = activate(wide, activation)
    true_slope = activation_gradient(torch.ones_like(wide), wide, activation)
    error = (value.double() - true_value).abs() - 2.0**-16 * true_value.abs()
    assert (error <= TAILS.get(name, 2.0**-100)).all(), (p[error.argmax()], error.max())
    error = (slope.double() - true_slope).abs()
    finite = slope.isfinite()  # not where p^2 or p^3 overflows
    assert finite[p.abs() < 1e12].all()
    bound = 2.0**-16 * true_slope.abs().clamp(min=1)
    assert (error <= bound)[finite].all(), p[((error - bound) * finite).argmax()]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_sign_of_zero_and_nan_are_kept(name):
    p = torch.tensor([0.0, -0.0, float("nan")], device=device_of("triton"))
    expected = activate(p, Activation(name, PARAMETERS.get(name, 0.0)))
    for dtype in (tl.float32, tl.bfloat16):
        value, _ = of_kernel(p, name, dtype)
        if (expected[:2] == 0).all() and name != "relu":  # PyTorch's relu(-0.0) is -0.0
            assert same_bits(value[:2], expected[:2])
        assert value[2].isnan()
