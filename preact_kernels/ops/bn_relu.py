"""`bn_relu`: batch norm and ReLU; saves only the input for backward."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import Conv, Kernels, Norm
from preact_kernels.ops import dispatch, layout
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.bn_stats import Statistics, sums_over_group


class UnitCall(NamedTuple):
    """What a call passes to its autograd function beside tensors."""

    kernels: Kernels
    eps: float
    inv_count: float
    process_group: object = None
    conv: Conv | None = None


class BNReLUFunction(torch.autograd.Function):
    """y = relu(bn(x)) for given statistics."""

    @staticmethod
    def forward(ctx, unit, x, bn_weight, bn_bias, mean, var):
        ctx.unit = unit
        ctx.save_for_backward(x, bn_weight, bn_bias, mean, var)
        return unit.kernels.bn_relu_forward(x, Norm(mean, var, bn_weight, bn_bias, unit.eps))

    @staticmethod
    def backward(ctx, dy):
        x, bn_weight, bn_bias, mean, var = ctx.saved_tensors
        kernels, inv_count, process_group = (
            ctx.unit.kernels,
            ctx.unit.inv_count,
            ctx.unit.process_group,
        )
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        norm = Norm(mean, var, bn_weight, bn_bias, ctx.unit.eps)
        if torch.is_grad_enabled():
            y = differentiable_bn_relu(x, norm, inv_count != 0, process_group)
            grads = gradients(y, (x, bn_weight, bn_bias), ctx.needs_input_grad[1:4], dy)
            return None, *grads, None, None
        dy = layout.nhwc(dy)
        if inv_count or needs_weight or needs_bias:
            sums = kernels.bn_relu_backward_sums(dy, x, norm)
        else:  # mean and variance are constants: dx does not need the sums
            sums = torch.zeros_like(mean).expand(2, -1).contiguous()
        dx = None
        if needs_x:
            shared = sums_over_group(sums, process_group)
            dx = kernels.bn_relu_backward_input(dy, x, norm, shared, inv_count)
        return None, dx, sums[1], sums[0], None, None


def differentiable_bn_relu(x: Tensor, norm: Norm, training: bool, process_group) -> Tensor:
    """relu(bn(x)) in PyTorch's differentiable operations, for a double backward."""
    if process_group is not None:
        raise NotImplementedError("double backward through a SyncBatchNorm is not supported")
    mean, var = (None, None) if training else (norm.mean, norm.var)
    return F.relu(F.batch_norm(x, mean, var, norm.weight, norm.bias, training, 0.0, norm.eps))


def gradients(y: Tensor, inputs, needed, dy: Tensor) -> list[Tensor | None]:
    """Gradients of `y` for the `inputs` that are `needed`, themselves differentiable."""
    wanted = [t for t, n in zip(inputs, needed, strict=True) if n]
    if not wanted:
        return [None for _ in inputs]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True, allow_unused=True))
    return [next(found) if n else None for n in needed]


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
    return bn_relu_of(x, bn)


def bn_relu_of(x: Tensor, bn: BatchNorm) -> Tensor:
    """`bn_relu` for a `BatchNorm`."""
    bn.check(x)
    kernels = dispatch.kernels_for(x)
    y, statistics = normalise(kernels, x, bn)
    bn.update(kernels, statistics)
    return y


def normalise(kernels: Kernels, x: Tensor, bn: BatchNorm) -> tuple[Tensor, Statistics | None]:
    """relu(bn(x)), without the update of running statistics.

    Returns:
        The result, and the statistics that normalised it; None for an empty batch.
    """
    weight, bias = bn.affine(x, x.shape[1])
    if x.numel() == 0 and bn.process_group is None:
        mean, var = (None, None) if bn.training else (bn.running_mean, bn.running_var)
        y = F.batch_norm(x, mean, var, weight, bias, bn.training, 0.0, bn.eps)
        return F.relu(y), None
    channels_last = layout.is_channels_last(x)
    x = layout.nhwc(x)
    mean, var, inv_count = statistics = bn.statistics(kernels, x.detach())
    unit = UnitCall(kernels, bn.eps, inv_count, bn.process_group)
    y = BNReLUFunction.apply(unit, x, weight, bias, mean, var)
    return layout.restored(y, channels_last), statistics
