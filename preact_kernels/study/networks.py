"""Residual networks of the study: `preact_resnet`, and the same with other units."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from preact_kernels.conversion.convert import conversion_report, convert
from preact_kernels.memory import saved_bytes
from preact_kernels.models.preact_resnet import PreActResNet, preact_resnet, resnet_layout
from preact_kernels.modules.preact_block import PreActBlock
from preact_kernels.study.units import (
    ACTIVATIONS,
    NORMS,
    PLACEMENTS,
    ResidualUnit,
    UnitOptions,
    is_number,
)
from preact_kernels.torch_compat import BatchNormBase

INITIALISATIONS = ("he", "orthogonal", "zero-branch")


class ResidualNetwork(nn.Module):
    """A stem, stages of `ResidualUnit`s, mean pool and linear.

    A norm or activation that the first unit does not start with follows the stem; the others
    follow the last unit.

    Args:
        stem: the first convolution.
        pool: what follows it.
        stages: the units.
        channels: channels of the last unit's output.
        num_classes: outputs.
        options: of the units.
    """

    def __init__(
        self,
        stem: nn.Conv2d,
        pool: nn.Module,
        stages: Sequence[Sequence[ResidualUnit]],
        channels: int,
        num_classes: int,
        options: UnitOptions,
    ) -> None:
        super().__init__()
        before = PLACEMENTS[options.placement].before
        self.stem = stem
        norm, activation = NORMS[options.norm], ACTIVATIONS[options.activation]
        self.stem_norm = nn.Identity() if "norm" in before else norm(stem.out_channels)
        self.stem_act = nn.Identity() if "act" in before else activation()
        self.pool = pool
        self.stages = nn.Sequential(*(nn.Sequential(*units) for units in stages))
        self.norm = norm(channels) if "norm" in before else nn.Identity()
        self.act = activation() if "act" in before else nn.Identity()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, 3, H, W]` to logits `[N, num_classes]`."""
        h = self.pool(self.stem_act(self.stem_norm(self.stem(x))))
        y = self.act(self.norm(self.stages(h)))
        return self.fc(y.mean((2, 3)).to(x.dtype))

    def extra_repr(self) -> str:
        """What runs fused."""
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
    """A residual network with the units that `options` describe.

    The default unit gives a `PreActResNet`. Any other option of a unit gives a `ResidualNetwork` of
    plain PyTorch, whose BN-ReLU-Conv chains `pk.convert` then runs fused; `print` says which did in
    the last call. The network is called once before it is returned, with a small image.

    Args:
        depth: see `preact_resnet`.
        num_classes: outputs.
        variant: see `preact_resnet`.
        block: see `preact_resnet`.
        width: see `preact_resnet`.
        stride_on: see `preact_resnet`.
        groups: see `preact_resnet`.
        base_width: see `preact_resnet`.
        survival: probability of keeping the last unit's branch in training. That of unit l of L is
            `1 - l / L * (1 - survival)` (stochastic depth, arXiv 1603.09382).
        init: of the convolutions: `"he"` by fan-out, `"orthogonal"`, or `"zero-branch"`: as
            `"he"`, and the last weight of every branch (of a norm, if the branch ends with one) is
            zero: the network starts as its shortcuts.
        memory: see `PreActStage`. This and the next three options apply only to a `PreActResNet`.
        segments: see `PreActStage`.
        anchor_every: see `PreActStage`.
        residual_dtype: see `PreActStage`.
        fused: False runs plain PyTorch throughout.
        options: see `UnitOptions`.

    Returns:
        The network.

    Raises:
        TypeError: an argument has the wrong type or is unknown.
        ValueError: an argument is unknown or out of range, or no network has that depth.
    """
    known = [f.name for f in fields(UnitOptions)]
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: unknown; expected one of {', '.join(known)}")
    unit = UnitOptions(**options)
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
    if unit == UnitOptions() and survival == 1:
        network: nn.Module = preact_resnet(depth, num_classes, **shape, **modes, fused=fused)
        initialise(network, init)
        return network
    defaults = {"memory": "store"}
    for name, value in modes.items():
        if value != defaults.get(name):
            raise ValueError(
                f"{name}: expected {defaults.get(name)!r} beside options of units other than the "
                f"defaults (full pre-activation, identity shortcuts), got {value!r}"
            )
    network = _residual_network(depth, num_classes, shape, unit, survival)
    initialise(network, init)
    if fused:
        convert(network)
        _call_once(network, 64 if variant == "imagenet" else 16)
    return network


def _call_once(network: nn.Module, size: int) -> None:
    """Runs a forward for `conversion_report`; restores buffers and random numbers.

    Args:
        network: new.
        size: of the image, in pixels, so that the last stage has more than one.
    """
    weight = next(network.parameters())
    saved_bytes(network, weight.new_zeros(1, 3, size, size))


def _residual_network(
    depth: int, num_classes: int, shape: dict[str, Any], options: UnitOptions, survival: float
) -> ResidualNetwork:
    layout = resnet_layout(depth, num_classes, **shape)
    total, stages, number = sum(layout.counts), [], 0
    for units in layout.stages():
        stage = []
        for in_channels, channels, stride in units:
            number += 1
            stage.append(
                ResidualUnit(
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
        ValueError: `init` is `"zero-branch"`, and the gradient of a branch would be zero for ever:
            it ends with an activation, or is multiplied by zero.
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
        elif isinstance(module, ResidualUnit):
            if module.placement.behind[-1:] == ("act",):
                raise ValueError(
                    "init: expected 'he' or 'orthogonal' beside placement "
                    f"{module.options.placement!r}, whose branch ends with an activation, "
                    "got 'zero-branch'"
                )
            if module.options.residual_scale == 0 or module.options.branch_scale == 0:
                raise ValueError(
                    "init: expected 'he' or 'orthogonal' beside branches that are multiplied by "
                    "zero (residual_scale, branch_scale), got 'zero-branch'"
                )
            nn.init.zeros_((module.last_norm or module.last_conv).weight)  # type: ignore[arg-type]


def fused_parts(network: nn.Module) -> str:
    """Which batch norms ran fused in the last call, counted by what they are part of."""
    if isinstance(network, PreActResNet):
        count = sum(isinstance(m, BatchNormBase) for m in network.modules())
        return f"{count} of {count} batch norms fused" if network.fused else "plain PyTorch"
    sites = list(conversion_report(network))
    if not sites:
        return "plain PyTorch: no batch norm"
    if not any(s.fused for s in sites):
        return "plain PyTorch"
    counts = Counter(
        f"in {s.into}" if s.fused else f"plain, as {s.reason.replace('(add)', '')}".strip()
        for s in sites
    )
    parts = "; ".join(f"{count} {what}" for what, count in counts.most_common())
    return f"{sum(s.fused for s in sites)} of {len(sites)} batch norms fused: {parts}"
