"""Memory formats: kernels work on NHWC, results have the format that PyTorch would give."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from preact_kernels.kernels.libraries import CPU_LIBRARY, load_library
from preact_kernels.torch_compat import has_fake_mode, is_transformed

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# PyTorch's conversions between NCHW and NHWC are faster than the CPU library's for tensors with
# fewer elements, or with fewer channels or pixels (measured with one and two threads).
_LEAST_TRANSPOSED = 64 * 1024
_LEAST_SIDE = 16


def is_channels_last(t: Tensor) -> bool:
    """Whether PyTorch, when it chooses an output format, treats `t` as channels_last."""
    if t.dim() not in CHANNELS_LAST:
        return False
    if min(t.shape) > 1:  # then a dense tensor has one format
        if t.is_contiguous():
            return False
        if t.is_contiguous(memory_format=CHANNELS_LAST[t.dim()]):
            return True
    if t.shape[1] == 1 and not t.is_contiguous(memory_format=CHANNELS_LAST[t.dim()]):
        return False  # both formats match; PyTorch's batch norm chooses contiguous
    smallest = 0
    if t.stride(1) == 0:
        return False
    for axis in (1, *range(t.dim() - 1, 1, -1), 0):
        if t.shape[axis] == 0 or t.stride(axis) < smallest:
            return False
        if axis == 0 and smallest == t.stride(1):
            return False  # such as [N, C, 1, 1]: treated as contiguous
        smallest = t.stride(axis) * max(t.shape[axis], 1)
    return True


def is_nhwc(t: Tensor) -> bool:
    """`is_channels_last`, where sequences `[N, C, L]` count as images of one row."""
    return is_channels_last(t.unsqueeze(2) if t.dim() == 3 else t)


def with_bias(t: Tensor, bias: Tensor) -> Tensor:
    """`t + bias` in the dtype of `t`, for `bias` `[C]`."""
    return t + bias.to(t.dtype).view(-1, *[1] * (t.dim() - 2))


def nhwc(t: Tensor) -> Tensor:
    """`t` dense in NHWC (or NDHWC) order; `t` itself if it is already."""
    if not (t.is_contiguous() and _may_transpose(t)):
        return t.contiguous(memory_format=CHANNELS_LAST[t.dim()])
    n, c, *sizes = t.shape
    y = torch.ops.preact_kernels_cpu.transpose.default(t.view(n, c, math.prod(sizes)))
    return y.view(n, *sizes, c).movedim(-1, 1).detach()


def as_torch_nhwc(t: Tensor) -> Tensor:
    """`nhwc(t)`, with the strides of a new tensor also at axes of size 1.

    PyTorch infers the memory format from all strides. Without these strides, the backward of its
    batch norm is wrong where it infers different formats for `t` and the gradient and they agree,
    or the reverse.
    """
    t = nhwc(t)
    if 1 not in t.shape or t.stride() == strides(t.shape, True):
        return t
    return t.clone(memory_format=CHANNELS_LAST[t.dim()])


def nchw(t: Tensor) -> Tensor:
    """`t` dense in NCHW (or NCDHW) order; `t` itself if it is already."""
    if t.is_contiguous() or not (_may_transpose(t) and t.movedim(1, -1).is_contiguous()):
        return t.contiguous()
    n, c, *sizes = t.shape
    matrices = t.movedim(1, -1).view(n, math.prod(sizes), c)
    return torch.ops.preact_kernels_cpu.transpose.default(matrices).view(t.shape).detach()


def _may_transpose(t: Tensor) -> bool:
    """Whether to convert a dense tensor in the CPU library, whose op has no derivative.

    The result must not be a view: a program may change it in place.
    """
    if t.device.type != "cpu" or t.dim() < 3 or type(t) is not Tensor:
        return False
    if torch.compiler.is_compiling() or is_transformed() or has_fake_mode():
        return False
    return (
        t.numel() >= _LEAST_TRANSPOSED
        and min(t.shape[1], math.prod(t.shape[2:])) >= _LEAST_SIDE
        and t.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not (t.requires_grad and torch.is_grad_enabled())
        and not load_library(CPU_LIBRARY)
    )


def restored(y: Tensor, channels_last: bool) -> Tensor:
    """Converts `y` from NHWC to the memory format of the result."""
    return y if channels_last else nchw(y)


def with_plain_strides(t: Tensor) -> Tensor:
    """Returns `t` with the strides of a new NCHW tensor, also for axes of size 1."""
    if t.stride() == strides(t.shape, channels_last=False):
        return t
    if t.is_contiguous():
        return t.clone(memory_format=torch.contiguous_format)
    return nchw(t)


def as_image(t: Tensor) -> Tensor:
    """Returns `t [N, C, ...]` as dense NHWC `[N, C, H, W]`.

    Volumes `[N, C, D, H, W]` become `[N, C, D * H, W]`, sequences `[N, C, L]` `[N, C, 1, L]`.
    """
    if t.dim() == 4:
        return nhwc(t)
    if t.dim() == 5:
        t = nhwc(t)
        n, c, d, h, w = t.shape
        return t.permute(0, 2, 3, 4, 1).reshape(n, d * h, w, c).permute(0, 3, 1, 2)
    return dense(t)


def dense(t: Tensor, planar: bool = False) -> Tensor:
    """Returns `t [N, C, ...]` dense in NHWC, or NCHW if `planar`, with four or five dimensions."""
    if t.dim() == 2:
        t = t[:, :, None, None]
    elif t.dim() == 3:
        t = t.unsqueeze(2)  # keeps the strides, which `reshape` does not where N is 1
    return nchw(t) if planar else nhwc(t)


def shape_of(t: Tensor, dims: int) -> torch.Size:
    """The shape, of `dims` dimensions, of the tensor that `dense` converted to `t`."""
    return t.shape if dims > 3 else torch.Size((*t.shape[:2], *t.shape[3:])[:dims])


def as_planes(t: Tensor) -> Tensor:
    """Returns `t [N, C, ...]` as `[N, C, H, W]` in NCHW order."""
    t = nchw(t)
    if t.dim() == 4:
        return t
    return t.view(*t.shape[:2], *((-1, t.shape[4]) if t.dim() == 5 else (1, -1)))


def from_image(y: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    """Undoes `as_image` or `as_planes` for a result of this shape and memory format."""
    if not channels_last and y.is_contiguous():
        return y.view(shape)
    if len(shape) == 5:
        n, c, d, h, w = shape
        y = y.permute(0, 2, 3, 1).reshape(n, d, h, w, c).permute(0, 4, 1, 2, 3)
    elif len(shape) < 4:
        y = y.reshape(shape)
    return restored(y, channels_last)


def strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Strides of a dense tensor `[N, C, ...]` in NHWC or NCHW order."""
    axes = [*range(len(shape) - 1, -1, -1)]
    if channels_last:
        axes = [1, *axes[:-2], 0]
    found, size = [0] * len(shape), 1
    for axis in axes:
        found[axis], size = size, size * shape[axis]
    return tuple(found)


