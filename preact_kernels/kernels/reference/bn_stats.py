"""Mean and biased variance, per channel or per image and group of channels."""

from torch import Tensor

from preact_kernels.kernels.contract import Statistics, statistics_dtype


def bn_stats(x: Tensor) -> Statistics:
    """See `Kernels.bn_stats`."""
    x = x.to(statistics_dtype(x.dtype))
    mean = x.mean((0, 2, 3))
    return Statistics(mean, (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3)))


def group_stats(x: Tensor, groups: int, bias: Tensor | None = None) -> Statistics:
    """See `Kernels.group_stats`."""
    n, channels = x.shape[:2]
    if bias is not None:
        mean, var = group_stats(x.to(bias.dtype) + bias.view(-1, 1, 1), groups)
        return Statistics(mean - bias, var)
    # Contiguous, so that the order of a sum does not depend on the strides of x.
    grouped = x.to(statistics_dtype(x.dtype)).contiguous().view(n, groups, -1)
    mean = grouped.mean(2, keepdim=True)
    mean = mean + (grouped - mean).mean(2, keepdim=True)  # exact for a constant group
    var = (grouped - mean).square().mean(2, keepdim=True)
    size = (n, groups, channels // groups)
    return Statistics(*(t.expand(size).reshape(n, channels) for t in (mean, var)))
