"""Autocast: whether it is on, and its dtype."""

import torch
from torch import Tensor


def has_autocast(device_type: str) -> bool:
    """Whether a device type has autocast: all supported ones do except `meta`.

    Dynamo of torch 2.11 cannot trace `torch.amp.is_autocast_available`.
    """
    return device_type != "meta"


def is_autocast(x: Tensor) -> bool:
    """Whether autocast casts `x`: it is on for the device of `x`, and `x` is not float64."""
    device_type = x.device.type
    if x.dtype == torch.float64 or device_type == "meta":
        return False
    return torch.is_autocast_enabled(device_type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the products of convolutions of `x`: autocast's if it is on, else `x.dtype`."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype
