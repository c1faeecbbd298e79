"""The residual blocks of "Identity Mappings in Deep Residual Networks" (arXiv 1603.05027)."""

from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from preact_kernels.modules.batch_norm import is_bare_norm, plain_batch_norm
from preact_kernels.modules.blocks import fused_blocks, in_stream
from preact_kernels.modules.conv import is_stage_conv, plain_conv
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.checks import check_count
from preact_kernels.ops.plain_operators import runs_plain


class PreActBlock(nn.Module):
    """`y = shortcut(x) + F(x)` with F a chain of BN-ReLU-Conv units.

    The children are `bn1`, `conv1`, `bn2`, ... and, where the shape changes, `shortcut`: a
    bias-free 1x1 convolution of the first unit's activation. Elsewhere the shortcut is x itself.
    """

    fused = True
    residual_dtype: torch.dtype | None = None  # see PreActStage, which sets it
    is_residual = True
    expansion: int
    unit_count: int

    def units(self) -> list[tuple[nn.BatchNorm2d, nn.Conv2d]]:
        """The pairs of batch norm and convolution, in order."""
        children, units = cast(dict[str, Any], self._modules), []
        for i in range(1, self.unit_count + 1):
            units.append((children[f"bn{i}"], children[f"conv{i}"]))
        return units

    def projection(self) -> nn.Conv2d | None:
        """The convolution of the shortcut; None where the shortcut is the input."""
        return cast("nn.Conv2d | None", self._modules.get("shortcut"))

    def is_fusable(self) -> bool:
        """Whether the fused block may read the children's parameters in place of calling them."""
        if not self.fused:
            return False
        for bn, conv in self.units():
            if not (is_bare_norm(bn) and is_stage_conv(conv)):
                return False
        projection = self.projection()
        return projection is None or is_stage_conv(projection)

    def plain_forward(self, x: Tensor) -> Tensor:
        """Calls the children; the fused block computes the same."""
        x = in_stream(self, x)
        h, shortcut, projection = x, x, self.projection()
        for index, (bn, conv) in enumerate(self.units()):
            normalised = plain_batch_norm(bn, h, self.residual_dtype)
            a = F.relu(normalised, inplace=is_bare_norm(bn))
            if self.residual_dtype is not None:
                a = _rounded(a, conv.weight)
            if index == 0 and projection is not None:
                shortcut = plain_conv(projection, a)
            h = plain_conv(conv, a)
        return in_stream(self, shortcut) + h

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` to `[N, expansion * channels, H / stride, W / stride]`."""
        if not self.is_fusable() or runs_plain(x):
            return self.plain_forward(x)
        return fused_blocks([self], x)


@fx.wrap  # as a symbolic trace runs with autocast or without
def _rounded(a: Tensor, weight: Tensor) -> Tensor:
    """An activation of a residual stream in the dtype of a convolution, which autocast chooses."""
    return a if is_autocast(a) else a.to(weight.dtype)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        check_count(name, value)


def bottleneck_width(channels: int, groups: int, base_width: int) -> int:
    """Inner channels of a bottleneck (ResNeXt, arXiv 1611.05431)."""
    width = int(channels * base_width / 64) * groups
    if width == 0:
        raise ValueError(
            f"base_width: expected at least {-(-64 // channels)} for {channels} channels, "
            f"got {base_width}"
        )
    return width


class PreActBasicBlock(PreActBlock):
    """Two 3x3 convolutions: `y = shortcut + conv2(relu(bn2(conv1(relu(bn1(x))))))`.

    Args:
        in_channels: channels of the input.
        channels: channels of the output (expansion 1).
        stride: stride of `conv1` and `shortcut`.
    """

    expansion = 1
    unit_count = 2

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        _check_counts(in_channels=in_channels, channels=channels, stride=stride)
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        if shortcut := _shortcut(in_channels, channels, stride):
            self.shortcut = shortcut


class PreActBottleneck(PreActBlock):
    """1x1, 3x3 and 1x1 convolutions, the outer ones four times as wide.

    `y = shortcut + conv3(relu(bn3(conv2(relu(bn2(conv1(relu(bn1(x)))))))))`

    Args:
        in_channels: channels of the input.
        channels: a quarter of the channels of the output (expansion 4).
        stride: stride of `conv2` (or `conv1`) and `shortcut`.
        groups: number of groups of `conv2` (ResNeXt).
        base_width: inner channels a group when `channels` is 64 (ResNeXt).
        stride_on: `"conv2"`, or `"conv1"` as in the authors' released network.
    """

    expansion = 4
    unit_count = 3

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int = 1,
        groups: int = 1,
        base_width: int = 64,
        *,
        stride_on: str = "conv2",
    ) -> None:
        super().__init__()
        _check_counts(
            in_channels=in_channels,
            channels=channels,
            stride=stride,
            groups=groups,
            base_width=base_width,
        )
        if stride_on not in ("conv1", "conv2"):
            raise ValueError(f"stride_on: expected 'conv1' or 'conv2', got {stride_on!r}")
        width = bottleneck_width(channels, groups, base_width)
        out_channels = channels * self.expansion
        stride1, stride2 = (stride, 1) if stride_on == "conv1" else (1, stride)
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 1, stride1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride2, 1, groups=groups, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        if shortcut := _shortcut(in_channels, out_channels, stride):
            self.shortcut = shortcut
