"""The compiled CPU library, loaded when first asked for, under the function names of `reference`.

Beside those it has `preact_stage_forward` and `preact_stage_backward` (csrc/cpu/ops.h), for blocks
in a row whose units `serves_preact_stage`.

Its direct convolutions serve stride 1, "same" padding of an odd kernel, one group, channels that
fill vectors, and weights that stay in the second-level cache. Every other convolution is
PyTorch's, on an activation that the library rebuilds and that is freed at once.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from preact_kernels.kernels import pytorch_conv

_LIBRARY = Path(__file__).parent.parent / "_cpu.so"
# Above this, PyTorch's blocking over channels wins; measured on AVX-512 with 1 MiB of L2 a core.
_MOST_WEIGHT_BYTES = 256 * 1024


@functools.cache
def _load() -> str:
    """Loads the library; the reason why it cannot be, or nothing."""
    if not _LIBRARY.exists():
        return "the package was installed without its compiled library"
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        return f"{_LIBRARY.name} does not load: {error}"
    return ""


def cpu_is_available() -> bool:
    """Whether the library is there and loads."""
    return not _load()


def cpu_load_error() -> str:
    """Why the library is not available; empty where it is."""
    return _load()


def __getattr__(name: str):
    """The library's own ops; kept as module attributes once asked for."""
    if name.startswith("_") or _load():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = getattr(torch.ops.preact_kernels_cpu, name).default
    globals()[name] = op
    return op


@functools.cache
def _channel_multiple() -> int:
    return torch.ops.preact_kernels_cpu.vector_bytes() // 4


def serves_preact_stage(conv_weight: Tensor, stride, padding, dilation, groups: int) -> bool:
    """Whether the direct convolutions, and so whole runs of blocks, serve a unit of this weight."""
    out_channels, in_channels, kernel_h, kernel_w = conv_weight.shape
    multiple = _channel_multiple()
    return (
        groups == 1
        and conv_weight.dtype != torch.float64
        and stride[0] == stride[1] == 1
        and dilation[0] == dilation[1] == 1
        and kernel_h == 2 * padding[0] + 1
        and kernel_w == 2 * padding[1] + 1
        and kernel_h * kernel_w <= 49
        and out_channels % multiple == 0
        and in_channels % multiple == 0
        and conv_weight.numel() * 4 <= _MOST_WEIGHT_BYTES
    )


_is_direct = serves_preact_stage


@functools.cache
def _surroundings() -> pytorch_conv.Surroundings:
    return pytorch_conv.Surroundings.of_library(torch.ops.preact_kernels_cpu)


def running_stats_update(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """See `reference.running_stats_update`."""
    if all(t.dtype == torch.float32 and t.is_contiguous() for t in running):
        torch.ops.preact_kernels_cpu.running_stats_update.default(running, batch, momentum)
        torch.autograd.graph.increment_version(running)  # which an op of one's own does not
    else:
        for r, b in zip(running, batch, strict=True):
            r.copy_((1 - momentum) * r.double() + momentum * b.double())


def bn_relu_conv_forward(
    x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
    stride, padding, dilation, groups, with_stats,
):  # fmt: skip
    """See `reference.bn_relu_conv_forward`."""
    if _is_direct(conv_weight, stride, padding, dilation, groups):
        return torch.ops.preact_kernels_cpu.bn_relu_conv_forward.default(
            x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual, with_stats
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
    if _is_direct(conv_weight, stride, padding, dilation, groups):
        return torch.ops.preact_kernels_cpu.bn_relu_conv_backward.default(
            dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
            x, mean, var, bn_weight, bn_bias, eps, conv_weight,
            needs_g, needs_conv_weight, needs_dz,
        )  # fmt: skip
    return pytorch_conv.bn_relu_conv_backward(
        _surroundings(), dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
        x, mean, var, bn_weight, bn_bias, eps, conv_weight,
        stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
    )  # fmt: skip
