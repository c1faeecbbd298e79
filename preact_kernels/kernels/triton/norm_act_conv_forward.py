"""Norm, activation and convolution in one kernel, without storing p or act(p)."""

import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Epilogue, Inputs, Output, Statistics, Unit
from preact_kernels.kernels.triton.batch_norm import (
    kernel_norm,
    load_norm,
    norm_act,
    pixel_indices,
    tiles_of,
)
from preact_kernels.kernels.triton.configurations import conv_forward, filling
from preact_kernels.kernels.triton.conv import (
    UnitSizes,
    add_after_product,
    dot,
    input_pixels,
    load_weight,
    unit_sizes,
)
from preact_kernels.kernels.triton.launch import (
    PreparedLaunches,
    ceil_div,
    launch_kernel,
    nhwc_strides,
    on_device_of,
    persistent_programs,
    properties,
    wait_for_predecessors,
)
from preact_kernels.kernels.triton.packing import packed_weight
from preact_kernels.kernels.triton.reduction import (
    add_moments,
    add_tile,
    begin_piece,
    empty_moments,
    end_piece,
    finished_statistics,
    new_sums,
    next_piece,
)


@triton.jit(do_not_specialize=["pixels", "count"])
def norm_act_conv_forward_kernel(
    x,
    norm,
    x_sums,
    conv_weight,
    conv_bias,
    residual,
    y,
    sums,
    parameter,
    sizes,
    pixels,
    count,
    SHAPE: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILES: tl.constexpr,
):
    """y `[pixels, K]` = conv(act(p)) [+ conv_bias] [+ residual].

    Reads the statistics of x from the accumulators `x_sums` over `count` pixels, or from the norm
    if they are None. Adds moments of y to the accumulators `sums` unless None. Grid: programs,
    tiles of output channels.
    """
    wait_for_predecessors()
    dtype: tl.constexpr = conv_weight.dtype.element_ty
    x_dtype: tl.constexpr = x.dtype.element_ty
    C: tl.constexpr = SHAPE.C
    K: tl.constexpr = SHAPE.K
    TILE_PIXELS: tl.constexpr = TILES.tile_pixels
    TILE_CIN: tl.constexpr = TILES.tile_cin
    TILE_COUT: tl.constexpr = TILES.tile_cout
    CIN_TILES: tl.constexpr = (C + TILE_CIN - 1) // TILE_CIN
    norms = ()
    for cin_tile in tl.static_range(CIN_TILES):
        channel = cin_tile * TILE_CIN + tl.arange(0, TILE_CIN)
        norms = norms + (load_norm(norm, channel, C, x_sums, count),)
    out_channel = tl.program_id(1) * TILE_COUT + tl.arange(0, TILE_COUT)
    is_out_channel = out_channel < K
    weights = ()
    if SHAPE.R * SHAPE.S == 1:
        for cin_tile in tl.static_range(CIN_TILES):
            channel = cin_tile * TILE_CIN + tl.arange(0, TILE_CIN)
            weight = load_weight(conv_weight, 0, channel, out_channel, SHAPE, TRANSPOSED=False)
            weights = weights + (weight,)
    # With a residual, a thread does not have rows r and r + 8 (`empty_sums`), but wide tiles do not
    # fit in registers otherwise.
    FOLDED: tl.constexpr = residual is None or TILE_COUT > 32
    moments = empty_moments(TILE_COUT)
    tiles = tiles_of(pixels, TILE_PIXELS)
    begin, end = next_piece(moments, tiles, IN_PIECES=sums is not None)
    while begin < tiles:
        if sums is not None:
            moments = begin_piece(moments, TILE_PIXELS, TILE_COUT, FOLDED=FOLDED)
        for tile in tl.range(begin, end, tl.num_programs(0), num_stages=TILES.num_stages):
            pixel = pixel_indices(tile, TILE_PIXELS, INT64)
            is_pixel = pixel < pixels
            total = tl.zeros([TILE_PIXELS, TILE_COUT], tl.float32)
            for tap in tl.range(SHAPE.R * SHAPE.S, num_stages=TILES.num_tap_stages):
                in_pixel, exists = input_pixels(pixel, is_pixel, tap, sizes, SHAPE)
                for cin_tile in tl.static_range(CIN_TILES):
                    channel = cin_tile * TILE_CIN + tl.arange(0, TILE_CIN)
                    is_channel = channel < C
                    mask = exists[:, None] & is_channel[None, :]
                    at = in_pixel[:, None] * C + channel[None, :]
                    x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
                    mean, _, scale, bias = norms[cin_tile]
                    a = norm_act(x_tile, mean, scale, bias, parameter, x_dtype, ACTIVATION)
                    a = tl.where(mask, a, 0.0)
                    if SHAPE.R * SHAPE.S == 1:
                        weight = weights[cin_tile]
                    else:
                        weight = load_weight(
                            conv_weight, tap, channel, out_channel, SHAPE, TRANSPOSED=False
                        )
                    total = dot(a, weight, total, dtype, PRECISION)
            mask = is_pixel[:, None] & is_out_channel[None, :]
            at = pixel[:, None] * K + out_channel[None, :]
            if conv_bias is not None:
                added = tl.load(conv_bias + out_channel, mask=is_out_channel, other=0.0)
                total = add_after_product(total, added.to(tl.float32)[None, :])
            if residual is not None:
                added = tl.load(residual + at, mask=mask, other=0.0)
                total = add_after_product(total, added.to(tl.float32))
            stored = total.to(y.dtype.element_ty)
            tl.store(y + at, stored, mask=mask)
            if sums is not None:
                left = pixels - tile * TILE_PIXELS
                moments = add_tile(moments, stored.to(tl.float32), is_pixel, left)
        begin = end
        if sums is not None:
            moments = end_piece(moments)
            begin, end = next_piece(moments, tiles)
    if sums is not None:
        add_moments(moments, pixels, TILE_PIXELS, sums, out_channel, is_out_channel, K)


