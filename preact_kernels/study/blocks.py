"""Residual blocks with various placements of the activation, and various shortcuts.

The blocks of figures 1, 2 and 4 of arXiv 1603.05027, in plain PyTorch. `study.networks` calls
`pk.convert`, which runs their BN-ReLU-Conv chains fused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels.modules.preact_block import bottleneck_width

Layer = Literal["norm", "act"]


class Placement(NamedTuple):
    """Layers around a block's convolutions; between convolutions are a norm and an activation.

    before: layers before the first convolution.
    behind: layers after the last convolution, before the addition.
    after: layers after the addition.
    """

    before: tuple[Layer, ...]
    behind: tuple[Layer, ...]
    after: tuple[Layer, ...]


PLACEMENTS = {  # figure 4, (a) to (e)
    "original": Placement(before=(), behind=("norm",), after=("act",)),
    "bn-after-addition": Placement(before=(), behind=(), after=("norm", "act")),
    "relu-before-addition": Placement(before=(), behind=("norm", "act"), after=()),
    "relu-only-preactivation": Placement(before=("act",), behind=("norm",), after=()),
    "full-preactivation": Placement(before=("norm", "act"), behind=(), after=()),
}
SHORTCUTS = (  # figure 2, (a) to (f)
    "identity",
    "constant-scaling",
    "exclusive-gating",
    "shortcut-only-gating",
    "conv1x1",
    "dropout",
)


class RMSNorm2d(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, with the mean over channels and pixels of each image.

    Source: "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[1:], eps=self.eps)
        return y * self.weight[:, None, None].to(y.dtype)


def _group_norm(channels: int) -> nn.GroupNorm:
    """Group norm; the group size is the largest divisor of `channels` up to 16."""
    size = next(s for s in range(min(16, channels), 0, -1) if channels % s == 0)
    return nn.GroupNorm(channels // size, channels)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": _group_norm,
    "layer": lambda channels: nn.GroupNorm(1, channels),  # over the channels and pixels of an image
    "rms": RMSNorm2d,
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


@dataclass(frozen=True)
class BlockOptions:
    """Options shared by all blocks of a network.

    Args:
        placement: a key of `PLACEMENTS`.
        shortcut: one of `SHORTCUTS`.
        gate_bias: initial bias of the gate's convolution, for both kinds of gating.
        shortcut_scale: factor of the shortcut in `"constant-scaling"`.
        branch_scale: factor of the branch in `"constant-scaling"`.
        shortcut_dropout: probability in `"dropout"`.
        norm: `"batch"`, `"group"`, `"layer"` or `"rms"`.
        activation: `"relu"`, `"gelu"` or `"silu"`.
        dropout: probability of zeroing an element before the branch's last convolution
            (WideResNet, arXiv 1605.07146).
        residual_scale: initial value of a learned factor of the branch (0 in SkipInit, arXiv
            2002.10444); None: no factor.
        se: squeeze-and-excitation at the end of the branch (arXiv 1709.01507).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a name is unknown or a number is out of range.
    """

    placement: str = "full-preactivation"
    shortcut: str = "identity"
    gate_bias: float = -6.0
    shortcut_scale: float = 0.5
    branch_scale: float = 1.0
    shortcut_dropout: float = 0.5
    norm: str = "batch"
    activation: str = "relu"
    dropout: float = 0.0
    residual_scale: float | None = None
    se: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("placement", PLACEMENTS),
            ("shortcut", SHORTCUTS),
            ("norm", NORMS),
            ("activation", ACTIVATIONS),
        ):
            if (value := getattr(self, name)) not in known:
                expected = ", ".join(map(repr, known))
                raise ValueError(f"{name}: expected one of {expected}, got {value!r}")
        for name in ("gate_bias", "shortcut_scale", "branch_scale", "residual_scale"):
            value = getattr(self, name)
            if not is_number(value) and not (value is None and name == "residual_scale"):
                raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
        for name in ("shortcut_dropout", "dropout"):
            check_probability(name, getattr(self, name))
        if not isinstance(self.se, bool):
            raise TypeError(f"se: expected a bool, got {type(self.se).__name__}")


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_probability(name: str, value: object) -> None:
    """Raises unless `value` is a number in [0, 1)."""
    if not is_number(value):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not 0 <= value < 1:  # type: ignore[operator]
        raise ValueError(f"{name}: expected at least 0 and below 1, got {value}")


class SqueezeExcitation(nn.Module):
    """`x * sigmoid(expand(relu(reduce(mean(x)))))`, with the mean over pixels: arXiv 1709.01507.

    Args:
        channels: channels of x.
        reduction: `reduce` divides the channels by this.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        inner = max(1, channels // reduction)
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.expand = nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


class StochasticDepth(nn.Module):
    """In training, zeroes branches of random images, and divides the others by `survival`.

    Equals `torchvision.ops.stochastic_depth(x, 1 - survival, mode="row")`. In "Deep Networks with
    Stochastic Depth" (arXiv 1603.09382) all images of a batch share one draw, and the branch is
    multiplied by `survival` in evaluation instead. One draw per image works with several processes
    and in CUDA graphs, but saves no time.

    Args:
        survival: probability of keeping a branch.
    """

    def __init__(self, survival: float) -> None:
        super().__init__()
        self.survival = survival

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device)
        return x * kept.bernoulli_(self.survival).div_(self.survival)

    def extra_repr(self) -> str:
        return f"survival={self.survival:.4g}"


