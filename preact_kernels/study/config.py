"""Options of a training run (`python -m preact_kernels.study train`)."""

import argparse
import dataclasses
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preact_kernels.ops.memory_mode import MEMORY_MODES
from preact_kernels.study.blocks import (
    ACTIVATIONS,
    NORMS,
    PLACEMENTS,
    SHORTCUTS,
    BlockOptions,
    check_probability,
    is_number,
)
from preact_kernels.study.networks import INITIALISATIONS, study_network
from preact_kernels.study.recipes import RECIPES


def _option(default: Any, help: str, choices: typing.Iterable[str] | None = None) -> Any:
    metadata = {"help": help, "choices": tuple(choices) if choices else None}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Options of a training run, and of the command, there with `-` for `_`.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is unknown or out of range.
    """

    # network
    depth: int = _option(20, "layers")
    variant: str = _option("cifar", "family", ("cifar", "imagenet", "cifar-wide-stem"))
    block: str | None = _option(None, "kind of block; default by depth", ("basic", "bottleneck"))
    width: int = _option(1, "multiplies the channels of every stage")
    stride_on: str = _option("conv2", "strided convolution of a bottleneck", ("conv1", "conv2"))
    groups: int = _option(1, "groups of the bottlenecks' 3x3 convolutions (ResNeXt)")
    base_width: int = _option(64, "inner channels per group at 64 channels (ResNeXt)")
    placement: str = _option(
        "full-preactivation", "placement of normalisation and activation", PLACEMENTS
    )
    shortcut: str = _option("identity", "kind of shortcut", SHORTCUTS)
    gate_bias: float = _option(-6.0, "initial bias of gates")
    shortcut_scale: float = _option(0.5, "factor of the shortcut in constant-scaling")
    branch_scale: float = _option(1.0, "factor of the branch in constant-scaling")
    shortcut_dropout: float = _option(0.5, "probability in the dropout shortcut")
    norm: str = _option("batch", "normalisation", NORMS)
    activation: str = _option("relu", "activation", ACTIVATIONS)
    dropout: float = _option(0.0, "probability before the last convolution of a branch")
    residual_scale: float | None = _option(None, "initial value of a learned factor of branches")
    se: bool = _option(False, "squeeze-and-excitation at the end of branches")
    survival: float = _option(1.0, "probability of keeping the last branch (stochastic depth)")
    init: str = _option("he", "initialisation of convolutions", INITIALISATIONS)

    # data
    data: str | None = _option(None, "directory of CIFAR files; default: scikit-learn's digits")
    image_size: int = _option(32, "height and width in pixels")
    augment: bool = _option(True, "shift images, and mirror CIFAR's")

    # recipe
    recipe: str = _option("warmup-cosine", "learning rate schedule", RECIPES)
    epochs: int | None = _option(None, "default by recipe: 30, or 200 for the paper's")
    batch: int | None = _option(None, "images per step; default by recipe: 64, or 128")
    lr: float | None = _option(None, "highest learning rate; default 0.1")
    warm_up_steps: int | None = _option(None, "default by recipe: 5% of all, or 400")
    depth_lr: float = _option(
        1.0, "factor of the stem's learning rate; it rises geometrically to 1 at the head"
    )
    momentum: float = _option(0.9, "momentum of SGD")
    weight_decay: float = _option(1e-4, "weight decay of all parameters")
    clip_norm: float | None = _option(None, "largest norm of the whole gradient")
    autocast: str | None = _option(
        None, "dtype of convolutions; float16 scales the loss", ("bfloat16", "float16")
    )
    seed: int = _option(0, "random seed of weights, images and dropout")

    # running
    fused: bool = _option(True, "--no-fused runs plain PyTorch")
    memory: str = _option("store", "memory mode of the stages", MEMORY_MODES)
    segments: int | None = _option(None, "segments per stage, in mode checkpoint")
    anchor_every: int | None = _option(None, "blocks per anchor, in modes rebuild and checkpoint")
    float32_stream: bool = _option(False, "keep the residual stream in float32 under autocast")
    memory_budget: str | None = _option(
        None, "bytes kept for the backward, such as 300MiB: plans the memory modes"
    )
    device: str | None = _option(None, "default: cuda if there is one")
    capture: bool = _option(True, "capture the step in a CUDA graph, in one process on a GPU")
    sync_batch_norm: bool = _option(False, "share batch statistics between processes")
    checkpoint_every: int | None = _option(None, "steps between checkpoints; default: an epoch")
    diagnose_every: int = _option(50, "steps between measurements of signal flow; 0: never")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field, getattr(self, field.name))
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name}: expected a finite number, got {value}")
            if choices and value is not None and value not in choices:
                expected = ", ".join(map(repr, choices))
                raise ValueError(f"{field.name}: expected one of {expected}, got {value!r}")
        for name in ("image_size", "epochs", "batch", "checkpoint_every"):
            _check_range(name, getattr(self, name), 1)
        for name in ("warm_up_steps", "diagnose_every", "seed", "momentum", "weight_decay"):
            _check_range(name, getattr(self, name), 0)
        for name in ("lr", "clip_norm", "depth_lr"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        check_probability("dropout", self.dropout)
        for name in ("epochs", "batch", "lr"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(RECIPES[self.recipe], name))
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget)

    def block_options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(BlockOptions)}

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        default = Config(recipe=self.recipe)
        values = dataclasses.asdict(self).items()
        return {k: v for k, v in values if k == "recipe" or v != getattr(default, k)}


RUNNING = (
    "data",
    "fused",
    "memory",
    "segments",
    "anchor_every",
    "memory_budget",
    "device",
    "capture",
    "checkpoint_every",
    "diagnose_every",
)
"""Options that may change when a run continues; results differ only by rounding."""


def _kind(field: dataclasses.Field) -> tuple[type, bool]:
    """Returns the type of an option, and whether it may be None."""
    annotation = typing.get_type_hints(Config)[field.name]
    if isinstance(annotation, types.UnionType):
        kind, _ = typing.get_args(annotation)
        return kind, True
    return annotation, False


def _check_type(field: dataclasses.Field, value: object) -> None:
    kind, is_optional = _kind(field)
    if value is None and is_optional:
        return
    is_right = is_number(value) if kind is float else type(value) is kind
    if not is_right:
        raise TypeError(f"{field.name}: expected {kind.__name__}, got {type(value).__name__}")


def _check_range(name: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def parse_bytes(text: str) -> int:
    """Parses `"300MiB"`, `"1.5 GB"` or `"1000000"` as bytes.

    Raises:
        ValueError: the text is not a number of bytes.
    """
    powers = {"": 0, "k": 1, "m": 2, "g": 3}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)(i?)b?\s*", text.lower())
    if found is None:
        raise ValueError(f"memory_budget: expected bytes such as 300MiB, got {text!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** powers[prefix])


def build_network(config: Config, classes: int) -> nn.Module:
    """The initial network of a run, on the CPU."""
    torch.manual_seed(config.seed)
    return study_network(
        config.depth,
        classes,
        variant=config.variant,
        block=config.block,
        width=config.width,
        stride_on=config.stride_on,
        groups=config.groups,
        base_width=config.base_width,
        survival=config.survival,
        init=config.init,
        memory=config.memory,
        segments=config.segments,
        anchor_every=config.anchor_every,
        residual_dtype=torch.float32 if config.float32_stream else None,
        fused=config.fused,
        **config.block_options(),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all options to a parser."""
    for field in dataclasses.fields(Config):
        kind, _ = _kind(field)
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        text = field.metadata["help"].replace("%", "%%")
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {
                "type": kind,
                "choices": field.metadata["choices"],
                "metavar": kind.__name__,
            }
            if field.metadata["choices"]:
                options.pop("metavar")
        if field.default is not None and kind is not bool:
            text += f" (default {field.default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=text, **options)
