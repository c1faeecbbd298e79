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
    """Returns False: all convolutions run in PyTorch."""
    return False


def norm_act_conv_forward(unit: Unit, inputs: Inputs, epilogue: Epilogue = NO_EPILOGUE) -> Output:
    """See `Kernels.norm_act_conv_forward`."""
    return pytorch_conv.norm_act_conv_forward(kernels, unit, inputs, epilogue)


def norm_act_conv_backward(unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted) -> Gradients:
    """See `Kernels.norm_act_conv_backward`."""
    return pytorch_conv.norm_act_conv_backward(kernels, unit, dy, inputs, wanted)
