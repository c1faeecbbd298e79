"""Batch norm and ReLU, and the gradient of a batch norm's input."""

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Gradient, Norm, statistics_dtype


def _per_channel(t: Tensor) -> Tensor:
    return t.view(1, -1, 1, 1)


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    x = x.to(statistics_dtype(x.dtype))
    return (x - _per_channel(norm.mean)) * _per_channel(torch.rsqrt(norm.var + norm.eps))


def _pre_activation(x: Tensor, norm: Norm) -> Tensor:
    assert norm.bias is not None
    p = _normalised(x, norm) * _per_channel(norm.weight) + _per_channel(norm.bias)
    return p.to(x.dtype)


def bn_relu_forward(x: Tensor, norm: Norm) -> Tensor:
    """`relu(p)`, in the dtype of `x`."""
    return torch.relu(_pre_activation(x, norm))


def bn_relu_backward(
    dy: Tensor, x: Tensor, norm: Norm, with_g: bool
) -> tuple[Tensor | None, Tensor]:
    """`g = dy * [p > 0]` in the dtype of `x`, and its sums `[sum(g), sum(g * xhat)]`."""
    g = _masked(dy, x, norm).to(x.dtype).contiguous(memory_format=torch.channels_last)
    wide = g.to(statistics_dtype(x.dtype))
    sums = torch.stack([wide.sum((0, 2, 3)), (wide * _normalised(x, norm)).sum((0, 2, 3))])
    return g if with_g else None, sums


def bn_input_gradient(gradient: Gradient, masked: bool = False) -> Tensor:
    """`[skip +] A*g + B*x + C`, in the dtype of `x`; with `masked`, `g` is `dy` and masked here."""
    g, step = gradient
    assert step is not None
    skip, x, norm, sums, inv_count = step
    assert not masked or skip is None
    wide = statistics_dtype(x.dtype)
    centred = _masked(g, x, norm) if masked else g.to(wide)
    if inv_count:  # else mean and variance are constants, and x is not read
        mean_g, mean_product = (_per_channel(s * inv_count) for s in sums)
        centred = centred - mean_g - _normalised(x, norm) * mean_product
    dx = centred * _per_channel(norm.weight * torch.rsqrt(norm.var + norm.eps))
    if skip is not None:
        dx = dx + skip.to(wide)
    return dx.to(x.dtype).contiguous(memory_format=torch.channels_last)


def _masked(dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """`dy * [p > 0]` in the statistics dtype. A NaN in p passes dy, as in PyTorch."""
    return torch.where(_pre_activation(x, norm) <= 0, 0.0, dy.to(statistics_dtype(x.dtype)))
