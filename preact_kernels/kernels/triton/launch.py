"""Properties of the device, grids, and the launch configuration of elementwise kernels."""

import contextlib
import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from preact_kernels.kernels.triton.configurations import elementwise

INTERPRETED = triton.knobs.runtime.interpret  # read when kernels are defined

_INTERPRETED_PROGRAMS = 3  # more than one, so that partial results are merged; few, for speed
_MAX_INT32_INDEX = 2**31 - 2**16  # leaves room for the last tile to exceed the tensor


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b), without the 2 us that `triton.cdiv` takes on the host."""
    return -(-a // b)


def on_device_of(x: Tensor):
    """A context in which kernels are launched on the device of `x`."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def needs_int64(*tensors: Tensor | None) -> bool:
    """Whether any tensor has elements that a 32-bit index does not reach."""
    return any(t is not None and t.numel() > _MAX_INT32_INDEX for t in tensors)


class Device(NamedTuple):
    """The properties of a GPU that select block shapes and grids."""

    capability: int  # 90 for 9.0
    multiprocessors: int


@functools.cache
def properties(device: torch.device) -> Device:
    """Properties of a GPU. Placeholders under the interpreter."""
    if device.type != "cuda":
        return Device(90, 1)
    found = torch.cuda.get_device_properties(device)
    return Device(10 * found.major + found.minor, found.multi_processor_count)


def capability(x: Tensor) -> int:
    """Compute capability of the device of `x` as one number: 90 for 9.0."""
    return properties(x.device).capability


def persistent_programs(x: Tensor, tiles: int, columns: int = 1) -> int:
    """Number of programs that share the `tiles` of each grid column: two per multiprocessor.

    The order of sums depends on this number, so it is a function of the device, not of its load.
    """
    if INTERPRETED:
        return min(tiles, _INTERPRETED_PROGRAMS)
    return min(tiles, max(1, 2 * properties(x.device).multiprocessors // columns))


class ElementwiseLaunch(NamedTuple):
    """Launch configuration of an elementwise kernel on `[pixels, channels]`."""

    pixels: int
    channels: int
    tiles: int  # along the pixels
    columns: int  # blocks of channels
    constants: dict  # keyword arguments of the launch: constexprs and num_warps


@functools.cache
def _elementwise_constants(channels: int, int64: bool) -> dict:
    blocks = elementwise(channels)
    return {
        "CHANNELS": channels,
        "INT64": int64,
        "BLOCKS": blocks,
        "num_warps": blocks.num_warps,
    }


def elementwise_launch(x: Tensor) -> ElementwiseLaunch:
    """Launch configuration of an elementwise kernel that reads or writes tensors shaped like x."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    blocks = elementwise(channels)
    return ElementwiseLaunch(
        pixels,
        channels,
        ceil_div(pixels, blocks.block_pixels),
        ceil_div(channels, blocks.block_channels),
        _elementwise_constants(channels, needs_int64(x)),
    )


def counters(x: Tensor, count: int) -> Tensor:
    """`[count]` int32 zeros: arrival counters, one per grid column.

    Allocated for every launch, so that zeroing them is part of the stream and of a CUDA graph that
    captures it.
    """
    return torch.zeros(count, dtype=torch.int32, device=x.device)
