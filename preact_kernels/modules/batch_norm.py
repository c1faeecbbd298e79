"""How the fused modules read an `nn.BatchNorm2d` child.

A fused module reads its children and does not call them. It calls them (`is_bare_norm`) where a
call does more than their type says: hooks, or another type.
"""

import torch
from torch import Tensor, nn

from preact_kernels import torch_compat
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.running_stats import RunningStatistics

HALVES = (torch.bfloat16, torch.float16)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs more than its `forward`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or torch_compat.has_global_module_hook()
    )


def is_bare_norm(bn: nn.Module) -> bool:
    """Whether a fused module may read the parameters of `bn` in place of calling it."""
    return type(bn) in (nn.BatchNorm2d, nn.SyncBatchNorm) and not has_hooks(bn)


def is_bare_conv(conv: nn.Module) -> bool:
    """Whether a fused module may read the weights of `conv` in place of calling it."""
    return type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and not has_hooks(conv)


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


def batch_norm_arguments(bn: nn.BatchNorm2d, x: Tensor) -> BatchNorm:
    """The arguments of a child's call, and the buffers that the call updates.

    Half-precision tensors are widened beside a float32 `x`: the end of a float32 residual stream.
    """
    training = uses_batch(bn)
    tracked = None
    if bn.training and bn.track_running_stats and bn.running_mean is not None:
        assert bn.running_var is not None
        tracked = RunningStatistics(
            bn.running_mean, bn.running_var, bn.momentum, bn.num_batches_tracked
        )
    mean, var = (None, None) if training else (bn.running_mean, bn.running_var)
    weight, bias, mean, var = (
        v.float() if v is not None and v.dtype in HALVES and x.dtype == torch.float32 else v
        for v in (bn.weight, bn.bias, mean, var)
    )
    return BatchNorm(weight, bias, mean, var, training, bn.eps, process_group(bn), tracked)


def plain_batch_norm(bn: nn.Module, x: Tensor) -> Tensor:
    """`bn(x)`; a float32 `x` is normalised in float32 beside half-precision parameters too."""
    tensors = {**dict(bn.named_parameters()), **dict(bn.named_buffers())}
    wide = {n: t.float() for n, t in tensors.items() if t.dtype in HALVES}
    if not wide or x.dtype != torch.float32:
        return bn(x)
    y = torch.func.functional_call(bn, wide, (x,))
    with torch.no_grad():
        for name, buffer in bn.named_buffers():
            if name in wide:
                buffer.copy_(wide[name])
    return y
