"""Traces the forward of a module to a graph, and refuses forwards that a graph cannot represent.

`torch.fx` records only operations on its proxies. A graph would lose or freeze control flow on
Python values and types, tensors computed from constants, random numbers, autocast and no_grad
contexts, checkpointing, and custom autograd functions. `trace` refuses all of these: a profile
function sees every call of the forward on this thread. A child that cannot be traced becomes one
call in the graph of its parent.
"""

import contextlib
import copy
import functools
import inspect
import operator
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from preact_kernels import torch_compat
from preact_kernels.modules.hooks import has_hooks
from preact_kernels.torch_compat import TorchDispatchMode

_lock = threading.RLock()

IN_PLACE_OPERATORS: dict[str, Callable] = {
    name: getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
}


class Refusal(Exception):
    """Why a module cannot be traced."""

    count = 0  # number of refusals so far, including those that a forward caught

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        Refusal.count += 1


def trace(root: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> fx.Graph:
    """Traces the forward of `root`; arguments without defaults are tensors.

    Args:
        root: any module; it does not change.
        is_leaf: whether a module becomes one call in the graph; modules of torch.nn always do.

    Raises:
        Refusal: the forward cannot be traced.
    """
    try:
        # While it traces, `fx` replaces methods of all modules.
        with _lock, _unchanged(root), _only_proxies():
            before = Refusal.count
            graph = _Tracer(is_leaf).trace(root)
            _check_none_was_caught(before)
    except Exception as error:
        raise Refusal(_reason(error)) from error
    return graph


def original_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that `module` had before FSDP2's `fully_shard`."""
    kind = type(module)
    wrapper = torch_compat.fsdp_module_class()
    if wrapper is None or not issubclass(kind, wrapper):
        return kind
    return kind.__mro__[kind.__mro__.index(wrapper) + 1]


# Modules and functions that return a tensor when called with one or two tensors.
_TENSOR_MODULES = (
    *(nn.Conv2d, nn.ReLU, nn.Linear, nn.Identity, nn.Flatten, nn.Upsample, nn.Sigmoid, nn.SiLU),
    *(nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd),
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ReLU6),
)
_TENSOR_FUNCTIONS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *IN_PLACE_OPERATORS.values(),
    *(torch.relu, torch.cat, torch.add, torch.mul, torch.sigmoid, torch.flatten),
    *(F.relu, F.conv2d, F.batch_norm, F.avg_pool2d, F.interpolate, F.pad, F.dropout),
)


class _TensorProxy(fx.Proxy):
    """A proxy with the attributes of a tensor; `isinstance` accepts it where it must be one."""

    @property  # type: ignore[misc]
    def __class__(self):
        asking = sys._getframe(1).f_code
        if _is_of_torch(asking) and asking not in _ASKING:
            return type(self)
        if not cast(_Tracer, self.tracer).is_tensor(self.node):
            raise Refusal("it asks for the type of a value")
        return Tensor

    def __repr__(self):
        if not _is_of_torch(sys._getframe(1).f_code):
            raise Refusal("it asks for the text of a value")
        return super().__repr__()

    def __getattr__(self, k):
        if not hasattr(Tensor, k):
            raise AttributeError(f"'Tensor' object has no attribute {k!r}")
        return super().__getattr__(k)


