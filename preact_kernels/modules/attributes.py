"""The attributes of a child module, read at once: `nn.Module.__getattr__` is slow."""

from typing import Any

from torch import nn


def attributes(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and other attributes by name, in the precedence of `getattr`."""
    own = module.__dict__
    return {**own["_buffers"], **own["_parameters"], **own}
