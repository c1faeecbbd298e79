"""`bn_relu_conv2d`: batch norm, ReLU and convolution; saves only the input for backward."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from preact_kernels.activations import RELU
from preact_kernels.norms import BatchNorm
from preact_kernels.ops import checks
from preact_kernels.ops.norm_act_conv import norm_act_conv_of, plain_norm_act_conv
from preact_kernels.ops.plain_operators import runs_plain
from preact_kernels.ops.unit import ConvArguments


def bn_relu_conv2d(
    x: Tensor,
    conv_weight: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    conv_bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    residual: Tensor | None = None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: Any = None,
) -> Tensor:
    """Batch norm, ReLU, convolution and residual add; saves only `x` for backward.

    Equals `F.conv2d(F.relu(F.batch_norm(x, running_mean, running_var, bn_weight, bn_bias,
    training, momentum, eps)), conv_weight, conv_bias, stride, padding, dilation, groups)
    [+ residual]`. The unit is from He et al., "Identity Mappings in Deep Residual Networks"
    (arXiv 1603.05027).

    Args:
        x: `[N, C, H, W]`, float32, float64, bfloat16 or float16; any strides.
        conv_weight: `[K, C / groups, R, S]` in the dtype of `x` or float32. Under autocast the
            convolution runs in the autocast dtype.
        bn_weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bn_bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place in training mode; required in evaluation mode.
        running_var: `[C]`, unbiased; as `running_mean`.
        conv_bias: `[K]` or None.
        stride: stride of the convolution, pixels.
        padding: zeros on each side, pixels, added after the activation; or `"same"`, `"valid"`.
        dilation: dilation of the convolution, pixels.
        groups: number of groups of the convolution.
        residual: `[N, K, H', W']`, added to the result.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: the `torch.distributed` group that shares the statistics of the batch, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, K, H', W']` in the dtype of `x` and the memory format that `F.conv2d` gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match, or there is one value per channel in
            training mode.
        BackendError: the selected backend cannot serve `x`.
    """
    running = (running_mean, running_var)
    bn = BatchNorm(bn_weight, bn_bias, *running, training, momentum, eps, process_group)
    conv = ConvArguments(conv_weight, conv_bias, stride, padding, dilation, groups)
    if runs_plain(x, conv_weight, bn_weight, bn_bias, *running, conv_bias, residual):
        return plain_norm_act_conv(x, bn, RELU, conv, residual, convolution=F.conv2d)
    checks.check_activation("x", x)
    return norm_act_conv_of(x, bn, RELU, conv, residual, prefix="bn_")
