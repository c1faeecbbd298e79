"""Rules for norms, convolutions, and operations on images; see `registry.py`."""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from preact_kernels import call_stack, torch_compat
from preact_kernels.conversion.containers import items
from preact_kernels.conversion.deferred import Deferred, Recording, compute
from preact_kernels.conversion.norm_modules import is_norm
from preact_kernels.conversion.operations import (
    CALL,
    CAT,
    CONV,
    NORM,
    PAD,
    CallSettings,
    ConvSettings,
    NormSettings,
)
from preact_kernels.conversion.registry import (
    FIRST,
    NORM_FUNCTIONS,
    RULES,
    cached,
    common_format,
    has_known_strides,
    hashable,
    image_format,
    is_pending,
    pixels,
    rule,
)
from preact_kernels.conversion.subclasses import refusal
from preact_kernels.conversion.user_modules import is_converted
from preact_kernels.kernels import layout
from preact_kernels.kernels.contract import Conv
from preact_kernels.norms import NORMS, BatchNorm, GroupNorm, NormArguments
from preact_kernels.ops import checks
from preact_kernels.ops.arguments import convolve
from preact_kernels.ops.autocast import is_autocast

_NOT_RECORDED = (
    "it runs inside torch.utils.checkpoint, a custom autograd function, a functional transform or "
    "a second torch.inference_mode"
)

FIRST |= {F.conv1d, F.conv2d, F.conv3d}


def _record_norm(region: Recording, x: Tensor, norm: NormArguments | None) -> Any:
    """Defers a norm; a plain norm in a checkpoint's recomputation must not update statistics."""
    result = NotImplemented if norm is None else record_norm(region, x, norm)
    if norm is None or result is not NotImplemented or not norm.training:
        return result
    running = norm.running()
    if running and call_stack.is_recomputing():
        copied = norm.with_copied_statistics().running()
        region.copies = dict(zip(map(id, running), copied, strict=True))
    return result


for _norm in NORMS:
    for _function, _read in _norm.calls.items():
        NORM_FUNCTIONS.add(_function)
        rule(_function, arguments=_read)(_record_norm)


def record_norm(region: Recording, x: Tensor, norm: NormArguments) -> Any:
    """Defers a norm."""
    weight, bias, running = norm.weight, norm.bias, norm.running()
    owner = _norm_owner(region, weight, norm)
    if not isinstance(x, Tensor) or (owner is None and _standardises_weight(x, norm)):
        return NotImplemented
    if region.context_for(x.device) is None:
        region.note(owner, _NOT_RECORDED)
        return NotImplemented
    channels_last = image_format(region, x)
    if norm.process_group is not None:
        if channels_last is None and x.is_cpu and 3 <= x.dim() <= 5:
            channels_last = False  # on a CPU, there is no format of PyTorch's to match
    elif channels_last is not None and x.numel() <= norm.means_of(x):
        channels_last = None
    if channels_last is None:
        is_other = type(x) not in region.tensor_types and not isinstance(x, Deferred)
        reason = refusal(type(x)) if is_other else ""
        usual = "its input is no image, or has unusual strides"
        region.note(owner, f"its input is {reason}" if reason else usual)
        return NotImplemented
    # Dtype and device of the weight stand for all parameters, which change together.
    like = None if owner is None or weight is None else (weight.dtype, weight.device)
    numbers = type(norm), norm.groups, *norm[4:8]
    is_cast = is_autocast(x)  # on CUDA, decides which dtypes a group norm accepts
    key = (x.dtype, x.device, x.shape[1], is_cast, like, *map(id, norm[:4]), *numbers)
    settings = None
    if owner is not None and owner.key == key:
        settings = owner.found
    elif not (reason := _norm_refusal(region, x, norm)):
        rest = norm._replace(weight=None, bias=None, batch_count=None)
        given = weight is not None, bias is not None
        settings = NormSettings(*given, rest, owner)
        if owner is not None:
            owner.key, owner.found = key, settings
    if owner is not None and settings is not None and _has_hooks(owner.module):
        settings, reason = None, "the norm has hooks"
    if settings is None:
        region.note(owner, reason)
        return NotImplemented
    region.before_statistics(running, norm.training)
    inputs = [t for t in (x, weight, bias) if t is not None]
    channels_last = channels_last and norm.keeps_format(x)
    result = region.record(NORM, inputs, settings, x.shape, norm.result_dtype(x), channels_last)
    if result is NotImplemented:
        region.note(owner, f"its input is {region.refusal}")
        return NotImplemented
    (region.updated if norm.training else region.evaluated).update(map(id, running))
    return result


