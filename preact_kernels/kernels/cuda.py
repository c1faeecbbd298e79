"""The CUDA backend: loads the compiled library at its first use.

Its fused convolutions serve few channels: their operands must fit in shared memory and registers.
"""

import ctypes
import functools
import os
import re
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.activations import RELU
from preact_kernels.kernels.contract import (
    BlockRun,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Output,
    Statistics,
    Unit,
    Wanted,
)
from preact_kernels.kernels.libraries import PACKAGE, load_library
from preact_kernels.kernels.native import NativeKernels
from preact_kernels.kernels.pytorch_conv import (
    mixed_dtypes_refusal,
    rows_refusal,
    unserved,
)

# Most pixels of a batch for which a convolution is fused, by kernel height, input and output
# channels. Beyond it, PyTorch's convolution follows a fused batch norm and ReLU, which takes two
# more launches, 2 us. Estimated, not measured, for an H200:
# - A 3x3 kernel of 64 channels takes 3,070 cycles of a multiprocessor for 64 pixels (0.21 ns per
#   pixel); PyTorch's convolution moves 640 bytes per pixel (0.15 ns).
# - The 1x1 kernels from 16, 32 and 64 channels to four times as many take 823, 804 and 920
#   instructions a warp for 128, 64 and 32 pixels (bench/instructions.py): 0.12, 0.24 and 0.54 ns
#   per pixel at 0.46 instructions a cycle of a scheduler, as in a measurement of 64 to 256
#   channels. PyTorch's convolution moves 224, 448 and 896 bytes per pixel: 0.11, 0.22 and 0.44 ns
#   at half of copy bandwidth. The first two differ by less than such estimates are off.
MOST_PIXELS = {(3, 64, 64): 2**16, (1, 64, 256): 2**14}


def _most_pixels(side: int, in_channels: int, out_channels: int) -> int | None:
    """The entry of `MOST_PIXELS`, or an estimate for other 1x1 kernels; None: no limit.

    Those take 1,300 instructions a warp for 8,192 numbers of the input or output, 3 ps for each
    number of the larger. PyTorch's convolution takes 1 ps for each of 3 * in + out numbers.
    """
    found = MOST_PIXELS.get((side, in_channels, out_channels))
    if found is not None or side != 1 or 4 * in_channels == out_channels:
        return found
    excess_ps = 3 * max(in_channels, out_channels) - (3 * in_channels + out_channels)
    return 2_000_000 // excess_ps if excess_ps > 0 else None


# Whether runs of bottlenecks use the kernels in csrc/cuda/resident_image.cuh, which take few
# launches. Off until they have been measured on a GPU.
RESIDENT_RUNS = os.environ.get("PREACT_KERNELS_RESIDENT_RUNS") == "1"

# Beginnings of the messages of PyTorch's allocators: native and `backend:cudaMallocAsync`.
_OUT_OF_MEMORY = ("CUDA out of memory", "Allocation on device ")
# End of the library's message with torch 2.11, which does not say what failed
# (csrc/host/tensors.h): out of memory, or another error.
_OR_ANOTHER_ERROR = "PyTorch has printed what failed."

LIBRARY = "_cuda.so"
OLDEST_CAPABILITY = (8, 0)  # as in setup.py


def _may_round_to_tf32() -> bool:
    """Whether PyTorch may round the operands of float32 convolutions to TF32."""
    cudnn: Any = torch.backends.cudnn
    return cudnn.conv.fp32_precision == "tf32"


