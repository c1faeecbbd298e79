"""The units of a run of blocks: packed weights, norms and launches."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from preact_kernels.kernels.contract import BlockRun, Statistics, Unit, Wanted
from preact_kernels.kernels.triton.batch_norm import KernelNorm
from preact_kernels.kernels.triton.conv import NONE, precision, unit_sizes
from preact_kernels.kernels.triton.launch import LaunchContext, all_aligned, launch_context
from preact_kernels.kernels.triton.norm_act_conv_backward import BackwardLaunch
from preact_kernels.kernels.triton.norm_act_conv_forward import ForwardLaunch
from preact_kernels.kernels.triton.packing import is_packed, pack_weights


class RunUnit(NamedTuple):
    """The units at one position in each block, such as all first units. Lists are over blocks."""

    conv_weights: Sequence[Tensor]
    packed: list[Tensor]  # `[K, R, S, C]` in the dtype of the products
    forward: ForwardLaunch
    backward: BackwardLaunch


def run_units(run: BlockRun, x: Tensor) -> list[RunUnit]:
    """One `RunUnit` for each unit of a block; `x` is the input of any block."""
    count = len(run.units)
    conv_weights = [p.conv_weight for p in run.parameters]
    return [
        RunUnit(conv_weights[i::count], _packed(conv_weights[i::count], forward), forward, backward)
        for i, (forward, backward) in enumerate(_launches(_run_key(run, x)))
    ]


def run_norms(run: BlockRun, statistics: Sequence[Statistics]) -> list[Any]:
    """A `KernelNorm` for each unit; mean and variance are None beyond the given statistics."""
    missing = [NONE] * (len(run.parameters) - len(statistics))
    means, variances = (all_aligned(tensors) for tensors in zip(*statistics, strict=True))
    bn_weights, bn_biases, _ = zip(*run.parameters, strict=True)
    return list(
        map(
            KernelNorm,
            (*means, *missing),
            (*variances, *missing),
            all_aligned(bn_weights),
            all_aligned(bn_biases),
            run.eps,
        )
    )


def _packed(conv_weights: Sequence[Tensor], launch: ForwardLaunch) -> list[Tensor]:
    """The weights, copied unless kernels can read all in place."""
    dtype = launch.sizes.unit.dtype
    if all(is_packed(w, dtype) for w in conv_weights):
        return list(all_aligned(conv_weights))
    return pack_weights(conv_weights, dtype, launch.prepared)


class _RunKey(NamedTuple):
    """The state that the launches of a run depend on, except for optional tensors."""

    context: LaunchContext
    precision: str
    units: tuple[Unit, ...]  # units of one block
    x_shape: Sequence[int]


def _run_key(run: BlockRun, x: Tensor) -> _RunKey:
    return _RunKey(launch_context(x), precision(run.units[0].dtype), tuple(run.units), x.shape)


@functools.lru_cache(maxsize=256)
def _launches(key: _RunKey) -> list[tuple[ForwardLaunch, BackwardLaunch]]:
    """Forward and backward launch of each unit of a block. Runs with equal keys share them."""
    launches = []
    shape = key.x_shape
    for index, unit in enumerate(key.units):
        sizes = unit_sizes(unit, shape)
        ends_block = index + 1 == len(key.units)  # its dy is also the gradient of the skip
        everything = Wanted(input=True, weight=True, dy=ends_block)
        backward = BackwardLaunch(sizes, everything, ends_block, {})
        launches.append((ForwardLaunch(sizes, {}), backward))
        shape = sizes.y_shape
    return launches
