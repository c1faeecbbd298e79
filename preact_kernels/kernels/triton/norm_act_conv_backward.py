"""Backward of norm, activation and convolution: one launch for all gradients, or two."""

import math
from typing import cast

import torch
from torch import Tensor

from preact_kernels.kernels.contract import Gradient, Gradients, Inputs, Unit, Wanted
from preact_kernels.kernels.triton.batch_norm import kernel_gradient, kernel_norm
from preact_kernels.kernels.triton.configurations import conv_backward
from preact_kernels.kernels.triton.conv import UnitSizes, unit_sizes
from preact_kernels.kernels.triton.input_gradient import InputGradientLaunch, input_grid
from preact_kernels.kernels.triton.launch import PreparedLaunches, on_device_of, properties
from preact_kernels.kernels.triton.norm_act import norm_input_gradient
from preact_kernels.kernels.triton.packing import packed_weight
from preact_kernels.kernels.triton.reduction import (
    finished_sums,
    launch_sum_partials,
    new_sums,
)
from preact_kernels.kernels.triton.weight_gradient import (
    WeightGradientLaunch,
    WeightInputs,
    new_weight_gradients,
)


def costs_less_apart(programs: int, apart_programs: int, weights: int, apart_bytes: int) -> bool:
    """Whether a separate launch for the gradient of a weight moves fewer bytes than one pass.

    Args:
        programs: programs of the single pass; each stores a gradient of the weight.
        apart_programs: programs of the separate launch.
        weights: number of weights.
        apart_bytes: bytes that the separate launch adds: it reads x and dy again, and dy may have
            to be stored first.
    """
    partial_bytes = 2 * 4 * weights  # float32, written and read
    return apart_programs * partial_bytes + apart_bytes < programs * partial_bytes


class BackwardLaunch:
    """Reusable launches for the backward of a unit, for inputs of one shape.

    Args:
        sizes: sizes of the unit.
        wanted: the results to compute.
        dy_is_whole: whether dy has no deferred step, or its result is stored in any case.
        prepared: see `InputGradientLaunch`.

    Attributes:
        sizes, prepared: as given.
        in_one_pass: whether one kernel computes g and the gradient of the weight.
        input: launch for g, and for the gradient of the weight if `in_one_pass`.
        weight: separate launch for the gradients of the weights of several units.
        programs: number of partial gradients of the weight per unit.
    """

    def __init__(
        self,
        sizes: UnitSizes,
        wanted: Wanted,
        dy_is_whole: bool,
        prepared: PreparedLaunches | None = None,
    ) -> None:
        self.sizes, self.prepared = sizes, prepared
        configs = conv_backward(properties(sizes.unit.device), sizes.unit)
        self.weight = WeightGradientLaunch(sizes, configs.weight, prepared)
        input_config, self.in_one_pass = configs.input, False
        if configs.both is not None and wanted.input and wanted.weight:
            is_stored = not dy_is_whole and sizes.shape.R * sizes.shape.S == 1
            self.in_one_pass = not costs_less_apart(
                input_grid(sizes, configs.both)[0],
                self.weight.programs,
                math.prod(sizes.unit.weight_shape),
                self.weight.passes * (sizes.x_bytes + sizes.y_bytes) + is_stored * sizes.y_bytes,
            )
            input_config = configs.both if self.in_one_pass else configs.input
        self.input = InputGradientLaunch(sizes, input_config, prepared)
        self.programs = self.input.programs if self.in_one_pass else self.weight.programs


def launch_norm_act_conv_backward(
    unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted
) -> Gradients:
    """`Kernels.norm_act_conv_backward` for convolutions with one group."""
    x, norm, conv_weight = inputs
    norm, dy = kernel_norm(norm), kernel_gradient(dy)
    launch = BackwardLaunch(unit_sizes(unit, x.shape), wanted, dy.step is None or wanted.dy)
    g = sums = dconv_weight = partials = None
    with on_device_of(x):
        if wanted.weight:
            partials = x.new_empty((1, launch.programs, conv_weight.numel()), dtype=torch.float32)
        if wanted.input:
            accumulators = new_sums(x, x.shape[1])
            packed = packed_weight(conv_weight, unit.dtype)
            g, whole = launch.input(
                dy,
                Inputs(x, norm, packed),
                accumulators[0],
                cast(Tensor, partials)[0] if launch.in_one_pass else None,
                needs_whole=wanted.dy or (wanted.weight and not launch.in_one_pass),
            )
            sums = finished_sums(accumulators)[0]
        else:
            whole = dy.g if dy.step is None else norm_input_gradient(dy)
        if partials is not None:
            if not launch.in_one_pass:
                launch.weight([WeightInputs(cast(Tensor, whole), x, norm)], partials)
            results = new_weight_gradients(conv_weight, 1)
            launch_sum_partials(partials, results)
            dconv_weight = results[0]
    return Gradients(g, sums, dconv_weight, whole if wanted.dy else None)
