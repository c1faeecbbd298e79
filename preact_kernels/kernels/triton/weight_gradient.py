"""Backward of norm, activation and convolution: the gradients of the weights of several units.

Used where one pass with the gradient of the input would move more bytes, or spill registers.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.batch_norm import (
    KernelNorm,
    load_scale,
    norm_act,
    pixel_indices,
    tiles_of,
)
from preact_kernels.kernels.triton.configurations import ConvTiles, taps_per_program
from preact_kernels.kernels.triton.conv import UnitSizes, dot, input_pixels
from preact_kernels.kernels.triton.launch import (
    INTERPRETED,
    PreparedLaunches,
    ceil_div,
    launch_kernel,
    persistent_programs,
    wait_for_predecessors,
)

# Least tiles per program: partial results stay small compared with the tensors that are read.
_TILES_PER_PROGRAM = 1 if INTERPRETED else 8


class WeightInputs(NamedTuple):
    """Inputs for the gradient of one unit's weight."""

    dy: Tensor  # without a deferred step
    x: Tensor
    norm: KernelNorm


@triton.jit
def select_unit(units, index, UNITS: tl.constexpr):
    """dy, x, and mean, var, weight, bias and eps of the norm, of `units[index]`."""
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
def norm_act_conv_backward_weight_kernel(
    units,
    partials,
    parameter,
    sizes,
    pixels,
    SHAPE: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILES: tl.constexpr,
    TAPS_PER_PROGRAM: tl.constexpr,
    UNITS: tl.constexpr,
):
    """The gradients of the weights of several units, over the pixels of the output.

    `partials` is `[units, programs, R, S, K, C]`. Grid: programs, taps / TAPS_PER_PROGRAM * tiles
    of output channels * tiles of input channels, units.
    """
    wait_for_predecessors()
    C: tl.constexpr = SHAPE.C
    K: tl.constexpr = SHAPE.K
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CIN: tl.constexpr = TILES.tile_cin
    TILE_COUT: tl.constexpr = TILES.tile_cout
    CIN_TILES: tl.constexpr = (C + TILE_CIN - 1) // TILE_CIN
    COUT_TILES: tl.constexpr = (K + TILE_COUT - 1) // TILE_COUT
    IS_PADDED: tl.constexpr = SHAPE.PAD_H + SHAPE.PAD_W > 0
    dy, x, mean, var, weight, bias, eps = select_unit(units, tl.program_id(2), UNITS)
    x_dtype: tl.constexpr = x.dtype.element_ty
    dtype: tl.constexpr = dy.dtype.element_ty if x_dtype == tl.float32 else x_dtype  # the narrower
    column = tl.program_id(1)
    first_tap = column // (COUT_TILES * CIN_TILES) * TAPS_PER_PROGRAM
    channel = column % CIN_TILES * TILE_CIN + tl.arange(0, TILE_CIN)
    is_channel = channel < C
    out_channel = column // CIN_TILES % COUT_TILES * TILE_COUT + tl.arange(0, TILE_COUT)
    is_out_channel = out_channel < K
    mean = tl.load(mean + channel, mask=is_channel, other=0.0)
    var = tl.load(var + channel, mask=is_channel, other=1.0)
    _, scale, bias = load_scale(var, weight, bias, eps, channel, is_channel)
    dweights = ()
    for _ in tl.static_range(TAPS_PER_PROGRAM):
        dweights = dweights + (tl.zeros([TILE_COUT, TILE_CIN], tl.float32),)
    for tile in tl.range(
        tl.program_id(0),
        tiles_of(pixels, TILE_PIXELS),
        tl.num_programs(0),
        num_stages=TILES.num_stages,
    ):
        pixel = pixel_indices(tile, TILE_PIXELS, INT64)
        is_pixel = pixel < pixels
        out_mask = is_pixel[:, None] & is_out_channel[None, :]
        out_at = pixel[:, None] * K + out_channel[None, :]
        dy_tile = tl.load(dy + out_at, mask=out_mask, other=0.0).to(dtype)
        added = ()
        for tap in tl.static_range(TAPS_PER_PROGRAM):
            in_pixel, exists = input_pixels(pixel, is_pixel, first_tap + tap, sizes, SHAPE)
            mask = exists[:, None] & is_channel[None, :]
            at = in_pixel[:, None] * C + channel[None, :]
            x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            a = norm_act(x_tile, mean, scale, bias, parameter, x_dtype, ACTIVATION)
            a = tl.where(mask, a, 0.0)
            # In the padding a is 0, and 0 * inf is NaN: set dy to 0 there, too.
            tap_dy = tl.where(exists[:, None], dy_tile, 0.0) if IS_PADDED else dy_tile
            added = added + (dot(tl.trans(tap_dy), a, dweights[tap], dtype, PRECISION),)
        dweights = added
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    own = partials + program.to(tl.int64) * (SHAPE.R * SHAPE.S * K * C)
    for tap in tl.static_range(TAPS_PER_PROGRAM):
        w_at = ((first_tap + tap) * K + out_channel[:, None]) * C + channel[None, :]
        tl.store(own + w_at, dweights[tap], mask=is_out_channel[:, None] & is_channel[None, :])


