"""Normalisation and activation, and the gradient of a norm's input."""

import torch
from torch import Tensor

from preact_kernels.activations import RELU, Activation, activate, activation_gradient
from preact_kernels.kernels.contract import WITH_RESIDUAL, Gradient, Norm, statistics_dtype


def _image(t: Tensor) -> Tensor:
    """Broadcasts `[C]` or `[N, C]` over `[N, C, H, W]`."""
    return t.view(-1, t.shape[-1], 1, 1)


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    x = x.to(statistics_dtype(x.dtype))
    return (x - _image(norm.mean)) * _image(torch.rsqrt(norm.var + norm.eps))


def _pre_activation(x: Tensor, norm: Norm) -> Tensor:
    """p, rounded to the dtype of `x`, in the statistics dtype."""
    assert norm.bias is not None
    p = _normalised(x, norm) * _image(norm.weight) + _image(norm.bias)
    return p.to(x.dtype).to(p.dtype)


def _activation(norm: Norm) -> Activation:
    return Activation(norm.activation, norm.parameter)


def norm_act_forward(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """See `Kernels.norm_act_forward`."""
    p = _pre_activation(x, norm)
    if residual is not None:
        assert norm.activation in WITH_RESIDUAL
        p = p + residual.to(p.dtype)  # rounding commutes with these activations
    return activate(p, _activation(norm)).to(x.dtype)


def norm_act_backward(
    dy: Tensor, x: Tensor, norm: Norm, with_g: bool, y: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """See `Kernels.norm_act_backward`."""
    if y is None:
        g = _gradient(dy, x, norm)
    else:
        assert norm.activation == RELU.name
        g = dy.masked_fill(y <= 0, 0)
    g = g.to(x.dtype).contiguous(memory_format=torch.channels_last)
    wide = g.to(statistics_dtype(x.dtype))
    axes = (2, 3) if norm.has_rows else (0, 2, 3)
    sums = torch.stack([wide.sum(axes), (wide * _normalised(x, norm)).sum(axes)])
    return g if with_g else None, sums


def norm_act_recompute(dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """See `Kernels.norm_act_recompute`."""
    _, sums = norm_act_backward(dy, x, norm, False)
    return norm_act_forward(x, norm), sums


def norm_input_gradient(gradient: Gradient, activated: bool = False) -> Tensor:
    """See `Kernels.norm_input_gradient`."""
    g, step = gradient
    assert step is not None
    skip, x, norm, sums, inv_count = step
    wide = statistics_dtype(x.dtype)
    dx = _gradient(g, x, norm) if activated else g.to(wide)
    scale = torch.rsqrt(norm.var + norm.eps)
    if sums.dim() == 3:  # pooled: they contain the weight
        dx = dx * _image(norm.weight)
    else:
        scale = norm.weight * scale
    if inv_count:  # 0 in evaluation mode, where mean and variance are constants
        mean_g, mean_product = (_image(s * inv_count) for s in sums)
        dx = dx - mean_g - _normalised(x, norm) * mean_product
    dx = dx * _image(scale)
    if skip is not None:
        dx = dx + skip.to(wide)
    return dx.to(x.dtype).contiguous(memory_format=torch.channels_last)


def _gradient(dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """`dy * act'(p)` in the statistics dtype."""
    wide = dy.to(statistics_dtype(x.dtype))
    return activation_gradient(wide, _pre_activation(x, norm), _activation(norm))
