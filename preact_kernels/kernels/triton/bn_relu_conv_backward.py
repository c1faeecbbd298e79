"""Both gradients of batch norm, ReLU and convolution, out of x and the gradient that arrives.

That gradient may arrive folded, as the input gradient of the batch norm behind the convolution: it
is then formed as it is loaded. The activation is formed again from x, and g, the masked gradient,
is what the batch norm in front leaves to be folded in turn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.batch_norm import (
    load_batch_norm,
    load_fold,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.bn_relu import bn_input_gradient
from preact_kernels.kernels.triton.configurations import conv_backward
from preact_kernels.kernels.triton.conv import (
    Geometry,
    dot,
    input_pixels,
    load_output_gradient,
    output_pixels,
    precision,
)
from preact_kernels.kernels.triton.launch import (
    capability,
    needs_int64,
    on_device_of,
    persistent_programs,
)
from preact_kernels.kernels.triton.reduction import column_sums, launch_sum_partials

WHOLE = (None, None, None, None, None, 0.0, None, 0.0)  # the fold of a gradient that is not folded


@triton.jit
def load_tap(
    tap, block, dy, skip, z, fold, conv_weight, dz, pixel, is_pixel,
    channel, H, W, OUT_H, OUT_W, stride_k, stride_c, stride_r, stride_s,
    C: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
    Z_IN_TRAINING: tl.constexpr, BLOCK_COUT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The output's gradient `[pixels, BLOCK_COUT]` that a tap hands to x, and the tap's weights.

    The gradient is stored in dz, where there is memory for it, by the middle tap.
    """
    out_pixel, exists = output_pixels(
        pixel, is_pixel, tap, H, W, OUT_H, OUT_W,
        R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W,
    )  # fmt: skip
    out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
    is_out_channel = out_channel < K
    mask = exists[:, None] & is_out_channel[None, :]
    at = out_pixel[:, None] * K + out_channel[None, :]
    gradient = load_output_gradient(dy, skip, z, fold, at, mask, Z_IN_TRAINING).to(dtype)
    if dz is not None:
        is_own = (tap == R * S // 2) & (tl.program_id(1) == 0)
        tl.store(dz + at, gradient, mask=mask & is_own)
    w_at = tap // S * stride_r + tap % S * stride_s
    w_at += channel[None, :] * stride_c + out_channel[:, None] * stride_k
    w_mask = is_out_channel[:, None] & (channel < C)[None, :]
    return gradient, tl.load(conv_weight + w_at, mask=w_mask, other=0.0)


@triton.jit
def bn_relu_conv_backward_kernel(
    dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
    x, mean, var, bn_weight, bn_bias, eps, conv_weight,
    g, dz, partials,
    pixels, H, W, OUT_H, OUT_W, stride_k, stride_c, stride_r, stride_s,
    C: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
    INT64: tl.constexpr, PRECISION: tl.constexpr,
    Z_IN_TRAINING: tl.constexpr, NEEDS_CONV_WEIGHT: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CIN: tl.constexpr, BLOCK_COUT: tl.constexpr,
    STAGES: tl.constexpr, TAP_STAGES: tl.constexpr,
):  # fmt: skip
    """g `[pixels, C]`, its sums and the weight's gradient in one pass over the pixels of x.

    `partials` is `[programs, R*S*K*C + 2*C]`, without the weight's part where it is not wanted. dz,
    the gradient that arrived, is stored where there is memory for it: by the middle tap, which
    reads each pixel once. Grid: programs, blocks of input channels.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    TAPS: tl.constexpr = R * S
    COUT_BLOCKS: tl.constexpr = (K + BLOCK_COUT - 1) // BLOCK_COUT
    channel = tl.program_id(1) * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
    is_channel = channel < C
    mu, rstd, scale, bias = load_batch_norm(mean, var, bn_weight, bn_bias, eps, channel, is_channel)
    folds = ()
    for block in tl.static_range(COUT_BLOCKS):
        out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
        folds = folds + (
            load_fold(
                z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
                out_channel, out_channel < K, K,
            ),
        )  # fmt: skip
    sum_g = tl.zeros([BLOCK_CIN], tl.float32)
    sum_g_x = tl.zeros([BLOCK_CIN], tl.float32)
    dweights = ()
    if NEEDS_CONV_WEIGHT:
        for _ in tl.static_range(TAPS * COUT_BLOCKS):
            dweights = dweights + (tl.zeros([BLOCK_COUT, BLOCK_CIN], tl.float32),)
    for tile in tl.range(
        tl.program_id(0), tiles_of(pixels, BLOCK_PIXELS), tl.num_programs(0), num_stages=STAGES
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        mask = is_pixel[:, None] & is_channel[None, :]
        at = pixel[:, None] * C + channel[None, :]
        x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        p = pre_activation(x_tile, mu, scale, bias, dtype)
        a = tl.where(mask, relu(p), 0.0)
        da = tl.zeros([BLOCK_PIXELS, BLOCK_CIN], tl.float32)
        if NEEDS_CONV_WEIGHT:  # whose accumulators have a name for each tap: unrolled
            added = ()
            for tap in tl.static_range(TAPS):
                for block in tl.static_range(COUT_BLOCKS):
                    gradient, weight = load_tap(
                        tap, block, dy, skip, z, folds[block], conv_weight, dz, pixel, is_pixel,
                        channel, H, W, OUT_H, OUT_W, stride_k, stride_c, stride_r, stride_s,
                        C, K, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W,
                        Z_IN_TRAINING, BLOCK_COUT, dtype,
                    )  # fmt: skip
                    da = dot(gradient, weight, da, dtype, PRECISION)
                    dweight = dweights[tap * COUT_BLOCKS + block]
                    added = added + (dot(tl.trans(gradient), a, dweight, dtype, PRECISION),)
            dweights = added
        else:
            for tap in tl.range(TAPS, num_stages=TAP_STAGES):
                for block in tl.static_range(COUT_BLOCKS):
                    gradient, weight = load_tap(
                        tap, block, dy, skip, z, folds[block], conv_weight, dz, pixel, is_pixel,
                        channel, H, W, OUT_H, OUT_W, stride_k, stride_c, stride_r, stride_s,
                        C, K, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W,
                        Z_IN_TRAINING, BLOCK_COUT, dtype,
                    )  # fmt: skip
                    da = dot(gradient, weight, da, dtype, PRECISION)
        g_tile = tl.where((p <= 0) | ~mask, 0.0, da).to(dtype)
        tl.store(g + at, g_tile, mask=mask)
        g_tile = g_tile.to(tl.float32)
        sum_g += column_sums(g_tile)
        sum_g_x += column_sums(tl.where(mask, g_tile * (x_tile - mu[None, :]), 0.0))
    WEIGHTS: tl.constexpr = TAPS * K * C if NEEDS_CONV_WEIGHT else 0
    own = partials + tl.program_id(0).to(tl.int64) * (WEIGHTS + 2 * C)
    if NEEDS_CONV_WEIGHT:
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
    dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
    x, mean, var, bn_weight, bn_bias, eps,
    partials,
    pixels, H, W, OUT_H, OUT_W,
    C: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
    INT64: tl.constexpr, PRECISION: tl.constexpr, Z_IN_TRAINING: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CIN: tl.constexpr, BLOCK_COUT: tl.constexpr,
    STAGES: tl.constexpr, TAPS_A_PROGRAM: tl.constexpr,
):  # fmt: skip
    """The weight's gradient alone, a block of some taps a program, over the pixels of the output.

    `partials` is `[programs, R*S*K*C]`. Grid: programs, taps / TAPS_A_PROGRAM * blocks of output
    channels * blocks of input channels.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    CIN_BLOCKS: tl.constexpr = (C + BLOCK_CIN - 1) // BLOCK_CIN
    COUT_BLOCKS: tl.constexpr = (K + BLOCK_COUT - 1) // BLOCK_COUT
    column = tl.program_id(1)
    first_tap = column // (COUT_BLOCKS * CIN_BLOCKS) * TAPS_A_PROGRAM
    channel = column % CIN_BLOCKS * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
    is_channel = channel < C
    out_channel = column // CIN_BLOCKS % COUT_BLOCKS * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
    is_out_channel = out_channel < K
    mu, _, scale, bias = load_batch_norm(mean, var, bn_weight, bn_bias, eps, channel, is_channel)
    fold = load_fold(
        z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count, out_channel, is_out_channel, K
    )
    dweights = ()
    for _ in tl.static_range(TAPS_A_PROGRAM):
        dweights = dweights + (tl.zeros([BLOCK_COUT, BLOCK_CIN], tl.float32),)
    for tile in tl.range(
        tl.program_id(0), tiles_of(pixels, BLOCK_PIXELS), tl.num_programs(0), num_stages=STAGES
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        out_mask = is_pixel[:, None] & is_out_channel[None, :]
        out_at = pixel[:, None] * K + out_channel[None, :]
        gradient = load_output_gradient(dy, skip, z, fold, out_at, out_mask, Z_IN_TRAINING).to(
            dtype
        )
        added = ()
        for tap in tl.static_range(TAPS_A_PROGRAM):
            in_pixel, exists = input_pixels(
                pixel, is_pixel, first_tap + tap, H, W, OUT_H, OUT_W,
                R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W,
            )  # fmt: skip
            mask = exists[:, None] & is_channel[None, :]
            at = in_pixel[:, None] * C + channel[None, :]
            x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            a = tl.where(mask, relu(pre_activation(x_tile, mu, scale, bias, dtype)), 0.0)
            added = added + (dot(tl.trans(gradient), a, dweights[tap], dtype, PRECISION),)
        dweights = added
    own = partials + tl.program_id(0).to(tl.int64) * (R * S * K * C)
    for tap in tl.static_range(TAPS_A_PROGRAM):
        w_at = ((first_tap + tap) * K + out_channel[:, None]) * C + channel[None, :]
        tl.store(own + w_at, dweights[tap], mask=is_out_channel[:, None] & is_channel[None, :])


def _programs(x: Tensor, dy: Tensor, tiles: int, columns: int, weights: int) -> int:
    """Programs of a column: no more than make partial weight gradients as large as x and dy."""
    programs = persistent_programs(x, tiles, columns)
    if weights:
        most = (x.numel() + dy.numel()) * x.element_size() // (4 * weights)
        programs = min(programs, max(1, most))
    return programs


def launch_bn_relu_conv_backward(
    dy: Tensor,
    fold: tuple,
    x: Tensor,
    norm: tuple,
    conv_weight: Tensor,
    geometry: Geometry,
    needs_g: bool,
    needs_conv_weight: bool,
    needs_dz: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.bn_relu_conv_backward` of one group.

    Args:
        dy: the gradient that arrives.
        fold: `skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count`.
        x: the input.
        norm: `mean, var, bn_weight, bn_bias, eps`.
        conv_weight: `[K, C, R, S]`.
        geometry: of the convolution.
        needs_g: whether g and its sums are wanted.
        needs_conv_weight: whether the weight's gradient is.
        needs_dz: whether the gradient that arrived is, unfolded.
    """
    batch, channels, height, width = x.shape
    out_channels, out_height, out_width = dy.shape[1:]
    config = conv_backward(capability(x), x.dtype, channels, out_channels, geometry.R * geometry.S)
    g = x.new_empty(0)
    sums = x.new_empty(0, dtype=torch.float32)
    dconv_weight = conv_weight.new_empty(0)
    dz = None
    if needs_dz:
        if needs_g and geometry.keeps_size():
            dz = torch.empty_like(dy, memory_format=torch.channels_last)
        else:  # no kernel below comes by every pixel of it once
            dy = bn_input_gradient(fold[0], dy, *fold[1:])
            fold = WHOLE
    is_int64 = needs_int64(x, dy)
    shapes = (height, width, out_height, out_width)
    constants = (channels, out_channels, *geometry, is_int64, precision(x.dtype), fold[-1] != 0)
    if needs_conv_weight:
        dconv_weight = torch.empty_like(conv_weight)
    in_one_pass = needs_g and needs_conv_weight and config.both is not None
    with on_device_of(x):
        if needs_g:
            g = torch.empty_like(x, memory_format=torch.channels_last)
            sums = x.new_empty((2, channels), dtype=torch.float32)
            block = config.both if in_one_pass else config.input
            pixels = batch * height * width
            columns = triton.cdiv(channels, block.block_cin)
            weights = conv_weight.numel() if in_one_pass else 0
            programs = _programs(x, dy, triton.cdiv(pixels, block.block_pixels), columns, weights)
            partials = x.new_empty((programs, weights + 2 * channels), dtype=torch.float32)
            bn_relu_conv_backward_kernel[(programs, columns)](
                dy, *fold, x, *norm, conv_weight, g, dz, partials,
                pixels, *shapes, *conv_weight.stride(), *constants, in_one_pass,
                block.block_pixels, block.block_cin, block.block_cout, block.num_stages,
                block.num_tap_stages, num_warps=block.num_warps,
            )  # fmt: skip
            launch_sum_partials(partials, dconv_weight if in_one_pass else None, sums)
        if needs_conv_weight and not in_one_pass:
            block = config.weight
            pixels = batch * out_height * out_width
            taps_a_program = geometry.S if geometry.S <= 3 else 1  # a row, if registers hold it
            columns = (
                geometry.R * geometry.S // taps_a_program
                * triton.cdiv(channels, block.block_cin)
                * triton.cdiv(out_channels, block.block_cout)
            )  # fmt: skip
            tiles = triton.cdiv(pixels, block.block_pixels)
            programs = _programs(x, dy, tiles, columns, conv_weight.numel())
            partials = x.new_empty((programs, conv_weight.numel()), dtype=torch.float32)
            bn_relu_conv_backward_weight_kernel[(programs, columns)](
                dy, *fold, x, *norm, partials,
                pixels, *shapes, *constants,
                block.block_pixels, block.block_cin, block.block_cout, block.num_stages,
                taps_a_program, num_warps=block.num_warps,
            )  # fmt: skip
            launch_sum_partials(partials, dconv_weight, None)
    if needs_dz and dz is None:
        dz = dy
    return g, dconv_weight, sums, dy.new_empty(0) if dz is None else dz
