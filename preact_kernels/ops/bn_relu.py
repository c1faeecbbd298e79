"""`bn_relu`: batch norm and ReLU; saves only the input for backward."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import Conv, Kernels, Norm
from preact_kernels.ops import dispatch, layout
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.bn_stats import Statistics, inv_count_of, sums_over_group
from preact_kernels.ops.plain_operators import (
    has_mixed_dtypes,
    is_transformed,
    runs_plain,
    runs_plain_backward,
)


class UnitCall(NamedTuple):
    """What a call passes to its autograd function beside tensors."""

    kernels: Kernels
    eps: float
    training: bool  # the statistics are those of the batch
    fixed_inv_count: float | None  # see `Statistics`
    process_group: object = None
    conv: Conv | None = None

    def inv_count(self, x: Tensor) -> float:
        """One over the samples per channel of `x`, or of its group; 0 in evaluation mode."""
        return inv_count_of(x) if self.fixed_inv_count is None else self.fixed_inv_count


def unit_call(
    kernels: Kernels, bn: BatchNorm, statistics: Statistics, conv: Conv | None = None
) -> UnitCall:
    """The `UnitCall` for a batch norm and the statistics that it uses."""
    fixed_inv_count = statistics.fixed_inv_count(bn.training, bn.process_group)
    return UnitCall(kernels, bn.eps, bn.training, fixed_inv_count, bn.process_group, conv)


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
        unit, kernels = ctx.unit, ctx.unit.kernels
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        norm = Norm(mean, var, bn_weight, bn_bias, unit.eps)
        if runs_plain_backward(dy):

            def forward(x, bn_weight, bn_bias):
                norm = Norm(mean, var, bn_weight, bn_bias, unit.eps)
                return differentiable_bn_relu(x, norm, unit.training, unit.process_group)

            grads = gradients(forward, (x, bn_weight, bn_bias), ctx.needs_input_grad[1:4], dy)
            return None, *grads, None, None
        dy = layout.nhwc(dy)
        if unit.training or needs_weight or needs_bias:
            sums = kernels.bn_relu_backward_sums(dy, x, norm)
        else:  # mean and variance are constants: dx does not need the sums
            sums = torch.zeros_like(mean).expand(2, -1).contiguous()
        dx = None
        if needs_x:
            shared = sums_over_group(sums, unit.process_group)
            dx = kernels.bn_relu_backward_input(dy, x, norm, shared, unit.inv_count(x))
        return None, dx, sums[1], sums[0], None, None


def differentiable_bn_relu(x: Tensor, norm: Norm, training: bool, process_group) -> Tensor:
    """relu(bn(x)) in PyTorch's differentiable operations, for a double backward."""
    if process_group is not None:
        raise NotImplementedError("double backward through a SyncBatchNorm is not supported")
    mean, var = (None, None) if training else (norm.mean, norm.var)
    return F.relu(F.batch_norm(x, mean, var, norm.weight, norm.bias, training, 0.0, norm.eps))


def gradients(
    forward: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed, dy: Tensor
) -> list[Tensor | None]:
    """Gradients of `forward(*inputs)` for the inputs that are `needed`.

    They are themselves differentiable where gradients are recorded.
    """
    if not any(needed):
        return [None for _ in inputs]
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, as one tensor may have several places.
        views = [None if t is None else t.view_as(t) for t in inputs]
        wanted = [cast(Tensor, v) for v, n in zip(views, needed, strict=True) if n]
        for v in wanted:
            if not v.requires_grad:  # any more
                v.requires_grad_()
        y = forward(*views)
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=is_recorded, allow_unused=True))
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
    statistics = bn.statistics(kernels, x.detach())
    unit = unit_call(kernels, bn, statistics)
    y = BNReLUFunction.apply(unit, x, weight, bias, statistics.mean, statistics.var)
    return layout.restored(y, channels_last), statistics
