"""Reads the norm, of any kind, of a fused module."""

from typing import Any

from torch import Tensor, nn

from preact_kernels.modules.batch_norm import (
    batch_norm_arguments,
    is_bare_norm,
    plain_batch_norm,
)
from preact_kernels.ops import checks
from preact_kernels.ops.group_norm import GroupNorm, InstanceNorm, LayerNorm
from preact_kernels.ops.norm_act import NormArguments
from preact_kernels.ops.plain_operators import (
    has_mixed_dtypes,
    is_transformed,
    needs_float32_group_norm,
)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (nn.GroupNorm, *_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm)

# Dimensions of the input; norms without an entry take any.
_DIMENSIONS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.InstanceNorm1d: (3,),
    nn.InstanceNorm2d: (4,),
    nn.InstanceNorm3d: (5,),
}


def check_norm(norm: Any) -> None:
    """Checks for a norm that the fused modules support.

    Raises:
        TypeError: `norm` is of another class.
        ValueError: a layer norm has a weight.
    """
    if not isinstance(norm, NORMS):
        known = ", ".join(f"nn.{c.__name__}" for c in NORMS)
        raise TypeError(f"norm: expected one of {known}, got {type(norm).__name__}")
    if isinstance(norm, nn.LayerNorm) and norm.elementwise_affine:
        raise ValueError("norm: expected an nn.LayerNorm without elementwise_affine")


def channels_of(norm: Any) -> int:
    """Channels of a norm's input."""
    if isinstance(norm, nn.GroupNorm):
        return norm.num_channels
    return norm.normalized_shape[0] if isinstance(norm, nn.LayerNorm) else norm.num_features


def dimensions_of(norm: nn.Module) -> tuple[int, ...]:
    """Valid numbers of dimensions of a norm's input."""
    if isinstance(norm, nn.LayerNorm):
        return (1 + len(norm.normalized_shape),)
    for norm_class, dimensions in _DIMENSIONS.items():
        if isinstance(norm, norm_class):
            return dimensions
    return (2, 3, 4, 5)


def is_readable_norm(norm: nn.Module) -> bool:
    """Whether a fused module may read the parameters of `norm` instead of calling it."""
    if not is_bare_norm(norm, NORMS):
        return False
    return type(norm) is not nn.LayerNorm or (norm.weight is None and norm.bias is None)


def norm_arguments(norm: Any, x: Tensor) -> NormArguments:
    """The arguments of a norm, as calling the child on `x` would use them.

    Raises:
        TypeError: `x` is not a floating point tensor.
        ValueError: the dimensions of `x` do not match `norm`.
    """
    checks.check_activation("x", x, None)
    kind = type(norm)
    expected = _DIMENSIONS.get(kind)
    if expected is not None and x.dim() not in expected:
        checks.check_activation("x", x, expected[-1])
    if kind is nn.GroupNorm:
        return GroupNorm(norm.num_groups, norm.weight, norm.bias, norm.eps)
    if kind is nn.LayerNorm:
        if tuple(norm.normalized_shape) != tuple(x.shape[1:]):
            raise ValueError(
                f"x: expected images of shape {list(norm.normalized_shape)} to match norm, "
                f"got shape {list(x.shape)}"
            )
        return LayerNorm(1, None, None, norm.eps)
    if kind not in _INSTANCE_NORMS:
        return batch_norm_arguments(norm)
    return InstanceNorm(
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.training or not norm.track_running_stats,
        0.0 if norm.momentum is None else norm.momentum,
        norm.eps,
        x.shape[1],
    )


def _needs_float32(x: Tensor, *parameters: Tensor | None) -> bool:
    return is_transformed() and has_mixed_dtypes(x, *parameters)


def plain_norm(norm: Any, x: Tensor) -> Tensor:
    """`norm(x)` without kernels; see `plain_batch_norm`."""
    if isinstance(norm, _BATCH_NORMS):
        return plain_batch_norm(norm, x)
    is_group_norm = isinstance(norm, nn.GroupNorm)
    needs_float32 = needs_float32_group_norm if is_group_norm else _needs_float32
    if is_readable_norm(norm) and needs_float32(x, *norm.parameters()):
        arguments = norm_arguments(norm, x)
        return arguments.plain(x, arguments.weight, arguments.bias)
    return norm(x)