class ForwardLaunch:
    """Reusable launch for the forward of a unit, for inputs of one shape.

    A program owns every `programs`-th tile of some output channels.

    Args:
        sizes: sizes of the unit.
        prepared: see `launch_kernel`; {} if all tensors of all calls are aligned.

    Attributes:
        sizes, prepared: as given.
    """

    def __init__(self, sizes: UnitSizes, prepared: PreparedLaunches | None = None) -> None:
        self.sizes, self.prepared = sizes, prepared
        unit = sizes.unit
        device = properties(unit.device)
        config = conv_forward(device, unit)
        columns = ceil_div(sizes.shape.K, config.tile_cout)
        config = filling(config, device, sizes.y_pixels, columns)
        tiles = ceil_div(sizes.y_pixels, config.tile_pixels)
        self._grid = persistent_programs(unit.device, tiles, columns, config.resident), columns, 1
        self._num_warps = config.num_warps
        self._constants = {**sizes.constants, "TILES": config}
        self._numbers = sizes.parameter, sizes.images, sizes.y_pixels, sizes.x_pixels
        self._y = sizes.y_shape, nhwc_strides(sizes.y_shape)
        self._y_dtype = unit.y_dtype

    def __call__(
        self,
        inputs: Inputs,
        x_sums: Tensor | None,
        epilogue: Epilogue,
        sums: Tensor | None,
    ) -> Tensor:
        """Returns y.

        Args:
            inputs: tensors with a `KernelNorm` and a packed weight.
            x_sums: accumulators with the statistics of x; None: the norm has them.
            epilogue: tensors to add.
            sums: accumulators for the statistics of y, or None.
        """
        x, norm, conv_weight = inputs
        conv_bias, residual, _ = epilogue
        y = x.new_empty_strided(*self._y, dtype=self._y_dtype)
        launch_kernel(
            norm_act_conv_forward_kernel,
            self._grid,
            (x, norm, x_sums, conv_weight, conv_bias, residual, y, sums, *self._numbers),
            self._constants,
            self._num_warps,
            self.prepared,
            (x_sums is None, conv_bias is None, residual is None, sums is None),
        )
        return y


def launch_norm_act_conv_forward(unit: Unit, inputs: Inputs, epilogue: Epilogue) -> Output:
    """`Kernels.norm_act_conv_forward` for convolutions with one group."""
    x = inputs.x
    sizes = unit_sizes(unit, x.shape)
    launch = ForwardLaunch(sizes)
    with on_device_of(x):
        sums = new_sums(x, unit.weight_shape[0]) if epilogue.with_stats else None
        weight = packed_weight(inputs.conv_weight, unit.dtype)
        y = launch(Inputs(x, kernel_norm(inputs.norm), weight), None, epilogue, sums)
        if sums is None:
            return Output(y, None)
        mean, var = finished_statistics(sums, sizes.y_pixels)
        return Output(y, Statistics(mean[0], var[0]))
