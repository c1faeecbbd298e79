"""What every launcher needs: the device, programs of a persistent grid, counters."""

import contextlib
import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret  # as kernels are defined

_INTERPRETED_PROGRAMS = 3  # enough for partial results to be merged, few enough to be quick
_MOST_INDEX = 2**31 - 2**16  # a tile less than 32 bits hold


def on_device_of(x: Tensor):
    """A context in which kernels are launched on the device of `x`."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def needs_int64(*tensors: Tensor | None) -> bool:
    """Whether an element's index exceeds what 32 bits hold."""
    return any(t is not None and t.numel() > _MOST_INDEX for t in tensors)


class Device(NamedTuple):
    """What decides about block shapes and grids."""

    capability: int  # 90 for 9.0
    multiprocessors: int


@functools.cache
def properties(device: torch.device) -> Device:
    """Of a GPU; for the interpreter some of either."""
    if device.type != "cuda":
        return Device(90, 1)
    found = torch.cuda.get_device_properties(device)
    return Device(10 * found.major + found.minor, found.multi_processor_count)


def capability(x: Tensor) -> int:
    """Compute capability of the device of `x` as one number: 90 for 9.0."""
    return properties(x.device).capability


def persistent_programs(x: Tensor, tiles: int, columns: int = 1) -> int:
    """How many programs share the `tiles` of each column of a grid: two a multiprocessor.

    The number enters the order of sums: it depends on the device alone, never on its load.
    """
    if INTERPRETED:
        return min(tiles, _INTERPRETED_PROGRAMS)
    return min(tiles, max(1, 2 * properties(x.device).multiprocessors // columns))


def counters(x: Tensor, count: int) -> Tensor:
    """`[count]` int32 zeros, for programs of a grid to count themselves in.

    New ones each time: filling them is part of the stream, and of a graph that captures it.
    """
    return torch.zeros(count, dtype=torch.int32, device=x.device)
