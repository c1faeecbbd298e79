"""Pre-activation blocks in a row: three launches forward and three backward for a bottleneck.

A kernel reads the sums of the tensor that it normalises where the kernel before left them, as exact
accumulators. What is launched once for all blocks: zeros for the accumulators, weights in the order
that kernels read, and the results for Python. Gradients of weights wait, so that one launch serves
many blocks: the blocks of a run are cut into at most `_GROUPS` groups.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels.contract import (
    BatchStatistics,
    BlockRun,
    BlockRunGradients,
    BlockRunOutput,
    Conv,
    Fold,
    Norm,
)
from preact_kernels.kernels.pytorch_conv import compute_dtype
from preact_kernels.kernels.triton.bn_relu_conv_backward import BackwardLaunch
from preact_kernels.kernels.triton.bn_relu_conv_forward import (
    NO_ADDENDS,
    Addends,
    ForwardLaunch,
)
from preact_kernels.kernels.triton.bn_stats import bn_stats
from preact_kernels.kernels.triton.configurations import ConvDtypes
from preact_kernels.kernels.triton.conv import NONE, precision
from preact_kernels.kernels.triton.launch import (
    LaunchContext,
    aligned,
    aligned_rows,
    all_aligned,
    ceil_div,
    launch_context,
    on_device_of,
)
from preact_kernels.kernels.triton.packing import is_packed, pack_weights
from preact_kernels.kernels.triton.reduction import (
    WORDS,
    finished_statistics,
    finished_sums,
    launch_sum_partials,
)
from preact_kernels.kernels.triton.weight_gradient import WeightUnit, new_weight_gradients

_GROUPS = 8  # more take less memory, fewer take fewer launches
_SMALLEST_GROUP = 4
_LARGEST_GROUP = 64  # of 56 bytes a block in the arguments of a launch, which are at most 4 KB


class UnitOfBlock(NamedTuple):
    """One unit of every block: the first of each, say. Lists have an entry for each block."""

    conv_weights: list[Tensor]  # as given
    packed: list[Tensor]  # `[K, R, S, C]` in the dtype of the products
    affine: list[tuple[Tensor, Tensor, float]]  # weight, bias and eps of the batch norms
    forward: ForwardLaunch
    backward: BackwardLaunch

    @property
    def channels(self) -> int:
        """Input channels."""
        return self.conv_weights[0].shape[1]

    @property
    def out_channels(self) -> int:
        """Output channels."""
        return self.conv_weights[0].shape[0]


def _group(blocks: int) -> int:
    """How many blocks of a run are in a group; the last group may have fewer."""
    group = max(_SMALLEST_GROUP, ceil_div(blocks, _GROUPS))
    return min(blocks, group, _LARGEST_GROUP)


def _packed(conv_weights: Sequence[Tensor], launch: ForwardLaunch) -> list[Tensor]:
    """The weights as `launch` takes them: those given, or copies."""
    dtype = launch.dtypes.operands
    if all(is_packed(w, dtype) for w in conv_weights):
        return list(all_aligned(conv_weights))
    return pack_weights(conv_weights, dtype, launch.prepared)


def _conv_dtypes(run: BlockRun, x: Tensor) -> tuple[ConvDtypes, ...]:
    """The dtypes of the convolutions of a block, of which `x` is an input."""
    inner = run.dtype or compute_dtype(x, run.parameters[2])
    outer = [x.dtype, *[inner] * (run.units_per_block - 1), x.dtype]
    return tuple(ConvDtypes(inner, *sides) for sides in itertools.pairwise(outer))


def _units_of_block(run: BlockRun, x: Tensor) -> list[UnitOfBlock]:
    """The units of the blocks, with packed weights; `x` is an input of a block."""
    bn_weights, bn_biases = (all_aligned(run.parameters[i::3]) for i in (0, 1))
    weights, count = run.parameters[2::3], run.units_per_block
    eps = map(float, run.eps)  # Triton compiles another kernel for an int
    affine = list(zip(bn_weights, bn_biases, eps, strict=True))
    return [
        UnitOfBlock(
            list(weights[i::count]),
            _packed(weights[i::count], forward),
            affine[i::count],
            forward,
            backward,
        )
        for i, (forward, backward) in enumerate(_launches(_run_key(run, x)))
    ]


def _forward_launches(
    like: Tensor,
    dtypes: Sequence[ConvDtypes],
    shape: Sequence[int],
    weights: Sequence[Sequence[int]],
    convs: Sequence[Conv],
) -> list[ForwardLaunch]:
    """The forward launches of a block: for an input of `shape` and weights of the shapes given."""
    launches: list[ForwardLaunch] = []
    for of, weight, conv in zip(dtypes, weights, convs, strict=True):
        launches.append(ForwardLaunch(like, of, shape, weight, conv, {}))
        shape = launches[-1].shape
    return launches


def _backward_launches(
    like: Tensor, shape: Sequence[int], forward: Sequence[ForwardLaunch]
) -> list[BackwardLaunch]:
    """The backward launches of a block, of which dy is stored unfolded for the next block."""
    launches: list[BackwardLaunch] = []
    for of in forward:
        is_last = len(launches) + 1 == len(forward)
        launches.append(
            BackwardLaunch(like, of.dtypes, shape, of.shape, of.weight_shape, of.conv, is_last, {})
        )
        shape = of.shape
    return launches


class _RunKey(NamedTuple):
    """What the launches of a run depend on, except which optional tensors are None.

    All blocks have the dtypes and shapes of the first; dtypes of other tensors follow from these.
    """

    context: LaunchContext
    dtypes: tuple[ConvDtypes, ...]  # of one block
    parameter_dtypes: tuple[torch.dtype, ...]  # of one block
    precision: str
    x: Sequence[int]
    weights: tuple[Sequence[int], ...]  # shapes
    convs: tuple[Conv, ...]


def _run_key(run: BlockRun, x: Tensor) -> _RunKey:
    of_block = run.parameters[: 3 * run.units_per_block]
    dtypes = _conv_dtypes(run, x)
    return _RunKey(
        launch_context(x),
        dtypes,
        tuple(p.dtype for p in of_block),
        precision(dtypes[0].operands),
        x.shape,
        tuple(w.shape for w in of_block[2::3]),
        tuple(run.convs),
    )


@functools.lru_cache(maxsize=256)
def _launches(key: _RunKey) -> list[tuple[ForwardLaunch, BackwardLaunch]]:
    """The launches of a block of runs with this key, which share prepared launches."""
    like = torch.empty(0, device=key.context.device)
    forward = _forward_launches(like, key.dtypes, key.x, key.weights, key.convs)
    return list(zip(forward, _backward_launches(like, key.x, forward), strict=True))


class _Accumulators:
    """Zeros `[blocks, 2, 6, channels]` for every unit of a block, in one piece of memory."""

    def __init__(self, x: Tensor, channels: Sequence[int], blocks: int) -> None:
        sizes = [blocks * 2 * WORDS * c for c in channels]
        pieces = x.new_zeros(sum(sizes), dtype=torch.int64).split(sizes)
        self.units = [p.view(blocks, 2, WORDS, c) for p, c in zip(pieces, channels, strict=True)]
        self.by_unit = [p.unbind() for p in self.units]  # [unit of the block][block]


def block_run_forward(
    x: Tensor,
    run: BlockRun,
    x_statistics: BatchStatistics | None,
    known: Sequence[Tensor] | None,
    *,
    with_stats: bool,
    keep_inputs: bool,
    keep_block_inputs: bool,
) -> BlockRunOutput:
    """See `BlockKernels.block_run_forward`."""
    with on_device_of(x):
        return _forward(x, run, x_statistics, known, with_stats, keep_inputs, keep_block_inputs)


def _forward(
    x: Tensor,
    run: BlockRun,
    x_statistics: BatchStatistics | None,
    known: Sequence[Tensor] | None,
    with_stats: bool,
    keep_inputs: bool,
    keep_block_inputs: bool,
) -> BlockRunOutput:
    units, blocks = _units_of_block(run, x), len(run.eps) // run.units_per_block
    x = aligned(x)
    if known is None and x_statistics is None:
        x_statistics = bn_stats(x)
    given = all_aligned(cast(BatchStatistics, x_statistics) if known is None else known)
    is_summing = known is None or with_stats
    sums = _Accumulators(x, [u.out_channels for u in units], blocks if is_summing else 0)
    inputs: list[Tensor | None] = []
    h, h_sums = x, None
    count = len(units)
    for block in range(blocks):
        shortcut = h
        for index, unit in enumerate(units):
            inputs.append(h if (keep_inputs if index else keep_block_inputs) else None)
            mean = var = NONE
            if h_sums is None:
                position = block * count + index
                mean, var = given[2 * position : 2 * position + 2]
            norm = Norm(mean, var, *unit.affine[block])
            ends_block = index + 1 == count
            is_summed = with_stats if ends_block and block + 1 == blocks else known is None
            y_sums = sums.by_unit[index][block] if is_summed else None
            addends = Addends(None, shortcut) if ends_block else NO_ADDENDS
            h = unit.forward(h, norm, h_sums, unit.packed[block], addends, y_sums)
            h_sums = y_sums
    statistics, found = None, list(known or ())
    if is_summing:
        finished = [
            finished_statistics(s, unit.forward.pixels, unit.forward.prepared)
            for s, unit in zip(sums.units, units, strict=True)
        ]
        rows = [(mean.unbind(), var.unbind()) for mean, var in finished]  # of each block
        flat = [t for b in range(blocks) for mean, var in rows for t in (mean[b], var[b])]
        if with_stats:
            statistics = BatchStatistics(*flat[-2:])
        if known is None:
            found = [*cast(BatchStatistics, x_statistics), *flat[:-2]]
    return BlockRunOutput(h, statistics, found, inputs)


class _WeightGradients:
    """Gradients of the weights of one unit of a block, summed over programs for a group at once.

    Blocks come from the last to the first.
    """

    def __init__(self, unit: UnitOfBlock, blocks: int, x: Tensor) -> None:
        launch = self._launch = unit.backward
        group = self._group = _group(blocks)
        programs = launch.input_programs if launch.in_one_pass else launch.weight_programs
        shape = group, programs, launch.weights
        if launch.in_one_pass:  # each launch is given a slot
            rows = aligned_rows(x, group, programs * launch.weights, torch.float32)
            self._partials = rows.view(shape)
        else:
            self._partials = x.new_empty(shape, dtype=torch.float32)
        self._slots = self._partials.unbind()
        self._results = new_weight_gradients(unit.conv_weights[0], blocks)
        self._units: list[WeightUnit] = []  # of this group, where a launch of its own reads them
        self._begin_group(blocks)

    def _begin_group(self, end: int) -> None:
        self._begin, self._end = max(0, end - self._group), end

    def partials(self, block: int) -> Tensor | None:
        """Where the kernel of a block stores partial results; None if it has none."""
        return self._slots[block - self._begin] if self._launch.in_one_pass else None

    def add(self, block: int, dy: Tensor | None, x: Tensor, norm: Norm) -> None:
        """Call after each block's input kernel; launches what ends a group."""
        if not self._launch.in_one_pass:
            self._units.append(WeightUnit(cast(Tensor, dy), x, norm))
        if block > self._begin:
            return
        if self._units:
            self._launch.weight(self._units[::-1], self._partials, self._group)
            self._units = []
        count = self._end - self._begin
        results = self._results[self._begin : self._end]
        launch_sum_partials(self._partials[:count], results, self._launch.prepared)
        self._begin_group(self._begin)

    def results(self) -> list[Tensor]:
        """The gradients of all blocks."""
        return list(self._results.unbind())


