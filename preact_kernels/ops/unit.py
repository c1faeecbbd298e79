"""Checks of a unit, and its `Unit`."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels.activations import ACTIVATIONS, RELU
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import NO_CONV, WITH_RESIDUAL, Kernels, Unit
from preact_kernels.norms import BatchNorm
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import UnitArguments
from preact_kernels.ops.autocast import compute_dtype, is_autocast


class CheckedUnit(NamedTuple):
    """A unit of checked arguments.

    The unit has no convolution if PyTorch's must run, for a padding that `Conv` does not describe.
    """

    unit: Unit
    channels_last: bool  # memory format of the result
    may_be_planar: bool = False  # the input and the result are in NCHW order


_passed = checks.Passed()


def checked_unit(
    x: Tensor,
    given: UnitArguments,
    residual: Tensor | None = None,
    prefix: str = "",
    dims: int | None = None,
    channels_last: bool | None = None,
) -> CheckedUnit:
    """Checks the arguments of `run_unit`."""
    key = found = None
    if not torch.compiler.is_compiling():
        norm, activation, conv, scale_shift, *_ = given
        try:
            of_conv = () if conv is None else conv
            rest = math.copysign(1.0, activation.parameter), dims, channels_last  # 0.0 is not -0.0
            values = x, residual, *norm, *activation, *of_conv, *scale_shift, *rest
            key = (type(norm), *checks.described(values), is_autocast(x) and compute_dtype(x))
            found = _passed.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not a tensor, or symbolic sizes
            key = None
    if key is None:
        return _check(x, given, residual, prefix, dims, channels_last)
    if found is None:
        found = _passed.add(key, _check(x, given, residual, prefix, dims, channels_last))
    return found


class PreparedUnit:
    """Arguments of a unit that runs often, with the result of their checks for the last input.

    The metadata of the arguments, but for their storages, must not change, nor must autocast.
    """

    def __init__(self, given: UnitArguments) -> None:
        self.given = given
        self._tensors = [t for t in given.tensors() if t is not None]
        self._last: tuple[Any, Any] = None, None  # a key, and the result

    def checked(
        self, x: Tensor, residual: Tensor | None, channels_last: bool | None
    ) -> CheckedUnit:
        """`checked_unit` for an input."""
        storages = [t.untyped_storage().nbytes() for t in self._tensors]
        key = storages, channels_last, *checks.described((x, residual))
        last, found = self._last
        if key != last:
            found = checked_unit(x, self.given, residual, channels_last=channels_last)
            self._last = key, found
        return found


def _check(
    x: Tensor,
    given: UnitArguments,
    residual: Tensor | None,
    prefix: str,
    dims: int | None,
    channels_last: bool | None,
) -> CheckedUnit:
    norm, _, conv, scale_shift, *_ = given
    if dims is not None:
        checks.check_activation("x", x, dims)
    norm.check(x, prefix)
    if conv is not None and x.dim() < 3:
        raise ValueError(f"x: expected 3 to 5 dimensions [N, C, ...], got shape {list(x.shape)}")
    scale_shift.check(x)
    x = scale_shift.promoted(x)
    if conv is None:
        found = unit_without_conv(x, given, channels_last)
        if residual is not None:
            _check_sum(residual, x, found.unit)
        return found
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
        return unit_without_conv(x, given)
    weight_shape = weight.shape
    if x.dim() == 3:  # sequences run as images of one row
        k, c, r = weight_shape
        weight_shape, geometry = torch.Size((k, c, 1, r)), geometry.of_rows()
    unit = unit_of(given, x.device, dtype)._replace(weight_shape=weight_shape, conv=geometry)
    unit = unit._replace(x_dtype=x.dtype, weight_dtype=weight.dtype)
    return CheckedUnit(unit, channels_last)


def _check_sum(residual: Tensor, x: Tensor, unit: Unit) -> None:
    """Checks `act(norm(x) + residual)`."""
    checks.check_residual(residual, "residual", x.shape, x)
    if residual.dtype != unit.dtype:
        raise ValueError(f"residual: expected dtype {unit.dtype}, got {residual.dtype}")
    name = unit.activation.name
    if name not in WITH_RESIDUAL:
        expected = " or ".join(WITH_RESIDUAL)
        raise ValueError(f"activation: expected {expected} with a residual, got {name}")


def unit_without_conv(
    x: Tensor, given: UnitArguments, channels_last: bool | None = None
) -> CheckedUnit:
    """The unit of a norm and activation of checked arguments.

    Batch norm with ReLU alone runs in NHWC, to give the same bits in either memory format, unless
    the caller chooses the format.
    """
    norm, activation, _, scale_shift, *_ = given
    computes_in_float32 = (
        ACTIVATIONS[activation.name].computes_in_float32 and x.is_cuda and is_autocast(x)
    )
    dtype = torch.float32 if computes_in_float32 else norm.result_dtype(x)
    is_bn_relu = isinstance(norm, BatchNorm) and activation == RELU and not scale_shift.has_any
    may_be_planar = not (layout.is_nhwc(x) or (channels_last is None and is_bn_relu))
    if channels_last is None:
        channels_last = norm.is_channels_last(x)
    unit = unit_of(given, x.device, dtype)
    return CheckedUnit(unit, channels_last, may_be_planar and not channels_last)


def unit_of(given: UnitArguments, device: torch.device, dtype: torch.dtype) -> Unit:
    """The unit without its convolution, with all tensors in `dtype`."""
    norm = given.norm
    return Unit(
        (),
        NO_CONV,
        device,
        dtype=dtype,
        x_dtype=dtype,
        y_dtype=dtype,
        weight_dtype=dtype,
        uses_batch=norm.training,
        process_group=norm.process_group,
        activation=given.activation,
        has_rows=norm.groups is not None or given.scale_shift.has_any,
        eps=norm.eps,
        norm_groups=norm.groups,
    )


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
