"""`PreActStage`: consecutive blocks as one autograd node."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from preact_kernels.modules.blocks import PreActBlock, fused_blocks
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.ops.block_arguments import BlockArguments
from preact_kernels.ops.memory_mode import MEMORY_MODES, MemoryMode
from preact_kernels.ops.plain_operators import runs_plain
from preact_kernels.ops.preact_stage import Recorder


class PreActStage(nn.Sequential):
    """Consecutive pre-activation blocks as one autograd node.

    Equals `nn.Sequential(*blocks)`, with the same keys in its `state_dict`. The kernel that writes
    a tensor also computes its statistics, and the kernel that reads the gradient of a batch norm's
    input evaluates it. A block with hooks, or with children of other types, is called as a module.

    Args:
        blocks: `PreActBasicBlock`s or `PreActBottleneck`s; at least one.
        memory: the activations to save for backward. `"store"` saves the input of each batch norm.
            `"rebuild"` omits the inputs x of most blocks; the backward computes each from the
            block's output y, `x = y - F(z)`, by running the block's last unit F again on its input
            z. `"checkpoint"` saves the input of each segment of blocks; the backward runs the
            segment again with the statistics of the forward, and keeps the same inputs as
            `"rebuild"`. The inputs of blocks with a projection, and of the first block of a stage
            or segment, are always saved. Under autocast, memory modes apply only after the first
            projection: earlier blocks run as plain modules on the float32 input.
        segments: number of segments in mode `"checkpoint"`; None: about `sqrt(len(blocks) / 2)`.
        anchor_every: in modes `"rebuild"` and `"checkpoint"`, also save the input of one in so many
            blocks; 1 saves all. None: 8 if the residual stream is bfloat16 or float16, else none.
        residual_dtype: `torch.float32` keeps the residual stream, and so the output, in float32
            with convolutions in bfloat16 or float16 (the dtype of the weights, or of autocast):
            `x + F(x).float()`. With None the stream has the dtype of the convolutions.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no block, the mode is unknown, `segments` or `anchor_every` is out of
            range or does not belong to the mode, or `residual_dtype` is another dtype.
    """

    def __init__(
        self,
        blocks: Iterable[PreActBlock],
        memory: str = "store",
        segments: int | None = None,
        *,
        anchor_every: int | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        blocks = list(blocks)
        if not blocks:
            raise ValueError("blocks: expected at least one block, got none")
        for index, block in enumerate(blocks):
            if not isinstance(block, PreActBlock):
                raise TypeError(
                    f"blocks: expected pre-activation blocks, got {type(block).__name__} "
                    f"at index {index}"
                )
        check_memory(memory, segments, anchor_every, len(blocks))
        check_residual_dtype(residual_dtype)
        super().__init__(*blocks)
        self.memory = memory
        self.segments = segments
        self.anchor_every = anchor_every
        self.residual_dtype = residual_dtype
        for block in blocks:
            block.residual_dtype = residual_dtype  # for calls of the block itself

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` to the output of the last block."""
        if self.memory not in MEMORY_MODES:
            check_memory(self.memory, None, None, len(self))
        if runs_plain(x):
            return super().forward(x)
        return run_blocks(self, x, MemoryMode(self.memory, self.segments, self.anchor_every))

    def __getitem__(self, index: int | slice) -> nn.Module:
        """A block, or for a slice a stage that shares its blocks, in the same memory mode."""
        if not isinstance(index, slice):
            return list(self)[index]
        blocks = cast(list[PreActBlock], list(self)[index])
        segments = self.segments if self.memory == "checkpoint" else None
        anchor_every = self.anchor_every if self.memory != "store" else None
        segments, anchor_every = (n and min(n, len(blocks)) for n in (segments, anchor_every))
        return PreActStage(
            blocks,
            self.memory,
            segments,
            anchor_every=anchor_every,
            residual_dtype=self.residual_dtype,
        )

    def extra_repr(self) -> str:
        names = ("segments", "anchor_every", "residual_dtype")
        given = [f", {n}={getattr(self, n)}" for n in names if getattr(self, n)]
        return f"memory={self.memory!r}{''.join(given)}"


def run_blocks(
    blocks: Iterable[nn.Module], x: Tensor, memory: MemoryMode, record: Recorder | None = None
) -> Tensor:
    """Runs the blocks of a stage, consecutive ones as one autograd node.

    Args:
        blocks: the blocks.
        x: `[N, C, H, W]`.
        memory: the memory mode.
        record: see `preact_stage`.
    """
    fusable: list[tuple[PreActBlock, BlockArguments]] = []  # for one autograd node
    for block in blocks:
        arguments = fused_arguments(block)
        if arguments is not None:
            fusable.append((cast(PreActBlock, block), arguments))
            continue
        x = block(fused_blocks(fusable, x, memory, record) if fusable else x)
        fusable = []
    return fused_blocks(fusable, x, memory, record) if fusable else x


# Methods of a block that a stage calls instead of the block, or that these call.
_METHODS = ("arguments", "units", "projection", "plain_forward")


def fused_arguments(block: nn.Module) -> BlockArguments | None:
    """What a stage reads of a block; None if it must call it."""
    kind = type(block)
    if (
        not isinstance(block, PreActBlock)
        or kind.forward is not PreActBlock.forward
        or kind.__call__ is not nn.Module.__call__
        or kind._call_impl is not nn.Module._call_impl
        or has_hooks(block, _METHODS)
    ):
        return None
    return block.arguments()


def check_memory(memory: object, segments: object, anchor_every: object, count: int) -> None:
    """Checks a memory mode and its options for `count` blocks."""
    if memory not in MEMORY_MODES:
        expected = " or ".join(repr(m) for m in MEMORY_MODES)
        raise ValueError(f"memory: expected {expected}, got {memory!r}")
    for name, value, modes in (
        ("segments", segments, ("checkpoint",)),
        ("anchor_every", anchor_every, ("rebuild", "checkpoint")),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int or None, got {type(value).__name__}")
        if memory not in modes:
            raise ValueError(f"{name}: expected None with memory {memory!r}, got {value}")
        if not 1 <= value <= count:
            raise ValueError(f"{name}: expected 1 to {count} (the number of blocks), got {value}")


def check_residual_dtype(residual_dtype: object) -> None:
    """Checks the dtype of the residual stream."""
    if residual_dtype is not None and not isinstance(residual_dtype, torch.dtype):
        kind = type(residual_dtype).__name__
        raise TypeError(f"residual_dtype: expected a torch.dtype or None, got {kind}")
    if residual_dtype not in (None, torch.float32):
        raise ValueError(f"residual_dtype: expected torch.float32 or None, got {residual_dtype}")
