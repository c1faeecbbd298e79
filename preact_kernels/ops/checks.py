"""Argument checks: messages name the argument, what was expected and what was given."""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from preact_kernels.kernels.contract import FLOATS, HALVES, Conv, dtype_name, samples_of
from preact_kernels.kernels.layout import check_storage, readable_bytes


def check_metadata(name: str, value: Any) -> None:
    """Checks for a strided floating point tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name}: expected a strided tensor, got layout {layout}")
    if value.dtype not in FLOATS:
        raise TypeError(
            f"{name}: expected dtype float32, float64, bfloat16 or float16, "
            f"got {dtype_name(value.dtype)}"
        )


def check_tensor(name: str, value: Any) -> None:
    """Checks for a strided floating point tensor with a storage for all elements."""
    check_metadata(name, value)
    check_storage(name, value)


_AXES = {3: "[N, C, L]", 4: "[N, C, H, W]", 5: "[N, C, D, H, W]"}


def check_activation(name: str, x: Any, dims: int | None = 4) -> None:
    """Checks for a floating point tensor `[N, C, ...]` of `dims` dimensions; None: 2 to 5."""
    check_tensor(name, x)
    if dims is None:
        if not 2 <= x.dim() <= 5:
            raise ValueError(
                f"{name}: expected 2 to 5 dimensions [N, C, ...], got shape {list(x.shape)}"
            )
    elif x.dim() != dims:
        raise ValueError(
            f"{name}: expected {dims} dimensions {_AXES[dims]}, got shape {list(x.shape)}"
        )
    if x.shape[1] == 0:
        raise ValueError(f"{name}: expected at least 1 channel, got shape {list(x.shape)}")


def check_like(name: str, value: Any, like_name: str, like: Tensor) -> None:
    """Checks for a tensor on the device of another one."""
    check_tensor(name, value)
    if value.device != like.device:
        raise ValueError(
            f"{name}: expected device {like.device} to match {like_name}, got {value.device}"
        )


def check_parameter_dtype(name: str, value: Tensor, x_dtype: torch.dtype) -> None:
    """Checks for the dtype of x, or float32 if x is in half precision."""
    allowed = [x_dtype]
    if x_dtype in HALVES:
        allowed.append(torch.float32)
    if value.dtype not in allowed:
        expected = " or ".join(dtype_name(d) for d in allowed)
        raise TypeError(
            f"{name}: expected dtype {expected} to match x, got {dtype_name(value.dtype)}"
        )


def check_per_channel(name: str, value: Any, x: Tensor, *, has_any_dtype: bool = False) -> None:
    """Checks for a vector with one value per channel of `x`."""
    check_like(name, value, "x", x)
    if value.shape != (x.shape[1],):
        raise ValueError(
            f"{name}: expected shape [{x.shape[1]}] to match the channels of x, "
            f"got {list(value.shape)}"
        )
    if not has_any_dtype:
        check_parameter_dtype(name, value, x.dtype)


def check_number(name: str, value: Any, *, minimum: float | None = None) -> None:
    """Checks for a real number of at least `minimum`; accepts bool, as PyTorch does."""
    if not isinstance(value, int | float) and not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if value != value:
        raise ValueError(f"{name}: expected a number, got nan")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")


def check_constant(name: str, t: Tensor) -> None:
    """Checks for a tensor that autograd does not differentiate."""
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected a tensor that requires no gradient")


def check_running(name: str, t: Tensor) -> None:
    """Checks for running statistics that PyTorch's operators can write."""
    if t.is_contiguous() and not t.requires_grad:
        return
    check_constant(name, t)
    if any(stride == 0 and n > 1 for stride, n in zip(t.stride(), t.shape, strict=True)):
        raise ValueError(f"{name}: expected elements that share no memory, got stride 0")


def check_norm_numbers(eps: Any, momentum: Any) -> None:
    """Checks the numbers of a batch norm; momentum may be None (cumulative average)."""
    check_number("eps", eps, minimum=0)
    if momentum is not None:
        check_number("momentum", momentum)


