"""Batch norm, ReLU, convolution and residual add, forward and backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from preact_kernels.kernels import pytorch_conv
from preact_kernels.kernels import reference as kernels
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


def serves_conv(
    weight_shape: Sequence[int],
    conv: Conv,
    dtype: torch.dtype,
    device: torch.device,
    pixels: int | None = None,
) -> bool:
    """No: every convolution is PyTorch's."""
    return False


def bn_relu_conv_forward(
    x: Tensor, norm: Norm, conv_weight: Tensor, conv: Conv, epilogue: Epilogue = NO_EPILOGUE
) -> Output:
    """`y = conv(relu(p)) [+ conv_bias] [+ residual]`."""
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
    """`g = conv_transpose(dy) * [p > 0]`, its sums, and the gradient of `conv_weight`."""
    return pytorch_conv.bn_relu_conv_backward(kernels, dy, fold, x, norm, conv_weight, conv, wanted)
