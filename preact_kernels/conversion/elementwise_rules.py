"""Rules for activations, dropout, sums, products and copies; see `registry.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels import call_stack
from preact_kernels.activations import (
    ACTIVATIONS,
    CALLS,
    DEFAULTS,
    number_of,
    read_call,
)
from preact_kernels.conversion.deferred import Deferred, Node, Recording
from preact_kernels.conversion.operations import (
    ACTIVATION,
    ADD,
    CALL,
    CONTIGUOUS,
    DROPOUT,
    NORM,
    SCALE,
    SHIFT,
    CallSettings,
)
from preact_kernels.conversion.registry import (
    FIRST,
    common_format,
    image_format,
    is_pending,
    pixels,
    rule,
)
from preact_kernels.kernels.contract import HALVES
from preact_kernels.ops import checks, dispatch
from preact_kernels.ops.dropout import drawn

FIRST |= {Tensor.add_, Tensor.__iadd__, Tensor.contiguous}

# Operations before an activation that can run fused with it.
_ACTIVATED = (NORM, SCALE, SHIFT)


def record_activation(region: Recording, x: Any, activation: Any, in_place: object = False) -> Any:
    """Defers an activation."""
    if activation is None or not is_pending(x) or type(in_place) is not bool:
        return NotImplemented
    node = x.preact_node
    if activation.name != "relu":
        if node.operation not in _ACTIVATED:
            return NotImplemented
        if ACTIVATIONS[activation.name].computes_in_float32 and _computes_in_float32(region, node):
            return NotImplemented
    if region.context_for(node.context.device) is None:
        return NotImplemented
    return region.record(
        *(ACTIVATION, (x,), activation, node.shape, node.dtype, node.channels_last, in_place)
    )


for _function in CALLS:
    rule(_function, arguments=partial(read_call, _function))(record_activation)


def _computes_in_float32(region: Recording, node: Node) -> bool:
    """Whether autocast on CUDA computes some activations of `node` in float32."""
    context = region.context_for(node.context.device)
    is_half = node.dtype in HALVES
    is_cuda = node.context.device.type == "cuda"
    return is_half and is_cuda and context is not None and context.autocast_dtype is not None


@rule(
    *(F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout),
    arguments=lambda input, p=0.5, training=True, inplace=False: (input, p, training),
)
def _no_dropout(region: Recording, x: Any, p: Any, training: object) -> Any:
    """Returns the input if nothing is dropped, as PyTorch does."""
    if not is_pending(x) or type(p) not in (float, int) or not 0 <= p <= 1:
        return NotImplemented
    return x if p == 0 or training is False else NotImplemented


@rule(
    F.dropout,
    arguments=lambda input, p=0.5, training=True, inplace=False: (input, p, training, inplace),
)
def _record_dropout(region: Recording, x: Any, p: Any, training: object, in_place: Any) -> Any:
    """Draws the mask, and defers the product."""
    if _no_dropout(region, x, p, training) is x:
        return x
    is_plain = type(p) in (float, int) and training is True and type(in_place) is bool
    if not is_pending(x) or not is_plain or not 0 <= p <= 1:
        return NotImplemented
    node = x.preact_node
    if node.operation is not ACTIVATION and node.operation not in _ACTIVATED:
        return NotImplemented
    if region.context_for(node.context.device) is None:
        return NotImplemented
    like = torch.empty(1, dtype=node.dtype, device=node.context.device)
    kernels = dispatch.kernels_for(like)
    same = node.shape, node.dtype, node.channels_last
    result = region.record(DROPOUT, (x,), None, *same, in_place)
    if result is not NotImplemented:
        rest = node.shape, like, node.channels_last, p, bool(in_place)
        result.preact_node.settings = drawn(kernels, *rest)
    return result


def _is_per_sample(node: Node, t: Any, region: Recording) -> bool:
    """Whether `t` has one value per channel, or per image and channel, of a node."""
    if type(t) not in region.tensor_types or t.dim() != len(node.shape):
        return False
    n, channels = node.shape[:2]
    return (
        t.shape[0] in (1, n)
        and t.shape[1] == channels > 1
        and t.numel() == t.shape[0] * channels
        and pixels(node.shape) > 1
        and n > 0
        and t.device == node.context.device
        and t.dtype in checks.FLOATS
        and torch.promote_types(t.dtype, node.dtype) == node.dtype
    )


@rule(
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    arguments=lambda input, other, /: (input, other),
)
def _record_add(region: Recording, a: Any, b: Any, in_place: bool = False) -> Any:
    if not (is_pending(a) or (is_pending(b) and not in_place)):
        return NotImplemented
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return NotImplemented
    if a.shape != b.shape:
        return _record_per_sample(region, SHIFT, a, b, in_place)
    channels_last = common_format(region, (a, b), of_first=True)
    if channels_last is None or a.device != b.device:
        return NotImplemented
    dtype = torch.promote_types(a.dtype, b.dtype)
    if dtype not in checks.FLOATS or (in_place and dtype != a.dtype):
        return NotImplemented
    if region.context_for(a.device) is None:
        return NotImplemented
    return region.record(ADD, (a, b), None, tuple(a.shape), dtype, channels_last, in_place)


def _keeps_strides(node: Node, t: Tensor) -> bool:
    """Whether a result has the strides of the node if `t [N, C, 1, ...]` is the first operand."""
    is_broadcast = all(size > 1 for size in node.shape[2:])
    return is_broadcast and (t.stride(0) > t.stride(1) or t.shape[0] < node.shape[0])


def _record_per_sample(
    region: Recording, operation: Any, a: Any, b: Any, in_place: bool = False
) -> Any:
    """Defers a sum or a product of an image and a tensor `[N, C, 1, ...]`."""
    x, other = (a, b) if is_pending(a) else (b, a)
    node = x.preact_node
    if not _is_per_sample(node, other, region):
        return NotImplemented
    if other is a and (in_place or not _keeps_strides(node, other)):
        return NotImplemented
    if region.context_for(node.context.device) is None:
        return NotImplemented
    same = node.shape, node.dtype, node.channels_last
    return region.record(operation, (x, other), None, *same, in_place)


@rule(
    *(Tensor.add_, Tensor.__iadd__),
    arguments=lambda input, other, *, alpha=None: (input, other, alpha),
)
def _add_in_place(region: Recording, x: Any, other: Any, alpha: Any) -> Any:
    if not isinstance(x, Deferred):  # a recomputation of a checkpoint must not count a batch again
        is_counted = call_stack.is_recomputing() and region.owners.is_batch_count(x)
        return x if is_counted else NotImplemented
    return NotImplemented if alpha is not None else _record_add(region, x, other, in_place=True)


@rule(
    *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply),
    arguments=lambda input, other, /: (input, other),
)
def _record_mul(region: Recording, a: Any, b: Any, in_place: bool = False) -> Any:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        x, number = (a, b) if isinstance(a, Tensor) else (b, a)
        return NotImplemented if in_place else _record_number(region, torch.mul, x, number)
    if is_pending(a) and is_pending(b):
        if _is_sigmoid_of(b, a):
            return record_activation(region, a, DEFAULTS["silu"], in_place)
        if _is_sigmoid_of(a, b) and not in_place:
            return record_activation(region, b, DEFAULTS["silu"])
        return NotImplemented
    deferred: Any = a if is_pending(a) else b
    if not is_pending(deferred) or deferred.preact_node.operation is not NORM:
        return NotImplemented
    return _record_per_sample(region, SCALE, a, b, in_place)


@rule(Tensor.mul_, Tensor.__imul__, arguments=lambda input, other, /: (input, other))
def _mul_in_place(region: Recording, a: Any, b: Any) -> Any:
    return _record_mul(region, a, b, True) if is_pending(a) else NotImplemented


def _is_sigmoid_of(y: Any, x: Any) -> bool:
    """Whether `y` is the sigmoid of `x`, so that their product is `silu(x)`."""
    node = y.preact_node
    is_sigmoid = node.operation is ACTIVATION and node.settings.name == "sigmoid"
    return is_sigmoid and node.inputs[0] is x.preact_node


@rule(
    *(torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, torch.divide),
    arguments=lambda input, other, /: (input, other),
)
def _record_div(region: Recording, x: Any, other: Any) -> Any:
    return _record_number(region, torch.div, x, other)


def _record_number(region: Recording, func: Callable, x: Any, number: Any) -> Any:
    """Defers a product with, or a quotient by, a number."""
    if not is_pending(x) or number_of(number) is None:
        return NotImplemented
    node = x.preact_node
    if region.context_for(node.context.device) is None:
        return NotImplemented
    settings = CallSettings(func, (number,), {})
    return region.record(CALL, (x,), settings, node.shape, node.dtype, node.channels_last)


@rule(torch.addcmul, Tensor.addcmul, arguments=lambda *args, **kwargs: (args, kwargs))
def _record_addcmul(region: Recording, args: tuple, kwargs: dict) -> Any:
    """Defers `shift + h * scale`."""

    def arguments(input, tensor1, tensor2, *, value=1):
        return input, tensor1, tensor2, value

    shift, a, b, value = arguments(*args, **kwargs)
    x, scale = (a, b) if is_pending(a) else (b, a)
    if value != 1 or not is_pending(x) or x.preact_node.operation is not NORM:
        return NotImplemented
    node = x.preact_node
    if not (_is_per_sample(node, scale, region) and _is_per_sample(node, shift, region)):
        return NotImplemented
    if not (_keeps_strides(node, shift) and _keeps_strides(node, scale)):
        return NotImplemented
    product = _record_per_sample(region, SCALE, x, scale)
    if product is NotImplemented:
        return NotImplemented
    return _record_per_sample(region, SHIFT, product, shift)


def _cast_to(dtype: torch.dtype) -> Callable:
    return lambda input, /: (input, dtype)


@rule(Tensor.float, arguments=_cast_to(torch.float32))
@rule(Tensor.double, arguments=_cast_to(torch.float64))
@rule(Tensor.half, arguments=_cast_to(torch.float16))
@rule(Tensor.bfloat16, arguments=_cast_to(torch.bfloat16))
@rule(Tensor.to, Tensor.type, arguments=lambda input, dtype, /: (input, dtype))
def _cast(region: Recording, x: Any, dtype: object) -> Any:
    """Returns the input if it has the dtype, as PyTorch does."""
    return x if is_pending(x) and dtype is x.dtype else NotImplemented


@rule(
    Tensor.contiguous,
    arguments=lambda input, memory_format=torch.contiguous_format: (input, memory_format),
)
def _record_contiguous(region: Recording, x: Any, memory_format: object) -> Any:
    """Returns the input if it is contiguous, as PyTorch does.

    Defers the copy of a channels_last image that a pending norm saves, since a convolution of the
    copy may read and save the image itself.
    """
    if memory_format is not torch.contiguous_format:
        return NotImplemented
    if is_pending(x):
        return NotImplemented if x.preact_node.channels_last else x
    if not region.normalises(x) or not image_format(region, x):
        return NotImplemented
    if region.context_for(x.device) is None:
        return NotImplemented
    return region.record(CONTIGUOUS, (x,), None, tuple(x.shape), x.dtype, False)
