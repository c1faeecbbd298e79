"""Deferred tensors: results that are not computed yet, and the nodes that compute them."""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from preact_kernels import torch_compat
from preact_kernels.activations import Activation, activate
from preact_kernels.conversion.containers import mapped, tensors
from preact_kernels.conversion.context import Context
from preact_kernels.conversion.functions import is_write
from preact_kernels.conversion.liveness import Reference
from preact_kernels.conversion.owners import Owner, Owners
from preact_kernels.conversion.recomputation import Recomputation
from preact_kernels.conversion.report import Outcome
from preact_kernels.kernels import layout
from preact_kernels.ops.block_arguments import BlockArguments
from preact_kernels.ops.plain import gradients
from preact_kernels.torch_compat import disable_torch_function


class Operation(NamedTuple):
    """The function of a node, in PyTorch's operators."""

    name: str
    run: Callable[..., Tensor]  # arguments: the node's settings, then its inputs
    is_activation: bool = False
    is_sum: bool = False
    precedes_activation: bool = False  # an activation usually follows


# Runs consecutive blocks. Arguments: the blocks, their input, the module of the first batch norm
# (if known), and the dtype of the convolutions.
StageRunner = Callable[[Sequence[BlockArguments], Tensor, nn.Module | None, torch.dtype], Tensor]


class Recording(Protocol):
    """What nodes, rules and executions ask of a `region.Region`, which imports them."""

    context: Context  # modes of the last recorded operation
    copies: dict[int, Tensor]
    evaluated: set[int]
    lock: threading.RLock
    memory: str
    pending: "list[Node]"
    is_traced: bool
    outcomes: list[tuple[nn.Module | None, Outcome]]
    owners: Owners
    recomputation: Recomputation
    recomputed: "dict[int, dict[Node, Tensor]]"
    refusal: str
    run_stage: StageRunner | None
    tensor_types: frozenset[type]
    updated: set[int]

    def is_recording(self) -> bool: ...
    def is_in_function(self) -> bool: ...
    def saving(self) -> AbstractContextManager: ...
    def saves_values(self) -> bool: ...
    def caller(self) -> types.FrameType | None: ...
    def context_for(self, device: torch.device) -> Context | None: ...
    def is_in_context(self) -> bool: ...
    def replayed_norm(self, norm: "Node", updated: Set[int], evaluated: Set[int]) -> None: ...
    def normalises(self, t: Tensor) -> bool: ...
    def note(self, owner: Owner | None, reason: str) -> None: ...
    def before_statistics(self, statistics: Sequence[Tensor], is_updated: bool) -> None: ...
    def named_activation(self, called: type) -> Activation | None: ...
    def compute(self, targets: "Sequence[Node]", reader: object) -> None: ...
    def compute_again(self, node: "Node") -> None: ...
    def flush(self, reader: object) -> None: ...
    def keep(self, t: "Deferred") -> None: ...

    def record(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        settings: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        channels_last: bool,
        in_place: bool = False,
    ) -> Any: ...


