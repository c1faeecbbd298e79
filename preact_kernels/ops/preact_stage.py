"""A list of pre-activation blocks as one autograd node.

The only place that knows how statistics pass from the kernel that writes a tensor to the one
that normalises it, how gradients pass folded from unit to unit, and what each memory mode keeps.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.ops import layout, schema
from preact_kernels.ops.bn_relu import differentiable_bn_relu, gradients
from preact_kernels.ops.bn_relu_conv import WHOLE_GRADIENT
from preact_kernels.ops.bn_stats import (
    Statistics,
    statistics_of,
    sums_over_group,
    unbiased_variances,
)

MEMORY_MODES = ("store", "checkpoint")

Conv = tuple[
    tuple[int, int], tuple[int, int], tuple[int, int], int
]  # stride, padding, dilation, groups


class Unit(NamedTuple):
    """The numbers of one BN-ReLU-Conv."""

    eps: float
    training: bool  # normalise with the statistics of the batch
    conv: Conv
    process_group: object = None


class Block(NamedTuple):
    """The numbers of one residual block: its units, and the projection where it has one.

    The projection is fed with the activation of the first unit.
    """

    units: tuple[Unit, ...]
    shortcut: Conv | None


class UnitTensors(NamedTuple):
    """The tensors of one BN-ReLU-Conv; running statistics in evaluation mode only."""

    bn_weight: Tensor
    bn_bias: Tensor
    conv_weight: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None


class BlockTensors(NamedTuple):
    """The tensors of one block, in the order in which they lie in the flat list."""

    units: tuple[UnitTensors, ...]
    shortcut: Tensor | None


def _unflatten(blocks: Sequence[Block], flat: Sequence[Tensor | None]) -> list[BlockTensors]:
    width = len(UnitTensors._fields)
    tensors, at = [], 0
    for block in blocks:
        units = []
        for _ in block.units:
            units.append(UnitTensors(*flat[at : at + width]))
            at += width
        tensors.append(BlockTensors(tuple(units), flat[at]))
        at += 1
    return tensors


def _bounds(blocks: Sequence[Block]) -> list[int]:
    """Where the tensors of each block begin in the flat list, and its end."""
    sizes = [len(UnitTensors._fields) * len(b.units) + 1 for b in blocks]
    return [0, *itertools.accumulate(sizes)]


def segment_starts(count: int, memory: str, segments: int | None) -> list[int]:
    """Indices of the blocks whose input is kept: all in `store`, one a segment in `checkpoint`.

    Segments are of equal length up to one block; None takes the number nearest `sqrt(count)`.
    """
    if memory == "store":
        return list(range(count))
    segments = min(segments or max(1, round(math.sqrt(count))), count)
    return [count * s // segments for s in range(segments)]


def _block_forward(
    kernels,
    block: Block,
    tensors: BlockTensors,
    x: Tensor,
    known: Sequence[Statistics] | None,
    carried: tuple[Tensor, Tensor] | None,
    with_stats: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, list[Tensor], list[Statistics]]:
    """Runs one block.

    Args:
        kernels: the backend's functions.
        block: its numbers.
        tensors: its tensors.
        x: its input.
        known: the statistics of every unit when this is a recomputation.
        carried: mean and variance of `x`, where known.
        with_stats: whether mean and variance of the output are wanted.

    Returns:
        The output, its mean and variance or None, the input of every unit, and the statistics
        that normalised it.
    """
    h, inputs, statistics = x, [], []
    last = len(block.units) - 1
    for index, (unit, t) in enumerate(zip(block.units, tensors.units, strict=True)):
        if known:
            stats = known[index]
        else:
            stats = statistics_of(
                kernels,
                h,
                t.running_mean,
                t.running_var,
                unit.training,
                unit.process_group,
                carried,
            )
        norm = (stats.mean, stats.var, t.bn_weight, t.bn_bias, unit.eps)
        inputs.append(h)
        statistics.append(stats)
        if index == 0:
            shortcut = x
            if block.shortcut is not None:
                shortcut, _, _ = kernels.bn_relu_conv_forward(
                    x, *norm, tensors.shortcut, None, None, *block.shortcut, False
                )
        wanted = with_stats if index == last else not known and block.units[index + 1].training
        h, mean, var = kernels.bn_relu_conv_forward(
            h, *norm, t.conv_weight, None, shortcut if index == last else None, *unit.conv, wanted
        )
        carried = (mean, var) if wanted else None
    return h, carried, inputs, statistics


class Pending(NamedTuple):
    """A gradient on its way back: whole, or still folded as a batch norm's input gradient.

    Folded it is `[skip +] A*g + B*x + C` (`kernels.bn_input_gradient`); the kernel that consumes
    it forms it as it loads.
    """

    g: Tensor
    fold: tuple = WHOLE_GRADIENT  # skip, x, mean, var, bn_weight, eps, sums, inv_count

    def is_folded(self) -> bool:
        """Whether there is a batch norm's input to add."""
        return self.fold[1] is not None

    def whole(self, kernels) -> Tensor:
        """The gradient itself."""
        if not self.is_folded():
            return self.g
        skip, *fold = self.fold
        return kernels.bn_input_gradient(skip, self.g, *fold)


