"""Checks of a unit, and its `Unit`."""

from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels.activations import Activation
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import NO_CONV, Kernels, Unit
from preact_kernels.norms import NormArguments
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import NO_SCALE_SHIFT, ConvArguments, ScaleShift
from preact_kernels.ops.autocast import compute_dtype, is_autocast


class CheckedUnit(NamedTuple):
    """A unit, the dtype of its products, and the memory format of its result."""

    unit: Unit | None  # None if `checks.geometry` returns None
    dtype: torch.dtype
    channels_last: bool


_passed = checks.Passed()


def checked_unit(
    x: Tensor,
    norm: NormArguments,
    activation: Activation,
    conv: ConvArguments,
    residual: Tensor | None,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    prefix: str = "",
) -> CheckedUnit:
    """Checks the arguments of `norm_act_conv_of`; raises what the public functions document."""
    arguments = x, norm, activation, conv, residual, scale_shift, prefix
    key = found = None
    if not torch.compiler.is_compiling():
        try:
            values = x, residual, *norm, *activation, *conv, *scale_shift, prefix
            key = (type(norm), *checks.described(values), is_autocast(x) and compute_dtype(x))
            found = _passed.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not a tensor, or symbolic sizes
            key = None
    if key is None:
        return _check(*arguments)
    return found or _passed.add(key, _check(*arguments))


def _check(x, norm, activation, conv, residual, scale_shift, prefix) -> CheckedUnit:
    norm.check(x, prefix)
    if x.dim() < 3:
        raise ValueError(f"x: expected 3 to 5 dimensions [N, C, ...], got shape {list(x.shape)}")
    scale_shift.check(x)
    x = scale_shift.promoted(x)
    geometry = checks.check_conv(x, *conv)
    weight, dtype = conv.weight, compute_dtype(x)
    if residual is not None:
        if geometry is None:  # padding "same"
            shape = [x.shape[0], weight.shape[0], *x.shape[2:]]
        else:
            shape = geometry.output_shape(x.shape, weight.shape)
        checks.check_residual(residual, "residual", shape, x)
    channels_last = norm.is_channels_last(x) or layout.is_channels_last(weight)
    if geometry is None:
        return CheckedUnit(None, dtype, channels_last)
    dtypes = dtype, x.dtype, dtype, weight.dtype
    has_rows = norm.groups is not None or any(t is not None for t in scale_shift)
    rest = norm.training, norm.process_group, activation, has_rows, norm.eps, norm.groups
    weight_shape = weight.shape
    if x.dim() == 3:  # sequences run as images of one row
        k, c, r = weight_shape
        weight_shape, geometry = torch.Size((k, c, 1, r)), geometry.of_rows()
    unit = Unit(weight_shape, geometry, x.device, *dtypes, *rest)
    return CheckedUnit(unit, dtype, channels_last)


def unit_without_conv(x: Tensor, norm: NormArguments, activation: Activation) -> Unit:
    """The unit of a norm and activation of checked arguments; it does not say `has_rows`."""
    rest = norm.training, norm.process_group, activation, False, norm.eps, norm.groups
    return Unit((), NO_CONV, x.device, x.dtype, x.dtype, x.dtype, x.dtype, *rest)


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
        and kernels.serves(unit, pixels)
    ):
        return unit, conv_weight
    return unit._replace(weight_dtype=unit.dtype), conv_weight.to(unit.dtype)
