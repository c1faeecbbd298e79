"""Gradients in PyTorch's differentiable operations, for a backward that is differentiated again."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import Norm


def differentiable_bn_relu(x: Tensor, norm: Norm, training: bool, process_group) -> Tensor:
    """relu(bn(x)) in PyTorch's differentiable operations."""
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
            if not v.requires_grad:  # the tensor was frozen after the forward
                v.requires_grad_()
        y = forward(*views)
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=is_recorded, allow_unused=True))
    return [next(found) if n else None for n in needed]
