"""Batch norm and ReLU, forward and backward, and the gradient of a batch norm's input."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Fold, Norm
from preact_kernels.kernels.triton.batch_norm import (
    load_fold,
    load_folded,
    load_norm,
    pixels_of,
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
def bn_relu_forward_kernel(
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
    pixel = pixels_of(tl.program_id(0), BLOCK_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    p = pre_activation(value, mean, scale, bias, x.dtype.element_ty)
    tl.store(y + at, relu(p).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pixels"])
def bn_relu_backward_mask_kernel(
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
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
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
def bn_input_gradient_kernel(
    g,
    fold,
    dx,
    pixels,
    MASKED: tl.constexpr,
    IN_TRAINING: tl.constexpr,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """dx = [skip +] A*g + B*(x - mean) + C; if MASKED, of g * [p > 0] in place of g.

    All tensors are `[pixels, CHANNELS]`. Grid: tiles, channel blocks.
    """
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CHANNELS: tl.constexpr = BLOCKS.block_channels
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    coefficients = load_fold(fold, channel, CHANNELS)
    pixel = pixels_of(tl.program_id(0), BLOCK_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    g_mask = mask
    if MASKED:
        bias = tl.load(fold.norm.bias + channel, mask=is_channel, other=0.0)
        value = tl.load(fold.x + at, mask=mask, other=0.0).to(tl.float32)
        scale, _, _, mean = coefficients
        g_mask = mask & ~(pre_activation(value, mean, scale, bias, fold.x.dtype.element_ty) <= 0)
    gradient = load_folded(g, fold, coefficients, at, mask, g_mask, IN_TRAINING)
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=mask)


def bn_relu_forward(x: Tensor, norm: Norm) -> Tensor:
    """See `Kernels.bn_relu_forward`. A program owns one tile."""
    launch = elementwise_launch(x)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    with on_device_of(x):
        launch_kernel(
            bn_relu_forward_kernel,
            launch.grid,
            (x, norm, y, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
    return y


def _launch_mask(dy: Tensor, x: Tensor, norm: Norm, g: Tensor | None) -> Tensor:
    """Stores `dy * [p > 0]` in g unless None, and returns its sums.

    A program owns every `programs`-th tile of a block of channels.
    """
    launch = elementwise_launch(x)
    with on_device_of(x):
        sums = new_sums(x, launch.channels)
        launch_kernel(
            bn_relu_backward_mask_kernel,
            launch.persistent_grid(x),
            (dy, x, norm, g, sums, launch.pixels),
            launch.constants,
            launch.num_warps,
        )
        return finished_sums(sums)[0]


def bn_relu_backward_mask(dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """See `Kernels.bn_relu_backward_mask`."""
    g = torch.empty_like(x, memory_format=torch.channels_last)
    return g, _launch_mask(dy, x, norm, g)


def bn_relu_backward_sums(dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """See `Kernels.bn_relu_backward_sums`."""
    return _launch_mask(dy, x, norm, None)


def _launch_input_gradient(g: Tensor, fold: Fold, masked: bool) -> Tensor:
    """`[skip +] A*g + B*x + C`, of `g * [p > 0]` if masked. A program owns one tile."""
    launch = elementwise_launch(fold.x)
    dx = torch.empty_like(fold.x, memory_format=torch.channels_last)
    flags = {"MASKED": masked, "IN_TRAINING": fold.inv_count != 0}
    with on_device_of(fold.x):
        launch_kernel(
            bn_input_gradient_kernel,
            launch.grid,
            (g, fold, dx, launch.pixels),
            {**flags, **launch.constants},
            launch.num_warps,
        )
    return dx


def bn_relu_backward_input(
    dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
) -> Tensor:
    """See `Kernels.bn_relu_backward_input`."""
    return _launch_input_gradient(dy, Fold(None, x, norm, sums, inv_count), masked=True)


def bn_input_gradient(g: Tensor, fold: Fold) -> Tensor:
    """See `Kernels.bn_input_gradient`."""
    return _launch_input_gradient(g, fold, masked=False)
