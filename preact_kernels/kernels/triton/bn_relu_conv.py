"""Batch norm, ReLU and convolution: one fused kernel where faster, else PyTorch's convolution."""

from collections.abc import Sequence

import torch
from torch import Tensor

from preact_kernels.kernels import pytorch_conv
from preact_kernels.kernels import triton as kernels
from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    Conv,
    ConvGradients,
    Epilogue,
    Fold,
    Norm,
    Output,
    Wanted,
)
from preact_kernels.kernels.pytorch_conv import compute_dtype
from preact_kernels.kernels.triton.bn_relu_conv_backward import launch_bn_relu_conv_backward
from preact_kernels.kernels.triton.bn_relu_conv_forward import launch_bn_relu_conv_forward
from preact_kernels.kernels.triton.configurations import is_fused
from preact_kernels.kernels.triton.conv import precision


def serves_conv(
    weight_shape: Sequence[int],
    conv: Conv,
    dtype: torch.dtype,
    device: torch.device,
    pixels: int | None = None,
) -> bool:
    """See `Kernels.serves_conv`. The same on every device."""
    return is_fused(weight_shape, conv.groups, precision(dtype))


# A float32 stream takes none of them away: see `configurations`.
serves_stream_conv = serves_conv


def bn_relu_conv_forward(
    x: Tensor, norm: Norm, conv_weight: Tensor, conv: Conv, epilogue: Epilogue = NO_EPILOGUE
) -> Output:
    """See `Kernels.bn_relu_conv_forward`."""
    dtype = epilogue.dtype or compute_dtype(x, conv_weight)
    if serves_conv(conv_weight.shape, conv, dtype, x.device):
        return launch_bn_relu_conv_forward(x, norm, conv_weight, conv, epilogue)
    return pytorch_conv.bn_relu_conv_forward(kernels, x, norm, conv_weight, conv, epilogue)


def bn_relu_conv_backward(
    dy: Tensor,
    fold: Fold | None,
    x: Tensor,
    norm: Norm,
    conv_weight: Tensor,
    conv: Conv,
    wanted: Wanted,
) -> ConvGradients:
    """See `Kernels.bn_relu_conv_backward`."""
    if serves_conv(conv_weight.shape, conv, compute_dtype(x, dy, conv_weight), x.device):
        return launch_bn_relu_conv_backward(dy, fold, x, norm, conv_weight, conv, wanted)
    return pytorch_conv.bn_relu_conv_backward(kernels, dy, fold, x, norm, conv_weight, conv, wanted)
