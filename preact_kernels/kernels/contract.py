"""The contract of a backend: the named arguments of every kernel, their results, and `Kernels`.

Names and shapes, here and in every backend:

- `x`, `y`, `residual`, `dy`, `g` are `[N, C, H, W]`, dense in NHWC order (`torch.channels_last`).
  `dy` is the gradient of an output, `g` the gradient of `p`.
- Statistics, parameters of norms and sums are in the statistics dtype (`statistics_dtype`).
- `xhat = (x - mean) * rsqrt(var + eps)`, `p = xhat * weight + bias`, rounded to the dtype of `x`,
  `a = act(p)`, and `g = da * act'(p)`. A NaN in `p` gives what PyTorch's activation gives.
- Mean, variance, weight and bias are each `[C]`, the same for all images, or `[N, C]`, a row for
  each image. A norm *has rows* if any of the four is `[N, C]`.
- `sums` is `[2, C]`: `sum(g)` and `sum(g * xhat)` over all pixels; `[2, N, C]` over the pixels of
  each image if the norm has rows. They are the gradients of bias and weight.
- The gradient of a norm's input is the affine step `A*g + B*x + C`, per channel, with
  `A = weight * rstd`, `B = -A * rstd * sums[1] * inv_count` and
  `C = -A * sums[0] * inv_count - B * mean`. `inv_count` is one over the samples per channel. It
  is 0 in evaluation mode, where mean and variance are constants and `x` is not read.
- If the norm of an affine step has rows, its sums `[2, N, C]` are *pooled*: sums of `weight * g`,
  averaged over the values that share statistics. Then `B = -rstd^2 * sums[1] * inv_count` and
  `C = -rstd * sums[0] * inv_count - B * mean`. Only the dimensions of the sums tell whether the
  norm has rows, as the norm of a step may lack its bias.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.activations import RELU, Activation
from preact_kernels.kernels.dropout import Mask, dropout, dropout_bits
from preact_kernels.kernels.running_stats import is_one_norm, scaled

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES, torch.float64)
# Activations of `norm_act_forward` with a residual.
WITH_RESIDUAL = ("relu", "identity")


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of means, variances and sums of activations in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def samples_of(shape: Sequence[int]) -> int:
    """Samples of each channel of a tensor of shape `[N, C, ...]`: its pixels over the batch."""
    count = shape[0]
    for size in shape[2:]:
        count = count * size
    return count


def pool_sums(sums: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """`Kernels.pool_sums` in PyTorch's operators."""
    weighted = (sums * weight).view(2, sums.shape[1], groups, -1)
    pooled = weighted.mean(3, keepdim=True).expand_as(weighted)
    return pooled.reshape(sums.shape).contiguous(), sums.sum(1)


