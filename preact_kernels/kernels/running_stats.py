"""Update of running statistics in PyTorch's operations."""

import itertools
from collections.abc import Sequence

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


def scaled(vectors: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
    """Vectors of one dtype times a factor for each; a vector itself if its factor is 1."""
    found = list(vectors)
    indices = [index for index, factor in enumerate(factors) if factor != 1]
    if not indices:
        return found
    if len(indices) == 1:
        found[indices[0]] = vectors[indices[0]] * factors[indices[0]]
        return found
    if torch.compiler.is_compiling() or not vectors[0].is_cpu:
        some = [vectors[index] for index in indices]
        products = torch_compat.foreach_mul(some, [factors[index] for index in indices])
    else:  # on a CPU, `foreach_mul` calls `mul` for each tensor
        products = ()
        for factor, group in itertools.groupby(indices, factors.__getitem__):
            equal = [vectors[index] for index in group]
            products += torch.cat(equal).mul_(factor).split([t.numel() for t in equal])
    for index, product in zip(indices, products, strict=True):
        found[index] = product
    return found


def is_one_norm(
    running: Sequence[Tensor], batch: Sequence[Tensor], counts: Sequence[Tensor]
) -> bool:
    """Whether kernels for one norm may update its buffers: contiguous, on one device.

    PyTorch's operators raise for buffers that were made in inference mode.
    """
    if len(running) != 2 or len(counts) > 1:
        return False
    device = batch[0].device
    for t in (*running, *batch):
        if t.dtype != torch.float32 or not t.is_contiguous() or t.is_neg() or t.device != device:
            return False
    if any([t.is_inference() for t in (*running, *counts)]):
        return False
    return not counts or (counts[0].dtype == torch.int64 and counts[0].device == device)
