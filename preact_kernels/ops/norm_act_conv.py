"""Norm, activation, convolution and residual add; saves only the input for backward.

`pk.bn_relu_conv2d`, `pk.batch_norm_act_conv` and `pk.group_norm_act_conv` call `norm_act_conv_of`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from preact_kernels.activations import Activation
from preact_kernels.kernels import layout, pytorch_conv
from preact_kernels.kernels.contract import (
    AffineStep,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Kernels,
    Norm,
    Unit,
    Wanted,
)
from preact_kernels.kernels.dropout import Mask
from preact_kernels.norms import BatchNorm, GroupNorm, NormArguments
from preact_kernels.ops import dispatch
from preact_kernels.ops.activation import activation_of
from preact_kernels.ops.double_backward import differentiable_norm_act, gradients
from preact_kernels.ops.dropout import check_dropout, drawn
from preact_kernels.ops.norm_act import (
    NO_SCALE_SHIFT,
    ScaleShift,
    activated_dtype,
    inv_count_in,
    normalise,
    parameter_gradients,
    plain_norm_act,
    scale_shift_of,
)
from preact_kernels.ops.plain_operators import runs_plain, runs_plain_backward
from preact_kernels.ops.saved_tensors import save, saved
from preact_kernels.ops.statistics import step_sums
from preact_kernels.ops.unit import ConvArguments, checked_unit, convolve, with_served_weight

fx.wrap("convolve")  # branches on the dimensions of the weight, unknown in a symbolic trace


class UnitCall(NamedTuple):
    """Arguments of the autograd function other than tensors."""

    kernels: Kernels
    unit: Unit
    eps: float
    groups: int | None  # groups of channels per image; None: statistics per channel
    fixed_inv_count: float | None  # see `inv_count_of`
    dims: int  # dimensions of the result
    channels_last: bool  # memory format of the result
    keep_factor: float = 1.0  # scale of the elements that dropout keeps

    def of_image(self, conv_weight: Tensor) -> Tensor:
        """The weight for kernels of images.

        Autograd saves the original weight, as a program may replace its `data`.
        """
        return conv_weight.unsqueeze(2) if self.dims == 3 else conv_weight

    def mask(self, bits: Tensor | None) -> Mask | None:
        return None if bits is None else Mask(bits, self.keep_factor)

    def forward(self, inputs: Inputs, epilogue: Epilogue, bits: Tensor | None) -> Tensor:
        run = pytorch_conv.run_forward
        return run(self.kernels, self.unit, inputs, epilogue, self.mask(bits)).y

    def backward(
        self, dy: Tensor, inputs: Inputs, wanted: Wanted, bits: Tensor | None
    ) -> Gradients:
        run = pytorch_conv.run_backward
        return run(self.kernels, self.unit, Gradient(dy), inputs, wanted, self.mask(bits))


class NormActConvFunction(torch.autograd.Function):
    """y = conv(act(norm(x))) [+ conv_bias] [+ residual] for given statistics.

    Tensor arguments: x, weight, bias, conv_weight, conv_bias, residual, mean, var, bits of dropout.
    x and residual come from `layout.dense`; the result is as in `NormActFunction`.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        x, weight, bias, conv_weight, conv_bias, residual, mean, var, bits = tensors
        ctx.call = call
        ctx.set_materialize_grads(False)
        save(ctx, (x, weight, bias, conv_weight, mean, var, bits))
        norm = Norm(mean, var, weight, bias, call.eps, *call.unit.activation)
        inputs = Inputs(x, norm, call.of_image(conv_weight))
        y = call.forward(inputs, Epilogue(conv_bias, residual), bits)
        y = y.squeeze(2) if call.dims == 3 else y
        return layout.restored(y, call.channels_last).detach()

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # in the double backward of a convolution
            return None, None, None, None, None, None, None, None, None, None
        x, weight, bias, conv_weight, mean, var, bits = saved(ctx)
        x = layout.nhwc(x)  # hooks of saved tensors may return another memory format
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        unit, groups = call.unit, call.groups
        needs_x, needs_weight, needs_bias, needs_conv, needs_conv_bias, needs_residual, *_ = needed
        dy = dy.unsqueeze(2) if call.dims == 3 else dy
        dresidual = dy if needs_residual else None
        norm = Norm(mean, var, weight, bias, call.eps, *unit.activation)
        if runs_plain_backward(dy):
            mask = call.mask(bits)
            # The bias is not saved: no gradient depends on its values.
            zeros = None
            if needs_conv_bias:
                zeros = conv_weight.new_zeros(conv_weight.shape[0], requires_grad=True)

            def forward(x, weight, bias, conv_weight, conv_bias):
                norm = Norm(mean, var, weight, bias, call.eps, *unit.activation)
                shared = groups, unit.uses_batch, unit.process_group
                a = differentiable_norm_act(x, norm, *shared)
                if mask is not None:
                    a = a * mask.noise(x)
                a = a.to(unit.dtype)
                conv_bias = None if conv_bias is None else conv_bias.to(a.dtype)
                kernel = call.of_image(conv_weight).to(a.dtype)
                return convolve(a, kernel, conv_bias, *unit.conv)

            with torch.autocast(x.device.type, enabled=False):
                inputs = (x, weight, bias, conv_weight, zeros)
                grads = gradients(forward, inputs, needed[:5], dy.to(unit.dtype))
            return None, *grads, dresidual, None, None, None
        dense_dy = layout.nhwc(dy)
        dx = dweight = dbias = dconv_weight = dconv_bias = None
        wanted = Wanted(needs_x or needs_weight or needs_bias, needs_conv)
        if any(wanted):
            given = Inputs(x, norm, call.of_image(conv_weight))
            found = call.backward(dense_dy, given, wanted, bits)
            dconv_weight = found.conv_weight
            if dconv_weight is not None and call.dims == 3:
                dconv_weight = dconv_weight.squeeze(2)
        if wanted.input:
            needs = needs_weight, needs_bias
            dweight, dbias = parameter_gradients(found.sums, weight, bias, needs)
        if needs_x:
            is_volume = x.dim() == 5
            image = layout.as_image(x) if is_volume else x
            sums = step_sums(found.sums, norm, groups, unit.process_group)
            inv_count = inv_count_in(image, groups, call.fixed_inv_count)
            step = AffineStep(None, image, norm, sums, inv_count)
            g = found.g if found.g.dtype == x.dtype else found.g.to(x.dtype)
            dx = call.kernels.norm_input_gradient(Gradient(g, step))
            if is_volume:
                dx = layout.from_image(dx, x.shape, True)
        if needs_conv_bias:
            dconv_bias = dense_dy.sum((0, *range(2, dy.dim()))).to(unit.dtype)
        parameters = dweight, dbias, dconv_weight, dconv_bias
        return None, dx, *parameters, dresidual, None, None, None


