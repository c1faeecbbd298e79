"""Units: a backend's fused kernel where it serves the unit, else PyTorch's convolution.

PyTorch's convolution runs after norm and activation by the backend; the activation is freed as soon
as the convolution has read it. All casts are here: with a float32 residual stream or float32
weights and products in half precision, this computes
`F.conv2d(act(norm(x)).to(half), weight.to(half)) [+ residual in float32]`, as plain PyTorch does.
The backend may serve a unit after the weight is cast, or without the residual.

PyTorch's convolution of an NHWC tensor converts an NCHW weight, and its gradient back, at every
call. If the weight is much larger than the activation, the activation is converted instead. All
tensors are converted to NCHW where PyTorch's convolution may be wrong in NHWC.

On a CPU, PyTorch runs float32 convolutions of a single small volume without oneDNN, up to ten times
slower. Here oneDNN runs them.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    Conv,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Kernels,
    Norm,
    Output,
    Unit,
    Wanted,
    dtype_name,
)
from preact_kernels.kernels.dropout import Mask
from preact_kernels.kernels.layout import (
    CHANNELS_LAST,
    as_image,
    check_storage,
    from_image,
    nchw,
    nhwc,
    with_plain_strides,
)
from preact_kernels.torch_compat import MKLDNN, has_fake_mode, may_use_onednn


class _Refusals(dict[Unit, str | None]):
    """Results of `UnitKernels._unit_refusal` by unit."""

    MOST = 4096  # bounds the memory of a program with new shapes at every call

    def __init__(self, find: Callable[[Unit], str | None]) -> None:
        self._find = find

    def __missing__(self, unit: Unit) -> str | None:
        found = self._find(unit)
        if unit.process_group is None:  # a key would keep it alive
            if len(self) >= self.MOST:
                self.clear()
            self[unit] = found
        return found


class UnitKernels(Kernels):
    """`norm_act_conv_*` for all units; a backend adds fused kernels for the units that it serves.

    `_fused_forward` and `_fused_backward` run units that `refusal` does not refuse, on images,
    without dropout.
    """

    def refusal(self, unit: Unit, pixels: int | None = None) -> str:
        try:
            found = self._refusals[unit]
        except TypeError:  # symbolic sizes cannot be keys
            found = self._unit_refusal(unit)
        return self._call_refusal(unit, pixels) if found is None else found

    @functools.cached_property
    def _refusals(self) -> _Refusals:
        return _Refusals(self._unit_refusal)

    def _unit_refusal(self, unit: Unit) -> str | None:
        """`refusal` if it depends on nothing but the unit; None: `_call_refusal` decides."""
        raise NotImplementedError

    def _call_refusal(self, unit: Unit, pixels: int | None) -> str:
        """`refusal` if it depends on the number of pixels, or on the state of the process."""
        raise NotImplementedError

    def computes_g_again(self, activation: str) -> bool:
        """Whether to compute g twice, in passes that other results need, instead of storing it."""
        return True

    def norm_act_conv_forward(
        self,
        unit: Unit,
        inputs: Inputs,
        epilogue: Epilogue = NO_EPILOGUE,
        mask: Mask | None = None,
    ) -> Output:
        x = inputs.x
        if mask is None and x.dim() == 4 and not self.refusal(unit, x.numel() // x.shape[1]):
            return self._fused_forward(unit, inputs, epilogue)
        return self._pytorch_forward(unit, inputs, epilogue, mask)

    def norm_act_conv_backward(
        self,
        unit: Unit,
        dy: Gradient,
        inputs: Inputs,
        wanted: Wanted,
        mask: Mask | None = None,
    ) -> Gradients:
        x = inputs.x
        if mask is None and x.dim() == 4 and not self.refusal(unit, x.numel() // x.shape[1]):
            return self._fused_backward(unit, dy, inputs, wanted)
        return self._pytorch_backward(unit, dy, inputs, wanted, mask)

    def _fused_forward(self, unit: Unit, inputs: Inputs, epilogue: Epilogue) -> Output:
        raise NotImplementedError

    def _fused_backward(
        self, unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted
    ) -> Gradients:
        raise NotImplementedError

    def _pytorch_forward(
        self, unit: Unit, inputs: Inputs, epilogue: Epilogue, mask: Mask | None = None
    ) -> Output:
        """`norm_act_conv_forward` with PyTorch's convolution."""
        x, norm, conv_weight = inputs
        if unit.weight_dtype != unit.dtype:
            inputs = inputs._replace(conv_weight=conv_weight.to(unit.dtype))
            unit = unit._replace(weight_dtype=unit.dtype)
            return self.norm_act_conv_forward(unit, inputs, epilogue, mask)
        conv_bias, residual, with_stats = epilogue
        added = None  # the bias, unless the convolution adds it
        if self.adds_bias and residual is not None and not with_stats:
            conv_bias, added = None, conv_bias
        if unit.y_dtype != unit.dtype:
            narrow = unit._replace(y_dtype=unit.dtype)
            y = self.norm_act_conv_forward(narrow, inputs, Epilogue(conv_bias), mask).y
        else:
            a = self._activated(x, norm, mask).to(unit.dtype)
            convert = self._to_convolution_format(unit, x, conv_weight)
            a = convert(a)
            y = nhwc(_convolve(a, _as_images(conv_weight, convert), conv_bias, unit.conv))
            del a
        if residual is not None:
            if added is not None:
                added = added.to(residual.dtype)
            y, statistics = self.residual_add_forward(
                as_image(residual), as_image(y.to(residual.dtype)), with_stats, added
            )
            return Output(from_image(y, residual.shape, True), statistics)
        return Output(y, self.bn_stats(y) if with_stats else None)

    def _pytorch_backward(
        self,
        unit: Unit,
        dy: Gradient,
        inputs: Inputs,
        wanted: Wanted,
        mask: Mask | None = None,
    ) -> Gradients:
        """`norm_act_conv_backward` with PyTorch's convolution."""
        x, norm, conv_weight = inputs
        if unit.weight_dtype != unit.dtype:
            inputs = inputs._replace(conv_weight=conv_weight.to(unit.dtype))
            unit = unit._replace(weight_dtype=unit.dtype)
            found = self.norm_act_conv_backward(unit, dy, inputs, wanted, mask)
            if found.conv_weight is None:
                return found
            return found._replace(conv_weight=found.conv_weight.to(conv_weight.dtype))
        whole = dy.whole(self)
        if unit.y_dtype != unit.dtype:
            narrow = unit._replace(y_dtype=unit.dtype)
            rounded = Gradient(whole.to(unit.dtype))
            narrow_wanted = wanted._replace(dy=False)
            found = self.norm_act_conv_backward(narrow, rounded, inputs, narrow_wanted, mask)
            return found._replace(dy=whole if wanted.dy else None)
        convert = self._to_convolution_format(unit, x, conv_weight)
        conv_dy, weight = convert(whole), _as_images(conv_weight, convert)
        # The input's gradient first: one kernel then computes the activation, for the gradient of
        # the weight, and the sums, and g is not stored.
        a = g = sums = dconv_weight = None
        activated = wanted.input and wanted.activated and self.computes_g_again(norm.activation)
        if wanted.input:
            like = x  # only its shape, dtype and memory format are read
            if convert is not _unchanged:
                like = x.new_empty(x.shape, dtype=unit.dtype)
            elif x.dtype != unit.dtype:
                like = torch.empty_like(x, dtype=unit.dtype)
            da = _convolution_backward(conv_dy, like, weight, unit.conv, of_input=True)
            del like
            g = nhwc(da.to(x.dtype))
            del da
            if mask is not None:
                g = self.dropout(g, mask)
            g, image = as_image(g), as_image(x)
            if not activated:
                g, sums, a = self.masked(g, image, norm, wanted.weight)
                a = None if a is None else from_image(a, x.shape, True)
            elif not wanted.sums:
                sums = norm.mean.new_zeros(norm.sums_shape(image))
            elif wanted.weight:
                a, sums = self.norm_act_recompute(g, image, norm)
                a = from_image(a, x.shape, True)
            else:
                _, sums = self.norm_act_backward(g, image, norm, False)
        if wanted.weight:
            a = convert(self._activated(x, norm, mask, a).to(unit.dtype))
            dconv_weight = self.weight_gradient(conv_dy, a, weight, unit.conv)
            if dconv_weight.stride() != conv_weight.stride():
                dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
        return Gradients(g, sums, dconv_weight, whole if wanted.dy else None, activated)

    def masked(
        self, dy: Tensor, x: Tensor, norm: Norm, with_a: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """`norm_act_backward` with g, which may overwrite `dy`.

        The third result is `act(p)` if `with_a` and one pass computes all, else None.
        """
        g, sums = self.norm_act_backward(dy, x, norm, True)
        return g, sums, None

    def weight_gradient(self, dy: Tensor, a: Tensor, weight: Tensor, conv: Conv) -> Tensor:
        """The gradient of the weight of a convolution of `a`."""
        return _convolution_backward(dy, a, weight, conv, of_input=False)

    def _to_convolution_format(
        self, unit: Unit, x: Tensor, weight: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Returns what converts images to the memory format for PyTorch's convolution."""
        if x.device.type != "cpu":
            return _unchanged
        if may_be_wrong_in_nhwc(unit.conv, x.shape, weight.shape, unit.dtype):
            return with_plain_strides
        return nchw if _converts_activation(x, weight) else _unchanged

    def _activated(
        self, x: Tensor, norm: Norm, mask: Mask | None, a: Tensor | None = None
    ) -> Tensor:
        """The convolution's input; `a` is `act(p)`, if it is known, and is overwritten."""
        if a is None:
            a = from_image(self.norm_act_forward(as_image(x), norm), x.shape, True)
        return a if mask is None else self.dropout(a, mask)


def _unchanged(t: Tensor) -> Tensor:
    return t


def _as_images(weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """A weight for images that `convert` converted."""
    return convert(weight) if convert is with_plain_strides else weight


def _convolve(a: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> Tensor:
    check_storage("conv_weight", weight)
    stride, padding, dilation, groups = conv
    if _runs_in_onednn(a.shape, weight, conv):
        return torch.mkldnn_convolution(a, weight, bias, padding, stride, dilation, groups)
    none = [0] * len(stride)
    return torch.convolution(a, weight, bias, stride, padding, dilation, False, none, groups)


def _convolution_backward(
    dy: Tensor, a: Tensor, weight: Tensor, conv: Conv, *, of_input: bool
) -> Tensor:
    """The gradient of a convolution's input `a`, of which only metadata are read, or of weight."""
    check_storage("conv_weight", weight)
    check_storage("dy", dy)
    stride, padding, dilation, groups = conv
    none, needs = [0] * len(stride), [of_input, not of_input, False]
    in_onednn = _runs_in_onednn(a.shape, weight, conv)
    if in_onednn:  # PyTorch chooses by the layout of the input
        if of_input:
            a = torch.empty(a.shape, dtype=a.dtype, device=a.device, layout=MKLDNN)
        else:
            a = a.to_mkldnn()
        dy = dy.to_mkldnn()
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, a, weight, None, stride, padding, dilation, False, none, groups, needs
    )
    if not of_input:
        return dweight
    return dx.to_dense() if in_onednn else dx


# PyTorch runs a convolution of one volume in oneDNN if N * C * D * H is larger.
_MOST_ELEMENTS = 20480
# Otherwise it multiplies by a matrix with a row for each input channel and tap, and a column for
# each pixel of the result. oneDNN is faster if the matrix has more elements than this, and if there
# are fewer weights than this for each pixel (measured on two cores of Zen 5, on one and two
# threads, also limited to AVX2).
_LEAST_ELEMENTS_OF_MATRIX = 128 * 1024
_MOST_WEIGHTS_PER_PIXEL = 16 * 1024


def _runs_in_onednn(shape: Sequence[int], weight: Tensor, conv: Conv) -> bool:
    """Whether to run a convolution of volumes of this shape in oneDNN where PyTorch does not."""
    if weight.dim() != 5 or weight.dtype != torch.float32 or not weight.is_cpu:
        return False
    if torch.compiler.is_compiling() or has_fake_mode() or shape[0] != 1:
        return False
    channels, *kernel = weight.shape[1:]
    taps, pixels = math.prod(kernel), math.prod(conv.output_shape(shape, weight.shape)[2:])
    return (
        math.prod(shape[:4]) <= _MOST_ELEMENTS
        and min(kernel[1:]) <= 3  # PyTorch runs larger kernels in oneDNN
        and conv.groups == 1
        and taps > 1
        and channels >= 4
        and channels * taps * pixels >= _LEAST_ELEMENTS_OF_MATRIX
        and weight.numel() <= _MOST_WEIGHTS_PER_PIXEL * pixels
        and may_use_onednn()
    )


def _converts_activation(a: Tensor, weight: Tensor) -> bool:
    """Whether to run a convolution in NCHW on a CPU.

    This converts about five tensors like `a` in a step, and saves three conversions of the weight.
    """
    is_large = weight.numel() > 2 * a.numel()
    return is_large and not weight.is_contiguous(memory_format=CHANNELS_LAST[weight.dim()])


def may_be_wrong_in_nhwc(
    conv: Conv, shape: Sequence[int], weight_shape: Sequence[int], dtype: torch.dtype
) -> bool:
    """Whether a CPU may compute a convolution of an NHWC image, or a gradient, wrongly.

    With PyTorch 2.13, convolutions of these kinds may read or write other memory in NHWC. In NCHW
    fewer do: half precision may be wrong there, too, and in plain PyTorch.
    https://github.com/uxlfoundation/oneDNN/issues/6035 explains the pointwise convolutions; random
    convolutions on a processor with AVX-512 showed the others.

    Args:
        conv: the geometry, in one to three dimensions.
        shape: `[N, C, ...]` of the image.
        weight_shape: `[K, C / groups, ...]`.
        dtype: dtype in which the convolution runs.
    """
    channels, *kernel = weight_shape[1:]
    is_half = dtype.itemsize == 2
    if is_half and len(kernel) == 3:
        return True
    if max(conv.stride) == 1:
        return False
    if max(kernel) == 1:
        return channels < 16
    if len(kernel) == 3:
        return max(kernel) > 3
    is_narrow = conv.output_shape(shape, weight_shape)[-1] == 1
    return is_narrow and (is_half or channels * conv.groups == 1)


def unserved(argument: str, served: object, given: object) -> str:
    """A result of `Kernels.refusal`."""
    return f"{argument}: the fused convolution serves {served}, got {given}"


def other_dtype(unit: Unit, served: Sequence[torch.dtype]) -> str:
    """A result of `Kernels.refusal` if x, the weight or y has a dtype that is not in `served`."""
    named = ("x", unit.x_dtype), ("conv_weight", unit.weight_dtype), ("residual", unit.y_dtype)
    for name, dtype in named:
        if dtype not in served:
            names = " and ".join(map(dtype_name, served))
            text = f"{names} for products in {dtype_name(unit.dtype)}"
            return unserved(name, text, dtype_name(dtype))
    return ""


def mixed_dtypes_refusal(unit: Unit) -> str:
    """A result of `Kernels.refusal` of the GPU backends.

    With products in half precision, weights may be float32, and so may one of x and y.
    """
    if unit.dtype == torch.float64:
        return unserved("dtype", "float32, bfloat16 and float16", "float64")
    if refusal := other_dtype(unit, tuple(dict.fromkeys((unit.dtype, torch.float32)))):
        return refusal
    if unit.dtype not in (unit.x_dtype, unit.y_dtype):
        name = dtype_name(unit.dtype)
        return unserved("residual", f"{name} with float32 x and products in {name}", "float32")
    return ""


def rows_refusal(unit: Unit) -> str:
    """A result of `Kernels.refusal` of the GPU backends: the norm has no rows."""
    if unit.has_rows:
        return unserved("norm", "one value per channel", "a row for each image")
    return ""
