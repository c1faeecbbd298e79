"""Residual networks of the study: `preact_resnet`, or the same layout with other blocks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from preact_kernels.conversion.convert import conversion_report, convert
from preact_kernels.memory import saved_bytes
from preact_kernels.models.preact_resnet import PreActResNet, preact_resnet, resnet_layout
from preact_kernels.modules.blocks import PreActBlock
from preact_kernels.study.blocks import (
    ACTIVATIONS,
    NORMS,
    PLACEMENTS,
    BlockOptions,
    ResidualBlock,
    is_number,
)
from preact_kernels.torch_compat import BatchNormBase

INITIALISATIONS = ("he", "orthogonal", "zero-branch")


class ResidualNetwork(nn.Module):
    """A stem, stages of `ResidualBlock`s, mean pool and linear layer.

    A norm follows the last block if blocks start with one, else the stem; and so does an
    activation.

    Args:
        stem: the first convolution.
        pool: pooling after the stem.
        stages: the blocks of each stage.
        channels: channels of the last block's output.
        num_classes: number of outputs.
        options: options of the blocks.
    """

    def __init__(
        self,
        stem: nn.Conv2d,
        pool: nn.Module,
        stages: Sequence[Sequence[ResidualBlock]],
        channels: int,
        num_classes: int,
        options: BlockOptions,
    ) -> None:
        super().__init__()
        before = PLACEMENTS[options.placement].before
        self.stem = stem
        norm, activation = NORMS[options.norm], ACTIVATIONS[options.activation]
        self.stem_norm = nn.Identity() if "norm" in before else norm(stem.out_channels)
        self.stem_act = nn.Identity() if "act" in before else activation()
        self.pool = pool
        self.stages = nn.Sequential(*(nn.Sequential(*blocks) for blocks in stages))
        self.norm = norm(channels) if "norm" in before else nn.Identity()
        self.act = activation() if "act" in before else nn.Identity()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, 3, H, W]` to logits `[N, num_classes]`."""
        h = self.pool(self.stem_act(self.stem_norm(self.stem(x))))
        y = self.act(self.norm(self.stages(h)))
        return self.fc(y.mean((2, 3)).to(x.dtype))

    def extra_repr(self) -> str:
        return fused_parts(self)


def study_network(
    depth: int,
    num_classes: int = 10,
    *,
    variant: str = "cifar",
    block: str | None = None,
    width: int = 1,
    stride_on: str = "conv2",
    groups: int = 1,
    base_width: int = 64,
    survival: float = 1.0,
    init: str = "he",
    memory: str = "store",
    segments: int | None = None,
    anchor_every: int | None = None,
    residual_dtype: torch.dtype | None = None,
    fused: bool = True,
    **options: Any,
) -> nn.Module:
    """Builds a residual network with the blocks that `options` describe.

    With default options this is a `PreActResNet`. Other options give a `ResidualNetwork` in plain
    PyTorch, converted by `pk.convert`, which runs BN-ReLU-Conv chains fused. `print(network)` shows
    which ran fused in the last call; a converted network is called once here, on a small image.

    Args:
        depth: see `preact_resnet`.
        num_classes: number of outputs.
        variant: see `preact_resnet`.
        block: see `preact_resnet`.
        width: see `preact_resnet`.
        stride_on: see `preact_resnet`.
        groups: see `preact_resnet`.
        base_width: see `preact_resnet`.
        survival: probability of keeping the last block's branch in training. Block l of L keeps
            its branch with `1 - l / L * (1 - survival)` (stochastic depth, arXiv 1603.09382).
        init: initialisation of the convolutions: `"he"` by fan-out, `"orthogonal"`, or
            `"zero-branch"`: like `"he"`, but the weight of each branch's last norm or convolution
            is zero, so each block initially equals its shortcut.
        memory: see `PreActStage`. This and the next three options apply only to a `PreActResNet`.
        segments: see `PreActStage`.
        anchor_every: see `PreActStage`.
        residual_dtype: see `PreActStage`.
        fused: False runs plain PyTorch.
        options: see `BlockOptions`.

    Returns:
        The network.

    Raises:
        TypeError: an argument has the wrong type or is unknown.
        ValueError: an argument is unknown or out of range, or no network has that depth.
    """
    known = [f.name for f in fields(BlockOptions)]
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: unknown; expected one of {', '.join(known)}")
    block_options = BlockOptions(**options)
    if init not in INITIALISATIONS:
        expected = ", ".join(map(repr, INITIALISATIONS))
        raise ValueError(f"init: expected one of {expected}, got {init!r}")
    if not is_number(survival):
        raise TypeError(f"survival: expected a number, got {type(survival).__name__}")
    if not 0 < survival <= 1:
        raise ValueError(f"survival: expected above 0 and at most 1, got {survival}")
    shape: dict[str, Any] = {
        "variant": variant,
        "block": block,
        "width": width,
        "stride_on": stride_on,
        "groups": groups,
        "base_width": base_width,
    }
    modes: dict[str, Any] = {
        "memory": memory,
        "segments": segments,
        "anchor_every": anchor_every,
        "residual_dtype": residual_dtype,
    }
    if block_options == BlockOptions() and survival == 1:
        network: nn.Module = preact_resnet(depth, num_classes, **shape, **modes, fused=fused)
        initialise(network, init)
        return network
    defaults = {"memory": "store"}
    for name, value in modes.items():
        if value != defaults.get(name):
            raise ValueError(
                f"{name}: expected {defaults.get(name)!r} with options of blocks other than the "
                f"defaults (full pre-activation, identity shortcuts), got {value!r}"
            )
    network = _residual_network(depth, num_classes, shape, block_options, survival)
    initialise(network, init)
    if fused:
        convert(network)
        _call_once(network, 64 if variant == "imagenet" else 16)
    return network


