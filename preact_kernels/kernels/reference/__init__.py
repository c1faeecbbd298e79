"""Plain PyTorch for every kernel, in any dtype up to float64: the specification of `Kernels`."""

from preact_kernels.kernels.dropout import dropout, dropout_bits
from preact_kernels.kernels.layout import nchw, nhwc
from preact_kernels.kernels.reference.bn_stats import bn_stats, group_stats
from preact_kernels.kernels.reference.norm_act import (
    norm_act_backward,
    norm_act_forward,
    norm_input_gradient,
)
from preact_kernels.kernels.reference.norm_act_conv import (
    norm_act_conv_backward,
    norm_act_conv_forward,
    serves,
)
from preact_kernels.kernels.reference.residual_add import residual_add_forward
from preact_kernels.kernels.running_stats import running_stats_update

serves_planes = False
checks_arguments = False

__all__ = [
    "bn_stats",
    "checks_arguments",
    "dropout",
    "dropout_bits",
    "group_stats",
    "nchw",
    "nhwc",
    "norm_act_backward",
    "norm_act_conv_backward",
    "norm_act_conv_forward",
    "norm_act_forward",
    "norm_input_gradient",
    "residual_add_forward",
    "running_stats_update",
    "serves",
    "serves_planes",
]
