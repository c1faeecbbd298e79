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
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from preact_kernels import torch_compat
from preact_kernels.modules.batch_norm import has_hooks, has_own_hooks
from preact_kernels.torch_compat import TorchDispatchMode

_SIMPLE = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple)
# What nn.Module and wrappers of modules set on their own.
_MODULE_STATE = {*nn.Module().__dict__, "_compiled_call_impl", "train"}
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


class Inlined(NamedTuple):
    """A module whose forward is part of a graph, and what its graph assumes of it."""

    names: tuple[str, ...]  # its path from the root of the graph
    forward: object  # of its class
    attributes: dict[str, Any]  # Python values that its forward may have read
    contents: dict[str, Any]  # of lists, tuples and dicts
    absent: tuple[str, ...]  # attributes and tensors that it does not have, or that are None
    children: int

    def is_unchanged(self, root: nn.Module) -> bool:
        """Whether the module is as it was, and without hooks."""
        module = module_at(root, self.names)
        if module is None or (self.names and has_own_hooks(module)):
            return False
        kind = type(module)
        if getattr(kind, "original_class", kind).forward is not self.forward:
            return False
        if _count_children(module) != self.children:
            return False
        values = module.__dict__
        for name, value in self.attributes.items():
            own = values.get(name, self)
            is_equal = isinstance(own, _SIMPLE) and type(own) is type(value) and own == value
            if own is not value and not is_equal:
                return False
        for name in self.absent:
            if name in values:
                return False
            if module._buffers.get(name) is not None or module._parameters.get(name) is not None:
                return False
        return all(_contents(values.get(n)) == value for n, value in self.contents.items())


def module_at(root: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The module at a path below `root`; None where there is none."""
    module: nn.Module | None = root
    for name in names:
        module = None if module is None else module._modules.get(name)
    return module


def names_of(path: str) -> tuple[str, ...]:
    """The names in the path of a module, as `module_at` takes them."""
    return tuple(path.split(".")) if path else ()


def inlined_at(root: nn.Module, path: str) -> Inlined:
    """The module at `path` below `root`, as it is now."""
    module = root.get_submodule(path)
    kind = original_class(module)
    own = [c for c in kind.__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
    class_values = dict.fromkeys(n for c in own for n in vars(c) if not n.startswith("__"))
    unset = [n for t in (module._buffers, module._parameters) for n, v in t.items() if v is None]
    values = {n: v for n, v in vars(module).items() if _may_be_read(n, v)}
    contents = {n: _contents(v) for n, v in values.items() if isinstance(v, _CONTAINERS)}
    attributes = {n: v for n, v in values.items() if n not in contents}
    missing = [n for n in class_values if n not in vars(module) and n not in _MODULE_STATE]
    return Inlined(
        names_of(path),
        kind.forward,
        attributes,
        contents,
        (*missing, *unset),
        _count_children(module),
    )


def _may_be_read(name: str, value: object) -> bool:
    """Whether a forward may read an attribute of its module."""
    is_own = name in _MODULE_STATE or name.startswith("preact_")
    return not (is_own or isinstance(value, Tensor))


class _Item:
    """Equal for the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Item) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _contents(value: Any) -> Any:
    """Equal for equal numbers and strings, and for equal contents of lists, tuples and dicts."""
    if isinstance(value, dict):
        return type(value), [(_contents(k), _contents(v)) for k, v in value.items()]
    if isinstance(value, _CONTAINERS):
        return type(value), [_contents(v) for v in value]
    return (type(value), value) if isinstance(value, _SIMPLE) else _Item(value)


def _count_children(module: nn.Module) -> int:
    return sum(child is not None for child in module._modules.values())


class Trace(NamedTuple):
    """The graph of a module's forward."""

    graph: fx.Graph
    reads_training: tuple[nn.Module, ...]  # whose attribute `training` was read
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
            before = Refusal.count
            graph = tracer.trace(root)
            _check_none_was_caught(before)
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        for path in (*tracer.inlined, *called):
            while path := path.rpartition(".")[0]:  # lists of modules, which are not called
                tracer.inlined.setdefault(path, inlined_at(root, path))
    except Exception as error:
        raise Refusal(_reason(error)) from error
    return Trace(graph, tuple(dict.fromkeys(reads)), tracer.inlined, tracer.opaque)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` before conversion, and before `fully_shard` of FSDP2."""
    kind = getattr(type(module), "original_class", type(module))
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
    def __init__(self, root: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf
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
        except Exception as error:
            self.module_stack = module_stack
            if any(isinstance(a, list | dict) for a in (*args, *kwargs.values())):
                raise  # it may have changed them
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            Refusal.count = refusals  # those in the child end here
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
