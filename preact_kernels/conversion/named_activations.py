"""Modules, autograd functions and operators that the user names as activations."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from preact_kernels import torch_compat
from preact_kernels.activations import Activation
from preact_kernels.conversion.deferred import Recording
from preact_kernels.conversion.elementwise_rules import record_activation
from preact_kernels.conversion.registry import is_pending
from preact_kernels.ops.activation import activation_of


class NamedActivations(NamedTuple):
    """Activations by class of module, by autograd function, and by operator."""

    modules: dict[type, Activation]
    functions: dict[type, Activation]
    operators: dict[Any, Activation]  # by overload packet of `torch.ops`

    @staticmethod
    def of(names: Mapping[Any, Any] | None = None) -> "NamedActivations":
        """Checks the argument of `pk.convert`."""
        if names is not None and not isinstance(names, Mapping):
            raise TypeError(f"activations: expected a dictionary, got {type(names).__name__}")
        found = NamedActivations({}, {}, {})
        for called, name in (names or {}).items():
            if isinstance(called, type) and issubclass(called, nn.Module):
                kind: dict[Any, Activation] = found.modules
            elif isinstance(called, type) and issubclass(called, torch.autograd.Function):
                kind = found.functions
            elif isinstance(called, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
                kind, called = found.operators, _packet(called)
            else:
                raise TypeError(
                    "activations: expected classes of modules or of autograd functions, or "
                    f"operators of torch.ops, got {getattr(called, '__name__', called)!r}"
                )
            try:
                kind[called] = activation_of(name)
            except (TypeError, ValueError) as error:
                raise type(error)(f"activations: for {called!r}: {error}") from None
        return found

    def of_class(self, called: type) -> Activation | None:
        return self.modules.get(called) or self.functions.get(called)

    def of_operator(self, func: Any) -> Activation | None:
        return self.operators.get(_packet(func))


def _packet(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)


class _Regions(threading.local):
    """The regions that this thread has entered, outermost first."""

    def __init__(self) -> None:
        self.entered: list[Recording] = []


regions = _Regions()


def recorded(region: Recording, args: tuple, kwargs: dict, activation: Activation | None) -> Any:
    """Defers an activation of the only argument, or returns NotImplemented."""
    if activation is None or kwargs or len(args) != 1 or not is_pending(args[0]):
        return NotImplemented
    if not region.is_recording():
        return NotImplemented
    with torch_compat.disable_torch_function():
        return record_activation(region, args[0], activation)


def _recorded_here(args: tuple, kwargs: dict, called: type) -> Any:
    """`recorded` for the activation that the innermost region names."""
    if not regions.entered:
        return NotImplemented
    region = regions.entered[-1]
    return recorded(region, args, kwargs, region.named_activation(called))


class ActivationForward:
    """Replaces the forward of a module while a region is open."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = type(self._module)
        result = _recorded_here(args, kwargs, kind)
        return kind.forward(self._module, *args, **kwargs) if result is NotImplemented else result


_lock = threading.Lock()
_counts: Counter[Any] = Counter()  # open regions on all threads, by named autograd function


def replace_functions(functions: Mapping[Any, Activation]) -> None:
    """Replaces `apply` of named autograd functions while regions are open."""
    if not functions:
        return
    with _lock:
        for function in functions:
            _counts[function] += 1
            if _counts[function] == 1 and "apply" not in function.__dict__:
                function.apply = _named_apply(function)


def restore_functions(functions: Mapping[Any, Activation]) -> None:
    """Undoes `replace_functions` at the end of a region."""
    if not functions:
        return
    with _lock:
        for function in functions:
            _counts[function] -= 1
            if not _counts[function] and isinstance(function.__dict__.get("apply"), _NamedApply):
                del function.apply


class _NamedApply(classmethod):
    """Marks a replaced `apply`."""


def _named_apply(function: Any) -> _NamedApply:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = _recorded_here(args, kwargs, cls)  # NotImplemented for subclasses
        return super(function, cls).apply(*args, **kwargs) if result is NotImplemented else result

    return _NamedApply(apply)
