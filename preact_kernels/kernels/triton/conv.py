"""What convolution kernels share: where taps lie, the product of two tiles, weights and gradients.

A convolution is a sum over taps, positions of the kernel: for each, the product of a tile
`[pixels, channels]` and that tap's weights. Tiles are gathered from NHWC tensors by the indices of
their pixels; what lies outside of the image counts as zero after the activation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.triton.batch_norm import load_folded
from preact_kernels.kernels.triton.launch import INTERPRETED

# The interpreter's product of bfloat16 operands is wrong; of float32 ones it is right.
_UPCAST = tl.constexpr(INTERPRETED)


class Geometry(NamedTuple):
    """Kernel size, stride, padding and dilation, as compile-time arguments of a kernel."""

    R: int
    S: int
    STRIDE_H: int
    STRIDE_W: int
    PAD_H: int
    PAD_W: int
    DIL_H: int
    DIL_W: int

    def out_shape(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output."""
        return (
            (height + 2 * self.PAD_H - self.DIL_H * (self.R - 1) - 1) // self.STRIDE_H + 1,
            (width + 2 * self.PAD_W - self.DIL_W * (self.S - 1) - 1) // self.STRIDE_W + 1,
        )

    def keeps_size(self) -> bool:
        """Whether every output pixel has the pixel at its own place for its middle tap."""
        return (
            self.STRIDE_H == self.STRIDE_W == 1
            and self.DIL_H * (self.R - 1) == 2 * self.PAD_H
            and self.DIL_W * (self.S - 1) == 2 * self.PAD_W
            and self.R % 2 == self.S % 2 == 1
        )


def geometry_of(conv_weight: Tensor, stride, padding, dilation) -> Geometry:
    """The geometry of a convolution."""
    return Geometry(*conv_weight.shape[2:], *stride, *padding, *dilation)


def precision(dtype: torch.dtype) -> str:
    """How products are formed: "ieee" for those of float32 where PyTorch may not use TF32.

    Of the half-precision dtypes there is one kind of product, whatever this says.
    """
    may_round = torch.backends.cudnn.conv.fp32_precision == "tf32"
    return "ieee" if dtype == torch.float32 and not may_round else "tf32"


@triton.jit
def dot(a, b, total, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Total + a @ b, of operands rounded to `dtype`, in float32."""
    a, b = a.to(dtype), b.to(dtype)
    if _UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def input_pixels(
    pixel, is_pixel, tap, H, W, OUT_H, OUT_W,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
):  # fmt: skip
    """The pixels of x that a tap of the output's pixels reads, and which of them exist."""
    if R * S * STRIDE_H * STRIDE_W == 1 and PAD_H + PAD_W == 0:
        return pixel, is_pixel
    else:
        n, h, w = pixel // (OUT_H * OUT_W), pixel // OUT_W % OUT_H, pixel % OUT_W
        h = h * STRIDE_H - PAD_H + tap // S * DIL_H
        w = w * STRIDE_W - PAD_W + tap % S * DIL_W
        return (n * H + h) * W + w, is_pixel & (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def output_pixels(
    pixel, is_pixel, tap, H, W, OUT_H, OUT_W,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
):  # fmt: skip
    """The pixels of the output whose tap reads the given pixels of x, and which of them exist."""
    if R * S * STRIDE_H * STRIDE_W == 1 and PAD_H + PAD_W == 0:
        return pixel, is_pixel
    else:
        n, h, w = pixel // (H * W), pixel // W % H, pixel % W
        h += PAD_H - tap // S * DIL_H
        w += PAD_W - tap % S * DIL_W
        exists = is_pixel & (h >= 0) & (h % STRIDE_H == 0) & (w >= 0) & (w % STRIDE_W == 0)
        h, w = h // STRIDE_H, w // STRIDE_W
        return (n * OUT_H + h) * OUT_W + w, exists & (h < OUT_H) & (w < OUT_W)


@triton.jit
def load_output_gradient(dy, skip, z, fold, at, mask, Z_IN_TRAINING: tl.constexpr):
    """A tile of the gradient of the convolution's output in float32: as it is, or folded."""
    if z is None:
        return tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    else:
        return load_folded(skip, dy, z, fold, at, mask, mask, Z_IN_TRAINING)
