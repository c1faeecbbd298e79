"""Norm, activation and convolution: a fused kernel where faster, else PyTorch's convolution."""

import torch

from preact_kernels.kernels import pytorch_conv
from preact_kernels.kernels import triton as kernels
from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Output,
    Unit,
    Wanted,
)
from preact_kernels.kernels.triton.batch_norm import aligned_gradient
from preact_kernels.kernels.triton.configurations import is_fused
from preact_kernels.kernels.triton.conv import precision
from preact_kernels.kernels.triton.launch import aligned
from preact_kernels.kernels.triton.norm_act_conv_backward import launch_norm_act_conv_backward
from preact_kernels.kernels.triton.norm_act_conv_forward import launch_norm_act_conv_forward

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS = ("relu", "leaky_relu", "identity")  # others are bound by instruction issue


def serves(unit: Unit, pixels: int | None = None) -> bool:
    """See `Kernels.serves`. The result does not depend on the device or on `pixels`.

    With products in half precision, weights may be float32, and so may one of x and y.
    """
    sides = unit.x_dtype, unit.y_dtype
    return (
        unit.activation.name in _ACTIVATIONS
        and not unit.has_rows
        and unit.dtype in _DTYPES
        and unit.dtype in sides
        and {*sides, unit.weight_dtype} <= {unit.dtype, torch.float32}
        and is_fused(unit.weight_shape, unit.conv.groups, precision(unit.dtype))
    )


def norm_act_conv_forward(unit: Unit, inputs: Inputs, epilogue: Epilogue = NO_EPILOGUE) -> Output:
    """See `Kernels.norm_act_conv_forward`."""
    if serves(unit):
        inputs = inputs._replace(x=aligned(inputs.x))
        if epilogue.residual is not None:
            epilogue = epilogue._replace(residual=aligned(epilogue.residual))
        return launch_norm_act_conv_forward(unit, inputs, epilogue)
    return pytorch_conv.norm_act_conv_forward(kernels, unit, inputs, epilogue)


def norm_act_conv_backward(unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted) -> Gradients:
    """See `Kernels.norm_act_conv_backward`."""
    if serves(unit):
        inputs = inputs._replace(x=aligned(inputs.x))
        return launch_norm_act_conv_backward(unit, aligned_gradient(dy), inputs, wanted)
    return pytorch_conv.norm_act_conv_backward(kernels, unit, dy, inputs, wanted)
