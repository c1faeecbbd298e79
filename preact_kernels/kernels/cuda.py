"""The CUDA backend: loads the compiled library when it is first asked for.

It has fused convolutions for narrow channels (`serves_conv`). Which shapes those serve follows from
what they hold on chip; nothing here has been measured on a GPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from preact_kernels.kernels.contract import Conv, StreamKernels
from preact_kernels.kernels.native import NativeKernels, load_library

OLDEST_CAPABILITY = (8, 0)  # of those that setup.py compiles for


def _may_round_to_tf32() -> bool:
    """Whether PyTorch may round the operands of float32 convolutions to TF32."""
    cudnn: Any = torch.backends.cudnn
    return cudnn.conv.fp32_precision == "tf32"


class CUDAKernels(NativeKernels, StreamKernels):
    """The compiled CUDA library."""

    has_conv_bias = False
    takes_float32_weights = True

    def serves_conv(
        self, weight_shape: Sequence[int], conv: Conv, dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Whether the fused convolutions serve a weight.

        They serve 1x1 with 16, 32, ... 256 channels and 3x3 with 16, 32 or 64 (float32: 16 or 32),
        stride 1, where the
        GPU has enough shared memory; float32 only where PyTorch may use TF32, as they do.
        """
        return self._serves(weight_shape, conv, dtype, device, float32_stream=False)

    def serves_stream_conv(
        self, weight_shape: Sequence[int], conv: Conv, dtype: torch.dtype, device: torch.device
    ) -> bool:
        """See `StreamKernels`: what `serves_conv` says, with more shared memory."""
        return self._serves(weight_shape, conv, dtype, device, float32_stream=True)

    def _serves(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        *,
        float32_stream: bool,
    ) -> bool:
        stride, padding, dilation, groups = conv
        kernel = tuple(weight_shape[2:])
        return (
            groups == 1
            and stride[0] == stride[1] == 1
            and (dilation[0] == dilation[1] == 1 or kernel == (1, 1))
            and kernel[0] == 2 * padding[0] + 1
            and kernel[1] == 2 * padding[1] + 1
            and (dtype != torch.float32 or _may_round_to_tf32())
            and _fits_shared_memory(self._ops, tuple(weight_shape), dtype, device, float32_stream)
        )


@functools.cache
def _fits_shared_memory(
    ops: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    float32_stream: bool,
) -> bool:
    weight = torch.empty(shape, dtype=dtype, device=device)
    return ops.bn_relu_conv_is_served.default(weight, float32_stream)


def load_error() -> str:
    """Loads the library. Returns why it is not available, or an empty string."""
    return gpu_refusal() or library_error()


def library_error() -> str:
    """Why the library is not available, or an empty string; also empty without a GPU for it."""
    return "" if gpu_refusal() else load_library("_cuda.so")


def gpu_refusal() -> str:
    """Why this machine's GPU is not served, or an empty string."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU"
    return architecture_refusal(torch.device("cuda"))


@functools.cache
def architecture_refusal(device: torch.device) -> str:
    """Why a GPU is not served, or an empty string."""
    found = torch.cuda.get_device_capability(device)
    if found >= OLDEST_CAPABILITY:
        return ""
    expected, given = (".".join(map(str, c)) for c in (OLDEST_CAPABILITY, found))
    return f"expected a GPU of compute capability {expected} or later, got {given}"


@functools.cache
def kernels() -> CUDAKernels:
    """The backend's functions; the library must be available."""
    return CUDAKernels(torch.ops.preact_kernels_cuda)
