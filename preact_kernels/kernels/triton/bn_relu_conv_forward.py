"""Batch norm, ReLU and convolution in one kernel: neither p nor relu(p) is stored in memory."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Conv, Epilogue, Norm, Output
from preact_kernels.kernels.triton.batch_norm import (
    load_norm,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.configurations import conv_forward
from preact_kernels.kernels.triton.conv import (
    Sizes,
    Strides,
    dot,
    geometry_of,
    input_pixels,
    load_weight,
    precision,
)
from preact_kernels.kernels.triton.launch import (
    capability,
    ceil_div,
    needs_int64,
    on_device_of,
    persistent_programs,
)
from preact_kernels.kernels.triton.reduction import (
    add_tile,
    empty_moments,
    finish_statistics,
    new_statistics,
)


class Addends(NamedTuple):
    """Tensors to add to the convolution, or None."""

    conv_bias: Tensor | None
    residual: Tensor | None


@triton.jit
def bn_relu_conv_forward_kernel(
    x,
    norm,
    conv_weight,
    addends,
    y,
    statistics,
    sizes,
    strides,
    GEOMETRY: tl.constexpr,
    BLOCKS: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y `[pixels, K]` = conv(relu(p)) [+ conv_bias] [+ residual], and its statistics unless None.

    Grid: programs, blocks of output channels.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    C: tl.constexpr = GEOMETRY.C
    K: tl.constexpr = GEOMETRY.K
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CIN: tl.constexpr = BLOCKS.block_cin
    BLOCK_COUT: tl.constexpr = BLOCKS.block_cout
    CIN_BLOCKS: tl.constexpr = (C + BLOCK_CIN - 1) // BLOCK_CIN
    pixels = sizes.pixels
    norms = ()
    for block in tl.static_range(CIN_BLOCKS):
        norms = norms + (load_norm(norm, block * BLOCK_CIN + tl.arange(0, BLOCK_CIN), C),)
    out_channel = tl.program_id(1) * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
    is_out_channel = out_channel < K
    moments = empty_moments(BLOCK_COUT)
    for tile in tl.range(
        tl.program_id(0),
        tiles_of(pixels, BLOCK_PIXELS),
        tl.num_programs(0),
        num_stages=BLOCKS.num_stages,
    ):
        pixel = pixels_of(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        total = tl.zeros([BLOCK_PIXELS, BLOCK_COUT], tl.float32)
        for tap in tl.range(GEOMETRY.R * GEOMETRY.S, num_stages=BLOCKS.num_tap_stages):
            in_pixel, exists = input_pixels(pixel, is_pixel, tap, sizes, GEOMETRY)
            for block in tl.static_range(CIN_BLOCKS):
                channel = block * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
                is_channel = channel < C
                mask = exists[:, None] & is_channel[None, :]
                at = in_pixel[:, None] * C + channel[None, :]
                x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
                mean, _, scale, bias = norms[block]
                a = tl.where(mask, relu(pre_activation(x_tile, mean, scale, bias, dtype)), 0.0)
                weight = load_weight(
                    conv_weight, strides, tap, channel, out_channel, GEOMETRY, TRANSPOSED=False
                )
                total = dot(a, weight, total, dtype, PRECISION)
        mask = is_pixel[:, None] & is_out_channel[None, :]
        at = pixel[:, None] * K + out_channel[None, :]
        if addends.conv_bias is not None:
            added = tl.load(addends.conv_bias + out_channel, mask=is_out_channel, other=0.0)
            total += added.to(tl.float32)[None, :]
        if addends.residual is not None:
            total += tl.load(addends.residual + at, mask=mask, other=0.0).to(tl.float32)
        stored = total.to(dtype)
        tl.store(y + at, stored, mask=mask)
        if statistics is not None:
            rows = tl.minimum(pixels - tile * BLOCK_PIXELS, BLOCK_PIXELS)
            moments = add_tile(moments, stored.to(tl.float32), is_pixel, rows)
    if statistics is not None:
        finish_statistics(moments, statistics, out_channel, is_out_channel, K)


def launch_bn_relu_conv_forward(
    x: Tensor, norm: Norm, conv_weight: Tensor, conv: Conv, epilogue: Epilogue
) -> Output:
    """See `Kernels.bn_relu_conv_forward`; for one group.

    A program owns every `programs`-th tile of a block of output channels.
    """
    conv_bias, residual, with_stats = epilogue
    geometry = geometry_of(conv_weight.shape, conv)
    shape = conv.output_shape(x.shape, conv_weight.shape)
    blocks = conv_forward(capability(x), x.dtype, geometry.C, geometry.K, geometry.R * geometry.S)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    pixels = y.numel() // geometry.K
    columns = ceil_div(geometry.K, blocks.block_cout)
    programs = persistent_programs(x, ceil_div(pixels, blocks.block_pixels), columns)
    statistics = new_statistics(y, geometry.K, programs, columns) if with_stats else None
    with on_device_of(x):
        bn_relu_conv_forward_kernel[programs, columns](
            x,
            norm,
            conv_weight,
            Addends(conv_bias, residual),
            y,
            statistics,
            Sizes(pixels, *x.shape[2:], *shape[2:]),
            Strides(*conv_weight.stride()),
            GEOMETRY=geometry,
            BLOCKS=blocks,
            INT64=needs_int64(x, y),
            PRECISION=precision(x.dtype),
            num_warps=blocks.num_warps,
        )
    return Output(y, None if statistics is None else statistics.result())
