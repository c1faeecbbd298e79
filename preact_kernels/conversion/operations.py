"""Operations that can be deferred, in PyTorch's operators."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.activations import activate
from preact_kernels.conversion.deferred import Node, Operation
from preact_kernels.conversion.owners import Owner
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import Conv
from preact_kernels.kernels.dropout import Mask
from preact_kernels.norms import InstanceNorm, NormArguments
from preact_kernels.ops.arguments import convolve


class NormSettings(NamedTuple):
    """Arguments of a norm other than its input; weight and bias are inputs of the node."""

    has_weight: bool
    has_bias: bool
    norm: NormArguments  # without weight and bias
    owner: Owner | None  # the module that called it, if known

    @property
    def is_view(self) -> bool:
        return self.norm.returns_view

    def arguments(self, affine: Sequence[Tensor]) -> NormArguments:
        """Returns arguments for the fused ops; `affine` are the node's inputs after the first."""
        rest = list(affine)
        weight = rest.pop(0) if self.has_weight else None
        bias = rest.pop(0) if self.has_bias else None
        return type(self.norm)(weight, bias, *self.norm[2:])


class ConvSettings(NamedTuple):
    """Arguments of a convolution other than its input, weight and bias."""

    conv: Conv
    owner: Owner | None  # the module that called it, if known


class CallSettings(NamedTuple):
    """A function, and its arguments after the first."""

    func: Callable
    args: tuple
    kwargs: dict
    is_view: bool = False  # whether the result is a view


def plain_norm(s: NormSettings, x: Tensor, *affine: Tensor, updates: bool = False) -> Tensor:
    """Runs a norm; `updates` says whether it updates the running statistics in training."""
    norm = s.arguments(affine)
    norm = norm if updates or not norm.training else norm.with_copied_statistics()
    y = norm.plain(x)
    return _WithNCHWGradient.apply(y) if isinstance(norm, InstanceNorm) and len(x) == 1 else y


class _WithNCHWGradient(torch.autograd.Function):
    """Returns a tensor whose gradient is converted to NCHW.

    The backward of PyTorch's instance norm is wrong for one image and a channels_last gradient.
    """

    @staticmethod
    def forward(ctx, y):
        ctx.set_materialize_grads(False)
        return y.detach()

    @staticmethod
    def backward(ctx, dy):
        return None if dy is None else layout.with_plain_strides(dy)


def _conv(s: ConvSettings, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return convolve(x, weight, bias, *s.conv)


class _Dropout(torch.autograd.Function):
    """Multiplies kept elements by a factor and others by 0; saves one bit per element."""

    @staticmethod
    def forward(ctx, x, bits, factor):
        ctx.save_for_backward(bits)
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x * Mask(bits, factor).noise(x)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None, None
        (bits,) = ctx.saved_tensors
        return dy * Mask(bits, ctx.factor).noise(dy), None, None


NORM = Operation("norm", plain_norm, precedes_activation=True)
ACTIVATION = Operation("activation", lambda s, x: activate(x, s), is_activation=True)
# Products and sums with `[N, C, 1, ...]`.
SCALE = Operation("mul", lambda _, x, scale: x * scale)
SHIFT = Operation("add", lambda _, x, shift: x + shift)
DROPOUT = Operation("dropout", lambda mask, x: _Dropout.apply(x, *mask))
PAD = Operation("pad", lambda sizes, x: F.pad(x, sizes))
CONV = Operation("convolution", _conv)
ADD = Operation("add", lambda _, a, b: a + b, is_sum=True)
CAT = Operation("cat", lambda _, *tensors: torch.cat(tensors, 1))
# A copy in NCHW; `execution.py` uses the input itself where that makes no difference.
CONTIGUOUS = Operation("contiguous", lambda _, x: x.contiguous())
# Functions of one image: products with numbers, pooling, interpolation.
CALL = Operation("call", lambda s, x: s.func(x, *s.args, **s.kwargs))


def function_name(node: Node) -> str:
    """Name of a node's function for reports."""
    if node.operation is CALL:
        return node.settings.func.__name__.strip("_")
    return node.settings.name if node.operation is ACTIVATION else node.operation.name


def tracked_statistics(node: Node) -> list[Tensor]:
    """Returns the running statistics that a node updates."""
    is_updated = node.operation is NORM and node.settings.norm.training
    return node.settings.norm.running() if is_updated else []


def constants(node: Node) -> list[Tensor]:
    """Returns tensors that a node reads besides its inputs."""
    is_read = node.operation is NORM and not node.settings.norm.training
    return node.settings.norm.running() if is_read else []
