"""Units on the kernels of a backend, each as one autograd node that saves its input.

The public functions, the modules and converted models call `run_unit`.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.activations import IDENTITY, RELU, activate
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import (
    AffineStep,
    Epilogue,
    Gradient,
    Inputs,
    Kernels,
    Norm,
    Statistics,
    Unit,
    Wanted,
    samples_of,
    statistics_dtype,
)
from preact_kernels.kernels.dropout import Mask
from preact_kernels.norms import NormArguments
from preact_kernels.ops import dispatch
from preact_kernels.ops.arguments import NO_SCALE_SHIFT, ConvArguments, UnitArguments, convolve
from preact_kernels.ops.autocast import compute_dtype, has_autocast
from preact_kernels.ops.dropout import drawn
from preact_kernels.ops.plain import differentiable_unit, gradients
from preact_kernels.ops.plain_operators import runs_plain_backward
from preact_kernels.ops.statistics import (
    InvCount,
    Update,
    inv_count_of,
    inv_count_of_sums,
    step_sums,
    update_all,
)
from preact_kernels.ops.unit import CheckedUnit, checked_unit, unit_without_conv, with_served_weight


class UnitCall(NamedTuple):
    """Arguments of the autograd function other than tensors."""

    kernels: Kernels
    unit: Unit
    fixed_inv_count: float | None  # see `inv_count_of_sums`
    dims: int  # dimensions of the result
    channels_last: bool  # memory format of the result
    planar: bool = False  # x is in NCHW order
    keep_factor: float = 1.0  # scale of the elements that dropout keeps
    omits_bias: bool = False  # the next norm adds the convolution's bias
    is_shifted: bool = False  # the mean is relative to a bias of x: see `Kernels.group_stats`

    def image(self, t: Tensor) -> Tensor:
        """Converts `t` to `[N, C, H, W]` in the order that the kernels take."""
        return layout.as_planes(t) if self.planar else layout.as_image(t)

    def upcast(self, x: Tensor) -> Tensor:
        """Converts the saved `x` to the unit's dtype of x: float32 under autocast of CUDA."""
        return x if x.dtype == self.unit.x_dtype else x.to(self.unit.x_dtype)

    def image_weight(self, conv_weight: Tensor) -> Tensor:
        """The weight for kernels of images.

        Autograd saves the original weight, as a program may replace its `data`.
        """
        return conv_weight.unsqueeze(2) if self.dims == 3 else conv_weight

    def norm(self, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Norm:
        return Norm(mean, var, weight, bias, self.unit.eps, *self.unit.activation)

    def mask(self, bits: Tensor | None) -> Mask | None:
        return None if bits is None else Mask(bits, self.keep_factor)

    def result(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor | None = None,
        conv_bias: Tensor | None = None,
        residual: Tensor | None = None,
        bits: Tensor | None = None,
        upcast: Tensor | None = None,
    ) -> Tensor:
        """The unit's result in its final dimensions and memory format.

        It is detached, since a view would not allow `y.data = ` and in-place changes. `upcast` is
        `self.upcast(x)`, if it is known.
        """
        x = self.upcast(x) if upcast is None else upcast
        if conv_weight is None:
            added = () if residual is None else (self.image(residual),)
            y = self.kernels.norm_act_forward(self.image(x), norm, *added)
            return layout.from_image(y, layout.shape_of(x, self.dims), self.channels_last).detach()
        inputs = Inputs(x, norm, self.image_weight(conv_weight))
        epilogue = Epilogue(None if self.omits_bias else conv_bias, residual)
        y = self.kernels.norm_act_conv_forward(self.unit, inputs, epilogue, self.mask(bits)).y
        y = y.squeeze(2) if self.dims == 3 else y
        return layout.restored(y, self.channels_last).detach()


class UnitFunction(torch.autograd.Function):
    """`y = act(norm(x))`, or `y = conv(dropout(act(norm(x)))) [+ conv_bias] [+ residual]`.

    x and residual come from `layout.dense`. `bits` are those of the mask of dropout. An x in half
    precision is saved as it is, and converted again in the backward, if the unit is in float32.
    """

    @staticmethod
    def forward(ctx, call, x, weight, bias, mean, var, *of_conv):
        ctx.call = call
        ctx.set_materialize_grads(False)
        conv_weight, _, _, bits = of_conv[:4] or (None,) * 4
        optional = () if conv_weight is None else (conv_weight,)
        optional = optional if bits is None else (*optional, bits)
        # Only tensors, as tools that draw the graph expect.
        ctx.save_for_backward(x, weight, bias, mean, var, *optional)
        return call.result(x, call.norm(weight, bias, mean, var), *of_conv)

    @staticmethod
    def described(call, y, x, weight, bias, mean, var, *of_conv):
        """The tensors of `Rerun`, the residual, and what `FirstRun.saved` lists."""
        conv_weight, conv_bias, residual, bits = of_conv[:4] or (None,) * 4
        saved = [(0, x)]
        if conv_weight is not None and type(conv_weight) is not torch.nn.Parameter:
            saved.append((5, conv_weight))
        return (weight, bias, mean, var, conv_weight, conv_bias, bits), residual, saved

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # in the double backward of a convolution
            return (None,) * 11
        call, tensors = ctx.call, (*ctx.saved_tensors, None, None)[:7]
        needed = (*ctx.needs_input_grad[1:], False, False, False, False)
        needs_residual, needs = needed[7], (*needed[:3], *needed[5:7])
        run = _plain_backward if runs_plain_backward(dy) else _backward
        dx, dweight, dbias, dconv_weight, dconv_bias = run(call, dy, tensors, needs)
        dresidual = None
        if needs_residual:
            dresidual = dy.unsqueeze(2) if call.dims == 3 else dy
        dx = None if dx is None else dx.to(tensors[0].dtype)
        of_conv = dconv_weight, dconv_bias, dresidual, None, None
        return None, dx, dweight, dbias, None, None, *of_conv


class SumFunction(torch.autograd.Function):
    """`y = act(norm(x) + residual)`, where `act` is ReLU or the identity; see `UnitFunction`.

    ReLU saves its result, as in PyTorch, and the residual is not saved.
    """

    @staticmethod
    def forward(ctx, call, x, weight, bias, mean, var, residual, upcast=None):
        ctx.call = call
        ctx.set_materialize_grads(False)
        norm = call.norm(weight, bias, mean, var)
        y = call.result(x, norm, residual=residual, upcast=upcast)
        activated = (y,) if call.unit.activation == RELU else ()
        ctx.save_for_backward(x, weight, bias, mean, var, *activated)
        return y

    @staticmethod
    def described(call, y, x, weight, bias, mean, var, residual, upcast=None):
        """See `UnitFunction.described`."""
        saved = [(0, x), (5, y)] if call.unit.activation == RELU else [(0, x)]
        return (weight, bias, mean, var, None, None, None), residual, saved

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 8
        call, (_, needs_x, *needs_affine, _, _, needs_residual) = ctx.call, ctx.needs_input_grad[:7]
        saved = ctx.saved_tensors  # read once: hooks may compute them again
        tensors, results = saved[:5], saved[5:]
        needs, x = (needs_x, *needs_affine), layout.dense(tensors[0], call.planar)
        is_plain = runs_plain_backward(dy)
        needs_sums = call.unit.uses_batch or any(needs_affine)
        if results and needs_sums and not is_plain:
            x = call.upcast(x)
            image, norm, y = call.image(x), call.norm(*tensors[1:]), call.image(*results)
            g, sums = call.kernels.norm_act_backward(call.image(dy), image, norm, True, y)
            found = _norm_gradients(call, g, sums, x, norm, needs)
            dy = layout.from_image(g, x.shape, not call.planar)
        else:
            for y in results:
                dy = torch.ops.aten.threshold_backward(dy, y, 0)
            call = call._replace(unit=call.unit._replace(activation=IDENTITY))
            run = _plain_backward if is_plain else _backward
            found = run(call, dy, (*tensors, None, None), (*needs, False, False))
            dy = dy if call.dims > 3 else dy.reshape(x.shape)
        dx, dweight, dbias, *_ = found
        dx = None if dx is None else dx.to(tensors[0].dtype)
        dresidual = dy if needs_residual else None
        return None, dx, dweight, dbias, None, None, dresidual, None


def _plain_backward(call: UnitCall, dy: Tensor, tensors: Sequence, needs: Sequence[bool]) -> list:
    """The gradients of x, weight, bias, conv_weight and conv_bias in PyTorch's operators."""
    x, weight, bias, mean, var, conv_weight, bits = tensors
    unit, has_conv, conv_bias = call.unit, conv_weight is not None, None
    if needs[4]:  # the bias is not saved: no gradient depends on its values
        conv_bias = conv_weight.new_zeros(conv_weight.shape[0], requires_grad=True)

    def forward(x, weight, bias, conv_weight, conv_bias):
        kernel = None if conv_weight is None else call.image_weight(conv_weight)
        norm, x = call.norm(weight, bias, mean, var), call.upcast(x)
        if call.is_shifted:  # a group norm of x + bias, whatever is added to a group
            x = (x - mean.view(*mean.shape, *[1] * (x.dim() - 2))).to(x.dtype)
        y = differentiable_unit(unit, x, norm, kernel, conv_bias, call.mask(bits))
        return y if has_conv or call.dims > 3 else y.reshape(dy.shape)

    if has_conv:
        dy = (dy.unsqueeze(2) if call.dims == 3 else dy).to(unit.dtype)
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if has_autocast(kind) else contextlib.nullcontext():
        dx, *rest = gradients(forward, (x, weight, bias, conv_weight, conv_bias), needs, dy)
    return [dx.contiguous() if call.planar and dx is not None else dx, *rest]


def _backward(call: UnitCall, dy: Tensor, tensors: Sequence, needs: Sequence[bool]) -> list:
    """The gradients of x, weight, bias, conv_weight and conv_bias, by the backend."""
    x, weight, bias, mean, var, conv_weight, bits = tensors
    needs_x, needs_weight, needs_bias, needs_conv, needs_conv_bias = needs
    kernels, unit = call.kernels, call.unit
    norm = call.norm(weight, bias, mean, var)
    # Hooks of saved tensors may return another memory format.
    x = call.upcast(layout.dense(x, call.planar))
    dconv_weight = dconv_bias = None
    g: Any = None
    sums: Any = None
    needs_sums = needs_weight or needs_bias
    activated = conv_weight is None
    if conv_weight is None:
        image, g = call.image(x), call.image(dy)
        if unit.uses_batch or needs_sums:
            _, sums = kernels.norm_act_backward(g, image, norm, False)
        elif needs_x:  # mean and variance are constants: dx does not need the sums
            sums = norm.mean.new_zeros(norm.sums_shape(image))
    else:
        dy = layout.nhwc(dy.unsqueeze(2) if call.dims == 3 else dy)
        reads_sums = unit.uses_batch or needs_sums
        wanted = Wanted(needs_x or needs_sums, needs_conv, activated=True, sums=reads_sums)
        if wanted.input or wanted.weight:
            inputs = Inputs(x, norm, call.image_weight(conv_weight))
            g, sums, dconv_weight, _, activated = kernels.norm_act_conv_backward(
                unit, Gradient(dy), inputs, wanted, call.mask(bits)
            )
            if dconv_weight is not None and call.dims == 3:
                dconv_weight = dconv_weight.squeeze(2)
        if needs_conv_bias:
            dconv_bias = dy.sum((0, *range(2, dy.dim()))).to(unit.dtype)
    gradients_of_norm = _norm_gradients(call, g, sums, x, norm, needs[:3], activated)
    return [*gradients_of_norm, dconv_weight, dconv_bias]


def _norm_gradients(
    call: UnitCall,
    g: Tensor,
    sums: Tensor,
    x: Tensor,
    norm: Norm,
    needs: Sequence[bool],
    activated: bool = False,
) -> list:
    """The gradients of x, weight and bias; for `g` and `activated` see `norm_input_gradient`."""
    kernels, unit = call.kernels, call.unit
    needs_x, *needs_affine = needs
    dx = dweight = dbias = shared = totals = None
    if unit.norm_groups is not None and needs_x:
        shared, totals = kernels.pool_sums(sums, norm.weight, unit.norm_groups)
    if any(needs_affine):
        affine = norm.weight, cast(Tensor, norm.bias)
        dweight, dbias = parameter_gradients(sums, *affine, needs_affine, totals)
    if needs_x:
        image = call.image(x)
        if shared is None:
            shared = step_sums(sums, norm, samples_of(image.shape), unit.process_group)
        inv_count = inv_count_in(image, unit.norm_groups, call.fixed_inv_count)
        step = AffineStep(None, image, norm, shared, inv_count)
        g = g if g.dtype == x.dtype else g.to(x.dtype)
        dx = kernels.norm_input_gradient(Gradient(g, step), activated)
        dx = layout.from_image(dx, x.shape, not call.planar)
    return [dx, dweight, dbias]


def inv_count_in(x: Tensor, groups: int | None, fixed: float | None) -> float:
    """1 / samples per sum, unless fixed; see `inv_count_of`.

    Batch norm counts the pixels of the batch. Group norms count the pixels of an image, as
    `step_sums` averages over the channels of a group.
    """
    if groups is None or fixed is not None:
        return inv_count_of(x, fixed)
    return 1.0 / (x.shape[2] * x.shape[3])


def parameter_gradients(
    sums: Tensor,
    weight: Tensor,
    bias: Tensor,
    needed: Sequence[bool],
    totals: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, each `[C]` or `[N, C]` like its parameter.

    `totals` are the sums over all images, if they are known.
    """
    found: list[Tensor | None] = []
    for index, parameter, is_needed in ((1, weight, needed[0]), (0, bias, needed[1])):
        if not is_needed:
            found.append(None)
        elif sums.dim() == 2 or parameter.dim() == 2:
            found.append(sums[index])
        else:
            found.append(sums[index].sum(0) if totals is None else totals[index])
    return found[0], found[1]


class FirstRun:
    """The run of a unit that a backward may repeat.

    Args:
        is_hidden: whether the hooks of saved tensors do not see what the unit's node saves.

    Attributes:
        node: the unit's node, if it was hidden.
        saved: what this node saves of images and computed weights, each with its index among the
            saved tensors.
    """

    def __init__(self, is_hidden: bool) -> None:
        self.is_hidden = is_hidden
        self.node: Any = None
        self.saved: list[tuple[int, Tensor]] = []
        self._applied: tuple[Tensor, Rerun] | None = None

    def apply(self, function: Any, call: UnitCall, x: Tensor, *tensors: Tensor | None) -> Tensor:
        """Calls `apply` of `UnitFunction` or `SumFunction`."""
        if self.is_hidden:
            with torch_compat.saved_tensor_hooks_of(None):
                y = function.apply(call, x, *tensors)
        else:
            y = function.apply(call, x, *tensors)
        own, residual, saved = function.described(call, y, x, *tensors)
        residual_dtype = None if residual is None else residual.dtype
        self._applied = y, Rerun(call, x.dtype, residual_dtype, own)
        if self.is_hidden and y.grad_fn is not None:
            self.node, self.saved = y.grad_fn, saved
        return y

    def rerun(self, y: Tensor) -> "Rerun | None":
        """Returns what computes `y`, the result of `run_unit`, again; None: nothing does."""
        applied = self._applied
        return None if applied is None or applied[0] is not y else applied[1]


class Rerun(NamedTuple):
    """Computes a unit again without gradients, from tensors that were checked.

    Attributes:
        call: other arguments.
        dtype: dtype of x.
        residual_dtype: dtype of the residual, if there is one.
        tensors: weight, bias, mean, var, conv_weight, conv_bias, and bits of the mask of dropout.
    """

    call: UnitCall
    dtype: torch.dtype
    residual_dtype: torch.dtype | None
    tensors: tuple[Tensor | None, ...]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        call, (*affine, conv_weight, conv_bias, bits) = self.call, self.tensors
        x = layout.dense(x if x.dtype == self.dtype else x.to(self.dtype), call.planar)
        if residual is not None:
            residual = layout.dense(residual.to(self.residual_dtype), call.planar)
        norm = call.norm(*cast(Any, affine))
        return call.result(x, norm, conv_weight, conv_bias, residual, bits)


def run_unit(
    x: Tensor,
    given: UnitArguments,
    residual: Tensor | None = None,
    *,
    prefix: str = "",
    dims: int | None = None,
    channels_last: bool | None = None,
    first: FirstRun | None = None,
    x_bias: Tensor | None = None,
    omits_bias: bool = False,
    checked: CheckedUnit | None = None,
    updates: list[Update] | None = None,
) -> Tensor:
    """A unit on the kernels of the selected backend; updates running statistics.

    Args:
        x: `[N, C, ...]`.
        given: the arguments of the unit.
        residual: shaped like the result. Added to it, or without a convolution before the
            activation, which must be ReLU or the identity.
        prefix: prefix of the names of the norm's weight and bias in messages.
        dims: dimensions that x must have; None: 3 to 5, or 2 to 5 without a convolution.
        channels_last: memory format of the result; None: PyTorch's.
        first: records this run, so that a backward may repeat it.
        x_bias: the norm, with groups, is of `x + x_bias`, `[C]`. Gets no gradient here.
        omits_bias: do not add the convolution's bias: the unit that reads the result does, as
            `x_bias`. The bias gets its gradient here. There is no residual.
        checked: the result of `checked_unit` for these arguments, if it is known.
        updates: gets the update of the running statistics, in place of doing it.
    """
    if checked is None:
        checked = checked_unit(x, given, residual, prefix, dims, channels_last)
    if given.scale_shift is not NO_SCALE_SHIFT and given.conv is not None:
        x = given.scale_shift.promoted(x)
    kernels = dispatch.kernels_for(x)
    if given.conv is None:
        y, statistics, fixed = _activated(kernels, x, given, checked, first, residual, x_bias)
    else:
        flags = x_bias, omits_bias
        y, statistics, fixed = _convolved(kernels, x, given, checked, residual, first, *flags)
    update = given.norm.update(kernels, x, statistics, fixed)
    if update is not None and updates is not None:
        updates.append(update)
    elif update is not None:
        update_all([update])  # last: out of memory changes no buffers
    return y


# The result, then the results of `norm.statistics`, which are None for an empty batch.
_Result = tuple[Tensor, Statistics | None, InvCount | None]


def _activated(
    kernels: Kernels,
    x: Tensor,
    given: UnitArguments,
    checked: CheckedUnit,
    first: FirstRun | None,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
) -> _Result:
    """A unit without its convolution; `residual` is added before the activation."""
    norm, _, _, scale_shift, *_ = given
    unit, channels_last, may_be_planar = checked
    if x.numel() == 0 and norm.process_group is None:
        x = x.to(unit.dtype)
        h = scale_shift.plain(norm.plain_of_empty_batch(x)).to(x.dtype)
        h = h if residual is None else h + residual
        return activate(h, unit.activation), None, None
    planar = may_be_planar and kernels.serves_planes
    dims, x = x.dim(), layout.dense(x, planar)
    wide = x.detach() if x.dtype == unit.dtype else x.detach().to(unit.dtype)
    weight, bias = norm.affine(wide, x.shape[1])
    if scale_shift is not NO_SCALE_SHIFT:
        weight, bias = scale_shift.of(weight, bias)
    is_shifted = x_bias is not None
    call = UnitCall(kernels, unit, None, dims, channels_last, planar, is_shifted=is_shifted)
    statistics, fixed = _statistics(norm, kernels, call.image(wide), first, x_bias)
    call = call if fixed is None else call._replace(fixed_inv_count=inv_count_of_sums(fixed))
    upcast = () if x.dtype == unit.dtype else (wide,)
    tensors = x, weight, bias, *statistics
    if residual is None:
        of_conv = (None, None, None, None) if upcast else ()
        y = _apply(first, UnitFunction, call, *tensors, *of_conv, *upcast)
    else:
        y = _apply(first, SumFunction, call, *tensors, layout.dense(residual, planar), *upcast)
    return y, statistics, fixed


def _statistics(
    norm: NormArguments,
    kernels: Kernels,
    x: Tensor,
    first: FirstRun | None,
    x_bias: Tensor | None,
) -> tuple[Statistics, InvCount | None]:
    if x_bias is not None:
        x_bias = x_bias.detach().to(statistics_dtype(x.dtype)).contiguous()
    statistics, fixed = norm.statistics(kernels, x, x_bias)
    if first is not None and not norm.training and norm.groups is None:
        # A copy, as running statistics may change.
        statistics = Statistics(*[t.clone() for t in statistics])
    return statistics, fixed


def _apply(first: FirstRun | None, function: Any, *arguments: Any) -> Tensor:
    return function.apply(*arguments) if first is None else first.apply(function, *arguments)


def _convolved(
    kernels: Kernels,
    x: Tensor,
    given: UnitArguments,
    checked: CheckedUnit,
    residual: Tensor | None,
    first: FirstRun | None,
    x_bias: Tensor | None,
    omits_bias: bool,
) -> _Result:
    """A unit with a convolution."""
    norm, _, conv, scale_shift, dropout, mask = given
    conv = cast(ConvArguments, conv)
    unit, channels_last, _ = checked
    if x.numel() == 0 and norm.process_group is None:
        checked = unit_without_conv(x, given)
    has_kernels = bool(checked.unit.weight_shape)
    dtype = unit.dtype if has_kernels else compute_dtype(x)
    conv_bias = None if conv.bias is None else conv.bias.to(dtype).contiguous()
    if dropout and mask is None:
        like = x.to(unit_without_conv(x, given).unit.dtype)
        mask = drawn(kernels, x.shape, like, norm.is_channels_last(x), dropout)
    if not has_kernels:
        assert not omits_bias
        a, statistics, fixed = _activated(kernels, x, given, checked, first, x_bias=x_bias)
        if mask is not None:
            a = a * mask.noise(a)
        y = convolve(a.to(dtype), conv.weight.to(dtype), conv_bias, *conv[2:])
        return y if residual is None else y + residual, statistics, fixed

    added_last = None
    if residual is not None and residual.dtype != dtype:
        y_dtype = torch.promote_types(dtype, residual.dtype)
        if y_dtype == torch.float64 != dtype:  # kernels do not mix float64 with other dtypes
            residual, added_last = None, residual
        else:
            residual, unit = residual.to(y_dtype), unit._replace(y_dtype=y_dtype)
    conv_weight = conv.weight
    if conv_weight.dtype != dtype:
        pixels = x.numel() // x.shape[1]
        unit, conv_weight = with_served_weight(kernels, unit, conv_weight, pixels)
    dims, x = x.dim(), layout.dense(x)
    residual = None if residual is None else layout.dense(residual)
    bits, factor = (None, 1.0) if mask is None else mask
    image = x.detach()
    image = image if dims < 5 else layout.as_image(image)
    statistics, fixed = _statistics(norm, kernels, image, first, x_bias)
    parameters = norm.affine(x, x.shape[1])
    if scale_shift is not NO_SCALE_SHIFT:
        parameters = scale_shift.of(*parameters)
    inv_count = inv_count_of_sums(fixed)
    of_biases = omits_bias, x_bias is not None
    call = UnitCall(kernels, unit, inv_count, dims, channels_last, False, factor, *of_biases)
    weights = conv_weight, conv_bias, residual
    y = _apply(first, UnitFunction, call, x, *parameters, *statistics, *weights, bits)
    return y if added_last is None else y + added_last, statistics, fixed