def _norm_owner(region: Recording, weight: Tensor | None, norm: NormArguments) -> Any:
    known = norm.running_mean if weight is None else weight
    owner = region.owners.find(known)
    if owner is None and (known is None or isinstance(norm, GroupNorm)):  # perhaps a cast copy
        owner = _calling_owner(region)
    return owner


def is_norm_called_alike(
    region: Recording, settings: NormSettings, inputs: Sequence[Tensor]
) -> bool:
    """Whether the module of a norm is the same as in an earlier call, and may run fused."""
    owner = settings.owner
    if owner is not None and settings.has_weight and owner.has_no_hooks(inputs[1]):
        return True
    weight = inputs[1] if settings.has_weight else None
    owner = _norm_owner(region, weight, settings.norm)
    return owner is settings.owner and (owner is None or not _has_hooks(owner.module))


def _standardises_weight(x: Tensor, norm: NormArguments) -> bool:
    """Whether a batch norm standardises a weight `[1, K, ...]`, as convolutions of BiT do.

    No activation follows, and recording takes longer than the norm.
    """
    if type(norm) is not BatchNorm or x.dim() != 3 or x.shape[0] != 1:
        return False
    return norm.training is True and norm.running_mean is None and norm.running_var is None


def _calling_owner(region: Recording) -> Any:
    """Returns the owner of the norm that called the function, found by the call stack."""
    module = call_stack.module_of(region.caller())
    return None if module is None or not is_norm(module) else region.owners.of(module)


def _has_hooks(norm: Any) -> bool:
    """Whether a call of a norm runs more than the forward of its class.

    Ignores hooks of a converted module that calls the norm function itself: they run outside of
    the region.
    """
    if is_converted(norm):
        return False
    forward = norm.__dict__.get("forward")
    return torch_compat.has_module_hook(norm) or type(forward) not in (SyncForward, NoneType)


class SyncForward:
    """Replaces the forward of an `nn.SyncBatchNorm` while a region is open.

    The original calls a custom autograd function, which regions cannot defer.
    """

    def __init__(self, region: Recording, module: nn.SyncBatchNorm) -> None:
        self._region, self._module = region, module

    def __call__(self, x: Tensor) -> Tensor:
        module, result = self._module, NotImplemented
        if self._region.is_recording():
            with torch_compat.disable_torch_function():
                bn = BatchNorm.of_module(module)
                if bn.momentum is None:
                    bn = bn._replace(momentum=1.0 / (float(cast(Tensor, bn.batch_count)) + 1.0))
                if isinstance(x, Deferred) and x.preact_node.value is not None:
                    x = compute(x, "SyncBatchNorm")
                result = record_norm(self._region, x, bn)
                is_counted = bn.batch_count is None or call_stack.is_recomputing()
                if result is not NotImplemented and not is_counted:
                    cast(Tensor, bn.batch_count).add_(1)
        return nn.SyncBatchNorm.forward(module, x) if result is NotImplemented else result


