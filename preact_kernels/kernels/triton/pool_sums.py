"""The sums of the affine step of a group norm, and the gradients of its weight and bias."""

import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels import contract
from preact_kernels.kernels.triton.launch import (
    launch_kernel,
    on_device_of,
    wait_for_predecessors,
)

_TILE_VALUES = 2048
_MOST_GROUP_CHANNELS = 4096  # a tile holds all channels of a group


@triton.jit(do_not_specialize=["weight_stride", "images", "channels", "size"])
def pool_sums_kernel(
    sums,
    weight,
    pooled,
    totals,
    weight_stride,
    images,
    channels,
    size,
    TILE_IMAGES: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """pooled = the mean of weight * sums over the `size` channels of a group, for each image.

    totals = the sums over all images. `sums` and `pooled` are `[2, images, channels]`, `totals`
    `[2, channels]`; rows of `weight` are `weight_stride` elements apart. Grid: groups, 2.
    """
    wait_for_predecessors()
    channel = tl.arange(0, TILE_CHANNELS)
    is_channel = channel < size
    channel += tl.program_id(0) * size
    table = tl.program_id(1).to(tl.int64) * images * channels
    total = tl.zeros([TILE_IMAGES, TILE_CHANNELS], tl.float32)
    for begin in range(0, images, TILE_IMAGES):
        image = begin + tl.arange(0, TILE_IMAGES)
        mask = (image < images)[:, None] & is_channel[None, :]
        at = table + image.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(sums + at, mask=mask, other=0.0)
        weight_at = image.to(tl.int64)[:, None] * weight_stride + channel[None, :]
        weighted = value * tl.load(weight + weight_at, mask=mask, other=0.0)
        mean = tl.sum(weighted, 1) / size.to(tl.float32)
        tl.store(pooled + at, tl.broadcast_to(mean[:, None], weighted.shape), mask=mask)
        total += value
    totals_at = totals + tl.program_id(1) * channels + channel
    tl.store(totals_at, tl.sum(total, 0), mask=is_channel)


def pool_sums(sums: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """See `Kernels.pool_sums`. A program owns a group of one of the two sums."""
    _, images, channels = sums.shape
    size = channels // groups
    if size > _MOST_GROUP_CHANNELS:
        return contract.pool_sums(sums, weight, groups)
    tile_channels = triton.next_power_of_2(size)
    tile_images = max(1, min(_TILE_VALUES // tile_channels, triton.next_power_of_2(images)))
    pooled, totals = sums.new_empty(sums.shape), sums.new_empty((2, channels))
    weight_stride = channels if weight.dim() == 2 else 0
    with on_device_of(sums):
        launch_kernel(
            pool_sums_kernel,
            (groups, 2, 1),
            (sums, weight, pooled, totals, weight_stride, images, channels, size),
            {"TILE_IMAGES": tile_images, "TILE_CHANNELS": tile_channels},
            4,
        )
    return pooled, totals
