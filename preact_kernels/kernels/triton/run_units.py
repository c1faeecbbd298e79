"""The units of a run of blocks: their parameters as kernels read them, and their launches."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from preact_kernels.kernels.contract import BlockRun, Norm, Unit, Wanted
from preact_kernels.kernels.triton.bn_relu_conv_backward import BackwardLaunch
from preact_kernels.kernels.triton.bn_relu_conv_forward import ForwardLaunch
from preact_kernels.kernels.triton.conv import precision
from preact_kernels.kernels.triton.launch import LaunchContext, all_aligned, launch_context
from preact_kernels.kernels.triton.packing import is_packed, pack_weights


class RunUnit(NamedTuple):
    """The units at one place in each block, say all first units: lists have a value per block."""

    conv_weights: Sequence[Tensor]  # as given
    packed: list[Tensor]  # `[K, R, S, C]` in the dtype of the products
    bn_weights: Sequence[Tensor]
    bn_biases: Sequence[Tensor]
    eps: Sequence[float]
    forward: ForwardLaunch
    backward: BackwardLaunch

    def norm(self, block: int, mean: Tensor, var: Tensor) -> Norm:
        """What normalises the input of the unit in a block."""
        return Norm(mean, var, self.bn_weights[block], self.bn_biases[block], self.eps[block])


def run_units(run: BlockRun, x: Tensor) -> list[RunUnit]:
    """The units of a block; `x` is an input of a block."""
    count = len(run.units)
    bn_weights, bn_biases, conv_weights = zip(*run.parameters, strict=True)
    bn_weights, bn_biases = all_aligned(bn_weights), all_aligned(bn_biases)
    launches = _launches(_run_key(run, x))
    return [
        RunUnit(
            conv_weights[i::count],
            _packed(conv_weights[i::count], forward),
            bn_weights[i::count],
            bn_biases[i::count],
            list(map(float, run.eps[i::count])),  # Triton compiles another kernel for an int
            forward,
            backward,
        )
        for i, (forward, backward) in enumerate(launches)
    ]


def _packed(conv_weights: Sequence[Tensor], launch: ForwardLaunch) -> list[Tensor]:
    """The weights as `launch` takes them: those given, or copies."""
    dtype = launch.unit.dtype
    if all(is_packed(w, dtype) for w in conv_weights):
        return list(all_aligned(conv_weights))
    return pack_weights(conv_weights, dtype, launch.prepared)


class _RunKey(NamedTuple):
    """What the launches of a run depend on, except which optional tensors are None."""

    context: LaunchContext
    precision: str
    units: tuple[Unit, ...]  # of a block
    x_shape: Sequence[int]


def _run_key(run: BlockRun, x: Tensor) -> _RunKey:
    return _RunKey(launch_context(x), precision(run.units[0].dtype), tuple(run.units), x.shape)


@functools.lru_cache(maxsize=256)
def _launches(key: _RunKey) -> list[tuple[ForwardLaunch, BackwardLaunch]]:
    """The launches of a block of runs with this key, which share prepared launches."""
    launches = []
    shape = key.x_shape
    for index, unit in enumerate(key.units):
        forward = ForwardLaunch(unit, shape, {})
        ends_block = index + 1 == len(key.units)  # the next block adds its whole dy
        everything = Wanted(input=True, weight=True, dy=ends_block)
        launches.append((forward, BackwardLaunch(unit, shape, everything, ends_block, {})))
        shape = forward.shape
    return launches