def block_run_backward(
    dy: Tensor,
    fold: Fold | None,
    run: BlockRun,
    inputs: Sequence[Tensor | None],
    statistics: Sequence[Tensor],
    inv_count: float,
    y: Tensor | None,
) -> BlockRunGradients:
    """See `BlockKernels.block_run_backward`."""
    with on_device_of(dy):
        return _backward(dy, fold, run, inputs, statistics, inv_count, y)


def _backward(
    dy: Tensor,
    fold: Fold | None,
    run: BlockRun,
    inputs: Sequence[Tensor | None],
    statistics: Sequence[Tensor],
    inv_count: float,
    y: Tensor | None,
) -> BlockRunGradients:
    count, blocks = run.units_per_block, len(run.eps) // run.units_per_block
    x = cast(Tensor, inputs[0]) if y is None else aligned(y)
    units = _units_of_block(run, x)
    negated: Sequence[Tensor] = ()
    if y is not None:
        # Negating the weights of a block's last unit negates each product, and so each sum.
        negated = torch_compat.foreach_neg(units[-1].packed)
    statistics = all_aligned(statistics)
    kept = [None if t is None else aligned(t) for t in inputs]
    gradients = [_WeightGradients(unit, blocks, x) for unit in units]
    sums = _Accumulators(x, [u.channels for u in units], blocks)
    g = block_dy = aligned(dy)
    for position in range(count * blocks - 1, -1, -1):
        block, index = divmod(position, count)
        unit = units[index]
        mean, var = statistics[2 * position : 2 * position + 2]
        norm = Norm(mean, var, *unit.affine[block])
        g_sums = sums.by_unit[index][block]
        ends_block = index + 1 == count
        if ends_block and y is not None:  # x is the output of this block
            z = cast(Tensor, kept[position])
            x = unit.forward(z, norm, None, negated[block], Addends(None, x), None)
        h = x if index == 0 and y is not None else cast(Tensor, kept[position])
        g, whole = unit.backward.input(
            g,
            fold,
            h,
            norm,
            unit.packed[block],
            g_sums,
            gradients[index].partials(block),
            needs_whole=ends_block or not unit.backward.in_one_pass,
        )
        if ends_block:
            block_dy = whole
        gradients[index].add(block, whole, h, norm)
        skip = block_dy if index == 0 else None
        fold = Fold(skip, h, norm, g_sums, inv_count)
    results = [g.results() for g in gradients]
    found = [
        finished_sums(s, unit.backward.prepared).unbind()
        for s, unit in zip(sums.units, units, strict=True)
    ]
    return BlockRunGradients(
        g,
        block_dy,
        h,
        [gradient for of_block in zip(*results, strict=True) for gradient in of_block],
        [of_unit for of_block in zip(*found, strict=True) for of_unit in of_block],
    )
