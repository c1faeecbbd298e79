"""Batch norm, ReLU and convolution: kernels of our own where they win, PyTorch's convolution else.

PyTorch's runs on an activation that is formed again and freed at once.
"""

import torch

from preact_kernels.kernels.triton.bn_relu import (
    bn_input_gradient,
    bn_relu_backward_mask,
    bn_relu_forward,
)
from preact_kernels.kernels.triton.bn_relu_conv_backward import launch_bn_relu_conv_backward
from preact_kernels.kernels.triton.bn_relu_conv_forward import launch_bn_relu_conv_forward
from preact_kernels.kernels.triton.bn_stats import bn_stats
from preact_kernels.kernels.triton.configurations import is_fused
from preact_kernels.kernels.triton.conv import geometry_of, precision
from preact_kernels.kernels.triton.reduction import no_statistics
from preact_kernels.kernels.triton.residual_add import residual_add_forward


def _nhwc(t):
    return t.contiguous(memory_format=torch.channels_last)


def bn_relu_conv_forward(
    x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
    stride, padding, dilation, groups, with_stats,
):  # fmt: skip
    """See `reference.bn_relu_conv_forward`."""
    if is_fused(conv_weight.shape, groups, precision(x.dtype)):
        return launch_bn_relu_conv_forward(
            x, (mean, var, bn_weight, bn_bias, eps), conv_weight, conv_bias, residual,
            geometry_of(conv_weight, stride, padding, dilation), with_stats,
        )  # fmt: skip
    a = bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps)
    y = _nhwc(torch.conv2d(a, conv_weight, conv_bias, stride, padding, dilation, groups))
    if residual is not None:
        return residual_add_forward(y, residual, with_stats)
    return (y, *bn_stats(y)) if with_stats else (y, *no_statistics(y))


def bn_relu_conv_backward(
    dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
    x, mean, var, bn_weight, bn_bias, eps, conv_weight,
    stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
):  # fmt: skip
    """See `reference.bn_relu_conv_backward`."""
    norm = (mean, var, bn_weight, bn_bias, eps)
    if is_fused(conv_weight.shape, groups, precision(x.dtype)):
        return launch_bn_relu_conv_backward(
            dy, (skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count), x, norm,
            conv_weight, geometry_of(conv_weight, stride, padding, dilation),
            needs_g, needs_conv_weight, needs_dz,
        )  # fmt: skip
    if z is not None:
        dy = bn_input_gradient(skip, dy, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count)
    a = bn_relu_forward(x, *norm) if needs_conv_weight else x  # else its shape alone is read
    da, dconv_weight, _ = torch.ops.aten.convolution_backward(
        dy, a, conv_weight, None, stride, padding, dilation, False, [0, 0], groups,
        [needs_g, needs_conv_weight, False],
    )  # fmt: skip
    g, sums = x.new_empty(0), mean.new_empty(0)
    if needs_g:
        g, sums = bn_relu_backward_mask(_nhwc(da), x, *norm)
    if not needs_conv_weight:
        dconv_weight = conv_weight.new_empty(0)
    elif dconv_weight.stride() != conv_weight.stride():
        dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
    return g, dconv_weight, sums, dy if needs_dz else dy.new_empty(0)
