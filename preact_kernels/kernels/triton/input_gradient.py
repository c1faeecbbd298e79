"""Backward of norm, activation and convolution: the gradient of p.

Recomputes the activation from x. The same pass can compute the gradient of the convolution's
weight.
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
from preact_kernels.kernels.triton.configurations import MAX_PART_ROWS, ConvTiles
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


@triton.constexpr_function
def tap_parts(taps, tile_cout):
    """Numbers of taps per product: powers of two, in falling order.

    More rows of weights in a product take fewer instructions, until registers spill.
    """
    most = MAX_PART_ROWS // (16 if tile_cout == 16 else 64)
    parts = []
    while (left := taps - sum(parts)) > 0:
        parts.append(min(most, 1 << left.bit_length() - 1))
    return parts


@triton.constexpr_function
def parts_of(taps, cout_tiles, tile_cout):
    """Number of parts of the unrolled sum over taps and output channels; see `rows_of_part`."""
    return cout_tiles if taps == 1 else len(tap_parts(taps, tile_cout))


@triton.constexpr_function
def taps_of_part(taps, part, tile_cout):
    """Number of taps of a part."""
    return 1 if taps == 1 else tap_parts(taps, tile_cout)[part]


@triton.constexpr_function
def first_tap(taps, part, tile_cout):
    """The first tap of a part."""
    return 0 if taps == 1 else sum(tap_parts(taps, tile_cout)[:part])


@triton.jit
def rows_of_part(part, TAPS: tl.constexpr, TILE_COUT: tl.constexpr):
    """The tap and the output channel of each row of a part of the weights.

    A part `[taps * out channels, channels]` is a tile of output channels of 1x1 weights, or all
    output channels of some taps.
    """
    row = tl.arange(0, taps_of_part(TAPS, part, TILE_COUT) * TILE_COUT)
    if TAPS == 1:
        return tl.zeros_like(row), part * TILE_COUT + row
    else:
        return first_tap(TAPS, part, TILE_COUT) + row // TILE_COUT, row % TILE_COUT


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
    """The part of dy, `[pixels, out channels]`, that a tap passes to x, rounded to `dtype`.

    `tile_pixels` are pixels of x and whether they exist. The result is 0 where no output pixel
    reads x with this tap. Stores the tile in `whole` unless None.
    """
    pixel, is_pixel = tile_pixels
    out_pixel, exists = output_pixels(pixel, is_pixel, tap, sizes, SHAPE)
    mask = exists[:, None] & (out_channel < SHAPE.K)[None, :]
    at = out_pixel[:, None] * SHAPE.K + out_channel[None, :]
    tile = load_gradient(dy, coefficients, at, mask, IN_TRAINING)
    if whole is not None:
        stored = tile.to(whole.dtype.element_ty)
        tl.store(whole + at, stored, mask=mask & (tl.program_id(1) == 0))
    return tile.to(dtype)


@triton.jit
def load_taps(
    part,
    dy,
    tile_pixels,
    sizes,
    dtype: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE_COUT: tl.constexpr,
):
    """`load_tap` for a part of the taps, `[pixels, taps * out channels]`, of a dy without step."""
    pixel, is_pixel = tile_pixels
    tap, out_channel = rows_of_part(part, SHAPE.R * SHAPE.S, TILE_COUT)
    out_pixel, exists = output_pixels(pixel[:, None], is_pixel[:, None], tap[None, :], sizes, SHAPE)
    mask = exists & (out_channel < SHAPE.K)[None, :]
    at = out_pixel * SHAPE.K + out_channel[None, :]
    return tl.load(dy.g + at, mask=mask, other=0.0).to(dtype)


@triton.jit
def load_activation(x, norm, at, mask, parameter, ACTIVATION: tl.constexpr):
    """Tiles of x, p and act(p) in float32; act(p) is 0 outside `mask`.

    `norm` are the results of `load_norm`.
    """
    mean, _, scale, bias = norm
    x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    p = pre_activation(x_tile, mean, scale, bias, dtype)
    return x_tile, p, tl.where(mask, activate(p, parameter, dtype, ACTIVATION), 0.0)


@triton.jit
def store_weights_by_tap(
    own,
    dy,
    x,
    norm,
    channel,
    parameter,
    sizes,
    pixels,
    dtype: tl.constexpr,
    SHAPE: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILES: tl.constexpr,
):
    """Stores this program's gradients of the weights `[R, S, K, C]`, tap by tap, in `own`.

    For activations that may not be finite: sets them to 0 where no output pixel reads them, because
    dy is 0 there, and 0 * inf is NaN.
    """
    C: tl.constexpr = SHAPE.C
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CIN: tl.constexpr = TILES.tile_cin
    TILE_COUT: tl.constexpr = TILES.tile_cout
    is_channel = channel < C
    out_channel = tl.arange(0, TILE_COUT)
    for tap in tl.range(SHAPE.R * SHAPE.S):
        dweight = tl.zeros([TILE_COUT, TILE_CIN], tl.float32)
        for tile in tl.range(tl.program_id(0), tiles_of(pixels, TILE_PIXELS), tl.num_programs(0)):
            pixel = pixel_indices(tile, TILE_PIXELS, INT64)
            is_pixel = pixel < pixels
            _, exists = output_pixels(pixel, is_pixel, tap, sizes, SHAPE)
            mask = exists[:, None] & is_channel[None, :]
            at = pixel[:, None] * C + channel[None, :]
            a = load_activation(x, norm, at, mask, parameter, ACTIVATION)[2]
            dy_tile = load_tap(
                tap, out_channel, dy, None, None, (pixel, is_pixel), sizes, dtype, SHAPE, False
            )
            dweight = dot(tl.trans(dy_tile), a, dweight, dtype, PRECISION)
        w_at = (tap * SHAPE.K + out_channel[:, None]) * C + channel[None, :]
        tl.store(own + w_at, dweight, mask=(out_channel < SHAPE.K)[:, None] & is_channel[None, :])


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
    TILES: tl.constexpr,
    IN_TRAINING: tl.constexpr,
):
    """g `[pixels, C]` = conv_transpose(dy) * act'(p), its sums, and dconv_weight.

    `dy` is a `Gradient`, without a step if there are several taps. Stores the result of the step in
    `whole`, and gradients of the weight in `partials [programs, R, S, K, C]`, unless these are
    None. Grid: programs, tiles of input channels.
    """
    wait_for_predecessors()
    dtype: tl.constexpr = conv_weight.dtype.element_ty
    C: tl.constexpr = SHAPE.C
    K: tl.constexpr = SHAPE.K
    TAPS: tl.constexpr = SHAPE.R * SHAPE.S
    WITH_WEIGHT: tl.constexpr = partials is not None
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CIN: tl.constexpr = TILES.tile_cin
    TILE_COUT: tl.constexpr = TILES.tile_cout
    COUT_TILES: tl.constexpr = (K + TILE_COUT - 1) // TILE_COUT
    PARTS: tl.constexpr = parts_of(TAPS, COUT_TILES, TILE_COUT)
    HOLDS_WEIGHTS: tl.constexpr = TAPS == 1 or WITH_WEIGHT
    tl.static_assert(TAPS == 1 or COUT_TILES == 1)
    channel = tl.program_id(1) * TILE_CIN + tl.arange(0, TILE_CIN)
    is_channel = channel < C
    values = load_norm(norm, channel, C)
    mean, rstd = values[0], values[1]
    steps = ()
    for cout_tile in tl.static_range(COUT_TILES):
        out_channel = cout_tile * TILE_COUT + tl.arange(0, TILE_COUT)
        steps = steps + (load_affine_step(dy.step, out_channel, K),)
    sum_g = empty_sums(TILE_PIXELS, TILE_CIN, FOLDED=True)
    sum_g_x = empty_sums(TILE_PIXELS, TILE_CIN, FOLDED=True)
    weights = ()
    dweights = ()
    if HOLDS_WEIGHTS:
        for part in tl.static_range(PARTS):
            tap, out_channel = rows_of_part(part, TAPS, TILE_COUT)
            weight = load_weight(conv_weight, tap[:, None], channel, out_channel, SHAPE, True)
            weights = weights + (weight,)
            if WITH_WEIGHT:
                dweights = dweights + (tl.zeros([tap.shape[0], TILE_CIN], tl.float32),)
    for tile in tl.range(
        tl.program_id(0),
        tiles_of(pixels, TILE_PIXELS),
        tl.num_programs(0),
        num_stages=TILES.num_stages,
    ):
        pixel = pixel_indices(tile, TILE_PIXELS, INT64)
        is_pixel = pixel < pixels
        tile_pixels = (pixel, is_pixel)
        mask = is_pixel[:, None] & is_channel[None, :]
        at = pixel[:, None] * C + channel[None, :]
        x_tile, p, a = load_activation(x, values, at, mask, parameter, ACTIVATION)
        da = tl.zeros([TILE_PIXELS, TILE_CIN], tl.float32)
        if HOLDS_WEIGHTS:
            added = ()
            for part in tl.static_range(PARTS):
                if TAPS == 1:
                    out_channel = part * TILE_COUT + tl.arange(0, TILE_COUT)
                    dy_tile = load_tap(
                        0,
                        out_channel,
                        dy,
                        whole,
                        steps[part],
                        tile_pixels,
                        sizes,
                        dtype,
                        SHAPE,
                        IN_TRAINING,
                    )
                else:
                    dy_tile = load_taps(part, dy, tile_pixels, sizes, dtype, SHAPE, TILE_COUT)
                da = dot(dy_tile, weights[part], da, dtype, PRECISION)
                if WITH_WEIGHT:
                    dweight = dot(tl.trans(dy_tile), a, dweights[part], dtype, PRECISION)
                    added = added + (dweight,)
            dweights = added
        else:
            out_channel = tl.arange(0, TILE_COUT)
            for tap in tl.range(TAPS, num_stages=TILES.num_tap_stages):
                dy_tile = load_tap(
                    tap, out_channel, dy, None, None, tile_pixels, sizes, dtype, SHAPE, False
                )
                weight = load_weight(conv_weight, tap, channel, out_channel, SHAPE, True)
                da = dot(dy_tile, weight, da, dtype, PRECISION)
        if ACTIVATION == "relu":
            g_tile = tl.where((p <= 0) | ~mask, 0.0, da).to(dtype)
        else:
            g_tile = activation_gradient(da, p, parameter, dtype, ACTIVATION)
            g_tile = tl.where(mask, g_tile, 0.0).to(dtype)
        tl.store(g + at, g_tile, mask=mask)
        g_tile = g_tile.to(tl.float32)
        sum_g = add_rows(sum_g, g_tile)
        sum_g_x = add_rows(sum_g_x, g_tile * (x_tile - mean[None, :]))
    add_two_sums(column_sums(sum_g), column_sums(sum_g_x) * rstd, sums, channel, is_channel, C)
    if WITH_WEIGHT:
        own = partials + tl.program_id(0).to(tl.int64) * (TAPS * K * C)
        for part in tl.static_range(PARTS):
            tap, out_channel = rows_of_part(part, TAPS, TILE_COUT)
            w_at = ((tap * K + out_channel) * C)[:, None] + channel[None, :]
            w_mask = (out_channel < K)[:, None] & is_channel[None, :]
            tl.store(own + w_at, dweights[part], mask=w_mask)
        zero_or_nan = 0.0  # NaN if a gradient is NaN or infinite
        if TAPS > 1:
            for part in tl.static_range(PARTS):
                zero_or_nan += tl.sum(tl.sum(dweights[part] * 0.0, 0), 0)
        if TAPS > 1 and zero_or_nan != zero_or_nan:
            tl.debug_barrier()  # other threads have stored these weights
            store_weights_by_tap(
                own,
                dy,
                x,
                values,
                channel,
                parameter,
                sizes,
                pixels,
                dtype,
                SHAPE,
                INT64,
                PRECISION,
                ACTIVATION,
                TILES,
            )


def input_grid(sizes: UnitSizes, config: ConvTiles) -> tuple[int, int, int]:
    """The grid of a launch: programs, tiles of input channels."""
    columns = ceil_div(sizes.shape.C, config.tile_cin)
    tiles = ceil_div(sizes.x_pixels, config.tile_pixels)
    return persistent_programs(sizes.unit.device, tiles, columns, config.resident), columns, 1


class InputGradientLaunch:
    """Reusable launch for g and its sums, for inputs of one shape.

    A program owns every `programs`-th tile of some input channels.

    Args:
        sizes: sizes of the unit.
        config: configuration of the kernel.
        prepared: see `launch_kernel`; {} if all tensors of all calls are aligned, except tensors of
            a step without accumulators.

    Attributes:
        programs: number of partial gradients of the weight, if they are computed.
    """

    def __init__(
        self, sizes: UnitSizes, config: ConvTiles, prepared: PreparedLaunches | None = None
    ) -> None:
        self._prepared = prepared
        self._g_dtype, self._y_dtype = sizes.unit.dtype, sizes.unit.y_dtype
        self._has_taps = sizes.shape.R * sizes.shape.S > 1
        self._is_pointwise = sizes.shape.is_pointwise()
        self._numbers = sizes.parameter, sizes.images, sizes.x_pixels
        self._grid = input_grid(sizes, config)
        self.programs = self._grid[0]
        self._num_warps = config.num_warps
        constants = {**sizes.constants, "TILES": config}
        self._constants = [{**constants, "IN_TRAINING": flag} for flag in (False, True)]

    def __call__(
        self,
        dy: Gradient,
        inputs: Inputs,
        sums: Tensor,
        partials: Tensor | None,
        needs_whole: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns g, and dy without a step, which is None unless needed or given.

        Args:
            dy: gradient of the output, with a `KernelNorm` in its step.
            inputs: tensors with a `KernelNorm` and a packed weight.
            sums: accumulators for the sums of g.
            partials: `[programs, R, S, K, C]` for the gradient of the weight, or None.
            needs_whole: return dy without a step.
        """
        x, norm, conv_weight = inputs
        prepared = self._prepared_for(dy)
        if dy.step is not None and (self._has_taps or (needs_whole and not self._is_pointwise)):
            # The kernel would evaluate the step once per tap, and can store the result only if it
            # reads each pixel once.
            dy = Gradient(norm_input_gradient(dy, prepared=prepared))
            prepared = self._prepared
        is_whole = dy.step is None
        if is_whole:
            whole, stored, dy = dy.g, None, Gradient(dy.g, NO_STEP)
        else:
            whole = stored = torch.empty_like(dy.g, dtype=self._y_dtype) if needs_whole else None
        step = cast(AffineStep, dy.step)
        g = torch.empty_like(x, dtype=self._g_dtype)
        in_training = step.inv_count != 0
        launch_kernel(
            norm_act_conv_backward_kernel,
            self._grid,
            (dy, stored, x, norm, conv_weight, g, sums, partials, *self._numbers),
            self._constants[in_training],
            self._num_warps,
            prepared,
            (in_training, is_whole, step.skip is None, stored is None, partials is None),
        )
        return g, whole

    def _prepared_for(self, dy: Gradient) -> PreparedLaunches | None:
        """None for a step of a caller, which has no accumulators: its tensors may be unaligned."""
        is_aligned = dy.step is None or dy.step.sums.dtype == torch.int64
        return self._prepared if is_aligned else None
