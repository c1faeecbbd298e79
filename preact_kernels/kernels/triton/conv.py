"""Device functions of the convolution kernels: addresses of taps, and the product of two tiles.

A convolution is a sum over taps, the positions of the kernel: for each tap, the product of a tile
`[pixels, channels]` and the weights of that tap. Tiles are gathered from NHWC tensors by pixel
index. Padding is zero after the activation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from preact_kernels.kernels.contract import AffineStep, Unit
from preact_kernels.kernels.triton.activations import kernel_activation
from preact_kernels.kernels.triton.batch_norm import KernelNorm, load_whole_gradient
from preact_kernels.kernels.triton.launch import INTERPRETED, needs_int64

# The interpreter multiplies bfloat16 operands incorrectly, and float32 operands without TF32.
_IS_INTERPRETED = tl.constexpr(INTERPRETED)

NONE: Any = None  # for fields of `Norm` and `AffineStep` that the kernel does not read
# Triton 3.6 cannot compare a tuple with None, so kernels test `step.x`.
NO_NORM: Any = KernelNorm(NONE, NONE, NONE, None, 0.0)
NO_STEP = AffineStep(None, NONE, NO_NORM, NONE, 0.0)


class ConvShape(NamedTuple):
    """Channels, kernel size, stride, padding and dilation; a compile-time argument of kernels."""

    K: int
    C: int
    R: int
    S: int
    STRIDE_H: int
    STRIDE_W: int
    PAD_H: int
    PAD_W: int
    DIL_H: int
    DIL_W: int

    def is_pointwise(self) -> bool:
        """Whether an output pixel depends only on the input pixel at the same position."""
        return (
            self.R == self.S == self.STRIDE_H == self.STRIDE_W == 1
            and self.PAD_H == self.PAD_W == 0
        )


class Sizes(NamedTuple):
    """Image sizes, without the batch: Triton specializes kernels for numbers in tuples."""

    height: int
    width: int
    out_height: int
    out_width: int


class UnitSizes(NamedTuple):
    """Sizes and compile-time arguments for the launches of a unit with inputs of one shape."""

    unit: Unit
    shape: ConvShape
    y_shape: Sequence[int]
    images: Sizes
    x_pixels: int  # over the batch
    y_pixels: int
    parameter: float | None  # see `KernelActivation`
    constants: dict[str, Any]  # the first compile-time arguments of the kernels

    @property
    def x_bytes(self) -> int:
        return self.x_pixels * self.shape.C * self.unit.x_dtype.itemsize

    @property
    def y_bytes(self) -> int:
        return self.y_pixels * self.shape.K * self.unit.y_dtype.itemsize


def unit_sizes(unit: Unit, x_shape: Sequence[int]) -> UnitSizes:
    """The sizes of a unit. Its convolution must have one group."""
    unit = unit._replace(process_group=None)  # caches must not keep it alive
    stride, padding, dilation, _ = unit.conv
    fields: Any = (*unit.weight_shape, *stride, *padding, *dilation)
    shape = ConvShape(*fields)
    y_shape = unit.conv.output_shape(x_shape, unit.weight_shape)
    images = Sizes(*x_shape[2:], *y_shape[2:])
    x_pixels = x_shape[0] * images.height * images.width
    y_pixels = x_shape[0] * images.out_height * images.out_width
    activation, parameter = kernel_activation(*unit.activation)
    constants = {
        "SHAPE": shape,
        "INT64": needs_int64(x_pixels * shape.C, y_pixels * shape.K),
        "PRECISION": precision(unit.dtype),
        "ACTIVATION": activation,
    }
    return UnitSizes(unit, shape, y_shape, images, x_pixels, y_pixels, parameter, constants)


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of products: "ieee" for float32 unless PyTorch allows TF32, else "tf32".

    Triton ignores it for fp16 and bf16.
    """
    if dtype != torch.float32:
        return "tf32"
    cudnn: Any = torch.backends.cudnn
    return "tf32" if cudnn.conv.fp32_precision == "tf32" else "ieee"


