"""Batch norm and ReLU, and the gradient of a batch norm's input."""

import torch
from torch import Tensor

from preact_kernels.kernels.reference.bn_stats import statistics_dtype


def _per_channel(t: Tensor) -> Tensor:
    return t.view(1, -1, 1, 1)


def _normalised(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    x = x.to(statistics_dtype(x.dtype))
    return (x - _per_channel(mean)) * _per_channel(torch.rsqrt(var + eps))


def _pre_activation(
    x: Tensor, mean: Tensor, var: Tensor, bn_weight: Tensor, bn_bias: Tensor, eps: float
) -> Tensor:
    xhat = _normalised(x, mean, var, eps)
    return xhat * _per_channel(bn_weight) + _per_channel(bn_bias)


def bn_relu_forward(
    x: Tensor, mean: Tensor, var: Tensor, bn_weight: Tensor, bn_bias: Tensor, eps: float
) -> Tensor:
    """a = relu(p), in the dtype of x."""
    return torch.relu(_pre_activation(x, mean, var, bn_weight, bn_bias, eps).to(x.dtype))


def mask(
    da: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    eps: float,
) -> Tensor:
    """g = da * [p > 0], in the statistics dtype. A NaN in p passes da on, as in PyTorch."""
    p = _pre_activation(x, mean, var, bn_weight, bn_bias, eps).to(x.dtype)
    return torch.where(p <= 0, 0.0, da.to(statistics_dtype(x.dtype)))


def gradient_sums(g: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """sums = [sum(g), sum(g * xhat)]."""
    g = g.to(statistics_dtype(x.dtype))
    xhat = _normalised(x, mean, var, eps)
    return torch.stack([g.sum((0, 2, 3)), (g * xhat).sum((0, 2, 3))])


def bn_relu_backward_sums(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    eps: float,
) -> Tensor:
    """The sums of g = dy * [p > 0]."""
    g = mask(dy, x, mean, var, bn_weight, bn_bias, eps)
    return gradient_sums(g, x, mean, var, eps)


def bn_relu_backward_input(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    eps: float,
    sums: Tensor,
    inv_count: float,
) -> Tensor:
    """dx = A*g + B*x + C for g = dy * [p > 0]."""
    g = mask(dy, x, mean, var, bn_weight, bn_bias, eps)
    return bn_input_gradient(None, g, x, mean, var, bn_weight, eps, sums, inv_count)


def bn_input_gradient(
    dy: Tensor | None,
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor,
    eps: float,
    sums: Tensor,
    inv_count: float,
) -> Tensor:
    """dx = [dy +] A*g + B*x + C, in the dtype of x."""
    wide = statistics_dtype(x.dtype)
    a = bn_weight * torch.rsqrt(var + eps)
    centred = g.to(wide)
    if inv_count:  # else mean and variance are constants, and x is not read
        xhat = _normalised(x, mean, var, eps)
        mean_g, mean_product = (_per_channel(s * inv_count) for s in sums)
        centred = centred - mean_g - xhat * mean_product
    dx = centred * _per_channel(a)
    if dy is not None:
        dx = dx + dy.to(wide)
    return dx.to(x.dtype).contiguous(memory_format=torch.channels_last)
