"""`BNReLU2d`: batch norm and ReLU."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels.modules.norm import is_bare_norm, plain_batch_norm
from preact_kernels.norms import BatchNorm
from preact_kernels.ops.arguments import UnitArguments
from preact_kernels.ops.checks import check_count, check_norm_numbers
from preact_kernels.ops.node import run_unit
from preact_kernels.ops.plain import chain
from preact_kernels.ops.plain_operators import runs_plain


class BNReLU2d(nn.Module):
    """Batch norm and ReLU; saves only the input for backward.

    Equals `F.relu(bn(x))` for its child `bn`, an `nn.BatchNorm2d`, or an `nn.SyncBatchNorm` after
    `convert_sync_batchnorm`.

    Args:
        num_features: channels of the input.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None for their cumulative average.
        affine: whether `bn` has a weight and a bias.
        track_running_stats: whether `bn` has running statistics.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of range.
    """

    fused = True
    residual_dtype: torch.dtype | None = None  # see PreActStage; PreActResNet sets it

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        check_count("num_features", num_features)
        check_norm_numbers(eps, momentum)
        self.bn = nn.BatchNorm2d(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` to the same shape, dtype and memory format."""
        if not (self.fused and is_bare_norm(self.bn)) or runs_plain(x):
            norm = partial(plain_batch_norm, self.bn, residual_dtype=self.residual_dtype)
            return chain(x, norm, partial(F.relu, inplace=is_bare_norm(self.bn)))
        bn = BatchNorm.of_module(self.bn)
        if self.residual_dtype is not None and x.dtype == self.residual_dtype:
            bn = bn.in_float32()
        return run_unit(x, UnitArguments(bn), prefix="bn_", dims=4)
