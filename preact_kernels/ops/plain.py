"""Units in PyTorch's operators: `chain` is their one form.

It serves transforms, tracers and exporters, modules that must be called, second derivatives, and
convolutions that have no `Unit`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from preact_kernels.activations import activate
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import Norm, Unit
from preact_kernels.kernels.dropout import Mask
from preact_kernels.ops.arguments import (
    NO_SCALE_SHIFT,
    ConvArguments,
    ScaleShift,
    UnitArguments,
    add_residual,
    convolve,
)
from preact_kernels.torch_compat import is_transformed

fx.wrap("add_residual")  # `residual` may be None when a symbolic trace runs
fx.wrap("convolve")  # branches on the dimensions of the weight, unknown in a symbolic trace

Part = Callable[[Tensor], Tensor]


def chain(
    x: Tensor,
    norm: Part,
    activation: Part,
    convolution: Part | None = None,
    *,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    dropout: Part | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`convolution(dropout(activation(norm(x) * (1 + scale) + shift))) [+ residual]`."""
    a = activation(scale_shift.plain(norm(x)))
    if dropout is not None:
        a = dropout(a)
    if convolution is None:
        return a
    y = convolution(a)
    return y if residual is None else add_residual(y, residual)


def plain_unit(
    x: Tensor,
    given: UnitArguments,
    residual: Tensor | None = None,
    function: Callable[..., Tensor] | None = None,
) -> Tensor:
    """A unit; PyTorch's operators check the arguments. `function` replaces `convolve`."""
    norm, activation, conv, scale_shift, dropout, _ = given

    def convolution(a: Tensor) -> Tensor:
        weight, bias, *numbers = cast(ConvArguments, conv)
        bias = None if bias is None else bias.to(a.dtype)
        return (function or convolve)(a, weight.to(a.dtype), bias, *numbers)

    return chain(
        x,
        norm.plain,
        partial(activate, activation=activation),
        None if conv is None else convolution,
        scale_shift=scale_shift,
        dropout=partial(F.dropout, p=dropout) if dropout else None,
        residual=residual,
    )


def differentiable_unit(
    unit: Unit,
    x: Tensor,
    norm: Norm,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """A unit of a backend, differentiable twice.

    Args:
        unit: the unit.
        x: `[N, C, ...]` of 4 or 5 dimensions.
        norm: weight and bias; the statistics are read in evaluation mode.
        conv_weight: in any dtype; None without a convolution.
        conv_bias: `[K]`.
        mask: mask of dropout.
    """

    def convolution(a: Tensor) -> Tensor:
        a = a.to(unit.dtype)
        bias = None if conv_bias is None else conv_bias.to(a.dtype)
        return convolve(a, cast(Tensor, conv_weight).to(a.dtype), bias, *unit.conv)

    return chain(
        layout.as_torch_nhwc(x),
        partial(_normalised, unit=unit, norm=norm),
        lambda h: activate(h.to(x.dtype), unit.activation),
        None if conv_weight is None else convolution,
        dropout=None if mask is None else lambda a: a * mask.noise(x),
    )


def _normalised(x: Tensor, unit: Unit, norm: Norm) -> Tensor:
    if unit.process_group is not None:
        raise NotImplementedError("double backward through a SyncBatchNorm is not supported")
    weight, bias, groups = norm.weight, norm.bias, unit.norm_groups
    mean, var = (None, None) if unit.uses_batch else (norm.mean, norm.var)
    # Some transforms refuse a batch norm in half precision with float32 parameters.
    if groups is not None or is_transformed():
        x = x.to(norm.mean.dtype)
    if groups is None and not norm.has_rows:
        return F.batch_norm(x, mean, var, weight, bias, unit.uses_batch, 0.0, norm.eps)
    if groups is None:
        h = F.batch_norm(x, mean, var, None, None, unit.uses_batch, 0.0, norm.eps)
    else:
        h = _group_norm(x, groups, norm.eps)
    rows = -1, x.shape[1], *[1] * (x.dim() - 2)
    scale, shift = weight.view(rows), cast(Tensor, bias).view(rows)
    return h * scale + shift


def _group_norm(x: Tensor, groups: int, eps: float) -> Tensor:
    """`F.group_norm` without affine parameters.

    PyTorch's own cannot differentiate a batch of gradients for an NHWC `x`.
    """
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    var = centred.square().mean(2, keepdim=True)
    return (centred * torch.rsqrt(var + eps)).reshape(x.shape)


def gradients(
    forward: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed, dy: Tensor
) -> list[Tensor | None]:
    """Gradients of `forward(*inputs)` for the `needed` inputs; differentiable in grad mode."""
    if not any(needed):
        return [None for _ in inputs]
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since a tensor may occur several times. `view_as` may change strides if N is 1.
        views = [None if t is None else torch.ops.aten.alias(t) for t in inputs]
        wanted = [cast(Tensor, v) for v, n in zip(views, needed, strict=True) if n]
        for v in wanted:
            if not v.requires_grad:  # frozen after the forward
                v.requires_grad_()
        y = forward(*views)
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=is_recorded, allow_unused=True))
    return [next(found) if n else None for n in needed]
