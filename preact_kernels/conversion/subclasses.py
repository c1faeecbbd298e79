"""Support for subclasses of Tensor, such as MONAI's MetaTensor.

Operations are deferred on the plain tensors inside. The `__torch_function__` of the class runs on
tensors of the meta device, which gives each result the class and attributes of plain PyTorch.
"""

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from preact_kernels import torch_compat
from preact_kernels.conversion.containers import CONTAINERS, items, mapped, tensors
from preact_kernels.conversion.deferred import Deferred, Node, compute
from preact_kernels.conversion.functions import METADATA_FUNCTIONS
from preact_kernels.torch_compat import get_overloaded_args


class Call(NamedTuple):
    """A call of the program, with instances of subclasses."""

    function: Callable
    args: tuple
    kwargs: dict


class NotServed(Exception):
    """Results of a class cannot be deferred; the message names the class and a workaround."""


@functools.lru_cache(maxsize=256)
def refusal(kind: Any) -> str:
    """Returns why operations on instances of a class are not deferred, or an empty string."""
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {kind.__name__}, whose operations are its own: pass a torch.Tensor"
    try:
        torch.empty(0, device="meta").as_subclass(kind).__class__ = Deferred
    except TypeError:
        return f"a {kind.__name__}, whose instances have slots: {_ADVICE}"
    return ""


_ADVICE = "pass x.as_subclass(torch.Tensor)"