def _block_backward(
    kernels,
    block: Block,
    tensors: BlockTensors,
    inputs: Sequence[Tensor],
    statistics: Sequence[Statistics],
    arriving: Pending,
    needed: BlockTensors,
    needs_input: bool,
) -> tuple[Pending | None, list[Tensor | None]]:
    """Gradients of one block: of its input, still folded, and of its tensors, in their flat order.

    Between units too the gradient stays folded.
    """
    last = len(block.units) - 1
    wanted = [any(w[:3]) for w in needed.units]
    first = 0 if needs_input or needed.shortcut else wanted.index(True)
    dy, dshortcut, grads = None, None, [None] * len(UnitTensors._fields) * first
    for index in range(last, first - 1, -1):
        unit, t, h, stats = (
            block.units[index], tensors.units[index], inputs[index], statistics[index],
        )  # fmt: skip
        norm = (stats.mean, stats.var, t.bn_weight, t.bn_bias, unit.eps)
        wants = needed.units[index]
        needs_g = index > first or needs_input or wants.bn_weight or wants.bn_bias
        needs_dz = index == last and arriving.is_folded()
        g, dconv_weight, sums, dz = kernels.bn_relu_conv_backward(
            arriving.g, *arriving.fold, h, *norm, t.conv_weight, *unit.conv,
            needs_g, wants.conv_weight, needs_dz,
        )  # fmt: skip
        if index == last:
            dy = dz if needs_dz else arriving.g
        if index == 0 and block.shortcut is not None and (needs_g or needed.shortcut):
            shortcut_g, dshortcut, shortcut_sums, _ = kernels.bn_relu_conv_backward(
                dy, *WHOLE_GRADIENT, h, *norm, tensors.shortcut, *block.shortcut,
                needs_g, needed.shortcut, False,
            )  # fmt: skip
            if needs_g:
                g, sums = g.add_(shortcut_g), sums.add_(shortcut_sums)
        dbn_bias, dbn_weight = sums.unbind() if needs_g else (None, None)
        at = len(UnitTensors._fields) * first
        grads[at:at] = (dbn_weight, dbn_bias, dconv_weight, None, None)
        if unit.process_group is not None and needs_g:
            sums = sums_over_group(sums, unit.process_group)
        skip = dy if index == 0 and block.shortcut is None else None
        fold = (skip, h, stats.mean, stats.var, t.bn_weight, unit.eps, sums, stats.inv_count)
        arriving = Pending(g, fold)
    return arriving if needs_input else None, [*grads, dshortcut]


