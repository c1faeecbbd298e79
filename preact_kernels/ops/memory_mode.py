"""The memory modes of a stage: which inputs it saves for backward."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

MEMORY_MODES = ("store", "rebuild", "checkpoint")

# In half precision each rebuilt input has one more rounding error (docs/memory.md).
_HALF_PRECISION_ANCHORS = 8


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


STORE = MemoryMode()
