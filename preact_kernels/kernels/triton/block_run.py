"""Pre-activation blocks in a row: three launches forward and three backward for a bottleneck.

A kernel reads the sums of the tensor that it normalises where the kernel before left them, as exact
accumulators. What is launched once for all blocks: zeros for the accumulators, weights in the order
that kernels read, and the results for Python. Gradients of weights wait, so that one launch serves
many blocks: the blocks of a run are cut into at most `_GROUPS` groups.
"""

import math
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
from preact_kernels.kernels.triton.batch_norm import KernelNorm
from preact_kernels.kernels.triton.bn_relu_conv_backward import (
    BackwardLaunch,
    WeightUnit,
    new_weight_gradients,
)
from preact_kernels.kernels.triton.bn_relu_conv_forward import Addends, ForwardLaunch
from preact_kernels.kernels.triton.bn_stats import bn_stats
from preact_kernels.kernels.triton.configurations import ConvDtypes
from preact_kernels.kernels.triton.conv import precision
from preact_kernels.kernels.triton.launch import (
    ceil_div,
    compile_only,
    on_device_of,
)
from preact_kernels.kernels.triton.packing import is_packed, pack_weights
from preact_kernels.kernels.triton.reduction import (
    WORDS,
    finished_statistics,
    finished_sums,
    launch_sum_partials,
)

_GROUPS = 8  # more take less memory, fewer take fewer launches
_SMALLEST_GROUP = 4


class Place(NamedTuple):
    """A unit of each block: what is the same for all blocks."""

    conv_weights: list[Tensor]  # of all blocks, as given
    packed: list[Tensor]  # `[K, R, S, C]` in the dtype of the products
    conv: Conv
    dtypes: ConvDtypes

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
    return min(blocks, max(_SMALLEST_GROUP, ceil_div(blocks, _GROUPS)))


def _aligned(t: Tensor) -> Tensor:
    """The tensor, beginning where 16-byte loads of its channels may begin, if need be as a copy.

    Launches of a known kernel rely on it. Of one channel, loads run along the pixels.
    """
    at = t.data_ptr() % 16
    if at == 0:
        return t
    channels = t.shape[1] if t.dim() == 4 else t.shape[0]
    if channels > 1 and at % math.gcd(16, channels * t.itemsize) == 0:
        return t
    return t.clone(memory_format=torch.preserve_format)


