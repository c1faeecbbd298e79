"""`bn_relu`: batch norm and ReLU; saves only the input for backward."""

from typing import Any

from torch import Tensor

from preact_kernels.norms import BatchNorm
from preact_kernels.ops import checks
from preact_kernels.ops.norm_act import norm_act_of, plain_norm_act
from preact_kernels.ops.plain_operators import runs_plain


def bn_relu(
    x: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: Any = None,
) -> Tensor:
    """Batch norm and ReLU in one operation that saves only `x` for backward.

    Equals `F.relu(F.batch_norm(x, running_mean, running_var, bn_weight, bn_bias, training,
    momentum, eps))`.

    Args:
        x: `[N, C, H, W]`, float32, float64, bfloat16 or float16; any strides.
        bn_weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bn_bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place in training mode; required in evaluation mode.
        running_var: `[C]`, unbiased; as `running_mean`.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: the `torch.distributed` group that shares the statistics of the batch, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        `[N, C, H, W]` in the dtype and memory format of `x`.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, or there is one value per channel in
            training mode.
        BackendError: the selected backend cannot serve `x`.
    """
    running = (running_mean, running_var)
    bn = BatchNorm(bn_weight, bn_bias, *running, training, momentum, eps, process_group)
    if runs_plain(x, bn_weight, bn_bias, *running):
        return plain_norm_act(x, bn)
    checks.check_activation("x", x)
    return norm_act_of(x, bn, prefix="bn_")
