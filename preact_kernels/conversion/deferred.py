"""Deferred tensors: results that are not computed yet, and the recipes that compute them."""

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.ops.bn_relu import gradients
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

    chain: "Chain | None" = None
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
        self.version = _version(inputs)

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
        if _version(self.inputs) != self.version:
            raise RuntimeError(
                f"the input of a deferred {self.operation.name} was modified by an inplace "
                "operation outside of PyTorch's Python API; run it outside of the converted "
                "model, or call pk.revert"
            )


def _version(inputs: Sequence[Node | Tensor]) -> int:
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


_CHANGED = (
    "a deferred tensor that an autograd function or a weak reference holds was modified by an "
    "inplace operation; run it outside of the converted model, or call pk.revert"
)


class Step(NamedTuple):
    """An operation in a chain of the last call; see `Chain`."""

    operation: Operation
    tensors: "tuple[weakref.ref[Tensor], ...]"  # that it read beside the step before: parameters
    shape: tuple[int, ...]  # of the result
    dtype: torch.dtype
    channels_last: bool


class _Spare(NamedTuple):
    """A tensor for the result of an operation that may be recorded."""

    step: Step
    tensors: list[Tensor]  # what `step.tensors` refers to
    version: int  # of `tensors`, when the autograd function was called
    tensor: "Deferred"


_CHAIN_LENGTH = 24  # at most


class Chain:
    """Operations in a row whose results one autograd function returns: one call costs less.

    The function also returns tensors for the operations that followed in the last call. Where
    other ones follow, these tensors are dropped.

    Attributes:
        nodes: the operations so far; each reads the one before.
        spares: tensors for the operations to come, the next one last.
        steps: what followed the first batch norm in the last call, changed where this call differs;
            None where no module is known that keeps them.
        position: in `steps`, of the operation that follows.
    """

    __slots__ = ("nodes", "position", "spares", "steps")

    def __init__(self, node: Node, steps: list[Step] | None, position: int) -> None:
        self.nodes, self.steps, self.position = [node], steps, position
        self.spares: list[_Spare] = []

    def take(self, node: Node) -> "Deferred | None":
        """The tensor for the result of `node`, which reads the last of the nodes; or None."""
        if not self.spares:
            return None
        step, tensors, version, spare = self.spares.pop()
        others = node.inputs[1:]
        if (
            step.operation is node.operation
            and (step.shape, step.dtype) == (node.shape, node.dtype)
            and step.channels_last is node.channels_last
            and len(tensors) == len(others)
            and all(map(operator.is_, tensors, others))
            and version == node.version
        ):
            self.nodes.append(node)
            self.position += 1
            return spare
        self.spares.clear()
        return None

    def learn(self, node: Node) -> bool:
        """Has the next call expect the operation of `node` after the last of the nodes.

        Returns:
            Whether it can.
        """
        if self.steps is None:
            return False
        tensors = node.inputs[1:]
        del self.steps[self.position :]
        if self.position >= _CHAIN_LENGTH or any(type(t) is Node for t in tensors):
            return False
        references = tuple(map(weakref.ref, cast(Sequence[Tensor], tensors)))
        settings = (node.shape, node.dtype, node.channels_last)
        self.steps.append(Step(node.operation, references, *settings))
        return True

    def expected(self) -> list[tuple[Step, list[Tensor]]]:
        """The steps to come as in the last call, and the tensors that they read."""
        found = []
        for step in self.steps[self.position :] if self.steps else ():
            tensors = [reference() for reference in step.tensors]
            if any(t is None for t in tensors):
                break
            found.append((step, cast(list[Tensor], tensors)))
        return found


class _DeferredFunction(torch.autograd.Function):
    """Gives the deferred tensors of a chain their places in the autograd graph.

    Backward runs only if such a tensor was passed to code that PyTorch does not show to Python,
    such as a custom autograd function: it computes the nodes again, in plain operators. What is
    computed from recorded nodes has a graph of its own.
    """

    @staticmethod
    def forward(ctx, chain, steps, in_place, *tensors):
        ctx.nodes = chain.nodes
        ctx.materialize_grads = False
        if in_place:
            ctx.dirty_tensors = tensors[:1]
            return tensors[0]
        node = chain.nodes[0]
        first = _empty(node, node.shape, node.dtype, node.channels_last)
        return (first, *(_empty(node, *s[2:]) for s in steps)) if steps else first

    @staticmethod
    def backward(ctx, *gradients_of_results):
        nodes = ctx.nodes
        if nodes is None:
            raise RuntimeError("Trying to backward through the graph a second time")
        needed = ctx.needs_input_grad[3:]
        found: list[Tensor | None] = [None for _ in needed]
        with disable_torch_function():
            for end, dy in enumerate(gradients_of_results, 1):
                if dy is not None:
                    more = _chain_gradients(nodes[:end], needed, dy)
                    found[: len(more)] = map(_sum, found, more)
        if not torch_compat.keeps_graph():
            ctx.nodes = None
        return None, None, None, *found


