"""Sums over the programs of a grid, with the same bits in every run.

Fused convolutions add statistics and the two sums of batch norm's backward to exact integer
accumulators by atomic operations, so the order of programs does not matter. The next kernel reads
them there. Of other sums, each program stores a partial result, and a separate launch adds these in
a fixed order: there are many more elements, or no zeroed memory to add to.

Accumulators are `[2, 6, channels]` int64, initially zero, for two sums per channel. A float64 value
is split into five words of 48 bits with the units 2^-96, 2^-48, 1, 2^48 and 2^96, which leaves room
for sums over 2^15 programs. Only the part of a value below 2^-96 is lost. The sixth word counts
NaN, +inf and -inf in three fields of 21 bits; a value of 2^143 or more counts as infinite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.launch import (
    INTERPRETED,
    PreparedLaunches,
    aligned_rows,
    ceil_div,
    launch_kernel,
    wait_for_predecessors,
)

WORDS = 6

_WORDS = tl.constexpr(WORDS)
_IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def column_sums(tile):
    """Sums a float32 tile `[..., channels]` over all but the last axis.

    A GPU adds in a tree. The interpreter adds row by row, and in float64 to be as accurate.
    """
    if len(tile.shape) == 3:
        return column_sums(tl.reshape(tile, [tile.shape[0] * tile.shape[1], tile.shape[2]]))
    elif _IS_INTERPRETED:
        return tl.sum(tile.to(tl.float64), 0).to(tl.float32)
    else:
        return tl.sum(tile, 0)


@triton.jit
def empty_sums(TILE_PIXELS: tl.constexpr, TILE_CHANNELS: tl.constexpr, FOLDED: tl.constexpr):
    """Zeros to which `add_rows` adds tiles `[pixels, channels]`, without exchange between threads.

    After the loop over tiles, `column_sums` sums them over threads. If `FOLDED`, they are
    `[pixels / 16, 8, channels]`: a thread that has row r of a product also has row r + 8.
    """
    if FOLDED:
        return tl.zeros([TILE_PIXELS // 16, 8, TILE_CHANNELS], tl.float32)
    else:
        return tl.zeros([TILE_PIXELS, TILE_CHANNELS], tl.float32)


@triton.jit
def add_rows(sums, tile):
    """Adds a float32 tile to sums from `empty_sums`."""
    if len(sums.shape) == 3:
        pairs = tl.reshape(tile, [sums.shape[0], 2, 8, sums.shape[2]])
        return sums + tl.sum(pairs, 1)
    else:
        return sums + tile


@triton.jit
def as_pivot(mean):
    """A float32 mean without the last 8 bits: values minus it do not all round the same way."""
    return (mean.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)


@triton.jit
def empty_moments(TILE_CHANNELS: tl.constexpr):
    """Moments of no tiles: number of tiles, pivot, sums of x - pivot and of (x - pivot)^2.

    All but the number are `[channels]`. The pivot is near the mean: x - pivot is exact if the mean
    is large relative to the deviation. A program adds tiles in pieces, in a loop over `next_piece`,
    since a branch in the loop over tiles would take more registers.
    """
    zeros = tl.zeros([TILE_CHANNELS], tl.float32)
    return tl.full([], 0, tl.int32), zeros, zeros, zeros


@triton.jit
def next_piece(moments, tiles, IN_PIECES: tl.constexpr = True):
    """Begin and end of the next piece of a program's tiles, which are `tl.num_programs(0)` apart.

    The first piece has 16 tiles, or all unless `IN_PIECES`. Each later piece has 7 times the tiles
    of all earlier pieces. After the last piece, begin >= `tiles`.
    """
    begin = (tl.program_id(0) + moments[0] * tl.num_programs(0)).to(tiles.dtype)
    if not IN_PIECES:
        return begin, tiles
    else:
        step = tl.maximum(7 * moments[0], 16) * tl.num_programs(0)
        return begin, tl.minimum(begin + step, tiles)


@triton.jit
def count_pixels(tiles, pixels, TILE_PIXELS: tl.constexpr):
    """Number of pixels in a program's `tiles`, in float64. Only the last tile may be partial."""
    last = (tl.program_id(0) + (tiles - 1) * tl.num_programs(0)).to(tl.int64)
    missing = TILE_PIXELS - tl.minimum(pixels - last * TILE_PIXELS, TILE_PIXELS)
    return tiles.to(tl.float64) * TILE_PIXELS - missing


