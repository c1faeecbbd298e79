"""Activations of the fused modules: an activation module of PyTorch, or a name."""

from typing import Any

from torch import Tensor, nn

from preact_kernels.activations import (
    ACTIVATION_MODULES,
    Activation,
    activate,
    activation_of_module,
)
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.ops.activation import activation_of


def read_activation(act: nn.Module) -> Activation | None:
    """The activation that `act` computes; None if a fused module must call `act`.

    It must call modules with hooks, of unknown classes, or with parameters that kernels lack.
    """
    return None if has_hooks(act) else activation_of_module(act)


def hold_activation(module: nn.Module, activation: Any) -> None:
    """Stores an activation in a fused module: a module as child `act`, a name as `activation`.

    Raises:
        TypeError: `activation` is neither.
        ValueError: see `activation_of`.
    """
    if not isinstance(activation, nn.Module):
        module.activation = activation_of(activation)  # type: ignore[assignment]
    elif isinstance(activation, ACTIVATION_MODULES):
        module.act = activation
    else:
        known = ", ".join(f"nn.{c.__name__}" for c in ACTIVATION_MODULES)
        raise TypeError(
            f"activation: expected a name, or one of {known}, got {type(activation).__name__}"
        )


def held_activation(module: nn.Module) -> Activation | None:
    """The activation that `hold_activation` stored; None if the child must be called."""
    act = module._modules.get("act")
    if act is not None:
        return read_activation(act)
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
