"""Backward of batch norm, ReLU and convolution: recomputes the activation from x.

The gradient of the output may be folded, as the input gradient of the batch norm that follows; the
kernels evaluate it as they load.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Conv, ConvGradients, Fold, Norm, Wanted
from preact_kernels.kernels.triton.batch_norm import (
    load_fold,
    load_norm,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.bn_relu import bn_input_gradient
from preact_kernels.kernels.triton.configurations import ConvBlocks, conv_backward
from preact_kernels.kernels.triton.conv import (
    NO_FOLD,
    OutputGradient,
    Sizes,
    Strides,
    dot,
    geometry_of,
    input_pixels,
    load_output_gradient,
    load_weight,
    output_pixels,
    precision,
)
from preact_kernels.kernels.triton.launch import (
    capability,
    ceil_div,
    needs_int64,
    on_device_of,
    persistent_programs,
)
from preact_kernels.kernels.triton.reduction import column_sums, launch_sum_partials


@triton.jit
def load_tap(
    tap,
    out_channel,
    gradient,
    coefficients,
    tile_pixels,
    sizes,
    GEOMETRY: tl.constexpr,
    IN_TRAINING: tl.constexpr,
):
    """The tile `[pixels, out channels]` of the output's gradient that a tap passes to x.

    `tile_pixels` are pixels of x, and which of them exist. The second result says to which of them
    the tap passes a gradient: no pixel of the padding may meet an infinite activation. The middle
    tap stores the tile in `gradient.unfolded` unless None: it reads each output pixel once.
    """
    pixel, is_pixel = tile_pixels
    out_pixel, exists = output_pixels(pixel, is_pixel, tap, sizes, GEOMETRY)
    is_out_channel = out_channel < GEOMETRY.K
    mask = exists[:, None] & is_out_channel[None, :]
    at = out_pixel[:, None] * GEOMETRY.K + out_channel[None, :]
    tile = load_output_gradient(gradient, coefficients, at, mask, IN_TRAINING)
    tile = tile.to(gradient.dy.dtype.element_ty)
    if gradient.unfolded is not None:
        is_own = (tap == GEOMETRY.R * GEOMETRY.S // 2) & (tl.program_id(1) == 0)
        tl.store(gradient.unfolded + at, tile, mask=mask & is_own)
    return tile, exists


@triton.jit
def bn_relu_conv_backward_kernel(
    gradient,
    x,
    norm,
    conv_weight,
    g,
    partials,
    sizes,
    strides,
    GEOMETRY: tl.constexpr,
    BLOCKS: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_TRAINING: tl.constexpr,
    WITH_WEIGHT: tl.constexpr,
):
    """g `[pixels, C]` = conv_transpose(gradient) * [p > 0], its sums, and dconv_weight.

    `partials` is `[programs, R*S*K*C + 2*C]`: the gradient of the weight, absent unless
    WITH_WEIGHT, and the sums. Grid: programs, blocks of input channels.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    C: tl.constexpr = GEOMETRY.C
    K: tl.constexpr = GEOMETRY.K
    TAPS: tl.constexpr = GEOMETRY.R * GEOMETRY.S
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CIN: tl.constexpr = BLOCKS.block_cin
    BLOCK_COUT: tl.constexpr = BLOCKS.block_cout
    COUT_BLOCKS: tl.constexpr = (K + BLOCK_COUT - 1) // BLOCK_COUT
    pixels = sizes.pixels
    channel = tl.program_id(1) * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
    is_channel = channel < C
    mean, rstd, scale, bias = load_norm(norm, channel, C)
    folds = ()
    for block in tl.static_range(COUT_BLOCKS):
        first = block * BLOCK_COUT
        folds = folds + (load_fold(gradient.fold, first + tl.arange(0, BLOCK_COUT), K),)
    sum_g = tl.zeros([BLOCK_CIN], tl.float32)
    sum_g_x = tl.zeros([BLOCK_CIN], tl.float32)
    dweights = ()
    if WITH_WEIGHT:
        for _ in tl.static_range(TAPS * COUT_BLOCKS):
            dweights = dweights + (tl.zeros([BLOCK_COUT, BLOCK_CIN], tl.float32),)
    for tile in tl.range(
        tl.program_id(0),
        tiles_of(pixels, BLOCK_PIXELS),
        tl.num_programs(0),
        num_stages=BLOCKS.num_stages,
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        tile_pixels = (pixel, is_pixel)
        mask = is_pixel[:, None] & is_channel[None, :]
        at = pixel[:, None] * C + channel[None, :]
        x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        p = pre_activation(x_tile, mean, scale, bias, dtype)
        a = tl.where(mask, relu(p), 0.0)
        da = tl.zeros([BLOCK_PIXELS, BLOCK_CIN], tl.float32)
        if WITH_WEIGHT:  # one accumulator per tap, so the loop over taps is unrolled
            added = ()
            for tap in tl.static_range(TAPS):
                for block in tl.static_range(COUT_BLOCKS):
                    out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
                    dy_tile, exists = load_tap(
                        tap,
                        out_channel,
                        gradient,
                        folds[block],
                        tile_pixels,
                        sizes,
                        GEOMETRY,
                        IN_TRAINING,
                    )
                    weight = load_weight(
                        conv_weight, strides, tap, channel, out_channel, GEOMETRY, TRANSPOSED=True
                    )
                    da = dot(dy_tile, weight, da, dtype, PRECISION)
                    dweight = dweights[tap * COUT_BLOCKS + block]
                    tap_a = tl.where(exists[:, None], a, 0.0) if TAPS > 1 else a
                    added = added + (dot(tl.trans(dy_tile), tap_a, dweight, dtype, PRECISION),)
            dweights = added
        else:
            for tap in tl.range(TAPS, num_stages=BLOCKS.num_tap_stages):
                for block in tl.static_range(COUT_BLOCKS):
                    out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
                    dy_tile, _ = load_tap(
                        tap,
                        out_channel,
                        gradient,
                        folds[block],
                        tile_pixels,
                        sizes,
                        GEOMETRY,
                        IN_TRAINING,
                    )
                    weight = load_weight(
                        conv_weight, strides, tap, channel, out_channel, GEOMETRY, TRANSPOSED=True
                    )
                    da = dot(dy_tile, weight, da, dtype, PRECISION)
        g_tile = tl.where((p <= 0) | ~mask, 0.0, da).to(dtype)
        tl.store(g + at, g_tile, mask=mask)
        g_tile = g_tile.to(tl.float32)
        sum_g += column_sums(g_tile)
        sum_g_x += column_sums(tl.where(mask, g_tile * (x_tile - mean[None, :]), 0.0))
    WEIGHTS: tl.constexpr = TAPS * K * C if WITH_WEIGHT else 0
    own = partials + tl.program_id(0).to(tl.int64) * (WEIGHTS + 2 * C)
    if WITH_WEIGHT:
        for tap in tl.static_range(TAPS):
            for block in tl.static_range(COUT_BLOCKS):
                out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
                w_at = (tap * K + out_channel[:, None]) * C + channel[None, :]
                w_mask = (out_channel < K)[:, None] & is_channel[None, :]
                tl.store(own + w_at, dweights[tap * COUT_BLOCKS + block], mask=w_mask)
    tl.store(own + WEIGHTS + channel, sum_g, mask=is_channel)
    tl.store(own + WEIGHTS + C + channel, sum_g_x * rstd, mask=is_channel)


@triton.jit
def bn_relu_conv_backward_weight_kernel(
    gradient,
    x,
    norm,
    partials,
    sizes,
    GEOMETRY: tl.constexpr,
    BLOCKS: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_TRAINING: tl.constexpr,
    TAPS_PER_PROGRAM: tl.constexpr,
):
    """dconv_weight alone, over the pixels of the output.

    `partials` is `[programs, R*S*K*C]`. Grid: programs, taps / TAPS_PER_PROGRAM * blocks of output
    channels * blocks of input channels.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    C: tl.constexpr = GEOMETRY.C
    K: tl.constexpr = GEOMETRY.K
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CIN: tl.constexpr = BLOCKS.block_cin
    BLOCK_COUT: tl.constexpr = BLOCKS.block_cout
    CIN_BLOCKS: tl.constexpr = (C + BLOCK_CIN - 1) // BLOCK_CIN
    COUT_BLOCKS: tl.constexpr = (K + BLOCK_COUT - 1) // BLOCK_COUT
    IS_PADDED: tl.constexpr = GEOMETRY.PAD_H + GEOMETRY.PAD_W > 0
    pixels = sizes.pixels
    column = tl.program_id(1)
    first_tap = column // (COUT_BLOCKS * CIN_BLOCKS) * TAPS_PER_PROGRAM
    channel = column % CIN_BLOCKS * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
    is_channel = channel < C
    out_channel = column // CIN_BLOCKS % COUT_BLOCKS * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
    is_out_channel = out_channel < K
    mean, _, scale, bias = load_norm(norm, channel, C)
    coefficients = load_fold(gradient.fold, out_channel, K)
    dweights = ()
    for _ in tl.static_range(TAPS_PER_PROGRAM):
        dweights = dweights + (tl.zeros([BLOCK_COUT, BLOCK_CIN], tl.float32),)
    for tile in tl.range(
        tl.program_id(0),
        tiles_of(pixels, BLOCK_PIXELS),
        tl.num_programs(0),
        num_stages=BLOCKS.num_stages,
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        out_mask = is_pixel[:, None] & is_out_channel[None, :]
        out_at = pixel[:, None] * K + out_channel[None, :]
        dy_tile = load_output_gradient(gradient, coefficients, out_at, out_mask, IN_TRAINING)
        dy_tile = dy_tile.to(dtype)
        added = ()
        for tap in tl.static_range(TAPS_PER_PROGRAM):
            in_pixel, exists = input_pixels(pixel, is_pixel, first_tap + tap, sizes, GEOMETRY)
            mask = exists[:, None] & is_channel[None, :]
            at = in_pixel[:, None] * C + channel[None, :]
            x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            a = tl.where(mask, relu(pre_activation(x_tile, mean, scale, bias, dtype)), 0.0)
            # No pixel of the padding may meet an infinite gradient.
            tap_dy = tl.where(exists[:, None], dy_tile, 0.0) if IS_PADDED else dy_tile
            added = added + (dot(tl.trans(tap_dy), a, dweights[tap], dtype, PRECISION),)
        dweights = added
    own = partials + tl.program_id(0).to(tl.int64) * (GEOMETRY.R * GEOMETRY.S * K * C)
    for tap in tl.static_range(TAPS_PER_PROGRAM):
        w_at = ((first_tap + tap) * K + out_channel[:, None]) * C + channel[None, :]
        tl.store(own + w_at, dweights[tap], mask=is_out_channel[:, None] & is_channel[None, :])


def _programs(x: Tensor, dy: Tensor, tiles: int, columns: int, weights: int) -> int:
    """Programs per grid column.

    Limited so that the partial weight gradients are no larger than x and dy together.
    """
    programs = persistent_programs(x, tiles, columns)
    if weights:
        limit = (x.numel() + dy.numel()) * x.element_size() // (4 * weights)
        programs = min(programs, max(1, limit))
    return programs


def _launch_input(
    gradient: OutputGradient,
    x: Tensor,
    norm: Norm,
    conv_weight: Tensor,
    blocks: ConvBlocks,
    dconv_weight: Tensor | None,
    constants: dict,
) -> tuple[Tensor, Tensor]:
    """g and its sums; fills `dconv_weight` in the same pass unless None.

    A program owns every `programs`-th tile of a block of input channels.
    """
    dy, channels = gradient.dy, x.shape[1]
    g = torch.empty_like(x, memory_format=torch.channels_last)
    sums = x.new_empty((2, channels), dtype=torch.float32)
    pixels = x.numel() // channels
    columns = ceil_div(channels, blocks.block_cin)
    weights = 0 if dconv_weight is None else dconv_weight.numel()
    programs = _programs(x, dy, ceil_div(pixels, blocks.block_pixels), columns, weights)
    partials = x.new_empty((programs, weights + 2 * channels), dtype=torch.float32)
    bn_relu_conv_backward_kernel[programs, columns](
        gradient,
        x,
        norm,
        conv_weight,
        g,
        partials,
        Sizes(pixels, *x.shape[2:], *dy.shape[2:]),
        Strides(*conv_weight.stride()),
        **constants,
        BLOCKS=blocks,
        WITH_WEIGHT=dconv_weight is not None,
        num_warps=blocks.num_warps,
    )
    launch_sum_partials(partials, dconv_weight, sums)
    return g, sums


def _launch_weight(
    gradient: OutputGradient,
    x: Tensor,
    norm: Norm,
    blocks: ConvBlocks,
    dconv_weight: Tensor,
    constants: dict,
) -> None:
    """Fills `dconv_weight`.

    A program owns every `programs`-th tile of some taps and a block of either channels.
    """
    dy = gradient.dy
    out_channels, channels, height, width = dconv_weight.shape
    pixels = dy.numel() // out_channels
    taps_per_program = width if width <= 3 else 1  # a row, if registers hold it
    taps = height * width // taps_per_program
    cin_blocks = ceil_div(channels, blocks.block_cin)
    columns = taps * cin_blocks * ceil_div(out_channels, blocks.block_cout)
    tiles = ceil_div(pixels, blocks.block_pixels)
    programs = _programs(x, dy, tiles, columns, dconv_weight.numel())
    partials = x.new_empty((programs, dconv_weight.numel()), dtype=torch.float32)
    bn_relu_conv_backward_weight_kernel[programs, columns](
        gradient,
        x,
        norm,
        partials,
        Sizes(pixels, *x.shape[2:], *dy.shape[2:]),
        **constants,
        BLOCKS=blocks,
        TAPS_PER_PROGRAM=taps_per_program,
        num_warps=blocks.num_warps,
    )
    launch_sum_partials(partials, dconv_weight, None)


def launch_bn_relu_conv_backward(
    dy: Tensor,
    fold: Fold | None,
    x: Tensor,
    norm: Norm,
    conv_weight: Tensor,
    conv: Conv,
    wanted: Wanted,
) -> ConvGradients:
    """See `Kernels.bn_relu_conv_backward`; for one group."""
    geometry = geometry_of(conv_weight.shape, conv)
    taps = geometry.R * geometry.S
    blocks = conv_backward(capability(x), x.dtype, geometry.C, geometry.K, taps)
    unfolded = stored = None
    if fold is None:
        unfolded = dy if wanted.dy else None
    elif wanted.dy and wanted.input and geometry.keeps_size():
        unfolded = stored = torch.empty_like(dy, memory_format=torch.channels_last)
    elif wanted.dy:  # no kernel below reads each pixel of dy exactly once
        unfolded = dy = bn_input_gradient(dy, fold)
        fold = None
    gradient = OutputGradient(dy, NO_FOLD if fold is None else fold, stored)
    constants = {
        "GEOMETRY": geometry,
        "INT64": needs_int64(x, dy),
        "PRECISION": precision(x.dtype),
        "IN_TRAINING": gradient.fold.inv_count != 0,
    }
    g = sums = None
    one_pass = blocks.both if wanted.input and wanted.weight else None
    dconv_weight = torch.empty_like(conv_weight) if wanted.weight else None
    with on_device_of(x):
        if wanted.input:
            g, sums = _launch_input(
                gradient,
                x,
                norm,
                conv_weight,
                one_pass or blocks.input,
                dconv_weight if one_pass else None,
                constants,
            )
        if dconv_weight is not None and one_pass is None:
            _launch_weight(gradient, x, norm, blocks.weight, dconv_weight, constants)
    return ConvGradients(g, sums, dconv_weight, unfolded)