@triton.jit
def begin_piece(
    moments, TILE_PIXELS: tl.constexpr, TILE_CHANNELS: tl.constexpr, FOLDED: tl.constexpr
):
    """Replaces the sums of moments by `empty_sums` with the same total, to which tiles are added.

    The new pivot is the mean of all earlier pieces. The first piece uses the mean of its first
    tile, which may be far from the mean of all: sums over many tiles would be inaccurate.
    """
    tiles, pivot, shifted, squares = moments
    count = tiles.to(tl.float32) * TILE_PIXELS
    near = pivot + shifted / tl.maximum(count, 1.0)
    near = tl.where(tl.abs(near) < float("inf"), as_pivot(near), pivot)
    shift = pivot - near
    total = shifted + count * shift
    squares += shift * (shifted + total)
    zeros = empty_sums(TILE_PIXELS, TILE_CHANNELS, FOLDED)
    share: tl.constexpr = TILE_CHANNELS / zeros.numel  # a power of two
    return tiles, near, zeros + total * share, zeros + squares * share


@triton.jit
def add_tile(moments, tile, is_row, left):
    """Adds a tile `[pixels, channels]` to moments; `left` pixels from its begin on are valid."""
    tiles, pivot, total, squares = moments
    if tiles == 0:
        rows = tl.minimum(left, tile.shape[0])
        near = column_sums(tl.where(is_row[:, None], tile, 0.0)) / rows.to(tl.float32)
        pivot = tl.where(tl.abs(near) < float("inf"), as_pivot(near), pivot)
    shifted = tl.where(is_row[:, None], tile - pivot[None, :], 0.0)
    return tiles + 1, pivot, add_rows(total, shifted), add_rows(squares, shifted * shifted)


@triton.jit
def end_piece(moments):
    """Reduces the sums of moments to `[channels]`."""
    tiles, pivot, shifted, squares = moments
    CHANNELS: tl.constexpr = pivot.shape[0]
    if CHANNELS <= 32:  # one reduction takes fewer registers
        ROWS: tl.constexpr = shifted.numel // CHANNELS
        both = column_sums(tl.reshape(tl.join(shifted, squares), [ROWS, 2 * CHANNELS]))
        shifted, squares = tl.split(tl.reshape(both, [CHANNELS, 2]))
        return tiles, pivot, shifted, squares
    else:
        return tiles, pivot, column_sums(shifted), column_sums(squares)


@triton.jit
def one_per_thread(values):
    """Spreads the values over the threads of the program.

    After a reduction of a tile, many threads hold each value, and each thread holds many values.
    """
    return tl.gather(values, tl.arange(0, values.shape[0]), 0)


