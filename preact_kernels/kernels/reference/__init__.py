"""Plain PyTorch for every kernel, in any dtype up to float64: the specification of `Kernels`."""

import functools

from torch import Tensor

from preact_kernels.kernels.contract import Output, Unit
from preact_kernels.kernels.pytorch_conv import UnitKernels
from preact_kernels.kernels.reference.bn_stats import bn_stats, group_stats
from preact_kernels.kernels.reference.norm_act import (
    norm_act_backward,
    norm_act_forward,
    norm_act_recompute,
    norm_input_gradient,
)
from preact_kernels.kernels.running_stats import running_stats_update


class ReferenceKernels(UnitKernels):
    """The functions of this package; all convolutions run in PyTorch."""

    bn_stats = staticmethod(bn_stats)
    group_stats = staticmethod(group_stats)
    norm_act_forward = staticmethod(norm_act_forward)
    norm_act_backward = staticmethod(norm_act_backward)
    norm_act_recompute = staticmethod(norm_act_recompute)
    norm_input_gradient = staticmethod(norm_input_gradient)
    running_stats_update = staticmethod(running_stats_update)

    def computes_g_again(self, activation: str) -> bool:
        return False  # each of PyTorch's operators is a pass

    def _unit_refusal(self, unit: Unit) -> str:
        return "backend: the reference has no fused convolution"

    def residual_add_forward(
        self, x: Tensor, branch: Tensor, with_stats: bool, bias: Tensor | None = None
    ) -> Output:
        y = x + (branch if bias is None else branch + bias.view(-1, 1, 1))
        return Output(y, bn_stats(y) if with_stats else None)


@functools.cache
def kernels() -> ReferenceKernels:
    """The backend's functions."""
    return ReferenceKernels()
