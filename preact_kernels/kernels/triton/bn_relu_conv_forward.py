"""Batch norm, ReLU and convolution in one kernel: neither p nor relu(p) is stored in memory."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import BatchStatistics, Conv, Epilogue, Norm, Output
from preact_kernels.kernels.pytorch_conv import compute_dtype
from preact_kernels.kernels.triton.batch_norm import (
    load_norm,
    pixels_of,
    pre_activation,
    relu,
    tiles_of,
)
from preact_kernels.kernels.triton.configurations import ConvDtypes, conv_forward
from preact_kernels.kernels.triton.conv import (
    Sizes,
    dot,
    geometry_of,
    input_pixels,
    load_weight,
    precision,
)
from preact_kernels.kernels.triton.launch import (
    PreparedLaunches,
    ceil_div,
    device_of,
    launch_kernel,
    needs_int64,
    nhwc_strides,
    on_device_of,
    persistent_programs,
)
from preact_kernels.kernels.triton.packing import packed_weight
from preact_kernels.kernels.triton.reduction import (
    add_moments,
    add_tile,
    empty_moments,
    finished_statistics,
    new_sums,
)


class Addends(NamedTuple):
    """Tensors to add to the convolution, or None."""

    conv_bias: Tensor | None
    residual: Tensor | None


NO_ADDENDS = Addends(None, None)


@triton.jit(do_not_specialize=["pixels", "count"])
def bn_relu_conv_forward_kernel(
    x,
    norm,
    x_sums,
    conv_weight,
    addends,
    y,
    sums,
    sizes,
    pixels,
    count,
    GEOMETRY: tl.constexpr,
    BLOCKS: tl.constexpr,
    INT64: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y `[pixels, K]` = conv(relu(p)) [+ conv_bias] [+ residual].

    Reads the statistics of x from the accumulators `x_sums`, of `count` pixels, or from the norm if
    they are None. Adds sums for the statistics of y to `sums` unless None. Grid: programs, blocks
    of output channels.
    """
    dtype: tl.constexpr = conv_weight.dtype.element_ty
    C: tl.constexpr = GEOMETRY.C
    K: tl.constexpr = GEOMETRY.K
    BLOCK_PIXELS: tl.constexpr = BLOCKS.block_pixels
    BLOCK_CIN: tl.constexpr = BLOCKS.block_cin
    BLOCK_COUT: tl.constexpr = BLOCKS.block_cout
    CIN_BLOCKS: tl.constexpr = (C + BLOCK_CIN - 1) // BLOCK_CIN
    norms = ()
    for block in tl.static_range(CIN_BLOCKS):
        channel = block * BLOCK_CIN + tl.arange(0, BLOCK_CIN)
        norms = norms + (load_norm(norm, channel, C, x_sums, count),)
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
                p = pre_activation(x_tile, mean, scale, bias, x.dtype.element_ty)
                a = tl.where(mask, relu(p), 0.0)
                weight = load_weight(
                    conv_weight, tap, channel, out_channel, GEOMETRY, TRANSPOSED=False
                )
                total = dot(a, weight, total, dtype, PRECISION)
        mask = is_pixel[:, None] & is_out_channel[None, :]
        at = pixel[:, None] * K + out_channel[None, :]
        if addends.conv_bias is not None:
            added = tl.load(addends.conv_bias + out_channel, mask=is_out_channel, other=0.0)
            total += added.to(tl.float32)[None, :]
        if addends.residual is not None:
            total += tl.load(addends.residual + at, mask=mask, other=0.0).to(tl.float32)
        stored = total.to(y.dtype.element_ty)
        tl.store(y + at, stored, mask=mask)
        if sums is not None:
            rows = tl.minimum(pixels - tile * BLOCK_PIXELS, BLOCK_PIXELS)
            moments = add_tile(moments, stored.to(tl.float32), is_pixel, rows)
    if sums is not None:
        add_moments(moments, sums, out_channel, is_out_channel, K)


