"""BN-ReLU-Conv around PyTorch's convolution, for units without a fused kernel.

The backend computes the activation, which is freed as soon as the convolution has read it. Every
cast is here: with a float32 residual stream or float32 weights and products in half precision,
this computes `F.conv2d(F.relu(bn(x)).to(half), weight.to(half)) [+ residual in float32]`, as plain
PyTorch does. Rounding the weight, or adding the residual on its own, may leave a unit that the
backend serves.

PyTorch's convolution of an NHWC tensor converts an NCHW weight at every call, and so the weight's
gradient back. Where the weight is much larger than the activation, the activation is converted.
"""

import torch
from torch import Tensor

from preact_kernels.kernels.contract import (
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Kernels,
    Output,
    Unit,
    Wanted,
)


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


def whole_gradient(kernels: Kernels, gradient: Gradient) -> Tensor:
    """The gradient as one tensor, in the dtype of what it is the gradient of."""
    g, step = gradient
    if step is None:
        return g
    return kernels.bn_input_gradient(Gradient(g.to(step.x.dtype), step))


def bn_relu_conv_forward(
    kernels: Kernels, unit: Unit, inputs: Inputs, epilogue: Epilogue
) -> Output:
    """`Kernels.bn_relu_conv_forward`; `kernels` does everything but the convolution."""
    x, norm, conv_weight = inputs
    if unit.weight_dtype != unit.dtype:
        inputs = inputs._replace(conv_weight=conv_weight.to(unit.dtype))
        return kernels.bn_relu_conv_forward(
            unit._replace(weight_dtype=unit.dtype), inputs, epilogue
        )
    conv_bias, residual, with_stats = epilogue
    if unit.y_dtype != unit.dtype:
        narrow = unit._replace(y_dtype=unit.dtype)
        y = kernels.bn_relu_conv_forward(narrow, inputs, Epilogue(conv_bias)).y
    else:
        a = kernels.bn_relu_forward(x, norm).to(unit.dtype)
        if _converts_activation(x, conv_weight):
            a = a.contiguous()
        y = _nhwc(torch.conv2d(a, conv_weight, conv_bias, *unit.conv))
        del a
    if residual is not None:
        return kernels.residual_add_forward(y.to(residual.dtype), residual, with_stats)
    return Output(y, kernels.bn_stats(y) if with_stats else None)


def bn_relu_conv_backward(
    kernels: Kernels, unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted
) -> Gradients:
    """`Kernels.bn_relu_conv_backward`; `kernels` does everything but the convolution."""
    x, norm, conv_weight = inputs
    if unit.weight_dtype != unit.dtype:
        inputs = inputs._replace(conv_weight=conv_weight.to(unit.dtype))
        found = kernels.bn_relu_conv_backward(
            unit._replace(weight_dtype=unit.dtype), dy, inputs, wanted
        )
        if found.conv_weight is None:
            return found
        return found._replace(conv_weight=found.conv_weight.to(unit.weight_dtype))
    whole = whole_gradient(kernels, dy)
    if unit.y_dtype != unit.dtype:
        narrow = unit._replace(y_dtype=unit.dtype)
        found = kernels.bn_relu_conv_backward(
            narrow, Gradient(whole.to(unit.dtype)), inputs, wanted._replace(dy=False)
        )
        return found._replace(dy=whole if wanted.dy else None)
    if wanted.weight:
        a = kernels.bn_relu_forward(x, norm).to(unit.dtype)
    else:  # only its shape and dtype are read
        a = x if x.dtype == unit.dtype else torch.empty_like(x, dtype=unit.dtype)
    conv_dy = whole
    if _converts_activation(x, conv_weight):
        a, conv_dy = a.contiguous(), conv_dy.contiguous()
    mask = [wanted.input, wanted.weight, False]
    stride, padding, dilation, groups = unit.conv
    da, dconv_weight, _ = torch.ops.aten.convolution_backward(
        conv_dy, a, conv_weight, None, stride, padding, dilation, False, [0, 0], groups, mask
    )
    del a
    g = sums = None
    if wanted.input:
        g, sums = kernels.bn_relu_backward(_nhwc(da.to(x.dtype)), x, norm, True)
    if not wanted.weight:
        dconv_weight = None
    elif dconv_weight.stride() != conv_weight.stride():
        dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
    return Gradients(g, sums, dconv_weight, whole if wanted.dy else None)
