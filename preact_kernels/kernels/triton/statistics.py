"""Mean and biased variance of each image and group of channels, or of each channel of a batch.

Each program stores the moments of some pixels; a second launch merges them in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Statistics
from preact_kernels.kernels.triton.batch_norm import pixel_indices, tiles_of
from preact_kernels.kernels.triton.launch import (
    aligned,
    launch_kernel,
    on_device_of,
    reducing_launch,
    wait_for_predecessors,
)
from preact_kernels.kernels.triton.reduction import as_pivot, column_sums, merge_stages


@triton.jit
def load_value(x, branch, at, mask, dtype: tl.constexpr):
    """A tile of x [+ branch], rounded to `dtype`, in float32."""
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if branch is not None:
        value += tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["pixels", "program_tiles"])
def moments_kernel(
    x,
    branch,
    y,
    moments,
    pixels,
    program_tiles,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """Pivot, mean - pivot, and sum((x - mean)^2) per channel, over some pixels of an image.

    If `branch` is given, those of y = x + branch, which is stored.

    `x` is `[images, pixels, CHANNELS]` and `moments` `[programs, 3, CHANNELS]`. The pivot is the
    mean of some of the program's pixels, so that differences are small. The mean of a constant
    channel is exact. Grid: images * programs of an image, channel tiles.
    """
    wait_for_predecessors()
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CHANNELS: tl.constexpr = TILES.tile_channels
    dtype: tl.constexpr = x.dtype.element_ty if y is None else y.dtype.element_ty
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < CHANNELS
    tiles = tiles_of(pixels, TILE_PIXELS)
    programs = tiles_of(tiles, program_tiles)
    image, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    x += image.to(tl.int64) * pixels * CHANNELS
    first = program * program_tiles
    count = tl.minimum(pixels - first * TILE_PIXELS, program_tiles * TILE_PIXELS)
    # Pixels at equal distances, which are odd: those of a border are not all of one column. More of
    # them for more tiles, as sums of many differences that are not small are inaccurate.
    samples = program_tiles // 16 + 1
    distance = tl.maximum(count // (TILE_PIXELS * samples) - 1 | 1, 1)
    pivots = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    for sample in range(samples):
        index = (sample * TILE_PIXELS + tl.arange(0, TILE_PIXELS)) * distance
        mask = (index < count)[:, None] & is_channel[None, :]
        pixel = pixel_indices(first, TILE_PIXELS, INT64) - tl.arange(0, TILE_PIXELS) + index
        at = pixel[:, None] * CHANNELS + channel[None, :]
        pivots += load_value(x, branch, at, mask, dtype)
    pivot = column_sums(pivots) / tl.minimum(count, TILE_PIXELS * samples).to(tl.float32)
    pivot = tl.where(tl.abs(pivot) < float("inf"), as_pivot(pivot), 0.0)
    # Sums over tiles stay in the registers of each thread until the end.
    total = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    totals = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    squares = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    for tile in tl.range(first, tl.minimum(first + program_tiles, tiles), num_stages=3):
        pixel = pixel_indices(tile, TILE_PIXELS, INT64)
        mask = (pixel < pixels)[:, None] & is_channel[None, :]
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = load_value(x, branch, at, mask, dtype)
        if y is not None:
            tl.store(y + at, value.to(dtype), mask=mask)
        shifted = tl.where(mask, value - pivot[None, :], 0.0)
        total += shifted
        squares += shifted * shifted
        if (tile - first) % 16 == 15:  # sums of fewer terms are more accurate
            totals += total
            total = tl.zeros_like(total)
    sums = column_sums(totals + total)
    offset = tl.div_rn(sums, tl.zeros_like(sums) + count.to(tl.float32))
    m2 = column_sums(squares) - sums * offset
    moments += tl.program_id(0).to(tl.int64) * (3 * CHANNELS) + channel
    tl.store(moments, pivot, mask=is_channel)
    tl.store(moments + CHANNELS, offset, mask=is_channel)
    tl.store(moments + 2 * CHANNELS, m2, mask=is_channel)


@triton.jit(do_not_specialize=["pixels", "program_pixels", "programs", "channels", "size"])
def merge_moments_kernel(
    moments,
    mean,
    var,
    bias,
    pixels,
    program_pixels,
    programs,
    channels,
    size,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Mean and variance `[images, channels]` of groups of `size` channels, from moments.

    `moments` is `[images, programs, 3, channels]`; each program has `program_pixels` pixels, the
    last one the rest of `pixels`. Merges by the formula of Chan, Golub and LeVeque (1979), in
    float64, with means relative to the first pivot, which is finite. Grid: images * groups.

    If `bias` is given, these are the statistics of x + bias, and the bias is subtracted from the
    mean.
    """
    wait_for_predecessors()
    groups = channels // size
    image, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    moments += image.to(tl.int64) * programs * (3 * channels) + group * size
    near = tl.load(moments).to(tl.float64)
    if bias is not None:
        bias += group * size
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    for begin in tl.range(0, programs * size, TILE, num_stages=STAGES):
        index = begin + tl.arange(0, TILE)
        mask = index < programs * size
        program = index // size
        at = moments + program.to(tl.int64) * (3 * channels) + index % size
        count = tl.minimum(pixels - program * program_pixels, program_pixels).to(tl.float64)
        delta = tl.load(at, mask=mask, other=0.0).to(tl.float64) - near
        delta += tl.load(at + channels, mask=mask, other=0.0).to(tl.float64)
        if bias is not None:
            delta += tl.load(bias + index % size, mask=mask, other=0.0).to(tl.float64)
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
        channel_mean = tl.zeros([TILE], tl.float64) + (near + shift)
        if bias is not None:
            channel_mean -= tl.load(bias + index, mask=index < size, other=0.0).to(tl.float64)
        tl.store(mean + row + index, channel_mean.to(tl.float32), mask=index < size)
        tl.store(var + row + index, zeros + variance.to(tl.float32), mask=index < size)