class Conv(NamedTuple):
    """Geometry of a convolution: pixels along height and width, or depth, height and width."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def output_shape(self, shape: Sequence[int], weight_shape: Sequence[int]) -> list[int]:
        """`[N, K, H', W']` for an input of `shape` and a weight `[K, C / groups, R, S]`; or 3d."""
        sizes = []
        for axis, (stride, padding, dilation) in enumerate(zip(*self[:3], strict=True), 2):
            read = shape[axis] + 2 * padding - dilation * (weight_shape[axis] - 1) - 1
            sizes.append(read // stride + 1)
        return [shape[0], weight_shape[0], *sizes]

    def of_rows(self) -> "Conv":
        """Converts the geometry of a convolution of sequences to one of images of one row."""
        stride, padding, dilation, groups = self
        return Conv((1, *stride), (0, *padding), (1, *dilation), groups)


NO_CONV = Conv((), (), (), 1)


class Unit(NamedTuple):
    """Shapes, dtypes and options of `y = conv(act(norm(x))) [+ conv_bias] [+ residual]`.

    Without a convolution the weight has no shape, and `conv` is `NO_CONV`.

    `dtype` is the dtype of the convolution's products, and of `g`. The other dtypes differ from it
    where the residual stream or the weights are float32 and the products in half precision.
    """

    weight_shape: Sequence[int]  # [K, C / groups, R, S]
    conv: Conv
    device: torch.device
    dtype: torch.dtype
    x_dtype: torch.dtype
    y_dtype: torch.dtype  # also of the residual, and of the gradient of y
    weight_dtype: torch.dtype
    uses_batch: bool = True  # normalise with the statistics of the batch
    process_group: object = None  # shares the batch statistics; kernels do not read it
    activation: Activation = RELU
    has_rows: bool = False  # whether the norm has rows
    eps: float = 1e-5
    norm_groups: int | None = None  # groups of channels per image; None: statistics per channel


class Block(NamedTuple):
    """Shapes, dtypes and options of a residual block; hashable.

    A projection reads the activation of the first unit.
    """

    units: tuple[Unit, ...]
    projection: Unit | None  # None: the shortcut is the input
    is_residual: bool = True  # False: no shortcut, `y = F(x)`

    def shapes(self, shape: Sequence[int]) -> list[Sequence[int]]:
        """Shapes of the inputs of all units and of the output, for an input of `shape`."""
        shapes = [shape]
        for unit in self.units:
            shapes.append(unit.conv.output_shape(shapes[-1], unit.weight_shape))
        return shapes


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


class Statistics(NamedTuple):
    """Mean and biased variance per channel, `[C]` each, or `[N, C]` for each image."""

    mean: Tensor
    var: Tensor


class Norm(NamedTuple):
    """Normalisation and activation of a tensor.

    The tensors are `[C]` or `[N, C]`, contiguous, in the statistics dtype.
    """

    mean: Tensor
    var: Tensor  # biased
    weight: Tensor
    bias: Tensor | None  # None only in an affine step that does not differentiate the activation
    eps: float
    activation: str = "relu"  # a name of `activations.ACTIVATIONS`
    parameter: float = 0.0  # of the activation

    @property
    def has_rows(self) -> bool:
        """Whether a tensor has a row for each image."""
        mean, _, weight, bias, *_ = self
        return mean.dim() == 2 or weight.dim() == 2 or (bias is not None and bias.dim() == 2)

    def sums_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of `sums`."""
        return (2, *(x.shape[:1] if self.has_rows else ()), x.shape[1])


class AffineStep(NamedTuple):
    """The step `[skip +] A*g + B*x + C` from `g` to the gradient of a norm's input."""

    skip: Tensor | None  # a gradient to add, shaped like x
    x: Tensor  # the input of the norm
    norm: Norm
    sums: Tensor  # pooled if the norm has rows
    inv_count: float


class Gradient(NamedTuple):
    """A gradient: `g` itself, or, with a deferred step, the result of the step.

    The kernel that consumes the gradient evaluates the step as it loads.
    """

    g: Tensor
    step: AffineStep | None = None

    def whole(self, kernels: "Kernels") -> Tensor:
        """The gradient with its deferred step evaluated, in the dtype of the step's `x`."""
        g, step = self
        if step is None:
            return g
        return kernels.norm_input_gradient(Gradient(g.to(step.x.dtype), step))


class Inputs(NamedTuple):
    """The tensors that a unit convolves."""

    x: Tensor
    norm: Norm
    conv_weight: Tensor


class Epilogue(NamedTuple):
    """Operations of `norm_act_conv_forward` after the convolution, in this order."""

    conv_bias: Tensor | None = None  # [K], added
    residual: Tensor | None = None  # shaped like y, added
    with_stats: bool = False  # return the statistics of y


NO_EPILOGUE = Epilogue()


class Output(NamedTuple):
    """A tensor, and the statistics of its stored values if requested."""

    y: Tensor
    statistics: Statistics | None


class Wanted(NamedTuple):
    """The results of `norm_act_conv_backward` to compute."""

    input: bool  # g and its sums
    weight: bool  # the gradient of the convolution's weight
    dy: bool = False  # the whole dy; only where a step is deferred
    activated: bool = False  # g may be the gradient of the activation: `Gradients.activated`
    sums: bool = True  # False: the sums of g may be zeros


class Gradients(NamedTuple):
    """Results of `norm_act_conv_backward`; None unless `Wanted`."""

    g: Tensor | None
    sums: Tensor | None
    conv_weight: Tensor | None
    dy: Tensor | None
    # Whether `g` is the gradient of the activation, not multiplied by act'(p).
    activated: bool = False


class Parameters(NamedTuple):
    """The trained tensors of a unit, or their gradients."""

    bn_weight: Tensor
    bn_bias: Tensor
    conv_weight: Tensor