def _in_place_operator(target: Callable) -> Callable:
    def call(self: fx.Proxy, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return call


# `fx.Proxy` has no in-place operators: it would trace `h += x` as `h = h + x`.
for _name, _target in IN_PLACE_OPERATORS.items():
    setattr(_TensorProxy, f"__{_name}__", _in_place_operator(_target))


class _Tracer(fx.Tracer):
    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf
        self._thread = threading.get_ident()

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether the value of a node is known to be a tensor."""
        if node.op == "call_module":
            return isinstance(self.root.get_submodule(str(node.target)), _TENSOR_MODULES)
        return node.op == "call_function" and node.target in _TENSOR_FUNCTIONS

    def getattr(self, attr, attr_val, parameter_proxy_cache):
        if threading.get_ident() != self._thread:  # `fx` replaces a method of all modules
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        forward = original_class(self.root).forward
        arguments: list[Any] = [self.root]
        for name, parameter in list(inspect.signature(forward).parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.default is inspect.Parameter.empty:
                arguments.append(self.create_proxy("placeholder", name, (), {}))
        return _watched(forward), arguments

    def proxy(self, node):
        return _TensorProxy(node, self)

    def to_bool(self, obj):
        raise Refusal("it has control flow on values")

    def iter(self, obj):
        raise Refusal("it iterates over a value of unknown length")

    def create_arg(self, a):
        if type(a) is _TensorProxy:
            return a.node
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
        return kind.__module__.startswith("torch.nn") and kind is not nn.Sequential

    def call_module(self, m, forward, args, kwargs):
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
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
            sys.setprofile(_watch)  # Python removes it when it raises
            self.module_stack = module_stack
            if any(isinstance(a, list | dict) for a in (*args, *kwargs.values())):
                raise  # the child may have changed these arguments
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            Refusal.count = refusals  # forget refusals in the child
            return self.create_proxy("call_module", path, args, kwargs)
        return y


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Refuses a forward that sets attributes of its module; restores the attributes."""
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
    """Refuses a forward that caught a `Refusal`; `count`: refusals before it."""
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


def _random_states() -> tuple:
    """Returns the states of Python's and NumPy's random number generators."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, *rest = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), rest


# Calls that a graph would lose or freeze, and the reasons. Calls of C functions are seen only in
# the forward itself.
_CUSTOM_FUNCTION = "it calls a custom autograd function"
_REFUSED: dict[object, str] = {
    getattr(torch.autograd.Function.apply, "__code__", None): _CUSTOM_FUNCTION,
    torch.autograd.graph.saved_tensors_hooks.__enter__.__code__: (
        "it runs under checkpointing or other hooks of saved tensors"
    ),
    torch.set_grad_enabled.__init__.__code__: "a part of it runs under set_grad_enabled",
    **{
        context.__enter__.__code__: f"a part of it runs under {context.__name__}"
        for context in (torch.autocast, torch.enable_grad, torch.inference_mode, torch.no_grad)
    },
    **{
        inspect.unwrap(function).__code__: f"it calls torch.{function.__name__}"
        for function in (
            *(torch.manual_seed, torch.seed, torch.set_rng_state),
            torch.random.fork_rng,
        )
    },
    **{
        function: f"it calls torch.{function.__name__}"
        for function in (
            torch.is_autocast_enabled,
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
        )
    },
}

# Functions of torch that check types for a forward.
_ASKING = (torch.is_tensor.__code__, torch._jit_internal._isinstance.__code__)
# Functions that a proxy cannot answer.
_QUESTIONS = frozenset(("type", "callable", "issubclass", "dir", "vars"))
# Folders of torch and of this package: their functions support proxies.
_TORCH = tuple(
    os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch_compat.__file__, torch.__file__)
)
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _is_of_torch(code: types.CodeType) -> bool:
    return code.co_filename.startswith(_TORCH)


def _is_of_python(code: types.CodeType) -> bool:
    """Whether a function belongs to the standard library."""
    name = code.co_filename
    return name.startswith((_PYTHON, "<frozen")) and "-packages" + os.sep not in name


def _watch(frame: types.FrameType, event: str, arg: object) -> None:
    """Profile function: refuses calls that a graph cannot represent."""
    code = frame.f_code
    if event == "call":
        if code in _REFUSED:
            raise Refusal(_REFUSED[code])
        is_library = _is_of_torch(code) or _is_of_python(code)
        if not is_library and not _QUESTIONS.isdisjoint(code.co_names):
            raise Refusal("it may ask for the type of a value")
    elif event == "c_call":
        if torch_compat.is_function_apply(arg):
            raise Refusal(_CUSTOM_FUNCTION)
        if not _is_of_torch(code):
            with contextlib.suppress(TypeError):  # not hashable
                if arg in _REFUSED:
                    raise Refusal(_REFUSED[arg])


def _watched(forward: Callable) -> Callable:
    """Returns `forward` with `_watch` as its profile function."""

    @functools.wraps(forward)
    def call(*args: Any) -> Any:
        profile = sys.getprofile()
        sys.setprofile(_watch)
        try:
            return forward(*args)
        finally:
            sys.setprofile(profile)

    return call


@contextlib.contextmanager
def _only_proxies() -> Iterator[None]:
    """In the context, operations on tensors and random numbers raise `Refusal`."""
    states = _random_states()
    with _NoTensors():
        yield
    if _random_states() != states:
        raise Refusal("it draws random numbers in Python")
