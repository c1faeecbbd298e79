"""Memory formats: kernels work on NHWC, results have the format that PyTorch would give."""

import torch
from torch import Tensor


def is_channels_last(t: Tensor) -> bool:
    """Whether PyTorch, when it chooses an output format, treats `t` as channels_last."""
    if t.dim() != 4:
        return False
    if t.shape[1] == 1 and not t.is_contiguous(memory_format=torch.channels_last):
        return False  # both formats match; PyTorch's batch norm chooses contiguous
    smallest = 0
    if t.stride(1) == 0:
        return False
    for axis in (1, 3, 2, 0):
        if t.shape[axis] == 0 or t.stride(axis) < smallest:
            return False
        if axis == 0 and smallest == t.stride(1):
            return False  # such as [N, C, 1, 1]: treated as contiguous
        smallest = t.stride(axis) * max(t.shape[axis], 1)
    return True


def nhwc(t: Tensor) -> Tensor:
    """`t` dense in NHWC order; `t` itself if it is already."""
    return t.contiguous(memory_format=torch.channels_last)


def restored(y: Tensor, channels_last: bool) -> Tensor:
    """Converts `y` from NHWC to the memory format of the result."""
    return y if channels_last else y.contiguous()
