"""Deferred tensors: results that are not computed yet, and the recipes that compute them."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels.torch_compat import disable_torch_function


class Operation(NamedTuple):
    """What a node computes, in PyTorch's own operators."""

    name: str
    run: Callable[..., Tensor]  # of the node's settings, then its inputs
    is_sum: bool = False


class Node:
    """One operation that is not computed yet.

    Attributes:
        region: that recorded it.
        context: in which it was recorded.
        operation: what it computes.
        settings: arguments of the operation other than its inputs.
        inputs: nodes, and tensors that are computed.
        shape: of the result, `[N, C, H, W]`.
        dtype: of the result.
        channels_last: the memory format of the result in plain PyTorch.
        needs_grad: whether the result requires a gradient.
        version: the number of in-place changes of the inputs that are tensors, when they were read.
        user: the first node that reads the result.
        other_users: the other ones.
        chain: whose autograd function returned the tensor that stands for the result, while it is
            pending.
        reference: to the deferred tensor that stands for the result, while one does.
        memory: the memory mode of a stage that begins with this batch norm.
        is_done: whether it was computed, on its own or as part of a fused operation.
        value: the result, once it is computed and while it is needed.
        is_changed: whether `value` was changed in place while the tensor was still deferred, with
            a change of its place in the autograd graph.
        returned_by: the autograd function that returned the tensor, in place of this package's, as
            soon as `value` is known as its result.
    """

    chain: Any = None
    is_changed = False
    is_done = False
    memory = "store"
    other_users: "tuple[Node, ...]" = ()
    reference: "weakref.ref[Deferred] | None" = None
    returned_by: Any = None
    user: "Node | None" = None
    value: Tensor | None = None

    def __init__(
        self,
        region: Any,
        operation: Operation,
        settings: Any,
        inputs: "Sequence[Node | Tensor]",
        shape: tuple[int, ...],
        dtype: torch.dtype,
        channels_last: bool,
        needs_grad: bool,
    ) -> None:
        self.region, self.context = region, region.context
        self.operation, self.settings, self.inputs = operation, settings, inputs
        self.shape, self.dtype, self.channels_last = shape, dtype, channels_last
        self.needs_grad = needs_grad
        for i in inputs:
            if type(i) is Node:
                # Few objects a node: the garbage collector visits them all.
                if i.user is None:
                    i.user = self
                else:
                    i.other_users = (*i.other_users, self)
        self.version = version(inputs)

    @property
    def users(self) -> "tuple[Node, ...]":
        """The nodes that read the result."""
        return () if self.user is None else (self.user, *self.other_users)

    def release(self) -> None:
        """Drops what only a pending node needs: references in cycles."""
        self.user, self.other_users = None, ()
        if self.chain is not None:
            self.chain.spares.clear()
            self.chain = None

    @property
    def is_held(self) -> bool:
        """Whether the program still holds a tensor that stands for the result."""
        return self.reference is not None and self.reference() is not None

    def check_inputs(self) -> None:
        """Raises if an input was changed in place where that could not be seen."""
        if version(self.inputs) != self.version:
            raise RuntimeError(
                f"the input of a deferred {self.operation.name} was modified by an inplace "
                "operation outside of PyTorch's Python API; run it outside of the converted "
                "model, or call pk.revert"
            )


def version(inputs: Sequence[Node | Tensor]) -> int:
    """The number of in-place changes of the inputs that are tensors so far."""
    count = 0
    for i in inputs:
        if type(i) is not Node:
            try:
                count += i._version  # type: ignore[union-attr]
            except RuntimeError:  # inference tensors have none
                continue
    return count


class Deferred(Tensor):
    """A tensor without storage that stands for the result of a node.

    Reading anything but its metadata computes it.
    """

    preact_node: Node

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Where no region is active: computes the arguments, then calls `func`."""
        return call_computed(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """For code in C++: computes the arguments, then calls `func`."""
        with disable_torch_function():
            args, kwargs = computed_arguments((args, kwargs or {}), f"{func} (in C++)")
            return func(*args, **kwargs)


# Code that looks at the class sees that of a plain tensor, except for `type(t) is torch.Tensor`.
Deferred.__name__, Deferred.__qualname__, Deferred.__module__ = "Tensor", "Tensor", "torch"


CHANGED = (
    "a deferred tensor that an autograd function or a weak reference holds was modified by an "
    "inplace operation; run it outside of the converted model, or call pk.revert"
)


class _WithHistory(torch.autograd.Function):
    """`value`, with the place of the tensor `t` in the autograd graph."""

    @staticmethod
    def forward(ctx, t, value):
        return value.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def has_own_history(t: Deferred) -> bool:
    """Whether no autograd function returned `t`, which then has the gradient of that function."""
    node = t.preact_node
    if node.region.is_traced:
        return True
    if node.needs_grad:
        return node in (getattr(t.grad_fn, "nodes", None) or ())
    return not t.requires_grad


def call_computed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls `func` with every deferred argument computed."""
    given = args
    args, kwargs = computed_arguments((args, kwargs), func)
    return returned_argument(func(*args, **kwargs), given)


def returned_argument(result: Any, given: tuple) -> Any:
    """`result`, or the deferred tensor whose value it is: in place, PyTorch returns its input."""
    for t in given:
        if type(t) is Deferred and t.preact_node.value is result:
            t.preact_node.is_changed = t.preact_node.is_changed or torch.is_grad_enabled()
            return t
    return result


def computed_arguments(value: Any, reader: object) -> Any:
    """`value` with every deferred tensor in its lists, tuples and dictionaries computed.

    The tensors themselves become plain tensors where that is possible; else copies of their
    containers hold the results.
    """
    kind = type(value)
    if kind is Deferred:
        return compute(value, reader)
    if kind in (tuple, list):
        items = [computed_arguments(v, reader) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return kind(items)
    if kind is dict:
        computed = {k: computed_arguments(v, reader) for k, v in value.items()}
        return value if all(computed[k] is v for k, v in value.items()) else computed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind._make(computed_arguments(v, reader) for v in value)
    return value


def compute(t: Deferred, reader: object) -> Tensor:
    """The result that `t` stands for; `t` itself if it could become a plain tensor."""
    node = t.__dict__.get("preact_node")
    if node is None:  # another thread was faster
        return t
    with node.region.lock:
        if type(t) is Deferred:
            if node.value is None:
                node.region.compute([node], reader)
            if type(t) is Deferred:
                become_plain(t)
        return cast(Tensor, node.value) if type(t) is Deferred else t


def become_plain(t: Deferred) -> None:
    """Makes `t` a plain tensor, once it is computed.

    It stays deferred while code in C++ holds it, or where the program has weak references to it.
    """
    node = t.preact_node
    if node.region.is_traced:
        return
    value = cast(Tensor, node.value)
    node.reference = None
    node.region.forget(t)
    with disable_torch_function():
        if not has_own_history(t) and t.grad_fn is not node.returned_by:
            if node.is_changed:
                raise RuntimeError(CHANGED)
            node.returned_by = t.grad_fn
            with torch.enable_grad():
                value = _WithHistory.apply(t, value.detach())
        with contextlib.suppress(RuntimeError):
            torch.utils.swap_tensors(t, value)
            t.__dict__.update(value.__dict__)  # what the program set
            del t.preact_node
            value = t
    node.value = value
    if type(t) is Deferred:
        node.region.keep(t)
