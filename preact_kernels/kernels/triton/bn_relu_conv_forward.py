"""Batch norm, ReLU and convolution in one kernel: neither p nor relu(p) is ever in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.batch_norm import (
    load_batch_norm,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.configurations import conv_forward
from preact_kernels.kernels.triton.conv import Geometry, dot, input_pixels, precision
from preact_kernels.kernels.triton.launch import (
    capability,
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
def bn_relu_conv_forward_kernel(
    x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
    y, partials, counters, y_mean, y_var,
    pixels, H, W, OUT_H, OUT_W, stride_k, stride_c, stride_r, stride_s,
    C: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
    INT64: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_CIN: tl.constexpr, BLOCK_COUT: tl.constexpr,
    STAGES: tl.constexpr, TAP_STAGES: tl.constexpr,
):  # fmt: skip
    """y `[pixels, K]` = conv(relu(p)) [+ conv_bias] [+ residual], and its statistics.

    Statistics where `y_mean` is given. Grid: programs, blocks of output channels.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    CIN_BLOCKS: tl.constexpr = (C + BLOCK_CIN - 1) // BLOCK_CIN
    means, scales, biases = (), (), ()
    for block in tl.static_range(CIN_BLOCKS):
        channel = block * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
        mu, _, scale, bias = load_batch_norm(
            mean, var, bn_weight, bn_bias, eps, channel, channel < C
        )
        means, scales, biases = means + (mu,), scales + (scale,), biases + (bias,)
    out_channel = tl.program_id(1) * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
    is_out_channel = out_channel < K
    count = 0.0
    pivot = tl.zeros([BLOCK_COUT], tl.float32)
    offset = pivot
    m2 = pivot
    for tile in tl.range(
        tl.program_id(0), tiles_of(pixels, BLOCK_PIXELS), tl.num_programs(0), num_stages=STAGES
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        total = tl.zeros([BLOCK_PIXELS, BLOCK_COUT], tl.float32)
        for tap in tl.range(R * S, num_stages=TAP_STAGES):
            in_pixel, exists = input_pixels(
                pixel, is_pixel, tap, H, W, OUT_H, OUT_W,
                R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DIL_H, DIL_W,
            )  # fmt: skip
            for block in tl.static_range(CIN_BLOCKS):
                channel = block * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
                is_channel = channel < C
                mask = exists[:, None] & is_channel[None, :]
                at = in_pixel[:, None] * C + channel[None, :]
                x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
                p = pre_activation(x_tile, means[block], scales[block], biases[block], dtype)
                a = tl.where(mask, relu(p), 0.0)
                w_at = tap // S * stride_r + tap % S * stride_s
                w_at += channel[:, None] * stride_c + out_channel[None, :] * stride_k
                w_mask = is_channel[:, None] & is_out_channel[None, :]
                weight = tl.load(conv_weight + w_at, mask=w_mask, other=0.0)
                total = dot(a, weight, total, dtype, PRECISION)
        mask = is_pixel[:, None] & is_out_channel[None, :]
        at = pixel[:, None] * K + out_channel[None, :]
        if conv_bias is not None:
            added = tl.load(conv_bias + out_channel, mask=is_out_channel, other=0.0)
            total += added.to(tl.float32)[None, :]
        if residual is not None:
            total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        stored = total.to(dtype)
        tl.store(y + at, stored, mask=mask)
        if y_mean is not None:
            rows = tl.minimum(pixels - tile * BLOCK_PIXELS, BLOCK_PIXELS)
            count, pivot, offset, m2 = add_tile(
                count, pivot, offset, m2, stored.to(tl.float32), is_pixel, rows
            )
    if y_mean is not None:
        finish_statistics(
            count, pivot, offset, m2, partials, counters, y_mean, y_var,
            out_channel, is_out_channel, K,
        )  # fmt: skip


def launch_bn_relu_conv_forward(
    x: Tensor,
    norm: tuple,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    with_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.bn_relu_conv_forward` of one group.

    Args:
        x: the input.
        norm: `mean, var, bn_weight, bn_bias, eps`.
        conv_weight: `[K, C, R, S]`, any strides.
        conv_bias: `[K]` or None.
        residual: of the output's shape, or None.
        geometry: of the convolution.
        with_stats: whether mean and variance of the result are wanted.
    """
    batch, channels, height, width = x.shape
    out_channels = conv_weight.shape[0]
    out_shape = geometry.out_shape(height, width)
    config = conv_forward(capability(x), x.dtype, channels, out_channels, geometry.R * geometry.S)
    y = torch.empty(
        (batch, out_channels, *out_shape),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    pixels = batch * out_shape[0] * out_shape[1]
    blocks = triton.cdiv(out_channels, config.block_cout)
    programs = persistent_programs(x, triton.cdiv(pixels, config.block_pixels), blocks)
    y_mean, y_var, partials = statistics_memory(y, programs) if with_stats else (None, None, None)
    with on_device_of(x):
        bn_relu_conv_forward_kernel[(programs, blocks)](
            x, *norm, conv_weight, conv_bias, residual,
            y, partials, counters(x, blocks) if with_stats else None, y_mean, y_var,
            pixels, height, width, *out_shape, *conv_weight.stride(),
            channels, out_channels, *geometry, needs_int64(x, y), precision(x.dtype),
            config.block_pixels, config.block_cin, config.block_cout,
            config.num_stages, config.num_tap_stages, num_warps=config.num_warps,
        )  # fmt: skip
    return (y, y_mean, y_var) if with_stats else (y, *no_statistics(y))
