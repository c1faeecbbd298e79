"""Traces the forward of a module to a graph, and refuses what a graph cannot hold.

`torch.fx` records operations on its proxies alone. What a forward does beside them would be lost
or frozen in the graph: control flow on Python values, tensors computed from constants, random
numbers, autocast and no_grad contexts, checkpointing, custom autograd functions. `trace` refuses
all of these. A child that cannot be traced stays a call in the graph of its parent.
"""

import builtins
import contextlib
import copy
import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from preact_kernels import torch_compat
from preact_kernels.modules.batch_norm import has_hooks
from preact_kernels.torch_compat import TorchDispatchMode

_PLAIN_CONTAINERS = (nn.Sequential,)

IN_PLACE_OPERATORS: dict[str, Callable] = {
    name: getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
}


class Refusal(Exception):
    """Why a module cannot be traced."""

    count = 0  # raised so far, also those that a forward caught

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        Refusal.count += 1


def trace(root: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> fx.Graph:
    """Traces the forward of `root`, for tensors as its arguments without defaults.

    Args:
        root: any module; it does not change.
        is_leaf: whether a module is called as it is; modules of torch.nn are.

    Raises:
        Refusal: its forward cannot be traced.
    """
    try:
        with _unchanged(root), _only_proxies(root):
            before = Refusal.count
            graph = _Tracer(is_leaf).trace(root)
            _check_none_was_caught(before)
    except Exception as error:
        raise Refusal(_reason(error)) from error
    return graph


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` before `fully_shard` of FSDP2."""
    kind = type(module)
    wrapper = torch_compat.fsdp_module_class()
    if wrapper is None or not issubclass(kind, wrapper):
        return kind
    return kind.__mro__[kind.__mro__.index(wrapper) + 1]


class _TensorProxy(fx.Proxy):
    """A proxy that has the attributes of a tensor, and no others."""

    def __getattr__(self, k):
        if not hasattr(Tensor, k):
            raise AttributeError(f"'Tensor' object has no attribute {k!r}")
        return super().__getattr__(k)


def _in_place_operator(target: Callable) -> Callable:
    def call(self: fx.Proxy, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return call


# `fx.Proxy` has none of them, so that `h += x` would trace as `h = h + x`.
for _name, _target in IN_PLACE_OPERATORS.items():
    setattr(_TensorProxy, f"__{_name}__", _in_place_operator(_target))


class _Tracer(fx.Tracer):
    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        forward = original_class(self.root).forward
        arguments: list[Any] = [self.root]
        for name, parameter in list(inspect.signature(forward).parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.default is inspect.Parameter.empty:
                arguments.append(self.create_proxy("placeholder", name, (), {}))
        return forward, arguments

    def proxy(self, node):
        return _TensorProxy(node, self)

    def to_bool(self, obj):
        raise Refusal("it has control flow on values")

    def iter(self, obj):
        raise Refusal("it iterates over a value of unknown length")

    def create_arg(self, a):
        if isinstance(a, Tensor) and not self._has(a):
            raise Refusal("it uses a tensor that is neither a parameter nor a buffer")
        if isinstance(a, dict) and type(a) is not dict:
            raise Refusal(f"it uses a {type(a).__name__}")
        return super().create_arg(a)

    def _has(self, t: Tensor) -> bool:
        return isinstance(t, nn.Parameter) or any(t is b for b in self.root.buffers())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if has_hooks(m):
            return True
        if type(m) is nn.Identity:  # needs no node: it returns its input
            return False
        if self._is_leaf(m):
            return True
        kind = original_class(m)
        return kind.__module__.startswith("torch.nn") and kind not in _PLAIN_CONTAINERS

    def call_module(self, m, forward, args, kwargs):
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        last = next(iter(reversed(self.graph.nodes)), None)
        module_stack, refusals = self.module_stack.copy(), Refusal.count
        try:
            with _unchanged(m):
                y = super().call_module(m, forward, args, kwargs)
            _check_none_was_caught(refusals)
        except Exception:
            self.module_stack = module_stack
            if any(isinstance(a, list | dict) for a in (*args, *kwargs.values())):
                raise  # it may have changed them
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            Refusal.count = refusals  # those in the child end here
            return self.create_proxy("call_module", path, args, kwargs)
        return y


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Refuses a forward that sets attributes of its module, and restores them."""
    attributes = vars(module)
    before = dict(attributes)
    held = {n: copy.copy(v) for n, v in before.items() if type(v) in (dict, list, set)}
    is_same = True
    try:
        yield
    finally:
        for name, value in held.items():
            own = before[name]
            if len(own) != len(value) or any(map(operator.is_not, own, value)):
                is_same = False
                own.clear()
                own.extend(value) if isinstance(own, list) else own.update(value)
        if attributes.keys() != before.keys() or any(
            attributes[name] is not value for name, value in before.items()
        ):
            is_same = False
            attributes.clear()
            attributes.update(before)
    if not is_same:
        raise Refusal("its forward sets attributes")


def _check_none_was_caught(count: int) -> None:
    """Refuses a forward that caught a `Refusal`, and went on; `count` were raised before it."""
    if Refusal.count != count:
        raise Refusal("its forward catches the errors of tracing")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, fx.proxy.TraceError):
        return f"it has control flow on values ({lines[0]})"
    return lines[0] if isinstance(error, Refusal) else f"{type(error).__name__}: {lines[0]}"


class _NoTensors(TorchDispatchMode):
    """Refuses operations on tensors: their results would be constants of the graph."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise Refusal(f"it computes with tensors that are no inputs ({function})")


def _refuse(reason: str) -> Callable:
    def refuse(*args, **kwargs):
        raise Refusal(reason)

    return refuse


def _isinstance(value: object, kinds: Any) -> bool:
    """`isinstance` of a traced forward, for which proxies are tensors."""
    if isinstance(value, fx.Proxy):
        flat = kinds if isinstance(kinds, tuple) else (kinds,)
        return any(k is Tensor for k in flat)
    return builtins.isinstance(value, kinds)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Sets an attribute within the context."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _random_states() -> tuple:
    """States of the random number generators of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, *rest = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), rest


_REFUSED = (
    (torch.autograd.Function, "apply", "it calls a custom autograd function"),
    (
        torch.autograd.graph.saved_tensors_hooks,
        "__enter__",
        "it runs under checkpointing or other hooks of saved tensors",
    ),
    *(
        (context, "__enter__", f"a part of it runs under {context.__name__}")
        for context in (
            torch.autocast,
            torch.enable_grad,
            torch.inference_mode,
            torch.no_grad,
        )
    ),
    (torch.set_grad_enabled, "__init__", "a part of it runs under set_grad_enabled"),
    *(
        (torch, name, f"it calls torch.{name}")
        for name in (
            "is_autocast_enabled",
            "is_grad_enabled",
            "is_inference_mode_enabled",
            "manual_seed",
            "seed",
            "set_rng_state",
        )
    ),
    (torch.random, "fork_rng", "it calls torch.random.fork_rng"),
)


@contextlib.contextmanager
def _only_proxies(root: nn.Module) -> Iterator[None]:
    """Within the context, whatever a graph cannot hold raises `Refusal`."""
    states = _random_states()
    sources = {
        sys.modules[base.__module__]
        for module in root.modules()
        for base in original_class(module).__mro__
        if base.__module__ in sys.modules and not base.__module__.startswith(("torch.", "builtins"))
    }
    replaced = [
        *((owner, name, _refuse(reason)) for owner, name, reason in _REFUSED),
        *((source, "isinstance", _isinstance) for source in sources),
        (torch, "is_tensor", lambda value: _isinstance(value, Tensor)),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_NoTensors())
        for owner, name, value in replaced:
            stack.enter_context(_replaced(owner, name, value))
        yield
    if _random_states() != states:
        raise Refusal("it draws random numbers in Python")
