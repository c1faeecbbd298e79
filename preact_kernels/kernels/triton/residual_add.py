"""The residual addition, with the statistics of the sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Output, Statistics
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
def residual_add_forward_kernel(
    x,
    branch,
    y,
    sums,
    pixels,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """y = x + branch, `[pixels, CHANNELS]`. Adds moments of y to the accumulators `sums` if given.

    Grid: programs, channel tiles.
    """
    wait_for_predecessors()
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CHANNELS: tl.constexpr = TILES.tile_channels
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < CHANNELS
    moments = empty_moments(TILE_CHANNELS)
    tiles = tiles_of(pixels, TILE_PIXELS)
    begin, end = next_piece(moments, tiles, IN_PIECES=sums is not None)
    while begin < tiles:
        if sums is not None:
            moments = begin_piece(moments, TILE_PIXELS, TILE_CHANNELS, FOLDED=False)
        for tile in tl.range(begin, end, tl.num_programs(0), num_stages=3):
            pixel = pixel_indices(tile, TILE_PIXELS, INT64)
            is_pixel = pixel < pixels
            mask = is_pixel[:, None] & is_channel[None, :]
            at = pixel[:, None] * CHANNELS + channel[None, :]
            value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            value += tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
            stored = value.to(y.dtype.element_ty)
            tl.store(y + at, stored, mask=mask)
            if sums is not None:
                value, left = stored.to(tl.float32), pixels - tile * TILE_PIXELS
                moments = add_tile(moments, value, is_pixel, left)
        begin = end
        if sums is not None:
            moments = end_piece(moments)
            begin, end = next_piece(moments, tiles)
    if sums is not None:
        add_moments(moments, pixels, TILE_PIXELS, sums, channel, is_channel, CHANNELS)


def residual_add_forward(x: Tensor, branch: Tensor, with_stats: bool) -> Output:
    """See `Kernels.residual_add_forward`.

    A program owns every `programs`-th tile of some channels.
    """
    launch = elementwise_launch(x)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    with on_device_of(x):
        sums = new_sums(y, launch.channels) if with_stats else None
        if with_stats:
            x, branch = aligned(x), aligned(branch)
        launch_kernel(
            residual_add_forward_kernel,
            launch.persistent_grid(),
            (x, branch, y, sums, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
        if sums is None:
            return Output(y, None)
        mean, var = finished_statistics(sums, launch.pixels)
        return Output(y, Statistics(mean[0], var[0]))
