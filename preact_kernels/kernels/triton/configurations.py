"""Tile sizes, warps and stages: the largest that compile without spilling registers.

A choice depends only on the shape, the dtypes and the GPU. Nothing is tuned at run time, so all
processes of a group choose alike. `LIMITS` has limits by generation of GPU, a few rules lower them,
and `_fitting` reduces tiles that exceed the shared memory of the GPU.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import triton

from preact_kernels.kernels.contract import Unit
from preact_kernels.kernels.pytorch_conv import unserved

# Generations of GPUs, by their first compute capability.
AMPERE, HOPPER, BLACKWELL = GENERATIONS = 80, 90, 100

# Stages of a pipelined loop: two tiles are copied while a third is computed. With two stages,
# Triton 3.6 allocates a single buffer, so that copy and computation alternate.
STAGES = 3

MAX_TAPS = 9
# Convolutions with more channels run in cuDNN, after a fused batch norm and ReLU: the fused
# prologue is bound by instruction issue, and its tiles are too narrow to feed the tensor cores.
MAX_CHANNELS_1X1 = 256
MAX_CHANNELS_3X3 = 64
MAX_IEEE_PRODUCTS = 1024  # input channels times output channels
# With several taps: most weights for which a small program computes g and the weight's gradient in
# one pass, and most rows of weights in one of its products.
ONE_PASS_WEIGHTS_TAPS = 3072
MAX_PART_ROWS = 128

# Resident programs per multiprocessor of an elementwise kernel that reduces: 128 registers a
# thread.
REDUCING_RESIDENT = 2
# In kernels that reduce each image: the fewest tiles per program, and the most programs per image.
MIN_IMAGE_TILES = 4
MAX_IMAGE_PROGRAMS = 256


class ElementwiseTiles(NamedTuple):
    """Tile shape and warps of an elementwise kernel."""

    tile_pixels: int
    tile_channels: int
    num_warps: int
    resident: int = 0  # programs per multiprocessor; 0: as many as registers allow


class ConvTiles(NamedTuple):
    """Launch configuration of a convolution kernel."""

    tile_pixels: int
    tile_cin: int
    tile_cout: int
    num_warps: int
    num_stages: int  # stages of the loop over tiles
    num_tap_stages: int = 1  # stages of the inner loop over taps; 0: unrolled
    resident: int = 1  # programs per multiprocessor


class BackwardTiles(NamedTuple):
    """Launch configurations of the backward of a convolution."""

    input: ConvTiles  # g and its sums
    weight: ConvTiles  # the gradient of the weight
    both: ConvTiles | None  # both in one pass; None if it would spill registers


class Device(NamedTuple):
    """The properties of a GPU that select tile sizes and grids."""

    capability: int  # 90 for 9.0
    multiprocessors: int
    shared_bytes: int  # limit for a program


class Limits(NamedTuple):
    """Limits for one generation of GPUs and size of an element.

    The first word of a name is the kernel: `forward` computes y, `input` g, `weight` the gradient
    of the weight. Names with `taps` are for more than one tap, other names for 1x1.
    """

    forward_pixels: tuple[int, int, int]  # for 1, 2 and more tiles of input channels
    forward_stages: int
    wide_cout_channels: int  # most input channels for tiles of 128 output channels, not 64
    forward_taps_warps: int
    input_pixels: tuple[int, int, int]  # for up to 2,048, up to 8,192 and more weights
    input_stages: int
    one_pass_weights: int  # most weights for computing g and their gradient in one pass
    input_taps_masked: tuple[int, int, int]  # pixels, most input channels of a tile, warps
    weight_stages: int  # 1 on Blackwell: Triton 3.6 fails to pipeline this kernel
    weight_taps_pixels: int  # for more than 2,048 weights per tap


# Keys: generation, bytes of an element of the products. On Hopper wgmma reads operands from shared
# memory, which leaves registers for more pixels.
LIMITS = {
    (AMPERE, 2): Limits((64, 64, 64), 3, 128, 4, (32, 32, 32), 3, 2048, (32, 16, 4), 3, 16),
    (HOPPER, 2): Limits((128, 128, 64), 3, 128, 8, (64, 32, 32), 3, 8192, (16, 16, 4), 3, 32),
    (BLACKWELL, 2): Limits((64, 64, 64), 1, 64, 8, (32, 32, 32), 1, 2048, (16, 16, 4), 1, 32),
    (AMPERE, 4): Limits((64, 32, 16), 1, 64, 8, (32, 16, 16), 1, 2048, (32, 16, 4), 3, 16),
    (HOPPER, 4): Limits((64, 64, 16), 3, 64, 8, (32, 16, 16), 3, 2048, (32, 16, 4), 3, 32),
    (BLACKWELL, 4): Limits((64, 64, 16), 1, 64, 8, (32, 16, 16), 1, 2048, (16, 64, 8), 1, 32),
}


def _tile(channels: int, largest: int) -> int:
    """The smallest power of two >= `channels`, from 16 (tensor cores) to `largest`."""
    return min(max(triton.next_power_of_2(channels), 16), largest)


@functools.lru_cache(maxsize=1024)
def elementwise(
    channels: int, itemsize: int, images: int, pixels: int, multiprocessors: int
) -> ElementwiseTiles:
    """Tiles for kernels in which each program owns one tile of an image of `pixels`.

    They have 64 bytes a thread, so that a thread uses the parameters of its channels often; or 32
    or 16 bytes, where larger tiles leave multiprocessors idle or exceed the image.
    """
    tile_channels = min(triton.next_power_of_2(channels), 128)
    columns = -(-channels // tile_channels)
    tile_pixels = 8192 // itemsize // tile_channels
    for _ in range(2):
        programs = images * -(-pixels // tile_pixels) * columns
        if programs >= 4 * multiprocessors and tile_pixels < 2 * pixels:
            break
        tile_pixels //= 2
    return ElementwiseTiles(tile_pixels, tile_channels, 4)


@functools.lru_cache(maxsize=1024)
def reducing(channels: int, itemsize: int, pixels: int, is_small: bool) -> ElementwiseTiles:
    """Tiles for elementwise kernels that reduce: 8 KB, or 4 KB where narrow, masked or `is_small`.

    Does not depend on the number of images or the device, nor does the order of sums.
    """
    tile_channels = min(triton.next_power_of_2(channels), 128)
    elements = 8192 // itemsize
    is_masked = channels % max(tile_channels, 32) != 0
    if is_small or is_masked or elements // tile_channels >= 2 * pixels:
        elements //= 2
    return ElementwiseTiles(elements // tile_channels, tile_channels, 8, REDUCING_RESIDENT)


def tiles_of_program(tiles: int, columns: int) -> int:
    """Tiles per program in kernels that reduce each image of `tiles` in each of `columns`.

    Depends on the shape of an image only, so that its sums have the same bits in any batch and on
    any device.
    """
    return max(MIN_IMAGE_TILES, -(-tiles * columns // MAX_IMAGE_PROGRAMS))


def conv_refusal(conv_weight_shape: Sequence[int], groups: int, precision: str) -> str:
    """Why PyTorch's convolution runs, or an empty string if a fused kernel does.

    Args:
        conv_weight_shape: `[K, C / groups, R, S]`.
        groups: number of groups.
        precision: "tf32", or "ieee" for float32 without tensor cores, which takes more registers:
            wide tiles would spill.
    """
    out_channels, channels, kernel_h, kernel_w = conv_weight_shape
    taps = kernel_h * kernel_w
    max_channels = MAX_CHANNELS_1X1 if taps == 1 else MAX_CHANNELS_3X3
    if groups != 1:
        return unserved("groups", 1, groups)
    if taps > MAX_TAPS:
        return unserved("conv_weight", f"up to {MAX_TAPS} taps", taps)
    given = f"{channels} to {out_channels}"
    if max(channels, out_channels) > max_channels:
        return unserved("conv_weight", f"up to {max_channels} channels", given)
    if precision == "ieee" and channels * out_channels > MAX_IEEE_PRODUCTS:
        served = f"up to {MAX_IEEE_PRODUCTS} pairs of channels in float32 without TF32"
        return unserved("conv_weight", served, given)
    return ""


@functools.lru_cache(maxsize=1024)
def conv_forward(device: Device, unit: Unit) -> ConvTiles:
    """Launch configuration of a unit's forward."""
    config = (_forward_1x1 if _is_1x1(unit) else _forward_taps)(device.capability, unit)
    return _fitting(forward_bytes, config, device, unit)


