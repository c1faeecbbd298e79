"""The arguments of one batch norm, and what each call derives from them."""

from collections.abc import Sequence
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
    running_mean: Tensor | None  # [C]; read in evaluation mode, updated in training mode
    running_var: Tensor | None  # [C], unbiased; likewise
    training: bool  # normalise with the statistics of the batch
    momentum: float | None  # None: the cumulative average, which needs `batch_count`
    eps: float
    process_group: object = None
    batch_count: Tensor | None = None  # `num_batches_tracked`, incremented in training mode
    is_widened: bool = False  # the running statistics may have a half precision beside float32

    def check(self, x: Any) -> None:
        """Raises the errors that `pk.bn_relu` documents."""
        checks.check_activation("x", x)
        if not isinstance(self.training, bool):
            raise TypeError(f"training: expected a bool, got {type(self.training).__name__}")
        self.check_numbers()
        for name, value in (
            ("bn_weight", self.weight),
            ("bn_bias", self.bias),
            ("running_mean", self.running_mean),
            ("running_var", self.running_var),
        ):
            if value is not None:
                is_widened = self.is_widened and name.startswith("running")
                checks.check_per_channel(name, value, x, has_any_dtype=is_widened)
        if (self.running_mean is None) != (self.running_var is None):
            missing = "running_mean" if self.running_mean is None else "running_var"
            raise ValueError(
                f"{missing}: expected a tensor beside the other running statistic, got None"
            )
        if not self.training and self.running_mean is None:
            raise ValueError("running_mean: expected a tensor in evaluation mode, got None")
        self.check_training(x.shape)

    def check_numbers(self) -> None:
        """Raises where momentum or eps is none that `pk.bn_relu` takes."""
        eps, momentum = self.eps, self.momentum
        if type(eps) is type(momentum) is float and eps >= 0 and momentum == momentum:
            return  # at once: this runs for every unit at every call
        if momentum is None and self.batch_count is None:
            checks.check_number("momentum", momentum)
        checks.check_norm_numbers(eps, momentum)

    def check_training(self, shape: Sequence[int]) -> None:
        """Raises where no statistics of a batch of `shape` can normalise it, as in eager."""
        if self.training and self.eps == 0:
            raise ValueError("eps: expected a positive number when training, got 0")
        if self.training and self.process_group is None:
            checks.check_samples(shape)

    def tracked(self) -> RunningStatistics | None:
        """The buffers that the call updates."""
        if not self.training or (self.running_mean is None and self.batch_count is None):
            return None
        return RunningStatistics(
            self.running_mean, self.running_var, self.momentum, self.batch_count
        )

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
        assert self.running_mean is not None and self.running_var is not None  # by `check`
        return running_statistics(x, self.running_mean, self.running_var)

    def update(self, kernels: Kernels, statistics: Statistics | None) -> None:
        """Updates the tracked buffers after a call that used `statistics`; None: an empty batch."""
        tracked = self.tracked()
        if tracked is not None:
            batch = running_stats.unbiased([statistics]) if statistics else [None]
            running_stats.update(kernels, [tracked], batch)
