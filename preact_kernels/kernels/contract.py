"""The contract of a backend: the named arguments of every kernel, their results, and `Kernels`.

Names and shapes, here and in every backend:

- `x`, `y`, `dy`, `g` are `[N, C, H, W]`, dense in NHWC order (`torch.channels_last`). `dy` is the
  gradient of an op's output, `g` the gradient behind the ReLU mask.
- Statistics, batch-norm parameters and sums are in the statistics dtype (`statistics_dtype`).
- `xhat = (x - mean) * rsqrt(var + eps)`, `p = xhat * weight + bias`, `a = relu(p)`, and
  `g = da * [p > 0]`. A NaN in `p` passes the gradient, as in PyTorch.
- `sums` is `[2, C]`: `sum(g)` and `sum(g * xhat)` over all pixels. They are the gradients of the
  batch norm's bias and weight.
- The gradient of a batch norm's input is `A*g + B*x + C`, per channel, with
  `A = weight * rstd`, `B = -A * rstd * sums[1] * inv_count` and
  `C = -A * sums[0] * inv_count - B * mean`. `inv_count` is one over the samples per channel. It
  is 0 in evaluation mode, where mean and variance are constants and `x` is not read.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of means, variances and sums beside activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Norm(NamedTuple):
    """What normalises a tensor: every field but `eps` is `[C]` in the statistics dtype."""

    mean: Tensor
    var: Tensor  # biased
    weight: Tensor
    bias: Tensor | None  # may be None in a fold, which does not read it
    eps: float


class Conv(NamedTuple):
    """Geometry of a convolution, in pixels."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def output_shape(self, shape: Sequence[int], weight_shape: Sequence[int]) -> list[int]:
        """`[N, K, H', W']` for an input of `shape` and a weight `[K, C / groups, R, S]`."""
        height, width = (
            (shape[2 + i] + 2 * self.padding[i] - self.dilation[i] * (weight_shape[2 + i] - 1) - 1)
            // self.stride[i]
            + 1
            for i in (0, 1)
        )
        return [shape[0], weight_shape[0], height, width]


class Fold(NamedTuple):
    """The rest of a gradient that is still folded: `[skip +] A*g + B*x + C`.

    `g` is passed beside it, and the kernel that consumes the gradient evaluates the sum as it
    loads. Where a gradient is whole there is no fold: the argument is None.
    """

    skip: Tensor | None  # a gradient to add, shaped like x
    x: Tensor  # the input of the batch norm
    norm: Norm
    sums: Tensor
    inv_count: float


class Wanted(NamedTuple):
    """Which results of `bn_relu_conv_backward` the caller asks for."""

    input: bool  # g and its sums
    weight: bool  # the gradient of the convolution's weight
    dy: bool = False  # the unfolded dy; only beside a fold


class Epilogue(NamedTuple):
    """What `bn_relu_conv_forward` does with the result of the convolution, in this order."""

    conv_bias: Tensor | None = None  # [K], added
    residual: Tensor | None = None  # shaped like y, added
    with_stats: bool = False  # return the statistics of y
    dtype: torch.dtype | None = None  # of the product; None for the narrower one of its operands


NO_EPILOGUE = Epilogue()


class BatchStatistics(NamedTuple):
    """Mean and biased variance per channel, `[C]` each."""

    mean: Tensor
    var: Tensor


class Output(NamedTuple):
    """A tensor, and its statistics where they were asked for: those of `y` as stored."""

    y: Tensor
    statistics: BatchStatistics | None


class ConvGradients(NamedTuple):
    """Results of `bn_relu_conv_backward`; None where `Wanted` says no."""

    g: Tensor | None
    sums: Tensor | None
    conv_weight: Tensor | None
    dy: Tensor | None


class BlockRun(NamedTuple):
    """Blocks in a row without projections, which differ in their values alone.

    `serves_conv` holds for all their convolutions, which have stride 1.
    """

    parameters: Sequence[Tensor]  # bn_weight, bn_bias, conv_weight of every unit
    eps: Sequence[float]  # of every unit
    units_per_block: int
    convs: Sequence[Conv]  # of the units of a block
    dtype: torch.dtype | None = None  # of their products; None for the narrower of the operands


class BlockRunOutput(NamedTuple):
    """Results of `block_run_forward`."""

    y: Tensor
    statistics: BatchStatistics | None  # of y
    unit_statistics: list[Tensor]  # mean and var of every unit
    inputs: list[Tensor | None]  # of every unit; None where not kept


class BlockRunGradients(NamedTuple):
    """Results of `block_run_backward`."""

    g: Tensor  # of the first unit
    dy: Tensor  # gradient of the first block's output, which is what its shortcut passes on
    x: Tensor  # input of the first block
    conv_weights: list[Tensor]  # gradients, of every unit
    sums: list[Tensor]  # of every unit


