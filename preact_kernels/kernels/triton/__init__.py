"""The Triton backend, for GPUs and for the interpreter.

Kernels see a dense NHWC tensor as a `[pixels, channels]` matrix, of the batch or of each image.
There is one file per op, and `block_run` for several blocks in one call. Shared code is in
`batch_norm`, `activations` and `conv` (device functions), `packing` (weights), `reduction` (sums
over programs), `launch` (launches, grids) and `configurations` (tile sizes).
"""

import functools

import torch

from preact_kernels.kernels.contract import (
    BlockKernels,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Output,
    Unit,
    Wanted,
)
from preact_kernels.kernels.pytorch_conv import (
    UnitKernels,
    mixed_dtypes_refusal,
    rows_refusal,
    unserved,
)
from preact_kernels.kernels.running_stats import fast_running_stats_update
from preact_kernels.kernels.triton.batch_norm import aligned_gradient
from preact_kernels.kernels.triton.block_run import block_run_backward, block_run_forward
from preact_kernels.kernels.triton.configurations import conv_refusal
from preact_kernels.kernels.triton.conv import precision
from preact_kernels.kernels.triton.launch import aligned
from preact_kernels.kernels.triton.norm_act import (
    norm_act_backward,
    norm_act_forward,
    norm_act_recompute,
    norm_input_gradient,
)
from preact_kernels.kernels.triton.norm_act_conv_backward import launch_norm_act_conv_backward
from preact_kernels.kernels.triton.norm_act_conv_forward import launch_norm_act_conv_forward
from preact_kernels.kernels.triton.pool_sums import pool_sums
from preact_kernels.kernels.triton.residual_add import residual_add_forward
from preact_kernels.kernels.triton.running_stats import norm_buffers_update
from preact_kernels.kernels.triton.statistics import bn_stats, group_stats

_ACTIVATIONS = ("relu", "leaky_relu", "identity")  # others are bound by instruction issue


class TritonKernels(UnitKernels, BlockKernels):
    """The functions of this package."""

    adds_bias = True

    bn_stats = staticmethod(bn_stats)
    group_stats = staticmethod(group_stats)
    norm_act_forward = staticmethod(norm_act_forward)
    norm_act_backward = staticmethod(norm_act_backward)
    norm_act_recompute = staticmethod(norm_act_recompute)
    norm_input_gradient = staticmethod(norm_input_gradient)
    pool_sums = staticmethod(pool_sums)
    residual_add_forward = staticmethod(residual_add_forward)
    running_stats_update = staticmethod(fast_running_stats_update)
    one_norm_update = staticmethod(norm_buffers_update)
    block_run_forward = staticmethod(block_run_forward)
    block_run_backward = staticmethod(block_run_backward)

    def _unit_refusal(self, unit: Unit) -> str | None:
        """See `UnitKernels`. The result does not depend on the device."""
        if unit.activation.name not in _ACTIVATIONS:
            return unserved("activation", ", ".join(_ACTIVATIONS), unit.activation.name)
        if refusal := rows_refusal(unit) or mixed_dtypes_refusal(unit):
            return refusal
        if unit.dtype == torch.float32:  # PyTorch may allow TF32, or not
            return None
        return conv_refusal(unit.weight_shape, unit.conv.groups, precision(unit.dtype))

    def _call_refusal(self, unit: Unit, pixels: int | None) -> str:
        return conv_refusal(unit.weight_shape, unit.conv.groups, precision(unit.dtype))

    def _fused_forward(self, unit: Unit, inputs: Inputs, epilogue: Epilogue) -> Output:
        inputs = inputs._replace(x=aligned(inputs.x))
        if epilogue.residual is not None:
            epilogue = epilogue._replace(residual=aligned(epilogue.residual))
        return launch_norm_act_conv_forward(unit, inputs, epilogue)

    def _fused_backward(
        self, unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted
    ) -> Gradients:
        inputs = inputs._replace(x=aligned(inputs.x))
        return launch_norm_act_conv_backward(unit, aligned_gradient(dy), inputs, wanted)


@functools.cache
def kernels() -> TritonKernels:
    """The backend's functions."""
    return TritonKernels()
