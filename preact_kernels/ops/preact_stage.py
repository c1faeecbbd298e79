"""Pre-activation blocks in a row as one autograd node.

The only place that knows what each memory mode (`memory_mode.py`) saves and what runs again.
`block_runs.py` runs the blocks and rebuilds their inputs.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from preact_kernels.kernels.contract import BatchStatistics, Kernels
from preact_kernels.ops import block_runs, layout
from preact_kernels.ops.autocast import has_autocast
from preact_kernels.ops.block_runs import Backward, Blocks, BlockSpec, FoldedGradient
from preact_kernels.ops.bn_relu import gradients
from preact_kernels.ops.memory_mode import MemoryMode
from preact_kernels.ops.plain_operators import runs_plain_backward
from preact_kernels.ops.running_stats import unbiased


class StageCall(NamedTuple):
    """What a call of a stage passes to `PreActStageFunction` beside tensors."""

    kernels: Kernels
    specs: Sequence[BlockSpec]
    memory: MemoryMode
    dtype: torch.dtype  # of the convolutions
    first: int = 0  # block: those before it want no gradient, and save nothing
    skipped: int = 0  # its first units, of which the same holds


class PreActStageFunction(torch.autograd.Function):
    """Blocks in a row, on given tensors.

    Tensor arguments: `x`, `[N, C, H, W]` dense NHWC in the dtype of the residual stream, then the
    values of `Blocks`. Batch-norm parameters are in the statistics dtype; conv weights have the
    dtype of `x`, or a half precision beside a float32 stream, or float32 if the kernels take it.

    Returns `y`, then the mean and then the unbiased variance of each unit that normalised with its
    batch. Saves the statistics and the inputs that the memory mode names, and `y` where the last
    block's input is rebuilt from it. What runs again in the backward uses the same statistics.
    """

    @staticmethod
    def forward(ctx, call, x, *tensors):
        kernels, specs, memory, _, first, skipped = call
        blocks = Blocks(specs, tensors)
        keys = block_runs.run_keys(kernels, blocks, x)
        starts = [first + start for start in memory.segment_starts(len(specs) - first)]
        statistics: list[Any] = blocks.statistics(x)  # the blocks fill them in
        kept, h, h_statistics = [], x, None
        keeps: list[bool] | None = None
        if first:
            span = (0, first)
            h, h_statistics, _ = block_runs.forward(
                kernels, blocks, keys, span, h, None, statistics, None
            )
        for span in itertools.pairwise([*starts, len(specs)]):
            keeps = None
            if memory.name == "checkpoint":
                kept.append(h)
            else:
                keeps = memory.keeps_input([s.can_rebuild for s in specs[slice(*span)]], x.dtype)
            h, h_statistics, inputs = block_runs.forward(
                kernels, blocks, keys, span, h, h_statistics, statistics, keeps
            )
            if keeps is not None:
                kept += inputs
        is_rebuilt_from_y = keeps is not None and not all(keeps[-1:])
        ctx.call, ctx.keys, ctx.starts, ctx.kept_count = call, keys, starts, len(kept)
        ctx.fixed_inv_counts = [
            s.fixed_inv_count(u.training, u.process_group)
            for s, u in zip(statistics, blocks.units, strict=True)
        ]
        ctx.device_type = x.device.type
        batch = unbiased([s for s, u in zip(statistics, blocks.units, strict=True) if u.training])
        outputs = [*(b.mean for b in batch), *(b.var for b in batch)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs)
        kept[:skipped] = [None] * skipped
        unused = blocks.first_unit[first] + skipped
        statistics[:unused] = [(None, None)] * unused
        flat = [t for s in statistics for t in s[:2]]
        ctx.save_for_backward(h if is_rebuilt_from_y else None, *kept, *flat, *tensors)
        return h, *outputs

    @staticmethod
    def backward(ctx, dy, *_):
        if not has_autocast(ctx.device_type):
            return PreActStageFunction._backward(ctx, dy)
        with torch.autocast(ctx.device_type, enabled=False):  # for what runs again
            return PreActStageFunction._backward(ctx, dy)

    @staticmethod
    def _backward(ctx, dy):
        y, *saved = ctx.saved_tensors
        kernels, specs, memory, dtype, first, skipped = ctx.call
        # Lists: Dynamo of torch 2.11 makes `*saved` a tuple.
        kept, saved = list(saved[: ctx.kept_count]), list(saved[ctx.kept_count :])
        count = 2 * len(ctx.fixed_inv_counts)
        tensors = saved[count:]
        if dy is None:
            return None, None, *(None for _ in tensors)
        statistics = list(map(BatchStatistics, saved[:count:2], saved[1:count:2]))
        needs_x, needed = ctx.needs_input_grad[1], ctx.needs_input_grad[2:]
        if runs_plain_backward(dy):
            following = len(specs[first].units)  # the first unit of the next block
            output = kept[following] if skipped and following < len(kept) else None

            def forward(h, *tensors):
                blocks, dtypes = Blocks(specs, tensors), (dtype, dy.dtype)
                return block_runs.differentiable_forward(
                    blocks, statistics, dtypes, h, (first, skipped), output
                )

            return None, *gradients(forward, (kept[skipped], *tensors), (needs_x, *needed), dy)

        state = Backward(
            kernels,
            Blocks(specs, tensors),
            statistics,
            ctx.fixed_inv_counts,
            Blocks(specs, needed),
            Blocks(specs, [None] * len(tensors)),
        )
        first = 0 if needs_x else _first_trained(state.needed)
        keys: list[Any] = [
            key if (needs_x or i > first) and _needs_all(state.needed, i) else None
            for i, key in enumerate(ctx.keys)
        ]
        first_unit, stream = state.blocks.first_unit, dy.dtype
        gradient, end = FoldedGradient(layout.nhwc(dy)), len(specs)
        for start in reversed(ctx.starts):
            if end <= first:
                break
            inputs, origin = kept, first_unit[start]
            if memory.name == "checkpoint":
                keeps = memory.keeps_input([s.can_rebuild for s in specs[start:end]], stream)
                x, span = kept.pop(), (start, end)
                y, _, inputs = block_runs.forward(
                    kernels, state.blocks, ctx.keys, span, x, None, statistics, keeps
                )
                del x
            for i in range(start, end):  # a run keeps the inputs of all its blocks, or of none
                if keys[i] is not None:
                    keys[i] = (*keys[i], inputs[first_unit[i] - origin] is not None)
            for i, j in reversed(list(block_runs.runs(keys, start, end))):
                if j <= first:
                    break
                at = first_unit[i] - origin
                if keys[i] is None:
                    needs_input = needs_x or i > first
                    y, gradient = state.block(i, inputs[at:], y, gradient, needs_input)
                else:
                    y, gradient = state.run((i, j), inputs[at:], y, gradient)
                del inputs[at:]
            end = start
        grads = state.gradients.flat()
        return (
            None,
            gradient.unfold(kernels) if needs_x else None,
            *(g if n else None for g, n in zip(grads, needed, strict=True)),
        )


def _needs_all(needed: Blocks, index: int) -> bool:
    """Whether every gradient of a block is wanted."""
    first, last = needed.first_unit[index : index + 2]
    return all(needed.parameters[3 * first : 3 * last])


def _first_trained(needed: Blocks) -> int:
    """Index of the first block with a gradient to compute."""
    for index, shortcut in enumerate(needed.shortcuts):
        first, last = needed.first_unit[index : index + 2]
        if shortcut or any(needed.parameters[3 * first : 3 * last]):
            return index
    raise AssertionError("a backward without a gradient to compute")
