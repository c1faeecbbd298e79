"""Plain PyTorch for every kernel, in any dtype up to float64: the specification.

Names and shapes, here and in every backend:

- `x`, `y`, `dy`, `g` are `[N, C, H, W]`, stored NHWC (`torch.channels_last`, dense).
- `mean`, `var` (biased), `bn_weight`, `bn_bias` are `[C]` in the statistics dtype: float32,
  or float64 beside float64 activations. `xhat = (x - mean) * rsqrt(var + eps)`,
  `p = xhat * bn_weight + bn_bias`, `a = relu(p)`.
- `sums` is `[2, C]`: `sum(g)` and `sum(g * xhat)` over pixels, for `g = da * [p > 0]`; they are
  `dbn_bias` and `dbn_weight`.
- The gradient of a batch norm's input is `A*g + B*x + C`, with per channel
  `A = bn_weight * rstd`, `B = -A * rstd * sums[1] * inv_count`,
  `C = -A * sums[0] * inv_count - B * mean`. `inv_count` is one over the number of samples a
  channel, and 0 in evaluation mode, where mean and variance are constants.
"""

from preact_kernels.kernels.reference.bn_relu import (
    bn_input_gradient,
    bn_relu_backward_input,
    bn_relu_backward_sums,
    bn_relu_forward,
)
from preact_kernels.kernels.reference.bn_relu_conv import (
    bn_relu_conv_backward,
    bn_relu_conv_forward,
)
from preact_kernels.kernels.reference.bn_stats import bn_stats, running_stats_update
from preact_kernels.kernels.reference.residual_add import residual_add_forward

__all__ = [
    "bn_input_gradient",
    "bn_relu_backward_input",
    "bn_relu_backward_sums",
    "bn_relu_conv_backward",
    "bn_relu_conv_forward",
    "bn_relu_forward",
    "bn_stats",
    "residual_add_forward",
    "running_stats_update",
]
