"""Calls that reach all kernels of a backend, in shapes of common networks and a few others."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels.activations import ACTIVATIONS
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import HALVES
from preact_kernels.kernels.dropout import Mask
from preact_kernels.modules.norm_act import NormAct
from preact_kernels.modules.norm_act_conv import NormActConv
from preact_kernels.modules.preact_block import PreActBasicBlock, PreActBottleneck
from preact_kernels.modules.preact_stage import PreActStage
from preact_kernels.norms import BatchNorm
from preact_kernels.ops import dispatch
from preact_kernels.ops.arguments import UnitArguments
from preact_kernels.ops.checks import dtype_name
from preact_kernels.ops.node import run_unit
from preact_kernels.ops.residual_add import residual_add

BLOCKS: dict[str, Any] = {"basic": PreActBasicBlock, "bottleneck": PreActBottleneck}


class Column(NamedTuple):
    """Dtype of the activations, and whether float32 products may round operands to TF32."""

    dtype: torch.dtype
    tf32: bool = False
    device_type: str = "cpu"

    def __str__(self) -> str:
        return "TF32" if self.tf32 else dtype_name(self.dtype)

    @property
    def is_coarse(self) -> bool:
        """Whether rounding errors of products change the signs of many ReLU inputs."""
        return self.tf32 or self.dtype in HALVES

    @property
    def is_slow(self) -> bool:
        """Whether problems must be small: plain convolutions in float16 are slow on many CPUs."""
        return self.dtype == torch.float16 and self.device_type == "cpu"


class Case(NamedTuple):
    """A call, and its equivalent in plain PyTorch; modules and inputs are on the CPU."""

    name: str
    fused: Any  # a function or a module
    plain: Any
    inputs: dict[str, Tensor]  # keyword arguments

    def to(self, device: torch.device) -> "Case":
        fused, plain = (
            f.to(device) if isinstance(f, nn.Module) else f for f in (self.fused, self.plain)
        )
        inputs = {name: t.to(device) for name, t in self.inputs.items()}
        return Case(self.name, fused, plain, inputs)


class _Autocast(nn.Module):
    """Runs a module under autocast, except in float64."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype, enabled=x.dtype != torch.float64):
            return self.module(x)


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a fused module that runs plain `torch.nn` calls."""
    module = copy.deepcopy(module)
    for child in module.modules():
        if hasattr(child, "fused"):
            child.__dict__["fused"] = False
    return module


def randomised(module: nn.Module) -> nn.Module:
    """Sets parameters of norms and running statistics to random values, far from the defaults."""
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if t.dim() == 1:
            t.detach().copy_(torch.rand_like(t) + 0.5 if "var" in name else torch.randn_like(t))
    return module


def _away_from_kinks(stage: PreActStage) -> None:
    """Sets the norms of a stage so that outputs are far from 0, for inputs near 1 or -1.

    Rounding decides the signs of ReLU inputs near 0, and in half precision a few such signs would
    dominate the error of several blocks. The first norm of a block has outputs of both signs in
    each channel while the residual stream stays near 1 or -1; outputs of the other norms have one
    sign per channel.
    """
    is_near_one = True
    for block in stage:
        for name, norm in block.named_children():
            if not isinstance(norm, nn.BatchNorm2d):
                continue
            has_both_signs = name == "bn1" and is_near_one
            norm.weight.detach().uniform_(*((0.8, 1.2) if has_both_signs else (0.15, 0.25)))
            norm.bias.detach().bernoulli_().mul_(2).sub_(1).mul_(0.3 if has_both_signs else 1)
        children = dict(block.named_children())
        (weight,) = (children.get("conv3") or children["conv2"]).parameters()
        weight.detach().mul_(0.2)
        is_near_one &= not hasattr(block, "shortcut")


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a module to `dtype`, but keeps batch norms in float32 if `dtype` is half precision.

    Group norms are cast: on a GPU, PyTorch refuses half precision mixed with float32 parameters
    outside of autocast.
    """
    for child in module.modules():
        is_batch_norm = isinstance(child, nn.modules.batchnorm._BatchNorm)
        if not list(child.children()):
            child.to(torch.promote_types(dtype, torch.float32) if is_batch_norm else dtype)
    return module


def _case(name: str, module: nn.Module, column: Column, inputs: dict[str, Tensor]) -> Case:
    module = _in_dtype(randomised(module), column.dtype)
    inputs = {name: t.to(column.dtype) for name, t in inputs.items()}
    return Case(name, module, plain_copy(module), inputs)


def _images(*shape: int) -> Tensor:
    return torch.randn(shape) + 0.5


