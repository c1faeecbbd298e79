"""Memory formats at the border: NHWC inside, PyTorch's choice outside."""

import torch
from torch import Tensor


def is_channels_last(t: Tensor) -> bool:
    """Whether PyTorch takes the strides of `t` for channels_last when it picks output formats."""
    if t.dim() != 4:
        return False
    if t.shape[1] == 1 and not t.is_contiguous(memory_format=torch.channels_last):
        return False  # either reading fits; PyTorch's batch norm takes this one
    smallest = 0
    if t.stride(1) == 0:
        return False
    for axis in (1, 3, 2, 0):
        if t.shape[axis] == 0 or t.stride(axis) < smallest:
            return False
        if axis == 0 and smallest == t.stride(1):
            return False  # [N, C, 1, 1] and the like: read as contiguous
        smallest = t.stride(axis) * max(t.shape[axis], 1)
    return True


def nhwc(t: Tensor) -> Tensor:
    """`t` dense in NHWC order: itself where it is so already."""
    return t.contiguous(memory_format=torch.channels_last)


def restored(y: Tensor, channels_last: bool) -> Tensor:
    """`y`, dense in NHWC order, in the memory format that is wanted outside."""
    return y if channels_last else y.contiguous()
