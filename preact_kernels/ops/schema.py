"""The registered ops `preact_kernels::*`: schemas, fakes, conversion to and from flat arguments.

`torch.compile`, `torch.export` and fake tensors see these ops. In eager mode a backend's functions
are called directly, which saves the dispatcher's time (`dispatch.py` chooses). Autograd is above,
in `torch.autograd.Function`s, so no op here has a gradient.

A schema takes tensors and numbers, not named tuples: `RegisteredKernels` flattens the arguments of
`Kernels`, and `call_with_flat_arguments` restores them for the backend or for the fakes. One over
a count is a `Scalar`: for a `float`, Dynamo compiles again for each batch size.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    BatchStatistics,
    Conv,
    ConvGradients,
    Epilogue,
    Fold,
    Kernels,
    Norm,
    Output,
    StreamConvs,
    Wanted,
    statistics_dtype,
)
from preact_kernels.kernels.flat_ops import FlatOps, flat_fold

_NORM = "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps"
_CONV = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_FOLD = (
    "Tensor? skip, Tensor? fold_x, Tensor? fold_mean, Tensor? fold_var, Tensor? fold_weight, "
    "float fold_eps, Tensor? fold_sums, Scalar fold_inv_count"
)

SCHEMAS = {
    "bn_stats": "(Tensor x) -> (Tensor, Tensor)",
    "running_stats_update": "(Tensor(a!)[] running, Tensor[] batch, Scalar momentum) -> ()",
    "bn_relu_forward": f"(Tensor x, {_NORM}) -> Tensor",
    "bn_relu_backward_sums": f"(Tensor dy, Tensor x, {_NORM}) -> Tensor",
    "bn_relu_backward_mask": f"(Tensor dy, Tensor x, {_NORM}) -> (Tensor, Tensor)",
    "bn_relu_backward_input": (
        f"(Tensor dy, Tensor x, {_NORM}, Tensor sums, Scalar inv_count) -> Tensor"
    ),
    "bn_input_gradient": f"(Tensor g, {_FOLD}) -> Tensor",
    "bn_relu_conv_forward": (
        f"(Tensor x, {_NORM}, Tensor conv_weight, {_CONV}, Tensor? conv_bias, Tensor? residual, "
        "bool with_stats, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)"
    ),
    "bn_relu_conv_backward": (
        f"(Tensor dy, {_FOLD}, Tensor x, {_NORM}, Tensor conv_weight, {_CONV}, "
        "bool wants_input, bool wants_weight, bool wants_dy) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "residual_add_forward": (
        "(Tensor x, Tensor branch, bool with_stats) -> (Tensor, Tensor, Tensor)"
    ),
}


def _fold(skip, x, mean, var, weight, eps, *rest) -> Fold | None:
    return None if x is None else Fold(skip, x, Norm(mean, var, weight, None, eps), *rest)


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
        norm, weight, conv = Norm(*rest[:5]), rest[5], _conv(*rest[6:10])
        epilogue = Epilogue(*rest[10:])
        return _flat_output(kernels.bn_relu_conv_forward(x, norm, weight, conv, epilogue))
    if name == "bn_relu_conv_backward":
        dy, *rest = arguments
        x, norm, weight = rest[8], Norm(*rest[9:14]), rest[14]
        conv, wanted = _conv(*rest[15:19]), Wanted(*rest[19:])
        gradients = kernels.bn_relu_conv_backward(
            dy, _fold(*rest[:8]), x, norm, weight, conv, wanted
        )
        return _present(x, *gradients)
    if name == "residual_add_forward":
        return _flat_output(kernels.residual_add_forward(*arguments))
    return getattr(kernels, name)(*arguments)  # all of them are flat


class RegisteredKernels(FlatOps, StreamConvs):
    """The registered ops, for tracing; see `Kernels`."""

    def __init__(self) -> None:
        super().__init__(torch.ops.preact_kernels)

    def serves_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        """False: the backend decides when the op runs."""
        return False

    def serves_stream_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        """True: the ops take a stream, whether or not the backend fuses the convolution."""
        return True

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        self._ops.running_stats_update.default(running, batch, momentum)

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> Output:
        op = self._ops.bn_relu_conv_forward.default
        return self.output(op(x, *norm, conv_weight, *conv, *epilogue), epilogue.with_stats)

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
        op = self._ops.bn_relu_conv_backward.default
        arguments = (dy, *flat_fold(fold), x, *norm, conv_weight, *conv, *wanted)
        return self.gradients(op(*arguments), wanted)


def _nhwc_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _sums_like(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=statistics_dtype(x.dtype))


def _statistics_like(x: Tensor) -> BatchStatistics:
    mean, var = (x.new_empty(x.shape[1], dtype=statistics_dtype(x.dtype)) for _ in range(2))
    return BatchStatistics(mean, var)


def _output(y: Tensor, with_stats: bool) -> Output:
    return Output(y, _statistics_like(y) if with_stats else None)


class FakeKernels(Kernels):
    """`Kernels` that compute the shapes, strides and dtypes of results alone."""

    def serves_conv(
        self,
        weight_shape: Sequence[int],
        conv: Conv,
        dtype: torch.dtype,
        device: torch.device,
        pixels: int | None = None,
    ) -> bool:
        return False

    def bn_stats(self, x: Tensor) -> BatchStatistics:
        return _statistics_like(x)

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        pass

    def bn_relu_forward(self, x: Tensor, norm: Norm) -> Tensor:
        return _nhwc_like(x)

    def bn_relu_backward_sums(self, dy: Tensor, x: Tensor, norm: Norm) -> Tensor:
        return _sums_like(x)

    def bn_relu_backward_mask(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return _nhwc_like(x), _sums_like(x)

    def bn_relu_backward_input(
        self, dy: Tensor, x: Tensor, norm: Norm, sums: Tensor, inv_count: float
    ) -> Tensor:
        return _nhwc_like(x)

    def bn_input_gradient(self, g: Tensor, fold: Fold) -> Tensor:
        return _nhwc_like(fold.x)

    def bn_relu_conv_forward(
        self,
        x: Tensor,
        norm: Norm,
        conv_weight: Tensor,
        conv: Conv,
        epilogue: Epilogue = NO_EPILOGUE,
    ) -> Output:
        shape = conv.output_shape(x.shape, conv_weight.shape)
        residual = epilogue.residual
        dtype = (epilogue.dtype or x.dtype) if residual is None else residual.dtype
        y = torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)
        return _output(y, epilogue.with_stats)

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
        return ConvGradients(
            _nhwc_like(x).to(conv_weight.dtype) if wanted.input else None,
            _sums_like(x) if wanted.input else None,
            torch.empty_like(conv_weight) if wanted.weight else None,
            _nhwc_like(dy if fold is None else fold.x) if wanted.dy else None,
        )

    def residual_add_forward(self, x: Tensor, branch: Tensor, with_stats: bool) -> Output:
        return _output(_nhwc_like(x), with_stats)


def _half_beside_stream(arguments: Sequence) -> torch.dtype | None:
    """The dtype of a convolution in half precision, where one of its tensors is float32."""
    dtypes = {t.dtype for t in arguments if isinstance(t, Tensor) and t.dim() == 4}
    halves = dtypes & {torch.bfloat16, torch.float16}
    return halves.pop() if halves and torch.float32 in dtypes else None


def register(choose_kernels) -> None:
    """Registers every op.

    Args:
        choose_kernels: from a tensor argument, and the dtype of a convolution beside a float32
            stream or None, to the `Kernels` that compute the op.
    """
    fakes = FakeKernels()
    for name, schema in SCHEMAS.items():

        def compute(*arguments, name=name):
            first = arguments[0]  # running statistics come in lists
            like = first[0] if isinstance(first, list) else first
            half = _half_beside_stream(arguments) if "conv" in name else None
            results = call_with_flat_arguments(choose_kernels(like, half), name, arguments)
            if name == "bn_relu_conv_backward" and half and Wanted(*arguments[-3:]).input:
                g, *others = results  # in float32 where PyTorch's convolution computed it
                return g.to(half), *others
            return results

        def fake(*arguments, name=name):
            return call_with_flat_arguments(fakes, name, arguments)

        qualified = f"preact_kernels::{name}"
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, ("CPU", "CUDA"), compute)
        torch.library.register_fake(qualified, fake)
