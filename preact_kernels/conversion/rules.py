"""`RULES`: the functions of PyTorch that are deferred.

A rule takes the region and the arguments of a call. It checks them and records the operation, or
returns NotImplemented; then the function is called on computed tensors. To defer another function,
add an operation to `operations.py` and a rule here; `matching.py` decides what runs fused.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels import torch_compat
from preact_kernels.conversion.deferred import Deferred, Node, compute
from preact_kernels.conversion.functions import METADATA_FUNCTIONS
from preact_kernels.conversion.operations import (
    ADD,
    CAT,
    CONV,
    NORM,
    PAD,
    POOL,
    RELU,
    CallSettings,
    ConvSettings,
    NormSettings,
)
from preact_kernels.kernels.contract import Conv
from preact_kernels.modules.batch_norm import batch_norm_arguments
from preact_kernels.ops import checks, layout
from preact_kernels.ops.batch_norm import BatchNorm

METADATA = "metadata"  # instead of a rule: the function reads no values

# Functions with a rule for calls without a deferred argument too.
FIRST = {F.batch_norm, Tensor.add_, Tensor.__iadd__}

RULES: dict[Callable, Any] = dict.fromkeys(METADATA_FUNCTIONS, METADATA)


def _rule(*functions: Callable, arguments: Callable) -> Callable:
    """Registers a rule for `functions`; `arguments` has their signature, and returns the rule's."""

    def add(rule: Callable) -> Callable:
        def bound_rule(region: Any, args: tuple, kwargs: dict) -> Any:
            try:
                given = arguments(*args, **kwargs)
            except TypeError:
                return NotImplemented
            return rule(region, *given)

        RULES.update(dict.fromkeys(functions, bound_rule))
        return rule

    return add


def _is_pending(t: object) -> bool:
    return type(t) is Deferred and t.preact_node.value is None


def _format(region: Any, t: Tensor) -> bool | None:
    """Whether an image is channels_last; None: PyTorch's results could have other strides."""
    if type(t) is Deferred:
        return t.preact_node.channels_last
    if type(t) not in region.tensor_types or t.dim() != 4:
        return None
    _, channels, height, width = t.shape
    if channels > 1 and height * width > 1:
        if t.is_contiguous():
            return False
        if t.is_contiguous(memory_format=torch.channels_last):
            return True
    # A slice of the channels of a contiguous tensor has these strides too.
    return False if t.stride()[1:] == (height * width, width, 1) else None


def _has_known_strides(shape: Sequence[int], channels_last: bool) -> bool:
    """Whether the memory format determines the strides that PyTorch gives a result."""
    return not channels_last or (shape[1] > 1 and shape[2] * shape[3] > 1)


def _norm_arguments(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):
    return input, BatchNorm(weight, bias, running_mean, running_var, training, momentum, eps)


@_rule(F.batch_norm, arguments=_norm_arguments)
def record_norm(region: Any, x: Tensor, bn: BatchNorm) -> Any:
    """Defers a batch norm."""
    weight, bias = bn.weight, bn.bias
    owner = region.owners.find(weight if weight is not None else bn.running_mean)
    if not isinstance(x, Tensor):
        return NotImplemented
    if region.context_for(x.device) is None:
        region.note(owner, "it runs inside torch.utils.checkpoint or a functional transform")
        return NotImplemented
    channels_last = _format(region, x)
    if bn.process_group is not None:
        if channels_last is None and x.is_cpu and x.dim() == 4:
            channels_last = False  # PyTorch has no such batch norm on a CPU
    elif channels_last is not None and x.numel() <= x.shape[1]:
        channels_last = None  # empty, or one value per channel
    if channels_last is None:
        region.note(owner, "its input is no image, or has unusual strides")
        return NotImplemented
    # The weight's dtype and device represent all parameters: they change together.
    like = None if owner is None or weight is None else (weight.dtype, weight.device)
    key = (x.dtype, x.device, x.shape[1], like, *map(id, bn[:4]), *bn[4:8])
    settings = None
    if owner is not None and owner.key == key:
        settings = owner.found
    elif not (reason := _norm_refusal(region, x, bn)):
        rest = bn._replace(weight=None, bias=None, batch_count=None)
        settings = NormSettings(weight is not None, bias is not None, rest, owner)
        if owner is not None:
            owner.key, owner.found = key, settings
    if owner is not None and settings is not None and _has_hooks(owner.module):
        settings, reason = None, "the batch norm has hooks"
    if settings is None:
        region.note(owner, reason)
        return NotImplemented
    running = [t for t in bn[2:4] if t is not None]
    region.before_statistics(running, bn.training)
    inputs = [t for t in (x, weight, bias) if t is not None]
    result = region.record(NORM, inputs, settings, x.shape, x.dtype, channels_last)
    (region.updated if bn.training else region.evaluated).update(map(id, running))
    result.preact_node.memory = region.memory
    return result


