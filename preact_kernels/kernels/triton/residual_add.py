"""The residual addition, with the statistics of the sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.batch_norm import pixels_of, tiles_of
from preact_kernels.kernels.triton.configurations import elementwise
from preact_kernels.kernels.triton.launch import (
    counters,
    needs_int64,
    on_device_of,
    persistent_programs,
)
from preact_kernels.kernels.triton.reduction import (
    add_tile,
    finish_statistics,
    no_statistics,
    statistics_memory,
)


@triton.jit
def residual_add_forward_kernel(
    x, branch, y, partials, counters, mean, var, pixels,
    CHANNELS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """y = x + branch, all `[pixels, CHANNELS]`, and its statistics where `mean` is given.

    Grid: programs, channel blocks.
    """
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    count = 0.0
    pivot = tl.zeros([BLOCK_CHANNELS], tl.float32)
    offset = pivot
    m2 = pivot
    for tile in tl.range(
        tl.program_id(0), tiles_of(pixels, BLOCK_PIXELS), tl.num_programs(0), num_stages=3
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        mask = is_pixel[:, None] & is_channel[None, :]
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        value += tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
        stored = value.to(y.dtype.element_ty)
        tl.store(y + at, stored, mask=mask)
        if mean is not None:
            rows = tl.minimum(pixels - tile * BLOCK_PIXELS, BLOCK_PIXELS)
            count, pivot, offset, m2 = add_tile(
                count, pivot, offset, m2, stored.to(tl.float32), is_pixel, rows
            )
    if mean is not None:
        finish_statistics(
            count, pivot, offset, m2, partials, counters, mean, var, channel, is_channel, CHANNELS
        )


def residual_add_forward(
    x: Tensor, branch: Tensor, with_stats: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.residual_add_forward`."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    config = elementwise(channels)
    programs = persistent_programs(x, triton.cdiv(pixels, config.block_pixels))
    blocks = triton.cdiv(channels, config.block_channels)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    mean, var, partials = statistics_memory(y, programs) if with_stats else (None, None, None)
    with on_device_of(x):
        residual_add_forward_kernel[(programs, blocks)](
            x, branch, y, partials, counters(x, blocks) if with_stats else None, mean, var, pixels,
            channels, needs_int64(x), config.block_pixels, config.block_channels,
            num_warps=config.num_warps,
        )  # fmt: skip
    return (y, mean, var) if with_stats else (y, *no_statistics(y))
