"""The gradient of a convolution's weight alone, of several units at once.

Where a kernel that computes it together with the gradient of the input would cost more.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Norm
from preact_kernels.kernels.triton.batch_norm import (
    load_affine,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.conv import dot, input_pixels


class WeightUnit(NamedTuple):
    """What the gradient of one unit's weight is computed from."""

    dy: Tensor  # whole, not folded
    x: Tensor
    norm: Norm


@triton.jit
def unit_of(units, index, UNITS: tl.constexpr):
    """dy, x, and the mean, var, weight, bias and eps of the norm, of a `WeightUnit` in a tuple."""
    dy, x, norm = units[0].dy, units[0].x, units[0].norm
    mean, var, weight, bias, eps = norm.mean, norm.var, norm.weight, norm.bias, norm.eps
    for i in tl.static_range(1, UNITS):
        is_this = index == i
        dy = tl.where(is_this, units[i].dy, dy)
        x = tl.where(is_this, units[i].x, x)
        mean = tl.where(is_this, units[i].norm.mean, mean)
        var = tl.where(is_this, units[i].norm.var, var)
        weight = tl.where(is_this, units[i].norm.weight, weight)
        bias = tl.where(is_this, units[i].norm.bias, bias)
        eps = tl.where(is_this, units[i].norm.eps, eps)
    return dy, x, mean, var, weight, bias, eps


@triton.jit(do_not_specialize=["pixels"])
def bn_relu_conv_backward_weight_kernel(
    units,
    partials,
    sizes,
    pixels,
    GEOMETRY: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNITS: tl.constexpr,
    TAPS_PER_PROGRAM: tl.constexpr,
):
    """dconv_weight alone, over the pixels of the output, of several units at once.

    `partials` is `[units, programs, R, S, K, C]`. Grid: programs, taps / TAPS_PER_PROGRAM * blocks
    of output channels * blocks of input channels, units.
    """
    C: tl.constexpr = GEOMETRY.C
    K: tl.constexpr = GEOMETRY.K
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CIN: tl.constexpr = BLOCKS.block_cin
    BLOCK_COUT: tl.constexpr = BLOCKS.block_cout
    CIN_BLOCKS: tl.constexpr = (C + BLOCK_CIN - 1) // BLOCK_CIN
    COUT_BLOCKS: tl.constexpr = (K + BLOCK_COUT - 1) // BLOCK_COUT
    IS_PADDED: tl.constexpr = GEOMETRY.PAD_H + GEOMETRY.PAD_W > 0
    dy, x, mean, var, weight, bias, eps = unit_of(units, tl.program_id(2), UNITS)
    x_dtype: tl.constexpr = x.dtype.element_ty
    dtype: tl.constexpr = dy.dtype.element_ty if x_dtype == tl.float32 else x_dtype  # the narrower
    column = tl.program_id(1)
    first_tap = column // (COUT_BLOCKS * CIN_BLOCKS) * TAPS_PER_PROGRAM
    channel = column % CIN_BLOCKS * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
    is_channel = channel < C
    out_channel = column // CIN_BLOCKS % COUT_BLOCKS * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
    is_out_channel = out_channel < K
    mean = tl.load(mean + channel, mask=is_channel, other=0.0)
    var = tl.load(var + channel, mask=is_channel, other=1.0)
    _, scale, bias = load_affine(var, weight, bias, eps, channel, is_channel)
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
        dy_tile = tl.load(dy + out_at, mask=out_mask, other=0.0).to(dtype)
        added = ()
        for tap in tl.static_range(TAPS_PER_PROGRAM):
            in_pixel, exists = input_pixels(pixel, is_pixel, first_tap + tap, sizes, GEOMETRY)
            mask = exists[:, None] & is_channel[None, :]
            at = in_pixel[:, None] * C + channel[None, :]
            x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            a = tl.where(mask, relu(pre_activation(x_tile, mean, scale, bias, x_dtype)), 0.0)
            # No pixel of the padding may meet an infinite gradient.
            tap_dy = tl.where(exists[:, None], dy_tile, 0.0) if IS_PADDED else dy_tile
            added = added + (dot(tl.trans(tap_dy), a, dweights[tap], dtype, PRECISION),)
        dweights = added
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    own = partials + program.to(tl.int64) * (GEOMETRY.R * GEOMETRY.S * K * C)
    for tap in tl.static_range(TAPS_PER_PROGRAM):
        w_at = ((first_tap + tap) * K + out_channel[:, None]) * C + channel[None, :]
        tl.store(own + w_at, dweights[tap], mask=is_out_channel[:, None] & is_channel[None, :])


def new_weight_gradients(conv_weight: Tensor, units: int) -> Tensor:
    """Uninitialized `[units, K, C, R, S]`, each in the memory layout of the weight."""
    strides = torch.empty_like(conv_weight, device="meta").stride()
    shape = units, *conv_weight.shape
    return conv_weight.new_empty_strided(shape, (conv_weight.numel(), *strides))
