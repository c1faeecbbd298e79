"""Reads the norm of a fused module.

A fused module reads the parameters of its children. It calls the children instead if one has hooks
or is a subclass (`is_bare_norm`).
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx, nn

from preact_kernels.kernels.contract import HALVES
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.norms import NORM_MODULES, BatchNorm, NormArguments, norm_of
from preact_kernels.ops import checks
from preact_kernels.ops.plain_operators import has_mixed_dtypes, has_served_parameters
from preact_kernels.torch_compat import is_transformed

_METHODS = (  # that the forwards of PyTorch's norms call
    *("_check_input_dim", "_check_non_zero_input_channels"),
    *("_apply_instance_norm", "_get_no_batch_dim", "_handle_no_batch_input"),
)
BATCH_NORMS_OF_IMAGES = (nn.BatchNorm2d, nn.SyncBatchNorm)


def check_norm(norm: Any) -> None:
    """Checks for a norm that the fused modules support.

    Raises:
        TypeError: `norm` is of another class.
        ValueError: a layer norm has a weight.
    """
    if not isinstance(norm, tuple(NORM_MODULES)):
        known = ", ".join(f"nn.{c.__name__}" for c in NORM_MODULES)
        raise TypeError(f"norm: expected one of {known}, got {type(norm).__name__}")
    if isinstance(norm, nn.LayerNorm) and norm.elementwise_affine:
        raise ValueError("norm: expected an nn.LayerNorm without elementwise_affine")


def channels_of(norm: nn.Module) -> int:
    """Channels of a norm's input."""
    return norm_of(norm).channels_of(norm)


def dimensions_of(norm: nn.Module) -> tuple[int, ...]:
    """Valid numbers of dimensions of a norm's input."""
    return norm_of(norm).dimensions_of(norm)


def is_bare_norm(norm: nn.Module, types: Container[type] = BATCH_NORMS_OF_IMAGES) -> bool:
    """Whether a fused module may read the parameters of `norm` instead of calling it.

    Args:
        norm: the child.
        types: supported classes; subclasses are not.
    """
    if type(norm) not in types or has_hooks(norm, _METHODS) or not has_served_parameters(norm):
        return False
    own = norm.__dict__
    if "running_mean" in own or "running_var" in own:
        mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    else:  # faster
        buffers = own["_buffers"]
        mean, var = buffers.get("running_mean"), buffers.get("running_var")
    return (mean is None) == (var is None)


def is_readable_norm(norm: nn.Module) -> bool:
    """Whether a fused module may read the parameters of `norm` instead of calling it."""
    return is_bare_norm(norm, NORM_MODULES) and NORM_MODULES[type(norm)].is_readable(norm)


def norm_arguments(norm: Any, x: Tensor) -> NormArguments:
    """The arguments of a norm, as calling the child on `x` would use them.

    Raises:
        TypeError: `x` is not a floating point tensor.
        ValueError: the dimensions of `x` do not match `norm`.
    """
    kind: Any = type(norm)
    expected = NORM_MODULES[kind].modules[kind]
    if not isinstance(x, Tensor) or x.dim() not in expected:
        checks.check_activation("x", x, None)
        checks.check_activation("x", x, expected[-1])
    return NORM_MODULES[kind].of_module(norm, x)


def plain_norm(norm: Any, x: Tensor) -> Tensor:
    """`norm(x)` without kernels; see `plain_batch_norm`."""
    kind = norm_of(norm)
    if kind is BatchNorm:
        return plain_batch_norm(norm, x)
    if is_readable_norm(norm) and kind.needs_float32(x, *norm.parameters()):
        return norm_arguments(norm, x).plain(x)
    return norm(x)


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