def _norm_refusal(region: Recording, x: Tensor, norm: Any) -> str:
    """Returns why the fused ops do not accept a norm's arguments, or an empty string."""
    if x.dtype not in checks.FLOATS:
        return "its input has a dtype that is not served"
    dtype, device, channels = x.dtype, x.device, x.shape[1]
    for t in norm[:4]:
        if t is None:
            continue
        if type(t) not in region.tensor_types or t.numel() != channels or t.dim() != 1:
            if type(t) not in region.tensor_types:
                return f"its parameters are of the class {type(t).__name__}"
            return "its parameters have another shape"
        if t.dtype is not dtype and (t.dtype != torch.float32 or dtype == torch.float64):
            return "its parameters have another dtype"
        if t.device != device:
            return "its parameters are on another device"
    if norm.refuses_dtypes(x):
        return "its parameters have another dtype"
    if (norm.running_mean is None) != (norm.running_var is None):
        return "it has one of two running statistics"
    if type(norm.eps) not in (float, int) or type(norm.training) is not bool:
        return "its arguments are no plain numbers"
    if type(norm.momentum) not in (float, int) or norm.momentum != norm.momentum:
        return "its momentum is no plain number"
    groups = 1 if norm.groups is None else norm.groups
    is_divided = type(groups) is int and groups > 0 and not channels % groups
    has_statistics = norm.training or norm.running_mean is not None
    if not (is_divided and has_statistics and norm.has_valid_eps()):
        return "PyTorch refuses its arguments"
    return ""


