"""Mean and biased variance a channel."""

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of means, variances and sums beside activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bn_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """mean = sum(x)/m, var = sum((x - mean)^2)/m over the m = N*H*W samples of a channel."""
    x = x.to(statistics_dtype(x.dtype))
    mean = x.mean((0, 2, 3))
    return mean, (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3))


def running_stats_update(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """running = (1 - momentum) * running + momentum * batch, in place, for many at once."""
    for r, b in zip(running, batch, strict=True):
        r.copy_((1 - momentum) * r.double() + momentum * b.double())


def optional_stats(y: Tensor, with_stats: bool) -> tuple[Tensor, Tensor]:
    """Statistics of `y` as stored, or two empty tensors."""
    if with_stats:
        return bn_stats(y)
    dtype = statistics_dtype(y.dtype)
    return y.new_empty(0, dtype=dtype), y.new_empty(0, dtype=dtype)
