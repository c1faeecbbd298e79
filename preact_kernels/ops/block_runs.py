"""Pre-activation blocks in a row, forward and backward, on the kernels of one backend.

The only place that knows how statistics pass from the kernel that writes a tensor to the one that
normalises it, and how gradients pass folded from unit to unit. A backend that runs several plain
blocks in one call does both the same way; tests/stage/test_preact_stage.py compares the bits.
`preact_stage.py` decides what is saved between forward and backward.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.kernels.contract import (
    BatchStatistics,
    BlockKernels,
    BlockRun,
    Conv,
    Epilogue,
    Fold,
    Kernels,
    Norm,
    Wanted,
)
from preact_kernels.kernels.mixed_precision import MixedBlockKernels
from preact_kernels.ops.bn_relu import differentiable_bn_relu
from preact_kernels.ops.bn_stats import (
    Statistics,
    batch_statistics,
    inv_count_of,
    running_statistics,
    sums_over_group,
)


class UnitSpec(NamedTuple):
    """One BN-ReLU-Conv, without its tensors."""

    eps: float
    training: bool  # normalise with the statistics of the batch
    conv: Conv
    process_group: object = None


class BlockSpec(NamedTuple):
    """One residual block, without its tensors.

    A projection reads the activation of the first unit.
    """

    units: tuple[UnitSpec, ...]
    shortcut: Conv | None
    is_residual: bool = True  # False: the units alone, `y = F(x)`

    @property
    def can_rebuild(self) -> bool:
        """Whether the block's input follows from its output and the input of its last unit."""
        return self.is_residual and self.shortcut is None and len(self.units) > 1


class Blocks:
    """Blocks in a row, and a value for each of their tensors.

    The values are tensors, gradients, or whether a gradient is wanted.

    Args:
        specs: the blocks.
        values: bn_weight, bn_bias and conv_weight of every unit; then conv_weight of every
            projection; then running mean and variance of every unit in evaluation mode.

    Attributes:
        specs: as given.
        units: of all blocks, in order.
        first_unit: index of each block's first unit, and the number of units.
        parameters: three values for every unit.
        shortcuts: one value for every block; None without a projection.
        running: two values for every unit in evaluation mode.
    """

    def __init__(self, specs: Sequence[BlockSpec], values: Sequence) -> None:
        self.specs = specs
        self.units = [u for s in specs for u in s.units]
        self.first_unit = list(itertools.accumulate((len(s.units) for s in specs), initial=0))
        rest = iter(values)
        self.parameters: list[Any] = list(itertools.islice(rest, 3 * len(self.units)))
        self.shortcuts: list[Any] = [None if s.shortcut is None else next(rest) for s in specs]
        self.running = list(rest)

    def flat(self) -> list:
        """The values in the order in which they were given."""
        shortcuts = zip(self.shortcuts, self.specs, strict=True)
        projected = (value for value, spec in shortcuts if spec.shortcut is not None)
        return [*self.parameters, *projected, *self.running]

    def statistics(self, x: Tensor) -> list[Statistics | None]:
        """The statistics of units in evaluation mode; None for those that take their batch's."""
        running = iter(self.running)
        return [
            None if u.training else running_statistics(x, next(running), next(running))
            for u in self.units
        ]

    def norm(self, unit: int, statistics: Statistics | BatchStatistics) -> Norm:
        """What normalises the input of a unit."""
        bn_weight, bn_bias = self.parameters[3 * unit : 3 * unit + 2]
        return Norm(statistics.mean, statistics.var, bn_weight, bn_bias, self.units[unit].eps)

    def conv_weight(self, unit: int) -> Tensor:
        """The weight of a unit's convolution."""
        return self.parameters[3 * unit + 2]

    def run(self, begin: int, end: int) -> BlockRun:
        """Plain blocks of equal shapes, as a backend takes them."""
        first, last = self.first_unit[begin], self.first_unit[end]
        units = self.specs[begin].units
        return BlockRun(
            self.parameters[3 * first : 3 * last],
            [u.eps for u in self.units[first:last]],
            len(units),
            [u.conv for u in units],
        )