def norm_act_conv_of(
    x: Tensor,
    norm: NormArguments,
    activation: Activation,
    conv: ConvArguments,
    residual: Tensor | None = None,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    dropout: float = 0.0,
    prefix: str = "",
    mask: Mask | None = None,
    channels_last: bool | None = None,
) -> Tensor:
    """`conv(dropout(act(norm(x) * (1 + scale) + shift))) [+ residual]`.

    Args:
        x: `[N, C, ...]` of 3 to 5 dimensions.
        norm: the arguments of the norm.
        activation: the activation.
        conv: the arguments of the convolution.
        residual: shaped like the result, added to it.
        scale_shift: a scale and a shift per image.
        dropout: probability of dropping an element of the activation.
        prefix: prefix of the names of the norm's weight and bias in messages.
        mask: mask of dropout; None: draw one.
        channels_last: memory format of the result; None: PyTorch's.
    """
    unit, dtype, is_channels_last = checked_unit(
        x, norm, activation, conv, residual, scale_shift, prefix
    )
    if channels_last is None:
        channels_last = is_channels_last
    has_scale_shift = scale_shift is not NO_SCALE_SHIFT
    if has_scale_shift:
        x = scale_shift.promoted(x)
    kernels = dispatch.kernels_for(x)
    conv_bias = None if conv.bias is None else conv.bias.to(dtype).contiguous()
    if dropout and mask is None:
        activated = x.to(activated_dtype(norm, activation, x))
        mask = drawn(kernels, x.shape, activated, norm.is_channels_last(x), dropout)
    if unit is None or (x.numel() == 0 and norm.process_group is None):
        x = x.to(activated_dtype(norm, activation, x))
        a, statistics, fixed = normalise(kernels, x, norm, activation, scale_shift)
        if mask is not None:
            a = a * mask.noise(a)
        y = convolve(a.to(dtype), conv.weight.to(dtype), conv_bias, *conv[2:])
        y = y if residual is None else y + residual
        norm.update(kernels, x, statistics, fixed)
        return y

    added_last = None
    if residual is not None and residual.dtype != dtype:
        y_dtype = torch.promote_types(dtype, residual.dtype)
        if y_dtype == torch.float64 != dtype:  # kernels do not mix float64 with other dtypes
            residual, added_last = None, residual
        else:
            residual, unit = residual.to(y_dtype), unit._replace(y_dtype=y_dtype)
    conv_weight = conv.weight
    if x.dim() == 3:
        conv = conv.of_image()
        unit = unit._replace(
            weight_shape=conv.weight.shape,
            conv=unit.conv._replace(
                stride=(1, *unit.conv.stride),
                padding=(0, *unit.conv.padding),
                dilation=(1, *unit.conv.dilation),
            ),
        )
    if conv_weight.dtype != dtype:
        pixels = x.numel() // x.shape[1]
        unit, conv_weight = with_served_weight(kernels, unit, conv_weight, pixels)
    dims, x = x.dim(), layout.dense(x)
    residual = None if residual is None else layout.dense(residual)
    bits, factor = (None, 1.0) if mask is None else mask
    statistics, fixed = norm.statistics(kernels, layout.as_image(x.detach()))
    parameters = norm.affine(x, x.shape[1])
    if has_scale_shift:
        parameters = scale_shift.of(*parameters)
    call = UnitCall(kernels, unit, norm.eps, norm.groups, fixed, dims, channels_last, factor)
    weights = (*parameters, conv_weight, conv_bias)
    y = NormActConvFunction.apply(call, x, *weights, residual, *statistics, bits)
    y = y if added_last is None else y + added_last
    norm.update(kernels, x, statistics, fixed)  # last: out of memory leaves the buffers unchanged
    return y


