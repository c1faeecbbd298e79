"""`residual_add`: the addition at the end of a residual block."""

import torch
from torch import Tensor

from preact_kernels.kernels import layout
from preact_kernels.ops import checks, dispatch
from preact_kernels.ops.plain_operators import runs_plain


class ResidualAddFunction(torch.autograd.Function):
    """y = x + branch; saves nothing for backward."""

    @staticmethod
    def forward(ctx, x, branch):
        return dispatch.kernels_for(x).residual_add_forward(x, branch, False).y

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


def residual_add(x: Tensor, branch: Tensor) -> Tensor:
    """Adds a residual branch to its shortcut: `x + branch`.

    Args:
        x: `[N, C, H, W]`, float32, float64, bfloat16 or float16; any strides.
        branch: `[N, C, H, W]`.

    Returns:
        `[N, C, H, W]` in the memory format of `x` and the dtype of `x + branch`.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: shapes or devices differ.
        BackendError: the selected backend cannot serve `x`.
    """
    if runs_plain(x, branch):
        return x + branch
    checks.check_activation("x", x)
    checks.check_residual(branch, "branch", x.shape, x)
    if x.dtype != branch.dtype or x.numel() == 0:
        return x + branch
    channels_last = layout.is_channels_last(x)
    y = ResidualAddFunction.apply(layout.nhwc(x), layout.nhwc(branch))
    return layout.restored(y, channels_last)
