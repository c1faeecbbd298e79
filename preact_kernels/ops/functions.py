"""The public functions for units."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from preact_kernels.activations import RELU
from preact_kernels.norms import BatchNorm, GroupNorm
from preact_kernels.ops.activation import activation_of
from preact_kernels.ops.arguments import (
    ConvArguments,
    UnitArguments,
    scale_shift_of,
)
from preact_kernels.ops.dropout import check_dropout
from preact_kernels.ops.node import run_unit
from preact_kernels.ops.plain import plain_unit
from preact_kernels.ops.plain_operators import runs_plain


def _run(
    x: Tensor,
    given: UnitArguments,
    residual: Tensor | None = None,
    function: Callable[..., Tensor] | None = None,
    *,
    prefix: str = "",
    dims: int | None = None,
) -> Tensor:
    """`run_unit`, or `plain_unit` where PyTorch's operators must run."""
    if runs_plain(x, residual, *given.tensors()):
        return plain_unit(x, given, residual, function)
    return run_unit(x, given, residual, prefix=prefix, dims=dims)


def group_norm_act(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | tuple[str, float] = "relu",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group norm and activation in one operation that saves only `x` for backward.

    Equals `act(F.group_norm(x, num_groups, weight, bias, eps) * (1 + scale) + shift)`. With
    `num_groups` equal to the channels it is an instance norm, with 1 a layer norm of whole images.
    The result of an image does not depend on other images, bit for bit. Do not change `x` in place
    before the backward, also under autocast, where PyTorch saves a copy. Group norm: Wu and He,
    "Group Normalization" (arXiv 1803.08494).

    Args:
        x: `[N, C, ...]` of 2 to 5 dimensions, float32, float64, bfloat16 or float16; any strides.
        num_groups: groups of channels; each has its own statistics in each image.
        weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        activation: `"relu"`, `"leaky_relu"`, `"identity"`, `"relu6"`, `"silu"`, `"gelu"`,
            `"gelu_tanh"`, `"elu"`, `"hardswish"`, `"mish"`, `"softplus"`, `"sigmoid"`, `"tanh"`
            or `"softsign"`; or a tuple of the name and its parameter: the slope of leaky_relu,
            alpha of elu, beta of softplus.
        scale: `[N, C]` or `[N, C, 1, ...]` in the dtype of `x` or float32; None for zeros.
        shift: as `scale`.
        eps: added to the variance.

    Returns:
        The shape of `x`, in the dtype and memory format that PyTorch gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, `num_groups` does not divide the
            channels, the activation is unknown, or there is one value per group.
        BackendError: the selected backend cannot serve `x`.
    """
    norm = GroupNorm(weight, bias, groups=num_groups, eps=eps)
    scale_shift = scale_shift_of(scale, shift)
    return _run(x, UnitArguments(norm, activation_of(activation), None, scale_shift))


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    activation: str | tuple[str, float] = "relu",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: Any = None,
) -> Tensor:
    """Batch norm and activation in one operation that saves only `x` for backward.

    Equals `act(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps) *
    (1 + scale) + shift)`.

    Args:
        x: `[N, C, ...]` of 2 to 5 dimensions, float32, float64, bfloat16 or float16; any strides.
        weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place in training mode; required in evaluation mode.
        running_var: `[C]`, unbiased; as `running_mean`.
        activation: as in `pk.group_norm_act`.
        scale: `[N, C]` or `[N, C, 1, ...]` in the dtype of `x` or float32; None for zeros.
        shift: as `scale`.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: the `torch.distributed` group that shares the statistics of the batch, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        The shape of `x`, in the dtype and memory format that PyTorch gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, the activation is unknown, or there is
            one value per channel in training mode.
        BackendError: the selected backend cannot serve `x`.
    """
    running = (running_mean, running_var)
    norm = BatchNorm(weight, bias, *running, training, momentum, eps, process_group)
    scale_shift = scale_shift_of(scale, shift)
    return _run(x, UnitArguments(norm, activation_of(activation), None, scale_shift))


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
    scale_shift = scale_shift_of(scale, shift)
    return _run(x, UnitArguments(norm, function, conv, scale_shift, float(dropout)), residual)


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
    dropout = float(dropout) if training else 0.0
    given = UnitArguments(norm, function, conv, scale_shift_of(scale, shift), dropout)
    return _run(x, given, residual)


def bn_relu(
    x: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: Any = None,
) -> Tensor:
    """Batch norm and ReLU in one operation that saves only `x` for backward.

    Equals `F.relu(F.batch_norm(x, running_mean, running_var, bn_weight, bn_bias, training,
    momentum, eps))`.

    Args:
        x: `[N, C, H, W]`, float32, float64, bfloat16 or float16; any strides.
        bn_weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bn_bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place in training mode; required in evaluation mode.
        running_var: `[C]`, unbiased; as `running_mean`.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: the `torch.distributed` group that shares the statistics of the batch, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, C, H, W]` in the dtype and memory format of `x`.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, or there is one value per channel in
            training mode.
        BackendError: the selected backend cannot serve `x`.
    """
    running = (running_mean, running_var)
    bn = BatchNorm(bn_weight, bn_bias, *running, training, momentum, eps, process_group)
    return _run(x, UnitArguments(bn), prefix="bn_", dims=4)


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
    process_group: Any = None,
) -> Tensor:
    """Batch norm, ReLU, convolution and residual add; saves only `x` for backward.

    Equals `F.conv2d(F.relu(F.batch_norm(x, running_mean, running_var, bn_weight, bn_bias,
    training, momentum, eps)), conv_weight, conv_bias, stride, padding, dilation, groups)
    [+ residual]`. The unit is from He et al., "Identity Mappings in Deep Residual Networks"
    (arXiv 1603.05027).

    Args:
        x: `[N, C, H, W]`, float32, float64, bfloat16 or float16; any strides.
        conv_weight: `[K, C / groups, R, S]` in the dtype of `x` or float32. Under autocast the
            convolution runs in the autocast dtype.
        bn_weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bn_bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place in training mode; required in evaluation mode.
        running_var: `[C]`, unbiased; as `running_mean`.
        conv_bias: `[K]` or None.
        stride: stride of the convolution, pixels.
        padding: zeros on each side, pixels, added after the activation; or `"same"`, `"valid"`.
        dilation: dilation of the convolution, pixels.
        groups: number of groups of the convolution.
        residual: `[N, K, H', W']`, added to the result.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: the `torch.distributed` group that shares the statistics of the batch, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, K, H', W']` in the dtype of `x` and the memory format that `F.conv2d` gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match, or there is one value per channel in
            training mode.
        BackendError: the selected backend cannot serve `x`.
    """
    running = (running_mean, running_var)
    bn = BatchNorm(bn_weight, bn_bias, *running, training, momentum, eps, process_group)
    conv = ConvArguments(conv_weight, conv_bias, stride, padding, dilation, groups)
    return _run(x, UnitArguments(bn, RELU, conv), residual, F.conv2d, prefix="bn_", dims=4)
