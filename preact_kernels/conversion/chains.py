"""The places of deferred tensors in the autograd graph."""

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels import torch_compat
from preact_kernels.conversion.deferred import CHANGED, Deferred, Node, Operation, version
from preact_kernels.ops.bn_relu import gradients
from preact_kernels.torch_compat import disable_torch_function


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
        raise RuntimeError(CHANGED)
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


def _empty(node: Node, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Deferred:
    _, c, h, w = shape
    strides = (c * h * w, 1, w * c, c) if channels_last else (c * h * w, h * w, w, 1)
    device = node.context.device
    return torch_compat.make_wrapper_subclass(Deferred, shape, strides, dtype=dtype, device=device)


def deferred_result(node: Node, tensors: Sequence[Tensor], in_place: bool = False) -> Deferred:
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
        _Spare(step, own, version(own), t) for (step, own), t in zip(spares, others, strict=True)
    ]
    chain.spares.reverse()
    return result
