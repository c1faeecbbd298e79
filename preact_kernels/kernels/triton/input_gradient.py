"""Backward of norm, activation and convolution: the gradient of p.

Recomputes the activation from x. May compute the gradient of the convolution's weight in the same
pass.
"""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import AffineStep, Gradient, Inputs
from preact_kernels.kernels.triton.activations import activate, activation_gradient
from preact_kernels.kernels.triton.batch_norm import (
    load_affine_step,
    load_norm,
    pixel_indices,
    pre_activation,
    tiles_of,
)
from preact_kernels.kernels.triton.configurations import ConvBlocks
from preact_kernels.kernels.triton.conv import (
    NO_STEP,
    UnitSizes,
    dot,
    load_gradient,
    load_weight,
    output_pixels,
)
from preact_kernels.kernels.triton.launch import (
    PreparedLaunches,
    ceil_div,
    launch_kernel,
    persistent_programs,
    wait_for_predecessors,
)
from preact_kernels.kernels.triton.norm_act import norm_input_gradient
from preact_kernels.kernels.triton.reduction import (
    add_rows,
    add_two_sums,
    column_sums,
    empty_sums,
)


@triton.jit
def load_tap(
    tap,
    out_channel,
    dy,
    whole,
    coefficients,
    tile_pixels,
    sizes,
    dtype: tl.constexpr,
    SHAPE: tl.constexpr,
    IN_TRAINING: tl.constexpr,
):
    """The output's gradient, `[pixels, out channels]`, that a tap passes to x; rounded to `dtype`.

    `tile_pixels` are pixels of x, and which of them exist. The second result says to which of them
    the tap passes a gradient. The middle tap, which reads each output pixel once, stores the tile
    in `whole` unless None.
    """
    pixel, is_pixel = tile_pixels
    out_pixel, exists = output_pixels(pixel, is_pixel, tap, sizes, SHAPE)
    is_out_channel = out_channel < SHAPE.K
    mask = exists[:, None] & is_out_channel[None, :]
    at = out_pixel[:, None] * SHAPE.K + out_channel[None, :]
    tile = load_gradient(dy, coefficients, at, mask, IN_TRAINING)
    if whole is not None:
        is_own = (tap == SHAPE.R * SHAPE.S // 2) & (tl.program_id(1) == 0)
        stored = tile.to(whole.dtype.element_ty)
        tl.store(whole + at, stored, mask=mask & is_own)
    return tile.to(dtype), exists


@triton.jit(do_not_specialize=["pixels"])
def norm_act_conv_backward_kernel(
    dy,
    whole,
    x,
    norm,
    conv_weight,
    g,
    sums,
    partials,
    parameter,
    sizes,
    pixels,
    SHAPE: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCKS: tl.constexpr,
    IN_TRAINING: tl.constexpr,
):
    """g `[pixels, C]` = conv_transpose(dy) * act'(p), its sums, and dconv_weight.

    `dy` is a `Gradient`; `whole` receives the whole dy unless None. `partials` is
    `[programs, R, S, K, C]`: the gradient of the weight; or None, for g alone. Grid: programs,
    blocks of input channels.
    """
    wait_for_predecessors()
    dtype: tl.constexpr = conv_weight.dtype.element_ty
    C: tl.constexpr = SHAPE.C
    K: tl.constexpr = SHAPE.K
    TAPS: tl.constexpr = SHAPE.R * SHAPE.S
    WITH_WEIGHT: tl.constexpr = partials is not None
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CIN: tl.constexpr = BLOCKS.block_cin
    BLOCK_COUT: tl.constexpr = BLOCKS.block_cout
    COUT_BLOCKS: tl.constexpr = (K + BLOCK_COUT - 1) // BLOCK_COUT
    channel = tl.program_id(1) * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
    is_channel = channel < C
    mean, rstd, scale, bias = load_norm(norm, channel, C)
    steps = ()
    for block in tl.static_range(COUT_BLOCKS):
        first = block * BLOCK_COUT
        steps = steps + (load_affine_step(dy.step, first + tl.arange(0, BLOCK_COUT), K),)
    sum_g = empty_sums(BLOCK_PIXELS, BLOCK_CIN, FOLDED=True)
    sum_g_x = empty_sums(BLOCK_PIXELS, BLOCK_CIN, FOLDED=True)
    weights = ()
    if TAPS == 1:
        for block in tl.static_range(COUT_BLOCKS):
            out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
            weight = load_weight(conv_weight, 0, channel, out_channel, SHAPE, TRANSPOSED=True)
            weights = weights + (weight,)
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
        pixel = pixel_indices(tile, BLOCK_PIXELS, INT64)
        is_pixel = pixel < pixels
        tile_pixels = (pixel, is_pixel)
        mask = is_pixel[:, None] & is_channel[None, :]
        at = pixel[:, None] * C + channel[None, :]
        x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        p = pre_activation(x_tile, mean, scale, bias, x.dtype.element_ty)
        a = tl.where(mask, activate(p, parameter, ACTIVATION), 0.0)
        da = tl.zeros([BLOCK_PIXELS, BLOCK_CIN], tl.float32)
        if WITH_WEIGHT:  # one accumulator per tap, so the loop over taps is unrolled
            added = ()
            for tap in tl.static_range(TAPS):
                for block in tl.static_range(COUT_BLOCKS):
                    out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
                    dy_tile, exists = load_tap(
                        tap,
                        out_channel,
                        dy,
                        whole,
                        steps[block],
                        tile_pixels,
                        sizes,
                        dtype,
                        SHAPE,
                        IN_TRAINING,
                    )
                    if TAPS == 1:
                        weight = weights[block]
                    else:
                        weight = load_weight(
                            conv_weight, tap, channel, out_channel, SHAPE, TRANSPOSED=True
                        )
                    da = dot(dy_tile, weight, da, dtype, PRECISION)
                    dweight = dweights[tap * COUT_BLOCKS + block]
                    # Without a gradient dy is 0, and 0 * inf would be NaN: a is 0 there too.
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
                        dy,
                        whole,
                        steps[block],
                        tile_pixels,
                        sizes,
                        dtype,
                        SHAPE,
                        IN_TRAINING,
                    )
                    if TAPS == 1:
                        weight = weights[block]
                    else:
                        weight = load_weight(
                            conv_weight, tap, channel, out_channel, SHAPE, TRANSPOSED=True
                        )
                    da = dot(dy_tile, weight, da, dtype, PRECISION)
        if ACTIVATION == "relu":
            g_tile = tl.where((p <= 0) | ~mask, 0.0, da).to(dtype)
        else:
            g_tile = activation_gradient(da, p, parameter, ACTIVATION)
            g_tile = tl.where(mask, g_tile, 0.0).to(dtype)
        tl.store(g + at, g_tile, mask=mask)
        g_tile = g_tile.to(tl.float32)
        sum_g = add_rows(sum_g, g_tile)
        sum_g_x = add_rows(sum_g_x, g_tile * (x_tile - mean[None, :]))
    add_two_sums(column_sums(sum_g), column_sums(sum_g_x) * rstd, sums, channel, is_channel, C)
    if WITH_WEIGHT:
        own = partials + tl.program_id(0).to(tl.int64) * (TAPS * K * C)
        for tap in tl.static_range(TAPS):
            for block in tl.static_range(COUT_BLOCKS):
                out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
                w_at = (tap * K + out_channel[:, None]) * C + channel[None, :]
                w_mask = (out_channel < K)[:, None] & is_channel[None, :]
                tl.store(own + w_at, dweights[tap * COUT_BLOCKS + block], mask=w_mask)