class ForwardLaunch:
    """The forward of a convolution for tensors of one shape, which may be called often.

    A program owns every `programs`-th tile of a block of output channels.

    Args:
        like: a tensor on the same device.
        dtypes: of the tensors.
        x_shape: shape of the input.
        weight_shape: `[K, C, R, S]`.
        conv: geometry; one group.
        prepared: see `launch_kernel`; {} for launches of which all tensors are aligned.

    Attributes:
        dtypes, weight_shape, conv, prepared: as given.
        shape: of the output.
        pixels: of the output.
    """

    def __init__(
        self,
        like: Tensor,
        dtypes: ConvDtypes,
        x_shape: Sequence[int],
        weight_shape: Sequence[int],
        conv: Conv,
        prepared: PreparedLaunches | None = None,
    ) -> None:
        geometry = geometry_of(weight_shape, conv)
        self.dtypes, self.weight_shape, self.conv = dtypes, weight_shape, conv
        taps = geometry.R * geometry.S
        self.shape = conv.output_shape(x_shape, weight_shape)
        self._strides = nhwc_strides(self.shape)
        self.pixels = self.shape[0] * self.shape[2] * self.shape[3]
        blocks = conv_forward(device_of(like).capability, dtypes, geometry.C, geometry.K, taps)
        columns = ceil_div(geometry.K, blocks.block_cout)
        tiles = ceil_div(self.pixels, blocks.block_pixels)
        self._grid = persistent_programs(like, tiles, columns, blocks.resident), columns, 1
        self._num_warps = blocks.num_warps
        self._constants = {
            "GEOMETRY": geometry,
            "BLOCKS": blocks,
            "INT64": needs_int64(math.prod(x_shape), math.prod(self.shape)),
            "PRECISION": precision(dtypes.operands),
        }
        sizes = Sizes(*x_shape[2:], *self.shape[2:])
        self._numbers = sizes, self.pixels, x_shape[0] * x_shape[2] * x_shape[3]
        self.prepared = prepared

    def __call__(
        self,
        x: Tensor,
        norm: Norm,
        x_sums: Tensor | None,
        conv_weight: Tensor,
        addends: Addends,
        sums: Tensor | None,
    ) -> Tensor:
        """y. `conv_weight` is packed.

        The statistics of x are those of the accumulators `x_sums`, or of the norm if they are
        None. Adds to the accumulators `sums` unless None.
        """
        y = x.new_empty_strided(self.shape, self._strides, dtype=self.dtypes.y)
        launch_kernel(
            bn_relu_conv_forward_kernel,
            self._grid,
            (x, norm, x_sums, conv_weight, addends, y, sums, *self._numbers),
            self._constants,
            self._num_warps,
            self.prepared,
            (
                x_sums is None,
                addends.conv_bias is None,
                addends.residual is None,
                sums is None,
            ),
        )
        return y


def launch_bn_relu_conv_forward(
    x: Tensor, norm: Norm, conv_weight: Tensor, conv: Conv, epilogue: Epilogue
) -> Output:
    """See `Kernels.bn_relu_conv_forward`; for one group."""
    operands = epilogue.dtype or compute_dtype(x, conv_weight)
    dtypes = ConvDtypes(
        operands, x.dtype, operands if epilogue.residual is None else epilogue.residual.dtype
    )
    launch = ForwardLaunch(x, dtypes, x.shape, conv_weight.shape, conv)
    addends = Addends(epilogue.conv_bias, epilogue.residual)
    with on_device_of(x):
        sums = new_sums(x, conv_weight.shape[0]) if epilogue.with_stats else None
        weight = packed_weight(conv_weight, operands)
        y = launch(x, norm, None, weight, addends, sums)
        if sums is None:
            return Output(y, None)
        mean, var = finished_statistics(sums, launch.pixels)
        return Output(y, BatchStatistics(mean[0], var[0]))
