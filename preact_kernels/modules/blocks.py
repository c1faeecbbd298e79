"""`PreActBlock`, and consecutive blocks as one autograd node."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from preact_kernels.activations import RELU
from preact_kernels.modules.conv import conv_arguments, is_stage_conv, plain_conv
from preact_kernels.modules.norm import is_bare_norm, plain_batch_norm
from preact_kernels.norms import BatchNorm
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import UnitArguments
from preact_kernels.ops.autocast import compute_dtype, is_autocast
from preact_kernels.ops.block_arguments import BlockArguments
from preact_kernels.ops.memory_mode import STORE, MemoryMode
from preact_kernels.ops.plain import chain
from preact_kernels.ops.plain_operators import runs_plain
from preact_kernels.ops.preact_stage import Recorder, preact_stage


class PreActBlock(nn.Module):
    """`y = shortcut + F(x)`, where F is a chain of BN-ReLU-Conv units.

    The children are `bn1`, `conv1`, `bn2`, ... and, if the shape changes, `shortcut`: a bias-free
    1x1 convolution of the first unit's activation. Otherwise the shortcut is x.
    """

    fused = True
    residual_dtype: torch.dtype | None = None  # see PreActStage, which sets it
    is_residual = True
    expansion: int
    unit_count: int

    def units(self) -> list[tuple[nn.BatchNorm2d, nn.Conv2d]]:
        """The pairs of batch norm and convolution, in order."""
        children: Any = self._modules
        names = range(1, self.unit_count + 1)
        return [(children[f"bn{i}"], children[f"conv{i}"]) for i in names]

    def projection(self) -> nn.Conv2d | None:
        """The convolution of the shortcut; None if the shortcut is the input."""
        return cast("nn.Conv2d | None", self._modules.get("shortcut"))

    def arguments(self) -> BlockArguments | None:
        """What the fused block reads of its children; None if it must call them."""
        if not self.fused:
            return None
        units = []
        for bn, conv in self.units():
            if not (is_bare_norm(bn) and is_stage_conv(conv)):
                return None
            units.append(UnitArguments(BatchNorm.of_module(bn), RELU, conv_arguments(conv)))
        projection = self.projection()
        if projection is None:
            return BlockArguments(units, None, self.is_residual)
        if not is_stage_conv(projection):
            return None
        return BlockArguments(units, conv_arguments(projection), self.is_residual)

    def plain_forward(self, x: Tensor) -> Tensor:
        """Equals the fused forward; calls the children."""
        x = in_stream(self, x)
        h, shortcut, projection = x, x, self.projection()
        for index, (bn, conv) in enumerate(self.units()):
            norm = partial(plain_batch_norm, bn, residual_dtype=self.residual_dtype)
            a = chain(h, norm, partial(F.relu, inplace=is_bare_norm(bn)))
            if self.residual_dtype is not None:
                a = _rounded(a, conv.weight)
            if index == 0 and projection is not None:
                shortcut = plain_conv(projection, a)
            h = plain_conv(conv, a)
        return in_stream(self, shortcut) + h

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` to `[N, expansion * channels, H / stride, W / stride]`."""
        arguments = None if runs_plain(x) else self.arguments()
        if arguments is None:
            return self.plain_forward(x)
        return fused_blocks([(self, arguments)], x)


@fx.wrap  # depends on autocast, which a symbolic trace does not know
def _rounded(a: Tensor, weight: Tensor) -> Tensor:
    """Casts an activation of the residual stream to the weight's dtype, unless autocast will."""
    return a if is_autocast(a) else a.to(weight.dtype)


def in_stream(block: PreActBlock, x: Tensor) -> Tensor:
    """Casts `x` to the dtype of the residual stream."""
    if block.residual_dtype is None:
        return x
    return x.to(torch.promote_types(block.residual_dtype, _weight_dtype(block)))


def _weight_dtype(block: PreActBlock) -> torch.dtype:
    return block.units()[0][1].weight.dtype


def fused_blocks(
    blocks: Sequence[tuple[PreActBlock, BlockArguments]],
    x: Tensor,
    memory: MemoryMode = STORE,
    record: Recorder | None = None,
) -> Tensor:
    """Runs blocks on `x`, and updates their running statistics once.

    Args:
        blocks: blocks with equal residual dtypes, each with its `arguments()`.
        x: `[N, C, H, W]`, any strides.
        memory: the memory mode.
        record: see `preact_stage`.

    Returns:
        The output of the last block, in the dtype of the residual stream.
    """
    checks.check_activation("x", x)
    dtype, (first, _) = compute_dtype(x), blocks[0]
    if first.residual_dtype is not None:
        dtype = dtype if is_autocast(x) else _weight_dtype(first)
        x = in_stream(first, x)
    elif x.dtype != dtype:  # autocast: run plain until a projection has cast the stream
        blocks = list(blocks)
        while blocks and (x.dtype != dtype or x.numel() == 0):
            block, _ = blocks.pop(0)
            x = block.plain_forward(x)
        if not blocks:
            return x
    arguments = [found for _, found in blocks]
    if x.numel() == 0 and not any(u.norm.process_group for found in arguments for u in found.units):
        for block, _ in blocks:
            x = block.plain_forward(x)
        return x
    if dtype != x.dtype:
        arguments = [found.with_float32_norms() for found in arguments]
    return preact_stage(arguments, x, dtype, memory, record)
