"""Consecutive pre-activation blocks, forward and backward, on the kernels of one backend.

Passes statistics from the kernel that writes a tensor to the kernel that normalises it, and
gradients with deferred steps from unit to unit. A backend that runs several blocks in one call
gives the same bits (tests/stage/test_preact_stage.py). `preact_stage.py` decides what is saved for
backward.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import (
    AffineStep,
    Block,
    BlockKernels,
    BlockRun,
    Epilogue,
    Gradient,
    Inputs,
    Kernels,
    Norm,
    Parameters,
    RunWanted,
    Statistics,
    Unit,
    Wanted,
    samples_of,
)
from preact_kernels.ops.plain import differentiable_unit
from preact_kernels.ops.statistics import (
    InvCount,
    batch_statistics,
    inv_count_of,
    inv_count_of_sums,
    running_statistics,
    sums_over_group,
    unbiased_factor,
)


class Span(NamedTuple):
    """Blocks that run together: one block, unit by unit, or a run, in one call of the kernels."""

    begin: int  # index of the first block
    end: int
    is_run: bool
    keeps_blocks: tuple[bool, ...]  # for each block, keep its input for backward
    keeps_units: bool  # keep the inputs of the other units


def _ranges(begin: int, joins: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Splits the indices from `begin` on into ranges.

    Args:
        begin: the first index.
        joins: for each index, whether it is in the range of the index before it.
    """
    begins = [begin + place for place, join in enumerate(joins) if not join]
    return itertools.pairwise([*begins, begin + len(joins)])


class StageValues(NamedTuple):
    """A value per tensor of a stage: the tensor, its gradient, or whether a gradient is wanted."""

    parameters: list[Any]  # `Parameters` of each unit
    projections: list[Any]  # weight of each block's projection, or None
    running: list[Any]  # mean, then variance of each unit in evaluation mode


def stage_values(blocks: Sequence[Block], flat: Sequence) -> StageValues:
    """Undoes `flat_values`."""
    values = iter(flat)
    rows = zip(values, values, values, strict=False)
    parameters, projections = [], []
    for block in blocks:
        for _ in block.units:
            parameters.append(Parameters(*next(rows)))
        projections.append(None if block.projection is None else next(values))
    return StageValues(parameters, projections, list(values))


def flat_values(blocks: Sequence[Block], values: StageValues) -> list:
    """Flattens values: per block, parameters of each unit and projection; then `running`."""
    flat: list = []
    parameters = iter(values.parameters)
    for block, projection in zip(blocks, values.projections, strict=True):
        for _ in block.units:
            flat.extend(next(parameters))
        if block.projection is not None:
            flat.append(projection)
    return flat + values.running


