"""Operations that can be deferred, in PyTorch's own operators."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels import torch_compat
from preact_kernels.conversion.deferred import Node, Operation
from preact_kernels.conversion.owners import Owner
from preact_kernels.kernels.contract import Conv
from preact_kernels.ops.batch_norm import BatchNorm


class NormSettings(NamedTuple):
    """Arguments of a batch norm other than its input; weight and bias are inputs of the node."""

    has_weight: bool
    has_bias: bool
    bn: BatchNorm  # without weight and bias
    owner: Owner | None  # the module that called it, if known

    def arguments(self, affine: Sequence[Tensor]) -> BatchNorm:
        """Returns arguments of the fused ops; `affine`: the node's inputs after the first."""
        rest = list(affine)
        weight = rest.pop(0) if self.has_weight else None
        bias = rest.pop(0) if self.has_bias else None
        return BatchNorm(weight, bias, *self.bn[2:])


class ConvSettings(NamedTuple):
    """Arguments of a convolution other than its input, weight and bias."""

    conv: Conv
    owner: Owner | None  # the module that called it, if known


class CallSettings(NamedTuple):
    """A function, and its arguments after the first."""

    func: Callable
    args: tuple
    kwargs: dict


def plain_norm(s: NormSettings, x: Tensor, *affine: Tensor, updates: bool = False) -> Tensor:
    """Batch norm; `updates`: whether it updates the running statistics in training."""
    bn = s.arguments(affine)
    mean, var = bn.running_mean, bn.running_var
    if bn.training and not updates and mean is not None and var is not None:
        mean, var = mean.clone(), var.clone()  # checkpoints expect the same saved tensors
    momentum: Any = bn.momentum
    if bn.process_group is not None:
        return torch_compat.sync_batch_norm(
            x, bn.weight, bn.bias, mean, var, momentum, bn.eps, bn.process_group
        )
    return F.batch_norm(x, mean, var, bn.weight, bn.bias, bn.training, momentum, bn.eps)


def _conv(s: ConvSettings, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, weight, bias, *s.conv)


NORM = Operation("batch norm", plain_norm, precedes_relu=True)
RELU = Operation("relu", lambda _, x: F.relu(x), is_relu=True)
CONV = Operation("conv2d", _conv)
ADD = Operation("add", lambda _, a, b: a + b, is_sum=True)
PAD = Operation("pad", lambda sizes, x: F.pad(x, sizes))
CAT = Operation("cat", lambda _, *tensors: torch.cat(tensors, 1))
POOL = Operation("pooling", lambda s, x: s.func(x, *s.args, **s.kwargs))


def tracked_statistics(node: Node) -> list[Tensor]:
    """Returns the running statistics that a node updates."""
    return _running_statistics(node, True)


def constants(node: Node) -> list[Tensor]:
    """Returns tensors other than its inputs that a node reads."""
    return _running_statistics(node, False)


def _running_statistics(node: Node, training: bool) -> list[Tensor]:
    if node.operation is not NORM or node.settings.bn.training != training:
        return []
    return [t for t in node.settings.bn[2:4] if t is not None]
