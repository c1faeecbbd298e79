"""The CPU backend: loads the compiled library at its first use.

Its direct convolutions serve odd kernels with padding of half the kernel size, one group, and
channels that fill vectors. A strided 1x1 convolution, such as a projection, runs with stride 1 on
the pixels that it reads. Convolutions with large weights run in PyTorch where it is faster.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    Conv,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Norm,
    Output,
    Unit,
    Wanted,
)
from preact_kernels.kernels.dropout import Mask
from preact_kernels.kernels.libraries import CPU_LIBRARY, load_library
from preact_kernels.kernels.native import NativeKernels
from preact_kernels.kernels.pytorch_conv import other_dtype, unserved
from preact_kernels.kernels.running_stats import scaled

# Beyond `ConvLimits.few_values`, a direct convolution is faster if the values have at
# least this many elements per weight and thread, by lanes of a vector: each thread sums its own
# weight gradient. The factors for AVX-512 were measured in networks on two cores of Zen 5. On AVX2,
# with 1, 2 and 4 threads on two cores of an EPYC, the direct convolutions always won in half
# precision and nearly always in float32, where the factor is an estimate for many threads.
_VALUES_PER_WEIGHT = {
    16: {torch.float32: 0.15, torch.bfloat16: 2.0, torch.float16: 0.05},
    8: {torch.float32: 0.05, torch.bfloat16: 0.0, torch.float16: 0.0},
}
# Beyond `ConvLimits.few_values` on AVX2, PyTorch runs float32 1x1 weights with more elements.
_MOST_POINTWISE_WEIGHTS = 512 * 1024


class ConvLimits(NamedTuple):
    """Limits of the library's direct convolutions; sizes are in elements."""

    most_taps: int
    small_weight: int  # up to this size, direct convolutions win on every instruction set
    # Larger weights are read once for all pixels if the values before and after the
    # convolution have at most this many elements, and at most this many per weight.
    few_values: int
    few_values_per_weight: int


