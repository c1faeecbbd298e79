"""Batch norm, ReLU, convolution and residual add, forward and backward."""

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.reference.bn_relu import (
    bn_input_gradient,
    bn_relu_forward,
    gradient_sums,
    mask,
)
from preact_kernels.kernels.reference.bn_stats import optional_stats, statistics_dtype


def bn_relu_conv_forward(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    eps: float,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    with_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = conv(relu(p)) [+ conv_bias] [+ residual], and the mean and biased variance of y.

    The statistics are of y as stored, after rounding; without `with_stats` they are empty.
    """
    a = bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps)
    y = F.conv2d(a, conv_weight, conv_bias, stride, padding, dilation, groups)
    if residual is not None:
        y = y + residual
    y = y.contiguous(memory_format=torch.channels_last)
    return y, *optional_stats(y, with_stats)


def bn_relu_conv_backward(
    dy: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
    z_mean: Tensor | None,
    z_var: Tensor | None,
    z_weight: Tensor | None,
    z_eps: float,
    z_sums: Tensor | None,
    z_inv_count: float,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    eps: float,
    conv_weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    needs_g: bool,
    needs_conv_weight: bool,
    needs_dz: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g = conv_transpose(dy) * [p > 0], dconv_weight = conv_wgrad(relu(p), dy), sums of g.

    With `z`, the gradient that arrives is still folded: `dy` then is the masked gradient of the
    batch norm behind z, the output of this convolution, and what the formulas call dy is
    `dz = [skip +] A*dy + B*z + C` with that batch norm's coefficients (`bn_input_gradient`).
    Returned are g, dconv_weight, sums and dz. Without `needs_g` (`needs_conv_weight`, `needs_dz`)
    g and sums (dconv_weight, dz) are empty tensors; `skip` and `needs_dz` come with `z` only.
    """
    if z is not None:
        dy = bn_input_gradient(skip, dy, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count)
    a = bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps)
    da, dconv_weight, _ = torch.ops.aten.convolution_backward(
        dy,
        a,
        conv_weight,
        None,
        stride,
        padding,
        dilation,
        False,
        [0, 0],
        groups,
        [needs_g, needs_conv_weight, False],
    )
    if needs_g:
        g = mask(da, x, mean, var, bn_weight, bn_bias, eps)
        g = g.to(x.dtype).contiguous(memory_format=torch.channels_last)
        sums = gradient_sums(g, x, mean, var, eps)
    else:
        g = x.new_empty(0)
        sums = x.new_empty(0, dtype=statistics_dtype(x.dtype))
    if needs_conv_weight:
        dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)  # its memory format
    else:
        dconv_weight = conv_weight.new_empty(0)
    return g, dconv_weight, sums, dy if needs_dz else dy.new_empty(0)
