"""A residual stream in float32 beside convolutions in half precision, on any backend.

No kernel mixes precisions within a call. So a unit whose input is the stream is its batch norm and
ReLU in float32, rounded, and PyTorch's convolution; and the sum at the end of a block is a call of
its own. What plain PyTorch computes is the same, `F.conv2d(F.relu(bn(x)).to(half), ...)` and
`x + F(x).to(float32)`. The cost is the activation of the first unit, held and freed in each
direction, and a pass over the stream for each step that the fused kernels would have done on the
way.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.ops import layout


class MixedKernels:
    """The functions of `kernels/reference/__init__.py` that a stage calls, for mixed precisions.

    Args:
        wide: the backend's functions for the stream.
        narrow: those for what is in the dtype of the weights.
        stream: the dtype of the stream.
    """

    def __init__(self, wide, narrow, stream: torch.dtype) -> None:
        self.wide, self.narrow, self.stream = wide, narrow, stream

    def _of(self, x: Tensor):
        return self.wide if x.dtype == self.stream else self.narrow

    def bn_stats(self, x):
        """See `reference.bn_stats`."""
        return self._of(x).bn_stats(x)

    def bn_input_gradient(self, dy, g, x, *norm):
        """See `reference.bn_input_gradient`."""
        return self._of(x).bn_input_gradient(dy, g, x, *norm)

    def bn_relu_conv_forward(
        self, x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
        stride, padding, dilation, groups, with_stats,
    ):  # fmt: skip
        """See `reference.bn_relu_conv_forward`; with a residual the result is of the stream."""
        norm, conv = (mean, var, bn_weight, bn_bias, eps), (stride, padding, dilation, groups)
        if x.dtype == conv_weight.dtype:
            y, *stats = self.narrow.bn_relu_conv_forward(
                x, *norm, conv_weight, conv_bias, None, *conv, with_stats and residual is None
            )
        else:
            a = self.wide.bn_relu_forward(x, *norm).to(conv_weight.dtype)
            y = layout.nhwc(F.conv2d(a, conv_weight, conv_bias, *conv))
            stats = mean.new_empty(0), mean.new_empty(0)
            if with_stats and residual is None:
                stats = self.narrow.bn_stats(y)
        if residual is None:
            return y, *stats
        return self.wide.residual_add_forward(
            y.to(self.stream), residual.to(self.stream), with_stats
        )

    def bn_relu_conv_backward(
        self, dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
        x, mean, var, bn_weight, bn_bias, eps, conv_weight,
        stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
    ):  # fmt: skip
        """See `reference.bn_relu_conv_backward`; dz and, of a unit of the stream, g are wide."""
        fold = (skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count)
        norm, conv = (mean, var, bn_weight, bn_bias, eps), (stride, padding, dilation, groups)
        dz = dy.new_empty(0)
        is_mixed = x.dtype != conv_weight.dtype
        if z is not None and (is_mixed or z.dtype == self.stream):
            dy = self.bn_input_gradient(skip, dy, *fold[1:])
            dz = dy if needs_dz else dz
            fold, needs_dz = (None, None, None, None, None, 0.0, None, 0.0), False
        if not is_mixed:
            dy = dy.to(conv_weight.dtype)
            g, dconv_weight, sums, inner_dz = self.narrow.bn_relu_conv_backward(
                dy, *fold, x, *norm, conv_weight, *conv, needs_g, needs_conv_weight, needs_dz
            )
            return g, dconv_weight, sums, inner_dz if needs_dz else dz
        a = self.wide.bn_relu_forward(x, *norm)
        da, dconv_weight, _ = torch.ops.aten.convolution_backward(
            dy.to(conv_weight.dtype), a.to(conv_weight.dtype), conv_weight, None, stride, padding,
            dilation, False, [0, 0], groups, [needs_g, needs_conv_weight, False],
        )  # fmt: skip
        g, sums = x.new_empty(0), mean.new_empty(0)
        if needs_g:
            g = torch.ops.aten.threshold_backward(layout.nhwc(da.to(self.stream)), a, 0)
            sums = self.wide.bn_relu_backward_sums(g, x, *norm)
        if not needs_conv_weight:
            dconv_weight = conv_weight.new_empty(0)
        elif dconv_weight.stride() != conv_weight.stride():
            dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
        return g, dconv_weight, sums, dz
