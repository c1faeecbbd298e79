"""BN-ReLU-Conv around PyTorch's convolution, for shapes without a fused kernel.

The backend computes the activation, which is freed as soon as the convolution has read it. `x` and
the weight may be float32 and a half precision: the convolution runs in the half precision.

PyTorch's convolution of an NHWC tensor converts an NCHW weight at every call, and so the weight's
gradient back. Where the weight is much larger than the activation, the activation is converted.
"""

import torch
from torch import Tensor

from preact_kernels.kernels.contract import (
    Conv,
    ConvGradients,
    Epilogue,
    Fold,
    Kernels,
    Norm,
    Output,
    Wanted,
)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of a convolution of these tensors: the narrowest one."""
    narrowest = tensors[0].dtype
    for t in tensors[1:]:  # Dynamo does not trace `min` with a key
        if t.dtype.itemsize < narrowest.itemsize:
            narrowest = t.dtype
    return narrowest


def _nhwc(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _converts_activation(x: Tensor, conv_weight: Tensor) -> bool:
    """Whether a convolution runs in NCHW, on a CPU.

    That converts about five tensors like `x` in a step, and saves three conversions of the weight.
    """
    is_large = conv_weight.numel() > 2 * x.numel()
    return (
        is_large
        and x.device.type == "cpu"
        and not conv_weight.is_contiguous(memory_format=torch.channels_last)
    )


def bn_relu_conv_forward(
    kernels: Kernels, x: Tensor, norm: Norm, conv_weight: Tensor, conv: Conv, epilogue: Epilogue
) -> Output:
    """`Kernels.bn_relu_conv_forward`; `kernels` does everything but the convolution."""
    conv_bias, residual, with_stats, dtype = epilogue
    dtype = dtype or compute_dtype(x, conv_weight)
    conv_weight = conv_weight.to(dtype)
    a = kernels.bn_relu_forward(x, norm).to(dtype)
    if _converts_activation(x, conv_weight):
        a = a.contiguous()
    y = _nhwc(torch.conv2d(a, conv_weight, conv_bias, *conv))
    del a
    if residual is not None:
        return kernels.residual_add_forward(y, residual, with_stats)
    return Output(y, kernels.bn_stats(y) if with_stats else None)


def bn_relu_conv_backward(
    kernels: Kernels,
    dy: Tensor,
    fold: Fold | None,
    x: Tensor,
    norm: Norm,
    conv_weight: Tensor,
    conv: Conv,
    wanted: Wanted,
) -> ConvGradients:
    """`Kernels.bn_relu_conv_backward`; `kernels` does everything but the convolution."""
    if fold is not None:
        dy = kernels.bn_input_gradient(dy, fold)
    dtype = compute_dtype(x, conv_weight)
    if wanted.weight:
        a = kernels.bn_relu_forward(x, norm).to(dtype)
    else:  # only its shape and dtype are read
        a = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    conv_dy = dy.to(dtype)
    if _converts_activation(x, conv_weight):
        a, conv_dy = a.contiguous(), conv_dy.contiguous()
    mask = [wanted.input, wanted.weight, False]
    weight = conv_weight.to(dtype)
    stride, padding, dilation, groups = conv
    da, dconv_weight, _ = torch.ops.aten.convolution_backward(
        conv_dy, a, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
    )
    del a
    g = sums = None
    if wanted.input:
        g, sums = kernels.bn_relu_backward_mask(_nhwc(da.to(x.dtype)), x, norm)
    if not wanted.weight:
        dconv_weight = None
    elif dconv_weight.stride() != conv_weight.stride() or dconv_weight.dtype != conv_weight.dtype:
        dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
    return ConvGradients(g, sums, dconv_weight, dy if wanted.dy else None)
