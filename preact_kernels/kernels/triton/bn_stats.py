"""Mean and biased variance per channel, in one pass over x."""

import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Statistics
from preact_kernels.kernels.triton.batch_norm import pixel_indices, tiles_of
from preact_kernels.kernels.triton.launch import (
    aligned,
    elementwise_launch,
    launch_kernel,
    on_device_of,
    wait_for_predecessors,
)
from preact_kernels.kernels.triton.reduction import (
    add_moments,
    add_tile,
    begin_piece,
    empty_moments,
    end_piece,
    finished_statistics,
    new_sums,
    next_piece,
)


@triton.jit(do_not_specialize=["pixels"])
def bn_stats_kernel(
    x,
    sums,
    pixels,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """Adds moments of x `[pixels, CHANNELS]` to accumulators. Grid: programs, channel tiles."""
    wait_for_predecessors()
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CHANNELS: tl.constexpr = TILES.tile_channels
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < CHANNELS
    moments = empty_moments(TILE_CHANNELS)
    tiles = tiles_of(pixels, TILE_PIXELS)
    begin, end = next_piece(moments, tiles)
    while begin < tiles:
        moments = begin_piece(moments, TILE_PIXELS, TILE_CHANNELS, FOLDED=False)
        for tile in tl.range(begin, end, tl.num_programs(0), num_stages=3):
            pixel = pixel_indices(tile, TILE_PIXELS, INT64)
            is_pixel = pixel < pixels
            at = pixel[:, None] * CHANNELS + channel[None, :]
            value = tl.load(x + at, mask=is_pixel[:, None] & is_channel[None, :], other=0.0)
            left = pixels - tile * TILE_PIXELS
            moments = add_tile(moments, value.to(tl.float32), is_pixel, left)
        moments = end_piece(moments)
        begin, end = next_piece(moments, tiles)
    add_moments(moments, pixels, TILE_PIXELS, sums, channel, is_channel, CHANNELS)


def bn_stats(x: Tensor) -> Statistics:
    """See `Kernels.bn_stats`. A program owns every `programs`-th tile of some channels."""
    launch = elementwise_launch(x)
    with on_device_of(x):
        sums = new_sums(x, launch.channels)
        launch_kernel(
            bn_stats_kernel,
            launch.persistent_grid(),
            (aligned(x), sums, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
        mean, var = finished_statistics(sums, launch.pixels)
    return Statistics(mean[0], var[0])
