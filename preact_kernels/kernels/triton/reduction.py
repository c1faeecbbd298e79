"""Reductions over the programs of a grid, in a fixed order.

Statistics are (count, mean, M2), M2 being the sum of squares around the mean. They are merged by
the formula of Chan, Golub and LeVeque (1979), in float64, by the last program of a grid column to
finish. Sums over programs (gradients of the convolution's weight, and the two sums of batch norm's
backward) have many more elements and get a launch of their own. There are no atomic additions of
floats: two runs give the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import BatchStatistics
from preact_kernels.kernels.triton.conv import Strides
from preact_kernels.kernels.triton.launch import INTERPRETED, ceil_div, counters

_BLOCK_PROGRAMS = tl.constexpr(32)
_IS_INTERPRETED = tl.constexpr(INTERPRETED)


class Statistics(NamedTuple):
    """The tensors that a kernel needs to compute statistics of its output."""

    partials: Tensor  # [programs, 4, channels]: count, pivot, offset and M2
    counters: Tensor  # one zero per grid column
    mean: Tensor  # [channels]
    var: Tensor  # [channels]

    def result(self) -> BatchStatistics:
        """The statistics alone."""
        return BatchStatistics(self.mean, self.var)


@triton.jit
def column_sums(tile):
    """Sums over the pixels of a float32 tile `[pixels, channels]`.

    A GPU adds in a tree. The interpreter adds row by row, and here in float64 to be as accurate.
    """
    if _IS_INTERPRETED:
        return tl.sum(tile.to(tl.float64), 0).to(tl.float32)
    else:
        return tl.sum(tile, 0)


@triton.jit
def leading_bits(x):
    """float32 x with the last 16 bits of the mantissa cleared."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def empty_moments(BLOCK_CHANNELS: tl.constexpr):
    """count, pivot, offset and M2 of zero pixels; mean = pivot + offset.

    The pivot is near the mean of the first tile and has few bits. Subtracting it is nearly exact,
    even if the mean is large relative to the deviation. The mean of a constant channel is exact.
    """
    zeros = tl.zeros([BLOCK_CHANNELS], tl.float32)
    return tl.full([], 0.0, tl.float32), zeros, zeros, zeros


@triton.jit
def add_tile(moments, tile, is_row, rows):
    """The moments after one more tile `[pixels, channels]`, of `rows` > 0 valid pixels."""
    count, pivot, offset, m2 = moments
    rows = rows.to(tl.float32)
    near = leading_bits(column_sums(tl.where(is_row[:, None], tile, 0.0)) / rows)
    is_first = tl.zeros_like(m2) + count == 0
    pivot = tl.where(is_first & (tl.abs(near) < float("inf")), near, pivot)
    shifted = tl.where(is_row[:, None], tile - pivot[None, :], 0.0)
    tile_offset = column_sums(shifted) / rows
    centred = tl.where(is_row[:, None], shifted - tile_offset[None, :], 0.0)
    total = count + rows
    delta = tile_offset - offset
    m2 += column_sums(centred * centred) + delta * delta * (count * rows / total)
    merged = offset + delta * (rows / total)
    offset = tl.where(tl.abs(offset) == float("inf"), offset + tile_offset, merged)
    return total, pivot, offset, m2


