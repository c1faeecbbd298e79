"""`bn_relu`: batch norm and ReLU that keep their input alone."""

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.reference.bn_stats import statistics_dtype
from preact_kernels.ops import checks, layout, schema
from preact_kernels.ops.bn_stats import (
    Statistics,
    follow_batch,
    statistics_of,
    sums_over_group,
)


class BNReLUFunction(torch.autograd.Function):
    """y = relu(bn(x)) for given statistics; x, mean and var are kept, never an activation."""

    @staticmethod
    def forward(ctx, x, bn_weight, bn_bias, mean, var, inv_count, eps, process_group):
        kernels = schema.kernels_for(x)
        ctx.kernels = kernels
        ctx.inv_count, ctx.eps, ctx.process_group = inv_count, eps, process_group
        ctx.save_for_backward(x, bn_weight, bn_bias, mean, var)
        return kernels.bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps)

    @staticmethod
    def backward(ctx, dy):
        x, bn_weight, bn_bias, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, dy, x, bn_weight, bn_bias, mean, var)
        dy = layout.nhwc(dy)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.inv_count or needs_weight or needs_bias:
            sums = ctx.kernels.bn_relu_backward_sums(dy, x, mean, var, bn_weight, bn_bias, ctx.eps)
        else:  # mean and variance are constants: dx has no use for the sums
            sums = torch.zeros_like(mean).expand(2, -1).contiguous()
        dx = None
        if needs_x:
            dx = ctx.kernels.bn_relu_backward_input(
                dy, x, mean, var, bn_weight, bn_bias, ctx.eps,
                sums_over_group(sums, ctx.process_group), ctx.inv_count,
            )  # fmt: skip
        return dx, sums[1], sums[0], None, None, None, None, None


def differentiable_bn_relu(
    x: Tensor,
    bn_weight: Tensor,
    bn_bias: Tensor,
    mean: Tensor,
    var: Tensor,
    training: bool,
    eps: float,
    process_group=None,
) -> Tensor:
    """The same in PyTorch's differentiable operations: what a double backward goes through."""
    if process_group is not None:
        raise NotImplementedError("double backward through a SyncBatchNorm is not supported")
    running = (None, None) if training else (mean, var)
    return F.relu(F.batch_norm(x, *running, bn_weight, bn_bias, training, 0.0, eps))


def _differentiable_backward(ctx, dy, x, bn_weight, bn_bias, mean, var):
    y = differentiable_bn_relu(
        x, bn_weight, bn_bias, mean, var, ctx.inv_count != 0, ctx.eps, ctx.process_group
    )
    grads = gradients(y, (x, bn_weight, bn_bias), ctx.needs_input_grad, dy)
    return *grads, None, None, None, None, None


def gradients(y: Tensor, inputs, needed, dy: Tensor) -> list[Tensor | None]:
    """Gradients of `y` for the `inputs` that are `needed`, themselves differentiable."""
    wanted = [t for t, n in zip(inputs, needed, strict=False) if n]
    if not wanted:
        return [None for _ in inputs]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True, allow_unused=True))
    return [next(found) if n else None for _, n in zip(inputs, needed, strict=False)]


def affine_parameters(
    x: Tensor, channels: int, bn_weight: Tensor | None, bn_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weight and bias in the statistics dtype: ones and zeros where there are none."""
    dtype = statistics_dtype(x.dtype)
    if bn_weight is None:
        bn_weight = torch.ones(channels, dtype=dtype, device=x.device)
    if bn_bias is None:
        bn_bias = torch.zeros(channels, dtype=dtype, device=x.device)
    return bn_weight.to(dtype).contiguous(), bn_bias.to(dtype).contiguous()


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
    """Batch norm and ReLU in one operation that keeps neither result for the backward.

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
        process_group: statistics are those of the batch spread over this `torch.distributed`
            group, as in `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, C, H, W]` in the dtype and memory format of `x`.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, or there is one value a channel in
            training mode.
        BackendError: the backend that was named cannot serve `x`.
    """
    checks.check_batch_norm(
        x, bn_weight, bn_bias, running_mean, running_var, training, momentum, eps, process_group
    )
    y, stats = normalise(
        x, bn_weight, bn_bias, running_mean, running_var, training, eps, process_group
    )
    follow_batch(stats, running_mean, running_var, momentum)
    return y


def normalise(
    x: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    process_group,
) -> tuple[Tensor, Statistics | None]:
    """`bn_relu` of checked arguments that leaves the running statistics alone.

    Returns:
        The result, and the statistics that normalised it; None for an empty batch of one's own.
    """
    weight, bias = affine_parameters(x, x.shape[1], bn_weight, bn_bias)
    if x.numel() == 0 and process_group is None:
        running = (None, None) if training else (running_mean, running_var)
        return F.relu(F.batch_norm(x, *running, weight, bias, training, 0.0, eps)), None
    channels_last = layout.is_channels_last(x)
    x = layout.nhwc(x)
    stats = statistics_of(
        schema.kernels_for(x), x.detach(), running_mean, running_var, training, process_group
    )
    y = BNReLUFunction.apply(x, weight, bias, *stats, eps, process_group)
    return layout.restored(y, channels_last), stats
