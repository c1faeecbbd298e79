"""Saves tensors for backward, some of which may be None.

`ctx.saved_tensors` gets only tensors, as tools that draw or measure the graph expect.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def save(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Saves tensors in the forward of an autograd Function."""
    ctx.is_saved = [t is not None for t in tensors]  # faster than a generator
    ctx.save_for_backward(*[t for t in tensors if t is not None])


def saved(ctx: Any) -> list[Any]:
    """Returns the tensors given to `save`, in the backward."""
    tensors = ctx.saved_tensors
    found: list[Any] = []
    count = 0
    for is_saved in ctx.is_saved:
        found.append(tensors[count] if is_saved else None)
        count += is_saved
    return found
