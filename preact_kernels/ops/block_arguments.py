"""The arguments of residual blocks, their checks, and conversion to `Block`s."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Block, Conv, Unit, statistics_dtype
from preact_kernels.kernels.layout import check_storage, is_channels_last, readable_bytes
from preact_kernels.norms import BatchNorm, NormArguments
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import ConvArguments, UnitArguments
from preact_kernels.ops.unit import unit_of


class BlockArguments(NamedTuple):
    """The arguments of a block: consecutive BN-ReLU-Conv units, and a shortcut."""

    units: Sequence[UnitArguments]  # batch norm, ReLU and a convolution without bias
    projection: ConvArguments | None  # the shortcut; None: the input
    is_residual: bool = True  # False: no shortcut is added

    def with_float32_norms(self) -> "BlockArguments":
        """The block with norms that read half-precision parameters and buffers in float32."""
        units = [u._replace(norm=cast(BatchNorm, u.norm).in_float32()) for u in self.units]
        return self._replace(units=units)

    def weights(self) -> list[Tensor]:
        """The weights of the units' convolutions and of the projection, if any."""
        units: Any = self.units
        weights = []
        for unit in units:
            weights.append(unit.conv.weight)
        if self.projection is not None:
            weights.append(self.projection.weight)
        return weights


class StageContext(NamedTuple):
    """Properties shared by all blocks of a stage."""

    device: torch.device
    stream_dtype: torch.dtype  # dtype of the residual stream
    dtype: torch.dtype  # dtype of the convolutions' products
    is_autocast: bool


class CheckedBlock(NamedTuple):
    """What follows from the properties of a block's arguments and of its input."""

    block: Block
    shapes: list[Sequence[int]]  # see `Block.shapes`
    channels_last: bool  # whether a weight is channels_last
    has_other_dtype: bool  # whether a weight has another dtype than the products
    has_plain_norms: bool  # whether `BatchNorm.affine` returns all weights and biases as they are
    key: tuple | None = None  # the properties; None if they cannot be compared


_passed = checks.Passed()


def first_recorded(
    blocks: Sequence[Block], x: Tensor, tensors: Sequence[Tensor]
) -> tuple[int, int]:
    """Index of the first block that autograd records, and of the first recorded unit in it.

    Args:
        blocks: the blocks.
        x: input of the first block.
        tensors: for each block, three parameters of each unit, then the weight of its projection.

    Returns:
        `(len(blocks), 0)` if autograd records nothing.
    """
    if not torch.is_grad_enabled():
        return len(blocks), 0
    if x.requires_grad:
        return 0, 0
    end = 0
    for index, block in enumerate(blocks):
        begin, end = end, end + 3 * len(block.units)
        if block.projection is not None:
            end += 1
            if tensors[end - 1].requires_grad:
                return index, 0
        for place in range(begin, end):
            if tensors[place].requires_grad:
                return index, (place - begin) // 3
    return len(blocks), 0


def checked_block(
    arguments: BlockArguments,
    shape: Sequence[int],
    x_dtype: torch.dtype,
    context: StageContext,
    previous: CheckedBlock | None = None,
) -> CheckedBlock:
    """Checks the arguments of a block for an input of `shape` and `x_dtype`.

    Args:
        arguments: the arguments.
        shape: shape of the input.
        x_dtype: dtype of the input.
        context: properties of the stage.
        previous: the result for the block before in the stage, returned for equal properties.
    """
    key = found = None
    if not torch.compiler.is_compiling():
        try:
            key = (*shape, x_dtype, context, *_read(arguments))
            if previous is not None and key == previous.key:
                return previous
            found = _passed.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not a tensor, or symbolic sizes
            key = None
    if key is None:
        return _check(arguments, shape, x_dtype, context)
    if found is None:
        found = _passed.add(key, _check(arguments, shape, x_dtype, context)._replace(key=key))
    return found


_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")


