"""Batch norm, ReLU and convolution: kernels of our own where they win, PyTorch's convolution else.

PyTorch's runs on an activation that is formed again and freed at once.
"""

from preact_kernels.kernels import pytorch_conv
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
from preact_kernels.kernels.triton.residual_add import residual_add_forward

_SURROUNDINGS = pytorch_conv.Surroundings(
    bn_stats, bn_relu_forward, bn_relu_backward_mask, bn_input_gradient, residual_add_forward
)


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
    return pytorch_conv.bn_relu_conv_forward(
        _SURROUNDINGS, x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
        stride, padding, dilation, groups, with_stats,
    )  # fmt: skip


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
    return pytorch_conv.bn_relu_conv_backward(
        _SURROUNDINGS, dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
        x, *norm, conv_weight,
        stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
    )  # fmt: skip
