"""The activations: `ACTIVATIONS` has a row with all facts about each of them.

To add one, add a row here; an entry to the list in csrc/args.h and its formulas for the CPU and for
CUDA; a branch to kernels/triton/activations.py; a line to docs/norms.md; and its plain PyTorch
function to tests/cases.py. Tests fail for each of these that is left out.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_aten = torch.ops.aten


class Activation(NamedTuple):
    """An elementwise function: a name of `ACTIVATIONS`, and its parameter."""

    name: str
    parameter: float = 0.0


class Parameter(NamedTuple):
    """The parameter of an activation: a finite number."""

    default: float
    may_be_zero: bool = True


class Row(NamedTuple):
    """The facts about an activation.

    A function of PyTorch, or a module, may compute several activations, which its arguments tell.
    Readers of arguments return None for the parameter if they tell of another function, and 0 if
    there is no parameter.
    """

    title: str  # in names such as BN-ReLU-Conv
    forward: Callable[[Tensor, float], Tensor]  # act(p, parameter), differentiable
    backward: Callable[[Tensor, Tensor, float], Tensor]  # dy * act'(p), of (dy, p, parameter)
    module: type[nn.Module]
    # Functions of PyTorch, and how to read their arguments: the input, the parameter, and whether
    # the function is in place.
    calls: Mapping[Callable, Callable[..., tuple[Any, Any, Any]]]
    parameter: Parameter | None = None
    of_module: Callable[[Any], Any] = lambda module: 0.0  # reads the parameter
    # Operators that compute it, and the values at which its gradient jumps.
    jumps: Mapping[Any, tuple[float, ...]] = {}
    computes_in_float32: bool = False  # autocast on CUDA computes it in float32


def number_of(value: Any) -> float | None:
    """Converts a finite Python number to float; returns None for other values."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if found - found == 0 else None  # Dynamo does not trace `math.isfinite`


def _input(input, /):
    return input, 0.0, False


def _input_in_place(input, /):
    return input, 0.0, True


def _input_or_keyword(input):
    return input, 0.0, False


def _input_and_inplace(input, inplace=False):
    return input, 0.0, inplace


def _leaky_relu(input, negative_slope=0.01, inplace=False):
    return input, negative_slope, inplace


def _elu(input, alpha=1.0, inplace=False):
    return input, alpha, inplace


def _gelu(approximation: str) -> Callable:
    def read(input, *, approximate="none"):
        is_same = isinstance(approximate, str) and approximate == approximation
        return input, 0.0 if is_same else None, False

    return read


def _hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False):
    return input, 0.0 if (number_of(min_val), number_of(max_val)) == (0, 6) else None, inplace


def _softplus(input, beta=1, threshold=20):
    return input, beta if number_of(threshold) == _SOFTPLUS_THRESHOLD else None, False


def _in_place(read: Callable) -> Callable:
    """The reader for a function that is always in place, of the reader for one that may be."""
    return lambda *args, **kwargs: read(*args, **{**kwargs, "inplace": True})


def _softsign_gradient(dy: Tensor, p: Tensor) -> Tensor:
    """As autograd computes it: ATen has no softsign, and `F.softsign` is `p / (1 + abs(p))`."""
    d = 1 + p.abs()
    return dy / d - dy * (p / d / d) * p.sgn()


_SOFTPLUS_THRESHOLD = 20.0  # default of PyTorch, in units of beta * p

