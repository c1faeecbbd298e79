"""What the generated forward of a converted module calls.

Each function names the modules that it reads relative to `parent`, so that they are looked up at
every call: whoever replaces a module or adds hooks to it gets the new behaviour.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels.kernels.contract import Conv
from preact_kernels.modules.batch_norm import (
    batch_norm_arguments,
    is_bare_conv,
    is_bare_norm,
    is_stage_conv,
)
from preact_kernels.modules.norm_act import is_norm_act
from preact_kernels.modules.run_blocks import run_stage
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.bn_relu import bn_relu_of
from preact_kernels.ops.bn_relu_conv import ConvArguments, bn_relu_conv2d_of
from preact_kernels.ops.memory_mode import MemoryMode
from preact_kernels.ops.plain_operators import has_served_parameters

STAGES = "preact_stages"  # attribute of a module: its `StageState`s


# Generated code holds plain tuples of names, which are paths below some module.
NormName = tuple[str, bool]  # a batch norm, and whether it contains its ReLU
UnitNames = tuple[NormName, str]  # and a convolution
# Units, projection, whether there is a shortcut, and whether it is added in place.
BlockNames = tuple[tuple[UnitNames, ...], str | None, bool, bool]


class StageState:
    """The memory mode of the stage that begins with a batch norm, kept by the norm's parent.

    Names of attributes are those of `PreActStage`.
    """

    def __init__(self, memory: str = "store") -> None:
        self.memory = memory
        self.segments: int | None = None
        self.anchor_every: int | None = None
        self.run: Callable[[list[NamedBlock], Tensor], Tensor] | None = None  # of a planner

    @staticmethod
    def of(parent: nn.Module) -> dict[str, "StageState"]:
        """The stages that begin with a child of `parent`, by the child's name."""
        if STAGES not in parent.__dict__:
            parent.__dict__[STAGES] = collections.defaultdict(StageState)
        return parent.__dict__[STAGES]


def stage(
    x: Tensor, blocks: Sequence[tuple[nn.Module, BlockNames]], owner: nn.Module, first_norm: str
) -> Tensor:
    """Runs blocks in a row, in the memory mode that `owner` has for those after `first_norm`."""
    views = [NamedBlock(parent, names) for parent, names in blocks]
    state = StageState.of(owner)[first_norm]
    if state.run is not None:
        return state.run(views, x)
    memory = MemoryMode(state.memory, state.segments, state.anchor_every)
    return run_stage(views, NamedBlock.is_fusable, x, memory)


def unit(
    x: Tensor,
    parent: nn.Module,
    names: UnitNames,
    padding: tuple[int, int] = (0, 0),
    residual: Tensor | None = None,
    is_in_place: bool = False,
) -> Tensor:
    """`conv(pad(relu(bn(x)))) [+ residual]`."""
    (bn_name, has_relu), conv_name = names
    bn, conv = child(parent, bn_name), child(parent, conv_name)
    if not (_is_bare(bn, has_relu) and is_bare_conv(conv)) or x.dim() != 4:
        a = _plain_bn_relu(bn, has_relu, x)
        y = conv(F.pad(a, [padding[1]] * 2 + [padding[0]] * 2) if any(padding) else a)
        return y if residual is None else _sum(y, residual, is_in_place)
    conv = cast(nn.Conv2d, conv)
    pads: Any = conv.padding
    if any(padding):
        pads = tuple(own + more for own, more in zip(pads, padding, strict=True))
    arguments = ConvArguments(conv.weight, conv.bias, conv.stride, pads, conv.dilation, conv.groups)
    bn_arguments = batch_norm_arguments(cast(nn.BatchNorm2d, bn))
    # In place, the sum has the dtype that autocast gives the convolution.
    is_fused_sum = residual is not None and _fits(residual, x, arguments)
    if residual is None or not is_fused_sum or (is_in_place and is_autocast(x)):
        y = bn_relu_conv2d_of(x, bn_arguments, arguments, None)
        return y if residual is None else _sum(y, residual, is_in_place)
    return bn_relu_conv2d_of(x, bn_arguments, arguments, residual)


