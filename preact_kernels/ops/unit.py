"""Checks of a unit, and its `Unit`."""

from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels.activations import ACTIVATIONS, RELU, Activation
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import NO_CONV, Kernels, Unit
from preact_kernels.norms import BatchNorm, NormArguments
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import NO_SCALE_SHIFT, ConvArguments, ScaleShift
from preact_kernels.ops.autocast import compute_dtype, is_autocast


class CheckedUnit(NamedTuple):
    """A unit of checked arguments."""

    unit: Unit | None  # None for a padding that `checks.geometry` does not describe
    dtype: torch.dtype  # of the products; without a convolution, of the activation
    channels_last: bool  # memory format of the result
    may_be_planar: bool = False  # the input and the result are in NCHW order


_passed = checks.Passed()


def checked_unit(
    x: Tensor,
    norm: NormArguments,
    activation: Activation,
    conv: ConvArguments | None = None,
    residual: Tensor | None = None,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    prefix: str = "",
    dims: int | None = None,
    channels_last: bool | None = None,
) -> CheckedUnit:
    """Checks the arguments of `norm_act_of` (without `conv`) and `norm_act_conv_of`."""
    arguments = x, norm, activation, conv, residual, scale_shift, prefix, dims, channels_last
    key = found = None
    if not torch.compiler.is_compiling():
        try:
            of_conv = () if conv is None else conv
            values = x, residual, *norm, *activation, *of_conv, *scale_shift, *arguments[6:]
            key = (type(norm), *checks.described(values), is_autocast(x) and compute_dtype(x))
            found = _passed.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not a tensor, or symbolic sizes
            key = None
    if key is None:
        return _check(*arguments)
    return found or _passed.add(key, _check(*arguments))


def _check(
    x, norm, activation, conv, residual, scale_shift, prefix, dims, channels_last
) -> CheckedUnit:
    if dims is not None:
        checks.check_activation("x", x, dims)
    norm.check(x, prefix)
    if conv is not None and x.dim() < 3:
        raise ValueError(f"x: expected 3 to 5 dimensions [N, C, ...], got shape {list(x.shape)}")
    scale_shift.check(x)
    x = scale_shift.promoted(x)
    if conv is None:
        return unit_without_conv(x, norm, activation, scale_shift, channels_last)
    geometry = checks.check_conv(x, *conv)
    weight, dtype = conv.weight, compute_dtype(x)
    if residual is not None:
        if geometry is None:  # padding "same"
            shape = [x.shape[0], weight.shape[0], *x.shape[2:]]
        else:
            shape = geometry.output_shape(x.shape, weight.shape)
        checks.check_residual(residual, "residual", shape, x)
    if channels_last is None:
        channels_last = norm.is_channels_last(x) or layout.is_channels_last(weight)
    if geometry is None:
        return CheckedUnit(None, dtype, channels_last)
    dtypes = dtype, x.dtype, dtype, weight.dtype
    has_rows = norm.groups is not None or scale_shift.has_any
    rest = norm.training, norm.process_group, activation, has_rows, norm.eps, norm.groups
    weight_shape = weight.shape
    if x.dim() == 3:  # sequences run as images of one row
        k, c, r = weight_shape
        weight_shape, geometry = torch.Size((k, c, 1, r)), geometry.of_rows()
    unit = Unit(weight_shape, geometry, x.device, *dtypes, *rest)
    return CheckedUnit(unit, dtype, channels_last)


def unit_without_conv(
    x: Tensor,
    norm: NormArguments,
    activation: Activation,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    channels_last: bool | None = None,
) -> CheckedUnit:
    """The unit of a norm and activation of checked arguments.

    Batch norm with ReLU alone always runs in NHWC, to give the same bits in either memory format.
    """
    is_widened = ACTIVATIONS[activation.name].is_widened and x.is_cuda and is_autocast(x)
    dtype = torch.float32 if is_widened else norm.result_dtype(x)
    has_rows = norm.groups is not None or scale_shift.has_any
    rest = norm.training, norm.process_group, activation, has_rows, norm.eps, norm.groups
    unit = Unit((), NO_CONV, x.device, dtype, dtype, dtype, dtype, *rest)
    if channels_last is None:
        channels_last = norm.is_channels_last(x)
    is_bn_relu = isinstance(norm, BatchNorm) and activation == RELU and not scale_shift.has_any
    may_be_planar = not (channels_last or is_bn_relu or layout.is_channels_last(x))
    return CheckedUnit(unit, dtype, channels_last, may_be_planar)


def with_served_weight(
    kernels: Kernels, unit: Unit, conv_weight: Tensor, pixels: int
) -> tuple[Unit, Tensor]:
    """Casts the weight to the dtype of the products, unless the kernels serve the unit without.

    Autograd records the cast. Compilers fuse it with other operations, so it is always explicit
    under `torch.compile`.
    """
    if unit.weight_dtype == unit.dtype or (
        len(unit.weight_shape) == 4
        and not torch.compiler.is_compiling()
        and not kernels.refusal(unit, pixels)
    ):
        return unit, conv_weight
    return unit._replace(weight_dtype=unit.dtype), conv_weight.to(unit.dtype)