@triton.jit
def load_partials(partials, begin, programs, channel, is_channel, CHANNELS: tl.constexpr):
    """Count, mean and M2 of a block of programs, each `[programs, channels]`, in float64."""
    row = begin + tl.arange(0, _BLOCK_PROGRAMS)
    mask = (row < programs)[:, None] & is_channel[None, :]
    at = partials + row[:, None] * 4 * CHANNELS + channel[None, :]
    n = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    pivot = tl.load(at + CHANNELS, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    offset = tl.load(at + 2 * CHANNELS, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    m2 = tl.load(at + 3 * CHANNELS, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    return n, pivot + offset, m2


@triton.jit
def finish_statistics(moments, statistics, channel, is_channel, CHANNELS: tl.constexpr):
    """Stores the moments of a program; the last one of its column stores mean and variance.

    `statistics` is a `Statistics`. The first axis of the grid is the programs.
    """
    count, pivot, offset, m2 = moments
    partials = statistics.partials
    program, programs = tl.program_id(0), tl.num_programs(0)
    own = partials + program * 4 * CHANNELS + channel
    tl.store(own, tl.zeros_like(m2) + count, mask=is_channel)
    tl.store(own + CHANNELS, pivot, mask=is_channel)
    tl.store(own + 2 * CHANNELS, offset, mask=is_channel)
    tl.store(own + 3 * CHANNELS, m2, mask=is_channel)
    tl.debug_barrier()  # the stores of all threads precede the increment
    counter = statistics.counters + tl.program_id(1)
    if tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1:
        total = tl.zeros_like(m2).to(tl.float64)
        sum_of_all = total
        for begin in range(0, programs, _BLOCK_PROGRAMS):
            n, mean, _ = load_partials(partials, begin, programs, channel, is_channel, CHANNELS)
            total += tl.sum(n, 0)
            sum_of_all += tl.sum(n * mean, 0)
        total = tl.where(is_channel, total, 1.0)
        mean_of_all = sum_of_all / total
        m2_of_all = tl.zeros_like(mean_of_all)
        for begin in range(0, programs, _BLOCK_PROGRAMS):
            n, mean, s = load_partials(partials, begin, programs, channel, is_channel, CHANNELS)
            delta = mean - mean_of_all[None, :]
            m2_of_all += tl.sum(tl.where(n > 0, s + n * delta * delta, 0.0), 0)
        variance = (m2_of_all / total).to(tl.float32)
        tl.store(statistics.mean + channel, mean_of_all.to(tl.float32), mask=is_channel)
        tl.store(statistics.var + channel, variance, mask=is_channel)
        tl.store(counter, 0)


@triton.jit
def sum_partials_kernel(
    partials,
    programs,
    dconv_weight,
    sums,
    strides,
    K: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    """Sums `partials [programs, WEIGHTS + SUMS]` over programs: `[R, S, K, C]` weights, then sums.

    Grid: blocks of elements.
    """
    element = tl.program_id(0) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    is_element = element < WEIGHTS + SUMS
    total = tl.zeros([BLOCK_ELEMENTS], tl.float32)
    for begin in range(0, programs, _BLOCK_PROGRAMS):
        row = begin + tl.arange(0, _BLOCK_PROGRAMS)
        mask = (row < programs)[:, None] & is_element[None, :]
        at = row.to(tl.int64)[:, None] * (WEIGHTS + SUMS) + element[None, :]
        total += column_sums(tl.load(partials + at, mask=mask, other=0.0))
    if WEIGHTS > 0:
        c, k, tap = element % C, element // C % K, element // (C * K)
        at = k * strides.k + c * strides.c + tap // S * strides.r + tap % S * strides.s
        value = total.to(dconv_weight.dtype.element_ty)
        tl.store(dconv_weight + at, value, mask=element < WEIGHTS)
    if SUMS > 0:
        tl.store(sums + element - WEIGHTS, total, mask=is_element & (element >= WEIGHTS))


def launch_sum_partials(partials: Tensor, dconv_weight: Tensor | None, sums: Tensor | None) -> None:
    """Sums `partials` over programs into `dconv_weight` and `sums`.

    A program owns a block of elements, of all programs' partials.

    Args:
        partials: `[programs, R*S*K*C + 2*C]` float32, without the part whose result is None.
        dconv_weight: `[K, C, R, S]`, any dtype and strides, or None.
        sums: `[2, C]` float32, or None.
    """
    K, C, _, S = (1, 1, 1, 1) if dconv_weight is None else dconv_weight.shape
    block = 1024 if INTERPRETED else 64
    sum_partials_kernel[(ceil_div(partials.shape[1], block),)](
        partials,
        partials.shape[0],
        dconv_weight,
        sums,
        None if dconv_weight is None else Strides(*dconv_weight.stride()),
        K=K,
        C=C,
        S=S,
        WEIGHTS=0 if dconv_weight is None else dconv_weight.numel(),
        SUMS=0 if sums is None else sums.numel(),
        BLOCK_ELEMENTS=block,
        num_warps=4,
    )


def new_statistics(x: Tensor, channels: int, programs: int, columns: int) -> Statistics:
    """Uninitialized statistics for a grid of `programs` by `columns`, on the device of x."""
    mean, var = (x.new_empty(channels, dtype=torch.float32) for _ in range(2))
    partials = x.new_empty((programs, 4, channels), dtype=torch.float32)
    return Statistics(partials, counters(x, columns), mean, var)
