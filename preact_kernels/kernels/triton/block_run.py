"""Consecutive pre-activation blocks: three launches per bottleneck forward, four backward.

A kernel reads the statistics of its input from the accumulators that the previous kernel filled.
One launch for all blocks zeroes the accumulators, one packs the weights, and one converts
accumulators to statistics or sums. Gradients of weights are summed for groups of blocks.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    AffineStep,
    BlockRun,
    BlockRunGradients,
    BlockRunOutput,
    Epilogue,
    Gradient,
    Inputs,
    Norm,
    Parameters,
    RunWanted,
    Statistics,
    samples_of,
)
from preact_kernels.kernels.triton.batch_norm import aligned_gradient, kernel_gradient
from preact_kernels.kernels.triton.launch import aligned, on_device_of
from preact_kernels.kernels.triton.reduction import WORDS, finished_statistics, finished_sums
from preact_kernels.kernels.triton.run_units import run_norms, run_units
from preact_kernels.kernels.triton.run_weight_gradients import RunWeightGradients
from preact_kernels.kernels.triton.statistics import bn_stats


class _Accumulators:
    """Zeros `[blocks, 2, 6, channels]` for each unit of a block, in one allocation."""

    def __init__(self, x: Tensor, channels: Sequence[int], blocks: int) -> None:
        sizes = [blocks * 2 * WORDS * c for c in channels]
        pieces = x.new_zeros(sum(sizes), dtype=torch.int64).split(sizes)
        self.units = [p.view(blocks, 2, WORDS, c) for p, c in zip(pieces, channels, strict=True)]
        self.by_unit = [p.unbind() for p in self.units]  # [unit of the block][block]


def _in_order(per_unit: Sequence[Sequence]) -> list:
    """Flattens `[unit of the block][block]` into the order of the units of a run."""
    return [value for block in zip(*per_unit, strict=True) for value in block]


def block_run_forward(run: BlockRun, x: Tensor, wanted: RunWanted) -> BlockRunOutput:
    """See `BlockKernels.block_run_forward`."""
    with on_device_of(x):
        return _forward(run, aligned(x), wanted)


def _forward(run: BlockRun, x: Tensor, wanted: RunWanted) -> BlockRunOutput:
    units = run_units(run, x)
    count, total = len(units), len(run.parameters)
    blocks = total // count
    # The caller gives statistics of all inputs, of x only, or of none.
    statistics = [s for s in run.statistics if s is not None] or [bn_stats(x)]
    given, norms = len(statistics), run_norms(run, statistics)
    is_summing = given < total or wanted.statistics
    sums = _Accumulators(x, [u.forward.sizes.shape.K for u in units], blocks if is_summing else 0)
    inputs: list[Tensor | None] = []
    h, h_sums = x, None
    for block in range(blocks):
        shortcut = h
        for index, unit in enumerate(units):
            is_kept = wanted.unit_inputs if index else wanted.block_inputs[block]
            inputs.append(h if is_kept else None)
            position = block * count + index
            h_sums = None if position < given else h_sums
            is_summed = wanted.statistics if position + 1 == total else position + 1 >= given
            y_sums = sums.by_unit[index][block] if is_summed else None
            epilogue = Epilogue(residual=shortcut) if index + 1 == count else NO_EPILOGUE
            unit_inputs = Inputs(h, norms[position], unit.packed[block])
            h = unit.forward(unit_inputs, h_sums, epilogue, y_sums)
            h_sums = y_sums
    y_statistics = None
    if is_summing:
        finished = [
            finished_statistics(s, unit.forward.sizes.y_pixels, unit.forward.prepared)
            for s, unit in zip(sums.units, units, strict=True)
        ]
        per_unit = [list(map(Statistics, mean.unbind(), var.unbind())) for mean, var in finished]
        *of_inputs, of_y = _in_order(per_unit)
        statistics += of_inputs[given - 1 :]
        y_statistics = of_y if wanted.statistics else None
    return BlockRunOutput(h, y_statistics, statistics, inputs)


def block_run_backward(
    run: BlockRun, dy: Gradient, inputs: Sequence[Tensor | None], y: Tensor | None
) -> BlockRunGradients:
    """See `BlockKernels.block_run_backward`."""
    with on_device_of(dy.g):
        return _backward(run, dy, inputs, y)


def _backward(
    run: BlockRun, dy: Gradient, inputs: Sequence[Tensor | None], y: Tensor | None
) -> BlockRunGradients:
    count, total = len(run.units), len(run.parameters)
    blocks = total // count
    x = cast(Tensor, inputs[total - count]) if y is None else aligned(y)
    units = run_units(run, x)
    rebuilt = [block for block, kept in enumerate(inputs[::count]) if kept is None]
    negated: dict[int, Tensor] = {}
    if rebuilt:
        # x = y - F(z), where F is the last unit: negating its weight negates F(z).
        weights = torch_compat.foreach_neg([units[-1].packed[block] for block in rebuilt])
        negated = dict(zip(rebuilt, weights, strict=True))
    norms = run_norms(run, cast(Sequence[Statistics], run.statistics))
    inv_count = 1 / samples_of(x.shape) if run.units[0].uses_batch else 0.0
    kept = [None if t is None else aligned(t) for t in inputs]
    weight_gradients = [
        RunWeightGradients(unit, blocks, x, is_x_rebuilt=index == 0 and bool(rebuilt))
        for index, unit in enumerate(units)
    ]
    sums = _Accumulators(x, [u.backward.sizes.shape.C for u in units], blocks)
    gradient = kernel_gradient(aligned_gradient(dy))
    block_dy: Tensor | None = None
    for position in reversed(range(total)):
        block, index = divmod(position, count)
        unit, ends_block = units[index], index + 1 == count
        norm, g_sums = norms[position], sums.by_unit[index][block]
        if ends_block and block in negated:  # x is the output of this block
            last = Inputs(cast(Tensor, kept[position]), norm, negated[block])
            x = unit.forward(last, None, Epilogue(residual=x), None)
        h = x if index == 0 and block in negated else cast(Tensor, kept[position])
        if index == 0:
            x = h
        g, whole = unit.backward.input(
            gradient,
            Inputs(h, norm, unit.packed[block]),
            g_sums,
            weight_gradients[index].partials(block),
            needs_whole=ends_block or not unit.backward.in_one_pass,
        )
        if ends_block:
            block_dy = whole
        weight_gradients[index].add(block, whole, h, norm)
        skip = block_dy if index == 0 else None
        gradient = Gradient(g, AffineStep(skip, h, norm, g_sums, inv_count))
    found_sums = _in_order(
        [
            finished_sums(s, unit.backward.prepared).unbind()
            for s, unit in zip(sums.units, units, strict=True)
        ]
    )
    step = cast(AffineStep, gradient.step)
    step = step._replace(norm=Norm(*step.norm[:5], *run.units[0].activation), sums=found_sums[0])
    conv_weights = _in_order([gradients.results() for gradients in weight_gradients])
    parameters = []
    for (dbn_bias, dbn_weight), conv_weight in zip(
        map(Tensor.unbind, found_sums), conv_weights, strict=True
    ):
        parameters.append(Parameters(dbn_weight, dbn_bias, conv_weight))
    return BlockRunGradients(gradient._replace(step=step), parameters)