@triton.jit
def round_to_tf32(x):
    """float32 x rounded to TF32, to nearest, ties away from zero; NaN stays NaN."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, float("nan"))


@triton.jit
def dot(a, b, total, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """total + a @ b in float32, with operands rounded to `dtype`, or to TF32."""
    a, b = a.to(dtype), b.to(dtype)
    if _IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    elif dtype == tl.float32 and PRECISION == "tf32":  # tensor cores cut the last bits off
        a, b = round_to_tf32(a), round_to_tf32(b)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def add_after_product(total, added):
    """total + added in float32, rounded to nearest.

    Triton would use `added` as the initial value of the product, and tensor cores round their sums
    towards zero.
    """
    return tl.fma(total, 1.0, added)


@triton.jit
def split_pixel(pixel, height, width):
    """Image, row and column of pixels; with unsigned divisions, which take fewer instructions."""
    unsigned: tl.constexpr = tl.uint64 if pixel.dtype == tl.int64 else tl.uint32
    h, w = tl.full([], height, unsigned), tl.full([], width, unsigned)
    of_row = pixel.to(unsigned) // w
    image = of_row // h
    row, column = of_row - image * h, pixel.to(unsigned) - of_row * w
    return image.to(pixel.dtype), row.to(tl.int32), column.to(tl.int32)


@triton.jit
def input_pixels(pixel, is_pixel, tap, sizes, SHAPE: tl.constexpr):
    """The pixels of x that a tap reads for output pixels, and whether they exist."""
    TAPS: tl.constexpr = SHAPE.R * SHAPE.S
    if TAPS * SHAPE.STRIDE_H * SHAPE.STRIDE_W == 1 and SHAPE.PAD_H + SHAPE.PAD_W == 0:
        return pixel, is_pixel
    else:
        H, W, OUT_H, OUT_W = sizes.height, sizes.width, sizes.out_height, sizes.out_width
        n, h, w = split_pixel(pixel, OUT_H, OUT_W)
        h = h * SHAPE.STRIDE_H - SHAPE.PAD_H + tap // SHAPE.S * SHAPE.DIL_H
        w = w * SHAPE.STRIDE_W - SHAPE.PAD_W + tap % SHAPE.S * SHAPE.DIL_W
        return (n * H + h) * W + w, is_pixel & (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def output_pixels(pixel, is_pixel, tap, sizes, SHAPE: tl.constexpr):
    """The output pixels for which a tap reads pixels of x, and whether they exist."""
    TAPS: tl.constexpr = SHAPE.R * SHAPE.S
    if TAPS * SHAPE.STRIDE_H * SHAPE.STRIDE_W == 1 and SHAPE.PAD_H + SHAPE.PAD_W == 0:
        return pixel, is_pixel
    else:
        H, W, OUT_H, OUT_W = sizes.height, sizes.width, sizes.out_height, sizes.out_width
        STRIDE_H: tl.constexpr = SHAPE.STRIDE_H
        STRIDE_W: tl.constexpr = SHAPE.STRIDE_W
        n, h, w = split_pixel(pixel, H, W)
        h += SHAPE.PAD_H - tap // SHAPE.S * SHAPE.DIL_H
        w += SHAPE.PAD_W - tap % SHAPE.S * SHAPE.DIL_W
        exists = is_pixel & (h >= 0) & (h % STRIDE_H == 0) & (w >= 0) & (w % STRIDE_W == 0)
        h, w = h // STRIDE_H, w // STRIDE_W
        return (n * OUT_H + h) * OUT_W + w, exists & (h < OUT_H) & (w < OUT_W)


@triton.jit
def load_weight(
    conv_weight, tap, channel, out_channel, SHAPE: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """The weights `[channels, out channels]` of a tap, or their transpose.

    `conv_weight` is `[K, R, S, C]`.
    """
    TAPS: tl.constexpr = SHAPE.R * SHAPE.S
    if TRANSPOSED:
        at = (out_channel[:, None] * TAPS + tap) * SHAPE.C + channel[None, :]
        mask = (out_channel < SHAPE.K)[:, None] & (channel < SHAPE.C)[None, :]
    else:
        at = (out_channel[None, :] * TAPS + tap) * SHAPE.C + channel[:, None]
        mask = (channel < SHAPE.C)[:, None] & (out_channel < SHAPE.K)[None, :]
    return tl.load(conv_weight + at, mask=mask, other=0.0)


@triton.jit
def load_gradient(gradient, coefficients, at, mask, IN_TRAINING: tl.constexpr):
    """A float32 tile of a `Gradient`; `coefficients` are the results of `load_affine_step`."""
    if gradient.step.x is None:
        return tl.load(gradient.g + at, mask=mask, other=0.0).to(tl.float32)
    else:
        return load_whole_gradient(gradient, coefficients, at, mask, mask, IN_TRAINING)