def _call_once(network: nn.Module, size: int) -> None:
    """Runs a forward for `conversion_report`; restores buffers and the random state.

    Args:
        network: the network.
        size: height and width of the image; the last stage must have more than one pixel.
    """
    weight = next(network.parameters())
    saved_bytes(network, weight.new_zeros(1, 3, size, size))


def _residual_network(
    depth: int, num_classes: int, shape: dict[str, Any], options: BlockOptions, survival: float
) -> ResidualNetwork:
    layout = resnet_layout(depth, num_classes, **shape)
    total, stages, number = sum(layout.counts), [], 0
    for blocks in layout.stages():
        stage = []
        for in_channels, channels, stride in blocks:
            number += 1
            stage.append(
                ResidualBlock(
                    in_channels,
                    channels,
                    stride,
                    options,
                    is_bottleneck=layout.block == "bottleneck",
                    groups=shape["groups"],
                    base_width=shape["base_width"],
                    stride_on=shape["stride_on"],
                    survival=1 - number / total * (1 - survival),
                )
            )
        stages.append(stage)
    stem, pool = layout.stem()
    return ResidualNetwork(stem, pool, stages, layout.out_channels, num_classes, options)


def initialise(network: nn.Module, init: str) -> None:
    """Initialises the convolutions of a network in place, as `study_network` describes.

    Raises:
        ValueError: `init` is `"zero-branch"`, and branches could not train: they end with an
            activation or are multiplied by zero.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            if init == "orthogonal":
                nn.init.orthogonal_(module.weight, nn.init.calculate_gain("relu"))
            else:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    if init != "zero-branch":
        return
    for module in network.modules():
        if isinstance(module, PreActBlock):
            *_, (_, conv) = module.units()
            nn.init.zeros_(conv.weight)
        elif isinstance(module, ResidualBlock):
            if module.placement.behind[-1:] == ("act",):
                raise ValueError(
                    "init: expected 'he' or 'orthogonal' with placement "
                    f"{module.options.placement!r}, where branches end with an activation, "
                    "got 'zero-branch'"
                )
            if module.options.residual_scale == 0 or module.options.branch_scale == 0:
                raise ValueError(
                    "init: expected 'he' or 'orthogonal' with branches that are multiplied by "
                    "zero (residual_scale, branch_scale), got 'zero-branch'"
                )
            nn.init.zeros_((module.last_norm or module.last_conv).weight)  # type: ignore[arg-type]


def fused_parts(network: nn.Module) -> str:
    """Describes how many norms ran fused in the last call, and into what."""
    if isinstance(network, PreActResNet):
        count = sum(isinstance(m, BatchNormBase) for m in network.modules())
        return f"{count} of {count} norms fused" if network.fused else "plain PyTorch"
    sites = list(conversion_report(network))
    if not sites:
        return "plain PyTorch: no norm"
    if not any(s.fused for s in sites):
        return "plain PyTorch"
    counts = Counter(
        f"in {s.into}" if s.fused else f"plain, as {s.reason.replace('(add)', '')}".strip()
        for s in sites
    )
    parts = "; ".join(f"{count} {what}" for what, count in counts.most_common())
    return f"{sum(s.fused for s in sites)} of {len(sites)} norms fused: {parts}"