def input_grid(sizes: UnitSizes, blocks: ConvBlocks) -> tuple[int, int, int]:
    """The grid of a launch: programs, blocks of input channels."""
    columns = ceil_div(sizes.shape.C, blocks.block_cin)
    tiles = ceil_div(sizes.x_pixels, blocks.block_pixels)
    return persistent_programs(sizes.unit.device, tiles, columns, blocks.resident), columns, 1


class InputGradientLaunch:
    """g and its sums for inputs of one shape, which may be called often.

    A program owns every `programs`-th tile of a block of input channels.

    Args:
        sizes: of the unit's tensors.
        blocks: of the kernel.
        prepared: see `launch_kernel`; {} if all tensors of all calls are aligned, except those of a
            step without accumulators.

    Attributes:
        programs: partial results of the gradient of the weight, where that is computed.
    """

    def __init__(
        self, sizes: UnitSizes, blocks: ConvBlocks, prepared: PreparedLaunches | None = None
    ) -> None:
        self._prepared = prepared
        self._g_dtype, self._y_dtype = sizes.unit.dtype, sizes.unit.y_dtype
        self._keeps_size = sizes.shape.keeps_size()
        self._numbers = sizes.parameter, sizes.images, sizes.x_pixels
        self._grid = input_grid(sizes, blocks)
        self.programs = self._grid[0]
        self._num_warps = blocks.num_warps
        constants = {**sizes.constants, "BLOCKS": blocks}
        self._constants = [{**constants, "IN_TRAINING": flag} for flag in (False, True)]

    def __call__(
        self,
        dy: Gradient,
        inputs: Inputs,
        sums: Tensor,
        partials: Tensor | None,
        needs_whole: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """g, and the whole dy where it is needed or given.

        Args:
            dy: gradient of the output, with a `KernelNorm` in its step.
            inputs: with a `KernelNorm` and a packed weight.
            sums: accumulators for the sums of g.
            partials: `[programs, R, S, K, C]` for the gradient of the weight, or None.
            needs_whole: return the whole dy.
        """
        x, norm, conv_weight = inputs
        if dy.step is not None and needs_whole and not self._keeps_size:
            dy = Gradient(
                norm_input_gradient(dy)
            )  # the kernel does not read each pixel exactly once
        is_whole = dy.step is None
        if is_whole:
            whole, stored, dy = dy.g, None, Gradient(dy.g, NO_STEP)
        else:
            whole = stored = torch.empty_like(dy.g, dtype=self._y_dtype) if needs_whole else None
        step = cast(AffineStep, dy.step)
        g = torch.empty_like(x, dtype=self._g_dtype)
        in_training = step.inv_count != 0
        # Only a run has steps with accumulators. Tensors of a caller's step may be unaligned.
        is_aligned = is_whole or step.sums.dtype == torch.int64
        launch_kernel(
            norm_act_conv_backward_kernel,
            self._grid,
            (dy, stored, x, norm, conv_weight, g, sums, partials, *self._numbers),
            self._constants[in_training],
            self._num_warps,
            self._prepared if is_aligned else None,
            (in_training, is_whole, step.skip is None, stored is None, partials is None),
        )
        return g, whole