def _chain_gradients(nodes: Sequence[Node], needed: Sequence[bool], dy: Tensor) -> list:
    """Gradients of the last of `nodes` for what they read, from that of its result."""
    first = nodes[0]
    if any(n.is_changed for n in nodes):
        raise RuntimeError(_CHANGED)
    if len(nodes) == 1 and first.operation.is_sum:
        dtypes = [i.dtype for i in first.inputs]
        return [dy.to(d) if n else None for d, n in zip(dtypes, needed, strict=True)]
    for node in nodes:
        node.check_inputs()
    inputs = _input_values(first)
    for node in nodes[1:]:
        inputs += cast(Sequence[Tensor], node.inputs[1:])
    return gradients(functools.partial(_run_chain, nodes), inputs, needed[: len(inputs)], dy)


def _run_chain(nodes: Sequence[Node], *inputs: Tensor) -> Tensor:
    first, *others = nodes
    count = len(first.inputs)
    y = _run(first, *inputs[:count])
    for node in others:
        start, count = count, count + len(node.inputs) - 1
        y = _run(node, y, *inputs[start:count])
    return y


# Without the tests for transforms in `apply` of the class: no region records under transforms.
_apply_deferred = super(torch.autograd.Function, _DeferredFunction).apply


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _run(node: Node, *inputs: Tensor) -> Tensor:
    with node.context.entered_in_backward():
        return node.operation.run(node.settings, *inputs)


def _input_values(node: Node) -> list[Tensor]:
    """The values of a node's inputs, in plain operators; each is computed once in a backward."""
    values = node.region.recomputed
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
            if not values:
                torch_compat.call_after_backward(values.clear)
            inputs = [_value(i, values) for i in last.inputs]
            values[last] = _run(last, *cast(list[Tensor], inputs))
    return [cast(Tensor, _value(i, values)) for i in node.inputs]


def _value(i: "Node | Tensor", values: dict[Node, Tensor]) -> Tensor | None:
    if not isinstance(i, Node):
        return i
    return values.get(i) if i.value is None else i.value


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


def _empty(
    node: Node, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool
) -> Deferred:
    _, c, h, w = shape
    strides = (c * h * w, 1, w * c, c) if channels_last else (c * h * w, h * w, w, 1)
    device = node.context.device
    return torch_compat.make_wrapper_subclass(Deferred, shape, strides, dtype=dtype, device=device)


def deferred(node: Node, tensors: Sequence[Tensor], in_place: bool = False) -> Deferred:
    """The tensor that stands for the result of `node`.

    Args:
        node: just recorded.
        tensors: its inputs, as the program has them.
        in_place: the first of `tensors`, a deferred tensor, becomes the result.
    """
    source: Any = node.inputs[0]
    result: Any = tensors[0] if in_place else None
    if in_place:
        source.reference = None
    if node.needs_grad and not node.region.is_traced:
        chain = source.chain if type(source) is Node else None
        if chain is not None and chain.nodes[-1] is not source:
            chain = None
        spare = None if chain is None else chain.take(node)
        if spare is None:
            result = _start_chain(node, chain, tensors, in_place)
        elif in_place:
            node.chain = chain
            torch_compat.swap_tensor_impl(result, spare)
            # It stays where code in C++ holds it.
            spare.preact_node = source
            source.reference = weakref.ref(spare)
        else:
            node.chain, result = chain, spare
    elif not in_place:
        result = _empty(node, node.shape, node.dtype, node.channels_last)
    result.preact_node = node
    node.reference = weakref.ref(result)
    return result


def _start_chain(
    node: Node, before: Chain | None, tensors: Sequence[Tensor], in_place: bool
) -> Any:
    """The result of an autograd function for `node`, and for what followed it in the last call."""
    if before is not None and before.learn(node):
        chain = Chain(node, before.steps, before.position + 1)
    else:
        owner = getattr(node.settings, "owner", None)
        chain = Chain(node, None if owner is None else owner.steps, 0)
    node.chain = chain
    spares = [] if in_place else chain.expected()
    more = [t for _, own in spares for t in own]
    found = _apply_deferred(chain, [step for step, _ in spares], in_place, *tensors, *more)
    if not spares:
        return found
    result, *others = found
    chain.spares = [
        _Spare(step, own, _version(own), t)
        for (step, own), t in zip(spares, others, strict=True)
    ]
    chain.spares.reverse()
    return result


def call_computed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls `func` with every deferred argument computed."""
    given = args
    args, kwargs = computed_arguments((args, kwargs), func)
    return as_given(func(*args, **kwargs), given)


def as_given(result: Any, given: tuple) -> Any:
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
                raise RuntimeError(_CHANGED)
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