def plain_norm_act_conv(
    x: Tensor,
    norm: NormArguments,
    activation: Activation,
    conv: ConvArguments,
    residual: Tensor | None = None,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    dropout: float = 0.0,
    convolution: Callable[..., Tensor] | None = None,
) -> Tensor:
    """`norm_act_conv_of` in PyTorch's operators, which check the arguments."""
    a = plain_norm_act(x, norm, activation, scale_shift)
    if dropout:
        a = F.dropout(a, dropout, True)
    weight, bias, *numbers = conv
    bias = None if bias is None else bias.to(a.dtype)
    y = (convolution or convolve)(a, weight.to(a.dtype), bias, *numbers)
    return y if residual is None else y + residual


def group_norm_act_conv(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    activation: str | tuple[str, float] = "relu",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group norm, activation, dropout, convolution and residual add; saves only `x` for backward.

    Equals `conv(F.dropout(a, dropout)) [+ residual]` with the same random numbers, where
    `a = act(F.group_norm(x, num_groups, weight, bias, eps) * (1 + scale) + shift)` and `conv` is
    `F.conv1d`, `F.conv2d` or `F.conv3d`. Dropout also saves one bit per element.

    Args:
        x: `[N, C, ...]` of 3 to 5 dimensions, float32, float64, bfloat16 or float16; any strides.
        num_groups: groups of channels; each has its own statistics in each image.
        weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        conv_weight: `[K, C / groups, R]`, `[K, C / groups, R, S]` or `[K, C / groups, Q, R, S]`
            in the dtype of `x` or float32. Under autocast the convolution runs in the autocast
            dtype.
        conv_bias: `[K]` or None.
        stride: stride of the convolution, pixels.
        padding: zeros on each side, pixels, added after the activation; or `"same"`, `"valid"`.
        dilation: dilation of the convolution, pixels.
        groups: number of groups of the convolution.
        activation: as in `pk.group_norm_act`.
        scale: `[N, C]` or `[N, C, 1, ...]` in the dtype of `x` or float32; None for zeros.
        shift: as `scale`.
        dropout: probability of dropping an element of the activation.
        residual: shaped like the result, added to it.
        eps: added to the variance.

    Returns:
        `[N, K, ...]` in the dtype and memory format that PyTorch gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, `num_groups` does not divide the
            channels, the activation is unknown, `dropout` is outside of [0, 1], or there is one
            value per group.
        BackendError: the selected backend cannot serve `x`.
    """
    norm, function = GroupNorm(weight, bias, groups=num_groups, eps=eps), activation_of(activation)
    check_dropout(dropout)
    conv = ConvArguments(conv_weight, conv_bias, stride, padding, dilation, groups)
    rest = residual, scale_shift_of(scale, shift), float(dropout)
    if runs_plain(x, weight, bias, conv_weight, conv_bias, scale, shift, residual):
        return plain_norm_act_conv(x, norm, function, conv, *rest)
    return norm_act_conv_of(x, norm, function, conv, *rest)


def batch_norm_act_conv(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    activation: str | tuple[str, float] = "relu",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: Any = None,
) -> Tensor:
    """Batch norm, activation, dropout, convolution and residual add; saves only `x` for backward.

    Equals `conv(F.dropout(a, dropout, training)) [+ residual]` with the same random numbers, where
    `a = act(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps) *
    (1 + scale) + shift)` and `conv` is `F.conv1d`, `F.conv2d` or `F.conv3d`. Dropout also saves one
    bit per element.

    Args:
        x: `[N, C, ...]` of 3 to 5 dimensions, float32, float64, bfloat16 or float16; any strides.
        weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place in training mode; required in evaluation mode.
        running_var: `[C]`, unbiased; as `running_mean`.
        conv_weight: as in `pk.group_norm_act_conv`.
        conv_bias: `[K]` or None.
        stride: stride of the convolution, pixels.
        padding: zeros on each side, pixels, added after the activation; or `"same"`, `"valid"`.
        dilation: dilation of the convolution, pixels.
        groups: number of groups of the convolution.
        activation: as in `pk.group_norm_act`.
        scale: `[N, C]` or `[N, C, 1, ...]` in the dtype of `x` or float32; None for zeros.
        shift: as `scale`.
        dropout: probability of dropping an element of the activation, in training mode.
        residual: shaped like the result, added to it.
        training: normalise with the statistics of the batch, and apply dropout.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: the `torch.distributed` group that shares the statistics of the batch, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, K, ...]` in the dtype and memory format that PyTorch gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, the activation is unknown, `dropout` is
            outside of [0, 1], or there is one value per channel in training mode.
        BackendError: the selected backend cannot serve `x`.
    """
    running = (running_mean, running_var)
    norm = BatchNorm(weight, bias, *running, training, momentum, eps, process_group)
    function = activation_of(activation)
    check_dropout(dropout)
    conv = ConvArguments(conv_weight, conv_bias, stride, padding, dilation, groups)
    rest = residual, scale_shift_of(scale, shift), float(dropout) if training else 0.0
    tensors = weight, bias, *running, conv_weight, conv_bias, scale, shift, residual
    if runs_plain(x, *tensors):
        return plain_norm_act_conv(x, norm, function, conv, *rest)
    return norm_act_conv_of(x, norm, function, conv, *rest)
