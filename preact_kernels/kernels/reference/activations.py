"""The activations of `contract.ACTIVATIONS` and their gradients, in PyTorch's operators."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import Activation

_SOFTPLUS_THRESHOLD = 20.0  # default of PyTorch, in units of beta * p
_aten = torch.ops.aten

# act(p, parameter)
_FORWARD: dict[str, Callable[[Tensor, float], Tensor]] = {
    "relu": lambda p, _: F.relu(p),
    "leaky_relu": lambda p, slope: F.leaky_relu(p, slope),
    "identity": lambda p, _: p,
    "relu6": lambda p, _: F.relu6(p),
    "silu": lambda p, _: F.silu(p),
    "gelu": lambda p, _: F.gelu(p),
    "gelu_tanh": lambda p, _: F.gelu(p, approximate="tanh"),
    "elu": lambda p, alpha: F.elu(p, alpha),
    "hardswish": lambda p, _: F.hardswish(p),
    "mish": lambda p, _: F.mish(p),
    "softplus": lambda p, beta: F.softplus(p, beta, _SOFTPLUS_THRESHOLD),
    "sigmoid": lambda p, _: torch.sigmoid(p),
    "tanh": lambda p, _: torch.tanh(p),
}

# gradient(dy, p, parameter)
_BACKWARD: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "relu": lambda dy, p, _: _aten.threshold_backward(dy, p, 0),
    "leaky_relu": lambda dy, p, slope: _aten.leaky_relu_backward(dy, p, slope, False),
    "identity": lambda dy, p, _: dy,
    "relu6": lambda dy, p, _: _aten.hardtanh_backward(dy, p, 0, 6),
    "silu": lambda dy, p, _: _aten.silu_backward(dy, p),
    "gelu": lambda dy, p, _: _aten.gelu_backward(dy, p),
    "gelu_tanh": lambda dy, p, _: _aten.gelu_backward(dy, p, approximate="tanh"),
    "elu": lambda dy, p, alpha: _aten.elu_backward(dy, alpha, 1, 1, False, p),
    "hardswish": lambda dy, p, _: _aten.hardswish_backward(dy, p),
    "mish": lambda dy, p, _: _aten.mish_backward(dy, p),
    "softplus": lambda dy, p, beta: _aten.softplus_backward(dy, p, beta, _SOFTPLUS_THRESHOLD),
    "sigmoid": lambda dy, p, _: _aten.sigmoid_backward(dy, torch.sigmoid(p)),
    "tanh": lambda dy, p, _: _aten.tanh_backward(dy, torch.tanh(p)),
}


def activate(p: Tensor, activation: Activation) -> Tensor:
    """`act(p)`, in the dtype of `p`; differentiable."""
    return _FORWARD[activation.name](p, activation.parameter)


def activation_gradient(dy: Tensor, p: Tensor, activation: Activation) -> Tensor:
    """`dy * act'(p)`, in the dtype of both."""
    return _BACKWARD[activation.name](dy, p, activation.parameter)