ACTIVATIONS: dict[str, Row] = {
    "relu": Row(
        "ReLU",
        lambda p, _: F.relu(p),
        lambda dy, p, _: _aten.threshold_backward(dy, p, 0),
        nn.ReLU,
        {
            **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _input_and_inplace),
            **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), _input_in_place),
        },
        jumps=dict.fromkeys((_aten.relu.default, _aten.relu_.default), (0,)),
    ),
    "leaky_relu": Row(
        "LeakyReLU",
        lambda p, slope: F.leaky_relu(p, slope),
        lambda dy, p, slope: _aten.leaky_relu_backward(dy, p, slope, False),
        nn.LeakyReLU,
        {F.leaky_relu: _leaky_relu, F.leaky_relu_: _in_place(_leaky_relu)},
        Parameter(0.01),
        lambda module: module.negative_slope,
        jumps=dict.fromkeys((_aten.leaky_relu.default, _aten.leaky_relu_.default), (0,)),
    ),
    "identity": Row("Identity", lambda p, _: p, lambda dy, p, _: dy, nn.Identity, {}),
    "relu6": Row(
        "ReLU6",
        lambda p, _: F.relu6(p),
        lambda dy, p, _: _aten.hardtanh_backward(dy, p, 0, 6),
        nn.ReLU6,
        {
            F.relu6: _input_and_inplace,
            F.hardtanh: _hardtanh,
            F.hardtanh_: _in_place(_hardtanh),
        },
        of_module=lambda module: 0.0 if (module.min_val, module.max_val) == (0, 6) else None,
        jumps=dict.fromkeys((_aten.hardtanh.default, _aten.hardtanh_.default), (0, 6)),
    ),
    "silu": Row(
        "SiLU",
        lambda p, _: F.silu(p),
        lambda dy, p, _: _aten.silu_backward(dy, p),
        nn.SiLU,
        {F.silu: _input_and_inplace},
    ),
    "gelu": Row(
        "GELU",
        lambda p, _: F.gelu(p),
        lambda dy, p, _: _aten.gelu_backward(dy, p),
        nn.GELU,
        {F.gelu: _gelu("none")},
        of_module=lambda module: 0.0 if module.approximate == "none" else None,
    ),
    "gelu_tanh": Row(
        "GELU",
        lambda p, _: F.gelu(p, approximate="tanh"),
        lambda dy, p, _: _aten.gelu_backward(dy, p, approximate="tanh"),
        nn.GELU,
        {F.gelu: _gelu("tanh")},
        of_module=lambda module: 0.0 if module.approximate == "tanh" else None,
    ),
    "elu": Row(
        "ELU",
        lambda p, alpha: F.elu(p, alpha),
        lambda dy, p, alpha: _aten.elu_backward(dy, alpha, 1, 1, False, p),
        nn.ELU,
        {F.elu: _elu, F.elu_: _in_place(_elu)},
        Parameter(1.0),
        lambda module: module.alpha,
        jumps=dict.fromkeys((_aten.elu.default, _aten.elu_.default), (0,)),
    ),
    "hardswish": Row(
        "Hardswish",
        lambda p, _: F.hardswish(p),
        lambda dy, p, _: _aten.hardswish_backward(dy, p),
        nn.Hardswish,
        {F.hardswish: _input_and_inplace},
        jumps=dict.fromkeys((_aten.hardswish.default, _aten.hardswish_.default), (-3, 3)),
    ),
    "mish": Row(
        "Mish",
        lambda p, _: F.mish(p),
        lambda dy, p, _: _aten.mish_backward(dy, p),
        nn.Mish,
        {F.mish: _input_and_inplace},
    ),
    "softplus": Row(
        "Softplus",
        lambda p, beta: F.softplus(p, beta, _SOFTPLUS_THRESHOLD),
        lambda dy, p, beta: _aten.softplus_backward(dy, p, beta, _SOFTPLUS_THRESHOLD),
        nn.Softplus,
        {F.softplus: _softplus},
        Parameter(1.0, may_be_zero=False),
        lambda module: module.beta if module.threshold == _SOFTPLUS_THRESHOLD else None,
        computes_in_float32=True,
    ),
    "sigmoid": Row(
        "Sigmoid",
        lambda p, _: torch.sigmoid(p),
        lambda dy, p, _: _aten.sigmoid_backward(dy, torch.sigmoid(p)),
        nn.Sigmoid,
        {
            **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, torch.special.expit), _input),
            **dict.fromkeys((torch.sigmoid_, Tensor.sigmoid_), _input_in_place),
        },
    ),
    "tanh": Row(
        "Tanh",
        lambda p, _: torch.tanh(p),
        lambda dy, p, _: _aten.tanh_backward(dy, torch.tanh(p)),
        nn.Tanh,
        {
            **dict.fromkeys((torch.tanh, Tensor.tanh), _input),
            **dict.fromkeys((torch.tanh_, Tensor.tanh_), _input_in_place),
        },
    ),
    "softsign": Row(
        "Softsign",
        lambda p, _: F.softsign(p),
        lambda dy, p, _: _softsign_gradient(dy, p),
        nn.Softsign,
        {F.softsign: _input_or_keyword},
    ),
}

# Each activation with the default of its parameter.
DEFAULTS = {
    name: Activation(name, row.parameter.default if row.parameter else 0.0)
    for name, row in ACTIVATIONS.items()
}
RELU, IDENTITY = DEFAULTS["relu"], DEFAULTS["identity"]

ACTIVATION_MODULES = tuple(dict.fromkeys(row.module for row in ACTIVATIONS.values()))


def activate(p: Tensor, activation: Activation) -> Tensor:
    """`act(p)`, in the dtype of `p`; differentiable."""
    return ACTIVATIONS[activation.name].forward(p, activation.parameter)


def activation_gradient(dy: Tensor, p: Tensor, activation: Activation) -> Tensor:
    """`dy * act'(p)`, in the dtype of both."""
    return ACTIVATIONS[activation.name].backward(dy, p, activation.parameter)


def with_parameter(name: str, value: Any) -> Activation | None:
    """The activation with this parameter, or None if the parameter is not valid."""
    parameter, found = ACTIVATIONS[name].parameter, number_of(value)
    if found is None or (parameter and found == 0 and not parameter.may_be_zero):
        return None
    return Activation(name, found) if parameter else DEFAULTS[name]


def activation_of_module(module: nn.Module) -> Activation | None:
    """The activation that a module of PyTorch computes, or None if there is none."""
    for name in _names_of_modules.get(type(module), ()):
        if (found := with_parameter(name, ACTIVATIONS[name].of_module(module))) is not None:
            return found
    return None


def read_call(function: Callable, *args: Any, **kwargs: Any) -> tuple[Any, Activation | None, Any]:
    """Reads the arguments of a function of `CALLS`.

    Returns:
        The input; the activation, or None if it is not served; and the argument `inplace`.

    Raises:
        TypeError: the function does not take these arguments.
    """
    for name, read in CALLS[function]:
        input, parameter, in_place = read(*args, **kwargs)
        found = with_parameter(name, parameter)
        if found is not None and in_place and found.parameter < 0:
            found = None  # PyTorch's backward refuses it
        if found is not None:
            break
    return input, found, in_place


def _by(keys: Callable[[Row], Any]) -> dict[Any, list[str]]:
    """Names of activations by a key of their rows."""
    found: dict[Any, list[str]] = {}
    for name, row in ACTIVATIONS.items():
        for key in keys(row):
            found.setdefault(key, []).append(name)
    return found


_names_of_modules = _by(lambda row: (row.module,))
# Functions of PyTorch that compute activations, with the names and readers of these.
CALLS = {
    function: [(name, ACTIVATIONS[name].calls[function]) for name in names]
    for function, names in _by(lambda row: row.calls).items()
}
# Values at which gradients jump, by operator.
JUMPS = {o: values for row in ACTIVATIONS.values() for o, values in row.jumps.items()}
