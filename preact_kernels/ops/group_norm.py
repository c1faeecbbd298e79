"""Norms with statistics per image: group, instance and layer norm.

`BatchNorm` documents the methods.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import Kernels, Statistics, samples_of
from preact_kernels.ops import checks
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.batch_norm import (
    BatchNorm,
    affine,
    running_statistics,
    unbiased,
    upcast,
    update_running_statistics,
)
from preact_kernels.ops.plain_operators import (
    has_mixed_dtypes,
    is_transformed,
    needs_float32_group_norm,
)


class GroupNorm(NamedTuple):
    """The arguments of a group norm. With one group it is a layer norm of whole images."""

    groups: int
    weight: Tensor | None  # [C]; None: ones
    bias: Tensor | None  # [C]; None: zeros
    eps: float

    @property
    def process_group(self) -> None:
        return None

    @property
    def training(self) -> bool:
        """True: a group norm always uses the statistics of its input."""
        return True

    def check(self, x: Any, prefix: str = "") -> None:
        """Raises the errors that `pk.group_norm_act` documents."""
        checks.check_activation("x", x, None)
        checks.check_count("num_groups", self.groups)
        if x.shape[1] % self.groups:
            raise ValueError(
                f"num_groups: expected a divisor of the channels {x.shape[1]} of x, "
                f"got {self.groups}"
            )
        checks.check_number("eps", self.eps, minimum=0)
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                checks.check_per_channel(prefix + name, value, x)
        # PyTorch's layer norm accepts one value.
        is_single = samples_of(x.shape) * (x.shape[1] // self.groups) == 1
        if is_single and not isinstance(self, LayerNorm):
            raise ValueError(
                "x: expected more than 1 value per group, "
                f"got input size {list(x.shape)} and {self.groups} groups"
            )

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of PyTorch's result: autocast computes group norms in float32 on CUDA."""
        return torch.float32 if is_autocast(x) and x.is_cuda else x.dtype

    def is_channels_last(self, x: Tensor) -> bool:
        return not x.is_cuda and layout.is_channels_last(x)

    def affine(self, x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        return affine(x, self.weight, self.bias, channels)

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if needs_float32_group_norm(x, weight, bias):
            weight, bias = upcast(weight, bias)
            y = F.group_norm(x.float(), self.groups, weight, bias, self.eps)
            return y.to(self.result_dtype(x))
        return F.group_norm(x, self.groups, weight, bias, self.eps)

    def statistics(self, kernels: Kernels, x: Tensor) -> tuple[Statistics, float | None]:
        return kernels.group_stats(x, self.groups), None

    def update(
        self, kernels: Kernels, x: Tensor, statistics: Statistics | None, fixed: float | None
    ) -> None:
        """Does nothing: there are no running statistics."""


class LayerNorm(GroupNorm):
    """The arguments of a layer norm of whole images, without weight and bias."""

    __slots__ = ()

    def is_channels_last(self, x: Tensor) -> bool:
        return False

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, x.shape[1:], weight, bias, self.eps)


class InstanceNorm(NamedTuple):
    """The arguments of an instance norm, with or without running statistics."""

    weight: Tensor | None  # [C]; None: ones
    bias: Tensor | None  # [C]; None: zeros
    running_mean: Tensor | None  # [C]; read in evaluation mode, updated in training mode
    running_var: Tensor | None  # [C], unbiased
    training: bool  # normalise with the statistics of each image
    momentum: float
    eps: float
    channels: int

    @property
    def process_group(self) -> None:
        return None

    @property
    def groups(self) -> int | None:
        """One group per channel; None in evaluation mode, where statistics are constants."""
        return self.channels if self.training else None

    def check(self, x: Any, prefix: str = "") -> None:
        """Raises for arguments that `F.instance_norm` refuses."""
        checks.check_activation("x", x, None)
        checks.check_norm_numbers(self.eps, self.momentum)
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(self, name)
            if value is not None:
                checks.check_per_channel(prefix + name, value, x)
        if (self.running_mean is None) != (self.running_var is None):
            missing = "running_mean" if self.running_mean is None else "running_var"
            raise ValueError(f"{missing}: expected both running statistics or none, got None")
        if not self.training and self.running_mean is None:
            raise ValueError("running_mean: expected a tensor in evaluation mode, got None")
        if self.training and samples_of(x.shape) == x.shape[0] != 0:
            raise ValueError(
                "x: expected more than 1 spatial element when training, "
                f"got input size {list(x.shape)}"
            )

    def result_dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype

    def is_channels_last(self, x: Tensor) -> bool:
        return False

    def affine(self, x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        return affine(x, self.weight, self.bias, channels)

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, var = self.running_mean, self.running_var
        dtype = x.dtype
        if is_transformed() and has_mixed_dtypes(x, mean, var, weight, bias):
            x = x.float()
            weight, bias = upcast(weight, bias)
            if not self.training:  # else they are updated
                mean, var = upcast(mean, var)
        rest: Any = (self.training, self.momentum, self.eps)
        return F.instance_norm(x, mean, var, weight, bias, *rest).to(dtype)

    def statistics(self, kernels: Kernels, x: Tensor) -> tuple[Statistics, float | None]:
        if self.training:
            return kernels.group_stats(x, self.channels), None
        assert self.running_mean is not None and self.running_var is not None  # by `check`
        return running_statistics(x, self.running_mean, self.running_var), 0.0

    def update(
        self, kernels: Kernels, x: Tensor, statistics: Statistics | None, fixed: float | None
    ) -> None:
        """Updates the running statistics by the mean of the statistics of all images."""
        if not self.training or self.running_mean is None or statistics is None:
            return
        mean, var = statistics.mean.mean(0), statistics.var.mean(0)
        variances = unbiased([var], [x.shape[0] / samples_of(x.shape)])
        bn = BatchNorm(
            None, None, self.running_mean, self.running_var, True, self.momentum, self.eps
        )
        update_running_statistics(kernels, [bn], [mean], variances)
