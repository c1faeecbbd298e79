"""`bn_relu_conv2d`: batch norm, ReLU and convolution; saves only the input for backward."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import (
    AffineStep,
    Epilogue,
    Gradient,
    Inputs,
    Kernels,
    Norm,
    Unit,
    Wanted,
)
from preact_kernels.ops import dispatch
from preact_kernels.ops.batch_norm import (
    BatchNorm,
    inv_count_of,
    sums_over_group,
)
from preact_kernels.ops.bn_relu import normalise, plain_bn_relu
from preact_kernels.ops.double_backward import differentiable_bn_relu, gradients
from preact_kernels.ops.plain_operators import runs_plain, runs_plain_backward
from preact_kernels.ops.unit import ConvArguments, checked_unit, with_served_weight


class BNReLUConvCall(NamedTuple):
    """Arguments of the autograd function that are no tensors."""

    kernels: Kernels
    unit: Unit
    eps: float
    fixed_inv_count: float | None  # see `inv_count_of`


class BNReLUConvFunction(torch.autograd.Function):
    """y = conv(relu(bn(x))) [+ conv_bias] [+ residual] for given statistics.

    Tensor arguments: x, bn_weight, bn_bias, conv_weight, conv_bias, residual, mean, var.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        x, bn_weight, bn_bias, conv_weight, conv_bias, residual, mean, var = tensors
        kernels, unit, eps, _ = ctx.call = call
        ctx.save_for_backward(x, bn_weight, bn_bias, conv_weight, conv_bias, mean, var)
        inputs = Inputs(x, Norm(mean, var, bn_weight, bn_bias, eps), conv_weight)
        return kernels.bn_relu_conv_forward(unit, inputs, Epilogue(conv_bias, residual)).y

    @staticmethod
    def backward(ctx, dy):
        x, bn_weight, bn_bias, conv_weight, conv_bias, mean, var = ctx.saved_tensors
        kernels, unit, eps, fixed_inv_count = ctx.call
        needed = ctx.needs_input_grad[1:]
        needs_x, needs_bn_weight, needs_bn_bias, needs_weight, needs_bias, needs_residual, *_ = (
            needed
        )
        dresidual = dy if needs_residual else None
        if runs_plain_backward(dy):

            def forward(x, bn_weight, bn_bias, conv_weight, conv_bias):
                norm = Norm(mean, var, bn_weight, bn_bias, eps)
                a = differentiable_bn_relu(x, norm, unit.uses_batch, unit.process_group)
                return F.conv2d(a, conv_weight.to(a.dtype), conv_bias, *unit.conv)

            inputs = (x, bn_weight, bn_bias, conv_weight, conv_bias)
            with torch.autocast(x.device.type, enabled=False):
                grads = gradients(forward, inputs, needed[:5], dy)
            return None, *grads, dresidual, None, None
        dense_dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dbn_weight = dbn_bias = dconv_weight = None
        norm = Norm(mean, var, bn_weight, bn_bias, eps)
        wanted = Wanted(needs_x or needs_bn_weight or needs_bn_bias, needs_weight)
        if any(wanted):
            found = kernels.bn_relu_conv_backward(
                unit, Gradient(dense_dy), Inputs(x, norm, conv_weight), wanted
            )
            dconv_weight = found.conv_weight
        if wanted.input:
            dbn_bias, dbn_weight = found.sums.unbind()
        if needs_x:
            sums = sums_over_group(found.sums, unit.process_group)
            step = AffineStep(None, x, norm, sums, inv_count_of(x, fixed_inv_count))
            dx = kernels.bn_input_gradient(Gradient(found.g, step))
        dconv_bias = dense_dy.sum((0, 2, 3)) if needs_bias else None
        return None, dx, dbn_weight, dbn_bias, dconv_weight, dconv_bias, dresidual, None, None


