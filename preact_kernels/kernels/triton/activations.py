"""Activations and their gradients: device functions of float32 tiles.

`ACTIVATION` is a name of `activations.ACTIVATIONS`, and `parameter` its parameter or None. Formulas
are PyTorch's, or equivalent with less rounding. NaN and infinities give what PyTorch gives on a
GPU. The gradient of an infinite or very large p may be NaN, from 0 * inf.

With `FAST`, for results that are stored in half precision, exponentials and divisions are
approximate. The error is at most 2^-16 of the result, or of dy * max(1, |result|) for a gradient,
a 16th of half a unit in the last place of float16. Results below 2^-100 may become 0. For GELU of
p < -5.8, where |gelu(p)| < 2^-25, the error is relative to 2^-25.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from preact_kernels.activations import ACTIVATIONS
from preact_kernels.kernels.triton.launch import INTERPRETED

_IS_INTERPRETED = tl.constexpr(INTERPRETED)

_LOG2_E = tl.constexpr(1.4426950216293335)  # float32 of log2(e)
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-08)
_LOG_2 = tl.constexpr(0.6931471805599453)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBE = tl.constexpr(0.044715)
_SOFTPLUS_THRESHOLD = tl.constexpr(20.0)  # PyTorch's default, in units of parameter * p
_MISH_THRESHOLD = tl.constexpr(20.0)  # for larger p, mish(p) is p in float32


class KernelActivation(NamedTuple):
    """An activation as launchers pass it."""

    name: str  # a compile-time constant
    parameter: float | None


def kernel_activation(name: str, parameter: float) -> KernelActivation:
    """An activation for kernels; the parameter is None if the activation has none."""
    return KernelActivation(name, float(parameter) if ACTIVATIONS[name].parameter else None)


@triton.jit
def relu(p):
    """0 where p <= 0, else p; NaN stays NaN, as in PyTorch."""
    return tl.where(p <= 0, 0.0, p)


@triton.jit
def fast_exp2(x):
    """2^x within 2 units in the last place; 0 if it is denormal."""
    if _IS_INTERPRETED:
        return tl.exp2(x)
    else:
        code: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(code, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def divide(a, b, FAST: tl.constexpr):
    """a / b. If `FAST`, within 2 units in the last place, and 0 if 1 / b is denormal."""
    if not FAST:
        return a / b
    elif _IS_INTERPRETED:
        return a * (1 / b)
    else:
        code: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return a * tl.inline_asm_elementwise(code, "=f,f", [b], tl.float32, is_pure=True, pack=1)


@triton.jit
def exp(x, FAST: tl.constexpr):
    """e^x within 2 units in the last place, unless `FAST`: within |x| / 2 + 3 units.

    The error of `tl.exp` on a GPU grows with |x|.
    """
    power = x * _LOG2_E
    if FAST:
        return fast_exp2(power)
    else:
        rest = tl.fma(x, _LOG2_E, -power) + x * _LOG2_E_REST
        value = tl.exp2(power)
        return tl.where(tl.abs(x) < 88, tl.fma(value, rest * _LOG_2, value), value)


@triton.jit
def expm1(x, FAST: tl.constexpr):
    """e^x - 1 for x <= 0."""
    if FAST:
        series = ((x * (1.0 / 24) + 1.0 / 6) * x + 0.5) * x + 1
        return tl.where(x > -0.0625, x * series, exp(x, FAST) - 1)
    else:
        series = 0.00012838066322728992 * x + 0.0012986635556444526
        series = series * x + 0.008273094892501831
        series = series * x + 0.04164557904005051
        series = series * x + 0.16666309535503387
        series = series * x + 0.4999997615814209
        return tl.where(x > -1, x * (1 + x * series), exp(x, FAST) - 1)


@triton.jit
def log1p(x, FAST: tl.constexpr):
    """log(1 + x) for 0 <= x <= 1: 2 * atanh(x / (2 + x))."""
    s = divide(x, 2 + x, FAST)
    square = s * s
    series = 0.28178325295448303 * square + 0.27960604429244995
    series = series * square + 0.40024909377098083
    series = series * square + 0.6666631698608398
    return 2 * s + s * square * series


@triton.jit
def sigmoid(p, FAST: tl.constexpr):
    """1 / (1 + e^-p)."""
    return divide(1.0, 1 + exp(-p, FAST), FAST)


@triton.jit
def tanh(p, FAST: tl.constexpr):
    """The hyperbolic tangent; keeps the sign of zero."""
    if FAST:
        small = p * (1 - p * p * (1.0 / 3))
        return tl.where(tl.abs(p) < 0.0625, small, 2 * sigmoid(2 * p, FAST) - 1)
    else:
        e = expm1(-2 * tl.abs(p), FAST)
        magnitude = -e / (2 + e)
        return tl.where(p == 0, p, tl.where(p < 0, -magnitude, magnitude))


@triton.jit
def sigmoid_and_rest(p, FAST: tl.constexpr):
    """sigmoid(p) and 1 - sigmoid(p), without cancellation.

    If `FAST`, the second has an absolute error of 2^-22, and is 0 where it is smaller, for a
    product with a large p.
    """
    if FAST:
        gate = sigmoid(p, FAST)
        return gate, tl.maximum((1 - 2.0**-22) - gate, 0.0)
    else:
        e = exp(-tl.abs(p), FAST)
        larger = 1 / (1 + e)
        smaller = e * larger
        is_positive = p >= 0
        larger_first = tl.where(is_positive, larger, smaller)
        return larger_first, tl.where(is_positive, smaller, larger)


@triton.jit
def normal_cdf(p, FAST: tl.constexpr):
    """The distribution function of the normal distribution, (1 + erf(p / sqrt(2))) / 2.

    If `FAST`, 2^q(|p|) for p < 0, with a polynomial q within 2^-18 for |p| < 5.8. For larger |p|,
    where the result is below 2^-28, q decreases.
    """
    if FAST:
        size = tl.abs(p)
        power = size * -1.8288988030690234e-06 + 6.149789260234684e-05
        power = power * size - 0.00092986662639305
        power = power * size + 0.008505788631737232
        power = power * size - 0.05395666882395744
        power = power * size - 0.458467036485672
        power = power * size - 1.1512502431869507
        tail = fast_exp2(power * size - 0.9999953508377075)
        return tl.where(p >= 0, 1 - tail, tail)
    else:
        return 0.5 * (1 + tl.erf(p * _SQRT_HALF))


@triton.jit
def gelu_tanh_argument(p):
    """2 * u, where gelu_tanh(p) = p * (1 + tanh(u)) / 2 = p * sigmoid(2 * u)."""
    return 2 * _SQRT_2_OVER_PI * (p + _GELU_CUBE * (p * p * p))


@triton.jit
def mish_exp(p, FAST: tl.constexpr):
    """e = e^p for p up to the threshold: tanh(log1p(e)) = n / (n + 2) with n = e * (e + 2)."""
    return exp(tl.where(p > _MISH_THRESHOLD, _MISH_THRESHOLD, p), FAST)


@triton.jit
def activate(p, parameter, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(p), in float32, for a result that is stored as `dtype`."""
    FAST: tl.constexpr = dtype != tl.float32
    if ACTIVATION == "relu":
        return relu(p)
    elif ACTIVATION == "identity":
        return p
    elif ACTIVATION == "leaky_relu":
        return tl.where(p > 0, p, p * parameter)
    elif ACTIVATION == "relu6":
        return tl.where(p < 0, 0.0, tl.where(p > 6, 6.0, p))
    elif ACTIVATION == "silu":
        return divide(p, 1 + exp(-p, FAST), FAST)
    elif ACTIVATION == "gelu":
        if FAST:
            return p * normal_cdf(p, FAST)
        else:
            return p * 0.5 * (1 + tl.erf(p * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        return p * sigmoid(gelu_tanh_argument(p), FAST)
    elif ACTIVATION == "elu":
        return tl.where(p > 0, p, parameter * expm1(p, FAST))
    elif ACTIVATION == "hardswish":
        product = p * tl.where(p < -3, 0.0, tl.where(p > 3, 6.0, p + 3))
        return product * (1.0 / 6) if FAST else product / 6
    elif ACTIVATION == "mish":
        e = mish_exp(p, FAST)
        n = e * (e + 2)
        return tl.where(p > _MISH_THRESHOLD, p, p * divide(n, n + 2, FAST))
    elif ACTIVATION == "softplus":
        scaled = p * parameter
        value = tl.where(scaled < 0, 0.0, scaled) + log1p(exp(-tl.abs(scaled), FAST), FAST)
        value = value * (1 / parameter) if FAST else value / parameter
        return tl.where(scaled > _SOFTPLUS_THRESHOLD, p, value)
    elif ACTIVATION == "sigmoid":
        return sigmoid(p, FAST)
    elif ACTIVATION == "softsign":
        return p / (1 + tl.abs(p))
    else:
        tl.static_assert(ACTIVATION == "tanh")
        return tanh(p, FAST)


@triton.jit
def activation_gradient(dy, p, parameter, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """dy * act'(p), in float32, for a result that is stored as `dtype`."""
    FAST: tl.constexpr = dtype != tl.float32
    if ACTIVATION == "relu":
        return tl.where(p <= 0, 0.0, dy)
    elif ACTIVATION == "identity":
        return dy
    elif ACTIVATION == "leaky_relu":
        return tl.where(p > 0, dy, dy * parameter)
    elif ACTIVATION == "relu6":
        return tl.where((p <= 0) | (p >= 6), 0.0, dy)
    elif ACTIVATION == "silu":
        gate, rest = sigmoid_and_rest(p, FAST)
        return dy * (gate * (1 + p * rest))
    elif ACTIVATION == "gelu":
        density = _SQRT_2_OVER_PI * 0.5 * exp(p * p * -0.5, FAST)
        return dy * (normal_cdf(p, FAST) + p * density)
    elif ACTIVATION == "gelu_tanh":
        gate, rest = sigmoid_and_rest(gelu_tanh_argument(p), FAST)
        inner = 2 * _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBE * (p * p))
        return dy * (gate + p * (gate * rest) * inner)
    elif ACTIVATION == "elu":
        return tl.where(p <= 0, dy * (parameter * exp(p, FAST)), dy)
    elif ACTIVATION == "hardswish":
        third = p * (1.0 / 3) if FAST else p / 3
        return tl.where(p <= -3, 0.0, tl.where(p < 3, dy * (third + 0.5), dy))
    elif ACTIVATION == "mish":
        e = mish_exp(p, FAST)
        n = e * (e + 2)
        gate = divide(n, n + 2, FAST)
        # 1 - gate^2 is 0 in float32 beyond the threshold.
        slope = tl.where(p > _MISH_THRESHOLD, 0.0, divide(2.0, n + 2, FAST) * (1 + gate))
        gate = tl.where(p > _MISH_THRESHOLD, 1.0, gate)
        return dy * (gate + p * divide(e, 1 + e, FAST) * slope)
    elif ACTIVATION == "softplus":
        scaled = p * parameter
        return tl.where(scaled > _SOFTPLUS_THRESHOLD, dy, dy * sigmoid(scaled, FAST))
    elif ACTIVATION == "sigmoid":
        e = exp(-tl.abs(p), FAST)
        gate = divide(1.0, 1 + e, FAST)
        return dy * (e * gate * gate)
    elif ACTIVATION == "softsign":
        inverse = (1 + 0 * p) / (1 + tl.abs(p))  # infinity gives NaN
        return dy * inverse * inverse
    else:
        tl.static_assert(ACTIVATION == "tanh")
        e = exp(-2 * tl.abs(p), FAST)
        return dy * divide(4 * e, (1 + e) * (1 + e), FAST)  # 1 - tanh(p)^2
