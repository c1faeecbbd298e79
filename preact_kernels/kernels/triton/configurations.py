"""Block shapes, warps and stages by a rule, found by compiling: as large as registers hold.

A choice depends on the shape, the dtype and the compute capability alone, so that all processes
of a group choose alike and nothing is tuned while a program runs.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

HOPPER = 90  # whose wgmma reads operands from shared memory: registers are left for more pixels
BLACKWELL = 100

MOST_TAPS = 9
# Wider convolutions are left to cuDNN, behind a fused batch norm and ReLU: the prologue is bound by
# instruction issue, and tiles this narrow feed the tensor cores too slowly.
MOST_CHANNELS_OF_1X1 = 256
MOST_CHANNELS_OF_3X3 = 64
MOST_PRODUCTS_IN_IEEE = 1024  # input times output channels
# Weights of a program whose gradient registers hold beside that of the input.
MOST_WEIGHTS_OF_1X1 = 16 * 1024
MOST_WEIGHTS_OF_3X3 = 4 * 1024


class Elementwise(NamedTuple):
    """Of a kernel that reads and writes `[pixels, channels]` tiles."""

    block_pixels: int
    block_channels: int
    num_warps: int


class Conv(NamedTuple):
    """Of a convolution, forward or backward, over tiles of `block_pixels`."""

    block_pixels: int
    block_cin: int
    block_cout: int
    num_warps: int
    num_stages: int  # of the loop over tiles
    num_tap_stages: int = 1  # of the loop over taps inside, where it is a loop


class Backward(NamedTuple):
    """Of a convolution's backward."""

    input: Conv  # g and its sums alone
    weight: Conv  # the weight's gradient alone
    both: Conv | None  # all in one pass, where registers hold the weight's gradient


def _block(channels: int, most: int) -> int:
    """A power of two that tensor cores take (at least 16) and no larger than it must be."""
    return min(max(triton.next_power_of_2(channels), 16), most)


def _is_ragged(channels: int, out_channels: int) -> bool:
    """Whether elements are masked one by one, which takes registers."""
    return channels % 8 != 0 or out_channels % 8 != 0


@functools.cache
def elementwise(channels: int) -> Elementwise:
    """Tiles as wide as the channels up to 128, of 4,096 elements; half where narrow or masked."""
    block_channels = min(triton.next_power_of_2(channels), 128)
    elements = 4096 if channels % max(block_channels, 32) == 0 else 2048
    return Elementwise(elements // block_channels, block_channels, 8)


def is_fused(conv_weight_shape: Sequence[int], groups: int, precision: str) -> bool:
    """Whether a convolution has kernels of its own here, or is PyTorch's.

    Args:
        conv_weight_shape: `[K, C / groups, R, S]`.
        groups: of the convolution.
        precision: "ieee" for products of float32 without tensor cores, which take more registers
            than wide tiles leave; "tf32" for all others.
    """
    out_channels, channels, kernel_h, kernel_w = conv_weight_shape
    taps = kernel_h * kernel_w
    most = MOST_CHANNELS_OF_1X1 if taps == 1 else MOST_CHANNELS_OF_3X3
    if precision == "ieee" and channels * out_channels > MOST_PRODUCTS_IN_IEEE:
        return False
    return groups == 1 and taps <= MOST_TAPS and max(channels, out_channels) <= most


@functools.cache
def conv_forward(
    capability: int, dtype: torch.dtype, channels: int, out_channels: int, taps: int
) -> Conv:
    """The forward of a convolution of `taps` positions."""
    cin, cout = _block(channels, 64), _block(out_channels, 128)
    is_half = dtype.itemsize == 2
    pixels = 128 if capability == HOPPER and is_half and cout <= 64 else 64
    takes_registers = _is_ragged(channels, out_channels) or (channels > 64 and capability < HOPPER)
    if takes_registers and not is_half:
        pixels = 32
    if taps == 1:
        has_room = capability == HOPPER or (is_half and capability < HOPPER)
        return Conv(pixels, cin, cout, 8, 2 if has_room else 1)
    return Conv(pixels, cin, cout, 4 if is_half and capability < HOPPER else 8, 1, 2)


@functools.cache
def conv_backward(
    capability: int, dtype: torch.dtype, channels: int, out_channels: int, taps: int
) -> Backward:
    """The backward of a convolution of `taps` positions.

    Weight gradients of all taps in one program's registers leave it fewer pixels at a time.
    """
    cin = _block(channels, 64)
    cout = _block(out_channels, 128 if taps == 1 and dtype.itemsize == 2 else 64)
    weights = taps * cin * cout * triton.cdiv(out_channels, cout)
    pixels, warps = 64 if capability == HOPPER and dtype.itemsize == 2 else 32, 8
    weight_warps = 4 if cin * cout <= 256 and dtype.itemsize == 2 else warps
    if _is_ragged(channels, out_channels):
        pixels = 16
        if dtype.itemsize == 2:
            pixels, warps, weight_warps = 32, 4 if capability < HOPPER else 8, 4
    # Triton 3.6 fails to pipeline this kernel's products for Blackwell.
    weight = Conv(pixels, cin, min(cout, 64), weight_warps, 2 if capability < BLACKWELL else 1)
    if taps > 1:
        in_one_pass = weights <= MOST_WEIGHTS_OF_3X3 and dtype.itemsize == 2
        both = Conv(32, cin, cout, 4, 1) if in_one_pass else None
        return Backward(Conv(pixels, cin, cout, warps, 1, 2), weight, both)
    is_roomy = capability == HOPPER and dtype.itemsize == 2
    if weights > 2048:
        is_tight = capability >= BLACKWELL and dtype.itemsize == 4 and weights >= 16 * 1024
        pixels = min(pixels, 16 if is_tight else 32)
    one = Conv(pixels, cin, cout, warps, 2 if capability == HOPPER else 1)
    most_weights = MOST_WEIGHTS_OF_1X1 if is_roomy else 2048
    return Backward(one, weight, one if weights <= most_weights else None)