_CONV_CALLERS = tuple(m._conv_forward.__code__ for m in (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def _conv_arguments(dims: int) -> Callable:
    def arguments(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        return dims, input, weight, bias, (stride, padding, dilation, groups)

    return arguments


@rule(F.conv3d, arguments=_conv_arguments(5))
@rule(F.conv1d, arguments=_conv_arguments(3))
@rule(F.conv2d, arguments=_conv_arguments(4))
def _record_conv(
    region: Recording, dims: int, x: Any, weight: Any, bias: Any, numbers: tuple
) -> Any:
    if not is_pending(x) and not _is_saved_in_nhwc(region, x):
        return NotImplemented
    if type(weight) not in region.tensor_types:
        return NotImplemented
    if bias is not None and type(bias) not in region.tensor_types:
        return NotImplemented
    affine = (weight,) if bias is None else (weight, bias)
    if x.dim() != dims or weight.dim() != dims:  # no batch axis, or PyTorch raises
        return NotImplemented
    if torch.is_grad_enabled() and any(map(Tensor.is_inference, (x, *affine))):
        return NotImplemented  # it may raise
    context = region.context_for(x.device)
    if context is None:
        return NotImplemented
    owner = region.owners.find(weight)
    if _has_conv_hooks(region, owner):
        return NotImplemented
    like = (weight.dtype, weight.device, weight.shape, weight.stride(), id(bias))
    key = (x.shape, x.dtype, context.device, context.autocast_dtype, *like, *numbers)
    if owner is not None and owner.key == key:
        settings, shape, dtype, weight_is_channels_last = owner.found
    else:
        dtype = _conv_dtype((x, *affine), context.autocast_dtype)
        bias_shape = None if bias is None else bias.shape
        conv, shape = _geometry(x.shape, weight.shape, bias_shape, *map(hashable, numbers))
        if dtype is None or conv is None:
            return NotImplemented
        settings = ConvSettings(conv, owner)
        weight_is_channels_last = layout.is_channels_last(weight)
        if owner is not None:
            owner.key, owner.found = key, (settings, shape, dtype, weight_is_channels_last)
    formats = image_format(region, x), weight_is_channels_last
    channels_last = any(formats)
    if channels_last and dims == 5:
        sizes = tuple(x.shape), tuple(weight.shape), bias is not None
        modes = dtype, context.device, torch.get_num_threads()
        channels_last = _volume_format(*sizes, settings.conv, *formats, *modes)
    if not has_known_strides(shape, channels_last):
        return NotImplemented
    return region.record(CONV, (x, *affine), settings, shape, dtype, channels_last)


def _has_conv_hooks(region: Recording, owner: Any) -> bool:
    """Whether the module of a convolution has hooks, which may change the weight."""
    module = _calling_conv(region) if owner is None else owner.module
    return module is not None and bool(module._forward_hooks) and not is_converted(module)


def is_conv_called_alike(region: Recording, settings: ConvSettings, weight: Tensor) -> bool:
    """Whether the module of a convolution is the same as in an earlier call, without hooks."""
    if settings.owner is not None and settings.owner.has_no_hooks(weight):
        return True
    owner = region.owners.find(weight)
    return owner is settings.owner and not _has_conv_hooks(region, owner)


def _calling_conv(region: Recording) -> nn.Module | None:
    """Returns PyTorch's module that called the convolution of the current rule, or None."""
    return call_stack.self_in(region.caller(), _CONV_CALLERS)


def _is_saved_in_nhwc(region: Recording, x: Any) -> bool:
    """Whether a pending norm saves a copy of an NCHW image in NHWC.

    A convolution that reads the copy saves no more memory.
    """
    return region.normalises(x) and image_format(region, x) is False


def _conv_dtype(
    tensors: Sequence[Tensor], autocast_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns the dtype of a convolution of tensors, or None if PyTorch refuses it."""
    dtypes = [t.dtype for t in tensors]
    if any(t.device != tensors[0].device for t in tensors):
        return None
    if autocast_dtype is not None:  # autocast does not cast float64
        dtypes = [d if d == torch.float64 else autocast_dtype for d in dtypes]
    return dtypes[0] if len(set(dtypes)) == 1 and dtypes[0] in checks.FLOATS else None


@cached
def _geometry(
    shape: tuple, weight_shape: tuple, bias_shape: tuple | None, stride, padding, dilation, groups
) -> tuple[Conv | None, tuple[int, ...]]:
    """Returns geometry and result shape of a convolution; None if it must be called."""
    try:
        x, weight = (torch.empty(s, device="meta") for s in (shape, weight_shape))
        bias = None if bias_shape is None else torch.empty(bias_shape, device="meta")
        result = convolve(x, weight, bias, stride, padding, dilation, groups)
        values = stride, padding, dilation
        if len(shape) > 3:
            values = tuple(map(_unpacked, values))
        conv = checks.geometry(weight_shape[2:], *values, groups)
    except (RuntimeError, TypeError, ValueError):
        return None, ()
    return conv, tuple(result.shape)


def _unpacked(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


@cached
def _volume_format(
    shape: tuple,
    weight_shape: tuple,
    has_bias: bool,
    conv: Conv,
    is_channels_last: bool,
    weight_is_channels_last: bool,
    dtype: torch.dtype,
    device: torch.device,
    _: int,
) -> bool:
    """Whether PyTorch's convolution of a volume gives channels_last, by running one.

    It depends on the algorithm, and so on the number of threads, the last argument.
    """
    with torch_compat.disable_torch_function(), torch.no_grad():
        tensors = [torch.zeros(s, dtype=dtype, device=device) for s in (shape, weight_shape)]
        for i, is_last in enumerate((is_channels_last, weight_is_channels_last)):
            if is_last:
                tensors[i] = layout.nhwc(tensors[i])
        bias = tensors[1].new_zeros(weight_shape[0]) if has_bias else None
        x, weight = tensors
        stride, padding, dilation, groups = conv
        y = F.conv3d(x, weight, bias, stride, padding, dilation, groups)
        return layout.is_channels_last(y)


_ZEROS = ("None", "0", "0.0")  # not -0.0


def _pad_arguments(input, pad, mode="constant", value=None):
    return input, pad, mode, value


@rule(F.pad, arguments=_pad_arguments)
def _record_pad(region: Recording, x: Any, sizes: Any, mode: object, value: object) -> Any:
    if not is_pending(x) or mode != "constant" or str(value) not in _ZEROS:
        return NotImplemented
    node = x.preact_node
    axes = len(node.shape) - 2
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 * axes:
        return NotImplemented
    if not all(type(s) is int and s >= 0 for s in sizes):
        return NotImplemented
    shape = list(node.shape)
    for axis in range(axes):  # the last axis comes first
        shape[-1 - axis] += sizes[2 * axis] + sizes[2 * axis + 1]
    if region.context_for(node.context.device) is None:
        return NotImplemented
    return region.record(PAD, (x,), tuple(sizes), tuple(shape), node.dtype, node.channels_last)


@rule(
    *(torch.cat, torch.concat, torch.concatenate),
    arguments=lambda tensors, dim=0: (tensors, dim),
)
def _record_cat(region: Recording, tensors: Any, dim: Any) -> Any:
    tensors = [*items(tensors)] if isinstance(tensors, list | tuple) else []
    if not any(map(is_pending, tensors)):
        return NotImplemented
    first = next(t for t in tensors if is_pending(t)).preact_node
    n, _, *size = first.shape
    if dim not in (1, -1 - len(size)) or not all(isinstance(t, Tensor) for t in tensors):
        return NotImplemented
    for t in tensors:
        if t.dim() != len(first.shape) or [t.shape[0], *t.shape[2:]] != [n, *size]:
            return NotImplemented
        if t.dtype != first.dtype or t.device != first.context.device:
            return NotImplemented
    channels_last = common_format(region, tensors)
    if channels_last is None:
        return NotImplemented
    shape = (n, sum(t.shape[1] for t in tensors), *size)
    if region.context_for(first.context.device) is None:
        return NotImplemented
    return region.record(CAT, tensors, None, shape, first.dtype, channels_last)


def _image_function(func: Callable) -> Callable:
    """Returns a rule for a function that acts on each channel of an image, such as pooling."""

    def rule(region: Recording, args: tuple, kwargs: dict) -> Any:
        if not args or not is_pending(args[0]):
            return NotImplemented
        x, *rest = args
        node = x.preact_node
        context = region.context_for(node.context.device)
        if context is None:
            return NotImplemented
        args = tuple(map(hashable, rest))
        kwargs = {k: hashable(v) for k, v in kwargs.items()}
        modes = node.channels_last, node.needs_grad, context.device, context.autocast_dtype
        found = _called(func, args, tuple(kwargs.items()), node.shape[2:], node.dtype, *modes)
        if found is None:
            return NotImplemented
        size, dtype, channels_last, is_view = found
        shape = (*node.shape[:2], *size)
        if not has_known_strides(shape, node.channels_last):
            return NotImplemented
        settings = CallSettings(func, args, kwargs, is_view)
        return region.record(CALL, (x,), settings, shape, dtype, channels_last)

    return rule


@cached
def _called(
    func: Callable,
    args: tuple,
    kwargs: tuple,
    size: tuple,
    dtype: torch.dtype,
    channels_last: bool,
    needs_grad: bool,
    device: torch.device,
    _: object,
) -> tuple[tuple[int, ...], torch.dtype, bool, bool] | None:
    """Calls a function of an image.

    Returns:
        Size, dtype and memory format of the result, and whether it is a view; None if the function
        raises or does not return one image.
    """
    try:
        no_hooks = torch_compat.saved_tensor_hooks_of(None)
        with torch_compat.disable_torch_function(), no_hooks, torch.set_grad_enabled(needs_grad):
            x = torch.zeros((2, 4, *size), dtype=dtype, device=device, requires_grad=needs_grad)
            y = func(layout.nhwc(x) if channels_last else x, *args, **dict(kwargs))
    except (RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2] or y.dim() != x.dim():
        return None
    if channels_last and pixels(y.shape) == 1:
        return None
    return tuple(y.shape[2:]), y.dtype, layout.is_channels_last(y), y._is_view()


for _function in (
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    F.interpolate,
):
    RULES[_function] = _image_function(_function)
