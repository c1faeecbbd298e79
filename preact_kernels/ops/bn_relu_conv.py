"""`bn_relu_conv2d`: batch norm, ReLU and convolution that keep the input alone."""

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.ops import checks, layout, schema
from preact_kernels.ops.autocast import compute_dtype
from preact_kernels.ops.bn_relu import (
    affine_parameters,
    differentiable_bn_relu,
    gradients,
    normalise,
)
from preact_kernels.ops.bn_stats import follow_batch, statistics_of, sums_over_group

# Arguments of `bn_relu_conv_backward` for a gradient that arrives whole, not folded.
WHOLE_GRADIENT = (None, None, None, None, None, 0.0, None, 0.0)


class BNReLUConvFunction(torch.autograd.Function):
    """y = conv(relu(bn(x))) [+ residual] for given statistics; no activation is kept."""

    @staticmethod
    def forward(
        ctx, x, bn_weight, bn_bias, conv_weight, conv_bias, residual, mean, var,
        inv_count, eps, conv, process_group,
    ):  # fmt: skip
        kernels = schema.kernels_for(x)
        ctx.kernels = kernels
        ctx.inv_count, ctx.eps, ctx.conv, ctx.process_group = inv_count, eps, conv, process_group
        ctx.save_for_backward(x, bn_weight, bn_bias, conv_weight, conv_bias, mean, var)
        y, _, _ = kernels.bn_relu_conv_forward(
            x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual, *conv, False
        )
        return y

    @staticmethod
    def backward(ctx, dy):
        x, bn_weight, bn_bias, conv_weight, conv_bias, mean, var = ctx.saved_tensors
        (
            needs_x,
            needs_bn_weight,
            needs_bn_bias,
            needs_conv_weight,
            needs_conv_bias,
            needs_residual,
        ) = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            with torch.autocast(x.device.type, enabled=False):
                a = differentiable_bn_relu(
                    x, bn_weight, bn_bias, mean, var, ctx.inv_count != 0, ctx.eps, ctx.process_group
                )
                y = F.conv2d(a, conv_weight, conv_bias, *ctx.conv)
            inputs = (x, bn_weight, bn_bias, conv_weight, conv_bias)
            grads = gradients(y, inputs, ctx.needs_input_grad, dy)
            return *grads, dy if needs_residual else None, *(None,) * 6
        dense_dy = layout.nhwc(dy)
        dx = dbn_weight = dbn_bias = dconv_weight = None
        needs_g = needs_x or needs_bn_weight or needs_bn_bias
        if needs_g or needs_conv_weight:
            g, dconv_weight, sums, _ = ctx.kernels.bn_relu_conv_backward(
                dense_dy, *WHOLE_GRADIENT, x, mean, var, bn_weight, bn_bias, ctx.eps,
                conv_weight, *ctx.conv, needs_g, needs_conv_weight, False,
            )  # fmt: skip
        if needs_g:
            dbn_bias, dbn_weight = sums.unbind()
        if needs_x:
            dx = ctx.kernels.bn_input_gradient(
                None, g, x, mean, var, bn_weight, ctx.eps,
                sums_over_group(sums, ctx.process_group), ctx.inv_count,
            )  # fmt: skip
        return (
            dx,
            dbn_weight,
            dbn_bias,
            dconv_weight if needs_conv_weight else None,
            dense_dy.sum((0, 2, 3)) if needs_conv_bias else None,
            dy if needs_residual else None,
            *(None,) * 6,
        )


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
    """Batch norm, ReLU and convolution (and a residual add) that keep `x` alone.

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
        process_group: statistics are those of the batch spread over this `torch.distributed`
            group, as in `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, K, H', W']` in the dtype of `x` and the memory format that `F.conv2d` gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match, or there is one value a channel in
            training mode.
        BackendError: the backend that was named cannot serve `x`.
    """
    checks.check_batch_norm(
        x, bn_weight, bn_bias, running_mean, running_var, training, momentum, eps, process_group
    )
    stride, same_padding, dilation = checks.check_conv(
        x, conv_weight, conv_bias, stride, padding, dilation, groups
    )
    if same_padding is None:
        shape = [x.shape[0], conv_weight.shape[0], *x.shape[2:]]
    else:
        shape = checks.output_shape(x.shape, conv_weight, stride, same_padding, dilation)
    if residual is not None:
        checks.check_residual(residual, "residual", shape, x)
    dtype = compute_dtype(x)
    is_served = (
        same_padding is not None
        and x.dtype == dtype
        and (residual is None or residual.dtype == dtype)
        and (x.numel() > 0 or process_group is not None)
    )
    conv_weight = conv_weight.to(dtype)
    conv_bias = None if conv_bias is None else conv_bias.to(dtype).contiguous()
    if not is_served:
        a, stats = normalise(
            x, bn_weight, bn_bias, running_mean, running_var, training, eps, process_group
        )
        same_padding = padding if same_padding is None else same_padding
        y = F.conv2d(a.to(dtype), conv_weight, conv_bias, stride, same_padding, dilation, groups)
        y = y if residual is None else y + residual
        follow_batch(stats, running_mean, running_var, momentum)
        return y

    channels_last = layout.is_channels_last(x) or layout.is_channels_last(conv_weight)
    x = layout.nhwc(x)
    weight, bias = affine_parameters(x, x.shape[1], bn_weight, bn_bias)
    kernels = schema.kernels_for(x)
    stats = statistics_of(kernels, x.detach(), running_mean, running_var, training, process_group)
    y = BNReLUConvFunction.apply(
        x,
        weight,
        bias,
        conv_weight,
        conv_bias,
        None if residual is None else layout.nhwc(residual),
        *stats,
        eps,
        (stride, same_padding, dilation, groups),
        process_group,
    )
    follow_batch(stats, running_mean, running_var, momentum)
    return layout.restored(y, channels_last)
