"""Argument checks of the registered ops, which compiled programs call.

Public functions check their own arguments. Both remember arguments that passed (`checks.Passed`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from preact_kernels.activations import ACTIVATIONS, RELU
from preact_kernels.kernels.contract import WITH_RESIDUAL, Conv, statistics_dtype
from preact_kernels.ops import checks

_passed = checks.Passed()


def check_arguments(op: str, names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Checks the arguments of a registered op.

    Args:
        op: name of the op.
        names: names of its parameters.
        arguments: one for each parameter.
    """
    given = dict(zip(names, arguments, strict=True))
    if op == "running_stats_update":
        _check_running(**given)
        return
    key = None
    try:
        values: list[Any] = [op]
        for value in arguments:
            if isinstance(value, list):
                values += (len(value), *value)
            else:
                values.append(value)
        key = tuple(checks.described(values))
        if key in _passed:
            return
    except (AttributeError, TypeError, RuntimeError):  # such as a tensor without strides
        key = None
    _check(op, given)
    if key is not None:
        _passed.add(key, True)


def _check(op: str, given: Mapping[str, Any]) -> None:
    if "activation" in given and given["activation"] not in ACTIVATIONS:
        raise ValueError(f"activation: expected a known name, got {given['activation']!r}")
    if "x" in given:
        x = given["x"]
        checks.check_activation("x", x)
        for name in ("dy", "branch"):
            if name in given:
                _check_same(name, given[name], "x", x)
        for name in ("mean", "var", "bn_weight", "bn_bias"):
            if name in given:
                _check_table(name, given[name], "x", x)
        if "sums" in given:
            _check_table("sums", given["sums"], "x", x, 2)
            if given["skip"] is not None:
                _check_same("skip", given["skip"], "x", x)
        if op == "norm_act_forward" and given["residual"] is not None:
            _check_same("residual", given["residual"], "x", x)
            _check_activation("a residual", given["activation"], WITH_RESIDUAL)
        if given.get("y") is not None:
            _check_same("y", given["y"], "x", x)
            _check_activation("y", given["activation"], (RELU.name,))
        if given.get("bias") is not None:
            checks.check_like("bias", given["bias"], "x", x)
            _check_shape("bias", given["bias"], x.shape[1:2])
            _check_dtype("bias", given["bias"], x.dtype)
            if given["with_stats"]:
                raise ValueError("bias: expected None with statistics")
    if op == "group_stats":
        checks.check_count("groups", given["groups"])
        if given["x"].numel() == 0:
            raise ValueError("x: expected at least one value, got none")
        if given["x"].shape[1] % given["groups"]:
            raise ValueError(
                f"groups: expected a divisor of the channels {given['x'].shape[1]} of x, "
                f"got {given['groups']}"
            )
    if "g" in given:
        _check_gradient(given, op == "norm_input_gradient" or given.get("wants_dy", False))
    if "conv_weight" in given:
        _check_conv(given)


def _check_activation(with_argument: str, activation: str, served: Sequence[str]) -> None:
    if activation not in served:
        expected = " or ".join(served)
        raise ValueError(f"activation: expected {expected} with {with_argument}, got {activation}")


def _check_running(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    """Checks running statistics before any is written.

    The result is not remembered, since keys of `Passed` do not contain `requires_grad`.
    """
    if len(batch) != len(running):
        raise ValueError(f"batch: expected {len(running)} tensors, got {len(batch)}")
    for index, (r, b) in enumerate(zip(running, batch, strict=True)):
        checks.check_tensor(f"running[{index}]", r)
        checks.check_running(f"running[{index}]", r)
        checks.check_like(f"batch[{index}]", b, "running", r)
        _check_shape(f"batch[{index}]", b, r.shape)


def _check_shape(name: str, t: Tensor, *shapes: Sequence[int]) -> None:
    if t.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {list(t.shape)}")


def _check_same(name: str, t: Any, like_name: str, like: Tensor) -> None:
    """Checks for the shape, dtype and device of another tensor."""
    checks.check_like(name, t, like_name, like)
    _check_shape(name, t, like.shape)
    _check_dtype(name, t, like.dtype)


def _check_dtype(name: str, t: Tensor, dtype: Any) -> None:
    if t.dtype != dtype:
        names = map(checks.dtype_name, (dtype, t.dtype))
        raise TypeError("{}: expected dtype {}, got {}".format(name, *names))


def _check_table(name: str, t: Any, x_name: str, x: Tensor, *rows: int) -> None:
    """Checks for `[*rows, C]` or `[*rows, N, C]` in the statistics dtype of `x`."""
    checks.check_like(name, t, x_name, x)
    n, c = x.shape[:2]
    _check_shape(name, t, (*rows, c), (*rows, n, c))
    _check_dtype(name, t, statistics_dtype(x.dtype))


def _check_gradient(given: Mapping[str, Any], needs_step: bool) -> None:
    checks.check_activation("g", given["g"])
    x = given["step_x"]
    if x is None:
        if needs_step:
            raise ValueError("step_x: expected a tensor, got None")
        if given["skip"] is not None:
            raise ValueError("skip: expected None without step_x")
        return
    checks.check_like("step_x", x, "g", given["g"])
    _check_shape("step_x", x, given["g"].shape)
    if given["skip"] is not None:
        _check_same("skip", given["skip"], "step_x", x)
    for name in ("step_mean", "step_var", "step_weight"):
        _check_table(name, given[name], "step_x", x)
    _check_table("step_sums", given["step_sums"], "step_x", x, 2)


def _check_conv(given: Mapping[str, Any]) -> None:
    """Checks weight and geometry of a convolution, and tensors with the shape of its result."""
    x, weight = given["x"], given["conv_weight"]
    checks.check_like("conv_weight", weight, "x", x)
    checks.check_conv_weight(weight, given["groups"], x.shape[1])
    if given["dtype"] not in checks.FLOATS:
        raise TypeError(f"dtype: expected a floating point dtype, got {given['dtype']}")
    numbers = (given[name] for name in ("stride", "padding", "dilation", "groups"))
    conv = checks.geometry(weight.shape[2:], *numbers)
    assert isinstance(conv, Conv)  # None only for named padding
    checks.check_image_size(x.shape, weight.shape[2:], conv)
    shape = tuple(conv.output_shape(x.shape, weight.shape))
    if "g" in given:
        checks.check_like("g", given["g"], "x", x)
        _check_shape("g", given["g"], shape)
    if given.get("conv_bias") is not None:
        checks.check_like("conv_bias", given["conv_bias"], "x", x)
        _check_shape("conv_bias", given["conv_bias"], shape[1:2])
        _check_dtype("conv_bias", given["conv_bias"], given["dtype"])
    if given.get("residual") is not None:
        checks.check_like("residual", given["residual"], "x", x)
        _check_shape("residual", given["residual"], shape)