class Node:
    """A deferred operation.

    Attributes:
        region: the region that recorded the node.
        context: the modes when it was recorded.
        operation: the function to compute.
        settings: arguments of the operation other than its inputs.
        inputs: nodes, and computed tensors.
        shape: shape of the result, `[N, C, ...]` of 3 to 5 dimensions.
        dtype: dtype of the result.
        channels_last: memory format of the result in plain PyTorch.
        needs_grad: whether the result requires a gradient.
        state: `_state` of the inputs when the node was recorded.
        user: the first node that reads the result.
        other_users: other nodes that read the result.
        spare: a deferred tensor for an activation of the result.
        spare_activation: the activation that uses `spare`.
        placed_by: the node whose call of `_DeferredFunction` returned the result's deferred tensor;
            None: this node.
        reference: a reference to the result's deferred tensor, while it exists.
        memory: the memory mode.
        index: number of the node in its region, if a `replay.Replay` counts them.
        is_view: whether the result is an autograd view in plain PyTorch.
        is_done: whether the node was computed, alone or in a fused operation.
        value: the result, while it is needed.
        meta_result: for a subclass of Tensor, the result on the meta device, with the class and
            attributes of plain PyTorch; None: a plain tensor.
        instance: `value` as an instance of that subclass, if the deferred tensor cannot become it.
        is_changed: whether `value` was changed in place with gradients enabled, while the tensor
            was deferred.
        returned_by: another autograd function that returned the deferred tensor, once `value` is
            recorded as its result.
    """

    is_changed = False
    instance: Tensor | None = None
    index = -1
    is_done = False
    is_view = False
    memory = "store"
    meta_result: Tensor | None = None
    other_users: "tuple[Node, ...]" = ()
    placed_by: "Node | None" = None
    reference: "Reference | None" = None
    returned_by: Any = None
    spare: "Deferred | None" = None
    spare_activation: Activation | None = None
    user: "Node | None" = None
    value: Tensor | None = None

    def __init__(
        self,
        region: Recording,
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
        self._add_to_inputs()
        self.state = _state(inputs)

    @classmethod
    def replayed(
        cls,
        region: Recording,
        context: Context,
        fields: dict[str, Any],
        tensors: Sequence[Tensor],
    ) -> "Node":
        """A node like one of an earlier forward, with the same attributes `fields`."""
        node = cls.__new__(cls)
        inputs: list[Any] = []
        state: tuple[int, ...] = ()
        for t in tensors:
            if type(t) is Deferred:
                i = t.preact_node
                if i.user is None:
                    i.user = node
                else:
                    i.other_users = (*i.other_users, node)
                inputs.append(i)
            else:
                inputs.append(t)
                state += (t._cdata, _place(t) if t.is_inference() else t._version)
        own = fields.copy()
        own["region"], own["context"], own["inputs"], own["state"] = region, context, inputs, state
        node.__dict__ = own
        return node

    def _add_to_inputs(self) -> None:
        for i in self.inputs:
            if type(i) is Node:
                # A single user needs no tuple, which the garbage collector would visit.
                if i.user is None:
                    i.user = self
                else:
                    i.other_users = (*i.other_users, self)

    @property
    def users(self) -> "tuple[Node, ...]":
        return () if self.user is None else (self.user, *self.other_users)

    @property
    def result(self) -> Tensor:
        """The computed result for the program."""
        return cast(Tensor, self.value if self.instance is None else self.instance)

    def release(self) -> None:
        """Drops references that only a pending node needs, since they form cycles."""
        self.user, self.other_users, self.spare = None, (), None

    @property
    def is_held(self) -> bool:
        """Whether the program holds the result's deferred tensor."""
        return self.reference is not None and self.reference() is not None

    def check_inputs(self) -> None:
        """Raises if an input was changed in place or swapped without the region noticing."""
        if self.state and _state(self.inputs) != self.state:
            raise RuntimeError(
                f"the input of a deferred {self.operation.name} was modified by an inplace "
                "operation outside of PyTorch's Python API; run it outside of the converted "
                "model, or call pk.revert"
            )


def _state(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Returns the address and the version of each computed input."""
    state: tuple[int, ...] = ()  # which the garbage collector does not visit, unlike a list
    for i in inputs:
        if type(i) is not Node:
            state += (i._cdata, _place(i) if i.is_inference() else i._version)
    return state


def _place(t: Tensor) -> int:
    """Returns the address of an inference tensor's memory, as it has no version."""
    return t.data_ptr() if type(t) is Tensor else -1


class Deferred(Tensor):
    """A tensor without storage for the result of a node. Reading its values computes it."""

    preact_node: Node

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Computes the arguments, then calls `func`; used where no region is active."""
        given = args, kwargs or {}
        if not has_deferred(given):  # the deferred tensor is in an object of another class
            with disable_torch_function():  # `__torch_dispatch__` computes it
                return func(*args, **given[1])
        return called(func, given, *computed_arguments(given, func))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """Computes the arguments, then calls `func`; used by code in C++."""
        with disable_torch_function():
            args, kwargs = computed_arguments((args, kwargs or {}), f"{func} (in C++)")
            return func(*args, **kwargs)


# The class looks like torch.Tensor, except for `type(t) is torch.Tensor`.
Deferred.__name__, Deferred.__qualname__, Deferred.__module__ = "Tensor", "Tensor", "torch"


_CHANGED = (
    "a deferred tensor that an autograd function holds was modified by an inplace operation; run "
    "it outside of the converted model, or call pk.revert"
)


class _DeferredFunction(torch.autograd.Function):
    """Gives deferred tensors their place in the autograd graph.

    Returns a deferred tensor for the result of `node`, and for a norm another one for an activation
    that may follow, since one call is cheaper than two.

    Backward runs only if a deferred tensor was passed to code outside of regions, such as a custom
    autograd function. It computes the node again, in plain operators. Computed results have their
    own graph.
    """

    @staticmethod
    def forward(ctx, node, in_place, *tensors):
        ctx.node = node
        # Equals `set_materialize_grads` and `mark_dirty`, without the overhead of calls.
        ctx.materialize_grads = False
        if in_place:
            ctx.dirty_tensors = tensors[:1]
            return tensors[0]
        has_spare = node.operation.precedes_activation
        return (_empty(node), _empty(node)) if has_spare else _empty(node)

    @staticmethod
    def backward(ctx, dy, dy_of_activation=None):
        node = ctx.node
        if node is None:
            raise RuntimeError("Trying to backward through the graph a second time")
        if node.is_changed:
            raise RuntimeError(_CHANGED)
        needed = ctx.needs_input_grad[2:]
        found: list[Tensor | None] = [None for _ in needed]
        with disable_torch_function():
            if node.operation.is_sum:
                dtypes = [i.dtype for i in node.inputs]
                found = [dy.to(d) if n else None for d, n in zip(dtypes, needed, strict=True)]
            else:
                node.check_inputs()
                inputs = _input_values_in_backward(node)
                parts = (dy, None), (dy_of_activation, node.spare_activation)
                for gradient, activation in parts:
                    if gradient is not None:
                        forward = functools.partial(_run, node, activation)
                        more = gradients(forward, inputs, needed, gradient)
                        found = list(map(_sum, found, more))
        if not torch_compat.keeps_graph():
            ctx.node = None
        return None, None, *found


# Skips checks for transforms in `Function.apply`, as regions do not record under transforms.
_apply_deferred = super(torch.autograd.Function, _DeferredFunction).apply


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _run(node: Node, activation: Activation | None, *inputs: Tensor) -> Tensor:
    for t in inputs:
        if t.numel() and not t.untyped_storage().nbytes():
            raise RuntimeError(
                f"the input of a deferred {node.operation.name}, a tensor of shape "
                f"{list(t.shape)}, was freed before it was computed again for a custom autograd "
                "function; call pk.revert on the module that calls the function"
            )
    with node.context.entered_in_backward():
        y = node.operation.run(node.settings, *inputs)
        return y if activation is None else activate(y, activation)


def recomputed(node: Node) -> Tensor:
    """Computes the result of a node again, in plain operators."""
    return _run(node, None, *_input_values(node, {}))


def _input_values_in_backward(node: Node) -> list[Tensor]:
    """`_input_values`, but computes each value once per backward."""
    found, backward = node.region.recomputed, torch_compat.backward_id()
    if backward not in found:
        found.clear()  # an earlier backward may have failed
        if all(_value(i, {}) is not None for i in node.inputs):
            return _input_values(node, {})
        torch_compat.call_after_backward(lambda: found.pop(backward, None))
    return _input_values(node, found.setdefault(backward, {}))


def _input_values(node: Node, values: dict[Node, Tensor]) -> list[Tensor]:
    """Computes a node's inputs in plain operators; adds intermediate results to `values`."""
    waiting = [i for i in node.inputs if isinstance(i, Node)]
    while waiting:
        last = waiting[-1]
        missing = [i for i in last.inputs if _value(i, values) is None]
        if _value(last, values) is not None:
            waiting.pop()
        elif missing:
            waiting += cast(list[Node], missing)
        else:
            last.check_inputs()
            inputs = [_value(i, values) for i in last.inputs]
            values[last] = _run(last, None, *cast(list[Tensor], inputs))
    return [cast(Tensor, _value(i, values)) for i in node.inputs]


def _value(i: "Node | Tensor", values: dict[Node, Tensor]) -> Tensor | None:
    if not isinstance(i, Node):
        return i
    return values.get(i) if i.value is None else i.value


class _WithHistory(torch.autograd.Function):
    """Returns `value` with the place of `t` in the autograd graph."""

    @staticmethod
    def forward(ctx, t, value):
        return value.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def has_own_history(t: Deferred) -> bool:
    """Whether the gradient of `t` is its node's, not another autograd function's."""
    node = t.preact_node
    if node.region.is_traced:
        return True
    if node.needs_grad:
        return getattr(t.grad_fn, "node", None) is (node.placed_by or node)
    return not t.requires_grad


def _empty(node: Node) -> Deferred:
    strides: tuple[int, ...]
    if len(node.shape) == 4:
        _, c, h, w = node.shape
        strides = (c * h * w, 1, w * c, c) if node.channels_last else (c * h * w, h * w, w, 1)
    else:
        strides = layout.strides(node.shape, node.channels_last)
    return torch_compat.make_wrapper_subclass(
        Deferred, node.shape, strides, dtype=node.dtype, device=node.context.device
    )


def deferred_result(node: Node, tensors: Sequence[Tensor], in_place: bool = False) -> Deferred:
    """Returns a deferred tensor for the result of `node`.

    Args:
        node: a new node.
        tensors: the inputs, as the program passed them.
        in_place: the first of `tensors`, a deferred tensor, becomes the result.
    """
    source: Any = node.inputs[0]
    result: Any = tensors[0] if in_place else None
    if in_place:
        source.reference = None
        node.is_view = source.is_view
    else:
        node.is_view = getattr(node.settings, "is_view", False)
    if node.needs_grad and not node.region.is_traced:
        has_spare = type(source) is Node and node.operation.is_activation
        spare = source.spare if has_spare else None
        if spare is None:
            result = _apply_deferred(node, in_place, *tensors)
            if node.operation.precedes_activation:
                result, node.spare = result
        else:
            source.spare, node.placed_by = None, source
            source.spare_activation = node.settings
            if in_place:
                torch_compat.swap_tensor_impl(result, spare)
                # C++ code that holds the norm's result now refers to `spare`.
                spare.preact_node = source
                source.reference = Reference(spare)
            else:
                result = spare
    elif not in_place:
        result = _empty(node)
    result.preact_node = node
    node.reference = Reference(result)
    return result


def called(func: Callable, given: tuple, args: tuple, kwargs: dict) -> Any:
    """Calls `func` with computed arguments.

    If the result contains computed values of deferred arguments, as of in-place functions, it
    gets the arguments themselves.

    Args:
        func: the function.
        given: the original arguments and keyword arguments.
        args: the computed arguments.
        kwargs: the computed keyword arguments.
    """
    left = []
    if args is not given[0] or kwargs is not given[1]:
        left = [t for t in tensors(given) if isinstance(t, Deferred)]
    if not left:
        return func(*args, **kwargs)
    own = {id(t.preact_node.result): t for t in reversed(left)}
    before = [_state([t.preact_node.result]) for t in left]
    result = func(*args, **kwargs)
    if torch.is_grad_enabled() and is_write(func, args, kwargs):
        returned = {id(t) for t in tensors([result])}
        for t, state in zip(left, before, strict=True):
            value = t.preact_node.result
            if id(value) in returned or _state([value]) != state:
                t.preact_node.is_changed = True
    return mapped(lambda t: own.get(id(t), t), result)


def has_deferred(values: Iterable[Any]) -> bool:
    """Whether values are deferred tensors, or lists, tuples or dictionaries that contain some."""
    return any(isinstance(t, Deferred) for t in tensors(values))


def computed_arguments(value: Any, reader: object) -> Any:
    """Computes all deferred tensors in `value`, in lists, tuples and dictionaries.

    The tensors become plain tensors where possible; otherwise the returned containers are copies
    with the results.
    """
    return mapped(lambda t: compute(t, reader) if isinstance(t, Deferred) else t, value)


def compute(t: Deferred, reader: object) -> Tensor:
    """Computes a deferred tensor; returns `t` if it becomes a plain tensor, else the result."""
    node = object.__getattribute__(t, "__dict__").get("preact_node")
    if node is None:  # another thread computed it
        return t
    with node.region.lock:
        if isinstance(t, Deferred):
            if node.value is None:
                node.region.compute([node], reader)
            if node.value is None:
                node.region.compute_again(node)
            if isinstance(t, Deferred):
                retry_plain(t)
        return node.result if isinstance(t, Deferred) else t


def retry_plain(t: Deferred) -> None:
    """Makes `t` a plain tensor if only its node holds its value."""
    if sys.getrefcount(t.preact_node.result) <= 2:
        become_plain(t)


def become_plain(t: Deferred) -> None:
    """Makes a computed `t` the plain tensor, or instance of a subclass, of plain PyTorch.

    Does not change `t` if C++ code holds it.
    """
    node = t.preact_node
    if node.region.is_traced:
        return
    node.reference = None
    with disable_torch_function():
        if not has_own_history(t) and t.grad_fn is not node.returned_by:
            if node.is_changed:
                raise RuntimeError(_CHANGED)
            node.returned_by = t.grad_fn
            with torch.enable_grad():
                value = _WithHistory.apply(t, cast(Tensor, node.value).detach())
            if node.instance is not None:
                node.meta_result = node.instance  # the program may have changed its attributes
            node.value, node.instance = value, None
        if node.meta_result is not None and node.instance is None:
            node.instance = _instance_of(cast(Tensor, node.value), node.meta_result)
            # Later operations read the program's tensor.
            node.value = node.instance.as_subclass(Tensor)
        result = node.result
        if torch_compat.exchange(t, result):
            # Keep attributes that the program set.
            t.__dict__.update(object.__getattribute__(result, "__dict__"))
            del t.preact_node
            result = t
    if node.meta_result is None:
        node.value = result
    if isinstance(t, Deferred):
        node.region.keep(t)
    else:
        node.instance = None


def _instance_of(value: Tensor, like: Tensor) -> Tensor:
    result = value.as_subclass(type(like))
    result.__dict__.update(like.__dict__)
    return result
