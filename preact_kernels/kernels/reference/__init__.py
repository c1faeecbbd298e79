"""Plain PyTorch for every kernel, in any dtype up to float64: the specification.

Implements `preact_kernels.kernels.contract.Kernels`, which has the names and the formulas.
"""

from preact_kernels.kernels.reference.bn_relu import (
    bn_input_gradient,
    bn_relu_backward,
    bn_relu_forward,
)
from preact_kernels.kernels.reference.bn_relu_conv import (
    bn_relu_conv_backward,
    bn_relu_conv_forward,
    serves,
)
from preact_kernels.kernels.reference.bn_stats import bn_stats
from preact_kernels.kernels.reference.residual_add import residual_add_forward
from preact_kernels.kernels.running_stats import running_stats_update

__all__ = [
    "bn_input_gradient",
    "bn_relu_backward",
    "bn_relu_conv_backward",
    "bn_relu_conv_forward",
    "bn_relu_forward",
    "bn_stats",
    "residual_add_forward",
    "running_stats_update",
    "serves",
]
