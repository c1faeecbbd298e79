"""Pre-activation ResNets: "Identity Mappings in Deep Residual Networks" (arXiv 1603.05027)."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from preact_kernels.modules.blocks import PreActBlock
from preact_kernels.modules.bn_relu import BNReLU2d
from preact_kernels.modules.preact_block import PreActBasicBlock, PreActBottleneck
from preact_kernels.modules.preact_stage import PreActStage, check_memory, check_residual_dtype
from preact_kernels.ops.plain_operators import runs_plain

_BLOCKS = ("basic", "bottleneck")


class _Variant(NamedTuple):
    """Stem and stage widths of a family of networks."""

    stem_channels: int
    channels: tuple[int, ...]  # inner channels of each stage
    has_large_stem: bool  # a strided 7x7 convolution and a max pool; False: a 3x3 convolution


_VARIANTS = {
    "cifar": _Variant(16, (16, 32, 64), False),
    "cifar-wide-stem": _Variant(64, (64, 128, 256, 512), False),
    "imagenet": _Variant(64, (64, 128, 256, 512), True),
}

_FOUR_STAGES = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
    200: ("bottleneck", (3, 24, 36, 3)),
}
_DEPTHS = {"cifar-wide-stem": (18, 34, 50, 101, 152), "imagenet": tuple(_FOUR_STAGES)}
_DEEPEST_BASIC = 110  # deeper networks use bottlenecks if both blocks fit, as in the paper


class PreActResNet(nn.Module):
    """A stem, stages of pre-activation blocks, a final BN-ReLU, mean pool and linear layer.

    Convolutions are He-initialised by fan-out. `preact_resnet` builds the networks of the paper.

    Args:
        stem: the first convolution.
        pool: pooling after the stem.
        stages: `PreActStage`s, or `nn.Sequential`s of blocks.
        channels: channels of the last stage's output.
        num_classes: number of outputs.
        fused: False calls the children of each block as plain `torch.nn` modules.
    """

    def __init__(
        self,
        stem: nn.Conv2d,
        pool: nn.Module,
        stages: Iterable[nn.Sequential],
        channels: int,
        num_classes: int,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.pool = pool
        stages = list(stages)
        self.stages = nn.Sequential(*stages)
        self.norm = BNReLU2d(channels)
        self.norm.residual_dtype = cast(PreActBlock, stages[-1][-1]).residual_dtype
        self.fc = nn.Linear(channels, num_classes)
        self.fused = fused
        for module in self.modules():
            if isinstance(module, PreActBlock | BNReLU2d):
                module.fused = fused
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def extra_repr(self) -> str:
        return f"fused={self.fused}"

    def forward(self, x: Tensor) -> Tensor:
        """`[N, 3, H, W]` to logits `[N, num_classes]`."""
        if self.fused and not runs_plain(x):
            x = x.contiguous(memory_format=torch.channels_last)
        x = self.pool(self.stem(x))
        y = self.norm(self.stages(x))
        return self.fc(y.mean((2, 3)).to(x.dtype))


def preact_resnet(
    depth: int,
    num_classes: int = 10,
    *,
    variant: str = "cifar",
    block: str | None = None,
    width: int = 1,
    stride_on: str = "conv2",
    groups: int = 1,
    base_width: int = 64,
    memory: str = "store",
    segments: int | None = None,
    anchor_every: int | None = None,
    residual_dtype: torch.dtype | None = None,
    fused: bool = True,
) -> PreActResNet:
    """Builds a pre-activation ResNet of the paper (arXiv 1603.05027) or a popular relative.

    Args:
        depth: convolutions on the longest path, plus the linear layer. `"cifar"`: `6n+2` (basic)
            or `9n+2` (bottleneck), and `6n+4` for wide basic networks, as their authors count.
            `"imagenet"`: 18, 34, 50, 101, 152 or 200. `"cifar-wide-stem"`: 18, 34, 50, 101, 152.
        num_classes: number of outputs.
        variant: `"cifar"` (three stages of 16, 32 and 64 channels at 32, 16 and 8 pixels),
            `"imagenet"` (7x7 stem and pool, four stages from 64 channels) or
            `"cifar-wide-stem"` (3x3 stem to 64, four stages).
        block: `"basic"` or `"bottleneck"`; None: the one that fits the depth, or if both do, basic
            up to 110 layers and bottleneck above.
        width: multiplies the channels of each stage (WideResNet).
        stride_on: `"conv2"`, or `"conv1"` as in the authors' released network.
        groups: groups of the bottlenecks' 3x3 convolutions (ResNeXt).
        base_width: inner channels per group in a stage of 64 channels (ResNeXt).
        memory: see `PreActStage`.
        segments: see `PreActStage`; at most the number of blocks of each stage.
        anchor_every: see `PreActStage`; at most the number of blocks of each stage.
        residual_dtype: see `PreActStage`.
        fused: False builds the same network of plain `torch.nn` calls, with the same keys, initial
            values for a seed, and results.

    Returns:
        The network, He-initialised by fan-out.

    Raises:
        TypeError: a number is not an int.
        ValueError: an argument is unknown or out of range, or no network has that depth.
    """
    layout = resnet_layout(
        depth,
        num_classes,
        variant=variant,
        block=block,
        width=width,
        stride_on=stride_on,
        groups=groups,
        base_width=base_width,
    )
    check_memory(memory, segments, anchor_every, max(layout.counts))
    check_residual_dtype(residual_dtype)
    if not fused and memory != "store":
        raise ValueError(f"memory: expected 'store' with fused=False, got {memory!r}")
    build: Callable[..., PreActBlock] = PreActBasicBlock
    if layout.block == "bottleneck":
        build = partial(PreActBottleneck, groups=groups, base_width=base_width, stride_on=stride_on)
    stages = []
    for arguments in layout.stages():
        blocks = [build(*a) for a in arguments]
        stage = PreActStage(
            blocks,
            memory,
            segments and min(segments, len(blocks)),
            anchor_every=anchor_every and min(anchor_every, len(blocks)),
            residual_dtype=residual_dtype,
        )
        stages.append(stage if fused else nn.Sequential(*blocks))
    stem, pool = layout.stem()
    return PreActResNet(stem, pool, stages, layout.out_channels, num_classes, fused=fused)


class ResNetLayout(NamedTuple):
    """Blocks and channels of a network."""

    block: str  # "basic" or "bottleneck"
    counts: tuple[int, ...]  # blocks of each stage
    channels: tuple[int, ...]  # inner channels of each stage
    variant: _Variant

    @property
    def expansion(self) -> int:
        """Channels of a block's output divided by its inner channels."""
        return 4 if self.block == "bottleneck" else 1

    @property
    def out_channels(self) -> int:
        """Channels of the last stage's output."""
        return self.channels[-1] * self.expansion

    def stages(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yields, for each stage, (input channels, inner channels, stride) of each block."""
        in_channels = self.variant.stem_channels
        for index, (count, channels) in enumerate(zip(self.counts, self.channels, strict=True)):
            blocks = []
            for i in range(count):
                blocks.append((in_channels, channels, 2 if index > 0 and i == 0 else 1))
                in_channels = channels * self.expansion
            yield blocks

    def stem(self) -> tuple[nn.Conv2d, nn.Module]:
        channels = self.variant.stem_channels
        if self.variant.has_large_stem:
            return nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)
        return nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.Identity()


def resnet_layout(
    depth: int,
    num_classes: int,
    *,
    variant: str,
    block: str | None,
    width: int,
    stride_on: str,
    groups: int,
    base_width: int,
) -> ResNetLayout:
    """Checks the arguments of `preact_resnet`, and returns the layout of the network."""
    for name, value in (
        ("depth", depth),
        ("num_classes", num_classes),
        ("width", width),
        ("groups", groups),
        ("base_width", base_width),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    _check_choice("variant", variant, tuple(_VARIANTS))
    _check_choice("stride_on", stride_on, ("conv1", "conv2"))
    if block is not None:
        _check_choice("block", block, _BLOCKS)
    block, counts = _blocks(depth, variant, block, width)
    if block == "basic":
        for name, value, default in (("groups", groups, 1), ("base_width", base_width, 64)):
            if value != default:
                raise ValueError(f"{name}: expected {default} with basic blocks, got {value}")
    family = _VARIANTS[variant]
    return ResNetLayout(block, counts, tuple(c * width for c in family.channels), family)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def _blocks(depth: int, variant: str, block: str | None, width: int) -> tuple[str, tuple[int, ...]]:
    """Returns the kind of block, and the number of blocks in each stage."""
    if variant == "cifar":
        return _three_stages(depth, block, width)
    if depth not in _DEPTHS[variant]:
        expected = ", ".join(map(str, _DEPTHS[variant]))
        raise ValueError(f"depth: expected one of {expected} for {variant!r}, got {depth}")
    usual, counts = _FOUR_STAGES[depth]
    if block not in (None, usual):
        raise ValueError(f"block: expected {usual!r} for depth {depth}, got {block!r}")
    return usual, counts


def _three_stages(depth: int, block: str | None, width: int) -> tuple[str, tuple[int, int, int]]:
    forms = {"basic": [(6, 2)], "bottleneck": [(9, 2)]}  # depth = step * n + offset
    if width > 1:
        forms["basic"].append((6, 4))
    found = {
        kind: (depth - offset) // step
        for kind, pairs in forms.items()
        for step, offset in pairs
        if depth > offset and (depth - offset) % step == 0
    }
    if block is None and len(found) == 1:
        (chosen,) = found
    else:
        chosen = block or ("basic" if depth <= _DEEPEST_BASIC else "bottleneck")
    if chosen not in found:
        pairs = forms[block] if block else [pair for kind in forms.values() for pair in kind]
        nearest = sorted(
            {
                max(1, (depth - offset) // step + up) * step + offset
                for step, offset in pairs
                for up in (0, 1)
            },
            key=lambda d: (abs(d - depth), d),
        )[:2]
        expected = " or ".join(f"{step}n+{offset}" for step, offset in pairs)
        raise ValueError(
            f"depth: expected {expected} for {block or 'cifar'!r}, the nearest are "
            f"{' and '.join(map(str, sorted(nearest)))}, got {depth}"
        )
    n = found[chosen]
    return chosen, (n, n, n)
