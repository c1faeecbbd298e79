"""Fused blocks, given as modules, as one autograd node."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from preact_kernels.modules.batch_norm import batch_norm_arguments, process_group
from preact_kernels.modules.conv import conv_arguments
from preact_kernels.ops import checks
from preact_kernels.ops.autocast import compute_dtype, is_autocast
from preact_kernels.ops.block_arguments import BlockArguments
from preact_kernels.ops.memory_mode import STORE, MemoryMode
from preact_kernels.ops.preact_stage import preact_stage


class Block(Protocol):
    """BN-ReLU-Conv units in a row, and a shortcut: a `PreActBlock`, or modules of another class."""

    residual_dtype: torch.dtype | None  # see PreActStage
    is_residual: bool  # False: no shortcut is added

    def units(self) -> Iterable[tuple[nn.BatchNorm2d, nn.Conv2d]]:
        """The pairs of batch norm and convolution, in order."""

    def projection(self) -> nn.Conv2d | None:
        """The convolution of the shortcut; None where the shortcut is the input."""

    def is_fusable(self) -> bool:
        """Whether the parameters of its modules may be read in place of calling them."""

    def plain_forward(self, x: Tensor) -> Tensor:
        """Calls the modules."""


def in_stream(block: Block, x: Tensor) -> Tensor:
    """`x` in the dtype of the residual stream."""
    if block.residual_dtype is None:
        return x
    return x.to(torch.promote_types(block.residual_dtype, _weight_dtype(block)))


def _weight_dtype(block: Block) -> torch.dtype:
    return next(iter(block.units()))[1].weight.dtype


def fused_blocks(blocks: Sequence[Block], x: Tensor, memory: MemoryMode = STORE) -> Tensor:
    """Runs fusable blocks on `x`, and updates their running statistics once.

    Args:
        blocks: blocks with one residual dtype; `is_fusable()` holds for each.
        x: `[N, C, H, W]`, any strides.
        memory: what is saved for backward.

    Returns:
        The output of the last block, in the dtype of the residual stream.
    """
    checks.check_activation("x", x)
    dtype = compute_dtype(x)
    if blocks[0].residual_dtype is not None:
        dtype = dtype if is_autocast(x) else _weight_dtype(blocks[0])
        x = in_stream(blocks[0], x)
    elif x.dtype != dtype:  # autocast: plain until a projection has rounded the stream
        blocks = list(blocks)
        while blocks and (x.dtype != dtype or x.numel() == 0):
            x = blocks.pop(0).plain_forward(x)
        if not blocks:
            return x
    arguments: list[BlockArguments] = []
    norms: list[nn.Module] = []
    for block in blocks:
        arguments.append(_arguments(block, dtype != x.dtype, norms))
    if x.numel() == 0 and not any(map(process_group, norms)):
        for block in blocks:
            x = block.plain_forward(x)
        return x
    repeats_norms = len(set(norms)) < len(norms)
    return preact_stage(arguments, x, dtype, memory, repeats_norms)


def _arguments(block: Block, upcasts: bool, norms: list[nn.Module]) -> BlockArguments:
    """The arguments of a block, of which the batch norms are added to `norms`."""
    units = []
    for bn, conv in block.units():
        norms.append(bn)
        units.append((batch_norm_arguments(bn, upcasts), conv_arguments(conv)))
    projection = block.projection()
    shortcut = None if projection is None else conv_arguments(projection)
    return BlockArguments(units, shortcut, block.is_residual)