def _read(arguments: BlockArguments) -> list[Any]:
    """A key of all properties that `_check` reads; less than `checks.described`, for speed.

    Raises:
        TypeError: a batch norm has a process group, which a key must not keep alive, or a vector
            is not contiguous, as the key does not contain its stride.
        RuntimeError: a tensor has no storage.
    """
    units, projection, is_residual = arguments
    vectors: list[Any] = []  # weights, biases and statistics of norms
    convs: list[Any] = [unit.conv for unit in units]
    if projection is not None:
        convs.append(projection)
    key: list[Any] = [is_residual]
    for unit in units:
        weight, bias, mean, var, training, momentum, eps, process_group, batch_count, any_dtype = (
            unit.norm[:10]
        )
        if process_group is not None:
            raise TypeError
        key += (training, momentum, eps, type(momentum), type(eps), batch_count is None, any_dtype)
        key += (weight is None, bias is None, mean is None, var is None, unit.activation)
        vectors += (weight, bias, mean, var)
    weights: list[Tensor] = []
    for weight, _, stride, padding, dilation, groups in convs:
        key += (weight.shape, weight.stride(), weight.dtype, weight.device)
        key += (stride, padding, dilation, groups, type(groups))
        weights.append(weight)
    vectors = [t for t in vectors if t is not None]
    key += map(_dtype, vectors)
    key += map(_device, vectors)
    key += map(Tensor.numel, vectors)
    if not all(map(Tensor.is_contiguous, vectors)):
        raise TypeError
    tensors = vectors + weights
    if any(map(Tensor.storage_offset, tensors)):
        key += map(readable_bytes, tensors)
    else:  # the same, faster
        key += map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))
    return key


def _check(
    arguments: BlockArguments,
    shape: Sequence[int],
    x_dtype: torch.dtype,
    context: StageContext,
) -> CheckedBlock:
    units: list[Unit] = []
    block_shape, stream, dtype = shape, context.stream_dtype, context.dtype
    for given in arguments.units:
        bn, conv = cast(BatchNorm, given.norm), cast(ConvArguments, given.conv)
        bn.check_numbers()
        bn.check_training(shape)
        _check_norm(bn, shape, context)
        _check_weight(conv, shape, context)
        is_last = len(units) + 1 == len(arguments.units)
        y_dtype = stream if is_last and arguments.is_residual else dtype
        unit = _unit(given, conv, dtype, x_dtype, y_dtype)
        units.append(unit)
        x_dtype = dtype
        before, shape = shape, unit.conv.output_shape(shape, unit.weight_shape)
        if shape[2] < 1 or shape[3] < 1:
            checks.check_image_size(before, unit.weight_shape[2:], unit.conv)
    block = Block(tuple(units), None, arguments.is_residual)
    shapes = block.shapes(block_shape)
    if arguments.projection is not None:
        _check_weight(arguments.projection, block_shape, context)
        dtypes = dtype, units[0].x_dtype, dtype
        unit = _unit(arguments.units[0], arguments.projection, *dtypes)
        block = block._replace(projection=unit)
    if arguments.is_residual:
        projection = block.projection
        shortcut = block_shape
        if projection is not None:
            shortcut = projection.conv.output_shape(block_shape, projection.weight_shape)
        if tuple(shortcut) != tuple(shape):
            raise ValueError(f"x: expected a shortcut of shape {list(shape)}, got {list(shortcut)}")
    weights = arguments.weights()
    return CheckedBlock(
        block,
        shapes,
        any(map(is_channels_last, weights)),
        any(weight.dtype != context.dtype for weight in weights),
        all(_is_plain(unit.norm, context.stream_dtype) for unit in arguments.units),
    )


def _is_plain(bn: NormArguments, dtype: torch.dtype) -> bool:
    """Whether `BatchNorm.affine` returns weight and bias as they are, for an input in `dtype`."""
    for t in (bn.weight, bn.bias):
        if t is None or t.dtype != statistics_dtype(dtype) or not t.is_contiguous():
            return False
    return True


def _unit(
    given: UnitArguments,
    conv: ConvArguments,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> Unit:
    """The unit with a convolution, which is the projection or its own."""
    return unit_of(given, conv.weight.device, dtype)._replace(
        weight_shape=conv.weight.shape,
        conv=geometry_of(conv),
        x_dtype=x_dtype,
        y_dtype=y_dtype,
        weight_dtype=conv.weight.dtype,
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
        checks.check_tensor(name, t)
        if t.device != context.device:
            raise ValueError(
                f"x: expected device {t.device} to match the block's batch norm, "
                f"got {context.device}"
            )
        if not (bn.has_any_statistics_dtype and name.startswith("running")):
            checks.check_parameter_dtype(name, t, context.stream_dtype)


def _check_weight(conv: ConvArguments, shape: Sequence[int], context: StageContext) -> None:
    weight, device = conv.weight, context.device
    checks.check_conv_weight(weight, conv.groups, shape[1])
    if weight.device != device:
        raise ValueError(f"x: expected device {weight.device} to match the block, got {device}")
    if weight.dtype != context.dtype and not context.is_autocast:
        checks.check_parameter_dtype("conv_weight", weight, context.stream_dtype)
    check_storage("conv_weight", weight)
