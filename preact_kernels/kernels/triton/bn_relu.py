"""Batch norm and ReLU forward and backward, and the gradient of a batch norm's input."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.batch_norm import (
    load_batch_norm,
    load_fold,
    load_folded,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.configurations import elementwise
from preact_kernels.kernels.triton.launch import needs_int64, on_device_of, persistent_programs
from preact_kernels.kernels.triton.reduction import column_sums, launch_sum_partials


@triton.jit
def bn_relu_forward_kernel(
    x, mean, var, bn_weight, bn_bias, eps, y, pixels,
    CHANNELS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """y = relu(p), both `[pixels, CHANNELS]`; grid: tiles, channel blocks."""
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    mu, _, scale, bias = load_batch_norm(mean, var, bn_weight, bn_bias, eps, channel, is_channel)
    pixel = pixels_of(tl.program_id(0), BLOCK_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    p = pre_activation(value, mu, scale, bias, x.dtype.element_ty)
    tl.store(y + at, relu(p).to(y.dtype.element_ty), mask=mask)


@triton.jit
def bn_relu_backward_mask_kernel(
    da, x, mean, var, bn_weight, bn_bias, eps, g, partials, pixels,
    CHANNELS: tl.constexpr, INT64: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """g = da * [p > 0], stored where there is memory for it, and the program's share of its sums.

    `partials` is `[programs, 2, CHANNELS]`; grid: programs, channel blocks.
    """
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    mu, rstd, scale, bias = load_batch_norm(mean, var, bn_weight, bn_bias, eps, channel, is_channel)
    sum_g = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum_g_x = tl.zeros([BLOCK_CHANNELS], tl.float32)
    for tile in tl.range(
        tl.program_id(0), tiles_of(pixels, BLOCK_PIXELS), tl.num_programs(0), num_stages=3
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        mask = (pixel < pixels)[:, None] & is_channel[None, :]
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        p = pre_activation(value, mu, scale, bias, x.dtype.element_ty)
        da_tile = tl.load(da + at, mask=mask, other=0.0)
        g_tile = tl.where(p <= 0, 0.0, da_tile.to(tl.float32))
        if g is not None:
            tl.store(g + at, g_tile.to(g.dtype.element_ty), mask=mask)
        sum_g += column_sums(g_tile)
        sum_g_x += column_sums(tl.where(mask, g_tile * (value - mu[None, :]), 0.0))
    own = partials + tl.program_id(0) * 2 * CHANNELS + channel
    tl.store(own, sum_g, mask=is_channel)
    tl.store(own + CHANNELS, sum_g_x * rstd, mask=is_channel)


@triton.jit
def bn_input_gradient_kernel(
    dy, g, x, mean, var, bn_weight, bn_bias, eps, sums, inv_count, dx, pixels,
    CHANNELS: tl.constexpr, INT64: tl.constexpr, IN_TRAINING: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx = [dy +] A*g + B*(x - mean) + C; with `bn_bias`, g is first masked by [p > 0].

    All are `[pixels, CHANNELS]`; grid: tiles, channel blocks.
    """
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    fold = load_fold(x, mean, var, bn_weight, eps, sums, inv_count, channel, is_channel, CHANNELS)
    pixel = pixels_of(tl.program_id(0), BLOCK_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    g_mask = mask
    if bn_bias is not None:
        bias = tl.load(bn_bias + channel, mask=is_channel, other=0.0)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        a, _, _, mu = fold
        g_mask = mask & ~(pre_activation(value, mu, a, bias, x.dtype.element_ty) <= 0)
    gradient = load_folded(dy, g, x, fold, at, mask, g_mask, IN_TRAINING)
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=mask)


def bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps):
    """See `reference.bn_relu_forward`."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    config = elementwise(channels)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    grid = (
        triton.cdiv(pixels, config.block_pixels),
        triton.cdiv(channels, config.block_channels),
    )
    with on_device_of(x):
        bn_relu_forward_kernel[grid](
            x, mean, var, bn_weight, bn_bias, eps, y, pixels, channels, needs_int64(x),
            config.block_pixels, config.block_channels, num_warps=config.num_warps,
        )  # fmt: skip
    return y


def _masked(
    da: Tensor, x: Tensor, mean: Tensor, var: Tensor, bn_weight: Tensor, bn_bias: Tensor,
    eps: float, g: Tensor | None,
) -> Tensor:  # fmt: skip
    """Stores g where there is memory for it; returns its sums."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    config = elementwise(channels)
    programs = persistent_programs(x, triton.cdiv(pixels, config.block_pixels))
    partials = x.new_empty((programs, 2, channels), dtype=torch.float32)
    sums = x.new_empty((2, channels), dtype=torch.float32)
    with on_device_of(x):
        bn_relu_backward_mask_kernel[(programs, triton.cdiv(channels, config.block_channels))](
            da, x, mean, var, bn_weight, bn_bias, eps, g, partials, pixels,
            channels, needs_int64(x), config.block_pixels, config.block_channels,
            num_warps=config.num_warps,
        )  # fmt: skip
        launch_sum_partials(partials, None, sums)
    return sums


def bn_relu_backward_mask(da, x, mean, var, bn_weight, bn_bias, eps):
    """g = da * [p > 0] in the dtype of x, and its sums."""
    g = torch.empty_like(x, memory_format=torch.channels_last)
    return g, _masked(da, x, mean, var, bn_weight, bn_bias, eps, g)


def bn_relu_backward_sums(dy, x, mean, var, bn_weight, bn_bias, eps):
    """See `reference.bn_relu_backward_sums`."""
    return _masked(dy, x, mean, var, bn_weight, bn_bias, eps, None)


def _input_gradient(dy, g, x, mean, var, bn_weight, bn_bias, eps, sums, inv_count):
    channels = x.shape[1]
    pixels = x.numel() // channels
    config = elementwise(channels)
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    grid = (
        triton.cdiv(pixels, config.block_pixels),
        triton.cdiv(channels, config.block_channels),
    )
    with on_device_of(x):
        bn_input_gradient_kernel[grid](
            dy, g, x, mean, var, bn_weight, bn_bias, eps, sums, inv_count, dx, pixels,
            channels, needs_int64(x), inv_count != 0, config.block_pixels, config.block_channels,
            num_warps=config.num_warps,
        )  # fmt: skip
    return dx


def bn_relu_backward_input(
    dy, x, mean, var, bn_weight, bn_bias, eps, sums, inv_count
):  # fmt: skip
    """See `reference.bn_relu_backward_input`."""
    return _input_gradient(None, dy, x, mean, var, bn_weight, bn_bias, eps, sums, inv_count)


def bn_input_gradient(dy, g, x, mean, var, bn_weight, eps, sums, inv_count):
    """See `reference.bn_input_gradient`."""
    return _input_gradient(dy, g, x, mean, var, bn_weight, None, eps, sums, inv_count)