def run_keys(kernels: Kernels, blocks: Blocks, x: Tensor) -> list[tuple | None]:
    """For every block a key that is equal for blocks which can run in one call.

    None for a block that runs unit by unit: it has a projection or no shortcut at all, a process
    group, a stride, or a convolution without a fused kernel, or both sides of one are of a wider
    stream, or the backend has no such call.
    """
    if not hasattr(kernels, "block_run_forward"):
        return [None] * len(blocks.specs)

    pixels = _input_pixels(blocks, x)

    def key(index: int) -> tuple | None:
        spec, first = blocks.specs[index], blocks.first_unit[index]
        if spec.shortcut is not None or not spec.is_residual:
            return None
        if len(spec.units) == 1 and isinstance(kernels, MixedBlockKernels):
            return None
        convs = []
        for unit, u in enumerate(spec.units, first):
            weight = blocks.conv_weight(unit)
            if u.training != spec.units[0].training or u.process_group is not None:
                return None
            if max(u.conv.stride) > 1:
                return None
            if not kernels.serves_conv(weight.shape, u.conv, x.dtype, x.device, pixels[unit]):
                return None
            convs.append((weight.shape, weight.dtype, u.conv))
        return spec.units[0].training, *convs

    keys: list[tuple | None] = []
    for i in range(len(blocks.specs)):
        found = key(i)
        keys.append(keys[-1] if keys and keys[-1] == found else found)  # one for equal neighbours
    return keys


def _input_pixels(blocks: Blocks, x: Tensor) -> list[int]:
    """The number of pixels of each unit's input, over the batch."""
    shape: Sequence[int] = x.shape
    pixels = []
    for unit, u in enumerate(blocks.units):
        pixels.append(shape[0] * shape[2] * shape[3])
        shape = u.conv.output_shape(shape, blocks.conv_weight(unit).shape)
    return pixels


