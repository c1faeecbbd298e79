"""The attributes of a child module, read at once: `nn.Module.__getattr__` is slow."""

from typing import Any

import torch
from torch import nn


def attributes(module: nn.Module, *names: str) -> list[Any]:
    """Parameters, buffers and other attributes of these names, in the precedence of `getattr`."""
    if not torch.compiler.is_compiling():  # Dynamo of torch 2.11 does not trace a module's __dict__
        own = module.__dict__
        found = {**own["_buffers"], **own["_parameters"], **own}
        if found.keys() >= set(names):
            return [found[name] for name in names]
    return [getattr(module, name) for name in names]
