"""`PreActStage`: blocks that run as one autograd node."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from preact_kernels.modules.batch_norm import (
    has_hooks,
    process_group,
    track,
    uses_batch,
)
from preact_kernels.ops import checks
from preact_kernels.ops.autocast import compute_dtype, is_autocast
from preact_kernels.ops.bn_relu import affine_parameters
from preact_kernels.ops.preact_stage import (
    MEMORY_MODES,
    Block,
    Conv,
    Unit,
    preact_stage,
)


class PreActStage(nn.Sequential):
    """Pre-activation blocks in a row, as one autograd node.

    Equals `nn.Sequential(*blocks)`, with the same keys in its `state_dict`. Statistics pass from
    the kernel that writes a tensor to the one that normalises it, and gradients stay folded
    from unit to unit. A block that has hooks, or children of other types, is called as a module.

    Args:
        blocks: `PreActBasicBlock`s or `PreActBottleneck`s; at least one.
        memory: what is kept for the backward: `"store"` keeps the input of every convolution's
            batch norm, `"checkpoint"` the input of every segment of blocks, which run again in
            the backward from the statistics of the forward.
        segments: how many, in mode `"checkpoint"`; None takes about `sqrt(len(blocks))`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no block, the mode is unknown, or `segments` is out of range.
    """

    def __init__(
        self, blocks: Iterable[nn.Module], memory: str = "store", segments: int | None = None
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
        check_memory(memory, segments, len(blocks))
        super().__init__(*blocks)
        self.memory = memory
        self.segments = segments

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` to the output of the last block."""
        run = []
        for block in self:
            if hasattr(block, "is_fusable") and block.is_fusable() and not has_hooks(block):
                run.append(block)
                continue
            x = block(run_blocks(run, x, self.memory, self.segments) if run else x)
            run = []
        return run_blocks(run, x, self.memory, self.segments) if run else x

    def __getitem__(self, index: int | slice) -> nn.Module:
        """A block, or a stage of some of the blocks, shared, in the same memory mode."""
        blocks = list(self)[index]
        if not isinstance(index, slice):
            return blocks
        segments = self.segments and min(self.segments, len(blocks))
        return PreActStage(blocks, self.memory, segments)

    def extra_repr(self) -> str:
        """Memory mode and segments."""
        segments = f", segments={self.segments}" if self.segments else ""
        return f"memory={self.memory!r}{segments}"


def check_memory(memory: object, segments: object, count: int) -> None:
    """A memory mode, and a number of segments for `count` blocks."""
    if memory not in MEMORY_MODES:
        expected = " or ".join(repr(m) for m in MEMORY_MODES)
        raise ValueError(f"memory: expected {expected}, got {memory!r}")
    if segments is None:
        return
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(f"segments: expected an int or None, got {type(segments).__name__}")
    if memory != "checkpoint":
        raise ValueError(f"segments: expected None beside memory {memory!r}, got {segments}")
    if not 1 <= segments <= count:
        raise ValueError(f"segments: expected 1 to {count} (the number of blocks), got {segments}")


def run_blocks(
    blocks: Sequence[nn.Module], x: Tensor, memory: str = "store", segments: int | None = None
) -> Tensor:
    """Runs fusable blocks as one autograd node, and updates their running statistics once."""
    checks.check_activation("x", x)
    is_spread = x.numel() == 0 and any(process_group(bn) for b in blocks for bn, _ in b.units())
    if x.dtype != compute_dtype(x) or (x.numel() == 0 and not is_spread):
        for block in blocks:  # mixed precisions in the residual stream, or nothing to compute
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
            weight = _conv_weight(conv, shape, x)
            _check_norm(bn, shape, x)
            tensors.extend(affine_parameters(x, bn.num_features, bn.weight, bn.bias))
            tensors.append(weight)
            tensors.extend((None, None) if training else (bn.running_mean, bn.running_var))
            shape = checks.output_shape(shape, weight, *unit.conv[:3])
        shortcut = block._modules.get("shortcut")
        numbers.append(Block(tuple(units), None if shortcut is None else _conv_numbers(shortcut)))
        tensors.append(None if shortcut is None else _conv_weight(shortcut, block_shape, x))
    y, statistics = preact_stage(x, tuple(numbers), tensors, memory, segments)
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


def _conv_weight(conv: nn.Conv2d, shape: Sequence[int], x: Tensor) -> Tensor:
    """The weight in the dtype of `x`, once it is known to fit an input of `shape`."""
    weight = conv.weight
    if conv.in_channels != shape[1]:
        raise ValueError(
            f"x: expected {conv.in_channels} channels to match the block, got {shape[1]}"
        )
    if weight.device != x.device:
        raise ValueError(f"x: expected device {weight.device} to match the block, got {x.device}")
    if weight.dtype == x.dtype:
        return weight
    if not is_autocast(x):
        checks.check_parameter_dtype("conv_weight", weight, x)
    return weight.to(x.dtype)
