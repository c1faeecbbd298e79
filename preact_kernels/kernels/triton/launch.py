"""What every launcher needs: programs of a persistent grid, counters, the device, the dtype."""

import contextlib
import functools
import os
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

# Triton reads this when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_INTERPRETED_PROGRAMS = 3  # enough for partial results to be merged, few enough to be quick
_MOST_INDEX = 2**31 - 1
_CAPTURED_COUNTERS = 65536


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


@functools.cache
def _counters_of_stream(device: torch.device, stream: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


class _CapturedCounters:
    """Counters for kernels in CUDA graphs, each handed out once and kept for good."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffers, self.left = device, [], 0

    def reserve(self) -> None:
        """Allocates a buffer."""
        self.left = _CAPTURED_COUNTERS
        self.buffers.append(torch.zeros(self.left, dtype=torch.int32, device=self.device))

    def take(self, count: int) -> Tensor:
        """Counters that no other kernel has."""
        if count > self.left:
            self.reserve()
        self.left -= count
        return self.buffers[-1][self.left : self.left + count]


@functools.cache
def _captured_counters(device: torch.device) -> _CapturedCounters:
    return _CapturedCounters(device)


def counters(x: Tensor, count: int) -> Tensor:
    """`[count]` int32 zeros that the kernel which counts in them leaves as zeros.

    Kernels of one stream run one after the other and share theirs. A CUDA graph may be replayed
    beside anything else, so each kernel in it has its own.
    """
    if x.device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32)
    captured = _captured_counters(x.device)
    if torch.cuda.is_current_stream_capturing():
        return captured.take(count)
    if not captured.buffers:
        captured.reserve()  # outside of any graph
    return _counters_of_stream(x.device, torch.cuda.current_stream(x.device).cuda_stream, count)
