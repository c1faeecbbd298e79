"""The compiled CUDA library, loaded when first asked for, under the function names of `reference`.

It has fused convolutions for narrow channels (`serves_bn_relu_conv`). Every other convolution is
PyTorch's, on an activation that the library rebuilds and that is freed at once. Nothing here has
been measured on a GPU: which shapes are served follows from what the kernels hold on chip.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from preact_kernels.kernels import pytorch_conv

_LIBRARY = Path(__file__).parent.parent / "_cuda.so"
OLDEST_CAPABILITY = (8, 0)  # of those that setup.py compiles for


@functools.cache
def _load() -> str:
    """Loads the library; the reason why it cannot be, or nothing."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU"
    if not _LIBRARY.exists():
        return "the package was installed without its CUDA library"
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        return f"{_LIBRARY.name} does not load: {error}"
    return ""


def is_available() -> bool:
    """Whether there is a GPU that the library serves, and the library loads."""
    return not load_error()


def load_error() -> str:
    """Why the library is not available; empty where it is."""
    return _load() or architecture_refusal(torch.device("cuda"))


@functools.cache
def architecture_refusal(device: torch.device) -> str:
    """Why a GPU is not served, or nothing."""
    found = torch.cuda.get_device_capability(device)
    if found >= OLDEST_CAPABILITY:
        return ""
    expected, given = (".".join(map(str, c)) for c in (OLDEST_CAPABILITY, found))
    return f"expected a GPU of compute capability {expected} or later, got {given}"


def __getattr__(name: str):
    """The library's own ops; kept as module attributes once asked for."""
    if name.startswith("_") or _load():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = getattr(torch.ops.preact_kernels_cuda, name).default
    globals()[name] = op
    return op


@functools.cache
def _surroundings() -> pytorch_conv.Surroundings:
    return pytorch_conv.Surroundings.of_library(torch.ops.preact_kernels_cuda)


def _may_round_to_tf32() -> bool:
    """Whether PyTorch may round the operands of float32 convolutions to TF32."""
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


@functools.cache
def _is_weight_served(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    weight = torch.empty(shape, dtype=dtype, device=device)
    return torch.ops.preact_kernels_cuda.bn_relu_conv_is_served.default(weight)


def serves_bn_relu_conv(conv_weight: Tensor, stride, padding, dilation, groups: int) -> bool:
    """Whether the fused convolutions serve a weight.

    They do 1x1 with 16, 32, ... 256 channels and 3x3 with 16, 32 or 64, stride 1, if the GPU has
    the shared memory; in float32 as products of TF32, where PyTorch may use those.
    """
    kernel = conv_weight.shape[2:]
    return (
        groups == 1
        and stride[0] == stride[1] == 1
        and (dilation[0] == dilation[1] == 1 or kernel == (1, 1))
        and kernel[0] == 2 * padding[0] + 1
        and kernel[1] == 2 * padding[1] + 1
        and (conv_weight.dtype != torch.float32 or _may_round_to_tf32())
        and _is_weight_served(conv_weight.shape, conv_weight.dtype, conv_weight.device)
    )


# Whole runs of blocks in one call have units of those.
serves_preact_stage = serves_bn_relu_conv


def running_stats_update(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """See `reference.running_stats_update`. Two launches for many float32 vectors on a GPU."""
    if all(r.is_cuda and r.dtype == torch.float32 for r in running):
        torch._foreach_mul_(running, 1 - momentum)
        torch._foreach_add_(running, batch, alpha=momentum)
    else:
        for r, b in zip(running, batch, strict=True):
            r.copy_((1 - momentum) * r.double() + momentum * b.double())


def bn_relu_conv_forward(
    x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
    stride, padding, dilation, groups, with_stats,
):  # fmt: skip
    """See `reference.bn_relu_conv_forward`."""
    if conv_bias is None and serves_bn_relu_conv(conv_weight, stride, padding, dilation, groups):
        return torch.ops.preact_kernels_cuda.bn_relu_conv_forward.default(
            x, mean, var, bn_weight, bn_bias, eps, conv_weight, residual, with_stats
        )
    return pytorch_conv.bn_relu_conv_forward(
        _surroundings(), x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
        stride, padding, dilation, groups, with_stats,
    )  # fmt: skip


def bn_relu_conv_backward(
    dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
    x, mean, var, bn_weight, bn_bias, eps, conv_weight,
    stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
):  # fmt: skip
    """See `reference.bn_relu_conv_backward`."""
    if serves_bn_relu_conv(conv_weight, stride, padding, dilation, groups):
        return torch.ops.preact_kernels_cuda.bn_relu_conv_backward.default(
            dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
            x, mean, var, bn_weight, bn_bias, eps, conv_weight,
            needs_g, needs_conv_weight, needs_dz,
        )  # fmt: skip
    return pytorch_conv.bn_relu_conv_backward(
        _surroundings(), dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
        x, mean, var, bn_weight, bn_bias, eps, conv_weight,
        stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
    )  # fmt: skip
