"""The arguments of residual blocks, their checks, and conversion to `Block`s."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Conv, Unit
from preact_kernels.kernels.layout import check_storage, readable_bytes
from preact_kernels.norms import BatchNorm
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import ConvArguments


class BlockArguments(NamedTuple):
    """The arguments of a block: consecutive BN-ReLU-Conv units, and a shortcut."""

    units: Sequence[tuple[BatchNorm, ConvArguments]]  # convolutions have no bias
    projection: ConvArguments | None  # the shortcut; None: the input
    is_residual: bool = True  # False: no shortcut is added

    def weights(self) -> list[Tensor]:
        """The weights of the units' convolutions and of the projection, if any."""
        weights = []
        for _, conv in self.units:
            weights.append(conv.weight)
        if self.projection is not None:
            weights.append(self.projection.weight)
        return weights

    def first_recorded_unit(self) -> int | None:
        """Index of the first unit that autograd records if the input requires no gradient."""
        if self.projection is not None and self.projection.weight.requires_grad:
            return 0
        for unit, (bn, conv) in enumerate(self.units):
            if any(t is not None and t.requires_grad for t in (bn.weight, bn.bias, conv.weight)):
                return unit
        return None


class Block(NamedTuple):
    """Shapes, dtypes and options of a residual block; hashable.

    A projection reads the activation of the first unit.
    """

    units: tuple[Unit, ...]
    projection: Unit | None  # None: the shortcut is the input
    is_residual: bool = True  # False: no shortcut, `y = F(x)`

    def shapes(self, shape: Sequence[int]) -> list[Sequence[int]]:
        """Shapes of the inputs of all units and of the output, for an input of `shape`."""
        shapes = [shape]
        for unit in self.units:
            shapes.append(unit.conv.output_shape(shapes[-1], unit.weight_shape))
        return shapes


class StageContext(NamedTuple):
    """Properties shared by all blocks of a stage."""

    device: torch.device
    stream_dtype: torch.dtype  # dtype of the residual stream
    dtype: torch.dtype  # dtype of the convolutions' products
    is_autocast: bool


class CheckedBlock(NamedTuple):
    """A block, and its `Block.shapes`."""

    block: Block
    shapes: list[Sequence[int]]


_passed = checks.Passed()


def first_recorded(blocks: Sequence[BlockArguments], x: Tensor) -> tuple[int, int]:
    """Index of the first block that autograd records, and of the first recorded unit in it.

    Returns:
        `(len(blocks), 0)` if autograd records nothing.
    """
    if not torch.is_grad_enabled():
        return len(blocks), 0
    if x.requires_grad:
        return 0, 0
    for index, block in enumerate(blocks):
        unit = block.first_recorded_unit()
        if unit is not None:
            return index, unit
    return len(blocks), 0


def checked_block(
    arguments: BlockArguments,
    shape: Sequence[int],
    x_dtype: torch.dtype,
    context: StageContext,
) -> CheckedBlock:
    """Checks the arguments of a block for an input of `shape` and `x_dtype`."""
    key = found = None
    if not torch.compiler.is_compiling():
        try:
            key = (*shape, x_dtype, context, *_read(arguments))
            found = _passed.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not a tensor, or symbolic sizes
            key = None
    if key is None:
        return _check(arguments, shape, x_dtype, context)
    return found or _passed.add(key, _check(arguments, shape, x_dtype, context))


def _read(arguments: BlockArguments) -> list[Any]:
    """A key of all properties that `_check` reads; less than `checks.described`, for speed.

    Raises:
        TypeError: a batch norm has a process group, which a key must not keep alive.
        RuntimeError: a tensor has no storage.
    """
    units, projection, is_residual = arguments
    parts: list[Any] = [is_residual, len(units)]
    for bn, conv in units:
        if bn.process_group is not None:
            raise TypeError
        for t in bn[:4]:
            parts += (None,) if t is None else (t.numel(), readable_bytes(t))
        parts.append(None if bn.weight is None else bn.weight.dtype)
        parts += (bn.training, bn.momentum, bn.eps, type(bn.momentum), type(bn.eps))
        parts.append(bn.batch_count is None)
        _add_conv(conv, parts)
    if projection is not None:
        _add_conv(projection, parts)
    return parts


