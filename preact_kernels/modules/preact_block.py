"""The residual blocks of "Identity Mappings in Deep Residual Networks" (arXiv 1603.05027)."""

from torch import nn

from preact_kernels.modules.blocks import PreActBlock
from preact_kernels.ops.checks import check_count


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
    """A bottleneck of 1x1, 3x3 and 1x1 convolutions, with `4 * channels` output channels.

    `y = shortcut + conv3(relu(bn3(conv2(relu(bn2(conv1(relu(bn1(x)))))))))`

    Args:
        in_channels: channels of the input.
        channels: a quarter of the channels of the output (expansion 4).
        stride: stride of `conv2` (or `conv1`) and `shortcut`.
        groups: number of groups of `conv2` (ResNeXt).
        base_width: inner channels per group when `channels` is 64 (ResNeXt).
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
