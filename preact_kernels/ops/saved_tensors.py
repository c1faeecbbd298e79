"""Saves tensors for a backward, some of which may be None.

`ctx.saved_tensors` then has tensors alone, which code that draws or counts the graph expects.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def save(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Saves tensors in the forward of an autograd Function."""
    ctx.is_saved = tuple(t is not None for t in tensors)
    ctx.save_for_backward(*[t for t in tensors if t is not None])


def saved(ctx: Any) -> list[Any]:
    """Returns what `save` was given, in the backward."""
    tensors = ctx.saved_tensors
    found: list[Any] = []
    count = 0
    for is_saved in ctx.is_saved:
        found.append(tensors[count] if is_saved else None)
        count += is_saved
    return found
