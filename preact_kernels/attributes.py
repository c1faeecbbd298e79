"""Fast access to tensors of a child module: `nn.Module.__getattr__` is slow."""

from typing import Any

import torch
from torch import nn


def tensors(
    module: nn.Module, parameters: tuple[str, ...], buffers: tuple[str, ...] = ()
) -> list[Any]:
    """`getattr` for parameters, then for buffers. Each may also be a plain attribute."""
    if not torch.compiler.is_compiling():  # Dynamo of torch 2.11 does not trace `__dict__`
        own = module.__dict__
        found: list[Any] = []
        try:
            registered = own["_parameters"]
            for name in parameters:
                found.append(own[name] if name in own else registered[name])
            registered = own["_buffers"]
            for name in buffers:
                found.append(own[name] if name in own else registered[name])
            return found
        except KeyError:  # raise the error of `getattr`, or find it elsewhere
            pass
    return [getattr(module, name) for name in (*parameters, *buffers)]