@triton.jit
def add_exact(sums, value, channel, is_channel, CHANNELS: tl.constexpr):
    """Adds a tile of float64 values to accumulators `[6, CHANNELS]`.

    Skips words that are zero, as most are. Uses integer operations on the bits of the values: on
    many GPUs, float64 arithmetic and conversions are far slower.
    """
    bits = value.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32)
    fraction = bits & ((1 << 52) - 1)
    is_nan = (exponent == 0x7FF) & (fraction != 0)
    is_special = exponent >= 1023 + 143
    one = tl.where(is_nan, 1, tl.where(bits > 0, 1 << 21, 1 << 42)).to(tl.int64)
    tl.atomic_add(sums + 5 * CHANNELS + channel, one, mask=is_channel & is_special, sem="relaxed")
    # |value| = mantissa * 2^(lowest - 96), except for denormals, which are far below 2^-96. The 53
    # bits of the mantissa span up to three words.
    lowest = exponent - (1023 + 52 - 96)
    mantissa = (fraction | (1 << 52)) >> tl.minimum(tl.maximum(-lowest, 0), 63).to(tl.int64)
    mantissa = tl.where(is_special, 0, mantissa)
    lowest = tl.maximum(lowest, 0)
    first, shift = lowest // 48, (lowest % 48).to(tl.int64)
    low, middle = mantissa << shift, mantissa >> (48 - shift)
    ones: tl.constexpr = (1 << 48) - 1
    digits = low & ones, middle & ones, mantissa >> tl.minimum(96 - shift, 63)
    at = sums + first * CHANNELS + channel
    for i in tl.static_range(3):
        signed = tl.where(bits < 0, -digits[i], digits[i])
        mask = is_channel & (signed != 0)
        tl.atomic_add(at + i * CHANNELS, signed, mask=mask, sem="relaxed")


@triton.jit
def carry(words):
    """Normalizes words: all but the highest are in [0, 2^48)."""
    carried = ()
    over = 0
    for word in tl.static_range(4):
        digits = words[word] + over
        over = digits >> 48
        carried = carried + (digits - (over << 48),)
    return carried + (words[4] + over,)


@triton.jit
def load_exact(sums, channel, is_channel, CHANNELS):
    """The sums of a tile of channels in float64."""
    words = ()
    for word in tl.static_range(5):
        words = words + (tl.load(sums + word * CHANNELS + channel, mask=is_channel, other=0),)
    # Words of a negative sum would cancel each other: use the words of its negation.
    words = carry(words)
    is_negative = words[4] < 0
    magnitudes = ()
    for word in tl.static_range(5):
        magnitudes = magnitudes + (tl.where(is_negative, -words[word], words[word]),)
    magnitudes = carry(magnitudes)
    total = tl.zeros_like(channel).to(tl.float64)
    for word in tl.static_range(5):
        total += magnitudes[word].to(tl.float64) * 2.0 ** (48 * word - 96)
    total = tl.where(is_negative, -total, total)
    special = tl.load(sums + 5 * CHANNELS + channel, mask=is_channel, other=0)
    infinity: tl.constexpr = float("inf")
    total += tl.where(special >> 21 & 0x1FFFFF != 0, infinity, 0.0)
    total -= tl.where(special >> 42 != 0, infinity, 0.0)
    return tl.where(special & 0x1FFFFF != 0, float("nan"), total)


@triton.jit
def add_moments(moments, pixels, TILE_PIXELS, sums, channel, is_channel, CHANNELS: tl.constexpr):
    """Adds the sum and the sum of squares of a program's tiles to accumulators."""
    tiles, pivot, shifted, squares = moments
    count = count_pixels(tiles, pixels, TILE_PIXELS)
    pivot = one_per_thread(pivot).to(tl.float64)
    shifted = one_per_thread(shifted).to(tl.float64)
    squares = one_per_thread(squares).to(tl.float64)
    total = tl.fma(pivot, tl.zeros_like(pivot) + count, shifted)
    add_exact(sums, total, channel, is_channel, CHANNELS)
    # sum(x^2) = sum((x - pivot)^2) + pivot * (sum(x) + sum(x - pivot))
    squares = tl.fma(pivot, total + shifted, squares)
    add_exact(sums + _WORDS * CHANNELS, squares, channel, is_channel, CHANNELS)


@triton.jit
def reciprocal(count):
    """1 / count with about 46 bits, by a step of Newton's method from float32."""
    exact = count.to(tl.float64)
    found = (1.0 / count.to(tl.float32)).to(tl.float64)
    return tl.fma(tl.fma(-exact, found, 1.0), found, found)


