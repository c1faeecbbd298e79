"""Activations and their gradients: device functions of float32 tiles.

`ACTIVATION` is a name of `activations.ACTIVATIONS`, and `parameter` its parameter or None. Formulas
are PyTorch's, or equivalent with less rounding. NaN and infinities give what PyTorch gives on a
GPU. The gradient of an infinite or very large p may be NaN, from 0 * inf.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from preact_kernels.activations import ACTIVATIONS

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
def exp(x):
    """e^x within 2 units in the last place. The error of `tl.exp` on a GPU grows with |x|."""
    power = x * _LOG2_E
    rest = tl.fma(x, _LOG2_E, -power) + x * _LOG2_E_REST
    value = tl.exp2(power)
    return tl.where(tl.abs(x) < 88, tl.fma(value, rest * _LOG_2, value), value)


@triton.jit
def expm1(x):
    """e^x - 1 for x <= 0."""
    series = 0.00012838066322728992 * x + 0.0012986635556444526
    series = series * x + 0.008273094892501831
    series = series * x + 0.04164557904005051
    series = series * x + 0.16666309535503387
    series = series * x + 0.4999997615814209
    return tl.where(x > -1, x * (1 + x * series), exp(x) - 1)


@triton.jit
def log1p(x):
    """log(1 + x) for 0 <= x <= 1: 2 * atanh(x / (2 + x))."""
    s = x / (2 + x)
    square = s * s
    series = 0.28178325295448303 * square + 0.27960604429244995
    series = series * square + 0.40024909377098083
    series = series * square + 0.6666631698608398
    return 2 * s + s * square * series


@triton.jit
def sigmoid(p):
    """1 / (1 + e^-p)."""
    return 1 / (1 + exp(-p))


@triton.jit
def tanh(p):
    """The hyperbolic tangent, from expm1(-2 * |p|); keeps the sign of zero."""
    e = expm1(-2 * tl.abs(p))
    magnitude = -e / (2 + e)
    return tl.where(p == 0, p, tl.where(p < 0, -magnitude, magnitude))


@triton.jit
def sigmoid_and_rest(p):
    """sigmoid(p) and 1 - sigmoid(p), without cancellation."""
    e = exp(-tl.abs(p))
    larger = 1 / (1 + e)
    smaller = e * larger
    is_positive = p >= 0
    return tl.where(is_positive, larger, smaller), tl.where(is_positive, smaller, larger)


@triton.jit
def gelu_tanh_argument(p):
    """2 * u, where gelu_tanh(p) = p * (1 + tanh(u)) / 2 = p * sigmoid(2 * u)."""
    return 2 * _SQRT_2_OVER_PI * (p + _GELU_CUBE * (p * p * p))


@triton.jit
def mish_exp(p):
    """e = e^p for p up to the threshold: tanh(log1p(e)) = n / (n + 2) with n = e * (e + 2)."""
    return exp(tl.where(p > _MISH_THRESHOLD, _MISH_THRESHOLD, p))


@triton.jit
def activate(p, parameter, ACTIVATION: tl.constexpr):
    """act(p)."""
    if ACTIVATION == "relu":
        return relu(p)
    elif ACTIVATION == "identity":
        return p
    elif ACTIVATION == "leaky_relu":
        return tl.where(p > 0, p, p * parameter)
    elif ACTIVATION == "relu6":
        return tl.where(p < 0, 0.0, tl.where(p > 6, 6.0, p))
    elif ACTIVATION == "silu":
        return p / (1 + exp(-p))
    elif ACTIVATION == "gelu":
        return p * 0.5 * (1 + tl.erf(p * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        return p * sigmoid(gelu_tanh_argument(p))
    elif ACTIVATION == "elu":
        return tl.where(p > 0, p, parameter * expm1(p))
    elif ACTIVATION == "hardswish":
        return p * tl.where(p < -3, 0.0, tl.where(p > 3, 6.0, p + 3)) / 6
    elif ACTIVATION == "mish":
        e = mish_exp(p)
        n = e * (e + 2)
        return tl.where(p > _MISH_THRESHOLD, p, p * (n / (n + 2)))
    elif ACTIVATION == "softplus":
        scaled = p * parameter
        value = (tl.where(scaled < 0, 0.0, scaled) + log1p(exp(-tl.abs(scaled)))) / parameter
        return tl.where(scaled > _SOFTPLUS_THRESHOLD, p, value)
    elif ACTIVATION == "sigmoid":
        return sigmoid(p)
    elif ACTIVATION == "softsign":
        return p / (1 + tl.abs(p))
    else:
        tl.static_assert(ACTIVATION == "tanh")
        return tanh(p)


@triton.jit
def activation_gradient(dy, p, parameter, ACTIVATION: tl.constexpr):
    """dy * act'(p)."""
    if ACTIVATION == "relu":
        return tl.where(p <= 0, 0.0, dy)
    elif ACTIVATION == "identity":
        return dy
    elif ACTIVATION == "leaky_relu":
        return tl.where(p > 0, dy, dy * parameter)
    elif ACTIVATION == "relu6":
        return tl.where((p <= 0) | (p >= 6), 0.0, dy)
    elif ACTIVATION == "silu":
        gate, rest = sigmoid_and_rest(p)
        return dy * (gate * (1 + p * rest))
    elif ACTIVATION == "gelu":
        density = _SQRT_2_OVER_PI * 0.5 * exp(p * p * -0.5)
        return dy * (0.5 * (1 + tl.erf(p * _SQRT_HALF)) + p * density)
    elif ACTIVATION == "gelu_tanh":
        gate, rest = sigmoid_and_rest(gelu_tanh_argument(p))
        inner = 2 * _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBE * (p * p))
        return dy * (gate + p * (gate * rest) * inner)
    elif ACTIVATION == "elu":
        return tl.where(p <= 0, dy * (parameter * exp(p)), dy)
    elif ACTIVATION == "hardswish":
        return tl.where(p <= -3, 0.0, tl.where(p < 3, dy * (p / 3 + 0.5), dy))
    elif ACTIVATION == "mish":
        e = mish_exp(p)
        n = e * (e + 2)
        gate = n / (n + 2)
        # 1 - gate^2 is 0 in float32 beyond the threshold.
        slope = tl.where(p > _MISH_THRESHOLD, 0.0, 2 / (n + 2) * (1 + gate))
        gate = tl.where(p > _MISH_THRESHOLD, 1.0, gate)
        return dy * (gate + p * (e / (1 + e)) * slope)
    elif ACTIVATION == "softplus":
        scaled = p * parameter
        return tl.where(scaled > _SOFTPLUS_THRESHOLD, dy, dy * sigmoid(scaled))
    elif ACTIVATION == "sigmoid":
        gate, rest = sigmoid_and_rest(p)
        return dy * (gate * rest)
    elif ACTIVATION == "softsign":
        inverse = (1 + 0 * p) / (1 + tl.abs(p))  # infinity gives NaN
        return dy * inverse * inverse
    else:
        tl.static_assert(ACTIVATION == "tanh")
        e = exp(-2 * tl.abs(p))
        return dy * (4 * e / ((1 + e) * (1 + e)))  # 1 - tanh(p)^2
