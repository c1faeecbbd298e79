"""What is remembered of the deferred calls of a forward; see `replay.py`.

Of its tensors, only parameters and buffers of the model.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from preact_kernels.activations import Activation
from preact_kernels.conversion.context import Context
from preact_kernels.conversion.deferred import Node
from preact_kernels.conversion.matching import Match, UnitNodes
from preact_kernels.conversion.owners import Owners
from preact_kernels.conversion.report import Outcome
from preact_kernels.ops.preact_stage import PreparedStage
from preact_kernels.ops.unit import PreparedUnit

_CONSTANTS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format)
)
_COMPARED_SETTINGS = (Activation, tuple, type(None))  # of numbers and names alone


def metadata_of(t: Tensor) -> tuple:
    """What rules read of a tensor besides its class."""
    return t.dtype, t.shape, t.stride(), t.requires_grad, t.device


def metadata_of_owned(t: Tensor) -> tuple:
    """The same of a parameter or buffer; operations on tensors of two devices raise."""
    return t.dtype, t.shape, t.stride(), t.requires_grad


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a name, or the like, or a list or tuple of these."""
    if type(value) in (tuple, list, torch.Size):
        return all(map(is_constant, value))
    return type(value) in _CONSTANTS


def has_list(value: Any) -> bool:
    """Whether a constant is, or contains, a list."""
    return isinstance(value, list) or (isinstance(value, tuple) and any(map(has_list, value)))


def _equals(a: Any, b: Any) -> bool:
    """Whether constants are equal, also in type, and 0.0 is not -0.0."""
    return type(a) is type(b) and repr(a) == repr(b)


def are_equal(a: list[Any], b: list[Any]) -> bool:
    """Whether values are the same objects, or equal constants."""
    pairs = zip(a, b, strict=True)
    return all(x is y or (is_constant(y) and _equals(x, y)) for x, y in pairs)


class Modes(NamedTuple):
    """What rules read of a `Context`."""

    device: torch.device
    has_grad: bool
    is_inference: bool
    autocast_dtype: torch.dtype | None
    backend: str

    @classmethod
    def of(cls, context: Context) -> "Modes":
        return cls(*[getattr(context, name) for name in cls._fields])


class TapedNode:
    """A node of a tape.

    Attributes:
        fields: the node's attributes that do not differ between forwards.
        settings: text of the node's settings, for nodes that a rule records again; an object that
            equals no other if it cannot be compared.
        inputs: the node's inputs, as `Replay` describes them.
        events: how many executions and flushes came before.
        modes: the modes.
        call: the call that deferred it, if a later one may be answered from it.
        func: the function of this call.
    """

    def __init__(self, node: Node, inputs: tuple, events: int, modes: Modes) -> None:
        names = "operation", "shape", "dtype", "channels_last", "needs_grad", "memory", "is_view"
        self.fields = {name: getattr(node, name) for name in names}
        is_compared = type(node.settings) in _COMPARED_SETTINGS
        self.settings = repr(node.settings) if is_compared else object()
        self.inputs, self.events = inputs, events
        self.modes = modes
        self.operation, self.memory = node.operation, node.memory
        self.func: Any = None
        self.call: TapedCall | None = None

    def set_call(self, call: "TapedCall", node: Node) -> None:
        """Lets later calls be answered."""
        self.call, self.func = call, call.func
        self.fields["settings"] = node.settings

    def describes(self, other: "TapedNode") -> bool:
        """Whether another node is the same, if its settings can be compared."""
        return (
            self.call is None
            and self.events == other.events
            and self.inputs == other.inputs
            and self.modes == other.modes
            and self.fields == other.fields
            and self.settings == other.settings
        )


class Same:
    """A tensor that equals itself alone."""

    __slots__ = ("t",)

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.t is other.t

    def __hash__(self) -> int:
        return id(self.t)


# Kinds of inputs. A description is a kind, then the number of the node; a parameter or buffer and
# its metadata; or number, class and metadata of another tensor.
NODE, OWNED, OTHER = "node", "owned", "other"


