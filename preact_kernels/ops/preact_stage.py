"""A list of pre-activation blocks as one autograd node.

The only place that knows how statistics pass from the kernel that writes a tensor to the one
that normalises it, how gradients pass folded from unit to unit, and what each memory mode keeps;
but for a backend that runs plain blocks in one call, which does the first two the same way
(tests/test_preact_stage.py holds the two together, bit by bit).
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
    """Indices of the blocks that begin a segment, of equal length up to one block.

    In `checkpoint` only a segment's input is kept; None takes the number nearest `sqrt(count)`.
    In `store` all blocks are one segment.
    """
    if memory == "store":
        return [0]
    segments = min(segments or max(1, round(math.sqrt(count))), count)
    return [count * s // segments for s in range(segments)]


def _native_kind(kernels, block: Block, tensors: BlockTensors) -> tuple[int, bool] | None:
    """What the blocks of one native call have in common; None for a block that has no such call."""
    serves = getattr(kernels, "serves_preact_stage", None)
    training = block.units[0].training
    if serves is None or block.shortcut is not None:
        return None
    for unit, t in zip(block.units, tensors.units, strict=True):
        if unit.training != training or unit.process_group is not None:
            return None
        if not serves(t.conv_weight, *unit.conv):
            return None
    return len(block.units), training


def _runs(kinds: Sequence[tuple | None]) -> list[tuple[int, int]]:
    """Begin and end of each run of blocks of one kind; a block of no kind is a run of its own."""
    runs, begin = [], 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] is None or kinds[i] != kinds[begin]:
            runs.append((begin, i))
            begin = i
    return runs


def _blocks_forward(
    kernels,
    blocks: Sequence[Block],
    tensors: Sequence[BlockTensors],
    x: Tensor,
    known: Sequence[Statistics] | None,
    carried: tuple[Tensor, Tensor] | None,
    with_stats: bool,
    keep_inputs: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, list[Tensor], list[Statistics]]:
    """Runs blocks in a row, as few calls as the backend allows.

    Args:
        kernels: the backend's functions.
        blocks: their numbers.
        tensors: their tensors.
        x: the input of the first.
        known: the statistics of every unit when this is a recomputation.
        carried: mean and variance of `x`, where known.
        with_stats: whether mean and variance of the output are wanted.
        keep_inputs: whether the input of every unit is wanted.

    Returns:
        The output, its mean and variance or None, the inputs, and the statistics of every unit.
    """
    kinds = [_native_kind(kernels, b, t) for b, t in zip(blocks, tensors, strict=True)]
    inputs, statistics, at = [], [], 0
    for begin, end in _runs(kinds):
        units = sum(len(b.units) for b in blocks[begin:end])
        forward = _block_forward if kinds[begin] is None else _native_forward
        x, carried, run_inputs, run_statistics = forward(
            kernels,
            blocks[begin:end],
            tensors[begin:end],
            x,
            known[at : at + units] if known else None,
            carried,
            with_stats if end == len(blocks) else not known and blocks[end].units[0].training,
            keep_inputs,
        )
        if keep_inputs:
            inputs += run_inputs
        statistics += run_statistics
        at += units
    return x, carried, inputs, statistics


def _parameters(tensors: Sequence[BlockTensors]) -> list[Tensor]:
    """What the native calls take of every unit, in one list."""
    return [p for t in tensors for u in t.units for p in u[:3]]


def _native_forward(kernels, blocks, tensors, x, known, carried, with_stats, keep_inputs):
    """`_blocks_forward` in one call, for blocks of one kind."""
    units = [u for b in blocks for u in b.units]
    if not known and not units[0].training:
        known = [
            statistics_of(kernels, x, t.running_mean, t.running_var, False)
            for b in tensors
            for t in b.units
        ]
    y, mean, var, *rest = kernels.preact_stage_forward(
        x,
        carried or (),
        _parameters(tensors),
        [t for s in known for t in s[:2]] if known else (),
        [u.eps for u in units],
        len(blocks[0].units),
        with_stats,
        keep_inputs,
    )
    if not known:
        inv_count = 1.0 / (x.shape[0] * x.shape[2] * x.shape[3])
        known = [Statistics(*rest[2 * i : 2 * i + 2], inv_count) for i in range(len(units))]
        rest = rest[2 * len(units) :]
    return y, (mean, var) if with_stats else None, rest, known


def _block_forward(kernels, blocks, tensors, x, known, carried, with_stats, keep_inputs):
    """`_blocks_forward` unit by unit, for one block."""
    (block,), (tensors,) = blocks, tensors
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


def _native_backward(kernels, blocks, tensors, inputs, statistics, arriving, needed, needs_input):
    """`_block_backward` in one call for several blocks, every gradient of which is wanted."""
    units = [u for b in blocks for u in b.units]
    g, dy, *rest = kernels.preact_stage_backward(
        arriving.g,
        *arriving.fold,
        inputs,
        [t for s in statistics for t in s[:2]],
        _parameters(tensors),
        [u.eps for u in units],
        statistics[0].inv_count,
        len(blocks[0].units),
    )
    grads = []
    for i in range(len(units)):
        dbn_bias, dbn_weight = rest[2 * i + 1].unbind()
        grads += (dbn_weight, dbn_bias, rest[2 * i], None, None)
        if (i + 1) % len(blocks[0].units) == 0:
            grads.append(None)
    first, weight = statistics[0], tensors[0].units[0].bn_weight
    fold = (dy, inputs[0], first.mean, first.var, weight, units[0].eps, rest[1], first.inv_count)
    return Pending(g, fold), grads


def _block_backward(
    kernels,
    blocks: Sequence[Block],
    tensors: Sequence[BlockTensors],
    inputs: Sequence[Tensor],
    statistics: Sequence[Statistics],
    arriving: Pending,
    needed: Sequence[BlockTensors],
    needs_input: bool,
) -> tuple[Pending | None, list[Tensor | None]]:
    """Gradients of one block, unit by unit.

    Returns:
        The gradient of its input, still folded, and those of its tensors, in their flat order.
        Between units too the gradient stays folded.
    """
    (block,), (tensors,), (needed,) = blocks, tensors, needed
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
        for begin, end in itertools.pairwise([*starts, len(blocks)]):
            if memory == "checkpoint":
                kept.append(h)
            h, carried, inputs, segment_statistics = _blocks_forward(
                kernels, blocks[begin:end], tensors[begin:end], h, None, carried,
                end < len(blocks) and blocks[end].units[0].training, memory == "store",
            )  # fmt: skip
            kept += inputs
            statistics += segment_statistics
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
        statistics = [
            Statistics(rest[2 * i], rest[2 * i + 1], ctx.inv_counts[i]) for i in range(unit_count)
        ]
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
        unit_bounds = [0, *itertools.accumulate(len(b.units) for b in blocks)]
        first = 0 if needs_x else bisect.bisect(bounds, flat_needed.index(True)) - 1
        # Where every gradient is wanted.
        kinds = [
            _native_kind(ctx.kernels, blocks[i], tensors[i])
            if (needs_x or i > first) and all(w for u in needed[i].units for w in u[:3])
            else None
            for i in range(len(blocks))
        ]
        grads = [None] * len(flat)
        arriving = Pending(layout.nhwc(dy))
        end = len(blocks)
        for start in reversed(ctx.starts):
            if end <= first:
                break
            origin = unit_bounds[start]
            inputs = kept
            if ctx.memory == "checkpoint":
                _, _, inputs, _ = _blocks_forward(
                    ctx.kernels, blocks[start:end], tensors[start:end], kept.pop(),
                    statistics[origin : unit_bounds[end]], None, False, True,
                )  # fmt: skip
            for i, j in reversed(_runs(kinds[start:end])):
                i, j = start + i, start + j
                if j <= first:
                    break
                backward = _block_backward if kinds[i] is None else _native_backward
                arriving, grads[bounds[i] : bounds[j]] = backward(
                    ctx.kernels, blocks[i:j], tensors[i:j],
                    inputs[unit_bounds[i] - origin : unit_bounds[j] - origin],
                    statistics[unit_bounds[i] : unit_bounds[j]], arriving, needed[i:j],
                    needs_x or i > first,
                )  # fmt: skip
                del inputs[unit_bounds[i] - origin :]
            end = start
        return (
            arriving.whole(ctx.kernels) if needs_x else None,
            *none[1:],
            *(g if n else None for g, n in zip(grads, flat_needed, strict=True)),
        )


def _differentiable_forward(blocks, tensors, statistics, x: Tensor) -> Tensor:
    """The blocks in PyTorch's differentiable operations: what a double backward goes through."""
    statistics = iter(statistics)
    for block, t in zip(blocks, tensors, strict=True):
        h = x
        for index, unit in enumerate(block.units):
            u, s = t.units[index], next(statistics)
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