def _packed(conv_weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The weights, dense in the order K, R, S, C, in `dtype`; those given where they are so."""
    if all(is_packed(w, dtype) for w in conv_weights):
        return [_aligned(w) for w in conv_weights]
    return pack_weights(conv_weights, dtype)


def _places(run: BlockRun, x: Tensor) -> list[Place]:
    """The places of a block, with packed weights; `x` is an input of a block."""
    weights, count = run.parameters[2::3], run.units_per_block
    operands = run.dtype or compute_dtype(x, weights[0])
    return [
        Place(
            list(weights[i::count]),
            _packed(weights[i::count], operands),
            run.convs[i],
            ConvDtypes(
                operands,
                x.dtype if i == 0 else operands,
                x.dtype if i + 1 == count else operands,
            ),
        )
        for i in range(count)
    ]


def _forward_launches(places: Sequence[Place], x: Tensor) -> list[ForwardLaunch]:
    launches: list[ForwardLaunch] = []
    for place in places:
        shape = launches[-1].shape if launches else x.shape
        weight_shape = place.conv_weights[0].shape
        launches.append(ForwardLaunch(x, place.dtypes, shape, weight_shape, place.conv))
    return launches


class _Accumulators:
    """Zeros `[blocks, 2, 6, channels]` for every place, in one piece of memory."""

    def __init__(self, x: Tensor, channels: Sequence[int], blocks: int) -> None:
        sizes = [blocks * 2 * WORDS * c for c in channels]
        pieces = x.new_zeros(sum(sizes), dtype=torch.int64).split(sizes)
        self.places = [p.view(blocks, 2, WORDS, c) for p, c in zip(pieces, channels, strict=True)]
        self.of = [p.unbind() for p in self.places]  # [place][block]


def _affine(run: BlockRun, unit: int) -> tuple[Tensor, Tensor, float]:
    """Weight, bias and eps of a unit's batch norm."""
    bn_weight, bn_bias = run.parameters[3 * unit : 3 * unit + 2]
    return _aligned(bn_weight), _aligned(bn_bias), float(run.eps[unit])  # Triton types an int


def _known_norm(statistics: Sequence[Tensor], affine: tuple[Tensor, Tensor, float]) -> KernelNorm:
    mean, var = statistics
    return KernelNorm(_aligned(mean), _aligned(var), *affine)


_compiled_runs: set[tuple] = set()


def _compile_ahead(
    x: Tensor,
    run: BlockRun,
    x_statistics: BatchStatistics | None,
    known: Sequence[Tensor] | None,
    keeps: dict[str, bool],
) -> None:
    """Compiles what a run launches, in parallel, at the first run with these shapes.

    Where inputs are kept, a backward follows, and its kernels are compiled too.
    """
    count = run.units_per_block
    group = _group(len(run.eps) // count)
    weights = run.parameters[2 : 3 * count : 3]
    layouts = tuple((w.shape, w.dtype, w.is_contiguous()) for w in weights)
    dtypes = x.dtype, run.dtype, precision(x.dtype)
    like = x.device, dtypes, x.shape, layouts, tuple(run.convs), group
    key = *like, x_statistics is None, known is None, *keeps.values()
    if key in _compiled_runs:
        return
    units = min(2 * count, len(run.eps))

    def on_meta(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty_like(t, device="meta") for t in tensors]

    short = run._replace(parameters=on_meta(run.parameters[: 3 * units]), eps=run.eps[:units])
    of_x = None if x_statistics is None else BatchStatistics(*on_meta(x_statistics))
    of_units = None if known is None else on_meta(known[: 2 * units])
    (meta,) = on_meta([x])

    def launches() -> None:
        y, _, statistics, inputs = _forward(meta, short, of_x, of_units, **keeps)
        if keeps["keep_inputs"]:
            rebuilt_from = None if keeps["keep_block_inputs"] else y
            inv_count = 1.0 if known is None else 0.0
            _backward(y, None, short, inputs, statistics, inv_count, rebuilt_from, group)

    compile_only(launches)
    _compiled_runs.add(key)


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
    keeps = {
        "with_stats": with_stats,
        "keep_inputs": keep_inputs,
        "keep_block_inputs": keep_block_inputs,
    }
    with on_device_of(x):
        if x.is_cuda:  # not in the interpreter
            _compile_ahead(x, run, x_statistics, known, keeps)
        return _forward(x, run, x_statistics, known, **keeps)


def _forward(
    x: Tensor,
    run: BlockRun,
    x_statistics: BatchStatistics | None,
    known: Sequence[Tensor] | None,
    with_stats: bool,
    keep_inputs: bool,
    keep_block_inputs: bool,
) -> BlockRunOutput:
    count, units = run.units_per_block, len(run.eps)
    places, blocks = _places(run, x), units // count
    x = _aligned(x)
    if known is None and x_statistics is None:
        x_statistics = bn_stats(x)
    launches = _forward_launches(places, x)
    is_summing = known is None or with_stats
    sums = _Accumulators(x, [p.out_channels for p in places], blocks if is_summing else 0)
    inputs: list[Tensor | None] = []
    h = shortcut = x
    for unit in range(units):
        block, at = divmod(unit, count)
        if at == 0:
            shortcut = h
        inputs.append(h if (keep_inputs if at else keep_block_inputs) else None)
        affine = _affine(run, unit)
        if known is not None:
            norm = _known_norm(known[2 * unit : 2 * unit + 2], affine)
        elif unit == 0:
            norm = _known_norm(cast(BatchStatistics, x_statistics), affine)
        else:
            of_x = sums.of[at - 1][block if at else block - 1]
            norm = KernelNorm(None, None, *affine, of_x, launches[at - 1].pixels)
        is_summed = with_stats if unit + 1 == units else known is None
        h = launches[at](
            h,
            norm,
            places[at].packed[block],
            Addends(None, shortcut if at + 1 == count else None),
            sums.of[at][block] if is_summed else None,
        )
    statistics, found = None, list(known or ())
    if is_summing:
        finished = [
            finished_statistics(s, launch.pixels)
            for s, launch in zip(sums.places, launches, strict=True)
        ]
        rows = [(mean.unbind(), var.unbind()) for mean, var in finished]  # of each block
        flat = [t for b in range(blocks) for mean, var in rows for t in (mean[b], var[b])]
        if with_stats:
            statistics = BatchStatistics(*flat[-2:])
        if known is None:
            found = [*cast(BatchStatistics, x_statistics), *flat[:-2]]
    return BlockRunOutput(h, statistics, found, inputs)


class _WeightGradients:
    """Gradients of the weights of one place, summed over programs for a group of blocks at once.

    Blocks come from the last to the first.
    """

    def __init__(
        self, place: Place, launch: BackwardLaunch, blocks: int, group: int, x: Tensor
    ) -> None:
        self._launch, self._group = launch, group
        programs = launch.input_programs if launch.in_one_pass else launch.weight_programs
        self._partials = x.new_empty((self._group, programs, launch.weights), dtype=torch.float32)
        self._slots = self._partials.unbind()
        self._results = new_weight_gradients(place.conv_weights[0], blocks)
        self._units: list[WeightUnit] = []  # of this group, where a launch of its own reads them
        self._count = 0  # blocks of this group so far
        self._left = blocks  # that come in this group and later

    def partials(self) -> Tensor | None:
        """Where the kernel of the next block stores partial results; None if it has none."""
        if not self._launch.in_one_pass:
            return None
        return self._slots[min(self._group, self._left) - self._count - 1]

    def add(self, unit: WeightUnit) -> None:
        """Call after each block's input kernel; launches what ends a group."""
        self._count += 1
        if not self._launch.in_one_pass:
            self._units.append(unit)
        if self._count < min(self._group, self._left):
            return
        if self._units:
            self._launch.weight(self._units[::-1], self._partials, self._group)
        count, self._count, self._units = self._count, 0, []
        self._left -= count
        launch_sum_partials(self._partials[:count], self._results[self._left :][:count])

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
    group = _group(len(run.eps) // run.units_per_block)
    with on_device_of(dy):
        return _backward(dy, fold, run, inputs, statistics, inv_count, y, group)


def _backward(
    dy: Tensor,
    fold: Fold | None,
    run: BlockRun,
    inputs: Sequence[Tensor | None],
    statistics: Sequence[Tensor],
    inv_count: float,
    y: Tensor | None,
    group: int,
) -> BlockRunGradients:
    count, units = run.units_per_block, len(run.eps)
    x = cast(Tensor, inputs[0] if y is None else y)
    places, blocks = _places(run, x), units // count
    negated: Sequence[Tensor] = ()
    if y is not None:
        # Negating the weights of a block's last unit negates each product, and so each sum.
        negated = torch_compat.foreach_neg(places[-1].packed)
    rebuild = _forward_launches(places, x)
    shapes = [x.shape, *(launch.shape for launch in rebuild)]
    launches = [
        BackwardLaunch(
            x,
            p.dtypes,
            shapes[i],
            shapes[i + 1],
            p.conv_weights[0].shape,
            p.conv,
            dy_is_whole=i + 1 == count,
        )
        for i, p in enumerate(places)
    ]
    gradients = [
        _WeightGradients(p, launch, blocks, group, x)
        for p, launch in zip(places, launches, strict=True)
    ]
    sums = _Accumulators(x, [p.channels for p in places], blocks)
    g, block_dy = dy, dy
    for unit in range(units - 1, -1, -1):
        block, at = divmod(unit, count)
        launch, place = launches[at], places[at]
        mean, var = map(_aligned, statistics[2 * unit : 2 * unit + 2])
        bn_weight, bn_bias, eps = _affine(run, unit)
        norm = KernelNorm(mean, var, bn_weight, bn_bias, eps)
        ends_block = at + 1 == count
        if ends_block and y is not None:  # x is the output of this block
            z = _aligned(cast(Tensor, inputs[unit]))
            x = rebuild[at](z, norm, negated[block], Addends(None, x), None)
        h = x if at == 0 and y is not None else _aligned(cast(Tensor, inputs[unit]))
        g, whole = launch.input(
            g,
            fold,
            h,
            norm,
            place.packed[block],
            sums.of[at][block],
            gradients[at].partials(),
            needs_whole=ends_block or not launch.in_one_pass,
        )
        if ends_block:
            block_dy = whole
        gradients[at].add(WeightUnit(cast(Tensor, whole), h, norm))
        skip = block_dy if at == 0 else None
        fold = Fold(skip, h, Norm(mean, var, bn_weight, None, eps), sums.of[at][block], inv_count)
    results = [g.results() for g in gradients]
    found = [finished_sums(s).unbind() for s in sums.places]
    order = [(b, i) for b in range(blocks) for i in range(count)]
    return BlockRunGradients(
        g,
        block_dy,
        h,
        [results[i][b] for b, i in order],
        [found[i][b] for b, i in order],
    )
