"""Batch norm and ReLU, and the gradient of a batch norm's input."""

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Fold, Norm, statistics_dtype


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


def bn_relu_backward_sums(dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """The sums of `g = dy * [p > 0]`: `[sum(g), sum(g * xhat)]`."""
    return _sums(_masked(dy, x, norm), x, norm)


def bn_relu_backward_mask(dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """`g = dy * [p > 0]` in the dtype of `x`, and its sums."""
    g = _masked(dy, x, norm).to(x.dtype).contiguous(memory_format=torch.channels_last)
    return g, _sums(g.to(statistics_dtype(x.dtype)), x, norm)


def bn_relu_backward_input(
    dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
) -> Tensor:
    """`A*g + B*x + C` for `g = dy * [p > 0]`."""
    return bn_input_gradient(_masked(dy, x, norm), Fold(None, x, norm, sums, inv_count))


def bn_input_gradient(g: Tensor, fold: Fold) -> Tensor:
    """`[skip +] A*g + B*x + C`, in the dtype of `x`."""
    skip, x, norm, sums, inv_count = fold
    wide = statistics_dtype(x.dtype)
    centred = g.to(wide)
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


def _sums(g: Tensor, x: Tensor, norm: Norm) -> Tensor:
    return torch.stack([g.sum((0, 2, 3)), (g * _normalised(x, norm)).sum((0, 2, 3))])