class CUDAKernels(NativeKernels):
    """The compiled CUDA library."""

    adds_bias = True

    def one_norm_update(self, *given: Any) -> None:
        self._ops.norm_buffers_update.default(*given)

    def group_stats(self, x: Tensor, groups: int, bias: Tensor | None = None) -> Statistics:
        if bias is None:
            return super().group_stats(x, groups)
        return Statistics(*self._ops.group_stats_with_bias.default(x, groups, bias))

    def pool_sums(self, sums: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        return self._ops.pool_sums.default(sums, weight, groups)

    def _unit_refusal(self, unit: Unit) -> str | None:
        """See `UnitKernels`.

        The fused convolutions serve 1x1 with 16, 32, ... 256 channels and 3x3 with 16, 32 or 64
        (float32: 16 or 32), stride 1, if the GPU has enough shared memory and `_most_pixels` allows
        it. They use TF32 for float32, so they serve it only if PyTorch may use TF32. With products
        in half precision, weights may be float32, and so may one of x and y, which takes more
        shared memory.
        """
        if unit.activation != RELU:
            return unserved("activation", "relu", unit.activation.name)
        if refusal := rows_refusal(unit) or mixed_dtypes_refusal(unit):
            return refusal
        stride, padding, dilation, groups = unit.conv
        kernel_h, kernel_w = unit.weight_shape[2:]
        if groups != 1:
            return unserved("groups", 1, groups)
        if (stride[0], stride[1]) != (1, 1):
            return unserved("stride", 1, stride)
        if (dilation[0], dilation[1]) != (1, 1) and (kernel_h, kernel_w) != (1, 1):
            return unserved("dilation", 1, dilation)
        if (kernel_h, kernel_w) != (2 * padding[0] + 1, 2 * padding[1] + 1):
            return unserved("padding", "half the kernel size", padding)
        return None

    def _call_refusal(self, unit: Unit, pixels: int | None) -> str:
        if pixels is not None:
            out_channels, in_channels, side = unit.weight_shape[:3]
            most = _most_pixels(side, in_channels, out_channels)
            if most is not None and pixels > most:
                return unserved("x", f"up to {most} pixels of a batch", pixels)
        if unit.dtype == torch.float32 and not _may_round_to_tf32():
            return "dtype: the fused convolution rounds float32 to TF32, which PyTorch may not"
        with_stream = unit.x_dtype != unit.y_dtype
        shape = tuple(unit.weight_shape)
        if not _fits_shared_memory(self._ops, shape, unit.dtype, unit.device, with_stream):
            return unserved("conv_weight", "few channels of 1x1 and 3x3 kernels", list(shape))
        return ""

    def _fused_forward(self, unit: Unit, inputs: Inputs, epilogue: Epilogue) -> Output:
        """See `UnitKernels`. The fused kernels do not add a bias."""
        if epilogue.conv_bias is not None:
            return self._pytorch_forward(unit, inputs, epilogue)
        return super()._fused_forward(unit, inputs, epilogue)

    def _fused_backward(
        self, unit: Unit, dy: Gradient, inputs: Inputs, wanted: Wanted
    ) -> Gradients:
        """See `UnitKernels`. The fused kernels do not evaluate steps with rows."""
        if dy.step is None or dy.step.sums.dim() == 2:
            return super()._fused_backward(unit, dy, inputs, wanted)
        whole = dy.whole(self)
        found = super()._fused_backward(unit, Gradient(whole), inputs, wanted._replace(dy=False))
        return found._replace(dy=whole if wanted.dy else None)

    def _is_resident(self, run: BlockRun, x: Tensor, is_backward: bool) -> bool:
        weights = [p.conv_weight for p in run.parameters]
        described = weights, len(run.units), run.units[0].dtype, is_backward
        return self._ops.resident_run_is_served.default(x, *described)

    def _run_forward(self, run: BlockRun, x: Tensor) -> Any:
        """The op for `block_run_forward`. A resident run takes only the statistics of `x`."""
        if RESIDENT_RUNS and not any(run.statistics[1:]) and self._is_resident(run, x, False):
            return self._ops.resident_run_forward.default
        return super()._run_forward(run, x)

    def _run_backward(self, run: BlockRun, dy: Gradient, kept: Sequence[Tensor]) -> Any:
        """The op for `block_run_backward`. A resident run needs all inputs, and has one dtype."""
        if (
            RESIDENT_RUNS
            and len(kept) == len(run.parameters)
            and kept[0].dtype == dy.g.dtype  # dtypes of the residual stream and of the products
            and run.units[0].uses_batch
            and self._is_resident(run, dy.g, True)
        ):
            return self._ops.resident_run_backward.default
        return super()._run_backward(run, dy, kept)


def _takes_work() -> bool:
    """Whether the current stream runs kernels: no error has occurred, and it does not capture."""
    try:
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream().query()
    except RuntimeError:
        return False
    return True


class LibraryOps:
    """The ops of the library; out of memory, they raise `torch.OutOfMemoryError`.

    The stable ABI of PyTorch lets the library raise only `RuntimeError`.

    Args:
        ops: a namespace of `torch.ops`.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `copy` asks before `_ops` is set
            raise AttributeError(name)
        op = getattr(self._ops, name).default

        def call(*args: Any) -> Any:
            try:
                return op(*args)
            except RuntimeError as error:
                message = str(error)
                if not message.startswith(_OUT_OF_MEMORY):
                    raise
                if message.endswith(_OR_ANOTHER_ERROR) and not _takes_work():
                    raise
                raise torch.OutOfMemoryError(message) from None

        setattr(self, name, types.SimpleNamespace(default=call))
        return getattr(self, name)


@functools.cache
def _fits_shared_memory(
    ops: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    with_stream: bool,
) -> bool:
    with torch_compat.without_dispatch_modes_above(0):  # such as FakeTensorMode
        weight = torch.empty(shape, dtype=dtype, device=device)
        return ops.norm_act_conv_is_served.default(weight, with_stream)


def load_error() -> str:
    """Loads the library. Returns the error, or an empty string."""
    return gpu_refusal() or library_error()


def library_error() -> str:
    """Why the library does not load, or an empty string; empty too without a GPU for it."""
    if gpu_refusal():
        return ""
    return load_library(LIBRARY) or target_refusal(
        torch.cuda.get_device_capability(torch.device("cuda")), targets()
    )


@functools.cache
def targets() -> tuple[str, ...]:
    """The targets that the library was compiled for: `sm_90` is machine code, `compute_90` PTX."""
    text = ctypes.CDLL(str(PACKAGE / LIBRARY)).preact_kernels_cuda_targets
    text.restype = ctypes.c_char_p
    return parse_targets(text().decode())


def parse_targets(text: str) -> tuple[str, ...]:
    """Splits a string such as "sm_90_compute_90"."""
    return tuple(re.findall(r"(?:sm|compute)_\d+[af]?", text))


def target_refusal(capability: tuple[int, int], compiled: Sequence[str]) -> str:
    """Why a GPU runs no code compiled for these targets, or an empty string.

    Machine code runs on GPUs of the same major version and an equal or higher minor version, PTX on
    all of an equal or higher version. Targets that end in "a" or "f" are specific to a GPU or to a
    family.
    """
    for target in compiled:
        kind, version = target.split("_")
        number = int(version.rstrip("af"))
        oldest = divmod(number, 10)
        is_specific = version.endswith("a")
        if capability == oldest or (
            not is_specific
            and capability > oldest
            and (capability[0] == oldest[0] or (kind == "compute" and version.isdigit()))
        ):
            return ""
    given = ".".join(map(str, capability))
    return (
        f"{LIBRARY} was compiled for {', '.join(compiled)}, and the GPU has compute capability "
        f'{given}; build it again with TORCH_CUDA_ARCH_LIST="{given}"'
    )


def gpu_refusal() -> str:
    """Why this machine's GPU is not served, or an empty string."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU"
    return architecture_refusal(torch.device("cuda"))


@functools.cache
def architecture_refusal(device: torch.device) -> str:
    """Why the GPU is too old, or an empty string."""
    found = torch.cuda.get_device_capability(device)
    if found >= OLDEST_CAPABILITY:
        return ""
    expected, given = (".".join(map(str, c)) for c in (OLDEST_CAPABILITY, found))
    return f"expected a GPU of compute capability {expected} or later, got {given}"


@functools.cache
def kernels() -> CUDAKernels:
    """The backend's functions; the library must be available."""
    return CUDAKernels(LibraryOps(torch.ops.preact_kernels_cuda))
