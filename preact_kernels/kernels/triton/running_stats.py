"""The running statistics of a batch norm, and its count of batches."""

import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.launch import (
    ceil_div,
    launch_kernel,
    on_device_of,
    wait_for_predecessors,
)

_TILE_CHANNELS = 256


@triton.jit(do_not_specialize=["channels", "momentum", "rest", "factor"])
def norm_buffers_update_kernel(
    running_mean,
    running_var,
    mean,
    var,
    count,
    channels,
    momentum,
    rest,
    factor,
    TILE_CHANNELS: tl.constexpr,
):
    """running = rest * running + momentum * batch, with factor * var for the variance.

    Adds 1 to `count`, unless it is None. `rest` is 1 - momentum. Grid: channel tiles.
    """
    wait_for_predecessors()
    channel = tl.program_id(0) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < channels
    new_mean = rest * tl.load(running_mean + channel, mask=is_channel)
    new_mean += momentum * tl.load(mean + channel, mask=is_channel)
    tl.store(running_mean + channel, new_mean, mask=is_channel)
    new_var = rest * tl.load(running_var + channel, mask=is_channel)
    new_var += momentum * (factor * tl.load(var + channel, mask=is_channel))
    tl.store(running_var + channel, new_var, mask=is_channel)
    if count is not None:
        tl.store(count, tl.load(count) + 1, mask=tl.program_id(0) == 0)


def norm_buffers_update(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    factor: float,
    count: Tensor | None,
) -> None:
    """See `Kernels.norm_buffers_update`, for one norm. A program owns a tile of channels."""
    channels = running_mean.numel()
    with on_device_of(running_mean):
        launch_kernel(
            norm_buffers_update_kernel,
            (ceil_div(channels, _TILE_CHANNELS), 1, 1),
            (running_mean, running_var, mean, var, count, channels)
            + (float(momentum), 1.0 - momentum, float(factor)),
            {"TILE_CHANNELS": _TILE_CHANNELS},
            4,
        )