@triton.jit
def divided(total, count, inverse):
    """total / count, rounded to nearest, in fewer operations than a division.

    Corrects `total * inverse` by its exact remainder: P. Markstein, IBM J. Res. Dev. 34, 1990.
    `inverse` is the `reciprocal` of the count.
    """
    quotient = total * inverse
    remainder = tl.fma(-quotient, tl.zeros_like(quotient) + count.to(tl.float64), total)
    corrected = tl.fma(remainder, tl.zeros_like(quotient) + inverse, quotient)
    return tl.where(tl.abs(quotient) < float("inf"), corrected, quotient)


@triton.jit
def load_statistics(sums, count, channel, is_channel, CHANNELS):
    """Mean and biased variance over `count` pixels, in float32.

    E[x^2] - mean^2 is accurate enough, as both terms are accurate to float64.
    """
    inverse = reciprocal(count)
    mean = divided(load_exact(sums, channel, is_channel, CHANNELS), count, inverse)
    squares = load_exact(sums + _WORDS * CHANNELS, channel, is_channel, CHANNELS)
    variance = tl.fma(-mean, mean, divided(squares, count, inverse))
    variance = tl.where(variance < 0, 0.0, variance)
    return one_per_thread(mean.to(tl.float32)), one_per_thread(variance.to(tl.float32))


@triton.jit
def add_two_sums(first, second, sums, channel, is_channel, CHANNELS: tl.constexpr):
    """Adds two float32 values per channel to accumulators."""
    first, second = one_per_thread(first).to(tl.float64), one_per_thread(second).to(tl.float64)
    add_exact(sums, first, channel, is_channel, CHANNELS)
    add_exact(sums + _WORDS * CHANNELS, second, channel, is_channel, CHANNELS)


@triton.jit
def load_two_sums(sums, channel, is_channel, CHANNELS):
    """Two float32 sums per channel, from float32 `[2, CHANNELS]` or from accumulators."""
    if sums.dtype.element_ty == tl.int64:
        first = load_exact(sums, channel, is_channel, CHANNELS).to(tl.float32)
        second = load_exact(sums + _WORDS * CHANNELS, channel, is_channel, CHANNELS)
        return one_per_thread(first), one_per_thread(second.to(tl.float32))
    else:
        first = tl.load(sums + channel, mask=is_channel, other=0.0)
        return first, tl.load(sums + CHANNELS + channel, mask=is_channel, other=0.0)


def new_sums(x: Tensor, channels: int) -> Tensor:
    """Accumulators `[1, 2, 6, channels]` on the device of x."""
    return x.new_zeros((1, 2, WORDS, channels), dtype=torch.int64)


