"""Device functions for norms and the gradient of their input.

Tiles are `[pixels, channels]`, in float32. Values that PyTorch would store are rounded to the dtype
of the activations.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from preact_kernels.kernels.contract import Gradient, Norm
from preact_kernels.kernels.triton.activations import activate, relu
from preact_kernels.kernels.triton.launch import aligned
from preact_kernels.kernels.triton.reduction import load_statistics, load_two_sums


class KernelNorm(NamedTuple):
    """A norm as kernels take it. The activation is a separate compile-time constant."""

    mean: Tensor
    var: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float


def kernel_norm(norm: Norm) -> Any:
    """Converts to a `KernelNorm`; typed Any to replace the `Norm` in `Inputs` and `AffineStep`."""
    return KernelNorm._make(norm[:5])


def aligned_gradient(gradient: Gradient) -> Gradient:
    """Returns the gradient with `aligned` tensors of pixels."""
    g, step = gradient
    if step is not None:
        skip = None if step.skip is None else aligned(step.skip)
        step = step._replace(skip=skip, x=aligned(step.x))
    return Gradient(aligned(g), step)


def kernel_gradient(gradient: Gradient) -> Gradient:
    """Returns the gradient with a `KernelNorm` in its step."""
    g, step = gradient
    if step is None:
        return gradient
    return Gradient(g, step._replace(norm=kernel_norm(step.norm)))


_MEAN_ROWS, _VAR_ROWS = tl.constexpr(1), tl.constexpr(2)
_WEIGHT_ROWS, _BIAS_ROWS = tl.constexpr(4), tl.constexpr(8)


def rows_of(norm: Norm, pooled: bool = False) -> int | None:
    """A bit for each tensor of the norm that is `[N, C]`; None if the norm has no rows.

    With `pooled` sums a step has rows, even if all bits are 0.
    """
    mean, var, weight, bias = norm[:4]
    rows = (mean.dim() == 2) + 2 * (var.dim() == 2) + 4 * (weight.dim() == 2)
    if bias is not None:
        rows += 8 * (bias.dim() == 2)
    return rows if rows or pooled else None


@triton.jit
def norm_of_image(norm, rows, image, CHANNELS: tl.constexpr):
    """The norm of one image, without rows; `rows` is the result of `rows_of`."""
    at = image.to(tl.int64) * CHANNELS
    bias = norm.weight if norm.bias is None else norm.bias  # Triton cannot return None in a tuple
    return KernelNorm(
        norm.mean + tl.where(rows & _MEAN_ROWS != 0, at, 0),
        norm.var + tl.where(rows & _VAR_ROWS != 0, at, 0),
        norm.weight + tl.where(rows & _WEIGHT_ROWS != 0, at, 0),
        bias + tl.where(rows & _BIAS_ROWS != 0, at, 0),
        norm.eps,
    )


@triton.jit
def load_norm(norm, channel, CHANNELS: tl.constexpr, sums=None, count=0):
    """mean, rstd, scale = weight * rstd, and bias of some channels.

    Reads the statistics from the accumulators `sums` over `count` values per channel, or from the
    norm if `sums` is None.
    """
    is_channel = channel < CHANNELS
    if sums is None:
        mean = tl.load(norm.mean + channel, mask=is_channel, other=0.0)
        var = tl.load(norm.var + channel, mask=is_channel, other=1.0)
    else:
        mean, var = load_statistics(sums, count, channel, is_channel, CHANNELS)
    rstd, scale, bias = load_scale(var, norm.weight, norm.bias, norm.eps, channel, is_channel)
    return mean, rstd, scale, bias


@triton.jit
def load_scale(var, weight, bias, eps, channel, is_channel):
    """rstd, scale = weight * rstd, and bias of some channels."""
    rstd = tl.rsqrt(var + eps)
    scale = tl.load(weight + channel, mask=is_channel, other=0.0) * rstd
    return rstd, scale, tl.load(bias + channel, mask=is_channel, other=0.0)


@triton.jit
def normalised(x, mean, scale, bias):
    """(x - mean) * scale + bias in float32."""
    return (x - mean[None, :]) * scale[None, :] + bias[None, :]


@triton.jit
def pre_activation(x, mean, scale, bias, dtype: tl.constexpr):
    """p = (x - mean) * scale + bias in float32, rounded to `dtype`."""
    return normalised(x, mean, scale, bias).to(dtype).to(tl.float32)


@triton.jit
def norm_act(x, mean, scale, bias, parameter, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(p) in float32, for p rounded to `dtype`."""
    if ACTIVATION == "relu" and dtype != tl.float16:
        # Rounding after ReLU gives the same bits, and one instruction does both for two numbers.
        # In float16, it makes the forward of a 3x3 convolution of 16 channels spill a register.
        return relu(normalised(x, mean, scale, bias)).to(dtype).to(tl.float32)
    else:
        return activate(pre_activation(x, mean, scale, bias, dtype), parameter, dtype, ACTIVATION)


