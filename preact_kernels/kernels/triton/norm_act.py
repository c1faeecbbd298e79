"""Batch norm and ReLU, forward and backward, and the gradient of a batch norm's input."""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import AffineStep, Gradient, Norm
from preact_kernels.kernels.triton.batch_norm import (
    kernel_gradient,
    kernel_norm,
    load_affine_step,
    load_norm,
    load_whole_gradient,
    pixel_indices,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.launch import (
    elementwise_launch,
    launch_kernel,
    on_device_of,
)
from preact_kernels.kernels.triton.reduction import (
    add_two_sums,
    column_sums,
    finished_sums,
    new_sums,
)


@triton.jit(do_not_specialize=["pixels"])
def norm_act_forward_kernel(
    x,
    norm,
    y,
    pixels,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """y = relu(p), both `[pixels, CHANNELS]`. Grid: tiles, channel blocks."""
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CHANNELS: tl.constexpr = BLOCKS.block_channels
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    mean, _, scale, bias = load_norm(norm, channel, CHANNELS)
    pixel = pixel_indices(tl.program_id(0), BLOCK_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    p = pre_activation(value, mean, scale, bias, x.dtype.element_ty)
    tl.store(y + at, relu(p).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pixels"])
def norm_act_backward_kernel(
    dy,
    x,
    norm,
    g,
    sums,
    pixels,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """g = dy * [p > 0], stored unless `g` is None, and its sums. Grid: programs, channel blocks."""
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CHANNELS: tl.constexpr = BLOCKS.block_channels
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    mean, rstd, scale, bias = load_norm(norm, channel, CHANNELS)
    sum_g = tl.zeros([BLOCK_CHANNELS], tl.float32)
    sum_g_x = tl.zeros([BLOCK_CHANNELS], tl.float32)
    for tile in tl.range(
        tl.program_id(0), tiles_of(pixels, BLOCK_PIXELS), tl.num_programs(0), num_stages=3
    ):
        pixel = pixel_indices(tile, BLOCK_PIXELS, INT64)
        mask = (pixel < pixels)[:, None] & is_channel[None, :]
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        p = pre_activation(value, mean, scale, bias, x.dtype.element_ty)
        dy_tile = tl.load(dy + at, mask=mask, other=0.0)
        g_tile = tl.where(p <= 0, 0.0, dy_tile.to(tl.float32))
        if g is not None:
            tl.store(g + at, g_tile.to(g.dtype.element_ty), mask=mask)
        sum_g += column_sums(g_tile)
        sum_g_x += column_sums(tl.where(mask, g_tile * (value - mean[None, :]), 0.0))
    add_two_sums(sum_g, sum_g_x * rstd, sums, channel, is_channel, CHANNELS)


@triton.jit(do_not_specialize=["pixels"])
def norm_input_gradient_kernel(
    gradient,
    dx,
    pixels,
    MASKED: tl.constexpr,
    IN_TRAINING: tl.constexpr,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """dx = [skip +] A*g + B*(x - mean) + C; if MASKED, with g * [p > 0] for g.

    All tensors are `[pixels, CHANNELS]`. Grid: tiles, channel blocks.
    """
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CHANNELS: tl.constexpr = BLOCKS.block_channels
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    step = gradient.step
    coefficients = load_affine_step(step, channel, CHANNELS)
    pixel = pixel_indices(tl.program_id(0), BLOCK_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    g_mask = mask
    if MASKED:
        bias = tl.load(step.norm.bias + channel, mask=is_channel, other=0.0)
        value = tl.load(step.x + at, mask=mask, other=0.0).to(tl.float32)
        scale, _, _, mean = coefficients
        g_mask = mask & ~(pre_activation(value, mean, scale, bias, step.x.dtype.element_ty) <= 0)
    whole = load_whole_gradient(gradient, coefficients, at, mask, g_mask, IN_TRAINING)
    tl.store(dx + at, whole.to(dx.dtype.element_ty), mask=mask)


def norm_act_forward(x: Tensor, norm: Norm) -> Tensor:
    """See `Kernels.norm_act_forward`. A program owns one tile."""
    launch = elementwise_launch(x)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    with on_device_of(x):
        launch_kernel(
            norm_act_forward_kernel,
            launch.grid,
            (x, kernel_norm(norm), y, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
    return y


def norm_act_backward(
    dy: Tensor, x: Tensor, norm: Norm, with_g: bool
) -> tuple[Tensor | None, Tensor]:
    """See `Kernels.norm_act_backward`.

    A program owns every `programs`-th tile of a block of channels.
    """
    launch = elementwise_launch(x)
    g = torch.empty_like(x, memory_format=torch.channels_last) if with_g else None
    with on_device_of(x):
        sums = new_sums(x, launch.channels)
        launch_kernel(
            norm_act_backward_kernel,
            launch.persistent_grid(),
            (dy, x, kernel_norm(norm), g, sums, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
        return g, finished_sums(sums)[0]


def norm_input_gradient(gradient: Gradient, activated: bool = False) -> Tensor:
    """See `Kernels.norm_input_gradient`. A program owns one tile."""
    gradient = kernel_gradient(gradient)
    step = cast(AffineStep, gradient.step)
    launch = elementwise_launch(step.x)
    dx = torch.empty_like(step.x, memory_format=torch.channels_last)
    flags = {"MASKED": activated, "IN_TRAINING": step.inv_count != 0}
    with on_device_of(step.x):
        launch_kernel(
            norm_input_gradient_kernel,
            launch.grid,
            (gradient, dx, launch.pixels),
            {**flags, **launch.constants},
            launch.num_warps,
        )
    return dx
