"""`bn_relu_conv2d`: batch norm, ReLU and convolution; saves only the input for backward."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import Epilogue, Fold, Norm, Wanted
from preact_kernels.ops import checks, dispatch, layout
from preact_kernels.ops.autocast import compute_dtype
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.bn_relu import (
    differentiable_bn_relu,
    gradients,
    normalise,
    plain_bn_relu,
    unit_call,
)
from preact_kernels.ops.bn_stats import sums_over_group
from preact_kernels.ops.plain_operators import runs_plain, runs_plain_backward


class ConvArguments(NamedTuple):
    """The arguments of one convolution, as `F.conv2d` takes them."""

    weight: Tensor
    bias: Tensor | None
    stride: int | tuple[int, ...]
    padding: int | tuple[int, ...] | str
    dilation: int | tuple[int, ...]
    groups: int


class BNReLUConvFunction(torch.autograd.Function):
    """y = conv(relu(bn(x))) [+ conv_bias] [+ residual] for given statistics.

    Tensor arguments: x, bn_weight, bn_bias, conv_weight, conv_bias, residual, mean, var.
    """

    @staticmethod
    def forward(ctx, unit, *tensors):
        x, bn_weight, bn_bias, conv_weight, conv_bias, residual, mean, var = tensors
        ctx.unit = unit
        ctx.save_for_backward(x, bn_weight, bn_bias, conv_weight, conv_bias, mean, var)
        norm, epilogue = (
            Norm(mean, var, bn_weight, bn_bias, unit.eps),
            Epilogue(conv_bias, residual),
        )
        return unit.kernels.bn_relu_conv_forward(x, norm, conv_weight, unit.conv, epilogue).y

    @staticmethod
    def backward(ctx, dy):
        x, bn_weight, bn_bias, conv_weight, conv_bias, mean, var = ctx.saved_tensors
        unit, needed = ctx.unit, ctx.needs_input_grad[1:]
        needs_x, needs_bn_weight, needs_bn_bias, needs_weight, needs_bias, needs_residual = needed[
            :6
        ]
        norm = Norm(mean, var, bn_weight, bn_bias, unit.eps)
        dresidual = dy if needs_residual else None
        if runs_plain_backward(dy):

            def forward(x, bn_weight, bn_bias, conv_weight, conv_bias):
                norm = Norm(mean, var, bn_weight, bn_bias, unit.eps)
                a = differentiable_bn_relu(x, norm, unit.training, unit.process_group)
                return F.conv2d(a, conv_weight.to(a.dtype), conv_bias, *unit.conv)

            inputs = (x, bn_weight, bn_bias, conv_weight, conv_bias)
            with torch.autocast(x.device.type, enabled=False):
                grads = gradients(forward, inputs, needed[:5], dy)
            return None, *grads, dresidual, None, None
        dense_dy = layout.nhwc(dy)
        dx = dbn_weight = dbn_bias = dconv_weight = None
        wanted = Wanted(needs_x or needs_bn_weight or needs_bn_bias, needs_weight)
        if any(wanted):
            found = unit.kernels.bn_relu_conv_backward(
                dense_dy, None, x, norm, conv_weight, unit.conv, wanted
            )
            dconv_weight = found.conv_weight
        if wanted.input:
            dbn_bias, dbn_weight = found.sums.unbind()
        if needs_x:
            sums = sums_over_group(found.sums, unit.process_group)
            fold = Fold(None, x, norm, sums, unit.inv_count(x))
            dx = unit.kernels.bn_input_gradient(found.g, fold)
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
    `+ residual` where given. The unit is that of He et al., "Identity Mappings in Deep Residual
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
        stride: of the convolution, pixels.
        padding: zeros on each side, pixels, added after the activation; or `"same"`, `"valid"`.
        dilation: of the convolution, pixels.
        groups: of the convolution.
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
    weight, bias, *geometry = cast(Any, conv)
    y = F.conv2d(a, weight.to(a.dtype), None if bias is None else bias.to(a.dtype), *geometry)
    return y if residual is None else y + residual


def bn_relu_conv2d_of(
    x: Tensor, bn: BatchNorm, conv: ConvArguments, residual: Tensor | None
) -> Tensor:
    """`bn_relu_conv2d` for a `BatchNorm` and `ConvArguments`."""
    bn.check(x)
    geometry = checks.check_conv(x, *conv)
    if residual is not None:
        if geometry is None:  # padding "same"
            shape = [x.shape[0], conv.weight.shape[0], *x.shape[2:]]
        else:
            shape = geometry.output_shape(x.shape, conv.weight.shape)
        checks.check_residual(residual, "residual", shape, x)
    dtype = compute_dtype(x)
    kernels = dispatch.kernels_for(x)
    conv_weight = conv.weight
    conv_bias = None if conv.bias is None else conv.bias.to(dtype).contiguous()
    if (
        geometry is None
        or x.dtype != dtype
        or (residual is not None and residual.dtype != dtype)
        or (x.numel() == 0 and bn.process_group is None)
    ):
        a, statistics = normalise(kernels, x, bn)
        geometry_arguments: Any = conv[2:]
        y = F.conv2d(a.to(dtype), conv_weight.to(dtype), conv_bias, *geometry_arguments)
        y = y if residual is None else y + residual
        bn.update(kernels, statistics)
        return y

    if not kernels.takes_float32_weights:
        conv_weight = conv_weight.to(dtype)
    channels_last = layout.is_channels_last(x) or layout.is_channels_last(conv_weight)
    x = layout.nhwc(x)
    statistics = bn.statistics(kernels, x.detach())
    unit = unit_call(kernels, bn, statistics, geometry)
    residual = None if residual is None else layout.nhwc(residual)
    parameters = (*bn.affine(x, x.shape[1]), conv_weight, conv_bias)
    y = BNReLUConvFunction.apply(unit, x, *parameters, residual, statistics.mean, statistics.var)
    bn.update(kernels, statistics)
    return layout.restored(y, channels_last)
