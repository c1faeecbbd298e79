"""Partial results of the programs of a grid, and what makes them whole in a fixed order.

Statistics are kept as (count, mean, M2), the sum of squares around the mean, and merged by the
formula of Chan, Golub and LeVeque (1979); the last program of a column of the grid to finish does
so, in float64. Sums over programs (weight gradients, the two sums of a batch norm's backward) are
many more numbers and get a launch of their own. No float is ever added atomically: two runs give
the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.launch import INTERPRETED

_BLOCK_PROGRAMS = tl.constexpr(32)
_IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def column_sums(tile):
    """Sums over the pixels of a float32 tile `[pixels, channels]`.

    Hardware adds in trees. The interpreter adds row by row, and in float64 so as to be no worse.
    """
    if _IS_INTERPRETED:
        return tl.sum(tile.to(tl.float64), 0).to(tl.float32)
    else:
        return tl.sum(tile, 0)


@triton.jit
def leading_bits(x):
    """The float32 numbers x without the last 16 bits of their mantissas."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_tile(count, pivot, offset, m2, tile, is_row, rows):
    """Statistics of some channels, and of a tile `[pixels, channels]` of `rows` > 0 pixels more.

    The mean is `pivot + offset`, with a pivot of few bits near the first tile's mean: subtracting
    that rounds next to nothing, however large a mean beside its deviation, and a constant channel
    has that constant for a mean.
    """
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
    """Count, mean and M2 of some programs, each `[programs, channels]`, in float64."""
    row = begin + tl.arange(0, _BLOCK_PROGRAMS)
    mask = (row < programs)[:, None] & is_channel[None, :]
    at = partials + row[:, None] * 4 * CHANNELS + channel[None, :]
    n = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    pivot = tl.load(at + CHANNELS, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    offset = tl.load(at + 2 * CHANNELS, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    m2 = tl.load(at + 3 * CHANNELS, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float64)
    return n, pivot + offset, m2


@triton.jit
def finish_statistics(
    count, pivot, offset, m2, partials, counters, mean_out, var_out, channel, is_channel,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Stores a program's statistics; the last of its column stores mean and variance of all.

    `partials` is `[programs, 4, CHANNELS]`, `counters` one zero for every column of the grid,
    whose first axis is the programs.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    own = partials + program * 4 * CHANNELS + channel
    tl.store(own, tl.zeros_like(m2) + count, mask=is_channel)
    tl.store(own + CHANNELS, pivot, mask=is_channel)
    tl.store(own + 2 * CHANNELS, offset, mask=is_channel)
    tl.store(own + 3 * CHANNELS, m2, mask=is_channel)
    tl.debug_barrier()  # every thread's stores come before the count
    counter = counters + tl.program_id(1)
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
        tl.store(mean_out + channel, mean_of_all.to(tl.float32), mask=is_channel)
        tl.store(var_out + channel, (m2_of_all / total).to(tl.float32), mask=is_channel)
        tl.store(counter, 0)


@triton.jit
def sum_partials_kernel(
    partials, programs, dconv_weight, sums,
    stride_k, stride_c, stride_r, stride_s,
    K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    WEIGHTS: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Sums `partials [programs, WEIGHTS + SUMS]`: a weight's gradient `[R, S, K, C]`, then sums."""
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
        at = k * stride_k + c * stride_c + tap // S * stride_r + tap % S * stride_s
        value = total.to(dconv_weight.dtype.element_ty)
        tl.store(dconv_weight + at, value, mask=element < WEIGHTS)
    if SUMS > 0:
        tl.store(sums + element - WEIGHTS, total, mask=is_element & (element >= WEIGHTS))


def launch_sum_partials(partials: Tensor, dconv_weight: Tensor | None, sums: Tensor | None) -> None:
    """Sums `partials` over its first axis into the weight's gradient and the sums.

    Args:
        partials: `[programs, R*S*K*C + 2*C]` float32, either part absent where its result is None.
        dconv_weight: `[K, C, R, S]`, any dtype and strides, or None.
        sums: `[2, C]` float32, or None.
    """
    weights = 0 if dconv_weight is None else dconv_weight.numel()
    count = 0 if sums is None else sums.numel()
    shape = (1, 1, 1, 1) if dconv_weight is None else tuple(dconv_weight.shape)
    strides = (0, 0, 0, 0) if dconv_weight is None else dconv_weight.stride()
    block = 1024 if INTERPRETED else 64
    sum_partials_kernel[(triton.cdiv(weights + count, block),)](
        partials, partials.shape[0], dconv_weight, sums, *strides, *shape, weights, count,
        BLOCK_ELEMENTS=block, num_warps=4,
    )  # fmt: skip


def statistics_memory(y: Tensor, programs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for mean and variance of y `[N, C, H, W]`, and for the partials of all programs."""
    channels = y.shape[1]
    mean, var = (y.new_empty(channels, dtype=torch.float32) for _ in range(2))
    return mean, var, y.new_empty((programs, 4, channels), dtype=torch.float32)


def no_statistics(y: Tensor) -> tuple[Tensor, Tensor]:
    """Two empty tensors in place of mean and variance."""
    return y.new_empty(0, dtype=torch.float32), y.new_empty(0, dtype=torch.float32)
