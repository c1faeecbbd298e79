"""The norms: one class for the arguments of each, with all facts about it.

To add one, add a class, list it in `NORMS`, and add a line to docs/norms.md. Tests fail for each of
these that is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels import torch_compat
from preact_kernels.attributes import tensors
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import HALVES, Kernels, Statistics, samples_of
from preact_kernels.ops import checks
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.plain_operators import (
    has_mixed_dtypes,
    needs_float32_group_norm,
    runs_plain,
)
from preact_kernels.ops.statistics import (
    InvCount,
    Update,
    affine,
    batch_statistics,
    inv_count_of,
    running_statistics,
    unbiased_factor,
)
from preact_kernels.torch_compat import is_distributed, is_transformed

_ANY_DIMENSIONS = (2, 3, 4, 5)
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class _Arguments(NamedTuple):
    weight: Tensor | None  # [C]; None: ones
    bias: Tensor | None  # [C]; None: zeros
    running_mean: Tensor | None = None  # [C]; read in evaluation mode, updated in training mode
    running_var: Tensor | None = None  # [C], unbiased
    training: bool = True  # normalise with the statistics of the input
    momentum: float | None = 0.0  # None: cumulative average, which needs `batch_count`
    eps: float = 1e-5
    process_group: object = None  # shares the statistics of the batch
    batch_count: Tensor | None = None  # `num_batches_tracked`, incremented in training mode
    has_any_statistics_dtype: bool = False  # allow any dtype of running statistics
    groups: int | None = None  # groups of channels per image; None: statistics per channel


class NormArguments(_Arguments):
    """The arguments of a norm.

    Attributes:
        title: the norm in names such as BN-ReLU-Conv.
        modules: classes of PyTorch's modules, and the dimensions of their inputs.
        calls: functions of PyTorch, each with a function of its arguments that returns the input
            and the norm; None for the norm if no class describes it.
        returns_view: whether PyTorch's result is a view.
        is_listed: whether conversion looks for its modules and functions, and reports them.
    """

    __slots__ = ()

    title: ClassVar[str]
    modules: ClassVar[Mapping[Any, tuple[int, ...]]]
    calls: ClassVar[Mapping[Callable, Callable]]
    returns_view: ClassVar[bool] = False
    is_listed: ClassVar[bool] = True

    @classmethod
    def of_module(cls, module: Any, x: Tensor) -> "NormArguments":
        """The arguments that a module uses when it is called on `x`.

        Raises:
            ValueError: the module does not accept the shape of `x`.
        """
        raise NotImplementedError

    @classmethod
    def is_readable(cls, module: Any) -> bool:
        """Whether `of_module` reads all that a module computes."""
        return True

    @classmethod
    def channels_of(cls, module: Any) -> int:
        """Channels of a module's input."""
        return module.num_features

    @classmethod
    def dimensions_of(cls, module: Any) -> tuple[int, ...]:
        """Valid numbers of dimensions of a module's input."""
        return next(dims for kind, dims in cls.modules.items() if isinstance(module, kind))

    def check(self, x: Any, prefix: str = "") -> None:
        """Raises the errors that `pk.batch_norm_act` and `pk.group_norm_act` document.

        Args:
            x: `[N, C, ...]`.
            prefix: prefix of the names of weight and bias in messages.
        """
        checks.check_activation("x", x, None)
        if not isinstance(self.training, bool):
            raise TypeError(f"training: expected a bool, got {type(self.training).__name__}")
        self.check_numbers()
        for name, value in (
            (f"{prefix}weight", self.weight),
            (f"{prefix}bias", self.bias),
            ("running_mean", self.running_mean),
            ("running_var", self.running_var),
        ):
            if value is not None:
                has_any_dtype = self.has_any_statistics_dtype and name.startswith("running")
                checks.check_per_channel(name, value, x, has_any_dtype=has_any_dtype)
        if (self.running_mean is None) != (self.running_var is None):
            missing = "running_mean" if self.running_mean is None else "running_var"
            raise ValueError(
                f"{missing}: expected a tensor, like the other running statistic, got None"
            )
        if not self.training and self.running_mean is None:
            raise ValueError("running_mean: expected a tensor in evaluation mode, got None")
        self.check_training(x.shape)

    def check_numbers(self) -> None:
        """Raises unless momentum and eps are valid."""
        if self.momentum is None and self.batch_count is None:
            checks.check_number("momentum", self.momentum)
        checks.check_norm_numbers(self.eps, self.momentum)

    def check_training(self, shape: Sequence[int]) -> None:
        """Raises if the statistics of an input of `shape` cannot normalise it, as in eager."""
        raise NotImplementedError

    def has_valid_eps(self) -> bool:
        """Whether PyTorch accepts eps."""
        return self.eps > 0 if self.training else self.eps >= 0

    def refuses_dtypes(self, x: Tensor) -> bool:
        """Whether PyTorch refuses parameters in these dtypes; float32 or the dtype of `x`."""
        return False

    @classmethod
    def needs_float32(cls, x: Tensor, *tensors: Tensor | None) -> bool:
        """Whether `plain` must run in float32 for an `x`, parameters and running statistics."""
        return is_transformed() and has_mixed_dtypes(x, *tensors)

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of PyTorch's result."""
        return x.dtype

    def keeps_format(self, x: Tensor) -> bool:
        """Whether PyTorch's result has the memory format of `x`; else it is contiguous."""
        return False

    def is_channels_last(self, x: Tensor) -> bool:
        """Whether PyTorch's result is channels_last."""
        return self.keeps_format(x) and layout.is_channels_last(x)

    def means_of(self, x: Tensor) -> int:
        """The number of means that normalise `x`."""
        return x.shape[1]

    def affine(self, x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        """Weight and bias in the statistics dtype of `x`."""
        return affine(x, self.weight, self.bias, channels)

    def plain(self, x: Tensor) -> Tensor:
        """The norm in PyTorch's operators."""
        raise NotImplementedError

    def plain_of_empty_batch(self, x: Tensor) -> Tensor:
        """Like `plain` for an empty `x`; all parameters get gradients, and no statistics change."""
        weight, bias = self.affine(x, x.shape[1])
        return x * weight.to(x.dtype).sum() + bias.to(x.dtype).sum()

    def running(self) -> list[Tensor]:
        """The running statistics."""
        return [t for t in self[2:4] if t is not None]

    def with_copied_statistics(self) -> "NormArguments":
        """The norm with copies of its running statistics, so that calls do not update them.

        Checkpoints expect a recomputation to save the same tensors and, in dispatch modes, to call
        the same operators as the forward.
        """
        if self.running_mean is None or self.running_var is None:
            return self
        with torch_compat.without_dispatch_modes_above(0):
            mean, var = self.running_mean.clone(), self.running_var.clone()
        return self._replace(running_mean=mean, running_var=var)

    def statistics(
        self, kernels: Kernels, x: Tensor, x_bias: Tensor | None = None
    ) -> tuple[Statistics, InvCount | None]:
        """The statistics for `x`, dense NHWC, and their fixed `inv_count` (see `inv_count_of`).

        For `x_bias` see `Kernels.group_stats`; only for norms with groups.
        """
        if self.groups is not None:
            return kernels.group_stats(x, self.groups, x_bias), None
        if self.training:
            return batch_statistics(kernels, x, self.process_group)
        assert self.running_mean is not None and self.running_var is not None  # by `check`
        return running_statistics(x, self.running_mean, self.running_var), 0.0

    def update(
        self, kernels: Kernels, x: Tensor, statistics: Statistics | None, fixed: InvCount | None
    ) -> Update | None:
        """The update of the running statistics, if any, after `statistics` normalised `x`.

        Statistics of each image update by their mean. None for `statistics` is an empty batch.
        """
        if not self.training or (self.running_mean is None and self.batch_count is None):
            return None
        if statistics is None:
            return Update(kernels, self, None, None, 1.0)
        (mean, var), inv_count = statistics, inv_count_of(x, fixed)
        if mean.dim() == 2:
            mean, var, inv_count = mean.mean(0), var.mean(0), inv_count * x.shape[0]
        return Update(kernels, self, mean, var, unbiased_factor(inv_count))


def _in_float32(x: Tensor, norm: NormArguments) -> tuple[Tensor, NormArguments]:
    """Casts `x` and parameters to float32 where PyTorch's operators need it."""
    if not norm.needs_float32(x, *norm[:4]):
        return x, norm
    weight, bias, mean, var = (None if t is None else t.float() for t in norm[:4])
    norm = norm._replace(weight=weight, bias=bias)
    if not norm.training:  # else they are updated
        norm = norm._replace(running_mean=mean, running_var=var)
    return x.float(), norm


def _batch_norm(
    input,
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    return input, BatchNorm(weight, bias, running_mean, running_var, training, momentum, eps)


class BatchNorm(NormArguments):
    """A batch norm: statistics per channel, of the batch or running.

    Ioffe and Szegedy, "Batch Normalization" (arXiv 1502.03167).
    """

    __slots__ = ()

    title = "BN"
    modules: ClassVar = {
        nn.BatchNorm1d: (2, 3),
        nn.BatchNorm2d: (4,),
        nn.BatchNorm3d: (5,),
        nn.SyncBatchNorm: _ANY_DIMENSIONS,
    }

    calls: ClassVar = {F.batch_norm: _batch_norm}

    @classmethod
    def of_module(cls, module: Any, x: Any = None) -> "BatchNorm":
        is_tracked = module.training and module.track_running_stats
        buffers = _BUFFERS if is_tracked else _BUFFERS[:2]
        weight, bias, mean, var, *counts = tensors(module, ("weight", "bias"), buffers)
        training = module.training or mean is None
        batch_count = counts[0] if counts else None
        momentum = module.momentum if is_tracked else 0.0
        if momentum is None and batch_count is None:  # PyTorch leaves the running statistics
            momentum = 0.0
        if training and not is_tracked:
            mean = var = None
        group = process_group(module) if type(module) is nn.SyncBatchNorm else None
        rest = training, momentum, module.eps, group, batch_count
        return BatchNorm(weight, bias, mean, var, *rest)

    def in_float32(self) -> "BatchNorm":
        """The norm with half-precision parameters in float32, and statistics in any dtype.

        In training mode the statistics stay as they are, as they are updated.
        """
        weight, bias, mean, var = self[:4]
        if not self.training:
            mean, var = _upcast(mean), _upcast(var)
        norm = self._replace(weight=_upcast(weight), bias=_upcast(bias))
        return norm._replace(running_mean=mean, running_var=var, has_any_statistics_dtype=True)

    def check_training(self, shape: Sequence[int]) -> None:
        if self.training and self.eps == 0:
            raise ValueError("eps: expected a positive number when training, got 0")
        if self.training and self.process_group is None:
            checks.check_samples(shape)

    def keeps_format(self, x: Tensor) -> bool:
        return True

    def plain(self, x: Tensor) -> Tensor:
        is_shared = self.process_group is not None and self.training
        if is_shared and runs_plain(x):
            raise NotImplementedError(
                "process_group: expected None when training under a tracer or a transform"
            )
        momentum: Any = self.momentum
        if is_shared:
            of_batch = self.running_mean, self.running_var, momentum, self.eps, self.process_group
            return torch_compat.sync_batch_norm(x, self.weight, self.bias, *of_batch)
        wide, norm = _in_float32(x, self)
        weight, bias, mean, var = norm[:4]
        y = F.batch_norm(wide, mean, var, weight, bias, self.training, momentum, self.eps)
        return y if wide is x else y.to(x.dtype)

    def plain_of_empty_batch(self, x: Tensor) -> Tensor:
        mean, var = (None, None) if self.training else self[2:4]
        affine = self.affine(x, x.shape[1])
        return F.batch_norm(x, mean, var, *affine, self.training, 0.0, self.eps)


def _upcast(t: Any) -> Any:
    return t.float() if t is not None and t.dtype in HALVES else t


def process_group(bn: nn.Module) -> Any:
    """The group with which a module shares the statistics of its batch, or None."""
    if not (isinstance(bn, nn.SyncBatchNorm) and bn.training and is_distributed()):
        return None
    group = bn.process_group or torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def _group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    return input, GroupNorm(weight, bias, groups=num_groups, eps=eps)


class GroupNorm(NormArguments):
    """A group norm: statistics of each image and group of channels.

    With one group it is a layer norm of whole images. Wu and He, "Group Normalization" (arXiv
    1803.08494).
    """

    __slots__ = ()

    title = "GN"
    modules: ClassVar = {nn.GroupNorm: _ANY_DIMENSIONS}

    calls: ClassVar = {F.group_norm: _group_norm, torch.group_norm: _group_norm}

    @classmethod
    def of_module(cls, module: Any, x: Tensor) -> "GroupNorm":
        return GroupNorm(module.weight, module.bias, groups=module.num_groups, eps=module.eps)

    @classmethod
    def channels_of(cls, module: Any) -> int:
        return module.num_channels

    def check(self, x: Any, prefix: str = "") -> None:
        checks.check_activation("x", x, None)
        checks.check_count("num_groups", self.groups)
        if x.shape[1] % self.groups:
            raise ValueError(
                f"num_groups: expected a divisor of the channels {x.shape[1]} of x, "
                f"got {self.groups}"
            )
        super().check(x, prefix)

    def check_training(self, shape: Sequence[int]) -> None:
        assert self.groups is not None
        if samples_of(shape) * (shape[1] // self.groups) == 1:
            raise ValueError(
                "x: expected more than 1 value per group, "
                f"got input size {list(shape)} and {self.groups} groups"
            )

    def has_valid_eps(self) -> bool:
        return self.eps >= 0

    def refuses_dtypes(self, x: Tensor) -> bool:
        dtypes = {t.dtype for t in self[:2] if t is not None}
        return len(dtypes) > 1 or bool(x.is_cuda and dtypes - {x.dtype} and not is_autocast(x))

    @classmethod
    def needs_float32(cls, x: Tensor, *tensors: Tensor | None) -> bool:
        return needs_float32_group_norm(x, *tensors)

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of PyTorch's result: autocast computes group norms in float32 on CUDA."""
        return torch.float32 if is_autocast(x) and x.is_cuda else x.dtype

    def keeps_format(self, x: Tensor) -> bool:
        return not x.is_cuda

    def means_of(self, x: Tensor) -> int:
        return x.shape[0] * (self.groups if type(self.groups) is int else 1)

    def plain(self, x: Tensor) -> Tensor:
        wide, norm = _in_float32(x, self)
        groups: Any = self.groups
        y = F.group_norm(wide, groups, norm.weight, norm.bias, self.eps)
        return y if wide is x else y.to(self.result_dtype(x))


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    is_shape = isinstance(normalized_shape, tuple | list)
    if weight is not None or bias is not None or not isinstance(input, Tensor) or not is_shape:
        return input, None
    if input.dim() < 3 or tuple(normalized_shape) != tuple(input.shape[1:]):
        return input, None
    return input, LayerNorm(None, None, groups=1, eps=eps)


class LayerNorm(GroupNorm):
    """A layer norm of whole images without weight and bias: a group norm with one group.

    Ba et al., "Layer Normalization" (arXiv 1607.06450).
    """

    __slots__ = ()

    title = "LN"
    is_listed = False  # most layer norms are of vectors, and not served
    modules: ClassVar = {nn.LayerNorm: _ANY_DIMENSIONS}

    calls: ClassVar = {F.layer_norm: _layer_norm}

    @classmethod
    def of_module(cls, module: Any, x: Tensor) -> "LayerNorm":
        if tuple(module.normalized_shape) != tuple(x.shape[1:]):
            raise ValueError(
                f"x: expected images of shape {list(module.normalized_shape)} to match norm, "
                f"got shape {list(x.shape)}"
            )
        return LayerNorm(None, None, groups=1, eps=module.eps)

    @classmethod
    def is_readable(cls, module: Any) -> bool:
        return module.weight is None and module.bias is None

    @classmethod
    def channels_of(cls, module: Any) -> int:
        return module.normalized_shape[0]

    @classmethod
    def dimensions_of(cls, module: Any) -> tuple[int, ...]:
        return (1 + len(module.normalized_shape),)

    def check_training(self, shape: Sequence[int]) -> None:
        """Does nothing: PyTorch's layer norm accepts one value."""

    def keeps_format(self, x: Tensor) -> bool:
        return False

    def plain(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:], None, None, self.eps)


def _instance_norm(
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    running = running_mean, running_var, use_input_stats
    channels = input.shape[1] if isinstance(input, Tensor) and input.dim() > 1 else 0
    groups = channels if use_input_stats else None
    return input, InstanceNorm(weight, bias, *running, momentum, eps, groups=groups)


class InstanceNorm(NormArguments):
    """An instance norm: statistics of each image and channel, or running ones per channel.

    Ulyanov et al., "Instance Normalization" (arXiv 1607.08022).
    """

    __slots__ = ()

    title = "IN"
    modules: ClassVar = {
        nn.InstanceNorm1d: (3,),
        nn.InstanceNorm2d: (4,),
        nn.InstanceNorm3d: (5,),
    }
    returns_view = True

    calls: ClassVar = {F.instance_norm: _instance_norm}

    @classmethod
    def of_module(cls, module: Any, x: Tensor) -> "InstanceNorm":
        momentum = 0.0 if module.momentum is None else module.momentum
        training = module.training or not module.track_running_stats
        running = module.running_mean, module.running_var, training
        groups = x.shape[1] if training else None
        tensors = module.weight, module.bias, *running
        return InstanceNorm(*tensors, momentum, module.eps, groups=groups)

    def check_training(self, shape: Sequence[int]) -> None:
        if self.training and samples_of(shape) == shape[0] != 0:
            raise ValueError(
                "x: expected more than 1 spatial element when training, "
                f"got input size {list(shape)}"
            )

    def means_of(self, x: Tensor) -> int:
        return x.shape[0] * x.shape[1]

    def plain(self, x: Tensor) -> Tensor:
        wide, norm = _in_float32(x, self)
        weight, bias, mean, var = norm[:4]
        rest: Any = (self.training, self.momentum, self.eps)
        return F.instance_norm(wide, mean, var, weight, bias, *rest).to(x.dtype)


NORMS: tuple[type[NormArguments], ...] = (GroupNorm, BatchNorm, InstanceNorm, LayerNorm)
# PyTorch's modules, and the class of each.
NORM_MODULES = {module: norm for norm in NORMS for module in norm.modules}


def norm_of(module: nn.Module) -> type[NormArguments]:
    """The class for a module, which may be of a subclass of `NORM_MODULES`."""
    return next(norm for kind, norm in NORM_MODULES.items() if isinstance(module, kind))