class WeightGradientLaunch:
    """Reusable launch for partial gradients of the weights of units with inputs of one shape.

    A program owns every `programs`-th tile, for some taps and a tile of input and of output
    channels of one unit.

    Args:
        sizes: sizes of the units.
        config: configuration of the kernel.
        prepared: see `launch_kernel`; {} if all tensors of all calls are aligned.

    Attributes:
        unit: the unit of `sizes`.
        passes: how often x and dy are read, by programs for different taps.
        programs: number of partial results per unit.
    """

    def __init__(
        self, sizes: UnitSizes, config: ConvTiles, prepared: PreparedLaunches | None = None
    ) -> None:
        self._prepared = prepared
        unit, shape = sizes.unit, sizes.shape
        self.unit = unit
        self._numbers = sizes.parameter, sizes.images, sizes.y_pixels
        taps = taps_per_program(shape.S)
        self.passes = shape.R * shape.S // taps
        columns = ceil_div(shape.C, config.tile_cin) * ceil_div(shape.K, config.tile_cout)
        self._columns = self.passes * columns
        tiles = ceil_div(sizes.y_pixels, config.tile_pixels)
        self.programs = min(
            persistent_programs(unit.device, tiles, self._columns, config.resident),
            ceil_div(tiles, _TILES_PER_PROGRAM),
            max(1, (sizes.x_bytes + sizes.y_bytes) // (4 * math.prod(unit.weight_shape))),
        )
        self._num_warps = config.num_warps
        self._constants = {
            **sizes.constants,
            "TILES": config,
            "TAPS_PER_PROGRAM": taps,
        }

    def __call__(self, units: Sequence[WeightInputs], partials: Tensor, slots: int = 1) -> None:
        """Stores partial gradients of the weights `[units, programs, R, S, K, C]`.

        `slots` >= the number of units. Launches with equal `slots` share a kernel.
        """
        filled = *units, *itertools.repeat(units[0], slots - len(units))
        launch_kernel(
            norm_act_conv_backward_weight_kernel,
            (self.programs, self._columns, len(units)),
            (filled, partials, *self._numbers),
            {**self._constants, "UNITS": slots},
            self._num_warps,
            self._prepared,
            slots,
        )


def new_weight_gradients(conv_weight: Tensor, units: int) -> Tensor:
    """Uninitialized `[units, K, C, R, S]`, each in the memory format of the weight."""
    strides = torch.empty_like(conv_weight, device="meta").stride()
    shape = units, *conv_weight.shape
    return conv_weight.new_empty_strided(shape, (conv_weight.numel(), *strides))