class CPUKernels(NativeKernels):
    """The compiled CPU library."""

    serves_planes = True

    @functools.cached_property
    def instruction_set(self) -> str:
        """The instruction set in use: PREACT_KERNELS_CPU_ISA, or the best of this machine."""
        return self._ops.instruction_set()

    def computes_g_again(self, activation: str) -> bool:
        return activation in ("relu", "identity")  # others take longer than the passes (measured)

    @functools.cached_property
    def _channel_multiple(self) -> int:
        return self._ops.channel_multiple()

    @functools.cached_property
    def limits(self) -> ConvLimits:
        return ConvLimits(*self._ops.conv_limits())

    def _unit_refusal(self, unit: Unit) -> str | None:
        out_channels, in_channels, kernel_h, kernel_w = unit.weight_shape
        _, padding, dilation, groups = unit.conv
        taps = kernel_h * kernel_w
        if groups != 1:
            return unserved("groups", 1, groups)
        if unit.dtype == torch.float64:
            return unserved("dtype", "float32, bfloat16 and float16", "float64")
        if refusal := other_dtype(unit, (unit.dtype,)):
            return refusal
        if (dilation[0], dilation[1]) != (1, 1):
            return unserved("dilation", 1, dilation)
        if kernel_h % 2 == 0 or kernel_w % 2 == 0:
            return unserved("conv_weight", "odd kernels", f"{kernel_h}x{kernel_w}")
        if (kernel_h, kernel_w) != (2 * padding[0] + 1, 2 * padding[1] + 1):
            return unserved("padding", (kernel_h // 2, kernel_w // 2), padding)
        if taps > self.limits.most_taps:
            return unserved("conv_weight", f"up to {self.limits.most_taps} taps", taps)
        multiple = self._channel_multiple
        if out_channels % multiple or in_channels % multiple:
            served = f"channels in multiples of {multiple}"
            return unserved("conv_weight", served, f"{in_channels} to {out_channels}")
        return "" if taps * out_channels * in_channels <= self.limits.small_weight else None

    def _call_refusal(self, unit: Unit, pixels: int | None) -> str:
        if self._is_faster(unit, pixels):
            return ""
        return "conv_weight: PyTorch's convolution is faster for this size"

    def _is_faster(self, unit: Unit, pixels: int | None) -> bool:
        """Whether a direct convolution with a large weight is faster than PyTorch's."""
        limits, lanes, dtype = self.limits, self._channel_multiple, unit.dtype
        if lanes < 8 or (dtype.itemsize == 2 and torch_compat.has_amx()):
            return False
        if pixels is None:
            return True
        out_channels, in_channels, kernel_h, kernel_w = unit.weight_shape
        stride_h, stride_w = unit.conv.stride
        taps = kernel_h * kernel_w
        weights = taps * out_channels * in_channels
        computed = pixels // (stride_h * stride_w)  # approximately
        read = pixels if taps > 1 else computed
        values = read * in_channels + computed * out_channels
        few = min(limits.few_values, limits.few_values_per_weight * weights)
        if values <= few:
            return True
        is_pointwise = taps == 1 and weights > _MOST_POINTWISE_WEIGHTS
        if lanes == 8 and dtype == torch.float32 and is_pointwise:
            return False
        least = _VALUES_PER_WEIGHT[lanes][dtype] * weights * torch.get_num_threads()
        return values >= least

    def norm_act_conv_forward(
        self,
        unit: Unit,
        inputs: Inputs,
        epilogue: Epilogue = NO_EPILOGUE,
        mask: Mask | None = None,
    ) -> Output:
        if mask is None and max(unit.conv.stride) > 1 and _skips_pixels(unit):
            unit, inputs = _read_pixels(unit, inputs)
        return super().norm_act_conv_forward(unit, inputs, epilogue, mask)

    def norm_act_conv_backward(
        self,
        unit: Unit,
        dy: Gradient,
        inputs: Inputs,
        wanted: Wanted,
        mask: Mask | None = None,
    ) -> Gradients:
        if mask is not None or max(unit.conv.stride) == 1 or not _skips_pixels(unit):
            return super().norm_act_conv_backward(unit, dy, inputs, wanted, mask)
        x, norm, _ = inputs
        # In PyTorch a pixel that the convolution skips adds 0 * xhat to the gradient of bn_weight:
        # NaN if x is not finite there. PyTorch's convolution computes these terms.
        if wanted.input and not math.isfinite(x.sum(dtype=norm.mean.dtype)):
            return self._pytorch_backward(unit, dy, inputs, wanted)
        dense, read = _read_pixels(unit, inputs)
        found = super().norm_act_conv_backward(dense, dy, read, wanted)
        if found.g is None:
            return found
        g = torch.zeros_like(x)
        step_h, step_w = _steps(unit, x)
        g[:, :, ::step_h, ::step_w] = found.g
        return found._replace(g=g)

    def masked(
        self, dy: Tensor, x: Tensor, norm: Norm, with_a: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        if not with_a:
            return super().masked(dy, x, norm, with_a)
        a, sums = self._ops.norm_act_mask_recompute.default(dy, x, *norm)
        return dy, sums, a

    def weight_gradient(self, dy: Tensor, a: Tensor, weight: Tensor, conv: Conv) -> Tensor:
        if not self._serves_depthwise(dy, a, weight, conv):
            return super().weight_gradient(dy, a, weight, conv)
        return self._ops.depthwise_weight_gradient.default(dy, a, weight.shape[2:], *conv[:3])

    def _serves_depthwise(self, dy: Tensor, a: Tensor, weight: Tensor, conv: Conv) -> bool:
        """Whether the library computes the gradient of this weight, of a depthwise convolution.

        PyTorch takes at least twice as long for more than 3 columns; for 3, about as long in
        float32, and less in bfloat16 where oneDNN has it, with AVX-512.
        """
        if weight.dim() != 4 or not a.shape[1] == conv.groups == weight.shape[0]:
            return False
        rows, columns = weight.shape[2:]
        return (
            rows <= 7
            and columns in (3, 5, 7)
            and a.shape[1] >= self._channel_multiple  # a vector
            and a.dtype != torch.float64
            and (columns > 3 or a.dtype != torch.bfloat16 or self._channel_multiple < 16)
            and all(t.is_contiguous(memory_format=torch.channels_last) for t in (a, dy))
        )

    def dropout_bits(self, drawn: Tensor) -> Tensor:
        return self._ops.dropout_bits.default(drawn)

    def dropout(self, values: Tensor, mask: Mask) -> Tensor:
        self._ops.dropout_.default(values, *mask)
        return values

    def running_stats_update(
        self,
        running: list[Tensor],
        batch: list[Tensor],
        momentum: float,
        factors: Sequence[float] | None = None,
    ) -> None:
        factors = [1.0] * len(running) if factors is None else factors
        for t in running:
            # The op refuses negative views, as it writes to them.
            if t.dtype != torch.float32 or not t.is_contiguous() or t.is_neg():
                super().running_stats_update(running, scaled(batch, factors), momentum)
                return
        self._ops.scaled_running_stats_update.default(running, batch, momentum, factors)
        torch.autograd.graph.increment_version(running)  # custom ops do not bump versions

    def norm_buffers_update(
        self,
        running: list[Tensor],
        batch: list[Tensor],
        momentum: float,
        factors: Sequence[float],
        counts: Sequence[Tensor],
    ) -> None:
        self.running_stats_update(running, batch, momentum, factors)  # scales as it updates
        if counts:
            torch_compat.foreach_add_(list(counts), 1)


def _skips_pixels(unit: Unit) -> bool:
    """Whether a strided convolution of images reads only the pixels at multiples of its stride."""
    return (
        tuple(unit.weight_shape[2:]) == (1, 1)
        and not any(unit.conv.padding)
        and unit.x_dtype == unit.dtype
    )


def _steps(unit: Unit, x: Tensor) -> tuple[int, int]:
    """The stride, at most the image size, which reads the same pixels."""
    step_h, step_w = unit.conv.stride
    return min(step_h, x.shape[2]), min(step_w, x.shape[3])


def _read_pixels(unit: Unit, inputs: Inputs) -> tuple[Unit, Inputs]:
    """The unit with stride 1 on the pixels that it reads, dense NHWC."""
    step_h, step_w = _steps(unit, inputs.x)
    read = inputs.x[:, :, ::step_h, ::step_w].contiguous(memory_format=torch.channels_last)
    return unit._replace(conv=unit.conv._replace(stride=(1, 1))), inputs._replace(x=read)


def load_error() -> str:
    """Loads the library. Returns the error, or an empty string."""
    return load_library(CPU_LIBRARY)


@functools.cache
def kernels() -> CPUKernels:
    """The backend's functions; the library must be available."""
    return CPUKernels(torch.ops.preact_kernels_cpu)
