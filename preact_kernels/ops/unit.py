"""The arguments of a BN-ReLU-Conv, and the `Unit` that they make once they are checked."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Kernels, Unit
from preact_kernels.ops import checks, layout
from preact_kernels.ops.autocast import compute_dtype
from preact_kernels.ops.batch_norm import BatchNorm


class ConvArguments(NamedTuple):
    """The arguments of one convolution, as `F.conv2d` takes them."""

    weight: Tensor
    bias: Tensor | None
    stride: int | tuple[int, ...]
    padding: int | tuple[int, ...] | str
    dilation: int | tuple[int, ...]
    groups: int


class Passed(dict):
    """Results of checks by what they read (`described`): what has passed is not checked again."""

    MOST = 4096  # a program with new shapes at every call must not fill the memory

    def add(self, key, result):
        """Keeps `result`, and returns it."""
        if len(self) >= self.MOST:
            self.clear()
        self[key] = result
        return result


_PLAIN = frozenset((int, float, bool, str, type(None)))


def described(values: Iterable) -> list:
    """What checks read of arguments: metadata of tensors, types and values of plain numbers.

    Raises:
        TypeError: an argument is none of these. No key keeps such an object, a process group say,
            or relies on its equality.
        RuntimeError: a tensor has no strides.
    """
    parts: list = []
    for v in values:
        if isinstance(v, Tensor):
            parts.append((v.shape, v.stride(), v.dtype, v.device))
            continue
        kinds = tuple(map(type, v)) if type(v) is tuple else (type(v),)
        if not _PLAIN.issuperset(kinds):
            raise TypeError
        parts += (kinds, v)
    return parts


class CheckedUnit(NamedTuple):
    """A unit, the dtype of its products, and the memory format of its result."""

    unit: Unit | None  # None for padding "same" that differs between the two sides of an axis
    dtype: torch.dtype
    channels_last: bool


_passed = Passed()


def checked_unit(
    x: Tensor, bn: BatchNorm, conv: ConvArguments, residual: Tensor | None
) -> CheckedUnit:
    """Checks the arguments of `pk.bn_relu_conv2d`, and raises the errors that it documents."""
    key = found = None
    if not torch.compiler.is_compiling():
        try:
            key = (*described((x, residual, *bn, *conv)), compute_dtype(x))
            found = _passed.get(key)
        except (AttributeError, TypeError, RuntimeError):  # x is no tensor; symbolic sizes
            key = None
    if key is None:
        return _check(x, bn, conv, residual)
    return found or _passed.add(key, _check(x, bn, conv, residual))


def _check(x: Tensor, bn: BatchNorm, conv: ConvArguments, residual: Tensor | None) -> CheckedUnit:
    bn.check(x)
    geometry = checks.check_conv(x, *conv)
    weight, dtype = conv.weight, compute_dtype(x)
    if residual is not None:
        if geometry is None:  # padding "same"
            shape = [x.shape[0], weight.shape[0], *x.shape[2:]]
        else:
            shape = geometry.output_shape(x.shape, weight.shape)
        checks.check_residual(residual, "residual", shape, x)
    channels_last = layout.is_channels_last(x) or layout.is_channels_last(weight)
    if geometry is None:
        return CheckedUnit(None, dtype, channels_last)
    dtypes = dtype, x.dtype, dtype, weight.dtype
    unit = Unit(weight.shape, geometry, x.device, *dtypes, bn.training, bn.process_group)
    return CheckedUnit(unit, dtype, channels_last)


def with_served_weight(
    kernels: Kernels, unit: Unit, conv_weight: Tensor, pixels: int
) -> tuple[Unit, Tensor]:
    """The unit and its weight, which is rounded unless the kernels serve the unit without that.

    Autograd records the rounding. A compiler merges it with other operations.
    """
    if unit.weight_dtype == unit.dtype or (
        not torch.compiler.is_compiling() and kernels.serves(unit, pixels)
    ):
        return unit, conv_weight
    return unit._replace(weight_dtype=unit.dtype), conv_weight.to(unit.dtype)