def bn_relu(x: Tensor, parent: nn.Module, name: NormName) -> Tensor:
    """`relu(bn(x))`."""
    bn = child(parent, name[0])
    if x.dim() != 4 or not _is_bare(bn, name[1]):
        return _plain_bn_relu(bn, name[1], x)
    return bn_relu_of(x, batch_norm_arguments(cast(nn.BatchNorm2d, bn)))


def child(parent: nn.Module, name: str) -> nn.Module:
    """The module `name` below `parent`; shorter than `get_submodule`, as it is called often."""
    module: Any = parent._modules.get(name)
    return module if module is not None else functools.reduce(_step, name.split("."), parent)


def _step(module: nn.Module, name: str) -> nn.Module:
    return cast(nn.Module, module._modules[name])


def _is_bare(bn: nn.Module, has_relu: bool) -> bool:
    return is_norm_act(bn) and has_served_parameters(bn) if has_relu else is_bare_norm(bn)


def _plain_bn_relu(bn: nn.Module, has_relu: bool, x: Tensor) -> Tensor:
    return bn(x) if has_relu else F.relu(bn(x))


def _sum(y: Tensor, residual: Tensor, is_in_place: bool) -> Tensor:
    return y.add_(residual) if is_in_place else y + residual


def _fits(residual: Tensor, x: Tensor, conv: ConvArguments) -> bool:
    """Whether `residual` has the shape and dtype of the unit's output."""
    if isinstance(conv.padding, str) or residual.dtype != x.dtype or residual.dim() != 4:
        return False
    stride, padding, dilation = cast(Any, conv[2:5])
    geometry = Conv(stride, padding, dilation, conv.groups)
    return list(residual.shape) == geometry.output_shape(x.shape, conv.weight.shape)


class NamedBlock:
    """A block made of modules of another class; see `run_blocks.Block`."""

    residual_dtype: torch.dtype | None = None

    def __init__(self, parent: nn.Module, names: BlockNames) -> None:
        self.parent = parent
        self._names = names
        self.is_residual = names[2]

    def units(self) -> Iterator[tuple[nn.BatchNorm2d, nn.Conv2d]]:
        """The pairs of batch norm and convolution, in order."""
        for (bn, _), conv in self._names[0]:
            yield cast(Any, (child(self.parent, bn), child(self.parent, conv)))

    def projection(self) -> nn.Conv2d | None:
        """The convolution of the shortcut; None where there is none."""
        name = self._names[1]
        return None if name is None else cast(nn.Conv2d, child(self.parent, name))

    def is_fusable(self) -> bool:
        """Whether the parameters of the modules may be read in place of calling them."""
        for (bn, has_relu), conv in self._names[0]:
            if not _is_bare(child(self.parent, bn), has_relu):
                return False
            if not is_stage_conv(child(self.parent, conv)):
                return False
        projection = self.projection()
        return projection is None or is_stage_conv(projection)

    def plain_forward(self, x: Tensor) -> Tensor:
        """Calls the modules."""
        h, shortcut, projection = x, x, self.projection()
        for index, ((bn, has_relu), conv) in enumerate(self._names[0]):
            a = _plain_bn_relu(child(self.parent, bn), has_relu, h)
            if index == 0 and projection is not None:
                shortcut = projection(a)
            h = child(self.parent, conv)(a)
        return _sum(h, shortcut, self._names[3]) if self.is_residual else h

    __call__ = plain_forward


class NamedStage(nn.Module):
    """Blocks in a row on their own, with the attributes of a `PreActStage`, for planning."""

    def __init__(self, blocks: Sequence[NamedBlock]) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.parents = nn.ModuleList({b.parent for b in blocks})
        self.memory = "store"
        self.segments: int | None = None
        self.anchor_every: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last block."""
        memory = MemoryMode(self.memory, self.segments, self.anchor_every)
        return run_stage(self.blocks, NamedBlock.is_fusable, x, memory)