@triton.jit
def load_affine_step(step, channel, CHANNELS: tl.constexpr):
    """A, B, C and mean of some channels, for the step A*g + B*(x - mean) + C.

    `step.sums` are float32 or accumulators. B and C are zeros in evaluation mode, where `inv_count`
    is 0. Without a step (`step.x` is None) the results are unused.
    """
    if step.x is None:
        return 0, 0, 0, 0
    else:  # compiled only if there is a step
        is_channel = channel < CHANNELS
        mean = tl.load(step.norm.mean + channel, mask=is_channel, other=0.0)
        variance = tl.load(step.norm.var + channel, mask=is_channel, other=1.0)
        rstd = tl.rsqrt(variance + step.norm.eps)
        a = tl.load(step.norm.weight + channel, mask=is_channel, other=0.0) * rstd
        sum_g, sum_g_xhat = load_two_sums(step.sums, channel, is_channel, CHANNELS)
        b = -a * rstd * (sum_g_xhat * step.inv_count)
        return a, b, -a * (sum_g * step.inv_count), mean


@triton.jit
def load_pooled_step(step, image, images, channel, CHANNELS: tl.constexpr):
    """`load_affine_step` for one image of a step with pooled sums and the norm of the image."""
    is_channel = channel < CHANNELS
    mean = tl.load(step.norm.mean + channel, mask=is_channel, other=0.0)
    rstd = tl.rsqrt(tl.load(step.norm.var + channel, mask=is_channel, other=1.0) + step.norm.eps)
    a = tl.load(step.norm.weight + channel, mask=is_channel, other=0.0) * rstd
    sums = step.sums + image.to(tl.int64) * CHANNELS + channel
    sum_g = tl.load(sums, mask=is_channel, other=0.0)
    second = sums + images.to(tl.int64) * CHANNELS
    sum_g_xhat = tl.load(second, mask=is_channel, other=0.0)
    b = -rstd * rstd * (sum_g_xhat * step.inv_count)
    return a, b, -rstd * (sum_g * step.inv_count), mean


@triton.jit
def load_whole_gradient(gradient, coefficients, at, mask, g_mask, IN_TRAINING: tl.constexpr):
    """A float32 tile of [skip +] A*g + B*(x - mean) + C; zeros outside `mask`.

    `coefficients` are the results of `load_affine_step`. g is zero outside `g_mask`. x is not read
    in evaluation mode.
    """
    dx = tl.load(gradient.g + at, mask=mask, other=0.0).to(tl.float32)
    # A load with `g_mask` would not be vectorized.
    dx = tl.where(g_mask, dx, 0.0)
    whole = whole_gradient(dx, gradient.step, coefficients, at, mask, IN_TRAINING)
    return tl.where(mask, whole, 0.0)


@triton.jit
def whole_gradient(g, step, coefficients, at, mask, IN_TRAINING: tl.constexpr):
    """`load_whole_gradient` for a float32 tile of g; any numbers outside `mask`."""
    a, b, c, mean = coefficients
    dx = g * a[None, :]
    if IN_TRAINING:
        x = tl.load(step.x + at, mask=mask, other=0.0).to(tl.float32)
        dx += (x - mean[None, :]) * b[None, :] + c[None, :]
    if step.skip is not None:
        dx += tl.load(step.skip + at, mask=mask, other=0.0).to(tl.float32)
    return dx


@triton.jit
def pixel_indices(tile, TILE_PIXELS: tl.constexpr, INT64: tl.constexpr):
    """Indices of the pixels of a tile; 64-bit if element indices need it."""
    offset = tl.arange(0, TILE_PIXELS)
    if INT64:
        return (tile + tl.zeros([TILE_PIXELS], tl.int64)) * TILE_PIXELS + offset
    else:
        return tile * TILE_PIXELS + offset


@triton.jit
def tiles_of(pixels, TILE_PIXELS: tl.constexpr):
    """ceil(pixels / TILE_PIXELS) for pixels >= 1, without overflow near 2^31."""
    return (pixels - 1) // TILE_PIXELS + 1
