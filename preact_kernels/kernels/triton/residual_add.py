"""The residual addition, with the statistics of the sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Output, Statistics
from preact_kernels.kernels.triton.batch_norm import pixel_indices
from preact_kernels.kernels.triton.launch import (
    elementwise_launch,
    launch_kernel,
    on_device_of,
    wait_for_predecessors,
)
from preact_kernels.kernels.triton.statistics import launch_statistics


@triton.jit(do_not_specialize=["pixels"])
def residual_add_forward_kernel(
    x,
    branch,
    bias,
    y,
    pixels,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """y = x + (branch [+ bias]), `[pixels, CHANNELS]`. Grid: tiles, channel tiles."""
    wait_for_predecessors()
    pixel = pixel_indices(tl.program_id(0), TILES.tile_pixels, INT64)
    channel = tl.program_id(1) * TILES.tile_channels + tl.arange(0, TILES.tile_channels)
    is_channel = channel < CHANNELS
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    value = tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    value += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


def residual_add_forward(
    x: Tensor, branch: Tensor, with_stats: bool, bias: Tensor | None = None
) -> Output:
    """See `Kernels.residual_add_forward`. A program owns one tile."""
    y = torch.empty_like(x, memory_format=torch.channels_last)
    if with_stats:
        assert bias is None
        mean, var = launch_statistics(x, None, branch, y)
        return Output(y, Statistics(mean[0], var[0]))
    launch = elementwise_launch(x)
    with on_device_of(x):
        launch_kernel(
            residual_add_forward_kernel,
            launch.grid,
            (x, branch, bias, y, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
    return Output(y, None)
