"""The registered ops `preact_kernels::*`: schemas, fakes, conversion to and from flat arguments.

`torch.compile`, `torch.export` and fake tensors see these ops. In eager mode, functions of a
backend are called directly, without the dispatcher's overhead. The ops have no gradients: autograd
is in the `torch.autograd.Function`s that call them.

Schemas take tensors and numbers, not named tuples: `RegisteredKernels` flattens the arguments of
`Kernels`, and `call_with_flat_arguments` restores them for a backend or the fakes. `inv_count` is a
`Scalar`: with a `float`, Dynamo would recompile for each batch size.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from preact_kernels.activations import Activation
from preact_kernels.kernels.contract import (
    NO_EPILOGUE,
    AffineStep,
    Conv,
    Epilogue,
    Gradient,
    Gradients,
    Inputs,
    Kernels,
    Norm,
    Output,
    Statistics,
    Unit,
    Wanted,
    statistics_dtype,
)
from preact_kernels.kernels.dropout import Mask
from preact_kernels.kernels.native import FlatOps, flat_gradient, gradients
from preact_kernels.ops import checks
from preact_kernels.ops.op_arguments import check_arguments

_NORM = (
    "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps, str activation, "
    "float parameter"
)
_CONV = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_GRADIENT = (
    "Tensor g, Tensor? skip, Tensor? step_x, Tensor? step_mean, Tensor? step_var, "
    "Tensor? step_weight, float step_eps, Tensor? step_sums, Scalar step_inv_count"
)

SCHEMAS = {
    "bn_stats": "(Tensor x) -> (Tensor, Tensor)",
    "group_stats": "(Tensor x, SymInt groups) -> (Tensor, Tensor)",
    "running_stats_update": "(Tensor(a!)[] running, Tensor[] batch, Scalar momentum) -> ()",
    "norm_act_forward": f"(Tensor x, {_NORM}, Tensor? residual) -> Tensor",
    "norm_act_backward_sums": f"(Tensor dy, Tensor x, {_NORM}, Tensor? y) -> Tensor",
    "norm_act_backward_mask": f"(Tensor dy, Tensor x, {_NORM}, Tensor? y) -> (Tensor, Tensor)",
    "norm_act_recompute": f"(Tensor dy, Tensor x, {_NORM}) -> (Tensor, Tensor)",
    "norm_act_backward_input": (
        f"(Tensor dy, Tensor x, {_NORM}, Tensor sums, Scalar inv_count, Tensor? skip) -> Tensor"
    ),
    "norm_input_gradient": f"({_GRADIENT}) -> Tensor",
    "norm_act_conv_forward": (
        f"(Tensor x, {_NORM}, Tensor conv_weight, {_CONV}, Tensor? conv_bias, Tensor? residual, "
        "bool with_stats, ScalarType dtype) -> (Tensor, Tensor, Tensor)"
    ),
    "norm_act_conv_backward": (
        f"({_GRADIENT}, Tensor x, {_NORM}, Tensor conv_weight, {_CONV}, bool wants_input, "
        "bool wants_weight, bool wants_dy, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "residual_add_forward": (
        "(Tensor x, Tensor branch, bool with_stats, Tensor? bias) -> (Tensor, Tensor, Tensor)"
    ),
}
# Ops that a backend with `checks_arguments` checks itself.
CHECKED_BY_LIBRARIES = {
    name for name in SCHEMAS if "conv" not in name and name != "running_stats_update"
}


def _gradient(g, skip, x, mean, var, weight, eps, sums, inv_count) -> Gradient:
    if x is None:
        return Gradient(g)
    return Gradient(g, AffineStep(skip, x, Norm(mean, var, weight, None, eps), sums, inv_count))


def _unit(conv: Sequence, inputs: Inputs, y_dtype: torch.dtype, dtype: torch.dtype) -> Unit:
    """The unit of an op. Kernels of single units do not read `uses_batch`."""
    x, norm, weight = inputs
    stride, padding, dilation, groups = conv
    geometry = Conv(tuple(stride), tuple(padding), tuple(dilation), groups)
    return Unit(
        weight.shape,
        geometry,
        x.device,
        dtype=dtype,
        x_dtype=x.dtype,
        y_dtype=y_dtype,
        weight_dtype=weight.dtype,
        activation=Activation(norm.activation, norm.parameter),
        has_rows=norm.has_rows,
        eps=norm.eps,
    )


def _present(like: Tensor, *results: Tensor | None) -> tuple[Tensor, ...]:
    """Replaces None by an empty tensor, as a schema has no optional results."""
    return tuple(like.new_empty(0) if r is None else r for r in results)


def _flat_output(output: Output) -> tuple[Tensor, ...]:
    return _present(output.y, output.y, *(output.statistics or (None, None)))


def call_with_flat_arguments(kernels: Kernels, name: str, arguments: Sequence):
    """Calls a function of `kernels` with the arguments of a schema, and flattens its results."""
    if name == "norm_act_forward":
        x, *norm, residual = arguments
        return kernels.norm_act_forward(x, Norm(*norm), residual)
    if name in ("norm_act_backward_sums", "norm_act_backward_mask"):
        dy, x, *norm, y = arguments
        g, sums = kernels.norm_act_backward(dy, x, Norm(*norm), name.endswith("mask"), y)
        return sums if g is None else (g, sums)
    if name == "norm_act_recompute":
        dy, x, *norm = arguments
        return kernels.norm_act_recompute(dy, x, Norm(*norm))
    if name == "norm_act_backward_input":
        dy, x, *norm, sums, inv_count, skip = arguments
        step = AffineStep(skip, x, Norm(*norm), sums, inv_count)
        return kernels.norm_input_gradient(Gradient(dy, step), True)
    if name == "norm_input_gradient":
        return kernels.norm_input_gradient(_gradient(*arguments))
    if name == "norm_act_conv_forward":
        x, *rest, dtype = arguments
        inputs, epilogue = Inputs(x, Norm(*rest[:7]), rest[7]), Epilogue(*rest[12:])
        y_dtype = dtype if epilogue.residual is None else epilogue.residual.dtype
        unit = _unit(rest[8:12], inputs, y_dtype, dtype)
        return _flat_output(kernels.norm_act_conv_forward(unit, inputs, epilogue))
    if name == "norm_act_conv_backward":
        dy, (x, *rest, dtype) = _gradient(*arguments[:9]), arguments[9:]
        inputs, wanted = Inputs(x, Norm(*rest[:7]), rest[7]), Wanted(*rest[12:])
        y_dtype = (dy.g if dy.step is None else dy.step.x).dtype
        unit = _unit(rest[8:12], inputs, y_dtype, dtype)
        g, *others, _ = kernels.norm_act_conv_backward(unit, dy, inputs, wanted)
        # With a float32 stream, PyTorch's convolution gives a float32 g.
        return _present(x, g if g is None else g.to(dtype), *others)
    if name == "residual_add_forward":
        return _flat_output(kernels.residual_add_forward(*arguments))
    return getattr(kernels, name)(*arguments)


class RegisteredKernels(FlatOps):
    """`Kernels` that call the registered ops, for tracing.

    Args:
        refusal: `Kernels.refusal` of the backend that will run the ops.
    """

    def __init__(self, refusal: Callable[[Unit, int | None], str]) -> None:
        super().__init__(torch.ops.preact_kernels)
        self._refusal = refusal

    def refusal(self, unit: Unit, pixels: int | None = None) -> str:
        return self._refusal(unit, pixels)

    def computes_g_again(self, activation: str) -> bool:
        return False  # as `norm_act_conv_backward`, whose result is g

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        self._ops.running_stats_update.default(running, batch, momentum)

    def norm_act_conv_forward(
        self,
        unit: Unit,
        inputs: Inputs,
        epilogue: Epilogue = NO_EPILOGUE,
        mask: Mask | None = None,
    ) -> Output:
        x, norm, conv_weight = inputs
        if mask is not None or x.dim() != 4:
            return self._pytorch_forward(unit, inputs, epilogue, mask)
        op = self._ops.norm_act_conv_forward.default
        y, mean, var = op(x, *norm, conv_weight, *unit.conv, *epilogue, unit.dtype)
        return Output(y, Statistics(mean, var) if epilogue.with_stats else None)

    def norm_act_conv_backward(
        self,
        unit: Unit,
        dy: Gradient,
        inputs: Inputs,
        wanted: Wanted,
        mask: Mask | None = None,
    ) -> Gradients:
        x, norm, conv_weight = inputs
        if mask is not None or x.dim() != 4:
            return self._pytorch_backward(unit, dy, inputs, wanted, mask)
        op = self._ops.norm_act_conv_backward.default
        given = *flat_gradient(dy), x, *norm, conv_weight, *unit.conv
        return gradients(op(*given, *wanted[:3], unit.dtype), wanted)


def _nhwc_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _sums_like(x: Tensor, norm: Norm) -> Tensor:
    return x.new_empty(norm.sums_shape(x), dtype=statistics_dtype(x.dtype))


def _statistics_like(x: Tensor, *rows: int) -> Statistics:
    shape, dtype = (*rows, x.shape[1]), statistics_dtype(x.dtype)
    return Statistics(x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype))


def _output(y: Tensor, with_stats: bool) -> Output:
    return Output(y, _statistics_like(y) if with_stats else None)


class FakeKernels(Kernels):
    """`Kernels` that compute only shapes, strides and dtypes of results."""

    def refusal(self, unit: Unit, pixels: int | None = None) -> str:
        return "device: the meta device computes nothing"

    def bn_stats(self, x: Tensor) -> Statistics:
        return _statistics_like(x)

    def group_stats(self, x: Tensor, groups: int, bias: Tensor | None = None) -> Statistics:
        return _statistics_like(x, x.shape[0])

    def running_stats_update(
        self, running: list[Tensor], batch: list[Tensor], momentum: float
    ) -> None:
        pass

    def norm_act_forward(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return _nhwc_like(x)

    def norm_act_backward(
        self, dy: Tensor, x: Tensor, norm: Norm, with_g: bool, y: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        return _nhwc_like(x) if with_g else None, _sums_like(x, norm)

    def norm_act_recompute(self, dy: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return _nhwc_like(x), _sums_like(x, norm)

    def norm_input_gradient(self, gradient: Gradient, activated: bool = False) -> Tensor:
        assert gradient.step is not None
        return _nhwc_like(gradient.step.x)

    def norm_act_conv_forward(
        self,
        unit: Unit,
        inputs: Inputs,
        epilogue: Epilogue = NO_EPILOGUE,
        mask: Mask | None = None,
    ) -> Output:
        shape = unit.conv.output_shape(inputs.x.shape, unit.weight_shape)
        y = torch.empty(
            shape,
            dtype=unit.y_dtype,
            device=unit.device,
            memory_format=torch.channels_last,
        )
        return _output(y, epilogue.with_stats)

    def norm_act_conv_backward(
        self,
        unit: Unit,
        dy: Gradient,
        inputs: Inputs,
        wanted: Wanted,
        mask: Mask | None = None,
    ) -> Gradients:
        x, norm, conv_weight = inputs
        return Gradients(
            _nhwc_like(x).to(unit.dtype) if wanted.input else None,
            _sums_like(x, norm) if wanted.input else None,
            torch.empty_like(conv_weight) if wanted.weight else None,
            _nhwc_like(dy.g if dy.step is None else dy.step.x) if wanted.dy else None,
        )

    def residual_add_forward(
        self, x: Tensor, branch: Tensor, with_stats: bool, bias: Tensor | None = None
    ) -> Output:
        return _output(_nhwc_like(x), with_stats)


FAKES = FakeKernels()


def register(choose_kernels) -> None:
    """Registers all ops.

    Args:
        choose_kernels: maps a tensor argument to the `Kernels` that compute the op.
    """
    for name, schema in SCHEMAS.items():
        parameters = re.findall(r"(\w+)(?=, |\) ->)", schema.partition(" ->")[0] + " ->")

        def compute(*arguments, name=name, parameters=parameters):
            first = arguments[0]  # a list of running statistics, or a tensor
            like = next(iter(first), None) if isinstance(first, list) else first
            checks.check_tensor(parameters[0], like)
            kernels = choose_kernels(like)
            if not (kernels.checks_arguments and name in CHECKED_BY_LIBRARIES):
                check_arguments(name, parameters, arguments)
            return call_with_flat_arguments(kernels, name, arguments)

        def fake(*arguments, name=name):
            return call_with_flat_arguments(FAKES, name, arguments)

        qualified = f"preact_kernels::{name}"
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, ("CPU", "CUDA"), compute)
        torch.library.register_fake(qualified, fake)
