"""The registered ops `preact_kernels::*`: schemas, fakes, and both sides of their flat arguments.

`torch.compile`, `torch.export` and fake tensors see these ops. In eager mode a backend's functions
are called directly, which saves the dispatcher's time (`dispatch.py` chooses). Autograd is above,
in `torch.autograd.Function`s, so no op here has a gradient.

A schema takes tensors and numbers, not named tuples: `RegisteredKernels` flattens the arguments of
`Kernels`, and `call_with_flat_arguments` restores them for the backend or for the fakes.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from preact_kernels.kernels.contract import (
    BatchStatistics,
    Conv,
    ConvGradients,
    Fold,
    Kernels,
    Norm,
    Output,
    Wanted,
    statistics_dtype,
)

_NORM = "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps"
_CONV = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_FOLD = (
    "Tensor? skip, Tensor? fold_x, Tensor? fold_mean, Tensor? fold_var, Tensor? fold_weight, "
    "Tensor? fold_bias, float fold_eps, Tensor? fold_sums, float fold_inv_count"
)

SCHEMAS = {
    "bn_stats": "(Tensor x) -> (Tensor, Tensor)",
    "running_stats_update": "(Tensor(a!)[] running, Tensor[] batch, float momentum) -> ()",
    "bn_relu_forward": f"(Tensor x, {_NORM}) -> Tensor",
    "bn_relu_backward_sums": f"(Tensor dy, Tensor x, {_NORM}) -> Tensor",
    "bn_relu_backward_mask": f"(Tensor dy, Tensor x, {_NORM}) -> (Tensor, Tensor)",
    "bn_relu_backward_input": (
        f"(Tensor dy, Tensor x, {_NORM}, Tensor sums, float inv_count) -> Tensor"
    ),
    "bn_input_gradient": f"(Tensor g, {_FOLD}) -> Tensor",
    "bn_relu_conv_forward": (
        f"(Tensor x, {_NORM}, Tensor conv_weight, {_CONV}, Tensor? conv_bias, Tensor? residual, "
        "bool with_stats) -> (Tensor, Tensor, Tensor)"
    ),
    "bn_relu_conv_backward": (
        f"(Tensor dy, {_FOLD}, Tensor x, {_NORM}, Tensor conv_weight, {_CONV}, "
        "bool wants_input, bool wants_weight, bool wants_dy) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "residual_add_forward": (
        "(Tensor x, Tensor branch, bool with_stats) -> (Tensor, Tensor, Tensor)"
    ),
}

_NO_FOLD = (None, None, None, None, None, None, 0.0, None, 0.0)


def _flat_fold(fold: Fold | None) -> tuple:
    if fold is None:
        return _NO_FOLD
    skip, x, norm, sums, inv_count = fold
    return skip, x, *norm, sums, inv_count


def _fold(skip, x, mean, var, weight, bias, eps, *rest) -> Fold | None:
    return None if x is None else Fold(skip, x, Norm(mean, var, weight, bias, eps), *rest)


def _conv(stride, padding, dilation, groups) -> Conv:
    return Conv(tuple(stride), tuple(padding), tuple(dilation), groups)


def _present(like: Tensor, *results: Tensor | None) -> tuple[Tensor, ...]:
    """An empty tensor in place of each None: a schema has no optional results."""
    return tuple(like.new_empty(0) if r is None else r for r in results)


def _flat_output(output: Output) -> tuple[Tensor, ...]:
    return _present(output.y, output.y, *(output.statistics or (None, None)))


def call_with_flat_arguments(kernels: Kernels, name: str, arguments: Sequence):
    """Calls a function of `kernels` with the arguments of a schema, and flattens its results."""
    if name == "bn_relu_forward":
        return kernels.bn_relu_forward(arguments[0], Norm(*arguments[1:]))
    if name in ("bn_relu_backward_sums", "bn_relu_backward_mask", "bn_relu_backward_input"):
        dy, x = arguments[:2]
        return getattr(kernels, name)(dy, x, Norm(*arguments[2:7]), *arguments[7:])
    if name == "bn_input_gradient":
        g, *fold = arguments
        return kernels.bn_input_gradient(g, cast(Fold, _fold(*fold)))
    if name == "bn_relu_conv_forward":
        x, *rest = arguments
        conv_bias, residual, with_stats = rest[10:]
        output = kernels.bn_relu_conv_forward(
            x,
            Norm(*rest[:5]),
            rest[5],
            _conv(*rest[6:10]),
            conv_bias=conv_bias,
            residual=residual,
            with_stats=with_stats,
        )
        return _flat_output(output)
    if name == "bn_relu_conv_backward":
        dy, *rest = arguments
        x, norm, conv_weight = rest[9], Norm(*rest[10:15]), rest[15]
        conv, wanted = _conv(*rest[16:20]), Wanted(*rest[20:])
        gradients = kernels.bn_relu_conv_backward(
            dy, _fold(*rest[:9]), x, norm, conv_weight, conv, wanted
        )
        return _present(x, *gradients)
    if name == "residual_add_forward":
        return _flat_output(kernels.residual_add_forward(*arguments))
    return getattr(kernels, name)(*arguments)  # all of them are flat


class RegisteredKernels:
    """`Kernels` by way of the registered ops, for tracing."""

    ops = torch.ops.preact_kernels

    def serves_conv(self, weight_shape, conv, dtype, device) -> bool:
        """False: the backend decides when the op runs."""
        return False

    def bn_stats(self, x: Tensor) -> BatchStatistics:
        """See `Kernels`."""
        return BatchStatistics(*self.ops.bn_stats(x))

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        """See `Kernels`."""
        self.ops.running_stats_update(running, batch, momentum)

    def bn_relu_forward(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Kernels`."""
        return self.ops.bn_relu_forward(x, *norm)

    def bn_relu_backward_sums(self, dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """See `Kernels`."""
        return self.ops.bn_relu_backward_sums(dy, x, *norm)

    def bn_relu_backward_mask(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        return self.ops.bn_relu_backward_mask(dy, x, *norm)

    def bn_relu_backward_input(
        self, dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
    ) -> Tensor:
        """See `Kernels`."""
        return self.ops.bn_relu_backward_input(dy, x, *norm, sums, inv_count)

    def bn_input_gradient(self, g: Tensor, fold: Fold) -> Tensor:
        """See `Kernels`."""
        return self.ops.bn_input_gradient(g, *_flat_fold(fold))

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        *,
        conv_bias: Tensor | None = None,
        residual: Tensor | None = None,
        with_stats: bool = False,
    ) -> Output:
        """See `Kernels`."""
        y, mean, var = self.ops.bn_relu_conv_forward(
            x, *norm, conv_weight, *conv, conv_bias, residual, with_stats
        )
        return Output(y, BatchStatistics(mean, var) if with_stats else None)

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
        g, sums, dconv_weight, unfolded = self.ops.bn_relu_conv_backward(
            dy, *_flat_fold(fold), x, *norm, conv_weight, *conv, *wanted
        )
        return ConvGradients(
            g if wanted.input else None,
            sums if wanted.input else None,
            dconv_weight if wanted.weight else None,
            unfolded if wanted.dy else None,
        )

    def residual_add_forward(self, x: Tensor, branch: Tensor, with_stats: bool) -> Output:
        """See `Kernels`."""
        y, mean, var = self.ops.residual_add_forward(x, branch, with_stats)
        return Output(y, BatchStatistics(mean, var) if with_stats else None)


def _nhwc_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _sums_like(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=statistics_dtype(x.dtype))


def _output(y: Tensor, with_stats: bool) -> Output:
    mean, var = (y.new_empty(y.shape[1], dtype=statistics_dtype(y.dtype)) for _ in range(2))
    return Output(y, BatchStatistics(mean, var) if with_stats else None)


class FakeKernels:
    """`Kernels` that compute shapes and strides alone."""

    def bn_stats(self, x):
        """See `Kernels`."""
        return _output(x, True).statistics

    def running_stats_update(self, running, batch, momentum):
        """See `Kernels`."""

    def bn_relu_forward(self, x, norm):
        """See `Kernels`."""
        return _nhwc_like(x)

    def bn_relu_backward_sums(self, dy, x, norm):
        """See `Kernels`."""
        return _sums_like(x)

    def bn_relu_backward_mask(self, dy, x, norm):
        """See `Kernels`."""
        return _nhwc_like(x), _sums_like(x)

    def bn_relu_backward_input(self, dy, x, norm, sums, inv_count):
        """See `Kernels`."""
        return _nhwc_like(x)

    def bn_input_gradient(self, g, fold):
        """See `Kernels`."""
        return _nhwc_like(fold.x)

    def bn_relu_conv_forward(
        self, x, norm, conv_weight, conv, *, conv_bias=None, residual=None, with_stats=False
    ):
        """See `Kernels`."""
        shape = conv.output_shape(x.shape, conv_weight.shape)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        return _output(y, with_stats)

    def bn_relu_conv_backward(self, dy, fold, x, norm, conv_weight, conv, wanted):
        """See `Kernels`."""
        return ConvGradients(
            _nhwc_like(x) if wanted.input else None,
            _sums_like(x) if wanted.input else None,
            torch.empty_like(conv_weight) if wanted.weight else None,
            _nhwc_like(dy) if wanted.dy else None,
        )

    def residual_add_forward(self, x, branch, with_stats):
        """See `Kernels`."""
        return _output(_nhwc_like(x), with_stats)


def register(choose_kernels) -> None:
    """Registers every op.

    Args:
        choose_kernels: from a tensor argument to the `Kernels` that compute the op.
    """
    fakes = FakeKernels()
    for name, schema in SCHEMAS.items():

        def compute(*arguments, name=name):
            first = arguments[0]  # running statistics come in lists
            kernels = choose_kernels(first[0] if isinstance(first, list) else first)
            return call_with_flat_arguments(kernels, name, arguments)

        def fake(*arguments, name=name):
            return call_with_flat_arguments(fakes, name, arguments)

        qualified = f"preact_kernels::{name}"
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, ("CPU", "CUDA"), compute)
        torch.library.register_fake(qualified, fake)
