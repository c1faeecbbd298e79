"""The registered ops `preact_kernels::*`: schemas, fakes, and the call down to a backend.

`torch.compile`, `torch.export` and fake tensors see these ops; `kernels_for` hands them out in
that case, and the backend's own functions in eager mode, which saves the dispatcher's time.
Autograd is above (`torch.autograd.Function` in each op's file), so no op here has a gradient.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from preact_kernels.kernels import reference
from preact_kernels.kernels.reference.bn_stats import statistics_dtype
from preact_kernels.ops import backend, checks

_BN = "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps"
_CONV = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"

SCHEMAS = {
    "bn_stats": "(Tensor x) -> (Tensor, Tensor)",
    "running_stats_update": "(Tensor(a!)[] running, Tensor[] batch, float momentum) -> ()",
    "bn_relu_forward": f"(Tensor x, {_BN}) -> Tensor",
    "bn_relu_backward_sums": f"(Tensor dy, Tensor x, {_BN}) -> Tensor",
    "bn_relu_backward_input": (
        f"(Tensor dy, Tensor x, {_BN}, Tensor sums, float inv_count) -> Tensor"
    ),
    "bn_input_gradient": (
        "(Tensor? dy, Tensor g, Tensor x, Tensor mean, Tensor var, Tensor bn_weight, float eps, "
        "Tensor sums, float inv_count) -> Tensor"
    ),
    "bn_relu_conv_forward": (
        f"(Tensor x, {_BN}, Tensor conv_weight, Tensor? conv_bias, Tensor? residual, {_CONV}, "
        "bool with_stats) -> (Tensor, Tensor, Tensor)"
    ),
    "bn_relu_conv_backward": (
        "(Tensor dy, Tensor? skip, Tensor? z, Tensor? z_mean, Tensor? z_var, Tensor? z_weight, "
        "float z_eps, Tensor? z_sums, float z_inv_count, "
        f"Tensor x, {_BN}, Tensor conv_weight, {_CONV}, "
        "bool needs_g, bool needs_conv_weight, bool needs_dz) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "residual_add_forward": (
        "(Tensor x, Tensor branch, bool with_stats) -> (Tensor, Tensor, Tensor)"
    ),
}


def _nhwc_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _stats_like(x: Tensor, channels: int) -> Tensor:
    return x.new_empty(channels, dtype=statistics_dtype(x.dtype))


def _bn_stats(x):
    return _stats_like(x, x.shape[1]), _stats_like(x, x.shape[1])


def _running_stats_update(running, batch, momentum):
    return None


def _bn_relu_forward(x, mean, var, bn_weight, bn_bias, eps):
    return _nhwc_like(x)


def _bn_relu_backward_sums(dy, x, mean, var, bn_weight, bn_bias, eps):
    return x.new_empty((2, x.shape[1]), dtype=statistics_dtype(x.dtype))


def _bn_relu_backward_input(dy, x, mean, var, bn_weight, bn_bias, eps, sums, inv_count):
    return _nhwc_like(x)


def _bn_input_gradient(dy, g, x, mean, var, bn_weight, eps, sums, inv_count):
    return _nhwc_like(x)


def _bn_relu_conv_forward(
    x, mean, var, bn_weight, bn_bias, eps, conv_weight, conv_bias, residual,
    stride, padding, dilation, groups, with_stats,
):  # fmt: skip
    shape = checks.output_shape(x.shape, conv_weight, stride, padding, dilation)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    channels = shape[1] if with_stats else 0
    return y, _stats_like(y, channels), _stats_like(y, channels)


def _bn_relu_conv_backward(
    dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count,
    x, mean, var, bn_weight, bn_bias, eps, conv_weight,
    stride, padding, dilation, groups, needs_g, needs_conv_weight, needs_dz,
):  # fmt: skip
    return (
        _nhwc_like(x) if needs_g else x.new_empty(0),
        torch.empty_like(conv_weight) if needs_conv_weight else conv_weight.new_empty(0),
        x.new_empty((2, x.shape[1]) if needs_g else 0, dtype=statistics_dtype(x.dtype)),
        _nhwc_like(dy) if needs_dz else dy.new_empty(0),
    )


def _residual_add_forward(x, branch, with_stats):
    channels = x.shape[1] if with_stats else 0
    return _nhwc_like(x), _stats_like(x, channels), _stats_like(x, channels)


def _register(name: str, schema: str, fake) -> None:
    def on_backend(*args):
        x = args[0] if isinstance(args[0], Tensor) else args[1]
        x = x[0] if isinstance(x, list) else x  # running statistics come in lists
        kernels = backend.select(backend.current(), x.device.type, x.dtype)
        return getattr(kernels, name)(*args)

    qualified = f"preact_kernels::{name}"
    torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualified, ("CPU", "CUDA"), on_backend)
    torch.library.register_fake(qualified, fake)


for _name, _schema in SCHEMAS.items():
    _register(_name, _schema, globals()[f"_{_name}"])


def kernels_for(x: Tensor):
    """The kernels that serve `x`: a backend's module, or the registered ops while tracing.

    Raises:
        BackendError: the backend that was named cannot serve the device or the dtype.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta:
        return torch.ops.preact_kernels
    if x.numel() == 0:  # the share of one process of a group
        return reference
    return backend.select(backend.current(), x.device.type, x.dtype)
