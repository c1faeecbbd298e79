"""Update of running statistics in PyTorch's operations."""

import torch
from torch import Tensor

from preact_kernels import torch_compat


def running_stats_update(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """`running = (1 - momentum) * running + momentum * batch`, in place, in float64."""
    for r, b in zip(running, batch, strict=True):
        r.copy_((1 - momentum) * r.double() + momentum * b.double())


def fast_running_stats_update(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """`running_stats_update`, in two float32 launches if all vectors are float32 on a GPU."""
    if all(r.is_cuda and r.dtype == torch.float32 for r in running):
        torch_compat.foreach_mul_(running, 1 - momentum)
        torch_compat.foreach_add_(running, batch, alpha=momentum)
    else:
        running_stats_update(running, batch, momentum)
