"""Mean and biased variance of each image and group of channels.

Each program stores the moments of some pixels of one image; a second launch merges them in a fixed
order. Results do not depend on the other images.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Statistics
from preact_kernels.kernels.triton.batch_norm import pixel_indices, tiles_of
from preact_kernels.kernels.triton.configurations import TILES_OF_IMAGE
from preact_kernels.kernels.triton.launch import (
    INTERPRETED,
    aligned,
    elementwise_launch,
    launch_kernel,
    on_device_of,
    wait_for_predecessors,
)
from preact_kernels.kernels.triton.reduction import column_sums

_TILES_OF_IMAGE = tl.constexpr(TILES_OF_IMAGE)


@triton.jit(do_not_specialize=["pixels"])
def group_moments_kernel(
    x,
    moments,
    pixels,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """Pivot, mean - pivot, and sum((x - mean)^2) per channel, over some pixels of an image.

    `x` is `[images, pixels, CHANNELS]` and `moments` `[programs, 3, CHANNELS]`. The pivot is near
    the mean of the first tile, so that differences are small. The mean of a constant channel is
    exact. Grid: images * programs of an image, channel tiles.
    """
    wait_for_predecessors()
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CHANNELS: tl.constexpr = TILES.tile_channels
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < CHANNELS
    tiles = tiles_of(pixels, TILE_PIXELS)
    programs = tiles_of(tiles, _TILES_OF_IMAGE)
    image, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    x += image.to(tl.int64) * pixels * CHANNELS
    first = program * _TILES_OF_IMAGE
    last = tl.minimum(first + _TILES_OF_IMAGE, tiles)
    pixel = pixel_indices(first, TILE_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    rows = tl.minimum(pixels - first * TILE_PIXELS, TILE_PIXELS).to(tl.float32)
    pivot = column_sums(tl.load(x + at, mask=mask, other=0.0).to(tl.float32)) / rows
    pivot = tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)
    # Sums over tiles stay in the registers of each thread until the end.
    total = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    squares = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    for tile in tl.range(first, last, num_stages=3):
        pixel = pixel_indices(tile, TILE_PIXELS, INT64)
        mask = (pixel < pixels)[:, None] & is_channel[None, :]
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        shifted = tl.where(mask, value - pivot[None, :], 0.0)
        total += shifted
        squares += shifted * shifted
    sums = column_sums(total)
    rows = tl.minimum(pixels - first * TILE_PIXELS, _TILES_OF_IMAGE * TILE_PIXELS)
    offset = tl.div_rn(sums, tl.zeros_like(sums) + rows.to(tl.float32))
    m2 = column_sums(squares) - sums * offset
    moments += tl.program_id(0).to(tl.int64) * (3 * CHANNELS) + channel
    tl.store(moments, pivot, mask=is_channel)
    tl.store(moments + CHANNELS, offset, mask=is_channel)
    tl.store(moments + 2 * CHANNELS, m2, mask=is_channel)


@triton.jit(do_not_specialize=["pixels", "program_pixels", "programs", "channels", "size"])
def group_stats_kernel(
    moments,
    mean,
    var,
    pixels,
    program_pixels,
    programs,
    channels,
    size,
    TILE: tl.constexpr,
):
    """Mean and variance `[images, channels]` of groups of `size` channels, from moments.

    `moments` is `[images, programs, 3, channels]`; each program has `program_pixels` pixels, the
    last one the rest of `pixels`. Merges by the formula of Chan, Golub and LeVeque (1979), in
    float64, with means relative to the first. Grid: images * groups.
    """
    wait_for_predecessors()
    groups = channels // size
    image, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    moments += image.to(tl.int64) * programs * (3 * channels) + group * size
    near = tl.load(moments).to(tl.float64) + tl.load(moments + channels).to(tl.float64)
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    for begin in range(0, programs * size, TILE):
        index = begin + tl.arange(0, TILE)
        mask = index < programs * size
        program = index // size
        at = moments + program.to(tl.int64) * (3 * channels) + index % size
        count = tl.minimum(pixels - program * program_pixels, program_pixels).to(tl.float64)
        delta = tl.load(at, mask=mask, other=0.0).to(tl.float64) - near
        delta += tl.load(at + channels, mask=mask, other=0.0).to(tl.float64)
        m2 = tl.load(at + 2 * channels, mask=mask, other=0.0).to(tl.float64)
        total += tl.where(mask, count * delta, 0.0)
        squares += tl.where(mask, m2 + count * delta * delta, 0.0)
    count = pixels.to(tl.float64) * size.to(tl.float64)
    shift = tl.sum(total, 0) / count
    variance = tl.sum(squares, 0) / count - shift * shift
    variance = tl.where(variance < 0, 0.0, variance)
    row = image.to(tl.int64) * channels + group * size
    for begin in range(0, size, TILE):
        index = begin + tl.arange(0, TILE)
        zeros = tl.zeros([TILE], tl.float32)
        tl.store(mean + row + index, zeros + (near + shift).to(tl.float32), mask=index < size)
        tl.store(var + row + index, zeros + variance.to(tl.float32), mask=index < size)


def group_stats(x: Tensor, groups: int) -> Statistics:
    """See `Kernels.group_stats`.

    A program owns some tiles of a few channels of an image; in the second launch, a group of
    an image.
    """
    launch = elementwise_launch(x, by_image=True)
    images, channels, programs = launch.images, launch.channels, launch.programs_of_image()
    mean, var = (x.new_empty((images, channels), dtype=torch.float32) for _ in range(2))
    with on_device_of(x):
        moments = x.new_empty((images, programs, 3, channels), dtype=torch.float32)
        launch_kernel(
            group_moments_kernel,
            launch.image_grid(),
            (aligned(x), moments, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
        program_pixels = TILES_OF_IMAGE * launch.constants["TILES"].tile_pixels
        size = channels // groups
        launch_kernel(
            group_stats_kernel,
            (images * groups, 1, 1),
            (moments, mean, var, launch.pixels, program_pixels, programs, channels, size),
            {"TILE": 1024 if INTERPRETED else 256},
            2,
        )
    return Statistics(mean, var)
