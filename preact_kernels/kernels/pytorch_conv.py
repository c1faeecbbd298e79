"""Units: a backend's fused kernel where it serves the unit, else PyTorch's convolution.

PyTorch's convolution runs after norm and activation by the backend; the activation is freed as soon
as the convolution has read it. All casts are here: with a float32 residual stream or float32
weights and products in half precision, this computes
`F.conv2d(act(norm(x)).to(half), weight.to(half)) [+ residual in float32]`, as plain PyTorch does.
The backend may serve a unit after the weight is cast, or without the residual.

PyTorch's convolution of an NHWC tensor converts an NCHW weight, and its gradient back, at every
call. If the weight is much larger than the activation, the activation is converted instead.
"""

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
)
from preact_kernels.kernels.dropout import Mask
from preact_kernels.kernels.layout import CHANNELS_LAST, as_image, check_storage, from_image


class UnitKernels(Kernels):
    """`norm_act_conv_*` for all units; a backend adds fused kernels for the units that it serves.

    `_fused_forward` and `_fused_backward` run images without dropout that `serves` accepts.
    """

    def norm_act_conv_forward(
        self,
        unit: Unit,
        inputs: Inputs,
        epilogue: Epilogue = NO_EPILOGUE,
        mask: Mask | None = None,
    ) -> Output:
        x = inputs.x
        if mask is None and x.dim() == 4 and self.serves(unit, x.numel() // x.shape[1]):
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
        if mask is None and x.dim() == 4 and self.serves(unit, x.numel() // x.shape[1]):
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
        if unit.y_dtype != unit.dtype:
            narrow = unit._replace(y_dtype=unit.dtype)
            y = self.norm_act_conv_forward(narrow, inputs, Epilogue(conv_bias), mask).y
        else:
            a = self._activated(x, norm, mask).to(unit.dtype)
            if _converts_activation(x, conv_weight):
                a = self.nchw(a)
            y = self.nhwc(_convolve(a, conv_weight, conv_bias, unit.conv))
            del a
        if residual is not None:
            y, statistics = self.residual_add_forward(
                as_image(y.to(residual.dtype)), as_image(residual), with_stats
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
        if wanted.weight:
            a = self._activated(x, norm, mask).to(unit.dtype)
        else:  # only its shape and dtype are read
            a = x if x.dtype == unit.dtype else torch.empty_like(x, dtype=unit.dtype)
        conv_dy = whole
        if _converts_activation(x, conv_weight):
            a, conv_dy = self.nchw(a), self.nchw(conv_dy)
        check_storage("conv_weight", conv_weight)
        check_storage("dy", conv_dy)
        needs = [wanted.input, wanted.weight, False]
        stride, padding, dilation, groups = unit.conv
        none = [0] * len(stride)
        da, dconv_weight, _ = torch.ops.aten.convolution_backward(
            conv_dy, a, conv_weight, None, stride, padding, dilation, False, none, groups, needs
        )
        del a
        g = sums = None
        if wanted.input:
            da = self.nhwc(da.to(x.dtype))
            if mask is not None:
                da = self.dropout(da, mask)
            g, sums = self.norm_act_backward(as_image(da), as_image(x), norm, True)
        if not wanted.weight:
            dconv_weight = None
        elif dconv_weight.stride() != conv_weight.stride():
            dconv_weight = torch.empty_like(conv_weight).copy_(dconv_weight)
        return Gradients(g, sums, dconv_weight, whole if wanted.dy else None)

    def _activated(self, x: Tensor, norm: Norm, mask: Mask | None) -> Tensor:
        a = from_image(self.norm_act_forward(as_image(x), norm), x.shape, True)
        return a if mask is None else self.dropout(a, mask)


def _convolve(a: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> Tensor:
    check_storage("conv_weight", weight)
    stride, padding, dilation, groups = conv
    none = [0] * len(stride)
    return torch.convolution(a, weight, bias, stride, padding, dilation, False, none, groups)


def _converts_activation(x: Tensor, conv_weight: Tensor) -> bool:
    """Whether to run a convolution in NCHW; only on a CPU.

    This converts about five tensors like `x` in a step, and saves three conversions of the weight.
    """
    is_large = conv_weight.numel() > 2 * x.numel()
    return (
        is_large
        and x.device.type == "cpu"
        and not conv_weight.is_contiguous(memory_format=CHANNELS_LAST[conv_weight.dim()])
    )