def readable_bytes(t: Tensor) -> int | torch.SymInt:
    """Bytes of a tensor's storage.

    With a storage offset: bytes from the offset on, at most those up to the last element, so that
    all slices of a tensor give the same number.
    """
    offset, found = t.storage_offset(), t.untyped_storage().nbytes()
    return min(found - offset * t.element_size(), extent_bytes(t)) if offset else found


def extent_bytes(t: Tensor) -> int | torch.SymInt:
    """Bytes from the first to the last element of a tensor with elements."""
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements += (size - 1) * stride
    return elements * t.element_size()


def check_storage(name: str, t: Tensor) -> None:
    """Raises a ValueError if the storage was freed or resized, as FSDP and offloading do.

    PyTorch's operators would read beyond its end.
    """
    if torch.compiler.is_compiling():
        return
    try:
        given, least = t.untyped_storage().nbytes(), t.nbytes
    except RuntimeError:  # a tensor of torch.func, or with symbolic sizes
        return
    if given >= least and t.storage_offset() == 0 and _is_dense(t):
        return
    expected = t.storage_offset() * t.element_size() + extent_bytes(t)
    if given < expected and t.numel() > 0:
        raise ValueError(f"{name}: expected a storage of {expected} bytes, got {given}")


def _is_dense(t: Tensor) -> bool:
    """Whether elements are in NCHW, NCDHW or NHWC order without gaps."""
    if t.is_contiguous():
        return True
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
