"""Norm and activation, forward and backward, and the gradient of a norm's input.

If the norm has rows, each program works on one image. Otherwise `rows` is None, and for activations
without a parameter `parameter` is None: no code is compiled for them. The same holds for `residual`
and `y` where they are None.
"""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.activations import RELU
from preact_kernels.kernels.contract import WITH_RESIDUAL, AffineStep, Gradient, Norm
from preact_kernels.kernels.triton.activations import (
    activate,
    activation_gradient,
    kernel_activation,
)
from preact_kernels.kernels.triton.batch_norm import (
    kernel_gradient,
    kernel_norm,
    load_affine_step,
    load_norm,
    load_pooled_step,
    norm_of_image,
    pixel_indices,
    pre_activation,
    rows_of,
    tiles_of,
    whole_gradient,
)
from preact_kernels.kernels.triton.launch import (
    PreparedLaunches,
    aligned,
    elementwise_launch,
    launch_kernel,
    on_device_of,
    reducing_launch,
    wait_for_predecessors,
)
from preact_kernels.kernels.triton.reduction import (
    column_sums,
    launch_sum_partials,
)


@triton.jit(do_not_specialize=["rows", "pixels"])
def norm_act_forward_kernel(
    x,
    norm,
    residual,
    y,
    parameter,
    rows,
    pixels,
    ACTIVATION: tl.constexpr,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """y = act(p [+ residual]).

    x, residual and y are `[images, pixels, CHANNELS]`, with one image if `rows` is None. Grid:
    images * tiles of an image, channel tiles.
    """
    wait_for_predecessors()
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CHANNELS: tl.constexpr = TILES.tile_channels
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < CHANNELS
    if rows is not None:
        tiles = tiles_of(pixels, TILE_PIXELS)
        image = tl.program_id(0) // tiles
        offset = image.to(tl.int64) * pixels * CHANNELS
        x, y = x + offset, y + offset
        if residual is not None:
            residual += offset
        norm = norm_of_image(norm, rows, image, CHANNELS)
    mean, _, scale, bias = load_norm(norm, channel, CHANNELS)
    tile = tl.program_id(0) if rows is None else tl.program_id(0) % tiles
    pixel = pixel_indices(tile, TILE_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    p = pre_activation(value, mean, scale, bias, dtype)
    if residual is not None:
        # The store rounds: ReLU and the identity give the same bits before and after rounding.
        p += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, activate(p, parameter, dtype, ACTIVATION).to(dtype), mask=mask)


@triton.jit
def load_g(dy, at, mask, p, dtype: tl.constexpr, parameter, ACTIVATION: tl.constexpr):
    """A float32 tile of g = dy * act'(p), rounded to `dtype`; zeros outside `mask`."""
    dy_tile = tl.load(dy + at, mask=mask, other=0.0)
    if ACTIVATION == "relu":  # needs neither rounding nor a mask
        return tl.where(p <= 0, 0.0, dy_tile.to(tl.float32))
    else:
        g = activation_gradient(dy_tile.to(tl.float32), p, parameter, dtype, ACTIVATION)
        return tl.where(mask, g.to(dtype).to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["rows", "pixels", "program_tiles"])
def norm_act_backward_kernel(
    dy,
    x,
    norm,
    y,
    g,
    a,
    sums,
    parameter,
    rows,
    pixels,
    program_tiles,
    ACTIVATION: tl.constexpr,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """g = dy * act'(p) and a = act(p), stored unless they are None, and partial sums of g.

    If `y`, the result of ReLU, is given, g is 0 where y <= 0, else dy.

    Tensors are `[images, pixels, CHANNELS]`, with one image if `rows` is None, and `sums` is
    `[programs of an image, 2, images, CHANNELS]`. Grid: images * programs of an image, channel
    tiles.
    """
    wait_for_predecessors()
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CHANNELS: tl.constexpr = TILES.tile_channels
    dtype: tl.constexpr = x.dtype.element_ty
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < CHANNELS
    tiles = tiles_of(pixels, TILE_PIXELS)
    programs = tiles_of(tiles, program_tiles)
    image, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    if rows is not None:
        offset = image.to(tl.int64) * pixels * CHANNELS
        dy, x = dy + offset, x + offset
        if y is not None:
            y += offset
        if g is not None:
            g += offset
        if a is not None:
            a += offset
        norm = norm_of_image(norm, rows, image, CHANNELS)
    mean, rstd, scale, bias = load_norm(norm, channel, CHANNELS)
    # Sums over tiles stay in the registers of each thread until the end.
    sum_g = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    sum_g_x = tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)
    first = program * program_tiles
    for tile in tl.range(first, tl.minimum(first + program_tiles, tiles), num_stages=3):
        pixel = pixel_indices(tile, TILE_PIXELS, INT64)
        mask = (pixel < pixels)[:, None] & is_channel[None, :]
        at = pixel[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if y is None:
            p = pre_activation(value, mean, scale, bias, dtype)
        else:  # ReLU's result is 0 where its argument is not positive
            p = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        g_tile = load_g(dy, at, mask, p, dtype, parameter, ACTIVATION)
        if g is not None:
            tl.store(g + at, g_tile.to(dtype), mask=mask)
        if a is not None:
            tl.store(a + at, activate(p, parameter, dtype, ACTIVATION).to(dtype), mask=mask)
        sum_g += g_tile
        sum_g_x += g_tile * (value - mean[None, :])
    images = tl.num_programs(0) // programs
    at = (program.to(tl.int64) * 2 * images + image) * CHANNELS + channel
    tl.store(sums + at, column_sums(sum_g), mask=is_channel)
    second = at + images.to(tl.int64) * CHANNELS
    tl.store(sums + second, column_sums(sum_g_x) * rstd, mask=is_channel)


@triton.jit(do_not_specialize=["rows", "pixels"])
def norm_input_gradient_kernel(
    gradient,
    dx,
    parameter,
    rows,
    pixels,
    ACTIVATION: tl.constexpr,
    IN_TRAINING: tl.constexpr,
    CHANNELS: tl.constexpr,
    INT64: tl.constexpr,
    TILES: tl.constexpr,
):
    """dx = [skip +] A*g + B*(x - mean) + C; unless ACTIVATION is None, g = gradient.g * act'(p).

    All tensors are `[images, pixels, CHANNELS]`, with one image if `rows` is None. Grid: images *
    tiles of an image, channel tiles.
    """
    wait_for_predecessors()
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CHANNELS: tl.constexpr = TILES.tile_channels
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < CHANNELS
    if rows is None:
        coefficients = load_affine_step(gradient.step, channel, CHANNELS)
        tile = tl.program_id(0)
    else:
        tiles = tiles_of(pixels, TILE_PIXELS)
        image, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        offset = image.to(tl.int64) * pixels * CHANNELS
        dx += offset
        all_images = gradient.step
        skip = all_images.skip
        if skip is not None:
            skip += offset
        norm = norm_of_image(all_images.norm, rows, image, CHANNELS)
        step = AffineStep(skip, all_images.x + offset, norm, all_images.sums, all_images.inv_count)
        gradient = Gradient(gradient.g + offset, step)
        images = tl.num_programs(0) // tiles
        coefficients = load_pooled_step(gradient.step, image, images, channel, CHANNELS)
    step = gradient.step
    pixel = pixel_indices(tile, TILE_PIXELS, INT64)
    mask = (pixel < pixels)[:, None] & is_channel[None, :]
    at = pixel[:, None] * CHANNELS + channel[None, :]
    g = tl.load(gradient.g + at, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        bias = tl.load(step.norm.bias + channel, mask=is_channel, other=0.0)
        value = tl.load(step.x + at, mask=mask, other=0.0).to(tl.float32)
        scale, _, _, mean = coefficients
        dtype: tl.constexpr = step.x.dtype.element_ty
        p = pre_activation(value, mean, scale, bias, dtype)
        g = activation_gradient(g, p, parameter, dtype, ACTIVATION)
    whole = whole_gradient(g, step, coefficients, at, mask, IN_TRAINING)
    tl.store(dx + at, whole.to(dx.dtype.element_ty), mask=mask)


def norm_act_forward(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """See `Kernels.norm_act_forward`. A program owns one tile."""
    assert residual is None or norm.activation in WITH_RESIDUAL
    rows, (activation, parameter) = (
        rows_of(norm),
        kernel_activation(norm.activation, norm.parameter),
    )
    launch = elementwise_launch(x, rows is not None)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    with on_device_of(x):
        launch_kernel(
            norm_act_forward_kernel,
            launch.grid,
            (x, kernel_norm(norm), residual, y, parameter, rows, launch.pixels),
            {"ACTIVATION": activation, **launch.constants},
            launch.num_warps,
        )
    return y


def norm_act_backward(
    dy: Tensor, x: Tensor, norm: Norm, with_g: bool, y: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """See `Kernels.norm_act_backward`."""
    assert y is None or norm.activation == RELU.name
    g = torch.empty_like(x, memory_format=torch.channels_last) if with_g else None
    return g, _launch_backward(dy, x, norm, y, g, None)


def norm_act_recompute(dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """See `Kernels.norm_act_recompute`."""
    a = torch.empty_like(x, memory_format=torch.channels_last)
    return a, _launch_backward(dy, x, norm, None, None, a)


def _launch_backward(
    dy: Tensor, x: Tensor, norm: Norm, y: Tensor | None, g: Tensor | None, a: Tensor | None
) -> Tensor:
    """Fills g and a unless they are None, and returns the sums.

    A program owns some tiles of a few channels, of an image if the norm has rows.
    """
    dy, x, y = aligned(dy), aligned(x), None if y is None else aligned(y)
    rows, (activation, parameter) = (
        rows_of(norm),
        kernel_activation(norm.activation, norm.parameter),
    )
    is_small = a is not None and activation != "relu"
    launch, tiles = reducing_launch(x, rows is not None, is_small)
    shape = (2, launch.channels) if rows is None else (2, launch.images, launch.channels)
    with on_device_of(x):
        partials = x.new_empty((launch.programs, *shape), dtype=torch.float32)
        launch_kernel(
            norm_act_backward_kernel,
            launch.grid,
            (dy, x, kernel_norm(norm), y, g, a, partials, parameter, rows, launch.pixels, tiles),
            {"ACTIVATION": activation, **launch.constants},
            launch.num_warps,
        )
        if launch.programs == 1:
            return partials[0]
        sums = x.new_empty(
            (1, shape[0] * launch.images, launch.channels, 1, 1), dtype=torch.float32
        )
        of_image = 2 * launch.channels
        launch_sum_partials(partials.view(1, launch.programs, -1), sums, of_image=of_image)
        return sums.view(shape)


def norm_input_gradient(
    gradient: Gradient, activated: bool = False, prepared: PreparedLaunches | None = None
) -> Tensor:
    """See `Kernels.norm_input_gradient`. A program owns one tile.

    For `prepared` see `launch_kernel`; use one per shape, dtype and activation, for norms without
    rows.
    """
    step = cast(AffineStep, gradient.step)
    x, norm = step.x, step.norm
    activation, parameter = (
        kernel_activation(norm.activation, norm.parameter) if activated else (None, None)
    )
    is_pooled = step.sums.dim() == 3 and step.sums.dtype != torch.int64  # not accumulators
    rows = rows_of(norm, pooled=True) if is_pooled else None
    launch = elementwise_launch(x, rows is not None)
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    in_training = step.inv_count != 0
    flags = {"ACTIVATION": activation, "IN_TRAINING": in_training}
    with on_device_of(x):
        launch_kernel(
            norm_input_gradient_kernel,
            launch.grid,
            (kernel_gradient(gradient), dx, parameter, rows, launch.pixels),
            {**flags, **launch.constants},
            launch.num_warps,
            prepared,
            (in_training, activated, step.skip is None, step.sums.dtype),
        )
    return dx