class PreActStageFunction(torch.autograd.Function):
    """All blocks; further outputs: means, then unbiased variances, of units that took a batch's.

    Kept for the backward: statistics, and in mode `store` the input of every unit, in mode
    `checkpoint` the input of every segment, whose blocks run again from the same statistics.
    """

    @staticmethod
    def forward(ctx, x, blocks, memory, segments, *flat):
        kernels = schema.kernels_for(x)
        tensors = _unflatten(blocks, flat)
        starts = segment_starts(len(blocks), memory, segments)
        kept, statistics, h, carried = [], [], x, None
        for index, (block, t) in enumerate(zip(blocks, tensors, strict=True)):
            with_stats = index + 1 < len(blocks) and blocks[index + 1].units[0].training
            y, carried, inputs, stats = _block_forward(
                kernels, block, t, h, None, carried, with_stats
            )
            if memory == "store":
                kept.extend(inputs)
            elif index in starts:
                kept.append(h)
            statistics.extend(stats)
            h = y
        ctx.kernels, ctx.blocks, ctx.memory, ctx.starts = kernels, blocks, memory, starts
        ctx.inv_counts = [s.inv_count for s in statistics]
        ctx.kept_count = len(kept)
        of_batch = [s for s in statistics if s.inv_count]
        outputs = [s.mean for s in of_batch] + unbiased_variances(of_batch)
        ctx.device_type = x.device.type
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs)
        ctx.save_for_backward(*kept, *(t for s in statistics for t in s[:2]), *flat)
        return h, *outputs

    @staticmethod
    def backward(ctx, dy, *_):
        with torch.autocast(ctx.device_type, enabled=False):  # for what runs again
            return PreActStageFunction._backward(ctx, dy)

    @staticmethod
    def _backward(ctx, dy):
        blocks, saved = ctx.blocks, ctx.saved_tensors
        unit_count = len(ctx.inv_counts)
        kept, rest = list(saved[: ctx.kept_count]), saved[ctx.kept_count :]
        flat = rest[2 * unit_count :]
        none = (None,) * 4
        if dy is None:
            return *none, *(None for _ in flat)
        tensors = _unflatten(blocks, flat)
        flat_statistics = [
            Statistics(rest[2 * i], rest[2 * i + 1], ctx.inv_counts[i]) for i in range(unit_count)
        ]
        statistics, at = [], 0
        for block in blocks:
            statistics.append(flat_statistics[at : at + len(block.units)])
            at += len(block.units)
        needs_x, flat_needed = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            # Under names of their own, as one tensor may have several places.
            x, *flat = (None if t is None else t.view_as(t) for t in (kept[0], *flat))
            tensors = _unflatten(blocks, flat)
            y = _differentiable_forward(blocks, tensors, statistics, x)
            dx, *grads = gradients(y, (x, *flat), (needs_x, *flat_needed), dy)
            return dx, *none[1:], *grads

        needed = _unflatten(blocks, flat_needed)
        bounds = _bounds(blocks)
        first = 0 if needs_x else bisect.bisect(bounds, flat_needed.index(True)) - 1
        grads = [None] * len(flat)
        arriving = Pending(layout.nhwc(dy))
        end = len(blocks)
        for start in reversed(ctx.starts):
            inputs = []
            if ctx.memory == "store":
                count = len(blocks[start].units)
                inputs.append(kept[-count:])
                del kept[-count:]
            else:
                h = kept.pop()
                for i in range(start, end):
                    h, _, block_inputs, _ = _block_forward(
                        ctx.kernels, blocks[i], tensors[i], h, statistics[i], None, False
                    )
                    inputs.append(block_inputs)
            for i in reversed(range(max(start, first), end)):
                arriving, grads[bounds[i] : bounds[i + 1]] = _block_backward(
                    ctx.kernels, blocks[i], tensors[i], inputs.pop(), statistics[i], arriving,
                    needed[i], needs_x or i > first,
                )  # fmt: skip
            end = start
            if end <= first:
                break
        return (
            arriving.whole(ctx.kernels) if needs_x else None,
            *none[1:],
            *(g if n else None for g, n in zip(grads, flat_needed, strict=True)),
        )


def _differentiable_forward(blocks, tensors, statistics, x: Tensor) -> Tensor:
    """The blocks in PyTorch's differentiable operations: what a double backward goes through."""
    for block, t, stats in zip(blocks, tensors, statistics, strict=True):
        h = x
        for index, unit in enumerate(block.units):
            u, s = t.units[index], stats[index]
            a = differentiable_bn_relu(
                h, u.bn_weight, u.bn_bias, s.mean, s.var, unit.training, unit.eps,
                unit.process_group,
            )  # fmt: skip
            if index == 0 and block.shortcut is not None:
                x = F.conv2d(a, t.shortcut, None, *block.shortcut)
            h = F.conv2d(a, u.conv_weight, None, *unit.conv)
        x = x + h
    return x


def preact_stage(
    x: Tensor,
    blocks: Sequence[Block],
    tensors: Sequence[Tensor | None],
    memory: str = "store",
    segments: int | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Runs `blocks` on `x` as one autograd node.

    Args:
        x: `[N, C, H, W]`; any strides.
        blocks: numbers of every block.
        tensors: the fields of `BlockTensors` of every block in one list: batch-norm parameters
            in the statistics dtype, weights in the dtype of `x`.
        memory: one of `MEMORY_MODES`.
        segments: number of segments in mode `checkpoint`; None takes about `sqrt(len(blocks))`.

    Returns:
        `[N, C', H', W']` in the memory format of `x`, and mean and unbiased variance of every
        unit that normalised with its batch, in order.
    """
    channels_last = layout.is_channels_last(x) or any(
        layout.is_channels_last(t) for t in tensors if t is not None and t.dim() == 4
    )
    y, *of_batch = PreActStageFunction.apply(layout.nhwc(x), blocks, memory, segments, *tensors)
    count = len(of_batch) // 2
    return layout.restored(y, channels_last), list(
        zip(of_batch[:count], of_batch[count:], strict=True)
    )