class Kernels(Protocol):
    """The functions of a backend. `preact_kernels.kernels.reference` specifies each of them.

    Attributes:
        takes_float32_weights: a convolution's weight may be float32 beside activations in half
            precision, in which it is then multiplied; its gradient is float32, and not rounded
            where a fused kernel computes it.
    """

    takes_float32_weights: bool = False

    @abstractmethod
    def serves_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        """Whether `bn_relu_conv_*` run a fused kernel, not PyTorch's convolution.

        Args:
            weight_shape: `[K, C / groups, R, S]`.
            conv: geometry.
            dtype: of the activations.
            device: of the activations.
            pixels: of the input, over the batch; None asks whether any number is served.
        """

    @abstractmethod
    def bn_stats(self, x: Tensor) -> BatchStatistics:
        """`mean = sum(x) / m`, `var = sum((x - mean)^2) / m` over the `m = N*H*W` samples."""

    @abstractmethod
    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        """`running = (1 - momentum) * running + momentum * batch`, in place, for many vectors."""

    @abstractmethod
    def bn_relu_forward(self, x: Tensor, norm: Norm) -> Tensor:
        """`relu(p)`, in the dtype of `x`."""

    @abstractmethod
    def bn_relu_backward_sums(self, dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """The sums of `g = dy * [p > 0]`."""

    @abstractmethod
    def bn_relu_backward_mask(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`g = dy * [p > 0]` in the dtype of `x`, and its sums."""

    @abstractmethod
    def bn_relu_backward_input(
        self, dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
    ) -> Tensor:
        """`A*g + B*x + C` for `g = dy * [p > 0]`."""

    @abstractmethod
    def bn_input_gradient(self, g: Tensor, fold: Fold) -> Tensor:
        """`[skip +] A*g + B*x + C`, in the dtype of the fold's `x`."""

    @abstractmethod
    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> Output:
        """`y = conv(relu(p)) [+ conv_bias] [+ residual]`."""

    @abstractmethod
    def bn_relu_conv_backward(
        self,
        dy: Tensor,
        fold: Fold | None,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        wanted: Wanted,
    ) -> ConvGradients:
        """`g = conv_transpose(dy) * [p > 0]`, its sums, and the gradient of `conv_weight`.

        With a fold, the argument `dy` is the `g` of that fold, and the gradient of the output is
        `[skip +] A*g + B*x + C`, which is returned as `ConvGradients.dy` where wanted.
        """

    @abstractmethod
    def residual_add_forward(self, x: Tensor, branch: Tensor, with_stats: bool) -> Output:
        """`y = x + branch`."""


class BlockKernels(Kernels, Protocol):
    """A backend that also runs several blocks in one call."""

    @abstractmethod
    def block_run_forward(
        self,
        x: Tensor,
        run: BlockRun,
        x_statistics: BatchStatistics | None,
        known: Sequence[Tensor] | None,
        *,
        with_stats: bool,
        keep_inputs: bool,
        keep_block_inputs: bool,
    ) -> BlockRunOutput:
        """`y = x + F(x)` for each block in turn.

        Args:
            x: input of the first block.
            run: the blocks.
            x_statistics: of `x`, where the caller has them.
            known: mean and var of every unit; None where each unit takes those of its batch.
            with_stats: return the statistics of the output.
            keep_inputs: return the inputs of all units but the first of each block.
            keep_block_inputs: return the inputs of the first units.
        """

    @abstractmethod
    def block_run_backward(
        self,
        dy: Tensor,
        fold: Fold | None,
        run: BlockRun,
        inputs: Sequence[Tensor | None],
        statistics: Sequence[Tensor],
        inv_count: float,
        y: Tensor | None,
    ) -> BlockRunGradients:
        """Every gradient of the blocks.

        Args:
            dy: gradient of the last block's output, or the `g` of `fold`.
            fold: as in `bn_relu_conv_backward`.
            run: the blocks.
            inputs: of every unit; the first of each block is None where it is rebuilt from `y`.
            statistics: mean and var of every unit.
            inv_count: the same for all units.
            y: output of the last block, or None where all inputs are kept. Each block's input is
                then `x = y - F(x)`, by one more call of its last convolution.
        """


class StreamConvs(Kernels, Protocol):
    """Convolutions that also read and write a float32 residual stream.

    Where `serves_stream_conv` says so, one side of a convolution in half precision may be float32:
    `x`; or the residual and so `y`, which in the backward are `x` and `skip` of the fold, the
    unfolded `dy`, and `dy` without a fold. `g` is in half precision, both the fold's and the
    result.
    """

    @abstractmethod
    def serves_stream_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        """`serves_conv` beside a float32 stream, for products in `dtype`."""


class StreamKernels(StreamConvs, BlockKernels, Protocol):
    """A backend whose fused convolutions also read and write a float32 residual stream.

    In a run of blocks, which have two units or more, inputs and outputs of all blocks are of the
    stream.
    """
