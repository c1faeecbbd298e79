"""The CPU backend: loads the compiled library when it is first asked for.

Its direct convolutions serve an odd kernel with padding of half its size, one group, and channels
that fill vectors. A strided 1x1 convolution, such as a projection, is here one of stride 1 on the
pixels that it reads. Large weights are left to PyTorch where it is faster.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.kernels import pytorch_conv
from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    Conv,
    ConvGradients,
    Epilogue,
    Fold,
    Norm,
    Output,
    Wanted,
)
from preact_kernels.kernels.native import NativeKernels, load_library

# Beside more activations, they win with AVX-512 where those have this many times as many elements
# as the weight, for each thread: every thread sums a weight gradient of its own. Measured on two
# cores of Zen 5, in networks.
_ACTIVATIONS_PER_WEIGHT = {torch.float32: 0.15, torch.bfloat16: 2.0, torch.float16: 0.05}


class ConvLimits(NamedTuple):
    """Limits of the library's direct convolutions, in elements where nothing else is said."""

    most_taps: int
    # Up to here the direct convolutions win on every instruction set.
    small_weight: int
    # Larger weights are read once for all pixels where the activations before and after the
    # convolution are at most this large, and at most this many times as large as the weight.
    few_activations: int
    few_activations_per_weight: int


class CPUKernels(NativeKernels):
    """The compiled CPU library."""

    has_conv_bias = True

    @functools.cached_property
    def instruction_set(self) -> str:
        """What the kernels run on here: the best of this machine, or PREACT_KERNELS_CPU_ISA."""
        return self._ops.instruction_set()

    @functools.cached_property
    def _channel_multiple(self) -> int:
        return self._ops.channel_multiple()

    @functools.cached_property
    def limits(self) -> ConvLimits:
        return ConvLimits(*self._ops.conv_limits())

    def serves_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        """Whether the direct convolutions serve a weight, on any number of pixels if None."""
        stride, padding, dilation, groups = conv
        out_channels, in_channels, kernel_h, kernel_w = weight_shape
        taps = kernel_h * kernel_w
        activations = None
        if pixels is not None:
            computed = pixels // (stride[0] * stride[1])  # about
            read = pixels if taps > 1 else computed
            activations = read * in_channels + computed * out_channels
        return (
            groups == 1
            and dtype != torch.float64
            and dilation[0] == dilation[1] == 1
            and kernel_h == 2 * padding[0] + 1
            and kernel_w == 2 * padding[1] + 1
            and taps <= self.limits.most_taps
            and out_channels % self._channel_multiple == 0
            and in_channels % self._channel_multiple == 0
            and self._is_faster(math.prod(weight_shape), activations, dtype)
        )

    def _is_faster(self, weights: int, activations: int | None, dtype: torch.dtype) -> bool:
        """Whether a direct convolution is faster than PyTorch's."""
        limits = self.limits
        if weights <= limits.small_weight:
            return True
        if self._channel_multiple < 8 or (dtype.itemsize == 2 and torch_compat.has_amx()):
            return False
        if activations is None:
            return True
        few = min(limits.few_activations, limits.few_activations_per_weight * weights)
        if activations <= few:
            return True
        least = _ACTIVATIONS_PER_WEIGHT[dtype] * weights * torch.get_num_threads()
        return self._channel_multiple >= 16 and activations >= least

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> Output:
        """See `Kernels`."""
        if _skips_pixels(conv_weight, conv):
            x, conv = _read_pixels(x, conv)
        return super().bn_relu_conv_forward(x, norm, conv_weight, conv, epilogue)

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
        """See `Kernels`."""
        backward = super().bn_relu_conv_backward
        if not _skips_pixels(conv_weight, conv):
            return backward(dy, fold, x, norm, conv_weight, conv, wanted)
        # A pixel that is not read adds 0 * xhat to the gradient of bn_weight: NaN where x is not
        # finite. PyTorch's convolution then computes all terms.
        if wanted.input and not math.isfinite(x.sum(dtype=norm.mean.dtype)):
            return pytorch_conv.bn_relu_conv_backward(
                self, dy, fold, x, norm, conv_weight, conv, wanted
            )
        read, dense = _read_pixels(x, conv)
        found = backward(dy, fold, read, norm, conv_weight, dense, wanted)
        if found.g is None:
            return found
        g = torch.zeros_like(x)
        g[:, :, :: conv.stride[0], :: conv.stride[1]] = found.g
        return found._replace(g=g)

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        """See `Kernels`."""
        if all(t.dtype == torch.float32 and t.is_contiguous() for t in running):
            self._ops.running_stats_update.default(running, batch, momentum)
            torch.autograd.graph.increment_version(running)  # custom ops do not bump versions
        else:
            super().running_stats_update(running, batch, momentum)


def _skips_pixels(conv_weight: Tensor, conv: Conv) -> bool:
    """Whether a convolution reads only the pixels at multiples of its stride."""
    is_point = conv_weight.shape[2] == conv_weight.shape[3] == 1 and not any(conv.padding)
    return is_point and max(conv.stride) > 1


def _read_pixels(x: Tensor, conv: Conv) -> tuple[Tensor, Conv]:
    """The pixels read by a convolution that skips some, dense NHWC; and its geometry on these."""
    step_h, step_w = conv.stride
    read = x[:, :, ::step_h, ::step_w].contiguous(memory_format=torch.channels_last)
    return read, conv._replace(stride=(1, 1))


def load_error() -> str:
    """Loads the library. Returns why it is not available, or an empty string."""
    return load_library("_cpu.so")


@functools.cache
def kernels() -> CPUKernels:
    """The backend's functions; the library must be available."""
    return CPUKernels(torch.ops.preact_kernels_cpu)
