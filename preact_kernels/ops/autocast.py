"""The dtype that autocast asks for."""

import torch
from torch import Tensor


def has_autocast(device_type: str) -> bool:
    """Whether autocast exists for a device type.

    `torch.amp.is_autocast_available` says the same, but Dynamo of torch 2.11 cannot trace it.
    """
    return device_type != "meta"


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of `x`."""
    device_type = x.device.type
    return has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a convolution of `x` runs: autocast's where it is on, else that of `x`."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype
