"""The arguments of a BN-ReLU-Conv, and the `Unit` that they make once they are checked."""

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
    """Results of checks by the metadata that they read: what has passed is not checked again."""

    MOST = 4096  # a program with new shapes at every call must not fill the memory

    def add(self, key, result):
        """Keeps `result`, and returns it."""
        if len(self) >= self.MOST:
            self.clear()
        self[key] = result
        return result


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
    if torch.compiler.is_compiling() or bn.process_group is not None:  # kept alive by no key
        return _check(x, bn, conv, residual)
    weight, bias, *numbers = conv
    parts: list = []
    try:
        for t in (x, weight, bias, residual, *bn[:4]):
            parts.append(t if t is None else (t.shape, t.stride(), t.dtype, t.device))
        key = (
            *parts,
            repr((*numbers, bn.training, bn.eps, bn.momentum)),  # tells 1 from True and 1.0
            bn.batch_count is None,
            bn.has_any_statistics_dtype,
            compute_dtype(x),
        )
        found = _passed.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors; sparse; symbolic sizes
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
    """The unit with its weight in a dtype that the kernels take.

    A float32 weight stays as it is, unless rounding it makes the kernels serve the unit. A compiler
    merges the rounding with other operations.
    """
    if unit.weight_dtype != unit.dtype:
        rounded = unit._replace(weight_dtype=unit.dtype)
        if torch.compiler.is_compiling() or (
            kernels.serves(rounded, pixels) and not kernels.serves(unit, pixels)
        ):
            return rounded, conv_weight.to(unit.dtype)
    return unit, conv_weight
