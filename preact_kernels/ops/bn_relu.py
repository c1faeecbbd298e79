"""`bn_relu`: batch norm and ReLU; saves only the input for backward."""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import AffineStep, Gradient, Kernels, Norm, Statistics
from preact_kernels.ops import dispatch, layout
from preact_kernels.ops.batch_norm import BatchNorm, inv_count_of, sums_over_group
from preact_kernels.ops.double_backward import differentiable_bn_relu, gradients
from preact_kernels.ops.plain_operators import (
    has_mixed_dtypes,
    is_transformed,
    runs_plain,
    runs_plain_backward,
)


class BNReLUCall(NamedTuple):
    """Arguments of the autograd function that are no tensors."""

    kernels: Kernels
    eps: float
    training: bool  # normalise with the statistics of the batch
    process_group: object
    fixed_inv_count: float | None  # see `inv_count_of`


class BNReLUFunction(torch.autograd.Function):
    """y = relu(bn(x)) for given statistics."""

    @staticmethod
    def forward(ctx, call, x, bn_weight, bn_bias, mean, var):
        ctx.call = call
        ctx.save_for_backward(x, bn_weight, bn_bias, mean, var)
        return call.kernels.bn_relu_forward(x, Norm(mean, var, bn_weight, bn_bias, call.eps))

    @staticmethod
    def backward(ctx, dy):
        x, bn_weight, bn_bias, mean, var = ctx.saved_tensors
        kernels, eps, training, process_group, fixed_inv_count = ctx.call
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        norm = Norm(mean, var, bn_weight, bn_bias, eps)
        if runs_plain_backward(dy):

            def forward(x, bn_weight, bn_bias):
                norm = Norm(mean, var, bn_weight, bn_bias, eps)
                return differentiable_bn_relu(x, norm, training, process_group)

            grads = gradients(forward, (x, bn_weight, bn_bias), ctx.needs_input_grad[1:4], dy)
            return None, *grads, None, None
        dy = layout.nhwc(dy)
        if training or needs_weight or needs_bias:
            _, sums = kernels.bn_relu_backward(dy, x, norm, False)
        else:  # mean and variance are constants: dx does not need the sums
            sums = torch.zeros_like(mean).expand(2, -1).contiguous()
        dx = None
        if needs_x:
            shared = sums_over_group(sums, process_group)
            step = AffineStep(None, x, norm, shared, inv_count_of(x, fixed_inv_count))
            dx = kernels.bn_input_gradient(Gradient(dy, step), True)
        return None, dx, sums[1], sums[0], None, None


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
    process_group=None,
) -> Tensor:
    """Batch norm and ReLU in one operation that saves only `x` for backward.

    Equals `F.relu(F.batch_norm(x, running_mean, running_var, bn_weight, bn_bias, training,
    momentum, eps))`.

    Args:
        x: `[N, C, H, W]`, float32, float64, bfloat16 or float16; any strides.
        bn_weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bn_bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place once in training mode; needed in evaluation mode.
        running_var: `[C]`, unbiased, likewise.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: a `torch.distributed` group over which the batch is spread, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, C, H, W]` in the dtype and memory format of `x`.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, or there is one value per channel in
            training mode.
        BackendError: the backend that was named cannot serve `x`.
    """
    running = (running_mean, running_var)
    bn = BatchNorm(bn_weight, bn_bias, *running, training, momentum, eps, process_group)
    if runs_plain(x, bn_weight, bn_bias, *running):
        return plain_bn_relu(x, bn)
    return bn_relu_of(x, bn)


def plain_bn_relu(x: Tensor, bn: BatchNorm) -> Tensor:
    """`bn_relu` in PyTorch's own operators, which check the arguments."""
    if bn.process_group is not None and bn.training:
        raise NotImplementedError(
            "process_group: expected None when training under a tracer or a transform"
        )
    running = (bn.running_mean, bn.running_var)
    momentum = cast(float, bn.momentum)
    affine = (bn.weight, bn.bias)
    if is_transformed() and has_mixed_dtypes(x, *running, *affine):
        weight, bias = (None if t is None else t.float() for t in affine)
        y = F.batch_norm(x.float(), *running, weight, bias, bn.training, momentum, bn.eps)
        return F.relu(y.to(x.dtype))
    return F.relu(F.batch_norm(x, *running, *affine, bn.training, momentum, bn.eps))


def bn_relu_of(x: Tensor, bn: BatchNorm) -> Tensor:
    """`bn_relu` for a `BatchNorm`."""
    bn.check(x)
    kernels = dispatch.kernels_for(x)
    y, statistics, fixed = normalise(kernels, x, bn)
    bn.update(kernels, x, statistics, fixed)
    return y


def normalise(
    kernels: Kernels, x: Tensor, bn: BatchNorm
) -> tuple[Tensor, Statistics | None, float | None]:
    """relu(bn(x)) for checked arguments, without the update of running statistics.

    Returns:
        The result, and what `BatchNorm.statistics` returned; no statistics for an empty batch.
    """
    weight, bias = bn.affine(x, x.shape[1])
    if x.numel() == 0 and bn.process_group is None:
        mean, var = (None, None) if bn.training else (bn.running_mean, bn.running_var)
        y = F.batch_norm(x, mean, var, weight, bias, bn.training, 0.0, bn.eps)
        return F.relu(y), None, None
    channels_last = layout.is_channels_last(x)
    x = layout.nhwc(x)
    statistics, fixed = bn.statistics(kernels, x.detach())
    call = BNReLUCall(kernels, bn.eps, bn.training, bn.process_group, fixed)
    y = BNReLUFunction.apply(call, x, weight, bias, *statistics)
    return layout.restored(y, channels_last), statistics, fixed
