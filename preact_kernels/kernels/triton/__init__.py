"""The Triton backend, for GPUs and for the interpreter: an implementation of `BlockKernels`.

Kernels see a dense NHWC tensor as a `[pixels, channels]` matrix, of the batch or of each image.
There is one file per op, and `block_run` for several blocks in one call. Shared code is in
`batch_norm`, `activations` and `conv` (device functions), `packing` (weights), `reduction` (sums
over programs), `launch` (launches, grids) and `configurations` (tile sizes).
"""

from preact_kernels.kernels.dropout import dropout, dropout_bits
from preact_kernels.kernels.layout import nchw, nhwc
from preact_kernels.kernels.running_stats import (
    fast_running_stats_update as running_stats_update,
)
from preact_kernels.kernels.triton.block_run import block_run_backward, block_run_forward
from preact_kernels.kernels.triton.bn_stats import bn_stats
from preact_kernels.kernels.triton.group_stats import group_stats
from preact_kernels.kernels.triton.norm_act import (
    norm_act_backward,
    norm_act_forward,
    norm_input_gradient,
)
from preact_kernels.kernels.triton.norm_act_conv import (
    norm_act_conv_backward,
    norm_act_conv_forward,
    serves,
)
from preact_kernels.kernels.triton.residual_add import residual_add_forward

serves_planes = False
checks_arguments = False

__all__ = [
    "block_run_backward",
    "block_run_forward",
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
