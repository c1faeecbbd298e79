"""The memory modes of a stage: which inputs it keeps for the backward."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

MEMORY_MODES = ("store", "rebuild", "checkpoint")

# Rebuilding one input in half precision adds one rounding to it; see the README for what that does.
_HALF_PRECISION_ANCHORS = 8


class MemoryMode(NamedTuple):
    """What a stage keeps for the backward.

    `store`: the input of every unit. `rebuild`: the same without the inputs x of most blocks, each
    of which the backward gets from the block's output, `x = y - F(z)` with F the block's last unit
    and z the input of that. `checkpoint`: the input of every segment of blocks, which run again in
    the backward and keep there what `rebuild` keeps.
    """

    name: str = "store"
    segments: int | None = None  # None: `segment_starts` chooses
    anchor_every: int | None = None  # one x in so many blocks is kept; None: by dtype

    def segment_starts(self, count: int) -> list[int]:
        """Indices of the blocks that begin a segment, of equal length up to one block.

        None takes the number nearest `sqrt(count / 2)`: for bottlenecks, whose x is four times as
        wide as what is between their convolutions, it makes `4 * segments + 2 * count / segments`,
        the inputs of segments and the inside of one, the least. Other modes have one segment.
        """
        if self.name != "checkpoint":
            return [0]
        segments = min(self.segments or max(1, round(math.sqrt(count / 2))), count)
        return [count * s // segments for s in range(segments)]

    def keeps_input(self, can_rebuild: Sequence[bool], dtype: torch.dtype) -> list[bool]:
        """For every block of a segment, whether its input is kept.

        The first always is: a double backward goes through it.

        Args:
            can_rebuild: for every block, whether its input follows from its output.
            dtype: of the residual stream. In half precision every eighth input is an anchor unless
                `anchor_every` says otherwise; wider streams need none.
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
