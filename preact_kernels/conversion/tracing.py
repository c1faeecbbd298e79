"""Traces the forward of a module to a graph that is right for every later call, or refuses.

`torch.fx` records operations on its proxies alone. What a forward does beside them would be lost
or frozen in the graph: control flow on Python values, tensors computed from constants, random
numbers, autocast and no_grad contexts, checkpointing, custom autograd functions. `trace` refuses
all of these. A child that cannot be traced stays a call in the graph of its parent.
"""

import builtins
import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from preact_kernels.modules.batch_norm import has_hooks, has_own_hooks

_SIMPLE = (bool, int, float, str, type(None))
_PLAIN_CONTAINERS = (nn.Sequential,)


class Refusal(Exception):
    """Why a module cannot be traced."""


class Inlined(NamedTuple):
    """A module whose forward is part of a graph, and what its graph assumes of it."""

    module: nn.Module
    place: tuple[dict, str] | None  # the parent's `_modules` and the name there; None: the root
    attributes: dict[str, Any]  # Python values that its forward may have read

    def is_unchanged(self) -> bool:
        """Whether the module is still in its place, without hooks, with the same attributes."""
        if self.place is not None:
            siblings, name = self.place
            if siblings.get(name) is not self.module or has_own_hooks(self.module):
                return False
        values = self.module.__dict__
        return all(values.get(n, self) == v for n, v in self.attributes.items())


def inlined_at(root: nn.Module, path: str) -> Inlined:
    """The module at `path` below `root`, as it is now."""
    parent, _, name = path.rpartition(".")
    place = (root.get_submodule(parent)._modules, name) if path else None
    module = root.get_submodule(path)
    attributes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _SIMPLE) and name != "training"
    }
    return Inlined(module, place, attributes)


class Trace(NamedTuple):
    """The graph of a module's forward."""

    graph: fx.Graph
    reads_training: bool  # whether a forward in it may depend on `self.training`
    inlined: dict[str, Inlined]  # by path; the root's path is ""
    opaque: dict[str, str]  # why a child stays a call, by path


def trace(root: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Trace:
    """Traces the forward of `root`, for tensors as its arguments without defaults.

    Args:
        root: any module; it does not change.
        is_leaf: whether a module is called as it is; modules of torch.nn are.

    Raises:
        Refusal: its forward cannot be traced.
    """
    tracer = _Tracer(root, is_leaf)
    try:
        with _unchanged(root), _only_proxies(root), _reads_of_training() as reads:
            graph = tracer.trace(root)
    except Exception as error:
        raise Refusal(_reason(error)) from error
    return Trace(graph, bool(reads), tracer.inlined, tracer.opaque)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` before conversion."""
    return getattr(type(module), "original_class", type(module))


class _Tracer(fx.Tracer):
    def __init__(self, root: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf
        self._state = _global_state()
        self.inlined: dict[str, Inlined] = {}
        self.opaque: dict[str, str] = {}
        self.inlined[""] = inlined_at(root, "")

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        forward = original_class(self.root).forward
        arguments: list[Any] = [self.root]
        for name, parameter in list(inspect.signature(forward).parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.default is inspect.Parameter.empty:
                arguments.append(self.create_proxy("placeholder", name, (), {}))
        return forward, arguments

    def create_proxy(self, *args, **kwargs):
        if _global_state() != self._state:
            raise Refusal("a part of it runs under no_grad, autocast or inference_mode")
        return super().create_proxy(*args, **kwargs)

    def create_arg(self, a):
        if isinstance(a, Tensor) and not self._has(a):
            raise Refusal("it uses a tensor that is neither a parameter nor a buffer")
        return super().create_arg(a)

    def _has(self, t: Tensor) -> bool:
        return isinstance(t, nn.Parameter) or any(t is b for b in self.root.buffers())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._is_leaf(m) or has_hooks(m):
            return True
        kind = original_class(m)
        return kind.__module__.startswith("torch.nn") and kind not in _PLAIN_CONTAINERS

    def call_module(self, m, forward, args, kwargs):
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        last = next(iter(reversed(self.graph.nodes)), None)
        module_stack = self.module_stack.copy()
        try:
            with _unchanged(m):
                y = super().call_module(m, forward, args, kwargs)
        except Exception as error:
            self.module_stack = module_stack
            if any(isinstance(a, list | dict) for a in (*args, *kwargs.values())):
                raise  # it may have changed them
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            self.opaque[path] = _reason(error)
            for inner in [p for p in self.inlined if p == path or p.startswith(f"{path}.")]:
                del self.inlined[inner]
            return self.create_proxy("call_module", path, args, kwargs)
        self.inlined[path] = inlined_at(self.root, path)
        return y


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Refuses a forward that sets attributes of its module, and restores them."""
    attributes = vars(module)
    before = dict(attributes)
    try:
        yield
    finally:
        is_same = attributes.keys() == before.keys() and all(
            attributes[name] is value for name, value in before.items()
        )
        if not is_same:
            attributes.clear()
            attributes.update(before)
    if not is_same:
        raise Refusal("its forward sets attributes")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, fx.proxy.TraceError):
        return f"it has control flow on values ({lines[0]})"
    return lines[0] if isinstance(error, Refusal) else f"{type(error).__name__}: {lines[0]}"


def _global_state() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


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


@contextlib.contextmanager
def _reads_of_training() -> Iterator[list[nn.Module]]:
    """The modules whose attribute `training` is read within the context."""
    reads: list[nn.Module] = []

    def read(module: nn.Module) -> bool:
        reads.append(module)
        return module.__dict__["training"]

    def write(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    with _replaced(nn.Module, "training", property(read, write)):
        yield reads


def _random_states() -> tuple:
    """States of the random number generators of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, *rest = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), rest


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
        (torch.autograd.Function, "apply", _refuse("it calls a custom autograd function")),
        (
            torch.autograd.graph.saved_tensors_hooks,
            "__enter__",
            _refuse("it runs under checkpointing or other hooks of saved tensors"),
        ),
        *((source, "isinstance", _isinstance) for source in sources),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_NoTensors())
        for owner, name, value in replaced:
            stack.enter_context(_replaced(owner, name, value))
        yield
    if _random_states() != states:
        raise Refusal("it draws random numbers in Python")