class PlainTensors:
    """The plain tensors inside instances of subclasses, shared by all pending uses."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}

    def of(self, t: Tensor) -> Tensor:
        """Returns a plain tensor that shares memory and gradient with `t`."""
        references = self._found.get(id(t))
        if references is not None:
            instance, plain = (reference() for reference in references)
            if instance is t and plain is not None and _is_alias(plain, t):
                return plain
        plain = t.as_subclass(Tensor)
        self._found[id(t)] = weakref.ref(t), weakref.ref(plain)
        return plain

    def in_arguments(self, value: Any, types: frozenset[type]) -> Any:
        """Replaces instances of served subclasses in arguments by plain tensors.

        Args:
            value: arguments, in tuples, lists and dictionaries.
            types: classes that are not replaced.
        """

        def plain(t: Tensor) -> Tensor:
            kind: Any = type(t)
            if kind in types or isinstance(t, Deferred) or refusal(kind):
                return t
            # Parameters stay: `Owners` finds their modules by identity.
            return t if getattr(t, "_is_param", False) else self.of(t)

        return mapped(plain, value)


def _is_alias(plain: Tensor, t: Tensor) -> bool:
    """Whether `plain` still has the memory of `t`, and its gradient if gradients are enabled."""
    return (
        torch_compat.storage_id(plain) == torch_compat.storage_id(t)
        and plain.shape == t.shape
        and plain.stride() == t.stride()
        and plain.storage_offset() == t.storage_offset()
        and (plain.requires_grad == t.requires_grad or not torch.is_grad_enabled())
    )


def result_on_meta(call: Call, result: Tensor, in_place: bool) -> Tensor:
    """Calls the `__torch_function__` of the classes in a call, on the meta device.

    Args:
        call: a call that can be deferred.
        result: a tensor on the meta device with the shape and the dtype of the result.
        in_place: whether the call returns its first tensor.

    Returns:
        The result on the meta device, with the class and attributes of plain PyTorch.

    Raises:
        NotServed: the class does more than call the function and return its result.
    """
    args, kwargs = mapped(_on_meta, (call.args, call.kwargs))
    in_order = tensors((args, kwargs))[::-1]
    given = Call(call.function, args, kwargs)
    function = _Function(given, in_order[0] if in_place else result)
    found: Any = NotImplemented
    with torch_compat.enable_torch_function():
        kinds: Any = tuple(type(t) for t in get_overloaded_args(in_order) if type(t) is not Tensor)
        if not kinds:  # no class overrides `__torch_function__`
            return result
        if any(call.function in _refused.get(kind, ()) for kind in kinds):
            raise _not_served(kinds, call.function)
        counts = [*map(sys.getrefcount, in_order)]
        try:
            with function:
                for kind in kinds:
                    if found is NotImplemented:
                        found = kind.__torch_function__(call.function, kinds, args, kwargs)
        except Exception:  # the call itself will raise
            found = None
    is_passed_on = isinstance(found, Tensor) and _has_memory_of(found, function.result)
    if is_passed_on and not in_place:  # the class must not keep references to its tensors
        is_passed_on = counts == [*map(sys.getrefcount, in_order)] and sys.getrefcount(found) <= 2
    if function.is_refused or not is_passed_on or _has_meta_tensors(found):
        if function.is_refused or found is not None:
            for kind in kinds:
                _refused.setdefault(kind, set()).add(call.function)
        raise _not_served(kinds, call.function)
    return found


# By class, functions for which it raised `NotServed`: not called again, for its side effects.
_refused: weakref.WeakKeyDictionary[type, set[Callable]] = weakref.WeakKeyDictionary()


def _not_served(kinds: Sequence[type], function: Callable) -> NotServed:
    names = ", ".join(kind.__name__ for kind in kinds)
    name = getattr(function, "__name__", function)
    return NotServed(f"a {names}, whose __torch_function__ does more than call {name}: {_ADVICE}")


def _on_meta(t: Tensor) -> Tensor:
    """Returns a tensor on the meta device with the class and attributes of `t`."""
    if isinstance(t, Deferred) and t.preact_node.meta_result is not None:
        return t.preact_node.meta_result
    found = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    if type(t) is not Tensor and not isinstance(t, Deferred | torch.nn.Parameter):
        found = found.as_subclass(type(t))
        found.__dict__.update(t.__dict__)
    return found


def _has_meta_tensors(t: Tensor) -> bool:
    return any(a.is_meta for a in tensors(t.__dict__.values(), in_objects=True))


# Properties that differ on the meta device.
_OF_META = {
    getattr(Tensor, name).__get__
    for name in (
        *("device", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps", "is_xla"),
        "requires_grad",
    )
}
# Functions that a class may call on tensors on the meta device, and on other tensors.
_ALLOWED_ON_META = {*METADATA_FUNCTIONS, Tensor.as_subclass} - _OF_META
_ALLOWED = {*METADATA_FUNCTIONS, Tensor.clone, Tensor.detach, Tensor.__deepcopy__}


class _Function(TorchFunctionMode):
    """Returns `result` for a call, and refuses other calls that compute or draw numbers."""

    def __init__(self, call: Call, result: Tensor) -> None:
        super().__init__()
        self._call, self.result, self.is_refused = call, result, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is self._call.function and _is_same((args, kwargs), self._call[1:]):
            return self.result
        is_on_meta = any(t.is_meta for t in tensors((args, kwargs)))
        if func not in (_ALLOWED_ON_META if is_on_meta else _ALLOWED):
            self.is_refused = True
            raise RuntimeError("a function other than the one that was called")
        return func(*args, **kwargs)


def _is_same(given: Any, expected: Any) -> bool:
    """Whether arguments are equal; tensors must share memory, but may differ in class."""
    if isinstance(given, Tensor) and isinstance(expected, Tensor):
        return _has_memory_of(given, expected)
    if isinstance(given, CONTAINERS) and isinstance(expected, CONTAINERS):
        pairs = zip(items(given), items(expected), strict=False)
        return len(given) == len(expected) and all(starmap(_is_same, pairs))
    return given is expected or bool(given == expected)


def _has_memory_of(a: Tensor, b: Tensor) -> bool:
    same_memory = torch_compat.storage_id(a) == torch_compat.storage_id(b)
    return same_memory and a.shape == b.shape and a.stride() == b.stride()


def become_instance(t: Deferred, node: Node, result: Tensor) -> None:
    """Makes a deferred tensor look like an instance of the class of `result`."""
    if type(result) is not Tensor:
        node.meta_result = result
        t.__class__ = deferred_class(type(result))


@functools.lru_cache(maxsize=256)
def deferred_class(kind: type[Tensor]) -> type[Deferred]:
    """Returns the class of deferred tensors that look like instances of `kind`.

    They are instances of both classes. Accessing members that `kind` adds or overrides computes
    the tensor first.
    """
    inherited = frozenset(n for n in dir(Tensor) if not _overrides(kind, n)) | _OWN_NAMES
    inherited -= {"__class__", "__dict__"}

    def get(self: Any, name: str) -> Any:
        if name in inherited:
            return Tensor.__getattribute__(self, name)
        return kind if name == "__class__" else getattr(compute(self, name), name)

    def set_(self: Any, name: str, value: Any) -> None:
        if name in inherited or name == "__class__":
            Tensor.__setattr__(self, name, value)
        else:
            setattr(compute(self, name), name, value)

    def delete(self: Any, name: str) -> None:
        delattr(compute(self, name), name)

    members = {"__getattribute__": get, "__setattr__": set_, "__delattr__": delete}
    for name in dir(kind):  # Python looks up special methods only in the class
        is_special = name.startswith("__") and name not in inherited | _OF_CLASSES
        if is_special and callable(getattr(kind, name)) and _overrides(kind, name):
            members.setdefault(name, _computing(name))
    own: Any = types.new_class(kind.__name__, (Deferred,), exec_body=lambda n: n.update(members))
    own.__qualname__, own.__module__ = kind.__qualname__, kind.__module__
    return own


_OWN_NAMES = frozenset(("preact_node", "__torch_function__", "__torch_dispatch__"))
# Special methods of a class rather than of its instances.
_OF_CLASSES = frozenset(
    f"__{name}__"
    for name in (
        *("class", "class_getitem", "del", "delattr", "getattr", "getattribute", "init"),
        *("init_subclass", "new", "setattr", "subclasshook"),
    )
)


def _overrides(kind: type, name: str) -> bool:
    missing = object()
    own = inspect.getattr_static(kind, name, missing)
    return own is not inspect.getattr_static(Tensor, name, missing)


def _computing(name: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(compute(self, name), name)(*args, **kwargs)

    return method