def _has_hooks(bn: Any) -> bool:
    """Whether a call of a batch norm runs more than its class's forward."""
    forward = bn.__dict__.get("forward")
    return torch_compat.has_module_hook(bn) or not isinstance(forward, SyncForward | None)


class SyncForward:
    """Replaces the forward of an `nn.SyncBatchNorm` while a region is open.

    The original calls a custom autograd function, which no region sees.
    """

    def __init__(self, region: Any, module: nn.SyncBatchNorm) -> None:
        self._region, self._module = region, module

    def __call__(self, x: Tensor) -> Tensor:
        module, result = self._module, NotImplemented
        if self._region.is_recording():
            with torch_compat.disable_torch_function():
                bn = batch_norm_arguments(cast(nn.BatchNorm2d, module))
                if bn.momentum is None:
                    bn = bn._replace(momentum=1.0 / (float(cast(Tensor, bn.batch_count)) + 1.0))
                if type(x) is Deferred and x.preact_node.value is not None:
                    x = compute(x, "SyncBatchNorm")
                result = record_norm(self._region, x, bn)
                is_counted = bn.batch_count is None or torch_compat.is_in_backward()
                if result is not NotImplemented and not is_counted:
                    cast(Tensor, bn.batch_count).add_(1)
        return nn.SyncBatchNorm.forward(module, x) if result is NotImplemented else result


def _norm_refusal(region: Any, x: Tensor, bn: BatchNorm) -> str:
    """Returns why the fused ops do not accept a batch norm's arguments, or an empty string."""
    if x.dtype not in checks.FLOATS:
        return "its input has a dtype that is not served"
    dtype, device, channels = x.dtype, x.device, x.shape[1]
    for t in bn[:4]:
        if t is None:
            continue
        if type(t) not in region.tensor_types or t.numel() != channels or t.dim() != 1:
            return "its parameters are of another class or shape"
        if t.dtype is not dtype and (t.dtype != torch.float32 or dtype == torch.float64):
            return "its parameters have another dtype"
        if t.device != device:
            return "its parameters are on another device"
    if (bn.running_mean is None) != (bn.running_var is None):
        return "it has one of two running statistics"
    if type(bn.training) is not bool or type(bn.eps) not in (float, int):
        return "its arguments are no plain numbers"
    if type(bn.momentum) not in (float, int) or bn.momentum != bn.momentum:
        return "its momentum is no plain number"
    has_statistics = bn.training or bn.running_mean is not None
    if not has_statistics or not bn.eps >= 0 or (bn.training and bn.eps == 0):
        return "PyTorch refuses its arguments"
    return ""


@_rule(F.relu_, torch.relu_, Tensor.relu_, arguments=lambda input, /: (input, True))
@_rule(
    *(F.relu, torch.relu, Tensor.relu),
    arguments=lambda input, inplace=False: (input, inplace),
)
def _record_relu(region: Any, x: Any, in_place: object) -> Any:
    if not _is_pending(x) or type(in_place) is not bool:
        return NotImplemented
    node = x.preact_node
    if region.context_for(node.context.device) is None:
        return NotImplemented
    return region.record(RELU, (x,), None, node.shape, node.dtype, node.channels_last, in_place)


