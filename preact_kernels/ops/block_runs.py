"""Runs of pre-activation blocks, forward and backward, on the kernels of one backend.

The only place that knows how statistics pass from the kernel that writes a tensor to the one
that normalises it, and how gradients pass folded from unit to unit; but for a backend that runs
plain blocks in one call, which does both the same way (tests/test_preact_stage.py holds the two
together, bit by bit). What is kept between forward and backward is `preact_stage.py`'s to say.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.ops.bn_relu import differentiable_bn_relu
from preact_kernels.ops.bn_relu_conv import WHOLE_GRADIENT
from preact_kernels.ops.bn_stats import Statistics, statistics_of, sums_over_group

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

    @property
    def can_rebuild(self) -> bool:
        """Whether the block's input follows from its output and the input of its last unit."""
        return self.shortcut is None and len(self.units) > 1


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


def unflatten(blocks: Sequence[Block], flat: Sequence[Tensor | None]) -> list[BlockTensors]:
    """The flat list of all tensors, block by block."""
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


def bounds_of(blocks: Sequence[Block]) -> list[int]:
    """Where the tensors of each block begin in the flat list, and its end."""
    sizes = [len(UnitTensors._fields) * len(b.units) + 1 for b in blocks]
    return [0, *itertools.accumulate(sizes)]


def native_kind(kernels, block: Block, tensors: BlockTensors) -> tuple[int, bool] | None:
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


def runs_of(kinds: Sequence[tuple | None]) -> list[tuple[int, int]]:
    """Begin and end of each run of blocks of one kind; a block of no kind is a run of its own."""
    runs, begin = [], 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] is None or kinds[i] != kinds[begin]:
            runs.append((begin, i))
            begin = i
    return runs


def blocks_forward(
    kernels,
    blocks: Sequence[Block],
    tensors: Sequence[BlockTensors],
    x: Tensor,
    known: Sequence[Statistics] | None,
    carried: tuple[Tensor, Tensor] | None,
    with_stats: bool,
    keeps: Sequence[bool] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, list[Tensor | None], list[Statistics]]:
    """Runs blocks in a row, as few calls as the backend allows.

    Args:
        kernels: the backend's functions.
        blocks: their numbers.
        tensors: their tensors.
        x: the input of the first.
        known: the statistics of every unit when this is a recomputation.
        carried: mean and variance of `x`, where known.
        with_stats: whether mean and variance of the output are wanted.
        keeps: for every block whether its input is wanted beside those of its other units; None
            where no input is.

    Returns:
        The output, its mean and variance or None, the inputs of all units, None where a block's is
        not wanted, and the statistics of every unit.
    """
    kinds = [native_kind(kernels, b, t) for b, t in zip(blocks, tensors, strict=True)]
    if keeps is not None:  # the same for all blocks of a call
        kinds = [k and (*k, is_kept) for k, is_kept in zip(kinds, keeps, strict=True)]
    inputs, statistics, at = [], [], 0
    for begin, end in runs_of(kinds):
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
            None if keeps is None else keeps[begin],
        )
        inputs += run_inputs
        statistics += run_statistics
        at += units
    return x, carried, inputs, statistics


def _parameters(tensors: Sequence[BlockTensors]) -> list[Tensor]:
    """What the native calls take of every unit, in one list."""
    return [p for t in tensors for u in t.units for p in u[:3]]


def _native_forward(kernels, blocks, tensors, x, known, carried, with_stats, keep):
    """`blocks_forward` in one call, for blocks of one kind that `keep` their inputs alike."""
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
        keep is not None,
        keep is True,
    )
    if not known:
        inv_count = 1.0 / (x.shape[0] * x.shape[2] * x.shape[3])
        known = [Statistics(*rest[2 * i : 2 * i + 2], inv_count) for i in range(len(units))]
        rest = rest[2 * len(units) :]
    if keep is False:
        for first in range(0, len(units), len(blocks[0].units)):
            rest.insert(first, None)
    return y, (mean, var) if with_stats else None, rest, known


def _block_forward(kernels, blocks, tensors, x, known, carried, with_stats, keep):
    """`blocks_forward` unit by unit, for one block."""
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
        if keep is not None:
            inputs.append(h if keep or index > 0 else None)
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


