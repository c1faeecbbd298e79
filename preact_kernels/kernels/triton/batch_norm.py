"""Device functions: one batch norm and ReLU, and its input gradient, as every kernel applies them.

Tiles are `[pixels, channels]`. They are computed on in float32 and hold values that the dtype of
the activations can hold wherever PyTorch would store them.
"""

import triton
import triton.language as tl


@triton.jit
def load_batch_norm(mean, var, bn_weight, bn_bias, eps, channel, is_channel):
    """mean, rstd, scale = bn_weight * rstd and bn_bias of some channels."""
    mu = tl.load(mean + channel, mask=is_channel, other=0.0)
    rstd = tl.rsqrt(tl.load(var + channel, mask=is_channel, other=1.0) + eps)
    scale = tl.load(bn_weight + channel, mask=is_channel, other=0.0) * rstd
    return mu, rstd, scale, tl.load(bn_bias + channel, mask=is_channel, other=0.0)


@triton.jit
def pre_activation(x, mean, scale, bias, dtype: tl.constexpr):
    """p = (x - mean) * scale + bn_bias, rounded to `dtype`, in float32."""
    p = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    return p.to(dtype).to(tl.float32)


@triton.jit
def relu(p):
    """Zero where p <= 0, so that NaN stays, as in PyTorch."""
    return tl.where(p <= 0, 0.0, p)


@triton.jit
def load_fold(
    x, mean, var, bn_weight, eps, sums, inv_count, channel, is_channel, CHANNELS: tl.constexpr
):
    """A, B, C and mean of some channels: a batch norm's input gradient is A*g + B*(x - mean) + C.

    In evaluation mode, `inv_count` 0, B and C are zeros. Without x there is nothing to fold, and
    the coefficients are not used.
    """
    if x is None:
        return 0, 0, 0, 0
    else:  # which Triton does not compile in the other case
        mu = tl.load(mean + channel, mask=is_channel, other=0.0)
        rstd = tl.rsqrt(tl.load(var + channel, mask=is_channel, other=1.0) + eps)
        a = tl.load(bn_weight + channel, mask=is_channel, other=0.0) * rstd
        sum_g = tl.load(sums + channel, mask=is_channel, other=0.0)
        sum_g_xhat = tl.load(sums + CHANNELS + channel, mask=is_channel, other=0.0)
        return a, -a * rstd * (sum_g_xhat * inv_count), -a * (sum_g * inv_count), mu


@triton.jit
def load_folded(skip, g, x, fold, at, mask, g_mask, IN_TRAINING: tl.constexpr):
    """A tile of [skip +] A*g + B*(x - mean) + C, in float32; zeros where `mask` is not.

    g counts as zero where `g_mask` is not. In evaluation mode x is not read.
    """
    a, b, c, mean = fold
    dx = tl.load(g + at, mask=g_mask, other=0.0).to(tl.float32) * a[None, :]
    if IN_TRAINING:
        x_tile = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        dx += (x_tile - mean[None, :]) * b[None, :] + c[None, :]
    if skip is not None:
        dx += tl.load(skip + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, dx, 0.0)


@triton.jit
def pixels_of(tile, BLOCK_PIXELS: tl.constexpr, INT64: tl.constexpr):
    """Indices of a tile's pixels, wide enough to be multiplied by channels."""
    offset = tl.arange(0, BLOCK_PIXELS)
    if INT64:
        return (tile + tl.zeros([BLOCK_PIXELS], tl.int64)) * BLOCK_PIXELS + offset
    else:
        return tile * BLOCK_PIXELS + offset


@triton.jit
def tiles_of(pixels, BLOCK_PIXELS: tl.constexpr):
    """How many tiles hold so many pixels, at least one; near 2^31 of them too."""
    return (pixels - 1) // BLOCK_PIXELS + 1
