"""Mean and biased variance a channel, in one pass; running statistics."""

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
from preact_kernels.kernels.triton.reduction import add_tile, finish_statistics, statistics_memory


@triton.jit
def bn_stats_kernel(
    x, partials, counters, mean, var, pixels,
    CHANNELS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Statistics of x `[pixels, CHANNELS]`; grid: programs, channel blocks."""
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
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=is_pixel[:, None] & is_channel[None, :], other=0.0)
        rows = tl.minimum(pixels - tile * BLOCK_PIXELS, BLOCK_PIXELS)
        count, pivot, offset, m2 = add_tile(
            count, pivot, offset, m2, value.to(tl.float32), is_pixel, rows
        )
    finish_statistics(
        count, pivot, offset, m2, partials, counters, mean, var, channel, is_channel, CHANNELS
    )


def bn_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.bn_stats`."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    config = elementwise(channels)
    programs = persistent_programs(x, triton.cdiv(pixels, config.block_pixels))
    blocks = triton.cdiv(channels, config.block_channels)
    mean, var, partials = statistics_memory(x, programs)
    with on_device_of(x):
        bn_stats_kernel[(programs, blocks)](
            x, partials, counters(x, blocks), mean, var, pixels,
            channels, needs_int64(x), config.block_pixels, config.block_channels,
            num_warps=config.num_warps,
        )  # fmt: skip
    return mean, var


def running_stats_update(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """See `reference.running_stats_update`. Two launches for many float32 vectors."""
    if all(r.dtype == torch.float32 for r in running):
        torch._foreach_mul_(running, 1 - momentum)
        torch._foreach_add_(running, batch, alpha=momentum)
    else:
        for r, b in zip(running, batch, strict=True):
            r.copy_((1 - momentum) * r.double() + momentum * b.double())