class Stage:
    """Consecutive blocks and their tensors. Lists have an entry for each unit of all blocks.

    Attributes:
        kernels: the backend's functions.
        blocks: the blocks.
        units: the units of all blocks, in order.
        first_unit: index of each block's first unit, then the number of units.
        values: the tensors that the caller passed.
        statistics: statistics of the input; None until a forward computes them.
        fixed_inv_counts: see `inv_count_of_sums`.
        inv_counts: 1 / samples per channel, for units with batch statistics.
        inputs: inputs; None if not kept.
    """

    def __init__(
        self,
        kernels: Kernels,
        blocks: Sequence[Block],
        values: StageValues,
    ) -> None:
        self.kernels, self.blocks, self.values = kernels, blocks, values
        self.units: list[Unit] = []
        self.first_unit = [0]
        for block in blocks:
            self.units += block.units
            self.first_unit.append(len(self.units))
        self.statistics: list[Any] = [None] * len(self.units)
        self.fixed_inv_counts: list[float | None] = [None] * len(self.units)
        self.inv_counts: list[InvCount] = [0.0] * len(self.units)
        self.inputs: list[Any] = [None] * len(self.units)

    def use_running_statistics(self, x: Tensor) -> None:
        """Sets the statistics of units in evaluation mode; `x` is in the dtype of the stream."""
        running = iter(self.values.running)
        for index, unit in enumerate(self.units):
            if not unit.uses_batch:
                self.statistics[index] = running_statistics(x, next(running), next(running))
                self.fixed_inv_counts[index] = 0.0

    def batch_statistics(self) -> tuple[list[Tensor], list[Tensor]]:
        """Mean and variance of the input of each unit with batch statistics.

        With a process group the variance is unbiased, as only its tensors know the samples.
        """
        means, variances = [], []
        for unit, statistics, inv_count in zip(
            self.units, self.statistics, self.inv_counts, strict=True
        ):
            if unit.uses_batch:
                mean, var = statistics
                if unit.process_group is not None:
                    var = var * unbiased_factor(inv_count)
                means.append(mean)
                variances.append(var)
        return means, variances

    def norm(self, index: int) -> Norm:
        """The norm of a unit."""
        mean, var = self.statistics[index]
        unit, (bn_weight, bn_bias, _) = self.units[index], self.values.parameters[index]
        return Norm(mean, var, bn_weight, bn_bias, unit.eps, *unit.activation)

    def runnable(self, x: Tensor) -> list[bool]:
        """Whether each block can be part of a run, for the input `x` of the stage."""
        found: list[bool] = []
        if not hasattr(self.kernels, "block_run_forward"):
            return [False] * len(self.blocks)
        shape: Sequence[int] = x.shape
        previous = None
        for block in self.blocks:
            if block is previous and found[-1]:  # blocks of a run keep the shape
                found.append(True)
                continue
            shapes = block.shapes(shape)
            found.append(self._is_runnable(block, shapes))
            previous, shape = block, shapes[-1]
        return found

    def _is_runnable(self, block: Block, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a block can be part of a run.

        It must have a shortcut without projection, fused kernels for all convolutions, stride 1, no
        process group, and either batch or running statistics in all units.
        """
        if block.projection is not None or not block.is_residual:
            return False
        for unit, shape in zip(block.units, shapes, strict=False):
            if unit.process_group is not None or unit.uses_batch != block.units[0].uses_batch:
                return False
            if max(unit.conv.stride) > 1:
                return False
            if self.kernels.refusal(unit, shape[0] * shape[2] * shape[3]):
                return False
        return True

    def spans(
        self, begin: int, runnable: Sequence[bool], keeps: Sequence[bool], keeps_units: bool
    ) -> list[Span]:
        """Splits consecutive blocks into as few spans as the backend allows.

        Args:
            begin: index of the first block.
            runnable: result of `runnable`, for all blocks of the stage.
            keeps: for each block from `begin` on, whether to keep its input.
            keeps_units: whether to keep the inputs of the other units.
        """
        joins = []
        for index in range(begin, begin + len(keeps)):
            is_run = index > begin and runnable[index] and runnable[index - 1]
            joins.append(is_run and self.blocks[index - 1].units == self.blocks[index].units)
        spans: list[Span] = []
        for first, end in _ranges(begin, joins):
            kept = tuple(keeps[first - begin : end - begin])
            spans.append(Span(first, end, runnable[first], kept, keeps_units))
        return spans

    def forward(
        self, span: Span, x: Tensor, x_statistics: Statistics | None
    ) -> tuple[Tensor, Statistics | None]:
        """Runs a span of blocks, and stores statistics and the inputs to keep.

        Args:
            span: the blocks.
            x: input of the first block.
            x_statistics: statistics of `x`, if known.

        Returns:
            The output, and its statistics if the unit after the span needs them.
        """
        if not span.is_run:
            return self._block_forward(span, x, x_statistics)
        first, last = self.first_unit[span.begin], self.first_unit[span.end]
        if self.statistics[first] is None:
            self.statistics[first] = x_statistics
            self.inv_counts[first:last] = [inv_count_of(x)] * (last - first)
        wanted = RunWanted(
            None in self.statistics[last : last + 1], span.keeps_blocks, span.keeps_units
        )
        output = cast(BlockKernels, self.kernels).block_run_forward(self.run(span), x, wanted)
        self.statistics[first:last] = output.unit_statistics
        self.inputs[first:last] = output.inputs
        return output.y, output.statistics

    def run(self, span: Span) -> BlockRun:
        first, last = self.first_unit[span.begin], self.first_unit[span.end]
        return BlockRun(
            self.blocks[span.begin].units,
            self.values.parameters[first:last],
            self.statistics[first:last],
        )

    def _block_forward(
        self, span: Span, x: Tensor, x_statistics: Statistics | None
    ) -> tuple[Tensor, Statistics | None]:
        """`forward` of one block, unit by unit."""
        block, first = self.blocks[span.begin], self.first_unit[span.begin]
        last = first + len(block.units) - 1
        h = shortcut = x
        for index, unit in enumerate(block.units, first):
            is_kept = span.keeps_units if index > first else span.keeps_blocks[0]
            self.inputs[index] = h if is_kept else None
            if self.statistics[index] is None:
                self.statistics[index], fixed = batch_statistics(
                    self.kernels, h, unit.process_group, x_statistics
                )
                self.fixed_inv_counts[index] = inv_count_of_sums(fixed)
                self.inv_counts[index] = inv_count_of(h, fixed)
            norm = self.norm(index)
            if index == first and block.projection is not None:
                inputs = Inputs(x, norm, self.values.projections[span.begin])
                shortcut = self.kernels.norm_act_conv_forward(block.projection, inputs).y
            residual = None
            if index == last and block.is_residual:
                residual = shortcut.to(unit.y_dtype)
            epilogue = Epilogue(None, residual, None in self.statistics[index + 1 : index + 2])
            inputs = Inputs(h, norm, self.values.parameters[index].conv_weight)
            h, x_statistics = self.kernels.norm_act_conv_forward(unit, inputs, epilogue)
        return h, x_statistics

    def rebuilt_input(self, index: int, z: Tensor, y: Tensor) -> Tensor:
        """Rebuilds the input of a block: `x = y - F(z)`, where F is its last unit.

        Runs the forward kernel with negated weights, which negates F(z) bit for bit.

        Args:
            index: index of the block.
            z: input of the last unit.
            y: output of the block.
        """
        last = self.first_unit[index + 1] - 1
        inputs = Inputs(z, self.norm(last), -self.values.parameters[last].conv_weight)
        epilogue = Epilogue(residual=y)
        return self.kernels.norm_act_conv_forward(self.units[last], inputs, epilogue).y


class StageBackward:
    """The backward of a stage.

    Args:
        stage: the stage, with all statistics.
        needed: for each tensor, whether to compute its gradient.
        needs_x: whether to compute the gradient of the stage's input.

    Attributes:
        gradients: the gradients computed so far.
        first: index of the first block with a gradient to compute.
    """

    def __init__(self, stage: Stage, needed: StageValues, needs_x: bool) -> None:
        self.stage, self.needed, self.needs_x = stage, needed, needs_x
        self.gradients = StageValues(
            [Parameters(None, None, None)] * len(stage.units),  # type: ignore[arg-type]
            [None] * len(stage.blocks),
            [None] * len(needed.running),
        )
        self.first = 0 if needs_x else self._first_trained()

    def _first_trained(self) -> int:
        stage = self.stage
        for index, projection in enumerate(self.needed.projections):
            first, last = stage.first_unit[index : index + 2]
            if projection or any(map(any, self.needed.parameters[first:last])):
                return index
        raise AssertionError("a backward without a gradient to compute")

    def parts(self, spans: Sequence[Span]) -> list[Span]:
        """Splits spans into runs with all gradients wanted, and single blocks."""
        parts: list[Span] = []
        for span in spans:
            if not span.is_run:
                parts.append(span)
                continue
            are_runs = [self._needs_all(index) for index in range(span.begin, span.end)]
            joins = [False, *map(operator.and_, are_runs, are_runs[1:])]
            for begin, end in _ranges(span.begin, joins):
                first, last = begin - span.begin, end - span.begin
                kept = span.keeps_blocks[first:last]
                parts.append(Span(begin, end, are_runs[first], kept, span.keeps_units))
        return parts

    def _needs_all(self, index: int) -> bool:
        first, last = self.stage.first_unit[index : index + 2]
        needs_input = self.needs_x or index > self.first
        return needs_input and all(map(all, self.needed.parameters[first:last]))

    def backward(
        self, span: Span, y: Tensor | None, dy: Gradient
    ) -> tuple[Tensor | None, Gradient]:
        """Computes the gradients of a span.

        Args:
            span: the blocks.
            y: output of the last block, if known.
            dy: gradient of the output.

        Returns:
            The input of the first block, and its gradient, which is undefined unless wanted.
        """
        dtype = self.stage.blocks[span.begin].units[0].dtype
        if dy.step is not None and dy.g.dtype != dtype:  # kernels need g in their products' dtype
            dy = Gradient(dy.whole(self.stage.kernels))
        found = self._run(span, y, dy) if span.is_run else self._block(span, y, dy)
        first, last = self.stage.first_unit[span.begin], self.stage.first_unit[span.end]
        self.stage.inputs[first:last] = [None] * (last - first)
        return found

    def _run(self, span: Span, y: Tensor | None, dy: Gradient) -> tuple[Tensor, Gradient]:
        stage = self.stage
        first, last = stage.first_unit[span.begin], stage.first_unit[span.end]
        inputs = stage.inputs[first:last]
        is_rebuilt = not span.keeps_blocks[-1]
        found = cast(BlockKernels, stage.kernels).block_run_backward(
            stage.run(span), dy, inputs, y if is_rebuilt else None
        )
        self.gradients.parameters[first:last] = found.parameters
        return cast(AffineStep, found.x.step).x, found.x

    def _block(self, span: Span, y: Tensor | None, dy: Gradient) -> tuple[Tensor | None, Gradient]:
        """`backward` of one block, unit by unit."""
        stage, kernels = self.stage, self.stage.kernels
        index = span.begin
        block, begin, end = stage.blocks[index], *stage.first_unit[index : index + 2]
        needs_input = self.needs_x or index > self.first
        needs_projection = bool(self.needed.projections[index])
        first = begin
        if not (needs_input or needs_projection):  # skip frozen units at the begin
            first = next(u for u in range(begin, end) if any(self.needed.parameters[u]))
        inputs = stage.inputs[begin:end]
        if inputs[0] is None and first == begin:
            inputs[0] = stage.rebuilt_input(index, inputs[-1], cast(Tensor, y))
        block_dy = dy.g
        for i in range(end - 1, first - 1, -1):
            unit, norm, h = stage.units[i], stage.norm(i), inputs[i - begin]
            needs_weight, needs_bias, needs_conv_weight = self.needed.parameters[i]
            needs_g = i > first or needs_input or needs_weight or needs_bias
            needs_dy = i == end - 1 and block.is_residual and dy.step is not None
            at_once = self._is_computed_at_once(i, h)
            wanted = Wanted(needs_g, needs_conv_weight, needs_dy, activated=at_once)
            unit_inputs = Inputs(h, norm, stage.values.parameters[i].conv_weight)
            g, sums, dconv_weight, whole, activated = kernels.norm_act_conv_backward(
                unit, dy, unit_inputs, wanted
            )
            if whole is not None:
                block_dy = whole
            projection = block.projection if i == begin else None
            if projection is not None and (needs_g or needs_projection):
                found = kernels.norm_act_conv_backward(
                    projection,
                    Gradient(block_dy.to(projection.y_dtype)),
                    Inputs(h, norm, stage.values.projections[index]),
                    Wanted(needs_g, needs_projection),
                )
                self.gradients.projections[index] = found.conv_weight
                if needs_g:  # `found.g` is masked; ReLU may mask it again with the sum
                    g = cast(Tensor, g).to(h.dtype)  # in a float32 stream, add in float32
                    g.add_(cast(Tensor, found.g))
                    cast(Tensor, sums).add_(cast(Tensor, found.sums))
            self._set_gradients(i, dconv_weight, sums)
            # Gradients of weight and bias are per process; the gradient of `h` needs all sums.
            if g is not None and sums is not None and (i > first or needs_input):
                sums = sums_over_group(sums, samples_of(h.shape), unit.process_group)
                passes_on = i == begin and block.is_residual and block.projection is None
                skip = block_dy if passes_on else None
                inv_count = inv_count_of(h, stage.fixed_inv_counts[i])
                dy = Gradient(g, AffineStep(skip, h, norm, sums, inv_count))
                if activated:
                    dy = Gradient(kernels.norm_input_gradient(dy, activated=True))
        return inputs[0], dy

    def _is_computed_at_once(self, unit: int, h: Tensor) -> bool:
        """Whether no step of the gradient of a unit's input `h` is deferred.

        The caller and PyTorch's convolutions take whole gradients. False while compiling, where ops
        return `g` itself.
        """
        stage = self.stage
        if torch.compiler.is_compiling():
            return False
        if unit == 0:
            return True
        # The unit before may have more pixels in its input, which may not be known yet.
        return bool(stage.kernels.refusal(stage.units[unit - 1], h.numel() // h.shape[1]))

    def _set_gradients(self, unit: int, conv_weight: Tensor | None, sums: Tensor | None) -> None:
        dbn_bias, dbn_weight = (None, None) if sums is None else sums.unbind()
        self.gradients.parameters[unit] = Parameters(
            cast(Tensor, dbn_weight), cast(Tensor, dbn_bias), cast(Tensor, conv_weight)
        )


def differentiable_forward(
    stage: Stage, h: Tensor, start: tuple[int, int], output: Tensor | None
) -> Tensor:
    """The blocks in PyTorch's differentiable operations, for a double backward.

    Args:
        stage: the stage, with the statistics of all units from `start` on.
        h: input of the unit to begin with.
        start: index of its block, and index of the unit in the block.
        output: output of its block, needed if `start` skips units and other blocks follow: the
            shortcut is a constant that was not saved.

    Returns:
        The output of the last block.
    """
    first, skipped = start
    for index, block in enumerate(stage.blocks[first:], first):
        units = list(enumerate(block.units, stage.first_unit[index]))[skipped:]
        x, skipped = None if skipped else h, 0
        for i, unit in units:
            weight = stage.values.parameters[i].conv_weight.to(unit.dtype)
            a = differentiable_unit(unit, h, stage.norm(i)).to(unit.dtype)
            if h is x and block.projection is not None:
                projection = stage.values.projections[index].to(unit.dtype)
                x = F.conv2d(a, projection, None, *block.projection.conv)
            h = F.conv2d(a, weight, None, *unit.conv)
        y_dtype = block.units[-1].y_dtype
        h = h.to(y_dtype)
        if block.is_residual and x is not None:
            h = x.to(y_dtype) + h
        elif block.is_residual and index + 1 < len(stage.blocks):
            h = h + (cast(Tensor, output) - h).detach()
    return h
