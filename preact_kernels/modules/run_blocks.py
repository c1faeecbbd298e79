"""Runs the blocks of a stage, or one block, as one autograd node."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from preact_kernels.kernels.contract import Conv
from preact_kernels.modules.batch_norm import batch_norm_arguments, process_group
from preact_kernels.ops import checks, dispatch, layout
from preact_kernels.ops.autocast import compute_dtype, is_autocast
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.block_runs import BlockSpec, UnitSpec
from preact_kernels.ops.memory_mode import STORE, MemoryMode
from preact_kernels.ops.preact_stage import PreActStageFunction, StageCall
from preact_kernels.ops.running_stats import RunningStatistics, UnbiasedStatistics, update


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


def run_stage(
    blocks: Iterable[Any], is_fusable: Callable[[Any], bool], x: Tensor, memory: MemoryMode
) -> Tensor:
    """Runs fusable blocks in a row as one autograd node, and calls the others."""
    run: list[Block] = []
    for block in blocks:
        if is_fusable(block):
            run.append(block)
            continue
        x = block(run_blocks(run, x, memory) if run else x)
        run = []
    return run_blocks(run, x, memory) if run else x


def run_blocks(blocks: Sequence[Block], x: Tensor, memory: MemoryMode = STORE) -> Tensor:
    """Runs fusable blocks on `x`, and updates their running statistics once.

    Args:
        blocks: of one residual dtype; `is_fusable()` holds for each.
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
        for index, block in enumerate(blocks):
            if x.dtype == dtype and x.numel():
                return run_blocks(blocks[index:], x, memory)
            x = block.plain_forward(x)
        return x
    if x.numel() == 0 and not any(process_group(bn) for b in blocks for bn, _ in b.units()):
        for block in blocks:
            x = block.plain_forward(x)
        return x

    kernels = dispatch.kernels_for(x, dtype)
    # Weights that the kernels read as they are need no copy in `dtype`.
    keeps_float32 = kernels.takes_float32_weights
    specs: list[BlockSpec] = []
    parameters: list[Tensor] = []
    shortcuts: list[Tensor] = []
    running: list[Tensor | None] = []
    norms: list[nn.Module] = []
    tracked: list[RunningStatistics | None] = []
    shape: Sequence[int] = x.shape
    for block in blocks:
        units, block_shape = [], shape
        for module, conv in block.units():
            bn = batch_norm_arguments(module, dtype != x.dtype)
            bn.check_training(shape)
            _check_norm(module, bn, shape, x, dtype)
            weight = _conv_weight(conv, shape, x, dtype, keeps_float32)
            parameters.extend((*bn.affine(x, shape[1]), weight))
            if bn.training:
                norms.append(module)
                tracked.append(bn.tracked())
            else:
                running.extend((bn.running_mean, bn.running_var))
            geometry = geometry_of(conv)
            units.append(UnitSpec(bn.eps, bn.training, geometry, bn.process_group))
            shape = geometry.output_shape(shape, weight.shape)
        projection = block.projection()
        if projection is None:
            spec = BlockSpec(tuple(units), None, block.is_residual)
        else:
            spec = BlockSpec(tuple(units), geometry_of(projection))
            shortcuts.append(_conv_weight(projection, block_shape, x, dtype, keeps_float32))
        # One object for equal blocks in a row: the garbage collector has fewer to visit.
        specs.append(specs[-1] if specs and specs[-1] == spec else spec)
        channels = block_shape[1] if projection is None else shortcuts[-1].shape[0]
        if block.is_residual and channels != shape[1]:
            raise ValueError(f"x: expected a shortcut of {shape[1]} channels, got {channels}")

    weights = (*parameters[2::3], *shortcuts)
    channels_last = any(map(layout.is_channels_last, (x, *weights)))
    y, *batch = PreActStageFunction.apply(
        StageCall(kernels, tuple(specs), memory, dtype),
        layout.nhwc(x),
        *parameters,
        *shortcuts,
        *running,
    )
    count = len(tracked)
    statistics = list(map(UnbiasedStatistics, batch[:count], batch[count:]))
    if len(set(map(id, norms))) == count:
        update(kernels, tracked, statistics)
    else:  # a batch norm that is used more than once: in order
        for running_statistics, batch_statistics in zip(tracked, statistics, strict=True):
            update(kernels, [running_statistics], [batch_statistics])
    return layout.restored(y, channels_last)


def _check_norm(
    module: nn.BatchNorm2d,
    bn: BatchNorm,
    shape: Sequence[int],
    x: Tensor,
    weight_dtype: torch.dtype,
) -> None:
    for t in (bn.weight, bn.bias, bn.running_mean, bn.running_var):
        if t is not None and t.numel() != shape[1]:
            raise ValueError(
                f"x: expected {t.numel()} channels to match the block's batch norm, got {shape[1]}"
            )
    if module.weight is not None and module.weight.dtype not in (x.dtype, weight_dtype):
        checks.check_parameter_dtype("bn_weight", module.weight, x)


def geometry_of(conv: nn.Conv2d) -> Conv:
    """The geometry of a convolution."""
    stride, padding, dilation = cast(Any, (conv.stride, conv.padding, conv.dilation))
    return Conv(stride, padding, dilation, conv.groups)


def _conv_weight(
    conv: nn.Conv2d, shape: Sequence[int], x: Tensor, dtype: torch.dtype, keeps_float32: bool
) -> Tensor:
    """The weight in `dtype`, or in float32, once it is known to fit an input of `shape`."""
    weight = conv.weight
    checks.check_conv_weight(weight, conv.groups, shape[1])
    if weight.device != x.device:
        raise ValueError(f"x: expected device {weight.device} to match the block, got {x.device}")
    if weight.dtype == dtype:
        return weight
    if not is_autocast(x):
        checks.check_parameter_dtype("conv_weight", weight, x)
    return weight if keeps_float32 and weight.dtype == torch.float32 else weight.to(dtype)
