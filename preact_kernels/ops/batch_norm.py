"""The arguments of one batch norm, and what each call derives from them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Kernels, statistics_dtype
from preact_kernels.ops import checks, running_stats
from preact_kernels.ops.bn_stats import Statistics, batch_statistics, running_statistics
from preact_kernels.ops.running_stats import RunningStatistics


class BatchNorm(NamedTuple):
    """The arguments of one batch norm."""

    weight: Tensor | None  # [C]; None: ones
    bias: Tensor | None  # [C]; None: zeros
    mean: Tensor | None  # [C], running; read in evaluation mode
    var: Tensor | None  # [C], running, unbiased; read in evaluation mode
    training: bool  # normalise with the statistics of the batch
    eps: float
    process_group: object = None
    tracked: RunningStatistics | None = None  # buffers to update

    def check(self, x: Any) -> None:
        """Raises the errors that `pk.bn_relu` documents."""
        checks.check_activation("x", x)
        if not isinstance(self.training, bool):
            raise TypeError(f"training: expected a bool, got {type(self.training).__name__}")
        checks.check_number("eps", self.eps, minimum=0)
        if self.training and self.eps == 0:
            raise ValueError("eps: expected a positive number when training, got 0")
        for name, value in (
            ("bn_weight", self.weight),
            ("bn_bias", self.bias),
            ("running_mean", self.mean),
            ("running_var", self.var),
        ):
            if value is not None:
                checks.check_per_channel(name, value, x)
        if (self.mean is None) != (self.var is None):
            missing = "running_mean" if self.mean is None else "running_var"
            raise ValueError(
                f"{missing}: expected a tensor beside the other running statistic, got None"
            )
        if not self.training and self.mean is None:
            raise ValueError("running_mean: expected a tensor in evaluation mode, got None")
        if self.training and self.process_group is None:
            checks.check_samples(x.shape)

    def tracking(self, momentum: float) -> "BatchNorm":
        """The same, updating the running statistics that it was given."""
        if self.mean is None or self.var is None:
            return self
        return self._replace(tracked=RunningStatistics(self.mean, self.var, momentum))

    def affine(self, x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        """Weight and bias in the statistics dtype of `x`."""
        dtype = statistics_dtype(x.dtype)
        weight, bias = self.weight, self.bias
        if weight is None:
            weight = torch.ones(channels, dtype=dtype, device=x.device)
        if bias is None:
            bias = torch.zeros(channels, dtype=dtype, device=x.device)
        return weight.to(dtype).contiguous(), bias.to(dtype).contiguous()

    def statistics(self, kernels: Kernels, x: Tensor) -> Statistics:
        """What normalises `x`, dense NHWC."""
        if self.training:
            return batch_statistics(kernels, x, self.process_group)
        assert self.mean is not None and self.var is not None  # checked with the arguments
        return running_statistics(x, self.mean, self.var)

    def update(self, kernels: Kernels, statistics: Statistics | None) -> None:
        """Updates the tracked buffers after a call that used `statistics`; None: an empty batch."""
        if not self.training or self.tracked is None:
            return
        batch = running_stats.unbiased([statistics]) if statistics else [None]
        running_stats.update(kernels, [self.tracked], batch)
