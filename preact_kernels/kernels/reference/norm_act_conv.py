"""Normalisation, activation, convolution and residual add, forward and backward."""

from preact_kernels.kernels import pytorch_conv
from preact_kernels.kernels import reference as kernels
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


def serves(unit: Unit, pixels: int | None = None) -> bool:
    """No: every convolution is PyTorch's."""
    return False


def norm_act_conv_forward(unit: Unit, inputs: Inputs, epilogue: Epilogue = NO_EPILOGUE) -> Output:
    """`y = conv(act(p)) [+ conv_bias] [+ residual]`."""
    return pytorch_conv.norm_act_conv_forward(kernels, unit, inputs, epilogue)


def norm_act_conv_backward(unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted) -> Gradients:
    """`g = conv_transpose(dy) * act'(p)`, its sums, and the gradient of `conv_weight`."""
    return pytorch_conv.norm_act_conv_backward(kernels, unit, dy, inputs, wanted)
