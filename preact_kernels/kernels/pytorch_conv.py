"""BN-ReLU-Conv with PyTorch's convolution: where a backend has no fused kernel of its own.

The activation is formed by the backend's kernels, and freed at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Surroundings(NamedTuple):
    """The functions of a backend around a convolution; see `reference`."""

    bn_stats: Callable
    bn_relu_forward: Callable
    bn_relu_backward_mask: Callable
    bn_input_gradient: Callable
    residual_add_forward: Callable

    @classmethod
    def of_library(cls, library) -> "Surroundings":
        """Those of a namespace of `torch.ops`."""
        return cls(*(getattr(library, name).default for name in cls._fields))


def _nhwc(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def bn_relu_conv_forward(
    own: Surroundings,
    x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
    stride, padding, dilation, groups, with_stats,
):  # fmt: skip
    """`reference.bn_relu_conv_forward`, with the functions `own` of a backend."""
    a = own.bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps)
    y = _nhwc(torch.conv2d(a, conv_weight, conv_bias, stride, padding, dilation, groups))
    del a
    if residual is not None:
        return own.residual_add_forward(y, residual, with_stats)
    if with_stats:
        return y, *own.bn_stats(y)
    return y, mean.new_empty(0), mean.new_empty(0)


def bn_relu_conv_backward(
    own: Surroundings,
    dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
    x, mean, var, bn_weight, bn_bias, eps, conv_weight,
    stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
):  # fmt: skip
    """`reference.bn_relu_conv_backward`, with the functions `own` of a backend."""
    if z is not None:
        dy = own.bn_input_gradient(skip, dy, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count)
    a = x  # of which only the shape is read without a weight gradient
    if needs_conv_weight:
        a = own.bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps)
    da, dconv_weight, _ = torch.ops.aten.convolution_backward(
        dy, a, conv_weight, None, stride, padding, dilation, False, [0, 0], groups,
        [needs_g, needs_conv_weight, False],
    )  # fmt: skip
    del a
    g, sums = x.new_empty(0), mean.new_empty(0)
    if needs_g:
        g, sums = own.bn_relu_backward_mask(_nhwc(da), x, mean, var, bn_weight, bn_bias, eps)
    if not needs_conv_weight:
        dconv_weight = conv_weight.new_empty(0)
    elif dconv_weight.stride() != conv_weight.stride():
        dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
    return g, dconv_weight, sums, dy if needs_dz else dy.new_empty(0)
