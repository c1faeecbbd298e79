"""Mean and biased variance per channel in one pass over x, and running statistics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import BatchStatistics
from preact_kernels.kernels.triton.batch_norm import pixels_of, tiles_of
from preact_kernels.kernels.triton.launch import (
    elementwise_launch,
    on_device_of,
    persistent_programs,
)
from preact_kernels.kernels.triton.reduction import (
    add_tile,
    empty_moments,
    finish_statistics,
    new_statistics,
)


@triton.jit
def bn_stats_kernel(
    x,
    statistics,
    pixels,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Statistics of x `[pixels, CHANNELS]`. Grid: programs, channel blocks."""
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CHANNELS: tl.constexpr = BLOCKS.block_channels
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    moments = empty_moments(BLOCK_CHANNELS)
    for tile in tl.range(
        tl.program_id(0), tiles_of(pixels, BLOCK_PIXELS), tl.num_programs(0), num_stages=3
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=is_pixel[:, None] & is_channel[None, :], other=0.0)
        rows = tl.minimum(pixels - tile * BLOCK_PIXELS, BLOCK_PIXELS)
        moments = add_tile(moments, value.to(tl.float32), is_pixel, rows)
    finish_statistics(moments, statistics, channel, is_channel, CHANNELS)


def bn_stats(x: Tensor) -> BatchStatistics:
    """See `Kernels.bn_stats`. A program owns every `programs`-th tile of a block of channels."""
    launch = elementwise_launch(x)
    programs = persistent_programs(x, launch.tiles)
    statistics = new_statistics(x, launch.channels, programs, launch.columns)
    with on_device_of(x):
        bn_stats_kernel[programs, launch.columns](x, statistics, launch.pixels, **launch.constants)
    return statistics.result()


def running_stats_update(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """See `Kernels.running_stats_update`. Two launches for all vectors if they are float32."""
    if all(r.dtype == torch.float32 for r in running):
        torch._foreach_mul_(running, 1 - momentum)
        torch._foreach_add_(running, batch, alpha=momentum)
    else:
        for r, b in zip(running, batch, strict=True):
            r.copy_((1 - momentum) * r.double() + momentum * b.double())
