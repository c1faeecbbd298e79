"""How the fused modules read an `nn.BatchNorm2d` child.

A fused module reads its children and does not call them. It calls them (`is_bare_norm`) if a child
has hooks or is a subclass.
"""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from preact_kernels import torch_compat
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.plain_operators import (
    has_mixed_dtypes,
    has_served_parameters,
    is_transformed,
)

HALVES = (torch.bfloat16, torch.float16)

# The methods that a call of a child runs. An attribute of the child may replace each.
_CALLED = (
    *("forward", "_call_impl", "_slow_forward"),
    *("_conv_forward", "_check_input_dim", "_check_non_zero_input_channels"),
    *("units", "projection", "is_fusable", "plain_forward"),
)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks of its own, or a method that replaces its class's."""
    if torch_compat.has_module_hook(module):
        return True
    own = module.__dict__
    for name in _CALLED:  # noqa: SIM110 - a loop: this runs for every child at every call
        if name in own:
            return True
    return False


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs more than its `forward`."""
    return has_own_hooks(module) or torch_compat.has_global_module_hook()


def is_bare_norm(bn: nn.Module) -> bool:
    """Whether a fused module may read the parameters of `bn` in place of calling it."""
    return (
        type(bn) in (nn.BatchNorm2d, nn.SyncBatchNorm)
        and not has_hooks(bn)
        and has_served_parameters(bn)
        and has_both_statistics_or_none(bn)
    )


def has_both_statistics_or_none(bn: Any) -> bool:
    """Whether PyTorch takes the running statistics of `bn`; a call of `bn` raises its error."""
    return (bn.running_mean is None) == (bn.running_var is None)


def is_bare_conv(conv: nn.Module) -> bool:
    """Whether a fused module may read the weights of `conv` in place of calling it."""
    return (
        type(conv) is nn.Conv2d
        and conv.padding_mode == "zeros"
        and not has_hooks(conv)
        and has_served_parameters(conv)
    )


def is_stage_conv(conv: nn.Module) -> bool:
    """Whether a stage may read the weight of `conv` in place of calling it."""
    return is_bare_conv(conv) and conv.bias is None and _has_valid_pairs(conv)


def _has_valid_pairs(conv: Any) -> bool:
    """Whether the numbers of a convolution are pairs; PyTorch takes others, or says why not."""
    stride, padding, dilation = conv.stride, conv.padding, conv.dilation
    return (
        type(stride) is type(padding) is type(dilation) is tuple
        and len(stride) == len(padding) == len(dilation) == 2
        and min(stride + dilation) > 0 <= min(padding)
    )


def uses_batch(bn: nn.Module) -> bool:
    """Whether a call of `bn` normalises with the statistics of its batch."""
    return bn.training or bn.running_mean is None


def process_group(bn: nn.Module):
    """The group over which a SyncBatchNorm child shares its statistics, or None."""
    if not (isinstance(bn, nn.SyncBatchNorm) and uses_batch(bn) and bn.training):
        return None
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    group = bn.process_group or torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def batch_norm_arguments(bn: nn.BatchNorm2d, is_widened: bool = False) -> BatchNorm:
    """The arguments of a child's call.

    Args:
        bn: the child.
        is_widened: the input is a float32 residual stream, and half-precision parameters are
            converted to float32.
    """
    training = uses_batch(bn)
    is_tracked = bn.training and bn.track_running_stats
    batch_count = bn.num_batches_tracked if is_tracked else None
    momentum = bn.momentum if is_tracked else 0.0
    if momentum is None and batch_count is None:  # PyTorch then keeps the running statistics
        momentum = 0.0
    mean, var = (bn.running_mean, bn.running_var) if is_tracked or not training else (None, None)
    weight, bias = bn.weight, bn.bias
    if is_widened:
        weight, bias = _widened(weight), _widened(bias)
        if not training:
            mean, var = _widened(mean), _widened(var)
    return BatchNorm(
        weight,
        bias,
        mean,
        var,
        training,
        momentum,
        bn.eps,
        process_group(bn),
        batch_count,
        is_widened,
    )


def _widened(t: Any) -> Any:
    return t.float() if t is not None and t.dtype in HALVES else t


def plain_batch_norm(bn: nn.Module, x: Tensor, residual_dtype: torch.dtype | None = None) -> Tensor:
    """`bn(x)` in place of kernels, and under transforms too in the dtype of `x`.

    Args:
        bn: the child.
        x: `[N, C, H, W]`.
        residual_dtype: of the residual stream, where that is set.
    """
    is_bare = is_transformed() and is_bare_norm(bn)
    if is_bare and has_mixed_dtypes(x, *bn.parameters(), *bn.buffers()):
        return widened_batch_norm(bn, x.float()).to(x.dtype)
    return bn(x) if residual_dtype is None else widened_batch_norm(bn, x)


def plain_conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """`conv(x)` in place of kernels, under transforms also with float32 weights beside halves."""
    if not (is_transformed() and is_bare_conv(conv)) or is_autocast(x):
        return conv(x)
    if x.dtype not in HALVES or conv.weight.dtype != torch.float32:
        return conv(x)
    bias = None if conv.bias is None else conv.bias.to(x.dtype)
    geometry: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return F.conv2d(x, conv.weight.to(x.dtype), bias, *geometry)


def widened_batch_norm(bn: nn.Module, x: Tensor) -> Tensor:
    """`bn(x)` for a float32 `x`, in float32 beside half-precision parameters too."""
    tensors = {**dict(bn.named_parameters()), **dict(bn.named_buffers())}
    wide = {n: t.float() for n, t in tensors.items() if t.dtype in HALVES}
    if not wide:
        return bn(x)
    if isinstance(x, fx.Proxy):
        return _traced_widened_batch_norm(bn, x)
    if x.dtype != torch.float32:
        return bn(x)
    y = torch.func.functional_call(bn, wide, (x,))
    if bn.training:
        with torch.no_grad():
            for name, buffer in bn.named_buffers():
                if name in wide:
                    buffer.copy_(wide[name])
    return y


def _traced_widened_batch_norm(bn: nn.Module, x: Any) -> Any:
    """A call in the graph that gets the module, as its mode and the dtype of `x` are a run's.

    `fx.wrap` would not do: no argument of a wrapped function may be a module.
    """
    module = x.tracer.create_proxy("get_attr", x.tracer.path_of_module(bn), (), {})
    return x.tracer.create_proxy("call_function", widened_batch_norm, (module, x), {})
