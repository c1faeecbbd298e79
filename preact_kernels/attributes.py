"""Fast access to attributes of a child module: `nn.Module.__getattr__` is slow."""

from typing import Any

import torch
from torch import nn


def attributes(module: nn.Module, *names: str) -> list[Any]:
    """`getattr` for several parameters, buffers or other attributes except properties."""
    if torch.compiler.is_compiling():  # Dynamo of torch 2.11 does not trace a module's __dict__
        return [getattr(module, name) for name in names]
    own = module.__dict__
    parameters, buffers = own["_parameters"], own["_buffers"]
    found: list[Any] = []
    for name in names:
        if name in own:
            found.append(own[name])
        elif name in parameters:
            found.append(parameters[name])
        elif name in buffers:
            found.append(buffers[name])
        else:
            found.append(getattr(module, name))
    return found
