"""Activations of the fused modules: an activation module of PyTorch, or a name."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from preact_kernels.kernels.contract import Activation
from preact_kernels.kernels.reference.activations import activate
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.ops.activation import activation_of

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}

# For each class, the activation that a module computes; None if no kernel has it.
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], Activation | None]] = {
    nn.ReLU: lambda act: Activation("relu"),
    nn.LeakyReLU: lambda act: _with_parameter("leaky_relu", act.negative_slope),
    nn.Identity: lambda act: Activation("identity"),
    nn.ReLU6: lambda act: Activation("relu6") if (act.min_val, act.max_val) == (0, 6) else None,
    nn.SiLU: lambda act: Activation("silu"),
    nn.GELU: lambda act: Activation(_GELU[act.approximate]) if act.approximate in _GELU else None,
    nn.ELU: lambda act: _with_parameter("elu", act.alpha),
    nn.Hardswish: lambda act: Activation("hardswish"),
    nn.Mish: lambda act: Activation("mish"),
    nn.Softplus: lambda act: _with_parameter("softplus", act.beta) if act.threshold == 20 else None,
    nn.Sigmoid: lambda act: Activation("sigmoid"),
    nn.Tanh: lambda act: Activation("tanh"),
}


def _with_parameter(name: str, value: Any) -> Activation | None:
    is_finite = isinstance(value, int | float) and value - value == 0
    if not is_finite or (name == "softplus" and value == 0):
        return None
    return Activation(name, float(value))


def activation_of_module(act: nn.Module) -> Activation | None:
    """The activation that `act` computes; None if a fused module must call `act`.

    It must call modules with hooks, of unknown classes, or with parameters that kernels lack.
    """
    read = _ACTIVATIONS.get(type(act))
    return None if read is None or has_hooks(act) else read(act)


def hold_activation(module: nn.Module, activation: Any) -> None:
    """Stores an activation in a fused module: a module as child `act`, a name as `activation`.

    Raises:
        TypeError: `activation` is neither.
        ValueError: see `activation_of`.
    """
    if not isinstance(activation, nn.Module):
        module.activation = activation_of(activation)  # type: ignore[assignment]
    elif isinstance(activation, tuple(_ACTIVATIONS)):
        module.act = activation
    else:
        known = ", ".join(f"nn.{c.__name__}" for c in _ACTIVATIONS)
        raise TypeError(
            f"activation: expected a name, or one of {known}, got {type(activation).__name__}"
        )


def held_activation(module: nn.Module) -> Activation | None:
    """The activation that `hold_activation` stored; None if the child must be called."""
    act = module._modules.get("act")
    if act is not None:
        return activation_of_module(act)
    return activation_of(module.activation)  # the program may have assigned a name


def plain_activation(module: nn.Module, h: Tensor) -> Tensor:
    """Applies the activation to `h`; calls the child if there is one."""
    act = module._modules.get("act")
    return activate(h, activation_of(module.activation)) if act is None else act(h)


def activation_repr(module: nn.Module) -> str:
    """The `extra_repr` of an activation, unless it is a child."""
    if "act" in module._modules:
        return ""
    name, parameter = activation_of(module.activation)
    return f"activation={name!r}" if not parameter else f"activation={(name, parameter)!r}"
