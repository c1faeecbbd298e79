"""Mean and biased variance, per channel or per image and group of channels."""

from torch import Tensor

from preact_kernels.kernels.contract import Statistics, statistics_dtype


def bn_stats(x: Tensor) -> Statistics:
    """`mean = sum(x) / m`, `var = sum((x - mean)^2) / m` over the `m = N*H*W` samples."""
    x = x.to(statistics_dtype(x.dtype))
    mean = x.mean((0, 2, 3))
    return Statistics(mean, (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3)))


def group_stats(x: Tensor, groups: int) -> Statistics:
    """Mean and variance of each image and group of `C / groups` channels, `[N, C]` each."""
    n, channels = x.shape[:2]
    # Contiguous, or the order of a sum depends on whether this copies.
    grouped = x.to(statistics_dtype(x.dtype)).contiguous().view(n, groups, -1)
    mean = grouped.mean(2, keepdim=True)
    mean = mean + (grouped - mean).mean(2, keepdim=True)  # exact for a constant group
    var = (grouped - mean).square().mean(2, keepdim=True)
    size = (n, groups, channels // groups)
    return Statistics(*(t.expand(size).reshape(n, channels) for t in (mean, var)))