def _conv_arguments(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    return input, weight, bias, (stride, padding, dilation, groups)


@_rule(F.conv2d, arguments=_conv_arguments)
def _record_conv(region: Any, x: Any, weight: Any, bias: Any, numbers: tuple) -> Any:
    if not _is_pending(x) or type(weight) not in region.tensor_types:
        return NotImplemented
    if bias is not None and type(bias) not in region.tensor_types:
        return NotImplemented
    affine = (weight,) if bias is None else (weight, bias)
    node = x.preact_node
    context = region.context_for(node.context.device)
    if context is None:
        return NotImplemented
    owner = region.owners.find(weight)
    module = _calling_conv() if owner is None else owner.module
    if module is not None and module._forward_hooks:
        return NotImplemented  # hooks may change the weight
    like = (weight.dtype, weight.device, weight.shape, weight.stride(), id(bias))
    key = (node.shape, node.dtype, context.device, context.autocast_dtype, *like, *numbers)
    if owner is not None and owner.key == key:
        settings, shape, dtype, weight_is_channels_last = owner.found
    else:
        dtype = _conv_dtype(node, affine, context.autocast_dtype)
        bias_shape = None if bias is None else bias.shape
        conv, shape = _geometry(node.shape, weight.shape, bias_shape, *map(_hashable, numbers))
        if dtype is None or conv is None:
            return NotImplemented
        settings = ConvSettings(conv, owner)
        weight_is_channels_last = layout.is_channels_last(weight)
        if owner is not None:
            owner.key, owner.found = key, (settings, shape, dtype, weight_is_channels_last)
    channels_last = node.channels_last or weight_is_channels_last
    if not _has_known_strides(shape, channels_last):
        return NotImplemented
    return region.record(CONV, (x, *affine), settings, shape, dtype, channels_last)


def _calling_conv() -> nn.Module | None:
    """Returns the `nn.Conv2d` that called the function of the current rule, if one did."""
    frame = sys._getframe(4)  # the caller of the region, which called the bound rule
    is_conv = frame.f_code is nn.Conv2d._conv_forward.__code__
    return frame.f_locals["self"] if is_conv else None


def _conv_dtype(
    node: Node, affine: Sequence[Tensor], autocast_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns the dtype of a convolution of `node`; None: PyTorch refuses it."""
    dtypes = [node.dtype, *(t.dtype for t in affine)]
    if any(t.device != node.context.device for t in affine):
        return None
    if autocast_dtype is not None:  # autocast does not change float64
        dtypes = [d if d == torch.float64 else autocast_dtype for d in dtypes]
    return dtypes[0] if len(set(dtypes)) == 1 and dtypes[0] in checks.FLOATS else None


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _cached(function: Callable) -> Callable:
    """Caches results of `function`, except for symbolic sizes; `function` raises no TypeError."""
    cached = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return cached(*args)
        except TypeError:
            return function(*args)

    return call


@_cached
def _geometry(
    shape: tuple, weight_shape: tuple, bias_shape: tuple | None, stride, padding, dilation, groups
) -> tuple[Conv | None, tuple[int, ...]]:
    """Returns geometry and result shape of a convolution; None: it must be called."""
    try:
        x, weight = (torch.empty(s, device="meta") for s in (shape, weight_shape))
        bias = None if bias_shape is None else torch.empty(bias_shape, device="meta")
        result = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        pairs = [_paired(value) for value in (stride, padding, dilation)]
        conv = checks.geometry(weight_shape[2:], pairs[0], pairs[1], pairs[2], groups)
    except (RuntimeError, TypeError, ValueError):
        return None, ()
    return conv, tuple(result.shape)


def _paired(value: Any) -> Any:
    """Unpacks a tuple with one number."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


@_rule(
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    arguments=lambda input, other, /: (input, other),
)
def _record_add(region: Any, a: Any, b: Any, in_place: bool = False) -> Any:
    if not (_is_pending(a) or (_is_pending(b) and not in_place)):
        return NotImplemented
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return NotImplemented
    channels_last = _format(region, a)
    if channels_last is None or channels_last != _format(region, b) or a.device != b.device:
        return NotImplemented
    dtype = torch.promote_types(a.dtype, b.dtype)
    if dtype not in checks.FLOATS or (in_place and dtype != a.dtype):
        return NotImplemented
    if region.context_for(a.device) is None:
        return NotImplemented
    return region.record(ADD, (a, b), None, tuple(a.shape), dtype, channels_last, in_place)


@_rule(
    *(Tensor.add_, Tensor.__iadd__),
    arguments=lambda input, other, *, alpha=None: (input, other, alpha),
)
def _add_in_place(region: Any, x: Any, other: Any, alpha: Any) -> Any:
    if type(x) is not Deferred:  # a checkpoint's recomputation must not count a batch again
        is_counted = torch_compat.is_in_backward() and region.owners.is_batch_count(x)
        return x if is_counted else NotImplemented
    return NotImplemented if alpha is not None else _record_add(region, x, other, in_place=True)


_ZEROS = ("None", "0", "0.0")  # not -0.0


def _pad_arguments(input, pad, mode="constant", value=None):
    return input, pad, mode, value


@_rule(F.pad, arguments=_pad_arguments)
def _record_pad(region: Any, x: Any, sizes: Any, mode: object, value: object) -> Any:
    if not _is_pending(x) or mode != "constant" or str(value) not in _ZEROS:
        return NotImplemented
    if not isinstance(sizes, list | tuple) or len(sizes) != 4:
        return NotImplemented
    if not all(type(s) is int and s >= 0 for s in sizes):
        return NotImplemented
    node = x.preact_node
    n, c, h, w = node.shape
    left, right, top, bottom = sizes
    shape = (n, c, h + top + bottom, w + left + right)
    if region.context_for(node.context.device) is None:
        return NotImplemented
    return region.record(PAD, (x,), tuple(sizes), shape, node.dtype, node.channels_last)


@_rule(
    *(torch.cat, torch.concat, torch.concatenate),
    arguments=lambda tensors, dim=0: (tensors, dim),
)
def _record_cat(region: Any, tensors: Any, dim: Any) -> Any:
    if dim not in (1, -3):
        return NotImplemented
    if not isinstance(tensors, list | tuple) or not any(map(_is_pending, tensors)):
        return NotImplemented
    first = next(t for t in tensors if _is_pending(t)).preact_node
    n, _, h, w = first.shape
    for t in tensors:
        if not isinstance(t, Tensor) or _format(region, t) != first.channels_last:
            return NotImplemented
        if (t.shape[0], *t.shape[2:]) != (n, h, w) or t.dtype != first.dtype:
            return NotImplemented
        if t.device != first.context.device:
            return NotImplemented
    shape = (n, sum(t.shape[1] for t in tensors), h, w)
    if region.context_for(first.context.device) is None:
        return NotImplemented
    return region.record(CAT, tuple(tensors), None, shape, first.dtype, first.channels_last)


@_rule(
    *(F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout),
    arguments=lambda input, p=0.5, training=True, inplace=False: (input, p, training),
)
def _dropout(region: Any, x: Any, p: Any, training: object) -> Any:
    """Returns the input if nothing is dropped, as PyTorch does."""
    if not _is_pending(x) or type(p) not in (float, int) or not 0 <= p <= 1:
        return NotImplemented
    return x if p == 0 or training is False else NotImplemented


def _pool(func: Callable) -> Callable:
    def rule(region: Any, args: tuple, kwargs: dict) -> Any:
        if not args or not _is_pending(args[0]):
            return NotImplemented
        x, *rest = args
        node = x.preact_node
        context = region.context_for(node.context.device)
        if context is None:
            return NotImplemented
        args = tuple(map(_hashable, rest))
        kwargs = {k: _hashable(v) for k, v in kwargs.items()}
        modes = context.device, context.autocast_dtype
        found = _pooled(func, args, tuple(kwargs.items()), node.shape[2:], node.dtype, *modes)
        if found is None:
            return NotImplemented
        size, dtype = found
        shape = (*node.shape[:2], *size)
        if not _has_known_strides(shape, node.channels_last):
            return NotImplemented
        settings = CallSettings(func, args, kwargs)
        return region.record(POOL, (x,), settings, shape, dtype, node.channels_last)

    return rule


@_cached
def _pooled(
    func: Callable, args: tuple, kwargs: tuple, size: tuple, dtype: torch.dtype, device, _
) -> tuple[tuple[int, int], torch.dtype] | None:
    """Returns size and dtype of a pooling's result; None: it raises or returns indices."""
    try:
        with torch_compat.disable_torch_function(), torch.no_grad():
            x = torch.zeros((1, 2, *size), dtype=dtype, device=device)
            y = func(x, *args, **dict(kwargs))
    except (RuntimeError, TypeError, ValueError):
        return None
    return ((y.shape[2], y.shape[3]), y.dtype) if isinstance(y, Tensor) else None


for _function in (F.avg_pool2d, F.max_pool2d, torch.max_pool2d, F.adaptive_avg_pool2d):
    RULES[_function] = _pool(_function)
