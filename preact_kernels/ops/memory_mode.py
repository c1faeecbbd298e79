"""The memory modes of a stage: which inputs it saves for backward."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from preact_kernels.kernels.contract import HALVES, Block

MEMORY_MODES = ("store", "rebuild", "checkpoint")

# In half precision, each rebuilt input adds a rounding error (docs/memory.md).
_HALF_PRECISION_ANCHORS = 8


class KeptInputs(NamedTuple):
    """The activations that a stage saves for backward."""

    skipped: int  # first units of the first recorded block that save neither input nor statistics
    # For each segment: index of its first block, and whether the input of each block is kept. In
    # mode "checkpoint" the forward saves only the first input; the backward keeps the others.
    segments: list[tuple[int, list[bool]]]
    saves_y: bool


class MemoryMode(NamedTuple):
    """Selects the activations that a stage saves for backward.

    `store` saves the input of each unit. `rebuild` omits the inputs x of most blocks; the backward
    computes each from the block's output, `x = y - F(z)`, where F is the block's last unit and z
    its input. `checkpoint` saves the input of each segment of blocks; the backward runs the segment
    again and keeps the same inputs as `rebuild`.
    """

    name: str = "store"
    segments: int | None = None  # None: `segment_starts` chooses
    anchor_every: int | None = None  # save the input of one in so many blocks; None: by dtype

    def segment_starts(self, count: int) -> list[int]:
        """Index of the first block of each segment; lengths differ by at most one block.

        By default there are about `sqrt(count / 2)` segments. For bottlenecks, where x has four
        times the channels of the inner tensors, this minimises the memory of the inputs of all
        segments and the inner tensors of one, `4 * segments + 2 * count / segments`. Modes other
        than "checkpoint" have one segment.
        """
        if self.name != "checkpoint":
            return [0]
        segments = min(self.segments or max(1, round(math.sqrt(count / 2))), count)
        return [count * s // segments for s in range(segments)]

    def keeps_input(self, can_rebuild: Sequence[bool], dtype: torch.dtype) -> list[bool]:
        """Whether the input of each block of a segment is saved.

        The first input is always saved: a double backward starts from it.

        Args:
            can_rebuild: for each block, whether its input can be computed from its output.
            dtype: dtype of the residual stream. In half precision `anchor_every` is 8 by default,
                which bounds the rounding errors.
        """
        count = len(can_rebuild)
        if self.name == "store":
            return [True] * count
        is_half = dtype in HALVES
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
        """The inputs that a stage saves, and whether it saves its output.

        The inputs of units other than the first of a block are always kept.

        Args:
            blocks: the blocks.
            first: index of the first block that autograd records.
            skipped: number of its first units that autograd does not record.
            dtype: dtype of the residual stream.
        """
        starts = [first + start for start in self.segment_starts(len(blocks) - first)]
        segments: list[tuple[int, list[bool]]] = []
        keeps: list[bool] = []
        for begin, end in itertools.pairwise([*starts, len(blocks)]):
            can_rebuild = []
            for units, projection, is_residual in blocks[begin:end]:
                can_rebuild.append(is_residual and projection is None and len(units) > 1)
            keeps = self.keeps_input(can_rebuild, dtype)
            segments.append((begin, keeps))
        if self.name == "checkpoint":  # whole blocks run again
            return KeptInputs(0, segments, False)
        if self.name == "rebuild" and first + 1 < len(blocks) and blocks[first].is_residual:
            skipped = 0  # a double backward would need the block's output, which may not be kept
        # y is saved if the input of the last block is rebuilt.
        return KeptInputs(skipped, segments, not all(keeps[-1:]))


STORE = MemoryMode()
