"""Norm and activation in one operation; saves only the input for backward.

`pk.bn_relu`, `pk.batch_norm_act` and `pk.group_norm_act` call `norm_act_of`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from preact_kernels.activations import ACTIVATIONS, RELU, Activation, activate
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import AffineStep, Gradient, Kernels, Norm, Statistics
from preact_kernels.norms import BatchNorm, GroupNorm, NormArguments
from preact_kernels.ops import checks, dispatch
from preact_kernels.ops.activation import activation_of
from preact_kernels.ops.autocast import is_autocast
from preact_kernels.ops.double_backward import differentiable_norm_act, gradients
from preact_kernels.ops.plain_operators import runs_plain, runs_plain_backward
from preact_kernels.ops.statistics import step_sums


class ScaleShift(NamedTuple):
    """A scale and a shift per image after a norm: `h * (1 + scale) + shift`.

    Alternatively a factor and a shift, `h * factor + shift`. Tensors are `[N, C]` or
    `[N, C, 1, ...]`.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    factor: Tensor | None = None

    def check(self, x: Tensor) -> None:
        """Raises unless all tensors match the images `x`."""
        for name, t in zip(self._fields, self, strict=True):
            if t is None:
                continue
            checks.check_like(name, t, "x", x)
            n, c = x.shape[:2]
            if t.dim() not in (2, x.dim()) or t.shape != (n, c, *[1] * (t.dim() - 2)):
                expected = f"[{n}, {c}]"
                if x.dim() > 2:
                    expected += f" or {[n, c, *[1] * (x.dim() - 2)]}"
                raise ValueError(
                    f"{name}: expected shape {expected} to match x, got {list(t.shape)}"
                )
            checks.check_parameter_dtype(name, t, x.dtype)

    def promoted(self, x: Tensor) -> Tensor:
        """Casts `x` to PyTorch's dtype of `norm(x) * (1 + scale) + shift`."""
        dtype = x.dtype
        for t in self:
            if t is not None:
                dtype = torch.promote_types(dtype, t.dtype)
        return x.to(dtype)

    def of(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Multiplies weight and bias by the scale and adds the shift, which gives `[N, C]`."""
        scale, shift, factor = (None if t is None else t.flatten(1).to(weight.dtype) for t in self)
        if scale is not None:
            factor = 1 + scale
        if factor is not None:
            weight, bias = weight * factor, bias * factor
        if shift is not None:
            bias = bias + shift
        return weight.contiguous(), bias.contiguous()

    def plain(self, h: Tensor) -> Tensor:
        """`h * (1 + scale) + shift` in PyTorch's operators."""
        has_none = all(t is None for t in self)
        return h if has_none else modulate(h, *self)


NO_SCALE_SHIFT = ScaleShift()


def scale_shift_of(scale: Tensor | None, shift: Tensor | None) -> ScaleShift:
    """Returns `NO_SCALE_SHIFT` itself if both are None."""
    return NO_SCALE_SHIFT if scale is None and shift is None else ScaleShift(scale, shift)


@fx.wrap  # branches on shapes, unknown in a symbolic trace
def modulate(
    h: Tensor, scale: Tensor | None, shift: Tensor | None, factor: Tensor | None = None
) -> Tensor:
    """`h * (1 + scale) + shift`, or `h * factor + shift`."""
    shape = (*h.shape[:2], *[1] * (h.dim() - 2))
    if factor is not None:
        h = h * factor.reshape(shape)
    if scale is not None:
        h = h * (1 + scale.reshape(shape))
    return h if shift is None else h + shift.reshape(shape)


class NormActCall(NamedTuple):
    """Arguments of the autograd function other than tensors."""

    kernels: Kernels
    eps: float
    activation: Activation
    groups: int | None  # groups of channels per image; None: statistics per channel
    training: bool  # normalise with the statistics of the input
    process_group: object
    fixed_inv_count: float | None  # see `inv_count_of`
    planar: bool  # x is in NCHW order
    dims: int  # dimensions of the result
    channels_last: bool  # memory format of the result

    def image(self, t: Tensor) -> Tensor:
        """Converts `t` to `[N, C, H, W]` in the order that the kernels take."""
        return layout.as_planes(t) if self.planar else layout.as_image(t)


def runs_on_planes(
    kernels: Kernels,
    x: Tensor,
    norm: NormArguments,
    activation: Activation,
    scale_shift: ScaleShift,
    channels_last: bool,
) -> bool:
    """Whether kernels run in NCHW order: `x` and the result are in NCHW, and the kernels serve it.

    Batch norm with ReLU alone always runs in NHWC, to give the same bits in either memory format.
    """
    if not kernels.serves_planes or channels_last or layout.is_channels_last(x):
        return False
    is_bn_relu = isinstance(norm, BatchNorm) and activation == RELU
    return not is_bn_relu or any(t is not None for t in scale_shift)


def inv_count_in(x: Tensor, groups: int | None, fixed: float | None) -> float:
    """1 / samples per sum, unless fixed; see `inv_count_of`.

    Batch norm counts the pixels of the batch. Group norms count the pixels of an image, as
    `step_sums` averages over the channels of a group.
    """
    if fixed is not None:
        return fixed
    return 1.0 / ((x.shape[0] if groups is None else 1) * x.shape[2] * x.shape[3])


def parameter_gradients(
    sums: Tensor, weight: Tensor, bias: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, each `[C]` or `[N, C]` like its parameter."""
    found = []
    for total, parameter, is_needed in ((sums[1], weight, needed[0]), (sums[0], bias, needed[1])):
        if is_needed and total.dim() > parameter.dim():
            total = total.sum(0)
        found.append(total if is_needed else None)
    return found[0], found[1]


class NormActFunction(torch.autograd.Function):
    """y = act(norm(x)) for given statistics.

    x comes from `layout.dense`. The result has its final dimensions and memory format, and is
    detached, since a view would not allow `y.data = ` and in-place changes.
    """

    @staticmethod
    def forward(ctx, call, x, weight, bias, mean, var):
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, mean, var)
        norm = Norm(mean, var, weight, bias, call.eps, *call.activation)
        y = call.kernels.norm_act_forward(call.image(x), norm)
        return layout.from_image(y, layout.shape_of(x, call.dims), call.channels_last).detach()

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # in the double backward of a convolution
            return None, None, None, None, None, None
        x, weight, bias, mean, var = ctx.saved_tensors
        call = ctx.call
        # Hooks of saved tensors may return another memory format.
        x = layout.dense(x, call.planar)
        needs_x, *needs = ctx.needs_input_grad[1:4]
        norm = Norm(mean, var, weight, bias, call.eps, *call.activation)
        if runs_plain_backward(dy):

            def forward(x, weight, bias):
                norm = Norm(mean, var, weight, bias, call.eps, *call.activation)
                shared = call.groups, call.training, call.process_group
                y = differentiable_norm_act(x, norm, *shared)
                return y if call.dims > 3 else y.reshape(dy.shape)

            grads = gradients(forward, (x, weight, bias), ctx.needs_input_grad[1:4], dy)
            return None, *grads, None, None
        image, dy = call.image(x), call.image(dy)
        if call.training or any(needs):
            _, sums = call.kernels.norm_act_backward(dy, image, norm, False)
        else:  # mean and variance are constants: dx does not need the sums
            sums = zero_sums(image, norm)
        dx = None
        if needs_x:
            shared = step_sums(sums, norm, call.groups, call.process_group)
            inv_count = inv_count_in(image, call.groups, call.fixed_inv_count)
            step = AffineStep(None, image, norm, shared, inv_count)
            dx = call.kernels.norm_input_gradient(Gradient(dy, step), True)
            dx = layout.from_image(dx, x.shape, not call.planar)
        return None, dx, *parameter_gradients(sums, weight, bias, needs), None, None


def zero_sums(x: Tensor, norm: Norm) -> Tensor:
    """Zeros in the shape of `Gradients.sums`."""
    rows = x.shape[:1] if norm.has_rows else ()
    return norm.mean.new_zeros((2, *rows, x.shape[1]))


def activated_dtype(norm: NormArguments, activation: Activation, x: Tensor) -> torch.dtype:
    """The dtype of PyTorch's activation; on CUDA, autocast computes some in float32."""
    is_widened = ACTIVATIONS[activation.name].is_widened and x.is_cuda and is_autocast(x)
    return torch.float32 if is_widened else norm.result_dtype(x)


def norm_act_of(
    x: Tensor,
    norm: NormArguments,
    activation: Activation = RELU,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    prefix: str = "",
    channels_last: bool | None = None,
) -> Tensor:
    """`act(norm(x) * (1 + scale) + shift)`.

    Args:
        x: `[N, C, ...]`.
        norm: the arguments of the norm.
        activation: the activation.
        scale_shift: a scale and a shift per image.
        prefix: prefix of the names of the norm's weight and bias in messages.
        channels_last: memory format of the result; None: PyTorch's.
    """
    norm.check(x, prefix)
    if any(t is not None for t in scale_shift):
        scale_shift.check(x)
        x = scale_shift.promoted(x)
    dtype = activated_dtype(norm, activation, x)
    kernels = dispatch.kernels_for(x)
    arguments = norm, activation, scale_shift, channels_last
    y, statistics, fixed = normalise(kernels, x.to(dtype), *arguments)
    norm.update(kernels, x, statistics, fixed)
    return y


def normalise(
    kernels: Kernels,
    x: Tensor,
    norm: NormArguments,
    activation: Activation = RELU,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
    channels_last: bool | None = None,
) -> tuple[Tensor, Statistics | None, float | None]:
    """`norm_act_of` for checked arguments, without the update of running statistics.

    Returns:
        The result, then the results of `norm.statistics`, which are None for an empty batch.
    """
    if x.numel() == 0 and norm.process_group is None:
        return _of_empty_batch(x, norm, activation, scale_shift), None, None
    if channels_last is None:
        channels_last = norm.is_channels_last(x)
    planar = runs_on_planes(kernels, x, norm, activation, scale_shift, channels_last)
    dims, x = x.dim(), layout.dense(x, planar)
    weight, bias = scale_shift.of(*norm.affine(x, x.shape[1]))
    image = x.detach()
    image = layout.as_planes(image) if planar else layout.as_image(image)
    statistics, fixed = norm.statistics(kernels, image)
    shared = norm.groups, norm.training, norm.process_group
    formats = planar, dims, channels_last
    call = NormActCall(kernels, norm.eps, activation, *shared, fixed, *formats)
    return NormActFunction.apply(call, x, weight, bias, *statistics), statistics, fixed


def _of_empty_batch(
    x: Tensor, norm: NormArguments, activation: Activation, scale_shift: ScaleShift
) -> Tensor:
    return activate(scale_shift.plain(norm.plain_of_empty_batch(x)).to(x.dtype), activation)


def plain_norm_act(
    x: Tensor,
    norm: NormArguments,
    activation: Activation = RELU,
    scale_shift: ScaleShift = NO_SCALE_SHIFT,
) -> Tensor:
    """`norm_act_of` in PyTorch's operators, which check the arguments."""
    h = norm.plain(x)
    return activate(scale_shift.plain(h), activation)


def group_norm_act(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | tuple[str, float] = "relu",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group norm and activation in one operation that saves only `x` for backward.

    Equals `act(F.group_norm(x, num_groups, weight, bias, eps) * (1 + scale) + shift)`. With
    `num_groups` equal to the channels it is an instance norm, with 1 a layer norm of whole images.
    The result of an image does not depend on other images, bit for bit. Group norm: Wu and He,
    "Group Normalization" (arXiv 1803.08494).

    Args:
        x: `[N, C, ...]` of 2 to 5 dimensions, float32, float64, bfloat16 or float16; any strides.
        num_groups: groups of channels; each has its own statistics in each image.
        weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        activation: `"relu"`, `"leaky_relu"`, `"identity"`, `"relu6"`, `"silu"`, `"gelu"`,
            `"gelu_tanh"`, `"elu"`, `"hardswish"`, `"mish"`, `"softplus"`, `"sigmoid"` or `"tanh"`;
            or a tuple of the name and its parameter: the slope of leaky_relu, alpha of elu, beta
            of softplus.
        scale: `[N, C]` or `[N, C, 1, ...]` in the dtype of `x` or float32; None for zeros.
        shift: as `scale`.
        eps: added to the variance.

    Returns:
        The shape of `x`, in the dtype and memory format that PyTorch gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, `num_groups` does not divide the
            channels, the activation is unknown, or there is one value per group.
        BackendError: the selected backend cannot serve `x`.
    """
    norm, function = GroupNorm(weight, bias, groups=num_groups, eps=eps), activation_of(activation)
    scale_shift = scale_shift_of(scale, shift)
    if runs_plain(x, weight, bias, scale, shift):
        return plain_norm_act(x, norm, function, scale_shift)
    return norm_act_of(x, norm, function, scale_shift)


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    activation: str | tuple[str, float] = "relu",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: Any = None,
) -> Tensor:
    """Batch norm and activation in one operation that saves only `x` for backward.

    Equals `act(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps) *
    (1 + scale) + shift)`.

    Args:
        x: `[N, C, ...]` of 2 to 5 dimensions, float32, float64, bfloat16 or float16; any strides.
        weight: `[C]` in the dtype of `x` or float32, or None for ones.
        bias: `[C]` in the dtype of `x` or float32, or None for zeros.
        running_mean: `[C]`, updated in place in training mode; required in evaluation mode.
        running_var: `[C]`, unbiased; as `running_mean`.
        activation: as in `pk.group_norm_act`.
        scale: `[N, C]` or `[N, C, 1, ...]` in the dtype of `x` or float32; None for zeros.
        shift: as `scale`.
        training: normalise with the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        process_group: the `torch.distributed` group that shares the statistics of the batch, as in
            `torch.nn.SyncBatchNorm`.

    Returns:
        The shape of `x`, in the dtype and memory format that PyTorch gives.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not served.
        ValueError: a shape or a device does not match `x`, the activation is unknown, or there is
            one value per channel in training mode.
        BackendError: the selected backend cannot serve `x`.
    """
    running = (running_mean, running_var)
    norm = BatchNorm(weight, bias, *running, training, momentum, eps, process_group)
    function, scale_shift = activation_of(activation), scale_shift_of(scale, shift)
    if runs_plain(x, weight, bias, *running, scale, shift):
        return plain_norm_act(x, norm, function, scale_shift)
    return norm_act_of(x, norm, function, scale_shift)
