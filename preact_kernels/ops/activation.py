"""The argument `activation` of public functions."""

from typing import Any

from preact_kernels.activations import ACTIVATIONS, DEFAULTS, Activation
from preact_kernels.ops import checks


def activation_of(value: Any) -> Activation:
    """Converts the name of an activation, or a tuple of a name and its parameter.

    Raises:
        TypeError: `value` is neither, or the parameter is not a number.
        ValueError: the name is unknown, the activation takes no parameter, or the parameter is not
            valid.
    """
    if isinstance(value, Activation):
        return value
    name, *parameter = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    if not isinstance(name, str):
        raise TypeError(
            f"activation: expected a name, or a name and its parameter, got {type(value).__name__}"
        )
    if name not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation: expected one of {known}, got {name!r}")
    if not parameter:
        return DEFAULTS[name]
    expected = ACTIVATIONS[name].parameter
    if expected is None:
        raise ValueError(f"activation: expected no parameter of {name!r}, got {parameter[0]!r}")
    checks.check_number("activation", parameter[0])
    number = float(parameter[0])
    is_finite = number - number == 0  # Dynamo does not trace `math.isfinite`
    if not is_finite or (number == 0 and not expected.may_be_zero):
        wanted = f"a finite number{'' if expected.may_be_zero else ' other than 0'}"
        raise ValueError(f"activation: expected {wanted} with {name!r}, got {parameter[0]}")
    return Activation(name, number)
