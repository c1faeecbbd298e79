"""A list of pre-activation blocks as one autograd node.

The only place that knows what each memory mode (`memory_mode.py`) keeps and what runs again; how
blocks run, and rebuild their inputs, is in `block_runs.py`.
"""

import bisect
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from preact_kernels.ops import layout, schema
from preact_kernels.ops.autocast import has_autocast
from preact_kernels.ops.block_runs import (
    Block,
    BlockTensors,
    Pending,
    block_backward,
    blocks_forward,
    bounds_of,
    differentiable_forward,
    native_backward,
    native_kind,
    runs_of,
    unflatten,
)
from preact_kernels.ops.bn_relu import gradients
from preact_kernels.ops.bn_stats import Statistics, unbiased_variances
from preact_kernels.ops.memory_mode import STORE, MemoryMode
from preact_kernels.ops.mixed_precision import MixedKernels


def _kernels_for(x: Tensor, tensors: Sequence[BlockTensors]):
    """The backend's functions, for a residual stream that may be wider than the convolutions."""
    kernels, weight = schema.kernels_for(x), tensors[0].units[0].conv_weight
    if weight.dtype == x.dtype:
        return kernels
    return MixedKernels(kernels, schema.kernels_for(weight) if x.numel() else kernels, x.dtype)


class PreActStageFunction(torch.autograd.Function):
    """All blocks; further outputs: means, then unbiased variances, of units that took a batch's.

    Kept for the backward: statistics, and the inputs that `MemoryMode` says; the output too where
    the last block's input is rebuilt from it. What runs again does so from the same statistics.
    """

    @staticmethod
    def forward(ctx, x, blocks, memory, *flat):
        tensors = unflatten(blocks, flat)
        kernels = _kernels_for(x, tensors)
        starts = memory.segment_starts(len(blocks))
        kept, statistics, h, carried = [], [], x, None
        for begin, end in itertools.pairwise([*starts, len(blocks)]):
            keeps = None
            if memory.name == "checkpoint":
                kept.append(h)
            else:
                keeps = memory.keeps_input([b.can_rebuild for b in blocks[begin:end]], x.dtype)
            h, carried, inputs, segment_statistics = blocks_forward(
                kernels, blocks[begin:end], tensors[begin:end], h, None, carried,
                end < len(blocks) and blocks[end].units[0].training, keeps,
            )  # fmt: skip
            kept += inputs
            statistics += segment_statistics
        is_rebuilt_from_y = keeps is not None and not keeps[-1]
        ctx.kernels, ctx.blocks, ctx.memory, ctx.starts = kernels, blocks, memory, starts
        ctx.inv_counts = [s.inv_count for s in statistics]
        ctx.kept_count = len(kept)
        of_batch = [s for s in statistics if s.inv_count]
        outputs = [s.mean for s in of_batch] + unbiased_variances(of_batch)
        ctx.device_type = x.device.type
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs)
        ctx.save_for_backward(
            h if is_rebuilt_from_y else None,
            *kept, *(t for s in statistics for t in s[:2]), *flat,
        )  # fmt: skip
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
        blocks, kernels = ctx.blocks, ctx.kernels
        unit_count = len(ctx.inv_counts)
        # A list: Dynamo of torch 2.11 makes `*saved` a tuple.
        kept, rest = list(saved[: ctx.kept_count]), saved[ctx.kept_count :]
        flat = rest[2 * unit_count :]
        none = (None,) * 3
        if dy is None:
            return *none, *(None for _ in flat)
        tensors = unflatten(blocks, flat)
        statistics = [
            Statistics(rest[2 * i], rest[2 * i + 1], ctx.inv_counts[i]) for i in range(unit_count)
        ]
        needs_x, flat_needed = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            # Under names of their own, as one tensor may have several places.
            x, *flat = (None if t is None else t.view_as(t) for t in (kept[0], *flat))
            tensors = unflatten(blocks, flat)
            y = differentiable_forward(blocks, tensors, statistics, x)
            dx, *grads = gradients(y, (x, *flat), (needs_x, *flat_needed), dy)
            return dx, *none[1:], *grads

        needed = unflatten(blocks, flat_needed)
        bounds = bounds_of(blocks)
        unit_bounds = [0, *itertools.accumulate(len(b.units) for b in blocks)]
        first = 0 if needs_x else bisect.bisect(bounds, flat_needed.index(True)) - 1
        # Where every gradient is wanted.
        kinds = [
            native_kind(kernels, blocks[i], tensors[i])
            if (needs_x or i > first) and all(w for u in needed[i].units for w in u[:3])
            else None
            for i in range(len(blocks))
        ]
        grads = [None] * len(flat)
        stream = kept[0].dtype
        arriving = Pending(layout.nhwc(dy))
        end = len(blocks)
        for start in reversed(ctx.starts):
            if end <= first:
                break
            origin = unit_bounds[start]
            inputs = kept
            if ctx.memory.name == "checkpoint":
                can_rebuild = [b.can_rebuild for b in blocks[start:end]]
                y, _, inputs, _ = blocks_forward(
                    kernels, blocks[start:end], tensors[start:end], kept.pop(),
                    statistics[origin : unit_bounds[end]], None, False,
                    ctx.memory.keeps_input(can_rebuild, stream),
                )  # fmt: skip
            runs = runs_of([
                kinds[i] and (*kinds[i], inputs[unit_bounds[i] - origin] is None)
                for i in range(start, end)
            ])  # fmt: skip
            for i, j in reversed(runs):
                i, j = start + i, start + j
                if j <= first:
                    break
                begin = unit_bounds[i] - origin
                backward = block_backward if kinds[i] is None else native_backward
                y, arriving, grads[bounds[i] : bounds[j]] = backward(
                    kernels, blocks[i:j], tensors[i:j], inputs[begin:],
                    statistics[unit_bounds[i] : unit_bounds[j]], y, arriving, needed[i:j],
                    needs_x or i > first,
                )  # fmt: skip
                del inputs[begin:]
            end = start
        return (
            arriving.whole(kernels) if needs_x else None,
            *none[1:],
            *(g if n else None for g, n in zip(grads, flat_needed, strict=True)),
        )


def preact_stage(
    x: Tensor,
    blocks: Sequence[Block],
    tensors: Sequence[Tensor | None],
    memory: MemoryMode = STORE,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Runs `blocks` on `x` as one autograd node.

    Args:
        x: `[N, C, H, W]`; any strides; its dtype is that of the residual stream.
        blocks: numbers of every block.
        tensors: the fields of `BlockTensors` of every block in one list: batch-norm parameters
            in the statistics dtype, weights in the dtype of `x`, or all in a half precision beside
            a float32 stream.
        memory: what is kept for the backward.

    Returns:
        `[N, C', H', W']` in the dtype and memory format of `x`, and mean and unbiased variance of
        every unit that normalised with its batch, in order.
    """
    channels_last = layout.is_channels_last(x) or any(
        layout.is_channels_last(t) for t in tensors if t is not None and t.dim() == 4
    )
    y, *of_batch = PreActStageFunction.apply(layout.nhwc(x), blocks, memory, *tensors)
    count = len(of_batch) // 2
    return layout.restored(y, channels_last), list(
        zip(of_batch[:count], of_batch[count:], strict=True)
    )