def check_count(name: str, value: Any) -> None:
    """Checks for an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_samples(shape: Sequence[int]) -> None:
    """Checks for more than one value per channel, as eager does in training mode."""
    if samples_of(shape) == 1:
        raise ValueError(
            f"x: expected more than 1 value per channel when training, got input size {shape}"
        )


def _as_int(value: Any) -> Any:
    """Converts integers of NumPy to int, and returns other values unchanged."""
    return int(value) if isinstance(value, numbers.Integral) else value


_COUNTS = {1: "a tuple of one", 2: "a pair of ints", 3: "three ints"}


def pair(name: str, value: Any, *, minimum: int, axes: int = 2) -> tuple[int, ...]:
    """Converts an int or a tuple to a tuple of ints of at least `minimum`, one per axis."""
    values = value if isinstance(value, list | tuple) else [value] * axes
    values = [v if isinstance(v, int) else _as_int(v) for v in values]
    are_ints = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if len(values) != axes or not are_ints:
        raise TypeError(f"{name}: expected an int or {_COUNTS[axes]}, got {value!r}")
    if min(values) < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value!r}")
    return tuple(values)


def check_conv_weight(
    conv_weight: Tensor, groups: Any, channels: int | None = None, dims: int = 4
) -> None:
    """Checks a weight `[K, C / groups, R, S]` of `dims` dimensions for an input of C `channels`."""
    if conv_weight.dim() != dims:
        kernel = {3: "R", 4: "R, S", 5: "Q, R, S"}[dims]
        raise ValueError(
            f"conv_weight: expected {dims} dimensions [out_channels, in_channels / groups, "
            f"{kernel}], got shape {list(conv_weight.shape)}"
        )
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"groups: expected an int, got {type(groups).__name__}")
    if groups < 1:
        raise ValueError(f"groups: expected at least 1, got {groups}")
    out_channels, in_channels_per_group, *kernel_size = conv_weight.shape
    if channels is not None and in_channels_per_group * groups != channels:
        expected = f"{channels}" if groups == 1 else f"{channels} / {groups} groups"
        raise ValueError(
            f"conv_weight: expected in_channels {expected} to match x, got {in_channels_per_group}"
        )
    if out_channels % groups or out_channels == 0:
        raise ValueError(
            f"conv_weight: expected out_channels to be a positive multiple of groups {groups}, "
            f"got {out_channels}"
        )
    if min(kernel_size) < 1:
        least = "x".join("1" for _ in kernel_size)
        raise ValueError(f"conv_weight: expected a kernel of at least {least}, got {kernel_size}")


def geometry(
    kernel_size: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> Conv | None:
    """Checks the geometry of a convolution.

    Returns:
        The geometry; None for padding `"same"` that differs between the two sides of an axis.
    """
    axes = len(kernel_size)
    stride = pair("stride", stride, minimum=1, axes=axes)
    dilation = pair("dilation", dilation, minimum=1, axes=axes)
    if isinstance(padding, str):
        extents = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
        padding = _named_padding(padding, stride, extents)
    else:
        padding = pair("padding", padding, minimum=0, axes=axes)
        if max(padding) >= 2**31:
            raise ValueError(f"padding: expected less than 2**31, got {padding}")
    return None if padding is None else Conv(stride, padding, dilation, groups)


def check_image_size(shape: Sequence[int], kernel_size: Sequence[int], conv: Conv) -> None:
    """Checks that padded images `[N, C, ...]` are no smaller than the kernel."""
    names = (
        ("depth", "height", "width")[-len(kernel_size) :] if len(kernel_size) > 1 else ["length"]
    )
    for axis, name in enumerate(names):
        padded = shape[2 + axis] + 2 * conv.padding[axis]
        extent = conv.dilation[axis] * (kernel_size[axis] - 1)
        if padded <= extent:
            raise ValueError(
                f"x: expected a padded {name} of at least {extent + 1} for the kernel, got {padded}"
            )


def check_conv(
    x: Tensor,
    conv_weight: Any,
    conv_bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
) -> Conv | None:
    """Checks the arguments of a convolution, and returns the result of `geometry`."""
    check_like("conv_weight", conv_weight, "x", x)
    check_conv_weight(conv_weight, groups, x.shape[1], x.dim())
    out_channels, _, *kernel_size = conv_weight.shape
    check_parameter_dtype("conv_weight", conv_weight, x.dtype)
    if conv_bias is not None:
        check_like("conv_bias", conv_bias, "x", x)
        if conv_bias.shape != (out_channels,):
            raise ValueError(
                f"conv_bias: expected shape [{out_channels}] to match conv_weight, "
                f"got {list(conv_bias.shape)}"
            )
        if conv_bias.dtype != conv_weight.dtype:
            raise TypeError(
                f"conv_bias: expected dtype {dtype_name(conv_weight.dtype)} to match "
                f"conv_weight, got {dtype_name(conv_bias.dtype)}"
            )
    conv = geometry(kernel_size, stride, padding, dilation, groups)
    if conv is not None:
        check_image_size(x.shape, kernel_size, conv)
    return conv


def _named_padding(
    padding: str, stride: tuple[int, ...], extents: list[int]
) -> tuple[int, ...] | None:
    if padding == "valid":
        return (0,) * len(stride)
    if padding != "same":
        tuple_ = _COUNTS[len(stride)].removesuffix(" of ints")
        raise ValueError(f"padding: expected 'valid', 'same', an int or {tuple_}, got {padding!r}")
    if max(stride) > 1:
        raise ValueError(f"padding: expected stride 1 with 'same', got stride {list(stride)}")
    if any(e % 2 for e in extents):
        return None
    return tuple(e // 2 for e in extents)


def check_residual(residual: Any, name: str, shape: Sequence[int], like: Tensor) -> None:
    """Checks for a floating point tensor of shape `shape` on the device of `like`."""
    check_like(name, residual, "x", like)
    if list(residual.shape) != list(shape):
        raise ValueError(
            f"{name}: expected shape {list(shape)} to match the output, got {list(residual.shape)}"
        )


class Passed(dict):
    """Results of passed checks, by `described` arguments, which need not be checked again."""

    MOST = 4096  # bounds the memory of a program with new shapes at every call

    def add(self, key, result):
        if len(self) >= self.MOST:
            self.clear()
        self[key] = result
        return result


_PLAIN = frozenset((int, float, bool, str, torch.dtype, type(None)))


def described(values: Iterable) -> list:
    """The metadata of tensors, and types and values of plain objects, that checks depend on.

    Raises:
        TypeError: an argument is of another type, such as a process group. A key must not keep it
            alive or rely on its equality.
        RuntimeError: a tensor has no strides or no storage.
    """
    parts: list = []
    for v in values:
        kind = type(v)
        if kind in _PLAIN:
            parts += (kind, v)
        elif isinstance(v, Tensor):
            parts += (v.shape, v.stride(), v.dtype, v.device, readable_bytes(v))
        elif kind is tuple:
            kinds = tuple(map(type, v))
            if not _PLAIN.issuperset(kinds):
                raise TypeError
            parts += (kinds, v)
        else:
            raise TypeError
    return parts