def filling(config: ConvTiles, device: Device, pixels: int, columns: int) -> ConvTiles:
    """Reduces tiles to 64 pixels if larger ones leave multiprocessors idle."""
    tiles = -(-pixels // config.tile_pixels) * columns
    if tiles < device.multiprocessors and config.tile_pixels > 64:
        return config._replace(tile_pixels=64)
    return config


@functools.lru_cache(maxsize=1024)
def conv_backward(device: Device, unit: Unit) -> BackwardTiles:
    """Launch configurations of a unit's backward."""
    found = (_backward_1x1 if _is_1x1(unit) else _backward_taps)(device.capability, unit)
    return BackwardTiles(
        _fitting(input_bytes, found.input, device, unit),
        _fitting(weight_bytes, found.weight, device, unit),
        found.both and _fitting(input_bytes, found.both, device, unit),
    )


def _fitting(
    needed: Callable[[ConvTiles, Unit], int], config: ConvTiles, device: Device, unit: Unit
) -> ConvTiles:
    """Reduces the pixels, then the stages, until `needed` bytes fit in shared memory."""
    stages = max(config.num_stages, config.num_tap_stages)
    choices = [(p, stages) for p in (config.tile_pixels >> i for i in range(4)) if p >= 16]
    for pixels, stages in (*choices, *((p, 1) for p, _ in choices)):
        fitting = config._replace(
            tile_pixels=pixels,
            num_stages=min(config.num_stages, stages),
            num_tap_stages=min(config.num_tap_stages, stages),
        )
        if needed(fitting, unit) <= device.shared_bytes:
            break
    return fitting


def forward_bytes(config: ConvTiles, unit: Unit) -> int:
    """Upper bound of the shared memory of a forward, with a residual."""
    pixels, cin, cout, _, stages, tap_stages, _ = config
    size, x_size, y_size = _itemsizes(unit)
    exchanged = _exchanged_bytes(config, max(cin, cout), size)
    if not _is_1x1(unit):
        # Operands of a tap are stored again after rounding to TF32, while the next are copied.
        operands = (pixels * cin + cin * cout) * 4 if size == 4 else 0
        read = pixels * cin * x_size + cin * cout * size
        return (tap_stages - 1) * read + max(operands, exchanged)
    channels = triton.cdiv(unit.weight_shape[1], cin) * cin
    read = pixels * (channels * x_size + cout * y_size)
    return (stages - 1) * read + channels * cout * size + exchanged


def input_bytes(config: ConvTiles, unit: Unit) -> int:
    """Upper bound of the shared memory of the kernel for g; for 1x1, with a step and a skip."""
    pixels, cin, cout, _, stages, tap_stages, _ = config
    size, x_size, y_size = _itemsizes(unit)
    taps = math.prod(unit.weight_shape[2:])
    channels = triton.cdiv(unit.weight_shape[0], cout) * cout
    weights = channels * cin * size
    exchanged = _exchanged_bytes(config, max(cin, cout) * (1 + _has_float32_side(unit)), size)
    if taps == 1:
        read = pixels * channels * (size + 2 * y_size)  # g, x and skip of the step
        return (stages - 1) * (read + pixels * cin * x_size) + weights + exchanged
    read = pixels * channels * y_size
    if tap_stages:
        return (tap_stages - 1) * (read + weights) + exchanged
    read = taps * read + pixels * cin * x_size
    operands = pixels * (MAX_PART_ROWS + cin) * size
    return max(stages - 1, 1) * read + taps * weights + operands + exchanged


def weight_bytes(config: ConvTiles, unit: Unit) -> int:
    """Upper bound of the shared memory of the kernel for the gradient of the weight."""
    pixels, cin, cout, _, stages, _, _ = config
    size, x_size, y_size = _itemsizes(unit)
    read = pixels * (cout * y_size + taps_per_program(unit.weight_shape[3]) * cin * x_size)
    return (stages - 1) * read + _exchanged_bytes(config, cin + cout, size)


def _exchanged_bytes(config: ConvTiles, channels: int, size: int) -> int:
    """Bytes in which threads exchange float32 tiles of `channels`, weights, or sums."""
    tiles = 4 * config.tile_pixels * channels
    return max(tiles, config.tile_cin * config.tile_cout * size, 8192) + (size == 4) * 4096


def taps_per_program(kernel_width: int) -> int:
    """Taps for which a program computes gradients of weights: a row, if registers hold it."""
    return kernel_width if kernel_width <= 3 else 1


def _itemsizes(unit: Unit) -> tuple[int, int, int]:
    """Bytes of an element of the products, of x, and of y."""
    return unit.dtype.itemsize, unit.x_dtype.itemsize, unit.y_dtype.itemsize


def _limits(capability: int, unit: Unit) -> Limits:
    return LIMITS[max(g for g in GENERATIONS if g <= capability), unit.dtype.itemsize]


def _is_1x1(unit: Unit) -> bool:
    return math.prod(unit.weight_shape[2:]) == 1


def _is_half(unit: Unit) -> bool:
    return unit.dtype.itemsize == 2


def _is_masked(unit: Unit) -> bool:
    """Whether masks differ between the elements of a vector load.

    Masks take registers, and asynchronous copies of 2 bytes do not exist.
    """
    return any(channels % 8 for channels in unit.weight_shape[:2])


def _has_float32_side(unit: Unit) -> bool:
    """Whether x or y is wider than the products, which takes more registers and memory."""
    return max(unit.x_dtype.itemsize, unit.y_dtype.itemsize) > unit.dtype.itemsize


def _has_small_tiles(capability: int, unit: Unit) -> bool:
    """Whether to run two programs with small tiles per multiprocessor, where registers allow.

    Two programs hide each other's latency, and a small batch fills more multiprocessors.
    """
    is_hopper = HOPPER <= capability < BLACKWELL
    return is_hopper and _is_half(unit) and not (_is_masked(unit) or _has_float32_side(unit))


def _forward_1x1(capability: int, unit: Unit) -> ConvTiles:
    out_channels, channels = unit.weight_shape[:2]
    limits = _limits(capability, unit)
    has_small_tiles = _has_small_tiles(capability, unit) and channels * out_channels <= 4096
    has_small_tiles &= channels <= 128
    has_wide_cout = channels <= limits.wide_cout_channels and not has_small_tiles
    cin, cout = _tile(channels, 64), _tile(out_channels, 128 if has_wide_cout else 64)
    cin_tiles = triton.cdiv(channels, cin)
    pixels = limits.forward_pixels[min(cin_tiles, 3) - 1]
    if cout > 64:
        pixels = min(pixels, 64)
    has_float32_x = unit.x_dtype.itemsize > unit.dtype.itemsize
    is_partly_empty = capability < HOPPER and (cout < 64 or channels % cin != 0)
    if cin_tiles > 2 and (has_float32_x or is_partly_empty):
        pixels = min(pixels, 32)
    if _is_masked(unit) and not _is_half(unit):
        pixels = min(pixels, 32)
    stages = 1 if _is_masked(unit) else limits.forward_stages
    resident = 2 if _is_half(unit) and cin_tiles == 1 and cout == 16 else 1
    if has_small_tiles and resident == 1:
        pixels, resident = 64, 2
    return ConvTiles(pixels, cin, cout, 8, stages, resident=resident)


def _forward_taps(capability: int, unit: Unit) -> ConvTiles:
    cin, cout = (_tile(channels, 64) for channels in unit.weight_shape[1::-1])
    limits, is_masked = _limits(capability, unit), _is_masked(unit)
    pixels, warps, resident = limits.forward_pixels[0], limits.forward_taps_warps, 1
    if _has_float32_side(unit):
        pixels = min(pixels, 64)
    if not _is_half(unit) and (is_masked or (cin == 64 > cout and capability != HOPPER)):
        pixels = 32
    if _is_half(unit) and cin * cout == 256:
        warps = 4
    if _is_half(unit) and not is_masked:
        resident = {16: 3 if capability < HOPPER else 4, 32: 2, 64: 1}[max(cin, cout)]
    return ConvTiles(pixels, cin, cout, warps, 1, 1 if is_masked else STAGES, resident)


def _backward_1x1(capability: int, unit: Unit) -> BackwardTiles:
    out_channels, channels = unit.weight_shape[:2]
    limits = _limits(capability, unit)
    cin, cout = _tile(channels, 64), _tile(out_channels, 128 if _is_half(unit) else 64)
    weights = cin * cout * triton.cdiv(out_channels, cout)
    in_one_pass = weights <= limits.one_pass_weights
    holds_several_tiles = in_one_pass and cin > 16 and cout < out_channels
    has_float32_y = unit.y_dtype.itemsize > unit.dtype.itemsize and capability >= HOPPER
    pixels = limits.input_pixels[(weights > 2048) + (weights > 8192)]
    if _is_masked(unit) or holds_several_tiles or (has_float32_y and not in_one_pass):
        pixels = 16
    if capability >= BLACKWELL and _is_half(unit) and cin == 16 and weights == 2048:
        pixels = 64  # a tile of 32 spills
    stages = 1 if _is_masked(unit) else limits.input_stages
    resident = 1
    if _has_small_tiles(capability, unit) and weights <= 1024 and min(cin, cout) == 16:
        pixels, resident = 64 if cin == 16 else 32, 2
    config = ConvTiles(pixels, cin, cout, 8, stages, resident=resident)
    weight = _weight_tiles(limits, unit, cin, cout)
    return BackwardTiles(config, weight, config if in_one_pass else None)


def _backward_taps(capability: int, unit: Unit) -> BackwardTiles:
    cin, cout = (_tile(channels, 64) for channels in unit.weight_shape[1::-1])
    limits, weights = _limits(capability, unit), math.prod(unit.weight_shape[2:]) * cin * cout
    pixels, max_cin, warps, stages = *limits.input_taps_masked, 1
    if not _is_masked(unit):
        pixels, max_cin, stages = limits.input_pixels[0] if _is_half(unit) else 16, 64, STAGES
        warps = 4 if _is_half(unit) and cin * cout == 256 else 8
        if _has_float32_side(unit) and cin * cout > 2048:
            pixels = 32
    config = ConvTiles(pixels, min(cin, max_cin), cout, warps, 1, stages)
    both = None
    if unit.y_dtype.itemsize == 2 and weights <= ONE_PASS_WEIGHTS_TAPS:
        # Small programs hide each other's latency.
        both = ConvTiles(32, cin, cout, 2, 1 if _is_masked(unit) else STAGES, 0, resident=4)
    elif _has_small_tiles(capability, unit) and cin == cout == 32:
        # Elsewhere such a program spills, or Triton 3.6 fails to compile it (Blackwell).
        both = ConvTiles(64, cin, cout, 8, 1, 0)
    weight = _weight_tiles(limits, unit, cin, cout)
    return BackwardTiles(config, weight, both)


def _weight_tiles(limits: Limits, unit: Unit, cin: int, cout: int) -> ConvTiles:
    """Tiles for the gradient of the weight; `cin` and `cout` are the tiles for g."""
    pixels, stages = limits.input_pixels[0], limits.weight_stages
    if not _is_1x1(unit):
        pixels = limits.weight_taps_pixels if cin * cout > 2048 else 32
    if _is_masked(unit):
        pixels, stages = 16, 1
    warps = 4 if _is_half(unit) and (_is_masked(unit) or cin * cout == 256) else 8
    return ConvTiles(pixels, cin, min(cout, 64), warps, stages)
