"""Units without a fused kernel: norm and activation by the backend, convolution by PyTorch.

The activation is freed as soon as the convolution has read it. All casts are here: with a float32
residual stream or float32 weights and products in half precision, this computes
`F.conv2d(act(norm(x)).to(half), weight.to(half)) [+ residual in float32]`, as plain PyTorch does.
The backend may serve a unit after the weight is cast, or without the residual.

PyTorch's convolution of an NHWC tensor converts an NCHW weight, and its gradient back, at every
call. If the weight is much larger than the activation, the activation is converted instead.
"""

import torch
from torch import Tensor

from preact_kernels.kernels.contract import (
    Conv,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Kernels,
    Norm,
    Output,
    Unit,
    Wanted,
)
from preact_kernels.kernels.dropout import Mask
from preact_kernels.kernels.layout import CHANNELS_LAST, as_image, check_storage, from_image


def _activated(kernels: Kernels, x: Tensor, norm: Norm, mask: Mask | None) -> Tensor:
    a = from_image(kernels.norm_act_forward(as_image(x), norm), x.shape, True)
    return a if mask is None else kernels.dropout(a, mask)


def _convolve(a: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> Tensor:
    check_storage("conv_weight", weight)
    stride, padding, dilation, groups = conv
    none = [0] * len(stride)
    return torch.convolution(a, weight, bias, stride, padding, dilation, False, none, groups)


def _converts_activation(x: Tensor, conv_weight: Tensor) -> bool:
    """Whether to run a convolution in NCHW; only on a CPU.

    This converts about five tensors like `x` in a step, and saves three conversions of the weight.
    """
    is_large = conv_weight.numel() > 2 * x.numel()
    return (
        is_large
        and x.device.type == "cpu"
        and not conv_weight.is_contiguous(memory_format=CHANNELS_LAST[conv_weight.dim()])
    )


def whole_gradient(kernels: Kernels, gradient: Gradient) -> Tensor:
    """The gradient with its deferred step evaluated, in the dtype of the step's `x`."""
    g, step = gradient
    if step is None:
        return g
    return kernels.norm_input_gradient(Gradient(g.to(step.x.dtype), step))


def run_forward(
    kernels: Kernels,
    unit: Unit,
    inputs: Inputs,
    epilogue: Epilogue,
    mask: Mask | None = None,
) -> Output:
    """The backend's `norm_act_conv_forward`, or the one below for dropout and volumes."""
    if mask is None and inputs.x.dim() == 4:
        return kernels.norm_act_conv_forward(unit, inputs, epilogue)
    return norm_act_conv_forward(kernels, unit, inputs, epilogue, mask)


def run_backward(
    kernels: Kernels,
    unit: Unit,
    dy: Gradient,
    inputs: Inputs,
    wanted: Wanted,
    mask: Mask | None = None,
) -> Gradients:
    """The backward of `run_forward`."""
    if mask is None and inputs.x.dim() == 4:
        return kernels.norm_act_conv_backward(unit, dy, inputs, wanted)
    return norm_act_conv_backward(kernels, unit, dy, inputs, wanted, mask)


def norm_act_conv_forward(
    kernels: Kernels,
    unit: Unit,
    inputs: Inputs,
    epilogue: Epilogue,
    mask: Mask | None = None,
) -> Output:
    """`Kernels.norm_act_conv_forward` with PyTorch's convolution; also for volumes.

    `mask` is a mask of dropout between activation and convolution.
    """
    x, norm, conv_weight = inputs
    if unit.weight_dtype != unit.dtype:
        inputs = inputs._replace(conv_weight=conv_weight.to(unit.dtype))
        unit = unit._replace(weight_dtype=unit.dtype)
        return run_forward(kernels, unit, inputs, epilogue, mask)
    conv_bias, residual, with_stats = epilogue
    if unit.y_dtype != unit.dtype:
        narrow = unit._replace(y_dtype=unit.dtype)
        y = run_forward(kernels, narrow, inputs, Epilogue(conv_bias), mask).y
    else:
        a = _activated(kernels, x, norm, mask).to(unit.dtype)
        if _converts_activation(x, conv_weight):
            a = kernels.nchw(a)
        y = kernels.nhwc(_convolve(a, conv_weight, conv_bias, unit.conv))
        del a
    if residual is not None:
        y, statistics = kernels.residual_add_forward(
            as_image(y.to(residual.dtype)), as_image(residual), with_stats
        )
        return Output(from_image(y, residual.shape, True), statistics)
    return Output(y, kernels.bn_stats(y) if with_stats else None)


def norm_act_conv_backward(
    kernels: Kernels,
    unit: Unit,
    dy: Gradient,
    inputs: Inputs,
    wanted: Wanted,
    mask: Mask | None = None,
) -> Gradients:
    """The backward of `norm_act_conv_forward`. g of volumes is `[N, C, D * H, W]`."""
    x, norm, conv_weight = inputs
    if unit.weight_dtype != unit.dtype:
        inputs = inputs._replace(conv_weight=conv_weight.to(unit.dtype))
        unit = unit._replace(weight_dtype=unit.dtype)
        found = run_backward(kernels, unit, dy, inputs, wanted, mask)
        if found.conv_weight is None:
            return found
        return found._replace(conv_weight=found.conv_weight.to(conv_weight.dtype))
    whole = whole_gradient(kernels, dy)
    if unit.y_dtype != unit.dtype:
        narrow = unit._replace(y_dtype=unit.dtype)
        rounded = Gradient(whole.to(unit.dtype))
        found = run_backward(kernels, narrow, rounded, inputs, wanted._replace(dy=False), mask)
        return found._replace(dy=whole if wanted.dy else None)
    if wanted.weight:
        a = _activated(kernels, x, norm, mask).to(unit.dtype)
    else:  # only its shape and dtype are read
        a = x if x.dtype == unit.dtype else torch.empty_like(x, dtype=unit.dtype)
    conv_dy = whole
    if _converts_activation(x, conv_weight):
        a, conv_dy = kernels.nchw(a), kernels.nchw(conv_dy)
    check_storage("conv_weight", conv_weight)
    check_storage("dy", conv_dy)
    needs = [wanted.input, wanted.weight, False]
    stride, padding, dilation, groups = unit.conv
    none = [0] * len(stride)
    da, dconv_weight, _ = torch.ops.aten.convolution_backward(
        conv_dy, a, conv_weight, None, stride, padding, dilation, False, none, groups, needs
    )
    del a
    g = sums = None
    if wanted.input:
        da = kernels.nhwc(da.to(x.dtype))
        if mask is not None:
            da = kernels.dropout(da, mask)
        g, sums = kernels.norm_act_backward(as_image(da), as_image(x), norm, True)
    if not wanted.weight:
        dconv_weight = None
    elif dconv_weight.stride() != conv_weight.stride():
        dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
    return Gradients(g, sums, dconv_weight, whole if wanted.dy else None)