@triton.jit(do_not_specialize=["sums", "count", "first", "second", "stride", "channels"])
def finish_sums_kernel(
    sums,
    count,
    first,
    second,
    stride,
    channels,
    ARE_STATISTICS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Converts accumulators `[units, 2, 6, channels]` to float32 `first` and `second`.

    These are `[units, channels]` with rows `stride` elements apart: mean and variance, or the two
    sums. Grid: channel tiles, units.
    """
    wait_for_predecessors()
    channel = tl.program_id(0) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_channel = channel < channels
    unit = tl.program_id(1)
    sums += unit * (2 * _WORDS * channels)
    if ARE_STATISTICS:
        one, other = load_statistics(sums, count, channel, is_channel, channels)
    else:
        one, other = load_two_sums(sums, channel, is_channel, channels)
    tl.store(first + unit * stride + channel, one, mask=is_channel)
    tl.store(second + unit * stride + channel, other, mask=is_channel)


def _launch_finish(
    sums: Tensor, count: int, first: Tensor, second: Tensor, prepared: PreparedLaunches | None
) -> None:
    """A program owns a tile of channels of one unit. If `count` is 0, computes sums."""
    units, _, _, channels = sums.shape
    tile = 128
    launch_kernel(
        finish_sums_kernel,
        (ceil_div(channels, tile), units, 1),
        (sums, count, first, second, first.stride(0), channels),
        {"ARE_STATISTICS": count > 0, "TILE_CHANNELS": tile},
        4,
        prepared,
        count > 0,
    )


def finished_statistics(
    sums: Tensor, count: int, prepared: PreparedLaunches | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance `[units, channels]` from accumulators over `count` values per channel.

    The two do not share memory, as results of a registered op must not. For `prepared` see
    `launch_kernel`; use one per number of channels.
    """
    units, _, _, channels = sums.shape
    mean, var = (aligned_rows(sums, units, channels, torch.float32) for _ in range(2))
    _launch_finish(sums, count, mean, var, prepared)
    return mean, var


def finished_sums(sums: Tensor, prepared: PreparedLaunches | None = None) -> Tensor:
    """Float32 sums `[units, 2, channels]` from accumulators; `prepared` as in the one above."""
    units, _, _, channels = sums.shape
    results = aligned_rows(sums, units, 2 * channels, torch.float32).view(units, 2, channels)
    _launch_finish(sums, 0, results[:, 0], results[:, 1], prepared)
    return results


@triton.jit(do_not_specialize=range(12))  # one kernel for all shapes
def sum_partials_kernel(
    partials,
    unit_stride,
    programs,
    dconv_weight,
    K,
    C,
    S,
    taps,
    stride_k,
    stride_c,
    stride_r,
    stride_s,
    TILE_PROGRAMS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums `partials [units, programs, R, S, K, C]` over programs.

    Units of `partials` are `unit_stride` elements apart. `dconv_weight` is `[units, K, C, R, S]`
    with the given strides. Grid: tiles of elements, units.
    """
    wait_for_predecessors()
    weights = taps * K * C
    element = tl.program_id(0) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    is_element = element < weights
    unit = tl.program_id(1).to(tl.int64)
    partials += unit * unit_stride
    total = tl.zeros([TILE_ELEMENTS], tl.float32)
    for begin in tl.range(0, programs, TILE_PROGRAMS, num_stages=STAGES):
        row = begin + tl.arange(0, TILE_PROGRAMS)
        mask = (row < programs)[:, None] & is_element[None, :]
        at = row.to(tl.int64)[:, None] * weights + element[None, :]
        total += column_sums(tl.load(partials + at, mask=mask, other=0.0))
    c, k, tap = element % C, element // C % K, element // (C * K)
    at = k * stride_k + c * stride_c + tap // S * stride_r + tap % S * stride_s
    value = total.to(dconv_weight.dtype.element_ty)
    tl.store(dconv_weight + unit * weights + at, value, mask=is_element)


def merge_stages(size: int, tile: int) -> int:
    """Stages of a loop over tiles of partial results: a pipeline pays off from three tiles on."""
    return 3 if size > 2 * tile else 1


def launch_sum_partials(
    partials: Tensor,
    dconv_weights: Tensor,
    prepared: PreparedLaunches | None = None,
    of_image: int | None = None,
) -> None:
    """Sums `partials` over programs into `dconv_weights`. A program owns a tile of elements.

    Args:
        partials: `[units, programs, R*S*K*C]` float32; each unit is dense.
        dconv_weights: `[units, K, C, R, S]`, any dtype; each unit is dense, in any memory format.
        prepared: see `launch_kernel`; use one per shape of partials and dtype of weights.
        of_image: elements of one image, whose sums have the same bits in any batch. None: the
            elements are not those of images.
    """
    units, programs, weights = partials.shape
    _, K, C, R, S = dconv_weights.shape
    tile = 64 if (of_image or weights) > 8192 else 16  # few elements are spread over more programs
    tile_programs = 2048 // tile
    if INTERPRETED:
        tile, tile_programs = 1024, 32
    launch_kernel(
        sum_partials_kernel,
        (ceil_div(weights, tile), units, 1),
        (
            partials,
            partials.stride(0),
            programs,
            dconv_weights,
            K,
            C,
            S,
            R * S,
            *dconv_weights.stride()[1:],
        ),
        {
            "TILE_PROGRAMS": tile_programs,
            "TILE_ELEMENTS": tile,
            "STAGES": merge_stages(programs, tile_programs),
        },
        4,
        prepared,
    )
