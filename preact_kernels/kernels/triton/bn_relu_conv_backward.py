"""Backward of batch norm, ReLU and convolution: recomputes the activation from x.

The gradient of the output may be folded (`contract.Fold`): the kernels evaluate it as they load.
"""

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Conv, ConvGradients, Fold, Norm, Wanted
from preact_kernels.kernels.pytorch_conv import compute_dtype
from preact_kernels.kernels.triton.batch_norm import (
    load_fold,
    load_norm,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.bn_relu import bn_input_gradient
from preact_kernels.kernels.triton.configurations import ConvBlocks, ConvDtypes, conv_backward
from preact_kernels.kernels.triton.conv import (
    NO_FOLD,
    OutputGradient,
    Sizes,
    dot,
    geometry_of,
    load_output_gradient,
    load_weight,
    output_pixels,
    precision,
)
from preact_kernels.kernels.triton.launch import (
    INTERPRETED,
    PreparedLaunches,
    ceil_div,
    device_of,
    launch_kernel,
    needs_int64,
    on_device_of,
    persistent_programs,
)
from preact_kernels.kernels.triton.packing import packed_weight
from preact_kernels.kernels.triton.reduction import (
    add_two_sums,
    column_sums,
    finished_sums,
    launch_sum_partials,
    new_sums,
)
from preact_kernels.kernels.triton.weight_gradient import (
    WeightUnit,
    bn_relu_conv_backward_weight_kernel,
    new_weight_gradients,
)

# A program that sums the gradient of a weight has at least so many tiles, to keep partial results
# small beside the tensors that are read.
_TILES_PER_PROGRAM = 1 if INTERPRETED else 8


@triton.jit
def load_tap(
    tap,
    out_channel,
    gradient,
    coefficients,
    tile_pixels,
    sizes,
    dtype: tl.constexpr,
    GEOMETRY: tl.constexpr,
    IN_TRAINING: tl.constexpr,
):
    """The output's gradient, `[pixels, out channels]`, that a tap passes to x; rounded to `dtype`.

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
    if gradient.unfolded is not None:
        is_own = (tap == GEOMETRY.R * GEOMETRY.S // 2) & (tl.program_id(1) == 0)
        stored = tile.to(gradient.unfolded.dtype.element_ty)
        tl.store(gradient.unfolded + at, stored, mask=mask & is_own)
    return tile.to(dtype), exists


@triton.jit(do_not_specialize=["pixels"])
def bn_relu_conv_backward_kernel(
    gradient,
    x,
    norm,
    conv_weight,
    g,
    sums,
    partials,
    sizes,
    pixels,
    GEOMETRY: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    IN_TRAINING: tl.constexpr,
):
    """g `[pixels, C]` = conv_transpose(gradient) * [p > 0], its sums, and dconv_weight.

    `partials` is `[programs, R, S, K, C]`: the gradient of the weight; or None, for g alone. Grid:
    programs, blocks of input channels.
    """
    dtype: tl.constexpr = conv_weight.dtype.element_ty
    C: tl.constexpr = GEOMETRY.C
    K: tl.constexpr = GEOMETRY.K
    TAPS: tl.constexpr = GEOMETRY.R * GEOMETRY.S
    WITH_WEIGHT: tl.constexpr = partials is not None
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CIN: tl.constexpr = BLOCKS.block_cin
    BLOCK_COUT: tl.constexpr = BLOCKS.block_cout
    COUT_BLOCKS: tl.constexpr = (K + BLOCK_COUT - 1) // BLOCK_COUT
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
        p = pre_activation(x_tile, mean, scale, bias, x.dtype.element_ty)
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
                        dtype,
                        GEOMETRY,
                        IN_TRAINING,
                    )
                    weight = load_weight(
                        conv_weight, tap, channel, out_channel, GEOMETRY, TRANSPOSED=True
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
                        dtype,
                        GEOMETRY,
                        IN_TRAINING,
                    )
                    weight = load_weight(
                        conv_weight, tap, channel, out_channel, GEOMETRY, TRANSPOSED=True
                    )
                    da = dot(dy_tile, weight, da, dtype, PRECISION)
        g_tile = tl.where((p <= 0) | ~mask, 0.0, da).to(dtype)
        tl.store(g + at, g_tile, mask=mask)
        g_tile = g_tile.to(tl.float32)
        sum_g += column_sums(g_tile)
        sum_g_x += column_sums(tl.where(mask, g_tile * (x_tile - mean[None, :]), 0.0))
    add_two_sums(sum_g, sum_g_x * rstd, sums, channel, is_channel, C)
    if WITH_WEIGHT:
        own = partials + tl.program_id(0).to(tl.int64) * (TAPS * K * C)
        for tap in tl.static_range(TAPS):
            for block in tl.static_range(COUT_BLOCKS):
                out_channel = block * BLOCK_COUT + tl.arange(0, BLOCK_COUT)
                w_at = (tap * K + out_channel[:, None]) * C + channel[None, :]
                w_mask = (out_channel < K)[:, None] & is_channel[None, :]
                tl.store(own + w_at, dweights[tap * COUT_BLOCKS + block], mask=w_mask)


def costs_less_apart(programs: int, apart_programs: int, weights: int, apart_bytes: int) -> bool:
    """Whether a launch of its own for the gradient of a weight moves fewer bytes than one pass.

    Args:
        programs: of the pass that also computes g; each stores a gradient of the weight.
        apart_programs: of the launch of its own.
        weights: number of weights.
        apart_bytes: of x and dy, which are read again, and of dy where it is stored for that.
    """
    partial_bytes = 2 * 4 * weights  # float32, written and read again
    return apart_programs * partial_bytes + apart_bytes < programs * partial_bytes


class BackwardLaunch:
    """The backward of a convolution for tensors of one shape, which may be called often.

    Args:
        like: a tensor on the same device.
        dtypes: of the tensors.
        x_shape: shape of the input.
        dy_shape: shape of the output.
        weight_shape: `[K, C, R, S]`.
        conv: geometry; one group.
        dy_is_whole: whether dy is not folded, or is stored unfolded in any case.
        prepared: see `launch_kernel`; {} for launches of which all tensors are aligned, but for
            those of a fold without exact sums.

    Attributes:
        weights: number of weights.
        in_one_pass: whether one kernel computes g and the gradient of the weight. Otherwise the
            gradient of the weight is a launch of its own, for several units at once.
        input_programs: partial results of the gradient of the weight in one pass.
        weight_programs: partial results for each unit of a launch of its own.
        prepared: as given.
    """

    def __init__(
        self,
        like: Tensor,
        dtypes: ConvDtypes,
        x_shape: Sequence[int],
        dy_shape: Sequence[int],
        weight_shape: Sequence[int],
        conv: Conv,
        dy_is_whole: bool,
        prepared: PreparedLaunches | None = None,
    ) -> None:
        geometry = self._geometry = geometry_of(weight_shape, conv)
        self._dtypes = dtypes
        device = device_of(like)
        taps = geometry.R * geometry.S
        self.weights = taps * geometry.K * geometry.C
        operands = dtypes.operands
        blocks = conv_backward(device.capability, dtypes, geometry.C, geometry.K, taps)
        elements = math.prod(x_shape), math.prod(dy_shape)
        self._input, self._weight = blocks.input, blocks.weight
        self._in_pixels, self._out_pixels = elements[0] // geometry.C, elements[1] // geometry.K
        self._sizes = Sizes(*x_shape[2:], *dy_shape[2:])
        self._constants = {
            "GEOMETRY": geometry,
            "INT64": needs_int64(*elements),
            "PRECISION": precision(operands),
        }
        self._input_constants = {
            (is_both, in_training): {**self._constants, "BLOCKS": b, "IN_TRAINING": in_training}
            for is_both, b in enumerate((blocks.input, blocks.both))
            for in_training in (False, True)
        }
        self._weight_constants = {**self._constants, "BLOCKS": blocks.weight}
        self.prepared = prepared
        self._keeps_size = geometry.keeps_size()
        self._taps_per_program = geometry.S if geometry.S <= 3 else 1  # a row, if registers hold it
        self._weight_columns = (
            taps
            // self._taps_per_program
            * ceil_div(geometry.C, blocks.weight.block_cin)
            * ceil_div(geometry.K, blocks.weight.block_cout)
        )
        tiles = ceil_div(self._out_pixels, blocks.weight.block_pixels)
        x_bytes, dy_bytes = elements[0] * dtypes.x.itemsize, elements[1] * dtypes.y.itemsize
        self.weight_programs = min(
            persistent_programs(like, tiles, self._weight_columns, blocks.weight.resident),
            ceil_div(tiles, _TILES_PER_PROGRAM),
            max(1, (x_bytes + dy_bytes) // (4 * self.weights)),
        )
        both = blocks.both or blocks.input
        self._grids = [self._input_grid(like, b) for b in (blocks.input, both)]
        self.input_programs = self._grids[True][0]
        apart_bytes = x_bytes + (1 if dy_is_whole else 2) * dy_bytes
        self.in_one_pass = blocks.both is not None and not costs_less_apart(
            self.input_programs, self.weight_programs, self.weights, apart_bytes
        )
        self._both = blocks.both if self.in_one_pass else None

    def _input_grid(self, x: Tensor, blocks: ConvBlocks) -> tuple[int, int, int]:
        columns = ceil_div(self._geometry.C, blocks.block_cin)
        tiles = ceil_div(self._in_pixels, blocks.block_pixels)
        return persistent_programs(x, tiles, columns, blocks.resident), columns, 1

    def input(
        self,
        dy: Tensor,
        fold: Fold | None,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        sums: Tensor,
        partials: Tensor | None,
        needs_whole: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """g, and the unfolded gradient of the output where it is needed or is `dy` itself.

        Adds the sums of g to the accumulators `sums`. Stores partial gradients of the weight unless
        `partials` is None. `conv_weight` is packed. A program owns every `programs`-th tile of a
        block of input channels.
        """
        whole = stored = None
        if fold is not None and needs_whole:
            if self._keeps_size:
                whole = stored = torch.empty_like(dy, dtype=self._dtypes.y)
            else:  # the kernel does not read each pixel of dy exactly once
                dy, fold = bn_input_gradient(dy, fold), None
        if fold is None:
            whole = dy
        gradient = OutputGradient(dy, fold or NO_FOLD, stored)
        blocks = self._input if partials is None else cast(ConvBlocks, self._both)
        g = torch.empty_like(x, dtype=self._dtypes.operands)
        in_training = gradient.fold.inv_count != 0
        # Only a run folds with exact sums. Tensors of a caller's fold may be unaligned.
        is_own = fold is None or fold.sums.dtype == torch.int64
        launch_kernel(
            bn_relu_conv_backward_kernel,
            self._grids[partials is not None],
            (
                gradient,
                x,
                norm,
                conv_weight,
                g,
                sums,
                partials,
                self._sizes,
                self._in_pixels,
            ),
            self._input_constants[partials is not None, in_training],
            blocks.num_warps,
            self.prepared if is_own else None,
            (
                in_training,
                fold is None,
                gradient.fold.skip is None,
                stored is None,
                partials is None,
            ),
        )
        return g, whole

    def weight(self, units: Sequence[WeightUnit], partials: Tensor, slots: int = 1) -> None:
        """Partial gradients of the weights `[units, weight_programs, R, S, K, C]`.

        A program owns every `programs`-th tile of some taps and a block of either channels, of one
        unit. `slots` is at least the number of units: launches of as many share a kernel.
        """
        filled = *units, *itertools.repeat(units[0], slots - len(units))
        launch_kernel(
            bn_relu_conv_backward_weight_kernel,
            (self.weight_programs, self._weight_columns, len(units)),
            (filled, partials, self._sizes, self._out_pixels),
            {
                **self._weight_constants,
                "UNITS": slots,
                "TAPS_PER_PROGRAM": self._taps_per_program,
            },
            self._weight.num_warps,
            self.prepared,
            slots,
        )


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
    operands = compute_dtype(x, dy, conv_weight)
    dtypes = ConvDtypes(operands, x.dtype, (dy if fold is None else fold.x).dtype)
    dy_is_whole = fold is None or wanted.dy
    launch = BackwardLaunch(x, dtypes, x.shape, dy.shape, conv_weight.shape, conv, dy_is_whole)
    in_one_pass = launch.in_one_pass and wanted.input and wanted.weight
    g = sums = dconv_weight = partials = None
    with on_device_of(x):
        if wanted.weight:
            programs = launch.input_programs if in_one_pass else launch.weight_programs
            partials = x.new_empty((1, programs, launch.weights), dtype=torch.float32)
        needs_whole = wanted.dy or (wanted.weight and not in_one_pass)
        whole: Tensor | None = dy
        if wanted.input:
            exact = new_sums(x, x.shape[1])
            own = cast(Tensor, partials)[0] if in_one_pass else None
            weight = packed_weight(conv_weight, operands)
            g, whole = launch.input(dy, fold, x, norm, weight, exact[0], own, needs_whole)
            sums = finished_sums(exact)[0]
        elif fold is not None:
            whole = bn_input_gradient(dy, fold)
        if partials is not None:
            if not in_one_pass:
                launch.weight([WeightUnit(cast(Tensor, whole), x, norm)], partials)
            results = new_weight_gradients(conv_weight, 1)
            launch_sum_partials(partials, results)
            dconv_weight = results[0]
    return ConvGradients(g, sums, dconv_weight, whole if wanted.dy else None)
