"""Consecutive pre-activation blocks as one autograd node.

Saves tensors and runs blocks again as the memory mode says (`memory_mode.py`). `blocks.py` runs
the blocks and rebuilds their inputs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import Block, Gradient, Kernels, Statistics, samples_of
from preact_kernels.norms import NormArguments
from preact_kernels.ops import checks, dispatch
from preact_kernels.ops.autocast import has_autocast, is_autocast
from preact_kernels.ops.block_arguments import (
    BlockArguments,
    StageContext,
    checked_block,
    first_recorded,
)
from preact_kernels.ops.blocks import (
    Stage,
    StageBackward,
    differentiable_forward,
    flat_values,
    stage_values,
)
from preact_kernels.ops.memory_mode import STORE, MemoryMode
from preact_kernels.ops.plain import gradients
from preact_kernels.ops.plain_operators import runs_plain_backward
from preact_kernels.ops.saved_tensors import save, saved
from preact_kernels.ops.statistics import unbiased_factor, update_running_statistics
from preact_kernels.ops.unit import with_served_weight


class StageCall(NamedTuple):
    """Arguments of `PreActStageFunction` other than tensors."""

    kernels: Kernels
    blocks: Sequence[Block]
    memory: MemoryMode
    first: int = 0  # first block with a gradient; earlier blocks save nothing
    skipped: int = 0  # number of its first units without a gradient


# Maps a call, its input and its other tensors to a tensor like the output.
Recorder = Callable[[StageCall, Tensor, Sequence[Tensor]], Tensor]


class PreActStageFunction(torch.autograd.Function):
    """Consecutive blocks.

    Tensor arguments: `x`, `[N, C, H, W]` dense NHWC in the dtype of the residual stream, then
    `flat_values`. Batch-norm parameters are in the statistics dtype.

    Returns `y`, then the means of units with batch statistics, then their variances, as
    `Stage.batch_statistics` does. Saves the statistics, the inputs that the memory mode selects,
    and `y` if the last block's input is rebuilt from it. Blocks that run again in the backward use
    the same statistics.
    """

    @staticmethod
    def forward(ctx, call, x, *tensors):
        kernels, blocks, memory, first, skipped = call
        stage = Stage(kernels, blocks, stage_values(blocks, tensors))
        if stage.values.running:
            stage.use_running_statistics(x)
        runnable = stage.runnable(x)
        h, h_statistics = x, None
        for span in stage.spans(0, runnable, [False] * first, False):
            h, h_statistics = stage.forward(span, h, h_statistics)
        checkpoints = memory.name == "checkpoint"
        ctx.skipped, segments, saves_y = memory.kept_inputs(blocks, first, skipped, x.dtype)
        ctx.segments = []  # spans of each segment
        for begin, keeps in segments:
            spans = stage.spans(begin, runnable, keeps, True)
            ctx.segments.append(spans)
            segment_input = h
            if checkpoints:
                spans = stage.spans(begin, runnable, [False] * len(keeps), False)
            for span in spans:
                h, h_statistics = stage.forward(span, h, h_statistics)
            if checkpoints:
                stage.inputs[stage.first_unit[begin]] = segment_input
        means, variances = stage.batch_statistics()
        ctx.call, ctx.device_type = call, x.device.type
        ctx.fixed_inv_counts = stage.fixed_inv_counts
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*means, *variances)
        unused = stage.first_unit[first] + ctx.skipped
        kept = [None] * (3 * unused)
        for h_in, statistics in zip(stage.inputs[unused:], stage.statistics[unused:], strict=True):
            kept += (h_in, *statistics)
        save(ctx, (h if saves_y else None, *kept, *tensors))
        return h, *means, *variances

    @staticmethod
    def backward(ctx, dy, *_):
        if not has_autocast(ctx.device_type):
            return PreActStageFunction._backward(ctx, dy)
        with torch.autocast(ctx.device_type, enabled=False):  # for blocks that run again
            return PreActStageFunction._backward(ctx, dy)

    @staticmethod
    def _backward(ctx, dy):
        y, *kept = saved(ctx)
        kernels, blocks, memory, first, _ = ctx.call
        skipped = ctx.skipped
        count = 3 * len(ctx.fixed_inv_counts)
        tensors = kept[count:]
        if dy is None:
            return None, None, *[None] * len(tensors)
        stage = Stage(kernels, blocks, stage_values(blocks, tensors))
        stage.fixed_inv_counts = ctx.fixed_inv_counts
        stage.inputs = list(kept[:count:3])  # Dynamo of torch 2.11 makes `*kept` a tuple
        stage.statistics = list(map(Statistics, kept[1:count:3], kept[2:count:3]))
        needs_x, needed = ctx.needs_input_grad[1], ctx.needs_input_grad[2:]
        if runs_plain_backward(dy):
            begin, following = stage.first_unit[first : first + 2]
            output = stage.inputs[following] if skipped and following < len(stage.units) else None

            def forward(h, *tensors):
                own = Stage(kernels, blocks, stage_values(blocks, tensors))
                own.statistics = stage.statistics
                return differentiable_forward(own, h, (first, skipped), output)

            inputs = (stage.inputs[begin + skipped], *tensors)
            return None, *gradients(forward, inputs, (needs_x, *needed), dy)

        backward = StageBackward(stage, stage_values(blocks, needed), needs_x)
        del kept
        gradient = Gradient(dy.contiguous(memory_format=torch.channels_last))
        for spans in reversed(ctx.segments):
            if spans[-1].end <= backward.first:
                break
            if memory.name == "checkpoint":
                y = stage.inputs[stage.first_unit[spans[0].begin]]
                for span in spans:
                    y, _ = stage.forward(span, y, None)
            for part in reversed(backward.parts(spans)):
                if part.end <= backward.first:
                    break
                y, gradient = backward.backward(part, y, gradient)
        dx = gradient.whole(kernels) if needs_x else None
        grads = flat_values(blocks, backward.gradients)
        for index, is_needed in enumerate(needed):
            if not is_needed:
                grads[index] = None
        return None, dx, *grads


class _Read(NamedTuple):
    """What the arguments of blocks give for an input."""

    blocks: tuple[Block, ...]
    tensors: list[Any]  # as `flat_values`, without running statistics
    running: list[Any]  # running statistics of norms in evaluation mode
    norms: list[NormArguments]  # in training mode
    factors: list[float]  # make the variances of `Stage.batch_statistics` unbiased
    has_channels_last: bool  # whether a weight is channels_last
    is_plain: bool  # whether the tensors are those of the arguments


def _read(
    kernels: Kernels, blocks: Iterable[BlockArguments], x: Tensor, dtype: torch.dtype
) -> _Read:
    """Checks and reads arguments; see `preact_stage`."""
    checked: list[Block] = []
    tensors: list[Any] = []
    running: list[Any] = []
    norms: list[NormArguments] = []
    factors: list[float] = []
    context = StageContext(x.device, x.dtype, dtype, is_autocast(x))
    shape: Sequence[int] = x.shape
    x_dtype = x.dtype
    has_channels_last, is_plain = False, True
    found = None
    for arguments in blocks:
        found = checked_block(arguments, shape, x_dtype, context, found)
        block, shapes, weights = found.block, found.shapes, arguments.weights()
        has_channels_last = has_channels_last or found.channels_last
        is_plain = is_plain and found.has_plain_norms and not found.has_other_dtype
        if found.has_other_dtype:
            block, weights = _with_served_weights(kernels, block, weights, shapes)
        for (bn, *_), shape, weight in zip(arguments.units, shapes, weights, strict=False):
            plain = found.has_plain_norms
            tensors += (bn.weight, bn.bias) if plain else bn.affine(x, shape[1])
            tensors.append(weight)
            if bn.training:
                norms.append(bn)
                is_unbiased = bn.process_group is not None
                factors.append(1.0 if is_unbiased else unbiased_factor(1 / samples_of(shape)))
            else:
                for name in ("running_mean", "running_var"):
                    running.append(getattr(bn, name))
                    checks.check_constant(name, running[-1])
        if block.projection is not None:
            tensors.append(weights[-1])
        # Equal consecutive blocks share an object, so that the garbage collector visits fewer.
        checked.append(checked[-1] if checked and checked[-1] == block else block)
        shape, x_dtype = shapes[-1], block.units[-1].y_dtype
    lists = tensors, running, norms, factors
    return _Read(tuple(checked), *lists, has_channels_last, is_plain)


class PreparedStage:
    """Arguments of blocks that run often, with what they gave for the last input.

    The metadata of the arguments, but for their storages, must not change.
    """

    def __init__(self, blocks: Sequence[BlockArguments]) -> None:
        self.blocks = blocks
        units = [unit for block in blocks for unit in block.units]
        tensors = [t for unit in units for t in unit.tensors()]
        tensors += [block.projection.weight for block in blocks if block.projection is not None]
        self._tensors = [t for t in tensors if t is not None]
        self._last: tuple[Any, Any] = None, None  # a key, and the result

    def read(self, kernels: Kernels, x: Tensor, dtype: torch.dtype) -> _Read:
        """What the arguments give for an input."""
        storages = [t.untyped_storage().nbytes() for t in self._tensors]
        key = kernels, storages, x.shape, x.dtype, x.device, dtype, is_autocast(x)
        last, found = self._last
        if key != last:
            found = _read(kernels, self.blocks, x, dtype)
            if found.is_plain:
                self._last = key, found
        return found


def preact_stage(
    blocks: Iterable[BlockArguments] | PreparedStage,
    x: Tensor,
    dtype: torch.dtype,
    memory: MemoryMode = STORE,
    record: Recorder | None = None,
) -> Tensor:
    """Runs blocks on `x`, and updates their running statistics once.

    Args:
        blocks: at least one block.
        x: `[N, C, H, W]`, any strides, in the dtype of the residual stream; not empty unless the
            batch norms have a process group.
        dtype: dtype of the products.
        memory: the memory mode.
        record: called instead of the blocks; running statistics are not updated.

    Returns:
        The output of the last block, in the dtype of the residual stream.
    """
    kernels = dispatch.kernels_for(x)
    if isinstance(blocks, PreparedStage):
        found = blocks.read(kernels, x, dtype)
    else:
        found = _read(kernels, blocks, x, dtype)
    count = len(found.norms)
    channels_last = layout.is_channels_last(x) or found.has_channels_last
    first, skipped = first_recorded(found.blocks, x, found.tensors)
    x = x.contiguous(memory_format=torch.channels_last)
    call = StageCall(kernels, found.blocks, memory, first, skipped)
    tensors = found.tensors + found.running
    if record is not None:
        return layout.restored(record(call, x, tensors), channels_last)
    y, *batch = PreActStageFunction.apply(call, x, *tensors)
    y = y if channels_last else y.contiguous()
    # Last, so that out of memory leaves the buffers unchanged.
    batch_statistics = batch[:count], batch[count:]
    update_running_statistics(kernels, found.norms, *batch_statistics, found.factors)
    return y


def _with_served_weights(
    kernels: Kernels, block: Block, weights: list[Tensor], shapes: Sequence[Sequence[int]]
) -> tuple[Block, list[Tensor]]:
    """`with_served_weight` for the units and the projection of a block."""
    units, projection, is_residual = block
    rounded = list(units)
    for index, unit in enumerate(units):
        if unit.weight_dtype != unit.dtype:
            pixels = math.prod(shapes[index]) // shapes[index][1]
            rounded[index], weights[index] = with_served_weight(
                kernels, unit, weights[index], pixels
            )
    if projection is not None and projection.weight_dtype != projection.dtype:
        pixels = math.prod(shapes[0]) // shapes[0][1]
        projection, weights[-1] = with_served_weight(kernels, projection, weights[-1], pixels)
    return Block(tuple(rounded), projection, is_residual), weights