def rebuilt_input(
    kernels, block: Block, tensors: BlockTensors, z: Tensor, stats: Statistics, y: Tensor
) -> Tensor:
    """The input of a block out of its output: `x = y - F(z)`, F being its last unit.

    One call of the forward's kernel: with the weights negated each product, and so each sum in the
    same order, is the forward's with its sign changed, to the bit.

    Args:
        kernels: the backend's functions.
        block: its numbers.
        tensors: its tensors.
        z: the input of its last unit.
        stats: the statistics of that.
        y: the output of the block.
    """
    unit, t = block.units[-1], tensors.units[-1]
    norm = (stats.mean, stats.var, t.bn_weight, t.bn_bias, unit.eps)
    x, _, _ = kernels.bn_relu_conv_forward(z, *norm, -t.conv_weight, None, y, *unit.conv, False)
    return x


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


def native_backward(kernels, blocks, tensors, inputs, statistics, y, arriving, needed, needs_input):
    """`block_backward` in one call for several blocks, every gradient of which is wanted.

    The inputs of all blocks are kept, or those of all are rebuilt.
    """
    units = [u for b in blocks for u in b.units]
    negated = ()
    if inputs[0] is None:
        negated = torch._foreach_neg([t.units[-1].conv_weight for t in tensors])
    g, dy, x, *rest = kernels.preact_stage_backward(
        arriving.g,
        *arriving.fold,
        [h for h in inputs if h is not None],
        [t for s in statistics for t in s[:2]],
        _parameters(tensors),
        [u.eps for u in units],
        statistics[0].inv_count,
        len(blocks[0].units),
        y if negated else None,
        negated,
    )
    grads = []
    for i in range(len(units)):
        dbn_bias, dbn_weight = rest[2 * i + 1].unbind()
        grads += (dbn_weight, dbn_bias, rest[2 * i], None, None)
        if (i + 1) % len(blocks[0].units) == 0:
            grads.append(None)
    first, weight = statistics[0], tensors[0].units[0].bn_weight
    fold = (dy, x, first.mean, first.var, weight, units[0].eps, rest[1], first.inv_count)
    return x, Pending(g, fold), grads


def block_backward(
    kernels,
    blocks: Sequence[Block],
    tensors: Sequence[BlockTensors],
    inputs: Sequence[Tensor | None],
    statistics: Sequence[Statistics],
    y: Tensor | None,
    arriving: Pending,
    needed: Sequence[BlockTensors],
    needs_input: bool,
) -> tuple[Tensor, Pending | None, list[Tensor | None]]:
    """Gradients of one block, unit by unit.

    Args:
        kernels: the backend's functions.
        blocks: the numbers of the block.
        tensors: its tensors.
        inputs: of its units; None for its own input where that is to be rebuilt.
        statistics: of its units.
        y: its output, to rebuild its input from.
        arriving: the gradient of that.
        needed: which gradients are wanted.
        needs_input: whether that of its input is.

    Returns:
        The input of the block, the gradient of that, still folded, and those of its tensors, in
        their flat order. Between units too the gradient stays folded.
    """
    (block,), (tensors,), (needed,) = blocks, tensors, needed
    x, *inner = inputs
    if x is None:
        x = rebuilt_input(kernels, block, tensors, inner[-1], statistics[-1], y)
    inputs = [x, *inner]
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
    return x, arriving if needs_input else None, [*grads, dshortcut]


def differentiable_forward(blocks, tensors, statistics, x: Tensor) -> Tensor:
    """The blocks in PyTorch's differentiable operations: what a double backward goes through."""
    statistics, stream = iter(statistics), x.dtype
    for block, t in zip(blocks, tensors, strict=True):
        h = x
        for index, unit in enumerate(block.units):
            u, s = t.units[index], next(statistics)
            a = differentiable_bn_relu(
                h, u.bn_weight, u.bn_bias, s.mean, s.var, unit.training, unit.eps,
                unit.process_group,
            ).to(u.conv_weight.dtype)  # fmt: skip
            if index == 0 and block.shortcut is not None:
                x = F.conv2d(a, t.shortcut, None, *block.shortcut)
            h = F.conv2d(a, u.conv_weight, None, *unit.conv)
        x = x.to(stream) + h.to(stream)
    return x