def bn_relu_conv2d(
    x: Tensor,
    conv_weight: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    conv_bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    residual: Tensor | None = None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group=None,
) -> Tensor:
    """Batch norm, ReLU, convolution and residual add; saves only `x` for backward.

    Equals `F.conv2d(F.relu(F.batch_norm(x, running_mean, running_var, bn_weight, bn_bias,
    training, momentum, eps)), conv_weight, conv_bias, stride, padding, dilation, groups)`,
    `+ residual` where given. The unit is from He et al., "Identity Mappings in Deep Residual
    Networks" (arXiv 1603.05027).

    Args:
        x: `[N, C, H, W]`, float32, float64, bfloat16 or float16; any strides.
        conv_weight: `[K, C / groups, R, S]` in the dtype of `x` or float32. Under autocast the
            convolution runs in the autocast dtype.
        bn_weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bn_bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place once in training mode; needed in evaluation mode.
        running_var: `[C]`, unbiased, likewise.
        conv_bias: `[K]` or None.
        stride: stride of the convolution, pixels.
        padding: zeros on each side, pixels, added after the activation; or `"same"`, `"valid"`.
        dilation: dilation of the convolution, pixels.
        groups: number of groups of the convolution.
        residual: `[N, K, H', W']`, added to the result.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: a `torch.distributed` group over which the batch is spread, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, K, H', W']` in the dtype of `x` and the memory format that `F.conv2d` gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match, or there is one value per channel in
            training mode.
        BackendError: the backend that was named cannot serve `x`.
    """
    running = (running_mean, running_var)
    bn = BatchNorm(bn_weight, bn_bias, *running, training, momentum, eps, process_group)
    conv = ConvArguments(conv_weight, conv_bias, stride, padding, dilation, groups)
    if runs_plain(x, conv_weight, bn_weight, bn_bias, *running, conv_bias, residual):
        return plain_bn_relu_conv2d(x, bn, conv, residual)
    return bn_relu_conv2d_of(x, bn, conv, residual)


def plain_bn_relu_conv2d(
    x: Tensor, bn: BatchNorm, conv: ConvArguments, residual: Tensor | None
) -> Tensor:
    """`bn_relu_conv2d` in PyTorch's own operators, which check the arguments."""
    a = plain_bn_relu(x, bn)
    weight, bias, *numbers = cast(Any, conv)
    y = F.conv2d(a, weight.to(a.dtype), None if bias is None else bias.to(a.dtype), *numbers)
    return y if residual is None else y + residual


def bn_relu_conv2d_of(
    x: Tensor, bn: BatchNorm, conv: ConvArguments, residual: Tensor | None
) -> Tensor:
    """`bn_relu_conv2d` for a `BatchNorm` and `ConvArguments`."""
    unit, dtype, channels_last = checked_unit(x, bn, conv, residual)
    kernels = dispatch.kernels_for(x)
    conv_bias = None if conv.bias is None else conv.bias.to(dtype).contiguous()
    if (
        unit is None
        or x.dtype != dtype
        or (residual is not None and residual.dtype != dtype)
        or (x.numel() == 0 and bn.process_group is None)
    ):
        a, statistics, fixed = normalise(kernels, x, bn)
        numbers: Any = conv[2:]
        y = F.conv2d(a.to(dtype), conv.weight.to(dtype), conv_bias, *numbers)
        y = y if residual is None else y + residual
        bn.update(kernels, x, statistics, fixed)
        return y

    conv_weight = conv.weight
    if conv_weight.dtype != dtype:
        pixels = x.numel() // x.shape[1]
        unit, conv_weight = with_served_weight(kernels, unit, conv_weight, pixels)
    x = x.contiguous(memory_format=torch.channels_last)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    statistics, fixed = bn.statistics(kernels, x.detach())
    parameters = (*bn.affine(x, x.shape[1]), conv_weight, conv_bias)
    call = BNReLUConvCall(kernels, unit, bn.eps, fixed)
    y = BNReLUConvFunction.apply(call, x, *parameters, residual, *statistics)
    bn.update(kernels, x, statistics, fixed)
    return y if channels_last else y.contiguous()
