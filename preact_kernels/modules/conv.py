"""Reads the convolution of a fused module."""

from typing import Any

import torch
from torch import Tensor, nn

from preact_kernels.attributes import tensors
from preact_kernels.kernels.contract import HALVES
from preact_kernels.modules.hooks import CONVOLUTIONS as CONVOLUTIONS
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.ops.arguments import ConvArguments, convolve
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.plain_operators import has_served_parameters
from preact_kernels.torch_compat import is_transformed


def is_bare_conv(conv: nn.Module, types: tuple[type, ...] = (nn.Conv2d,)) -> bool:
    """Whether a fused module may read the weights of `conv` instead of calling it.

    Args:
        conv: the child.
        types: supported classes; subclasses are not.
    """
    return (
        type(conv) in types
        and conv.padding_mode == "zeros"
        and not has_hooks(conv, ("_conv_forward",))
        and has_served_parameters(conv)
    )


def is_stage_conv(conv: Any) -> bool:
    """Whether a stage may read the weight of `conv` instead of calling it.

    The convolution must have no bias, and stride, padding and dilation must be pairs of ints. Other
    convolutions are called, so that PyTorch runs them or raises its error.
    """
    own = conv.__dict__
    if not is_bare_conv(conv):
        return False
    bias = own["bias"] if "bias" in own else own["_parameters"].get("bias")
    if bias is not None or type(conv.groups) is not int:
        return False
    stride, padding, dilation = conv.stride, conv.padding, conv.dilation
    if not (
        type(stride) is type(padding) is type(dilation) is tuple
        and len(stride) == len(padding) == len(dilation) == 2
    ):
        return False
    for number in (*stride, *padding, *dilation):
        if type(number) is not int or number < 0:
            return False
    return 0 not in stride and 0 not in dilation


def conv_arguments(conv: Any) -> ConvArguments:
    """The arguments of a convolution, as calling the child would use them."""
    weight, bias = tensors(conv, ("weight", "bias"))
    return ConvArguments(weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def plain_conv(conv: Any, x: Tensor) -> Tensor:
    """`conv(x)` without kernels; under transforms, casts float32 weights to half precision."""
    if not (is_transformed() and is_bare_conv(conv, CONVOLUTIONS)) or is_autocast(x):
        return conv(x)
    if x.dtype not in HALVES or conv.weight.dtype != torch.float32:
        return conv(x)
    weight, bias, *numbers = conv_arguments(conv)
    bias = None if bias is None else bias.to(x.dtype)
    return convolve(x, weight.to(x.dtype), bias, *numbers)
