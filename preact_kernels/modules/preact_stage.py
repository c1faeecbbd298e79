"""`PreActStage`: blocks that run as one autograd node."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from preact_kernels.modules.batch_norm import (
    has_hooks,
    process_group,
    track,
    uses_batch,
)
from preact_kernels.ops import checks
from preact_kernels.ops.autocast import compute_dtype, is_autocast
from preact_kernels.ops.block_runs import Block, Conv, Unit
from preact_kernels.ops.bn_relu import affine_parameters
from preact_kernels.ops.memory_mode import MEMORY_MODES, STORE, MemoryMode
from preact_kernels.ops.preact_stage import preact_stage


class PreActStage(nn.Sequential):
    """Pre-activation blocks in a row, as one autograd node.

    Equals `nn.Sequential(*blocks)`, with the same keys in its `state_dict`. Statistics pass from
    the kernel that writes a tensor to the one that normalises it, and gradients stay folded
    from unit to unit. A block that has hooks, or children of other types, is called as a module.

    Args:
        blocks: `PreActBasicBlock`s or `PreActBottleneck`s; at least one.
        memory: what is kept for the backward: `"store"` keeps the input of every convolution's
            batch norm; `"rebuild"` the same but for the inputs of most blocks, each of which the
            backward gets from the block's output, `x = y - F(z)`, by one more call of the block's
            last convolution; `"checkpoint"` the input of every segment of blocks, which run again
            in the backward from the statistics of the forward, and keep there what `"rebuild"`
            keeps. In both, blocks with a projection, and the first of a stage or a segment, keep
            their inputs. A float32 input under autocast is in no mode until a block with a
            projection rounds it: the blocks before that run as plain modules.
        segments: how many, in mode `"checkpoint"`; None takes about `sqrt(len(blocks) / 2)`.
        anchor_every: in modes `"rebuild"` and `"checkpoint"` one block in so many keeps its input
            too; with 1 nothing is rebuilt. None takes 8 where the residual stream is bfloat16 or
            float16, and none in wider dtypes.
        residual_dtype: `torch.float32` keeps the residual stream, and so the output, in float32
            beside convolutions in bfloat16 or float16 (those of the weights, or of autocast):
            `x + F(x).float()`. Wider weights keep their own. None: the stream has the dtype of
            the convolutions.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no block, the mode is unknown, `segments` or `anchor_every` is out of
            range or does not belong to the mode, or `residual_dtype` is another dtype.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
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
            if not hasattr(block, "is_fusable"):
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
            block.residual_dtype = residual_dtype  # for calls of its own

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` to the output of the last block."""
        if self.memory not in MEMORY_MODES:
            check_memory(self.memory, None, None, len(self))
        memory = MemoryMode(self.memory, self.segments, self.anchor_every)
        run = []
        for block in self:
            if hasattr(block, "is_fusable") and block.is_fusable() and not has_hooks(block):
                run.append(block)
                continue
            x = block(run_blocks(run, x, memory) if run else x)
            run = []
        return run_blocks(run, x, memory) if run else x

    def __getitem__(self, index: int | slice) -> nn.Module:
        """A block, or a stage of some of the blocks, shared, in the same memory mode."""
        blocks = list(self)[index]
        if not isinstance(index, slice):
            return blocks
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
        """Memory mode, and what differs from its defaults."""
        names = ("segments", "anchor_every", "residual_dtype")
        given = [f", {n}={getattr(self, n)}" for n in names if getattr(self, n)]
        return f"memory={self.memory!r}{''.join(given)}"


def check_memory(memory: object, segments: object, anchor_every: object, count: int) -> None:
    """A memory mode, and numbers of segments and of blocks an anchor for `count` blocks."""
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
            raise ValueError(f"{name}: expected None beside memory {memory!r}, got {value}")
        if not 1 <= value <= count:
            raise ValueError(f"{name}: expected 1 to {count} (the number of blocks), got {value}")


def check_residual_dtype(residual_dtype: object) -> None:
    """A dtype of the residual stream."""
    if residual_dtype is not None and not isinstance(residual_dtype, torch.dtype):
        kind = type(residual_dtype).__name__
        raise TypeError(f"residual_dtype: expected a torch.dtype or None, got {kind}")
    if residual_dtype not in (None, torch.float32):
        raise ValueError(f"residual_dtype: expected torch.float32 or None, got {residual_dtype}")


def run_blocks(blocks: Sequence[nn.Module], x: Tensor, memory: MemoryMode = STORE) -> Tensor:
    """Runs fusable blocks as one autograd node, and updates their running statistics once."""
    checks.check_activation("x", x)
    dtype = compute_dtype(x)
    if blocks[0].residual_dtype is not None:
        dtype = dtype if is_autocast(x) else blocks[0].conv1.weight.dtype
        x = blocks[0].in_stream(x)
    is_spread = x.numel() == 0 and any(process_group(bn) for b in blocks for bn, _ in b.units())
    is_mixed = x.dtype != dtype and blocks[0].residual_dtype is None
    if is_mixed or (x.numel() == 0 and not is_spread):
        for index, block in enumerate(blocks):  # precisions that mix, or nothing to compute
            if is_mixed and x.dtype == dtype and x.numel():
                return run_blocks(blocks[index:], x, memory)
            x = block.plain_forward(x)
        return x

    numbers, tensors, norms = [], [], []
    shape = x.shape
    for block in blocks:
        units, block_shape = [], shape
        for bn, conv in block.units():
            training = uses_batch(bn)
            unit = Unit(bn.eps, training, _conv_numbers(conv), process_group(bn))
            if training:
                if unit.process_group is None:
                    checks.check_samples(shape)
                norms.append(bn)
            units.append(unit)
            weight = _conv_weight(conv, shape, x, dtype)
            _check_norm(bn, shape, x)
            tensors.extend(affine_parameters(x, bn.num_features, bn.weight, bn.bias))
            tensors.append(weight)
            tensors.extend((None, None) if training else (bn.running_mean, bn.running_var))
            shape = checks.output_shape(shape, weight, *unit.conv[:3])
        shortcut = block._modules.get("shortcut")
        numbers.append(Block(tuple(units), None if shortcut is None else _conv_numbers(shortcut)))
        tensors.append(None if shortcut is None else _conv_weight(shortcut, block_shape, x, dtype))
    y, statistics = preact_stage(x, tuple(numbers), tensors, memory)
    track(norms, statistics)
    return y


def _check_norm(bn: nn.Module, shape: Sequence[int], x: Tensor) -> None:
    if bn.num_features != shape[1]:
        raise ValueError(
            f"x: expected {bn.num_features} channels to match the block's batch norm, "
            f"got {shape[1]}"
        )
    if bn.weight is not None and bn.weight.dtype != x.dtype:
        checks.check_parameter_dtype("bn_weight", bn.weight, x)


def _conv_numbers(conv: nn.Conv2d) -> Conv:
    return conv.stride, conv.padding, conv.dilation, conv.groups


def _conv_weight(conv: nn.Conv2d, shape: Sequence[int], x: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, once it is known to fit an input of `shape`."""
    weight = conv.weight
    if conv.in_channels != shape[1]:
        raise ValueError(
            f"x: expected {conv.in_channels} channels to match the block, got {shape[1]}"
        )
    if weight.device != x.device:
        raise ValueError(f"x: expected device {weight.device} to match the block, got {x.device}")
    if weight.dtype == dtype:
        return weight
    if not is_autocast(x):
        checks.check_parameter_dtype("conv_weight", weight, x)
    return weight.to(dtype)