class TapedCall(NamedTuple):
    """A call of PyTorch that deferred one node.

    Its values are the positional arguments, with the items of a list or tuple of tensors in the
    first one, and the keyword arguments.
    """

    func: Any
    names: tuple[str, ...]  # of keyword arguments
    listed: type | None  # class of the list in the first argument
    value_count: int
    of_nodes: tuple[tuple[int, int], ...]  # positions of results, and the numbers of their nodes
    owned: tuple[tuple[int, Tensor, tuple], ...]  # parameters and buffers
    others: tuple[tuple[int, int, tuple], ...]  # positions, numbers and metadata of other tensors
    places: tuple[int, ...]  # positions of constants
    ids: list[int]  # ids of the constants
    constants: list[Any]
    inputs: tuple[int, ...]  # positions of the node's inputs
    is_in_place: bool
    updated: frozenset[int]  # ids of running statistics
    evaluated: frozenset[int]
    reads_parameters: bool  # whether all inputs of the node after the first are parameters


class Step(NamedTuple):
    """A `Match`, with positions in place of nodes."""

    name: str
    nodes: tuple[int, ...]
    end: int
    inputs: tuple[tuple[int, int], ...]  # a node, and the number of one of its inputs or -1: itself
    unit: tuple | None  # the first unit
    blocks: tuple
    reason: str
    prepared: PreparedUnit | PreparedStage | None  # its arguments, if they are parameters alone

    def of(self, nodes: Sequence[Node]) -> Match:
        """Returns the match of these nodes; of several units, it has the first."""
        units: tuple[UnitNodes, ...] = ()
        if self.unit is not None:
            *single, pads, padding, conv, bias = self.unit
            own: Any = [None if p is None else nodes[p] for p in (*single, conv, bias)]
            own[-2:-2] = tuple([nodes[p] for p in pads]), padding
            units = (UnitNodes(*own),)
        inputs = [nodes[p] if i < 0 else nodes[p].inputs[i] for p, i in self.inputs]
        matched = tuple([nodes[p] for p in self.nodes])
        rest = units, self.blocks, self.reason, self.prepared
        return Match(self.name, matched, nodes[self.end], tuple(inputs), *rest)


def steps_of(
    nodes: Sequence[Node], matches: Sequence[Match], reads_parameters: Callable[[Node], bool]
) -> list[Step] | None:
    """Describes the steps of an execution; None: they must be matched again.

    Args:
        nodes: the nodes of the execution.
        matches: its steps.
        reads_parameters: whether all tensors that a node reads besides its first input are
            parameters and buffers.
    """
    at = {id(n): p for p, n in enumerate(nodes)}
    places = {id(i): (p, k) for p, n in enumerate(nodes) for k, i in enumerate(n.inputs)}
    places |= {id(n): (p, -1) for p, n in enumerate(nodes)}
    found = []
    for m in matches:
        are_constant = all(map(reads_parameters, m.nodes))
        if m.blocks and not are_constant:
            return None
        unit = None
        prepared: PreparedUnit | PreparedStage | None = None
        if m.units:
            u = m.units[0]
            unit = _positions(u, at)
            is_simple = (u.scale, u.shift, u.dropout, u.bias) == (None,) * 4
            if m.blocks:
                prepared = PreparedStage(m.blocks)
            elif is_simple and are_constant:
                prepared = PreparedUnit(u.arguments())
        own, inputs = tuple([at[id(n)] for n in m.nodes]), tuple([places[id(i)] for i in m.inputs])
        found.append(Step(m.name, own, at[id(m.end)], inputs, unit, m.blocks, m.reason, prepared))
    return found


def _positions(unit: UnitNodes, at: dict[int, int]) -> tuple:
    """A unit with positions in place of nodes, as `Step.of` reads it."""
    *single, pads, padding, conv, bias = unit
    first, last = (
        [None if n is None else at[id(n)] for n in some] for some in (single, (conv, bias))
    )
    return (*first, tuple([at[id(n)] for n in pads]), padding, *last)


class Plan(NamedTuple):
    """The steps of an execution."""

    key: tuple
    steps: list[Step] | None  # None: they must be matched again
    # The module of a norm, its outcome, and whether the reason is the reader of the results.
    outcomes: list[tuple["weakref.ref[nn.Module] | None", Outcome, bool]]


class Tape:
    """The deferred calls of a forward.

    Attributes:
        key: what else must be equal; see `Tapes.start`.
        nodes: the nodes, in order.
        plans: the executions, in order.
    """

    def __init__(self, key: tuple, nodes: Sequence[TapedNode], plans: Sequence[Plan]) -> None:
        self.key, self.nodes, self.plans = key, list(nodes), list(plans)

    def has_tensors_of(self, owners: Owners) -> bool:
        """Whether the model still has all parameters and buffers of the calls."""
        calls = [node.call for node in self.nodes if node.call is not None]
        return all(owners.find(t) is not None for call in calls for _, t, _ in call.owned)
