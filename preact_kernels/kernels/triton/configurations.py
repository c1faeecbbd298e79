"""Block shapes, warps and stages: as large as registers hold, as found by compiling.

A choice depends only on the shape, the dtype and the compute capability: all processes of a group
choose alike, and nothing is tuned at run time.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import triton

from preact_kernels.kernels.contract import Unit

HOPPER = 90  # wgmma reads operands from shared memory, which leaves registers for more pixels
BLACKWELL = 100
SMALL_SHARED_MEMORY = (86, 89)  # 99 KB a program, where others before Hopper have 163

# Of a pipelined loop: two tiles are copied while a third is computed. Triton 3.6 gives a loop of
# two stages a single buffer, which is filled and waited for in turn.
STAGES = 3

MAX_TAPS = 9
# Wider convolutions run in cuDNN, after a fused batch norm and ReLU: the prologue is bound by
# instruction issue, and tiles this narrow feed the tensor cores too slowly.
MAX_CHANNELS_1X1 = 256
MAX_CHANNELS_3X3 = 64
MAX_IEEE_PRODUCTS = 1024  # input channels times output channels
# Largest weight whose gradient fits in a program's registers beside the gradient of the input.
MAX_WEIGHTS_1X1 = 8 * 1024
MAX_WEIGHTS_3X3 = 4 * 1024


# Resident programs per multiprocessor of an elementwise kernel that reduces.
ELEMENTWISE_RESIDENT = 4


class ElementwiseBlocks(NamedTuple):
    """Launch configuration of an elementwise kernel: the shape of a tile, and warps."""

    block_pixels: int
    block_channels: int
    num_warps: int


class ConvBlocks(NamedTuple):
    """Launch configuration of a convolution kernel."""

    block_pixels: int
    block_cin: int
    block_cout: int
    num_warps: int
    num_stages: int  # of the loop over tiles
    num_tap_stages: int = 1  # of the inner loop over taps, unless it is unrolled
    resident: int = 1  # programs per multiprocessor


class BackwardBlocks(NamedTuple):
    """Launch configurations of the backward of a convolution."""

    input: ConvBlocks  # g and its sums
    weight: ConvBlocks  # the gradient of the weight
    both: ConvBlocks | None  # both in one pass; None where registers do not hold it


def _block(channels: int, largest: int) -> int:
    """The smallest power of two that holds the channels, from 16 (tensor cores) to `largest`."""
    return min(max(triton.next_power_of_2(channels), 16), largest)


def _is_ragged(channels: int, out_channels: int) -> bool:
    """Whether masks differ between the elements of a vector load, which takes registers."""
    return channels % 8 != 0 or out_channels % 8 != 0


@functools.cache
def elementwise(channels: int) -> ElementwiseBlocks:
    """Tiles of 4,096 elements, up to 128 channels wide; 2,048 where narrow or masked."""
    block_channels = min(triton.next_power_of_2(channels), 128)
    elements = 4096 if channels % max(block_channels, 32) == 0 else 2048
    return ElementwiseBlocks(elements // block_channels, block_channels, 8)


def is_fused(conv_weight_shape: Sequence[int], groups: int, precision: str) -> bool:
    """Whether a convolution runs in a fused kernel; otherwise PyTorch's convolution is called.

    Args:
        conv_weight_shape: `[K, C / groups, R, S]`.
        groups: number of groups.
        precision: "ieee" for float32 without tensor cores, which needs more registers than wide
            tiles leave; else "tf32".
    """
    out_channels, channels, kernel_h, kernel_w = conv_weight_shape
    taps = kernel_h * kernel_w
    max_channels = MAX_CHANNELS_1X1 if taps == 1 else MAX_CHANNELS_3X3
    if precision == "ieee" and channels * out_channels > MAX_IEEE_PRODUCTS:
        return False
    return groups == 1 and taps <= MAX_TAPS and max(channels, out_channels) <= max_channels


def _has_float32_side(unit: Unit) -> bool:
    """Whether x or y is wider than the products, and takes more registers and memory."""
    return max(unit.x_dtype.itemsize, unit.y_dtype.itemsize) > unit.dtype.itemsize


@functools.cache
def conv_forward(capability: int, unit: Unit) -> ConvBlocks:
    """Launch configuration of the forward of a unit."""
    out_channels, channels, *kernel = unit.weight_shape
    taps = math.prod(kernel)
    is_half = unit.dtype.itemsize == 2
    # Buffers hold the weights of all blocks of input channels; on Blackwell, wide blocks spill too.
    is_wide = taps == 1 and channels > (128 if is_half and capability < BLACKWELL else 64)
    cin, cout = _block(channels, 64), _block(out_channels, 64 if is_wide else 128)
    pixels = 128 if capability == HOPPER and is_half and cout <= 64 else 64
    if taps > 1 and _has_float32_side(unit):
        pixels = 64
    takes_registers = _is_ragged(channels, out_channels) or (channels > 64 and capability < HOPPER)
    is_narrowing = taps > 1 and cin == 64 and cout < 64 and capability != HOPPER
    if not is_half and (takes_registers or is_narrowing):
        pixels = 32
    if channels > 128:  # room for the buffers of all blocks of input channels
        pixels = min(pixels, 64 if is_half else 16)
        is_small_or_masked = cout < 64 or channels % cin != 0
        if is_half and (unit.x_dtype.itemsize == 4 or (capability < HOPPER and is_small_or_masked)):
            pixels = 32
    stages = 1 if _is_ragged(channels, out_channels) else STAGES
    if taps == 1:
        has_room = capability == HOPPER or (is_half and capability < HOPPER)
        if capability in SMALL_SHARED_MEMORY and channels * cout > 64 * 128:
            has_room = False
        resident = 2 if is_half and cout <= 16 and channels <= 64 else 1
        return ConvBlocks(pixels, cin, cout, 8, stages if has_room else 1, resident=resident)
    warps = 4 if is_half and (capability < HOPPER or cin * cout <= 256) else 8
    widest = max(cin, cout)
    is_narrow = is_half and widest <= 32 and stages > 1
    resident = (4 if widest <= 16 else 2) if is_narrow else 1
    return ConvBlocks(pixels, cin, cout, warps, 1, stages, resident)


@functools.cache
def conv_backward(capability: int, unit: Unit) -> BackwardBlocks:
    """Launch configurations of the backward of a unit.

    A program that holds the weight gradients of all taps in registers has fewer pixels per tile.
    """
    out_channels, channels, *kernel = unit.weight_shape
    taps = math.prod(kernel)
    dtype = unit.dtype
    cin = _block(channels, 64)
    cout = _block(out_channels, 128 if taps == 1 and dtype.itemsize == 2 else 64)
    weights = taps * cin * cout * triton.cdiv(out_channels, cout)
    pixels, warps = 64 if capability == HOPPER and dtype.itemsize == 2 else 32, 8
    weight_warps = 4 if cin * cout <= 256 and dtype.itemsize == 2 else warps
    stages = STAGES
    if taps > 1 and cin * cout > 2048 and _has_float32_side(unit):
        pixels = 32
    if _is_ragged(channels, out_channels):  # no asynchronous copies of 2 bytes
        pixels, stages = 16, 1
        if dtype.itemsize == 2:
            weight_warps = 4
    weight_pixels = pixels if taps == 1 else min(pixels, 32)
    if taps > 1 and cin * cout > 2048 and capability < HOPPER:
        weight_pixels = 16
    # Triton 3.6 fails to pipeline the products of this kernel for Blackwell.
    weight = ConvBlocks(
        weight_pixels, cin, min(cout, 64), weight_warps, stages if capability < BLACKWELL else 1
    )
    if taps > 1:
        in_one_pass = weights <= MAX_WEIGHTS_3X3 and unit.y_dtype.itemsize == 2
        both = ConvBlocks(16, cin, cout, 2, 1, resident=4) if in_one_pass else None
        input_warps = 4 if cin * cout <= 256 and dtype.itemsize == 2 else warps
        pixels = pixels if dtype.itemsize == 2 else 16
        if stages == 1 and (dtype.itemsize == 2 or capability < BLACKWELL):
            pixels, input_warps = 32 if capability < HOPPER or dtype.itemsize == 4 else 16, 4
            cin = min(cin, 16)
        return BackwardBlocks(ConvBlocks(pixels, cin, cout, input_warps, 1, stages), weight, both)
    is_roomy = capability == HOPPER and dtype.itemsize == 2
    if capability >= BLACKWELL and dtype.itemsize == 2 and cin == 16 and weights == 2048:
        pixels = 64  # a tile of 32 spills
    if weights > 2048:
        pixels = min(pixels, 32 if dtype.itemsize == 2 else 16)
    if weights > 8192 and dtype.itemsize == 4:  # no room for two buffers of every block of dy
        stages = 1
    most_weights = 8192 if capability == HOPPER else 2048
    if capability >= HOPPER and unit.y_dtype.itemsize > dtype.itemsize and weights > most_weights:
        pixels = 16
    max_weights = MAX_WEIGHTS_1X1 if is_roomy else 2048
    if cin > 16 and cout < out_channels and weights <= max_weights:
        pixels = 16  # beside the weight gradients of several blocks of output channels
    one = ConvBlocks(pixels, cin, cout, warps, stages if capability == HOPPER else 1)
    return BackwardBlocks(one, weight, one if weights <= max_weights else None)