def launch_statistics(
    x: Tensor,
    groups: int | None,
    branch: Tensor | None = None,
    y: Tensor | None = None,
    bias: Tensor | None = None,
) -> Statistics:
    """Statistics `[images, channels]` of groups of channels; of each channel of the batch if None.

    If `branch` is given, those of y = x + branch, which is stored. For `bias` see
    `Kernels.group_stats`. A program owns some tiles of a few channels; in the second launch, a
    group of an image.
    """
    launch, tiles = reducing_launch(x, groups is not None)
    images, channels, programs = launch.images, launch.channels, launch.programs
    mean, var = (x.new_empty((images, channels), dtype=torch.float32) for _ in range(2))
    with on_device_of(x):
        moments = x.new_empty((images, programs, 3, channels), dtype=torch.float32)
        branch = None if branch is None else aligned(branch)
        launch_kernel(
            moments_kernel,
            launch.grid,
            (aligned(x), branch, y, moments, launch.pixels, tiles),
            launch.constants,
            launch.num_warps,
        )
        program_pixels = tiles * launch.constants["TILES"].tile_pixels
        size = 1 if groups is None else channels // groups
        tile = min(max(triton.next_power_of_2(programs * size), 64), 2048)
        launch_kernel(
            merge_moments_kernel,
            (images * (channels // size), 1, 1),
            (moments, mean, var, bias, launch.pixels, program_pixels, programs, channels, size),
            {"TILE": tile, "STAGES": merge_stages(programs * size, tile)},
            max(1, tile // 256),
        )
    return Statistics(mean, var)


def group_stats(x: Tensor, groups: int, bias: Tensor | None = None) -> Statistics:
    """See `Kernels.group_stats`."""
    return launch_statistics(x, groups, bias=bias)


def bn_stats(x: Tensor) -> Statistics:
    """See `Kernels.bn_stats`."""
    mean, var = launch_statistics(x, None)
    return Statistics(mean[0], var[0])
