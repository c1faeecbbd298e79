"""`RULES`: the functions of PyTorch that are deferred, and helpers for their rules.

A rule takes the region and the arguments of a call. It checks them and records the operation, or
returns NotImplemented; then the function is called on computed tensors. To defer another function,
add an operation to `operations.py` and a rule to `rules.py` or `elementwise_rules.py`;
`matching.py` decides what runs fused.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.conversion.deferred import Deferred, Recording
from preact_kernels.conversion.functions import METADATA_FUNCTIONS
from preact_kernels.kernels.layout import CHANNELS_LAST

METADATA = "metadata"  # replaces the rule of a function that reads no values

# Functions with rules that also apply to calls without a deferred argument.
FIRST: set[Callable] = set()
NORM_FUNCTIONS: set[Callable] = set()  # those of them that compute a norm

RULES: dict[Callable, Any] = dict.fromkeys(METADATA_FUNCTIONS, METADATA)


def rule(*functions: Callable, arguments: Callable) -> Callable:
    """Registers a rule for functions; `arguments` maps their arguments to the rule's."""

    def add(rule: Callable) -> Callable:
        def bound_rule(region: Recording, args: tuple, kwargs: dict) -> Any:
            try:
                given = arguments(*args, **kwargs)
            except TypeError:
                return NotImplemented
            return rule(region, *given)

        RULES.update(dict.fromkeys(functions, bound_rule))
        return rule

    return add


def cached(function: Callable) -> Callable:
    """Caches results of a function, except for symbolic sizes. It must not raise a TypeError.

    Dispatch modes of the program do not see the calls of `function`.
    """

    @functools.lru_cache(maxsize=4096)
    def with_cache(*args: Any) -> Any:
        if torch_compat.has_fake_mode():
            return function(*args)
        with torch_compat.without_dispatch_modes_above(0):
            return function(*args)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return with_cache(*args)
        except TypeError:
            return function(*args)

    call.cache_clear = with_cache.cache_clear  # type: ignore[attr-defined]
    return call


def hashable(value: Any) -> Any:
    """Converts a list to a tuple; returns other values unchanged."""
    return tuple(value) if isinstance(value, list) else value


def is_pending(t: object) -> bool:
    """Whether `t` is a deferred tensor that is not computed yet."""
    return isinstance(t, Deferred) and t.preact_node.value is None


def pixels(shape: Sequence[int]) -> int:
    """Pixels per image of `[N, C, ...]`."""
    count = 1
    for size in shape[2:]:
        count = count * size
    return count


def image_format(region: Recording, t: Tensor) -> bool | None:
    """Whether `t`, `[N, C, ...]` of 3 to 5 dimensions, is channels_last.

    Returns None if the strides of `t` may give PyTorch's results other strides.
    """
    if isinstance(t, Deferred):
        return t.preact_node.channels_last
    if type(t) not in region.tensor_types or not 3 <= t.dim() <= 5:
        return None
    shape = t.shape
    if shape[1] > 1 and pixels(shape) > 1:
        if t.is_contiguous():
            return False
        if len(shape) > 3 and t.is_contiguous(memory_format=CHANNELS_LAST[len(shape)]):
            return True
    # Also accepts the strides of a slice of the channels of a contiguous tensor.
    expected = 1
    for size, stride in zip(shape[:1:-1], t.stride()[:1:-1], strict=True):
        if stride != expected:
            return None
        expected = expected * size
    return False if t.stride(1) == expected else None


def common_format(
    region: Recording, tensors: Sequence[Tensor], of_first: bool = False
) -> bool | None:
    """Whether PyTorch's result of images `[N, C, ...]` is channels_last; None: unknown.

    Args:
        region: the region.
        tensors: images of the same number of dimensions.
        of_first: if formats differ, the result has the format of the first image, as in sums; else
            it is contiguous.
    """
    formats = [image_format(region, t) for t in tensors]
    if None in formats or any(map(_overlaps_in_batch, tensors)):
        return None
    if len(set(formats)) > 1 and any(min(t.shape[1:]) < 2 for t in tensors):
        return None  # strides may match both formats
    return formats[0] if of_first else all(formats)


def _overlaps_in_batch(t: Tensor) -> bool:
    """Whether a batch of one has a batch stride that is too small for more images.

    PyTorch orders the axes of results by strides, including strides of axes of size 1.
    """
    return t.shape[0] == 1 and t.stride(0) < t.numel()


def has_known_strides(shape: Sequence[int], channels_last: bool) -> bool:
    """Whether the memory format determines the strides that PyTorch gives a result."""
    return not channels_last or (shape[1] > 1 and pixels(shape) > 1)