def runs(keys: Sequence[tuple | None], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of blocks with equal keys.

    A block whose key is None forms its own run.
    """
    start = begin
    for i in range(begin + 1, end + 1):
        if i == end or keys[i] is None or keys[i] != keys[start]:
            yield start, i
            start = i


def forward(
    kernels: Kernels,
    blocks: Blocks,
    keys: Sequence[tuple | None],
    span: tuple[int, int],
    x: Tensor,
    x_statistics: BatchStatistics | None,
    statistics: list[Any],
    keeps: Sequence[bool] | None,
) -> tuple[Tensor, BatchStatistics | None, list[Tensor | None]]:
    """Runs some of the blocks, in as few calls as the backend allows.

    Args:
        kernels: the backend's functions.
        blocks: all blocks.
        keys: of all blocks (`run_keys`).
        span: first block, and one past the last.
        x: input of the first block.
        x_statistics: of `x`, where known.
        statistics: of the units of all blocks, with mean and var. `Statistics` are filled in for
            those that are None.
        keeps: whether the input of each block in the span is returned, beside those of its other
            units; None returns no input at all.

    Returns:
        The output, its statistics where the unit after the span takes them, and the inputs of the
        units in the span.
    """
    begin, end = span
    if keeps is not None:  # the same for all blocks of a call
        keys = [k and (*k, keep) for k, keep in zip(keys[begin:end], keeps, strict=True)]
    else:
        keys = keys[begin:end]
    inputs: list[Tensor | None] = []
    for i, j in runs(keys, 0, end - begin):
        first, last = blocks.first_unit[begin + i], blocks.first_unit[begin + j]
        keep = keeps is not None and keeps[i]
        if keys[i] is None:
            x, x_statistics, run_inputs = _block_forward(
                kernels, blocks, begin + i, x, x_statistics, statistics, (keep, keeps is not None)
            )
        else:
            known = statistics[first] is not None
            output = cast(BlockKernels, kernels).block_run_forward(
                x,
                blocks.run(begin + i, begin + j),
                x_statistics,
                _flat(statistics[first:last]) if known else None,
                with_stats=_takes_batch(statistics, last),
                keep_inputs=keeps is not None,
                keep_block_inputs=keep,
            )
            if not known:
                found = output.unit_statistics
                statistics[first:last] = [
                    Statistics(mean, var, inv_count_of(x))
                    for mean, var in zip(found[::2], found[1::2], strict=True)
                ]
            x, x_statistics, run_inputs = output.y, output.statistics, output.inputs
        inputs += run_inputs
    return x, x_statistics, inputs


def _flat(statistics: Sequence[Any]) -> list[Tensor]:
    """Mean and variance of each."""
    return [t for s in statistics for t in s[:2]]


def _takes_batch(statistics: Sequence[Statistics | None], unit: int) -> bool:
    """Whether there is such a unit, and its statistics are still those of the batch to come."""
    return unit < len(statistics) and statistics[unit] is None


def _block_forward(
    kernels: Kernels,
    blocks: Blocks,
    index: int,
    x: Tensor,
    x_statistics: BatchStatistics | None,
    statistics: list[Any],
    keeps: tuple[bool, bool],
) -> tuple[Tensor, BatchStatistics | None, list[Tensor | None]]:
    """`forward` of one block, unit by unit; `keeps` its input, and those of its other units."""
    spec, first = blocks.specs[index], blocks.first_unit[index]
    last = first + len(spec.units) - 1
    h = shortcut = x
    keeps_own, keeps_inner = keeps
    inputs: list[Tensor | None] = []
    for unit, u in enumerate(spec.units, first):
        is_kept = keeps_inner if unit > first else keeps_own
        inputs.append(h if is_kept else None)
        found = statistics[unit]
        if found is None:
            found = batch_statistics(kernels, h, u.process_group, x_statistics)
            statistics[unit] = found
        norm = blocks.norm(unit, found)
        if unit == first and spec.shortcut is not None:
            shortcut = kernels.bn_relu_conv_forward(
                x, norm, blocks.shortcuts[index], spec.shortcut
            ).y
        residual = shortcut if unit == last and spec.is_residual else None
        epilogue = Epilogue(residual=residual, with_stats=_takes_batch(statistics, unit + 1))
        h, x_statistics = kernels.bn_relu_conv_forward(
            h, norm, blocks.conv_weight(unit), u.conv, epilogue
        )
    return h, x_statistics, inputs


def rebuilt_input(
    kernels: Kernels, blocks: Blocks, index: int, z: Tensor, statistics: BatchStatistics, y: Tensor
) -> Tensor:
    """The input of a block from its output: `x = y - F(z)`, where F is its last unit.

    One call of the forward's kernel: negating the weights negates each product, and so each sum in
    the same order, to the bit.

    Args:
        kernels: the backend's functions.
        blocks: all blocks.
        index: the block.
        z: input of its last unit.
        statistics: of that unit.
        y: output of the block.
    """
    unit = blocks.first_unit[index + 1] - 1
    norm = blocks.norm(unit, statistics)
    weight, conv = -blocks.conv_weight(unit), blocks.units[unit].conv
    return kernels.bn_relu_conv_forward(z, norm, weight, conv, Epilogue(residual=y)).y


class FoldedGradient(NamedTuple):
    """A gradient that may still be folded: `g` alone, or with `[skip +] A*g + B*x + C`."""

    g: Tensor
    fold: Fold | None = None

    def unfold(self, kernels: Kernels) -> Tensor:
        """The gradient as one tensor."""
        return self.g if self.fold is None else kernels.bn_input_gradient(self.g, self.fold)


class Backward(NamedTuple):
    """What the backward of a span of blocks works on."""

    kernels: Kernels
    blocks: Blocks
    statistics: Sequence[BatchStatistics]  # of every unit
    fixed_inv_counts: Sequence[float | None]  # of every unit: see `Statistics`
    needed: Blocks  # whether the gradient of each tensor is wanted
    gradients: Blocks  # receives them

    def run(
        self,
        span: tuple[int, int],
        inputs: Sequence[Tensor | None],
        y: Tensor | None,
        dy: FoldedGradient,
    ) -> tuple[Tensor, FoldedGradient]:
        """Gradients of a run of plain blocks in one call, where all are wanted.

        Args:
            span: first block, and one past the last.
            inputs: of their units; those of the blocks are None where they are rebuilt from `y`.
            y: output of the last block.
            dy: gradient of `y`.

        Returns:
            The input of the first block, and its gradient.
        """
        begin, end = span
        first, last = self.blocks.first_unit[begin], self.blocks.first_unit[end]
        statistics = self.statistics[first:last]
        inv_count = self._inv_count(first, cast(Tensor, y if inputs[0] is None else inputs[0]))
        found = cast(BlockKernels, self.kernels).block_run_backward(
            dy.g,
            dy.fold,
            self.blocks.run(begin, end),
            inputs,
            _flat(statistics),
            inv_count,
            y if inputs[0] is None else None,
        )
        for unit, conv_weight, sums in zip(
            range(first, last), found.conv_weights, found.sums, strict=True
        ):
            self._set_gradients(unit, conv_weight, sums)
        norm = self.blocks.norm(first, statistics[0])
        fold = Fold(found.dy, found.x, norm, found.sums[0], inv_count)
        return found.x, FoldedGradient(found.g, fold)

    def block(
        self,
        index: int,
        inputs: Sequence[Tensor | None],
        y: Tensor | None,
        dy: FoldedGradient,
        needs_input: bool,
    ) -> tuple[Tensor | None, FoldedGradient]:
        """Gradients of one block, unit by unit.

        Args:
            index: the block.
            inputs: of its units; its own is None where it is rebuilt from `y`.
            y: output of the block.
            dy: gradient of `y`.
            needs_input: whether the gradient of the block's input is wanted.

        Returns:
            The input of the block, and its gradient, undefined where that is not wanted.
        """
        kernels, blocks = self.kernels, self.blocks
        spec, begin = blocks.specs[index], blocks.first_unit[index]
        last = begin + len(spec.units) - 1
        needs_shortcut = bool(self.needed.shortcuts[index])
        first = begin
        if not (needs_input or needs_shortcut):  # begin where there is a gradient to compute
            first = next(u for u in range(begin, last + 1) if any(self._needs(u)))
        x, *inner = inputs
        if x is None and first == begin:
            assert y is not None
            x = rebuilt_input(
                kernels, blocks, index, cast(Tensor, inner[-1]), self.statistics[last], y
            )
        filled: list[Any] = [x, *inner]
        block_dy = dy.g
        for unit in range(last, first - 1, -1):
            h = filled[unit - begin]
            norm = blocks.norm(unit, self.statistics[unit])
            needs_weight, needs_bias, needs_conv_weight = self._needs(unit)
            needs_g = unit > first or needs_input or needs_weight or needs_bias
            needs_dy = unit == last and spec.is_residual and dy.fold is not None
            wanted = Wanted(needs_g, needs_conv_weight, needs_dy)
            g, sums, dconv_weight, unfolded = kernels.bn_relu_conv_backward(
                dy.g, dy.fold, h, norm, blocks.conv_weight(unit), blocks.units[unit].conv, wanted
            )
            if unfolded is not None:
                block_dy = unfolded
            if unit == begin and spec.shortcut is not None and (needs_g or needs_shortcut):
                shortcut = kernels.bn_relu_conv_backward(
                    block_dy,
                    None,
                    h,
                    norm,
                    blocks.shortcuts[index],
                    spec.shortcut,
                    Wanted(needs_g, needs_shortcut),
                )
                self.gradients.shortcuts[index] = shortcut.conv_weight
                if needs_g:
                    g = cast(Tensor, g).to(h.dtype)  # beside a float32 stream, added in float32
                    g.add_(cast(Tensor, shortcut.g))
                    cast(Tensor, sums).add_(cast(Tensor, shortcut.sums))
            self._set_gradients(unit, dconv_weight, sums)
            # Weights take the sums of their own process: only the gradient of `h` needs all.
            if g is not None and sums is not None and (unit > first or needs_input):
                sums = sums_over_group(sums, blocks.units[unit].process_group)
                passes_on = unit == begin and spec.is_residual and spec.shortcut is None
                skip = block_dy if passes_on else None
                dy = FoldedGradient(g, Fold(skip, h, norm, sums, self._inv_count(unit, h)))
        return x, dy

    def _inv_count(self, unit: int, h: Tensor) -> float:
        """`Statistics.inv_count` of a unit with the input `h`."""
        fixed = self.fixed_inv_counts[unit]
        return inv_count_of(h) if fixed is None else fixed

    def _needs(self, unit: int) -> Sequence[bool]:
        return self.needed.parameters[3 * unit : 3 * unit + 3]

    def _set_gradients(self, unit: int, conv_weight: Tensor | None, sums: Tensor | None) -> None:
        dbn_bias, dbn_weight = (None, None) if sums is None else sums.unbind()
        self.gradients.parameters[3 * unit : 3 * unit + 3] = dbn_weight, dbn_bias, conv_weight


def differentiable_forward(
    blocks: Blocks,
    statistics: Sequence[BatchStatistics],
    dtypes: tuple[torch.dtype, torch.dtype],
    h: Tensor,
    start: tuple[int, int],
    output: Tensor | None,
) -> Tensor:
    """The blocks in PyTorch's differentiable operations, for a double backward.

    Args:
        blocks: all blocks.
        statistics: of all units from `start` on.
        dtypes: of the convolutions, and of the residual stream.
        h: input of the unit with which it begins.
        start: the block of that unit, and its number in the block.
        output: of that block, where it begins behind the first unit and other blocks follow: the
            shortcut of the block is constant, and not known.

    Returns:
        The output of the last block.
    """
    dtype, stream = dtypes
    first, skipped = start
    for index, spec in enumerate(blocks.specs[first:], first):
        units = list(enumerate(spec.units, blocks.first_unit[index]))[skipped:]
        x, skipped = None if skipped else h, 0
        for unit, u in units:
            weight = blocks.conv_weight(unit)
            norm = blocks.norm(unit, statistics[unit])
            a = differentiable_bn_relu(h, norm, u.training, u.process_group).to(dtype)
            if h is x and spec.shortcut is not None:
                x = F.conv2d(a, blocks.shortcuts[index].to(dtype), None, *spec.shortcut)
            h = F.conv2d(a, weight.to(dtype), None, *u.conv)
        h = h.to(stream)
        if spec.is_residual and x is not None:
            h = x.to(stream) + h
        elif spec.is_residual and index + 1 < len(blocks.specs):
            h = h + (cast(Tensor, output) - h).detach()
    return h