def _norm_module(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.3)
    if kind == "group":
        return nn.GroupNorm(channels // 8, channels)
    return nn.InstanceNorm2d(channels, affine=True)


def _modulation(names: Sequence[str], images: int, channels: int) -> dict[str, Tensor]:
    return {n: torch.randn(images, channels, 1, 1) / 2 for n in ("scale", "shift") if n in names}


def _norm(
    norm: str, activation: str, column: Column, modulates: bool = False, training: bool = True
) -> Case:
    module = NormAct(_norm_module(norm, 48), activation).train(training)
    names = ("scale", "shift") if modulates else ()
    inputs = {"x": _images(4, 48, 9, 7), **_modulation(names, 4, 48)}
    return _case(f"{norm} norm, {activation}", module, column, inputs)


def _conv(
    column: Column,
    channels: int,
    out_channels: int,
    size: int,
    *given: str,
    norm: str = "batch",
    image: tuple[int, int] | None = None,
    training: bool = True,
    **options: Any,
) -> Case:
    """A unit; `given` names optional inputs."""
    images = 2 if column.is_slow else 4
    image = image or ((4, 4) if column.is_slow else (8, 8))
    options = {"padding": size // 2, "bias": False, **options}
    conv = nn.Conv2d(channels, out_channels, size, **options)
    activation = "relu" if norm == "batch" else "silu"
    module = NormActConv(_norm_module(norm, channels), activation, conv).train(training)
    inputs = {"x": _images(images, channels, *image), **_modulation(given, images, channels)}
    if "residual" in given:
        inputs["residual"] = torch.randn(images, out_channels, *image)
    stride = f", stride {conv.stride[0]}" if conv.stride[0] > 1 else ""
    name = f"{channels} to {out_channels} channels, {size}x{size}, image {image[0]}x{image[1]}"
    return _case(name + stride, module, column, inputs)


def _conv_3d(column: Column) -> Case:
    conv = nn.Conv3d(16, 16, 3, padding=1)
    module = NormActConv(nn.GroupNorm(4, 16), "silu", conv)
    return _case("3-D", module, column, {"x": _images(2, 16, 5, 4, 6)})


def _residual_add(column: Column) -> Case:
    def plain(x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    inputs = {name: _images(4, 48, 9, 7).to(column.dtype) for name in ("x", "branch")}
    return Case("addition", residual_add, plain, inputs)


def _residual_norm(column: Column) -> Case:
    """`relu(norm(x) + branch)`, as at the end of a post-activation block."""

    def fused(x: Tensor, branch: Tensor) -> Tensor:
        return run_unit(x, UnitArguments(BatchNorm(None, None)), branch)

    def plain(x: Tensor, branch: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, None, None, training=True) + branch)

    x, noise = (_images(4, 48, 9, 7) for _ in range(2))
    total = noise + 0.25 * noise.sign()  # rounding decides no sign
    branch = total - F.batch_norm(x, None, None, training=True)
    inputs = {"x": x.to(column.dtype), "branch": branch.to(column.dtype)}
    return Case("norm and addition", fused, plain, inputs)


def _layout(name: str, column: Column) -> Case:
    def converted(x: Tensor) -> Tensor:
        x = x.detach()
        if name == "nchw":
            x = x.contiguous(memory_format=torch.channels_last)
        return getattr(layout, name)(x)

    # Large enough for the CPU library to convert (65,536 elements).
    return Case(
        name, converted, lambda x: x.detach(), {"x": _images(4, 80, 16, 16).to(column.dtype)}
    )


def _dropout(column: Column) -> Case:
    factor = 1 / (1 - 0.25)

    def masked(x: Tensor, branch: Tensor) -> Tensor:
        kernels = dispatch.kernels_for(x)
        bits = kernels.dropout_bits(branch.detach().movedim(1, -1).contiguous())
        values = x.detach().clone(memory_format=torch.channels_last)
        return kernels.dropout(values, Mask(bits, factor))

    def plain(x: Tensor, branch: Tensor) -> Tensor:
        return (x * (branch * factor)).detach()

    x = _images(4, 48, 9, 7)
    kept = torch.empty_like(x).bernoulli_(0.75)
    return Case(
        "dropout", masked, plain, {"x": x.to(column.dtype), "branch": kept.to(column.dtype)}
    )


def _stage(
    column: Column, kind: str, width: int, count: int = 2, projects: bool = False, **options
) -> Case:
    """Blocks without projections, which backends run in one call; or the first with stride 2."""
    block, channels = BLOCKS[kind], width * BLOCKS[kind].expansion
    blocks = [block(channels, width) for _ in range(count)]
    if projects:
        blocks[0] = block(32, width, stride=2)
    stage = PreActStage(blocks, **options)
    images, size = (2, 4) if column.is_slow and not projects else (4, 8)
    x = _images(images, 32 if projects else channels, size, size)
    randomised(stage)
    if column.is_coarse:
        _away_from_kinks(stage)
        x = x.sign() * (1 + torch.rand_like(x) / 10)
    name = f"{count} {kind} blocks of width {width}, {stage.extra_repr()}"
    module = _in_dtype(stage, column.dtype)
    stream = x if options.get("residual_dtype") else x.to(column.dtype)
    return Case(name, module, plain_copy(module), {"x": stream})


def _under_autocast(column: Column) -> Case:
    """A stage with float32 parameters, and products in the column's dtype."""
    case = _stage(column, "bottleneck", 16)
    fused, plain = (_Autocast(m.float(), column.dtype) for m in (case.fused, case.plain))
    return Case("autocast", fused, plain, {name: t.float() for name, t in case.inputs.items()})


def _convs(
    *sizes: tuple[int, int], size: int, given: Sequence[str] = (), **options: Any
) -> Callable[[Column], list[Case]]:
    """Units of one kernel size; `sizes` are pairs of input and output channels."""
    return lambda column: [_conv(column, c, k, size, *given, **options) for c, k in sizes]


def _many_pixels(column: Column) -> list[Case]:
    width = 16 if column.is_slow else 32
    return [
        _conv(column, 16, 16, 3, "residual", image=(32, 32)),
        _conv(column, 16, 64, 1, image=(32, 32)),
        _conv(column, width, width, 3, image=(32, 32), norm="group"),
    ]


def _float32_streams(column: Column) -> list[Case]:
    modes = ("store", "rebuild") if column.dtype in HALVES else ()
    return [
        _stage(column, "bottleneck", 16, count=3, memory=memory, residual_dtype=torch.float32)
        for memory in modes
    ]


def _stages(*widths: int, kind: str, **options: Any) -> Callable[[Column], list[Case]]:
    return lambda column: [_stage(column, kind, width, **options) for width in widths]


def _each(
    *parts: Callable[[Column], list[Case]],
) -> Callable[[Column], list[Case]]:
    return lambda column: [case for part in parts for case in part(column)]


KINDS: dict[str, Callable[[Column], list[Case]]] = {
    "batch norm, ReLU": lambda column: [_norm("batch", "relu", column)],
    "batch norm, evaluation": lambda column: [_norm("batch", "relu", column, training=False)],
    "batch norm, every activation": lambda column: [_norm("batch", a, column) for a in ACTIVATIONS],
    "group norm, SiLU": lambda column: [
        _norm("group", "silu", column, modulates) for modulates in (False, True)
    ],
    "instance norm, leaky ReLU": lambda column: [_norm("instance", "leaky_relu", column)],
    "1x1 convolution": _each(
        _convs((16, 64), (32, 128), (64, 256), (48, 96), size=1),
        _convs((64, 16), (128, 32), (256, 64), size=1, given=["residual"]),
    ),
    "3x3 convolution": _each(
        _convs((16, 16), (32, 32), (64, 64), size=3, given=["residual"]),
        _convs((16, 16), (32, 48), (64, 64), size=3, image=(7, 9)),
    ),
    "5x5 convolution": _convs((16, 32), size=5),
    "strided convolution": _each(
        _convs((64, 128), size=1, stride=2), _convs((32, 64), size=3, stride=2)
    ),
    "large weight": _each(_convs((128, 128), size=3), _convs((512, 256), size=1)),
    "many pixels": _many_pixels,
    "groups, dilation, bias": _each(
        _convs((48, 32), size=3, groups=4, bias=True),
        _convs((10, 17), size=3, padding=2, dilation=2, bias=True),
    ),
    "depthwise convolution": _each(
        _convs((48, 48), size=5, groups=48), _convs((40, 40), size=3, stride=2, groups=40)
    ),
    "3-D convolution": lambda column: [_conv_3d(column)],
    "convolution, evaluation": _convs((64, 64), size=3, training=False),
    "group norm, SiLU, convolution": _each(
        _convs((64, 64), size=3, given=["residual", "scale", "shift"], norm="group"),
        _convs((64, 32), size=1, norm="group"),
    ),
    "residual addition": lambda column: [_residual_add(column), _residual_norm(column)],
    "layouts": lambda column: [_layout("nhwc", column), _layout("nchw", column)],
    "dropout": lambda column: [_dropout(column)],
    "bottlenecks": _stages(16, 32, 64, kind="bottleneck"),
    "basic blocks": _stages(16, 32, 64, kind="basic"),
    "projections": _each(*(_stages(16, kind=kind, projects=True) for kind in BLOCKS)),
    "rebuilt residual stream": _each(
        *(_stages(16, kind=kind, count=3, memory="rebuild") for kind in BLOCKS)
    ),
    "checkpoints": _stages(16, kind="bottleneck", count=3, memory="checkpoint", segments=2),
    "float32 residual stream": _float32_streams,
    "autocast": lambda column: [_under_autocast(column)] if column.dtype in HALVES else [],
}
"""By kind, a function that returns the cases for a column of the table."""