class Gate(nn.Module):
    """`sigmoid(conv(x))` with a 1x1 convolution: section 3.1 of arXiv 1603.05027.

    Args:
        channels: channels of x.
        bias: initial value of the convolution's bias.
    """

    def __init__(self, channels: int, bias: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        nn.init.constant_(self.conv.bias, bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(x))


class ResidualBlock(nn.Module):
    """`y = after(h(x) + F(x))`: a shortcut h and a branch F of two or three convolutions.

    The children are `conv1`, `norm1`, `conv2`, ... With `before=("norm", "act")`, `norm<i>` comes
    before `conv<i>`, else after it (the last norm may come after the addition). If the shape
    changes, the shortcut starts with `projection`, a 1x1 convolution of the input of `conv1`, and
    `projection_norm` if the branch ends with a norm.

    Args:
        in_channels: channels of the input.
        channels: inner channels; the output has `expansion` times as many.
        stride: stride of the block.
        options: placement, shortcut and so on.
        is_bottleneck: 1x1, 3x3 and 1x1 convolutions instead of two 3x3.
        groups: groups of a bottleneck's 3x3 convolution (ResNeXt).
        base_width: inner channels per group when `channels` is 64 (ResNeXt).
        stride_on: the strided convolution of a bottleneck, `"conv1"` or `"conv2"`.
        survival: probability of keeping the branch in training (stochastic depth).
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        options: BlockOptions,
        *,
        is_bottleneck: bool,
        groups: int = 1,
        base_width: int = 64,
        stride_on: str = "conv2",
        survival: float = 1.0,
    ) -> None:
        super().__init__()
        self.placement = PLACEMENTS[options.placement]
        self.options = options
        self.expansion = 4 if is_bottleneck else 1
        out_channels = channels * self.expansion
        if is_bottleneck:
            inner = bottleneck_width(channels, groups, base_width)
            stride1, stride2 = (stride, 1) if stride_on == "conv1" else (1, stride)
            convs = [
                nn.Conv2d(in_channels, inner, 1, stride1, bias=False),
                nn.Conv2d(inner, inner, 3, stride2, 1, groups=groups, bias=False),
                nn.Conv2d(inner, out_channels, 1, bias=False),
            ]
        else:
            convs = [
                nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False),
                nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            ]
        self.conv_count = len(convs)
        for i, conv in enumerate(convs, 1):
            width = conv.in_channels if self.norms_before else conv.out_channels
            layers = [(f"conv{i}", conv), (f"norm{i}", NORMS[options.norm](width))]
            for name, layer in reversed(layers) if self.norms_before else layers:
                self.add_module(name, layer)
        self.act = ACTIVATIONS[options.activation]()
        self.dropout = nn.Dropout(options.dropout) if options.dropout else None
        self.se = SqueezeExcitation(out_channels) if options.se else None
        self.residual_scale = (
            None
            if options.residual_scale is None
            else nn.Parameter(torch.tensor(float(options.residual_scale)))
        )
        self.stochastic_depth = StochasticDepth(survival) if survival < 1 else None
        self.projection: nn.Conv2d | None = None
        self.projection_norm: nn.Module | None = None
        if stride != 1 or in_channels != out_channels or options.shortcut == "conv1x1":
            self.projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            if "norm" in self.placement.behind:
                self.projection_norm = NORMS[options.norm](out_channels)
        is_gated = options.shortcut in ("exclusive-gating", "shortcut-only-gating")
        self.gate = Gate(out_channels, options.gate_bias) if is_gated else None
        is_dropped = options.shortcut == "dropout"
        self.shortcut_dropout = nn.Dropout(options.shortcut_dropout) if is_dropped else None

    @property
    def norms_before(self) -> bool:
        """Whether `norm<i>` comes before `conv<i>`."""
        return "norm" in self.placement.before

    @property
    def last_conv(self) -> nn.Conv2d:
        return self.get_submodule(f"conv{self.conv_count}")  # type: ignore[return-value]

    @property
    def last_norm(self) -> nn.Module | None:
        """The norm at the end of the branch; None if the branch ends with a convolution."""
        ends_with_norm = "norm" in self.placement.behind
        return self.get_submodule(f"norm{self.conv_count}") if ends_with_norm else None

    def _layers(self, kinds: tuple[Layer, ...], number: int, h: Tensor) -> Tensor:
        for kind in kinds:
            h = self.get_submodule(f"norm{number}")(h) if kind == "norm" else self.act(h)
        return h

    def _shortcut(self, x: Tensor, activated: Tensor) -> Tensor:
        """Returns the input, or its projection if the shape changes."""
        if self.projection is None:
            return x
        h = self.projection(activated)
        return h if self.projection_norm is None else self.projection_norm(h)

    def _sum(self, h: Tensor, branch: Tensor) -> Tensor:
        """Adds shortcut and branch as `options.shortcut` says."""
        if self.options.shortcut == "constant-scaling":
            if self.options.branch_scale != 1:  # without a product the addition can run fused
                branch = self.options.branch_scale * branch
            return self.options.shortcut_scale * h + branch
        if self.options.shortcut == "exclusive-gating":
            g = self.gate(h)  # type: ignore[misc]
            return (1 - g) * h + g * branch
        if self.options.shortcut == "shortcut-only-gating":
            return (1 - self.gate(h)) * h + branch  # type: ignore[misc]
        if self.shortcut_dropout is not None:
            return self.shortcut_dropout(h) + branch
        return h + branch

    def forward(self, x: Tensor) -> Tensor:
        activated = self._layers(self.placement.before, 1, x)
        branch: Tensor = self.get_submodule("conv1")(activated)
        for i in range(2, self.conv_count + 1):
            branch = self._layers(("norm", "act"), i if self.norms_before else i - 1, branch)
            if self.dropout is not None and i == self.conv_count:
                branch = self.dropout(branch)
            branch = self.get_submodule(f"conv{i}")(branch)
        branch = self._layers(self.placement.behind, self.conv_count, branch)
        if self.se is not None:
            branch = self.se(branch)
        if self.residual_scale is not None:
            branch = self.residual_scale.to(branch.dtype) * branch
        if self.stochastic_depth is not None:
            branch = self.stochastic_depth(branch)
        y = self._sum(self._shortcut(x, activated), branch)
        return self._layers(self.placement.after, self.conv_count, y)
