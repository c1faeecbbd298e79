"""Runs blocks, given by their arguments, as one autograd node."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Conv
from preact_kernels.ops import checks, dispatch, layout
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.block_runs import BlockSpec, UnitSpec
from preact_kernels.ops.bn_relu_conv import ConvArguments
from preact_kernels.ops.memory_mode import STORE, MemoryMode
from preact_kernels.ops.preact_stage import PreActStageFunction, StageCall
from preact_kernels.ops.running_stats import RunningStatistics, UnbiasedStatistics, update


class BlockArguments(NamedTuple):
    """The arguments of one block: BN-ReLU-Conv units in a row, and a shortcut."""

    units: Sequence[tuple[BatchNorm, ConvArguments]]  # convolutions have no bias
    projection: ConvArguments | None  # the shortcut; None where it is the input
    is_residual: bool = True  # False: no shortcut is added

    def weights(self) -> list[Tensor]:
        """The weights of the convolutions."""
        convs = [conv for _, conv in self.units]
        return [c.weight for c in (*convs, self.projection) if c is not None]

    def first_recorded_unit(self) -> int | None:
        """The first unit that autograd records on an input without a gradient, if any."""
        if self.projection is not None and self.projection.weight.requires_grad:
            return 0
        for unit, (bn, conv) in enumerate(self.units):
            if any(t is not None and t.requires_grad for t in (bn.weight, bn.bias, conv.weight)):
                return unit
        return None


def geometry_of(conv: Any) -> Conv:
    """The geometry of an `nn.Conv2d` or of `ConvArguments`, which has pairs."""
    return Conv(conv.stride, conv.padding, conv.dilation, conv.groups)


def first_recorded(blocks: Sequence[BlockArguments], x: Tensor) -> tuple[int, int]:
    """The first block that autograd records on an input `x`, and the first unit of that block.

    The number of blocks, and 0, where it records none.
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


def run_blocks(
    blocks: Sequence[BlockArguments],
    x: Tensor,
    dtype: torch.dtype,
    memory: MemoryMode = STORE,
    repeats_norms: bool = False,
) -> Tensor:
    """Runs blocks on `x`, and updates their running statistics once.

    Args:
        blocks: at least one.
        x: `[N, C, H, W]`, any strides, in the dtype of the residual stream; not empty, unless the
            batch norms have a process group.
        dtype: of the convolutions.
        memory: what is saved for backward.
        repeats_norms: whether a batch norm is used more than once.

    Returns:
        The output of the last block, in the dtype of the residual stream.
    """
    kernels = dispatch.kernels_for(x, dtype)
    # Weights that the kernels read as they are need no copy in `dtype`.
    keeps_float32 = kernels.takes_float32_weights
    specs: list[BlockSpec] = []
    parameters: list[Tensor] = []
    shortcuts: list[Tensor] = []
    running: list[Tensor | None] = []
    tracked: list[RunningStatistics | None] = []
    shape: Sequence[int] = x.shape
    for block in blocks:
        units, block_shape = [], shape
        for bn, conv in block.units:
            bn.check_numbers()
            bn.check_training(shape)
            _check_norm(bn, shape, x, dtype)
            weight = _conv_weight(conv, shape, x, dtype, keeps_float32)
            parameters.extend((*bn.affine(x, shape[1]), weight))
            if bn.training:
                tracked.append(bn.tracked())
            else:
                running.extend((bn.running_mean, bn.running_var))
            geometry = geometry_of(conv)
            units.append(UnitSpec(bn.eps, bn.training, geometry, bn.process_group))
            before, shape = shape, geometry.output_shape(shape, weight.shape)
            if shape[2] < 1 or shape[3] < 1:
                checks.check_image_size(before, weight.shape[2:], geometry)
        projection = block.projection
        if projection is None:
            spec = BlockSpec(tuple(units), None, block.is_residual)
        else:
            spec = BlockSpec(tuple(units), geometry_of(projection))
            shortcuts.append(_conv_weight(projection, block_shape, x, dtype, keeps_float32))
        # One object for equal blocks in a row: the garbage collector has fewer to visit.
        specs.append(specs[-1] if specs and specs[-1] == spec else spec)
        if block.is_residual:
            shortcut = block_shape
            if spec.shortcut is not None:
                shortcut = spec.shortcut.output_shape(block_shape, shortcuts[-1].shape)
            if tuple(shortcut) != tuple(shape):
                raise ValueError(
                    f"x: expected a shortcut of shape {list(shape)}, got {list(shortcut)}"
                )

    first, skipped = first_recorded(blocks, x)
    if memory.name == "checkpoint":  # whole blocks run again
        skipped = 0
    if memory.name == "rebuild" and first + 1 < len(blocks) and blocks[first].is_residual:
        skipped = 0  # a double backward needs its output, which is not kept
    weights = (*parameters[2::3], *shortcuts)
    channels_last = any(map(layout.is_channels_last, (x, *weights)))
    y, *batch = PreActStageFunction.apply(
        StageCall(kernels, tuple(specs), memory, dtype, first, skipped),
        layout.nhwc(x),
        *parameters,
        *shortcuts,
        *running,
    )
    count = len(tracked)
    statistics = list(map(UnbiasedStatistics, batch[:count], batch[count:]))
    if repeats_norms:  # in order
        for running_statistics, batch_statistics in zip(tracked, statistics, strict=True):
            update(kernels, [running_statistics], [batch_statistics])
    else:
        update(kernels, tracked, statistics)
    return layout.restored(y, channels_last)


def _check_norm(bn: BatchNorm, shape: Sequence[int], x: Tensor, weight_dtype: torch.dtype) -> None:
    for t in (bn.weight, bn.bias, bn.running_mean, bn.running_var):
        if t is not None and t.numel() != shape[1]:
            raise ValueError(
                f"x: expected {t.numel()} channels to match the block's batch norm, got {shape[1]}"
            )
    if bn.weight is not None and bn.weight.dtype not in (x.dtype, weight_dtype):
        checks.check_parameter_dtype("bn_weight", bn.weight, x)


def _conv_weight(
    conv: ConvArguments, shape: Sequence[int], x: Tensor, dtype: torch.dtype, keeps_float32: bool
) -> Tensor:
    """The weight in `dtype`, or in float32, once it is known to fit an input of `shape`."""
    weight = conv.weight
    checks.check_conv_weight(weight, conv.groups, shape[1])
    if weight.device != x.device:
        raise ValueError(f"x: expected device {weight.device} to match the block, got {x.device}")
    if weight.dtype == dtype:
        return weight
    if not is_autocast(x):
        checks.check_parameter_dtype("conv_weight", weight, x)
    return weight if keeps_float32 and weight.dtype == torch.float32 else weight.to(dtype)
