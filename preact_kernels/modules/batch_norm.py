"""Reads the batch norm of a fused module.

A fused module reads the parameters of its children. It calls the children instead if one has hooks
or is a subclass (`is_bare_norm`).
"""

from typing import Any

import torch
from torch import Tensor, fx, nn

from preact_kernels.modules.attributes import attributes
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.ops.batch_norm import BatchNorm
from preact_kernels.ops.plain_operators import has_mixed_dtypes, has_served_parameters
from preact_kernels.torch_compat import is_distributed, is_transformed

HALVES = (torch.bfloat16, torch.float16)
BATCH_NORMS_OF_IMAGES = (nn.BatchNorm2d, nn.SyncBatchNorm)


def is_bare_norm(norm: nn.Module, types: tuple[type, ...] = BATCH_NORMS_OF_IMAGES) -> bool:
    """Whether a fused module may read the parameters of `norm` instead of calling it.

    Args:
        norm: the child.
        types: supported classes; subclasses are not.
    """
    if type(norm) not in types or has_hooks(norm) or not has_served_parameters(norm):
        return False
    mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    return (mean is None) == (var is None)


def process_group(bn: nn.Module):
    """The group with which a child shares the statistics of its batch, or None."""
    if not (isinstance(bn, nn.SyncBatchNorm) and bn.training and is_distributed()):
        return None
    group = bn.process_group or torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def batch_norm_arguments(bn: Any, upcasts: bool = False) -> BatchNorm:
    """The arguments of a batch norm, as calling the child would use them.

    Args:
        bn: the child.
        upcasts: upcast half-precision parameters and buffers to float32, the dtype of the residual
            stream.
    """
    weight, bias, mean, var, in_training, tracks, momentum, eps = attributes(
        bn,
        *("weight", "bias", "running_mean", "running_var"),
        *("training", "track_running_stats", "momentum", "eps"),
    )
    training = in_training or mean is None
    is_tracked = in_training and tracks
    batch_count = attributes(bn, "num_batches_tracked")[0] if is_tracked else None
    momentum = momentum if is_tracked else 0.0
    if momentum is None and batch_count is None:  # PyTorch leaves the running statistics unchanged
        momentum = 0.0
    if training and not is_tracked:
        mean = var = None
    if upcasts:
        weight, bias = _upcast(weight), _upcast(bias)
        if not training:
            mean, var = _upcast(mean), _upcast(var)
    group = process_group(bn) if type(bn) is nn.SyncBatchNorm else None
    return BatchNorm(weight, bias, mean, var, training, momentum, eps, group, batch_count, upcasts)


def _upcast(t: Any) -> Any:
    return t.float() if t is not None and t.dtype in HALVES else t


def plain_batch_norm(bn: nn.Module, x: Tensor, residual_dtype: torch.dtype | None = None) -> Tensor:
    """`bn(x)` without kernels; under transforms the result has the dtype of `x`, too.

    Args:
        bn: the child.
        x: `[N, C, H, W]`.
        residual_dtype: dtype of the residual stream, or None.
    """
    is_bare = is_transformed() and is_bare_norm(bn)
    if is_bare and has_mixed_dtypes(x, *bn.parameters(), *bn.buffers()):
        return float32_batch_norm(bn, x.float()).to(x.dtype)
    return bn(x) if residual_dtype is None else float32_batch_norm(bn, x)


def float32_batch_norm(bn: nn.Module, x: Tensor) -> Tensor:
    """`bn(x)`, in float32 if `x` is float32 and parameters are in half precision."""
    tensors = {**dict(bn.named_parameters()), **dict(bn.named_buffers())}
    wide = {n: t.float() for n, t in tensors.items() if t.dtype in HALVES}
    if not wide:
        return bn(x)
    if isinstance(x, fx.Proxy):
        return _traced_float32_batch_norm(bn, x)
    if x.dtype != torch.float32:
        return bn(x)
    y = torch.func.functional_call(bn, wide, (x,))
    if bn.training:
        with torch.no_grad():
            for name, buffer in bn.named_buffers():
                if name in wide:
                    buffer.copy_(wide[name])
    return y


def _traced_float32_batch_norm(bn: nn.Module, x: Any) -> Any:
    """Adds a call of `float32_batch_norm` to a graph: it depends on the mode and the dtype of x.

    `fx.wrap` does not support modules as arguments.
    """
    module = x.tracer.create_proxy("get_attr", x.tracer.path_of_module(bn), (), {})
    return x.tracer.create_proxy("call_function", float32_batch_norm, (module, x), {})
