"""Gradients of the weights of a run of blocks, summed over programs per group of blocks.

More groups take less memory, fewer groups take fewer launches.
"""

from typing import cast

import torch
from torch import Tensor

from preact_kernels.kernels.triton.batch_norm import KernelNorm
from preact_kernels.kernels.triton.launch import aligned_rows, ceil_div
from preact_kernels.kernels.triton.reduction import launch_sum_partials
from preact_kernels.kernels.triton.run_units import RunUnit
from preact_kernels.kernels.triton.weight_gradient import WeightInputs, new_weight_gradients

# _MOST_BYTES takes precedence over _MOST_GROUPS and _SMALLEST_GROUP.
_MOST_GROUPS = 8
_SMALLEST_GROUP = 4
_LARGEST_GROUP = 64  # a block takes 56 bytes of a launch's arguments, which are at most 4 KB
_MOST_BYTES = 24 << 20  # per unit; a bottleneck has three


def group_size(blocks: int, block_bytes: int) -> int:
    """Blocks per group of a run; the last group may have fewer.

    Args:
        blocks: blocks of the run.
        block_bytes: memory that a group holds per block.
    """
    size = max(_SMALLEST_GROUP, ceil_div(blocks, _MOST_GROUPS))
    return min(blocks, size, _LARGEST_GROUP, max(1, _MOST_BYTES // block_bytes))


class RunWeightGradients:
    """Gradients of the weights of one unit of each block, from the last block to the first.

    Args:
        unit: the unit.
        blocks: blocks of the run.
        x: any tensor on the device.
        is_x_rebuilt: whether some inputs of the unit are rebuilt, and kept only for their group.
    """

    def __init__(self, unit: RunUnit, blocks: int, x: Tensor, is_x_rebuilt: bool) -> None:
        launch = self._launch = unit.backward
        weights = unit.conv_weights[0].numel()
        block_bytes = launch.programs * weights * torch.float32.itemsize
        if not launch.in_one_pass:
            block_bytes += launch.sizes.y_bytes + is_x_rebuilt * launch.sizes.x_bytes
        group = self._group = group_size(blocks, block_bytes)
        shape = group, launch.programs, weights
        if launch.in_one_pass:  # a launch stores in one slot, which must be aligned
            rows = aligned_rows(x, group, launch.programs * weights, torch.float32)
            self._partials = rows.view(shape)
        else:
            self._partials = x.new_empty(shape, dtype=torch.float32)
        self._slots = self._partials.unbind()
        self._results = new_weight_gradients(unit.conv_weights[0], blocks)
        self._inputs: list[WeightInputs] = []  # this group's, for a separate launch
        self._begin_group(blocks)

    def _begin_group(self, end: int) -> None:
        self._begin, self._end = max(0, end - self._group), end

    def partials(self, block: int) -> Tensor | None:
        """Where the input kernel of a block stores partial results; None if not in one pass."""
        return self._slots[block - self._begin] if self._launch.in_one_pass else None

    def add(self, block: int, dy: Tensor | None, x: Tensor, norm: KernelNorm) -> None:
        """Adds a block, after its input kernel. The last block of a group launches the sums."""
        if not self._launch.in_one_pass:
            self._inputs.append(WeightInputs(cast(Tensor, dy), x, norm))
        if block > self._begin:
            return
        if self._inputs:
            self._launch.weight(self._inputs[::-1], self._partials, self._group)
            self._inputs = []
        count = self._end - self._begin
        results = self._results[self._begin : self._end]
        launch_sum_partials(self._partials[:count], results, self._launch.prepared)
        self._begin_group(self._begin)

    def results(self) -> list[Tensor]:
        return list(self._results.unbind())
