"""Gradients in PyTorch's differentiable operations, for double backward."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.activations import Activation, activate
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import Norm
from preact_kernels.torch_compat import is_transformed


def differentiable_norm_act(
    x: Tensor, norm: Norm, groups: int | None, training: bool, process_group
) -> Tensor:
    """act(norm(x)) in PyTorch's differentiable operations.

    Args:
        x: `[N, C, ...]`.
        norm: parameters, and statistics for evaluation mode.
        groups: groups of channels per image; None: statistics per channel.
        training: normalise with the statistics of the input.
        process_group: must be None.
    """
    if process_group is not None:
        raise NotImplementedError("double backward through a SyncBatchNorm is not supported")
    x = layout.as_torch_nhwc(x)
    weight, bias, eps = norm.weight, norm.bias, norm.eps
    mean, var = (None, None) if training else (norm.mean, norm.var)
    # Some transforms refuse a batch norm in half precision with float32 parameters.
    wide = x.to(norm.mean.dtype) if groups is not None or is_transformed() else x
    if groups is None and not norm.has_rows:
        h = F.batch_norm(wide, mean, var, weight, bias, training, 0.0, eps)
    else:
        if groups is None:
            h = F.batch_norm(wide, mean, var, None, None, training, 0.0, eps)
        else:
            h = _group_norm(wide, groups, eps)
        rows = -1, x.shape[1], *[1] * (x.dim() - 2)
        scale, shift = (t.view(rows) for t in cast(list[Tensor], (weight, bias)))
        h = h * scale + shift
    return activate(h.to(x.dtype), Activation(norm.activation, norm.parameter))


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
