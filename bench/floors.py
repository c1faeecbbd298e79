"""Least cost of a step or an op: bytes that must move, and FLOPs.

Bytes follow a plan for fused kernels, block by block, without caches. The passes of a
bottleneck 4C -> C -> C -> 4C, in multiples of C elements per pixel:

    forward   F1  x 4 -> z1 1          F2  z1 1 -> z2 1        F3  z2 1, x 4 -> y 4          16
    backward  B3  dy 4, z2 1 -> g3 1                                                          6
              B2  g3 1, z2 1, z1 1 -> g2 1                                                    4
              B1a g2 1, z1 1, x 4 -> (sums; g1 is not stored)                                 6
              B1b g2 1, z1 1, x 4, dy 4 -> dx 4                                              14
                                                                                       total 46

B3 may compute its own dy, instead of B1b of the next block. This would save 4 C elements per pixel,
and is not counted here.
"""

import functools
from typing import NamedTuple

import torch
from torch import nn

from bench.contenders import Network


class Cost(NamedTuple):
    """Bytes moved and floating-point operations (a multiply-add counts as two)."""

    bytes_moved: float
    flops: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes_moved + other.bytes_moved, self.flops + other.flops)


def conv_flops(conv: nn.Conv2d, batch: int, out_pixels: int) -> float:
    """Returns the FLOPs of one forward of `conv`."""
    return 2.0 * batch * out_pixels * conv.weight.numel()


def block_cost(block: nn.Module, batch: int, height: int, itemsize: int) -> tuple[Cost, int]:
    """Returns the cost of a block's forward and backward, and the height of its output."""
    units = list(block.units())
    inputs, flops = [], 0.0  # inputs: elements of each unit's input
    for _, conv in units:
        inputs.append(batch * conv.in_channels * height**2)
        height //= conv.stride[0]
        flops += 3 * conv_flops(conv, batch, height**2)  # forward, input and weight gradient
    x = inputs[0]
    y = batch * units[-1][1].out_channels * height**2
    outputs = [*inputs[1:], y]
    shortcut = getattr(block, "shortcut", None)

    elements = sum(inputs[1:]) + sum(outputs[:-1])  # units read their inputs, write their outputs
    elements += x + y
    elements += y if shortcut is not None else x  # the last one reads the shortcut
    for index in reversed(range(1, len(units))):
        if index == len(units) - 1:
            elements += y + 2 * inputs[index]  # dy, z -> g
        else:
            elements += 2 * outputs[index] + 2 * inputs[index]  # g above, z above, z -> g
    above = 2 * outputs[0]  # g above, z above: give the gradient of the first unit's output
    elements += 2 * above
    elements += x  # B1a
    elements += x + x  # B1b: -> dx
    if shortcut is None:
        elements += x  # B1b adds dy, which has the shape of x
    else:
        flops += 3 * conv_flops(shortcut, batch, height**2)
        elements += x + y  # the projection: x -> shortcut
        elements += 2 * y  # and its gradient: B1a and B1b both read dy
    return Cost(elements * itemsize, flops), height


@functools.cache
def network_cost(network: Network, batch: int, dtype: torch.dtype) -> Cost:
    """Returns the cost of a training step of a pre-activation ResNet: forward, backward and SGD.

    - Stem: reads the image and writes its output; the weight gradient reads both.
    - Max pool, if there is one: reads its input and writes its output; the same for gradients.
    - Final BN-ReLU and mean pool: reads x; the backward reads x twice and writes dx (the incoming
      gradient is one value per channel).
    - Parameters, 4 bytes each, 8 passes: read in the forward and in the backward, gradient written
      and read, parameter and momentum read and written.
    """
    with torch.device("meta"):
        model = network.model(fused=False)
    itemsize, height = dtype.itemsize, network.image_size
    image = batch * 3 * height**2
    height //= model.stem.stride[0]
    stem_out = batch * model.stem.out_channels * height**2
    total = Cost(2 * (image + stem_out) * itemsize, 2 * conv_flops(model.stem, batch, height**2))
    if isinstance(model.pool, nn.MaxPool2d):
        height //= model.pool.stride
        pooled = batch * model.stem.out_channels * height**2
        total += Cost(2 * (stem_out + pooled) * itemsize, 0.0)
    for stage in model.stages:
        for block in stage:
            cost, height = block_cost(block, batch, height, itemsize)
            total += cost
    head = batch * model.norm.bn.num_features * height**2
    total += Cost(4 * head * itemsize, 6.0 * batch * model.fc.weight.numel())
    parameters = sum(p.numel() for p in model.parameters())
    return total + Cost(8 * 4 * parameters, 0.0)


def bn_relu_cost(x_elements: int, itemsize: int, backward: bool) -> Cost:
    """Returns the cost of `pk.bn_relu` in training mode.

    Forward, 3 passes: reads x for the statistics, reads x, writes y. Backward, 5 passes: reads dy
    and x for the sums, reads dy and x, writes dx.
    """
    passes = 3 + (5 if backward else 0)
    return Cost(passes * x_elements * itemsize, 0.0)


def bn_relu_conv_cost(
    x_elements: int,
    y_elements: int,
    flops: float,
    itemsize: int,
    *,
    has_residual: bool,
    backward: bool,
) -> Cost:
    """Returns the cost of `pk.bn_relu_conv2d` in training mode.

    Forward: reads x for the statistics, reads x and the residual, writes y. Backward: reads dy and
    x for the sums and the weight gradient; then either reads dy and x and writes dx, or writes g
    before and reads g and x and writes dx, whichever moves less. The residual's gradient is dy.
    `flops`: one forward of the convolution.
    """
    elements = 2 * x_elements + y_elements + (y_elements if has_residual else 0)
    if backward:
        elements += min(2 * y_elements + 3 * x_elements, y_elements + 5 * x_elements)
    return Cost(elements * itemsize, flops * (3 if backward else 1))
