"""How the fused modules read an `nn.Conv2d` child."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels.modules.batch_norm import HALVES
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.plain_operators import has_served_parameters
from preact_kernels.ops.unit import ConvArguments
from preact_kernels.torch_compat import is_transformed


def is_bare_conv(conv: nn.Module) -> bool:
    """Whether a fused module may read the weights of `conv` in place of calling it."""
    return (
        type(conv) is nn.Conv2d
        and conv.padding_mode == "zeros"
        and not has_hooks(conv)
        and has_served_parameters(conv)
    )


def is_stage_conv(conv: Any) -> bool:
    """Whether a stage may read the weight of `conv` in place of calling it.

    Not one with a bias, or with numbers that are no pairs of ints: PyTorch takes those, or says why
    not.
    """
    if not is_bare_conv(conv) or conv.bias is not None:
        return False
    stride, padding, dilation = conv.stride, conv.padding, conv.dilation
    return (
        type(stride) is type(padding) is type(dilation) is tuple
        and len(stride) == len(padding) == len(dilation) == 2
        and set(map(type, (*stride, *padding, *dilation, conv.groups))) == {int}
        and min(stride + dilation) > 0 <= min(padding)
    )


def conv_arguments(conv: nn.Conv2d) -> ConvArguments:
    """The arguments of a child's call."""
    numbers: Any = conv.stride, conv.padding, conv.dilation, conv.groups
    return ConvArguments(conv.weight, conv.bias, *numbers)


def plain_conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """`conv(x)` in place of kernels; under transforms, casts a float32 weight to a half `x`."""
    if not (is_transformed() and is_bare_conv(conv)) or is_autocast(x):
        return conv(x)
    if x.dtype not in HALVES or conv.weight.dtype != torch.float32:
        return conv(x)
    bias = None if conv.bias is None else conv.bias.to(x.dtype)
    numbers: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return F.conv2d(x, conv.weight.to(x.dtype), bias, *numbers)
