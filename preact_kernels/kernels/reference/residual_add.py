"""The residual addition."""

from torch import Tensor

from preact_kernels.kernels.reference.bn_stats import optional_stats


def residual_add_forward(
    x: Tensor, branch: Tensor, with_stats: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x + branch, and the mean and biased variance of y (empty without `with_stats`)."""
    y = x + branch
    return y, *optional_stats(y, with_stats)
