"""The memory modes of a stage: which inputs it saves for backward."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from preact_kernels.ops.block_arguments import Block

MEMORY_MODES = ("store", "rebuild", "checkpoint")

# In half precision each rebuilt input has one more rounding error (docs/memory.md).
_HALF_PRECISION_ANCHORS = 8


class KeptInputs(NamedTuple):
    """What a stage saves for backward, apart from statistics and the tensors that it reads."""

    skipped: int  # first units of the first recorded block that save neither input nor statistics
    # For each segment: its first block, and whether the input of each of its blocks is kept. In
    # mode "checkpoint" the forward saves the first alone, and the backward keeps the others.
    segments: list[tuple[int, list[bool]]]
    saves_y: bool


class MemoryMode(NamedTuple):
    """What a stage saves for backward.

    `store` saves the input of every unit. `rebuild` leaves out the inputs x of most blocks; the
    backward computes each from the block's output, `x = y - F(z)`, where F is the block's last unit
    and z its input. `checkpoint` saves the input of every segment of blocks; the backward runs the
    segment again and saves what `rebuild` does.
    """

    name: str = "store"
    segments: int | None = None  # None: `segment_starts` chooses
    anchor_every: int | None = None  # save x of one block in so many; None: by dtype

    def segment_starts(self, count: int) -> list[int]:
        """Index of the first block of each segment. Lengths differ by at most one block.

        By default there are about `sqrt(count / 2)` segments. For bottlenecks, whose x is four
        times as wide as their inner tensors, this minimises the inputs of all segments and the
        inner tensors of one, `4 * segments + 2 * count / segments`. Other modes have one segment.
        """
        if self.name != "checkpoint":
            return [0]
        segments = min(self.segments or max(1, round(math.sqrt(count / 2))), count)
        return [count * s // segments for s in range(segments)]

    def keeps_input(self, can_rebuild: Sequence[bool], dtype: torch.dtype) -> list[bool]:
        """Whether the input of each block of a segment is saved.

        The first always is: a double backward starts from it.

        Args:
            can_rebuild: for every block, whether its input follows from its output.
            dtype: of the residual stream. In half precision every eighth input is saved, to bound
                the rounding errors, unless `anchor_every` says otherwise.
        """
        count = len(can_rebuild)
        if self.name == "store":
            return [True] * count
        is_half = dtype in (torch.bfloat16, torch.float16)
        every = self.anchor_every or (_HALF_PRECISION_ANCHORS if is_half else count)
        keeps, rebuilt = [], 0
        for index in reversed(range(count)):
            is_kept = index == 0 or not can_rebuild[index] or rebuilt == every - 1
            rebuilt = 0 if is_kept else rebuilt + 1
            keeps.append(is_kept)
        return keeps[::-1]

    def kept_inputs(
        self, blocks: Sequence[Block], first: int, skipped: int, dtype: torch.dtype
    ) -> KeptInputs:
        """Which inputs of units a stage saves, and whether it saves its output.

        The inputs of all but the first units of a block are kept with it.

        Args:
            blocks: the blocks.
            first: the first block that autograd records.
            skipped: the number of its units ahead of the first that autograd records.
            dtype: dtype of the residual stream.
        """
        starts = [first + start for start in self.segment_starts(len(blocks) - first)]
        segments: list[tuple[int, list[bool]]] = []
        keeps: list[bool] = []
        for begin, end in itertools.pairwise([*starts, len(blocks)]):
            can_rebuild = []  # whether the input follows from the output and the last unit's input
            for units, projection, is_residual in blocks[begin:end]:
                can_rebuild.append(is_residual and projection is None and len(units) > 1)
            keeps = self.keeps_input(can_rebuild, dtype)
            segments.append((begin, keeps))
        if self.name == "checkpoint":  # whole blocks run again
            return KeptInputs(0, segments, False)
        if self.name == "rebuild" and first + 1 < len(blocks) and blocks[first].is_residual:
            skipped = 0  # a double backward needs its output, which is not kept
        # The input of the last block may be rebuilt, from y.
        return KeptInputs(skipped, segments, not all(keeps[-1:]))


STORE = MemoryMode()
