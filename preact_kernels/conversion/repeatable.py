"""Functions of PyTorch whose results a backward may compute again.

They draw no random numbers, change nothing in place, and cost about as much as moving their
tensors; of convolutions and linear layers, `work` counts the products.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from preact_kernels.conversion.containers import mapped
from preact_kernels.conversion.policy import Product, work_of
from preact_kernels.conversion.recomputation import is_small
from preact_kernels.ops.plain import gradients

_NAMES = (
    # activations
    *("celu", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh"),
    *("leaky_relu", "logsigmoid", "mish", "prelu", "relu", "relu6", "selu", "sigmoid", "silu"),
    *("softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold"),
    # sums, products, and functions of each element
    *("abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "div", "divide"),
    *("exp", "lerp", "log", "maximum", "minimum", "mul", "multiply", "neg", "negative", "pow"),
    *("rsqrt", "rsub", "sqrt", "square", "sub", "subtract", "true_divide", "where"),
    *("__add__", "__mul__", "__neg__", "__pow__", "__radd__", "__rmul__", "__rsub__"),
    *("__rtruediv__", "__sub__", "__truediv__"),
    # copies
    *("__getitem__", "bfloat16", "cat", "channel_shuffle", "clone", "concat", "concatenate"),
    *("constant_pad_nd", "contiguous", "double", "flatten", "flip", "float", "half"),
    *("index_select", "pad", "pixel_shuffle", "pixel_unshuffle", "repeat", "repeat_interleave"),
    *("reshape", "roll", "stack", "tile", "to", "type"),
    # functions of images
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "interpolate", "max_pool1d", "max_pool2d"),
    *("max_pool3d", "upsample"),
    # norms without running statistics
    *("group_norm", "layer_norm", "rms_norm"),
)
_WITH_PRODUCTS = (
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "linear",
)


def _functions(names: tuple[str, ...]) -> Iterator[Callable]:
    for owner in (torch, Tensor, F):
        for name in names:
            if callable(function := getattr(owner, name, None)):
                yield function


_CHEAP = frozenset(_functions(_NAMES))
_PRODUCTS = frozenset(_functions(_WITH_PRODUCTS))


def is_repeatable(func: Callable) -> bool:
    """Whether a backward may call a function again."""
    return func in _CHEAP or func in _PRODUCTS


def work(func: Callable, tensors: list[Tensor], result: Tensor) -> tuple[float, Product | None]:
    """The work of a call, in bytes moved, and its convolution or linear layer."""
    weight = tensors[1] if func in _PRODUCTS and len(tensors) > 1 else None
    return work_of(tensors, result, weight, "transpose" in func.__name__)


_PLACE = torch.empty(0)
_NUMBERS = bool, int, float, complex, str, type(None), type(...)
_KINDS = torch.dtype, torch.device, torch.memory_format, torch.layout


def separated(
    args: tuple, kwargs: dict
) -> tuple[list[Tensor], Callable[..., tuple[tuple, dict]]] | None:
    """The tensors in arguments, and a function that returns the arguments for other tensors.

    None: other arguments may change later.
    """
    found: list[Tensor] = []
    try:
        rest = _copied((args, kwargs), found)
    except _Changeable:
        return None

    def arguments(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return mapped(lambda _: next(given), rest)

    return found, arguments


class _Changeable(Exception):
    """An argument of a call may change later."""


def _copied(value: Any, found: list[Tensor]) -> Any:
    """Copies containers; moves tensors to `found`."""
    if isinstance(value, Tensor):
        found.append(value)
        return _PLACE
    kind = type(value)
    if kind in (list, tuple):
        return kind([_copied(v, found) for v in value])
    if kind is dict:
        return {k: _copied(v, found) for k, v in value.items()}
    parts = (value.start, value.stop, value.step) if kind is slice else ()
    is_fixed = kind in _NUMBERS or kind in _KINDS or kind is torch.Size or kind is slice
    if not is_fixed or not all(type(p) in (int, type(None)) for p in parts):
        raise _Changeable
    return value


def is_constant(t: Tensor) -> bool:
    """Whether to keep a tensor for the backward without counting its bytes."""
    return isinstance(t, torch.nn.Parameter) or is_small(t)


class _MaxPool(torch.autograd.Function):
    """Max pooling that finds the largest elements again in the backward, and saves no indices."""

    @staticmethod
    def forward(ctx, x, pool):
        ctx.save_for_backward(x)
        ctx.pool = pool
        ctx.set_materialize_grads(False)
        return pool(x).detach()

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None
        return *gradients(ctx.pool, ctx.saved_tensors, (True,), dy), None


_MAX_POOLS = {
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
}


def without_indices(func: Callable) -> Callable:
    """The function, or a max pooling that saves no indices.

    PyTorch calls other functions for max pooling with `return_indices=True`.
    """
    if func not in _MAX_POOLS:
        return func
    return lambda x, *args, **kwargs: _MaxPool.apply(x, lambda x: func(x, *args, **kwargs))