def _add_conv(conv, parts: list[Any]) -> None:
    """Adds the properties that `_check` reads from `ConvArguments`."""
    weight, _, stride, padding, dilation, groups = conv
    parts += (weight.shape, weight.dtype, weight.device, readable_bytes(weight))
    parts += (stride, padding, dilation, groups)
    parts += map(type, (*stride, *padding, *dilation, groups))  # tells True from 1


def _check(
    arguments: BlockArguments,
    shape: Sequence[int],
    x_dtype: torch.dtype,
    context: StageContext,
) -> CheckedBlock:
    units: list[Unit] = []
    block_shape, stream, dtype = shape, context.stream_dtype, context.dtype
    for bn, conv in arguments.units:
        bn.check_numbers()
        bn.check_training(shape)
        _check_norm(bn, shape, context)
        _check_weight(conv, shape, context)
        is_last = len(units) + 1 == len(arguments.units)
        y_dtype = stream if is_last and arguments.is_residual else dtype
        unit = _unit(bn, conv, dtype, x_dtype, y_dtype)
        units.append(unit)
        x_dtype = dtype
        before, shape = shape, unit.conv.output_shape(shape, unit.weight_shape)
        if shape[2] < 1 or shape[3] < 1:
            checks.check_image_size(before, unit.weight_shape[2:], unit.conv)
    block = Block(tuple(units), None, arguments.is_residual)
    shapes = block.shapes(block_shape)
    if arguments.projection is not None:
        _check_weight(arguments.projection, block_shape, context)
        bn, _ = arguments.units[0]
        unit = _unit(bn, arguments.projection, dtype, units[0].x_dtype, dtype)
        block = block._replace(projection=unit)
    if arguments.is_residual:
        projection = block.projection
        shortcut = block_shape
        if projection is not None:
            shortcut = projection.conv.output_shape(block_shape, projection.weight_shape)
        if tuple(shortcut) != tuple(shape):
            raise ValueError(f"x: expected a shortcut of shape {list(shape)}, got {list(shortcut)}")
    return CheckedBlock(block, shapes)


def _unit(
    bn: BatchNorm,
    conv: ConvArguments,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> Unit:
    return Unit(
        conv.weight.shape,
        geometry_of(conv),
        conv.weight.device,
        dtype=dtype,
        x_dtype=x_dtype,
        y_dtype=y_dtype,
        weight_dtype=conv.weight.dtype,
        uses_batch=bn.training,
        process_group=bn.process_group,
    )


def geometry_of(conv) -> Conv:
    """The geometry of an `nn.Conv2d`, or of `ConvArguments` with pairs."""
    return Conv(conv.stride, conv.padding, conv.dilation, conv.groups)


def _check_norm(bn: BatchNorm, shape: Sequence[int], context: StageContext) -> None:
    names = "bn_weight", "bn_bias", "running_mean", "running_var"
    for name, t in zip(names, (bn.weight, bn.bias, bn.running_mean, bn.running_var), strict=True):
        if t is None:
            continue
        if t.numel() != shape[1]:
            raise ValueError(
                f"x: expected {t.numel()} channels to match the block's batch norm, got {shape[1]}"
            )
        check_storage(name, t)
    stream, dtype = context.stream_dtype, context.dtype
    if bn.weight is not None and bn.weight.dtype not in (stream, dtype):
        checks.check_parameter_dtype("bn_weight", bn.weight, stream)


def _check_weight(conv: ConvArguments, shape: Sequence[int], context: StageContext) -> None:
    weight, device = conv.weight, context.device
    checks.check_conv_weight(weight, conv.groups, shape[1])
    if weight.device != device:
        raise ValueError(f"x: expected device {weight.device} to match the block, got {device}")
    if weight.dtype != context.dtype and not context.is_autocast:
        checks.check_parameter_dtype("conv_weight", weight, context.stream_dtype)
    check_storage("conv_weight", weight)