class BlockRun(NamedTuple):
    """Consecutive blocks `y = x + F(x)` without projections, with equal units.

    The backend refuses no unit; all have stride 1 and no process group.
    """

    units: Sequence[Unit]  # units of one block
    parameters: Sequence[Parameters]  # one for each unit of each block
    # Statistics of the input of each unit; None: the forward computes them from the batch.
    statistics: Sequence[Statistics | None]

    @property
    def eps(self) -> list[float]:
        """One eps for each unit of each block."""
        return [float(u.eps) for u in self.units] * (len(self.parameters) // len(self.units))


class RunWanted(NamedTuple):
    """The results of `block_run_forward` to return."""

    statistics: bool  # statistics of y
    block_inputs: Sequence[bool]  # for each block, the input of its first unit
    unit_inputs: bool  # the inputs of all other units


class BlockRunOutput(NamedTuple):
    """Results of `block_run_forward`."""

    y: Tensor
    statistics: Statistics | None  # statistics of y
    unit_statistics: list[Statistics]  # one for the input of each unit
    inputs: list[Tensor | None]  # one for each unit; None where not wanted


class BlockRunGradients(NamedTuple):
    """Results of `block_run_backward`."""

    x: Gradient  # gradient of the first block's input, with a deferred step
    parameters: list[Parameters]  # gradients for each unit


class Kernels(Protocol):
    """The functions of a backend. `preact_kernels.kernels.reference` specifies each of them."""

    # Whether statistics, `norm_act_forward`, `norm_act_backward` and `norm_input_gradient` also
    # take tensors in NCHW order, and return results in the same order.
    serves_planes: bool = False
    # Whether to give a convolution's bias to the residual addition, or to `group_stats` of the next
    # norm: on a GPU, PyTorch's convolution adds it in a kernel of its own.
    adds_bias: bool = False
    # `norm_buffers_update` of one norm in one launch, for running mean and variance, mean and
    # variance, momentum, factor of the variance, and count or None; None: there is none.
    one_norm_update: Callable[..., None] | None = None
    # Whether all but `norm_act_conv_*` and `running_stats_update` check their arguments.
    checks_arguments: bool = False

    @abstractmethod
    def refusal(self, unit: Unit, pixels: int | None = None) -> str:
        """Why `norm_act_conv_*` run PyTorch's convolution; empty if they run a fused kernel.

        The reason begins with the name of an argument. `pixels` counts the pixels of the input,
        over the batch; None: empty if some number is served.
        """

    @abstractmethod
    def bn_stats(self, x: Tensor) -> Statistics:
        """`mean = sum(x) / m`, `var = sum((x - mean)^2) / m` over the `m = N*H*W` samples."""

    @abstractmethod
    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        """`running = (1 - momentum) * running + momentum * batch`, in place, for many vectors."""

    def norm_buffers_update(
        self,
        running: list[Tensor],
        batch: list[Tensor],
        momentum: float,
        factors: Sequence[float],
        counts: Sequence[Tensor],
    ) -> None:
        """`running_stats_update` with `factor * batch`, and `count = count + 1`, in place.

        Args:
            running: vectors.
            batch: a vector for each.
            momentum: of all vectors.
            factors: a factor for each vector.
            counts: numbers of batches, int64.
        """
        update = self.one_norm_update
        if update is not None and is_one_norm(running, batch, counts):
            mean, var = scaled(batch, (factors[0], 1))
            count = counts[0] if counts else None
            update(*running, mean, var, float(momentum), float(factors[1]), count)
            # Custom ops, and kernels of Triton, do not bump versions.
            torch.autograd.graph.increment_version([*running, *counts])
            return
        self.running_stats_update(running, scaled(batch, factors), momentum)
        if counts:
            torch_compat.foreach_add_(list(counts), 1)

    @abstractmethod
    def group_stats(self, x: Tensor, groups: int, bias: Tensor | None = None) -> Statistics:
        """Mean and variance of each image and group of `C / groups` channels.

        With a `bias` `[C]` in the statistics dtype, those of `x + bias`, and the bias is subtracted
        from the mean: a norm with these statistics normalises `x` as `x + bias`.

        Returns:
            `[N, C]` each, equal for the channels of a group. The mean of a constant group is its
            value, exactly. A row depends only on its image, bit for bit.
        """

    @abstractmethod
    def norm_act_forward(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """`act(p)`, or `act(p + residual)`, in the dtype of `x`.

        `residual` has the shape, dtype and memory order of `x`. The sum is rounded to the dtype of
        `x` before the activation, which is "relu" or "identity".
        """

    @abstractmethod
    def norm_act_backward(
        self, dy: Tensor, x: Tensor, norm: Norm, with_g: bool, y: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """`g = dy * act'(p)` in the dtype of `x`, or None unless `with_g`; and its sums.

        With `y`, the result of `norm_act_forward` with a residual and "relu", `g` is 0 where
        `y <= 0`, else `dy`: a NaN in `y` passes `dy`. `g` is then also the gradient of the
        residual. With a residual and "identity", `g` is `dy`, as without a residual.
        """

    @abstractmethod
    def norm_act_recompute(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`act(p)` as in `norm_act_forward`, and the sums of `norm_act_backward`, in one pass.

        `dy` is the gradient of the input of a convolution, and the gradient of its weight needs
        `act(p)`.
        """

    @abstractmethod
    def norm_input_gradient(self, gradient: Gradient, activated: bool = False) -> Tensor:
        """The result of the gradient's deferred step, in the dtype of the step's `x`.

        If `activated`, `gradient.g` is `dy`, and `g = dy * act'(p)` for the norm of the step.
        """

    @abstractmethod
    def norm_act_conv_forward(
        self,
        unit: Unit,
        inputs: Inputs,
        epilogue: Epilogue = NO_EPILOGUE,
        mask: Mask | None = None,
    ) -> Output:
        """`y = conv(dropout(act(p))) [+ conv_bias] [+ residual]`; also for volumes.

        `mask` is the mask of the dropout; None: there is none.
        """

    @abstractmethod
    def norm_act_conv_backward(
        self,
        unit: Unit,
        dy: Gradient,
        inputs: Inputs,
        wanted: Wanted,
        mask: Mask | None = None,
    ) -> Gradients:
        """`g = dropout(conv_transpose(dy)) * act'(p)`, its sums, and the gradient of `conv_weight`.

        `g` is in the dtype of the products, or of `x` where PyTorch's convolution runs; `g` of
        volumes is `[N, C, D * H, W]`. `dy` is in the dtype of `y`; with a deferred step its `g` is
        in the dtype of the products.
        """

    def pool_sums(self, sums: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """The sums of the step of a group norm, and the sums over all images.

        Args:
            sums: `[2, N, C]`, of `norm_act_backward`.
            weight: `[C]` or `[N, C]`, of the norm.
            groups: groups of channels per image.

        Returns:
            `weight * sums`, averaged over the channels of each group, `[2, N, C]`; and `[2, C]`.
        """
        return pool_sums(sums, weight, groups)

    def dropout_bits(self, drawn: Tensor) -> Tensor:
        """Packs `drawn != 0` into bytes, eight values to a byte, lowest bit first.

        `drawn` is contiguous. Unused bits of the last byte are 0.
        """
        return dropout_bits(drawn)

    def dropout(self, values: Tensor, mask: Mask) -> Tensor:
        """Applies dropout to `values`, `[N, C, ...]` in NHWC order, in place."""
        return dropout(values, mask)

    @abstractmethod
    def residual_add_forward(
        self, x: Tensor, branch: Tensor, with_stats: bool, bias: Tensor | None = None
    ) -> Output:
        """`y = x + branch`, or `y = x + (branch + bias)` for `bias` `[C]` in the dtype of `x`.

        With a bias there are no statistics. The sum in parentheses may be rounded to this dtype.
        """


class BlockKernels(Kernels, Protocol):
    """A backend that also runs several blocks in one call."""

    @abstractmethod
    def block_run_forward(self, run: BlockRun, x: Tensor, wanted: RunWanted) -> BlockRunOutput:
        """`y = x + F(x)` for each block in turn."""

    @abstractmethod
    def block_run_backward(
        self, run: BlockRun, dy: Gradient, inputs: Sequence[Tensor | None], y: Tensor | None
    ) -> BlockRunGradients:
        """Gradients of all parameters, and of the first block's input.

        Args:
            run: the blocks, with the statistics of all units.
            dy: gradient of the last block's output.
            inputs: the input of each unit. None for the first unit of a block: its input is rebuilt
                from the block's output, `x = y - F(x)`, by running the last convolution again.
            y: output of the last block; None if the input of that block is kept.
        """
