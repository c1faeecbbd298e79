"""Mean and biased variance per channel."""

from torch import Tensor

from preact_kernels.kernels.contract import Statistics, statistics_dtype


def bn_stats(x: Tensor) -> Statistics:
    """`mean = sum(x) / m`, `var = sum((x - mean)^2) / m` over the `m = N*H*W` samples."""
    x = x.to(statistics_dtype(x.dtype))
    mean = x.mean((0, 2, 3))
    return Statistics(mean, (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3)))
