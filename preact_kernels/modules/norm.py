"""Reads the norm, of any kind, of a fused module."""

from typing import Any

from torch import Tensor, nn

from preact_kernels.modules.batch_norm import (
    is_bare_norm,
    plain_batch_norm,
)
from preact_kernels.norms import NORM_MODULES, BatchNorm, NormArguments, norm_of
from preact_kernels.ops import checks


def check_norm(norm: Any) -> None:
    """Checks for a norm that the fused modules support.

    Raises:
        TypeError: `norm` is of another class.
        ValueError: a layer norm has a weight.
    """
    if not isinstance(norm, tuple(NORM_MODULES)):
        known = ", ".join(f"nn.{c.__name__}" for c in NORM_MODULES)
        raise TypeError(f"norm: expected one of {known}, got {type(norm).__name__}")
    if isinstance(norm, nn.LayerNorm) and norm.elementwise_affine:
        raise ValueError("norm: expected an nn.LayerNorm without elementwise_affine")


def channels_of(norm: nn.Module) -> int:
    """Channels of a norm's input."""
    return norm_of(norm).channels_of(norm)


def dimensions_of(norm: nn.Module) -> tuple[int, ...]:
    """Valid numbers of dimensions of a norm's input."""
    return norm_of(norm).dimensions_of(norm)


def is_readable_norm(norm: nn.Module) -> bool:
    """Whether a fused module may read the parameters of `norm` instead of calling it."""
    return is_bare_norm(norm, NORM_MODULES) and NORM_MODULES[type(norm)].is_readable(norm)


def norm_arguments(norm: Any, x: Tensor) -> NormArguments:
    """The arguments of a norm, as calling the child on `x` would use them.

    Raises:
        TypeError: `x` is not a floating point tensor.
        ValueError: the dimensions of `x` do not match `norm`.
    """
    kind: Any = type(norm)
    expected = NORM_MODULES[kind].modules[kind]
    if not isinstance(x, Tensor) or x.dim() not in expected:
        checks.check_activation("x", x, None)
        checks.check_activation("x", x, expected[-1])
    return NORM_MODULES[kind].of_module(norm, x)


def plain_norm(norm: Any, x: Tensor) -> Tensor:
    """`norm(x)` without kernels; see `plain_batch_norm`."""
    kind = norm_of(norm)
    if kind is BatchNorm:
        return plain_batch_norm(norm, x)
    if is_readable_norm(norm) and kind.needs_float32(x, *norm.parameters()):
        return norm_arguments(norm, x).plain(x)
    return norm(x)
