"""Finds what can run fused in a traced graph: BN-ReLU-Conv units, residual blocks, runs of blocks.

Every batch norm of a graph ends as part of a match, or with the reason why it is not.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx, nn
from torch.nn import functional as F

from preact_kernels.conversion.aliasing import aliases, changed_inputs, changes_input, is_seen
from preact_kernels.conversion.nodes import called_twice, passes_on
from preact_kernels.conversion.tracing import Trace, original_class
from preact_kernels.kernels.contract import Conv
from preact_kernels.modules.batch_norm import has_hooks
from preact_kernels.modules.norm_act import is_norm_act
from preact_kernels.modules.run_blocks import geometry_of
from preact_kernels.torch_compat import pad_functions

_RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_)
_ADD_FUNCTIONS = (operator.add, operator.iadd, torch.add)
_SIZES = range(1, 33)  # of images, for which shapes are compared: pixels


class Activation(NamedTuple):
    """A batch norm and its ReLU in a graph."""

    bn: fx.Node
    relu: fx.Node  # `bn` itself where the module has the ReLU
    nodes: tuple[fx.Node, ...]

    @property
    def x(self) -> fx.Node:
        """The input."""
        return _input(self.bn)


class Unit(NamedTuple):
    """A BN-ReLU-Conv in a graph."""

    activation: Activation
    conv: fx.Node
    padding: tuple[int, int]  # of `F.pad` before the convolution: height, width
    end: fx.Node  # its output: the convolution, or what passes its output on
    nodes: tuple[fx.Node, ...]


class Block(NamedTuple):
    """Units in a row, with or without a shortcut, in a graph."""

    units: tuple[Unit, ...]
    projection: fx.Node | None
    is_residual: bool
    is_in_place: bool  # the addition
    x: fx.Node
    end: fx.Node
    nodes: tuple[fx.Node, ...]


class Run(NamedTuple):
    """Blocks in a row: they become one autograd node."""

    blocks: tuple[Block, ...]
    is_changed_later: bool = False  # its output, in place

    @property
    def x(self) -> fx.Node:
        """The input of the first block."""
        return self.blocks[0].x

    @property
    def end(self) -> fx.Node:
        """The output of the last block."""
        return self.blocks[-1].end

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes that the run replaces."""
        return tuple(n for b in self.blocks for n in b.nodes)

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The batch norms and their ReLUs."""
        return tuple(u.activation for b in self.blocks for u in b.units)


class SingleUnit(NamedTuple):
    """A unit on its own, and a tensor that is added to its output."""

    unit: Unit
    residual: fx.Node | None
    is_in_place: bool  # the addition
    end: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def x(self) -> fx.Node:
        """The input."""
        return self.unit.activation.x

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The batch norm and its ReLU."""
        return (self.unit.activation,)


class BNReLU(NamedTuple):
    """A batch norm and a ReLU that no convolution follows, or several things."""

    activation: Activation

    @property
    def x(self) -> fx.Node:
        """The input."""
        return self.activation.x

    @property
    def end(self) -> fx.Node:
        """The output."""
        return self.activation.relu

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes that it replaces."""
        return self.activation.nodes

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The batch norm and its ReLU."""
        return (self.activation,)


Match = Run | SingleUnit | BNReLU


class Matches(NamedTuple):
    """What was found in a graph."""

    found: list[Match]
    refused: dict[str, str]  # batch norms that are not fused, by path, with the reason
    shared: frozenset[int]  # ids of modules with several places, or called more than once


def match(root: nn.Module, trace: Trace, shared: Iterable[int]) -> Matches:
    """Finds what can run fused.

    Args:
        root: the module that was traced.
        trace: of its forward.
        shared: ids of modules with several places in the model.
    """
    return _Matcher(root, trace.graph, set(shared)).match()


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of images, with or without an activation of its own."""
    return isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm | nn.LazyBatchNorm2d)


class _Matcher:
    def __init__(self, root: nn.Module, graph: fx.Graph, shared: set[int]) -> None:
        self._graph = graph
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._shared = shared | called_twice(self._modules, graph)
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._refused: dict[str, str] = {}
        self._by_norm: dict[fx.Node, Activation] = {}
        self._changes = [
            n for n in graph.nodes if changes_input(self._modules, n) and is_seen(self._modules, n)
        ]

    def match(self) -> Matches:
        for node in self._graph.nodes:
            if node.op == "call_module" and is_norm(self._module(node)):
                activation = self._activation(node)
                if isinstance(activation, str):
                    self._refused[node.target] = activation
                else:
                    self._by_norm[node] = activation
        found: list[Match] = []
        taken: set[fx.Node] = set()
        for node, activation in self._by_norm.items():
            if node not in taken:
                new = self._matches_from(activation)
                found += new
                taken.update(a.bn for m in new for a in m.activations)
        found = self._joined(found)
        kept = []
        for m in found:
            if self._is_changed_within(m) or self._is_input_changed_later(m):
                for a in m.activations:
                    self._refused[str(a.bn.target)] = "its input is changed in place"
            else:
                kept.append(Run(m.blocks, True) if self._is_changed_later(m) else m)
        return Matches(kept, self._refused, frozenset(self._shared))

    # What a node is.

    def _module(self, node: fx.Node) -> nn.Module:
        return self._modules[str(node.target)]

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self._module(node)) is nn.ReLU and not has_hooks(self._module(node))
        if node.op == "call_method":
            return node.target in ("relu", "relu_")
        return node.op == "call_function" and node.target in _RELU_FUNCTIONS

    def _passes_on(self, node: fx.Node) -> bool:
        return passes_on(self._modules, node)

    def _padding(self, node: fx.Node) -> tuple[int, int] | None:
        """Zeros that `node` adds at both ends of height and width; None for other nodes."""
        sizes: Any = None
        if node.op == "call_function" and node.target in pad_functions:
            names = ("input", "pad", "mode", "value")
            given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
            if given.get("mode", "constant") == "constant" and not given.get("value"):
                sizes = given.get("pad")
        elif node.op == "call_module" and type(self._module(node)) is nn.ZeroPad2d:
            sizes = self._module(node).padding
        if not isinstance(sizes, list | tuple) or len(sizes) != 4:
            return None
        if not all(isinstance(s, int) and s >= 0 for s in sizes):
            return None
        left, right, top, bottom = sizes
        return (top, left) if left == right and top == bottom else None

    def _is_conv(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        conv = self._module(node)
        is_plain = type(conv) is nn.Conv2d and conv.padding_mode == "zeros"
        return is_plain and not has_hooks(conv) and id(conv) not in self._shared

    def _is_stage_conv(self, unit: Unit) -> bool:
        """Whether a stage may run the unit; a shard of its weight is joined before the call."""
        conv = self._module(unit.conv)
        return unit.padding == (0, 0) and conv.bias is None and type(conv.padding) is tuple

    def _addend(self, node: fx.Node, branch: fx.Node) -> fx.Node | None:
        """What `node` adds to `branch`; None if it does something else."""
        if node.op == "call_function":
            is_sum, in_place = node.target in _ADD_FUNCTIONS, node.target is operator.iadd
        else:
            is_sum = node.op == "call_method" and node.target in ("add", "add_")
            in_place = node.target == "add_"
        if not is_sum or len(node.args) != 2 or node.kwargs:
            return None
        a, b = node.args
        if a is b or (in_place and a is not branch):
            return None
        other = b if a is branch else a
        return other if isinstance(other, fx.Node) else None

    # What follows a node.

    def _passed_on(self, node: fx.Node) -> tuple[tuple[fx.Node, ...], fx.Node]:
        """What passes on the output of `node`, and the last of it."""
        nodes: tuple[fx.Node, ...] = ()
        while len(node.users) == 1 and self._passes_on(next(iter(node.users))):
            node = next(iter(node.users))
            nodes += (node,)
        return nodes, node

    def _source(self, node: fx.Node) -> tuple[tuple[fx.Node, ...], fx.Node]:
        """What passes on an earlier node's output as `node`, and that earlier node."""
        nodes: tuple[fx.Node, ...] = ()
        while self._passes_on(node) and len(node.users) == 1:
            nodes += (node,)
            node = _input(node)
        return nodes, node

    def _activation(self, node: fx.Node) -> Activation | str:
        """The batch norm `node` and its ReLU, or the reason why it is not fused."""
        module = self._module(node)
        if id(module) in self._shared:
            return "the module is used more than once"
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return "its shape is unknown (lazy module)"
        if has_hooks(module):
            return "the batch norm has hooks"
        if is_norm_act(module):
            return Activation(node, node, (node,))
        if type(module) not in (nn.BatchNorm2d, nn.SyncBatchNorm):
            act = getattr(module, "act", None)
            name = type(module).__name__
            return f"{name} with activation {type(act).__name__}" if act else f"it is a {name}"
        passing, last = self._passed_on(node)
        if len(last.users) != 1:
            return "its output is used more than once" if last.users else "its output is not used"
        relu = next(iter(last.users))
        if self._is_relu(relu):
            return Activation(node, relu, (node, *passing, relu))
        return f"no ReLU follows ({self._described(relu)})"

    def _described(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return original_class(self._module(node)).__name__
        return getattr(node.target, "__name__", str(node.target))

    def _units(self, activation: Activation) -> list[Unit] | None:
        """A unit for every convolution that reads the activation; None if anything else does."""
        units = []
        for user in activation.relu.users:
            node, padding = user, (0, 0)
            nodes: tuple[fx.Node, ...] = ()
            while True:
                added = self._padding(node)
                if not (added or self._passes_on(node)) or len(node.users) != 1:
                    break
                padding = (padding[0] + added[0], padding[1] + added[1]) if added else padding
                nodes, node = (*nodes, node), next(iter(node.users))
            if not self._is_conv(node):
                return None
            if padding != (0, 0) and isinstance(self._module(node).padding, str):
                return None
            passing, end = self._passed_on(node)
            own = (*activation.nodes, *nodes, node, *passing)
            units.append(Unit(activation, node, padding, end, own))
        return units or None

    def _chain(self, unit: Unit) -> list[Unit]:
        """`unit` and those behind it that read nothing but the output of the one before."""
        chain = [unit]
        while self._is_stage_conv(chain[-1]) and len(chain[-1].end.users) == 1:
            activation = self._by_norm.get(next(iter(chain[-1].end.users)))
            units = self._units(activation) if activation else None
            if not units or len(units) != 1 or not self._is_stage_conv(units[0]):
                break
            chain += units
        return chain

    # Matches.

    def _matches_from(self, activation: Activation) -> list[Match]:
        units = self._units(activation)
        if units and len(units) == 2:
            for unit, projection in (units, units[::-1]):
                if block := self._projecting_block(self._chain(unit), projection):
                    return [Run((block,))]
        if not units or len(units) != 1:
            return [BNReLU(activation)]
        chain = self._chain(units[0])
        last = chain[-1]
        add = next(iter(last.end.users)) if len(last.end.users) == 1 else None
        other = self._addend(add, last.end) if add else None
        if add is None or other is None:
            return self._unit_run(chain)
        passing, source = self._source(other)
        in_place = _is_in_place(add)
        if source is chain[0].activation.x and self._keeps_shape(chain):
            nodes = (*(n for u in chain for n in u.nodes), *passing, add)
            return [Run((Block(tuple(chain), None, True, in_place, source, add, nodes),))]
        single = SingleUnit(last, other, in_place, add, (*last.nodes, add))
        return [*self._unit_run(chain[:-1]), single]

    def _unit_run(self, chain: list[Unit]) -> list[Match]:
        """Units in a row, without a shortcut."""
        if not chain:
            return []
        if len(chain) == 1:
            return [SingleUnit(chain[0], None, False, chain[0].end, chain[0].nodes)]
        nodes = tuple(n for u in chain for n in u.nodes)
        x, end = chain[0].activation.x, chain[-1].end
        return [Run((Block(tuple(chain), None, False, False, x, end, nodes),))]

    def _projecting_block(self, chain: list[Unit], projection: Unit) -> Block | None:
        last = chain[-1]
        if len(last.end.users) != 1 or not all(map(self._is_stage_conv, [*chain, projection])):
            return None
        add = next(iter(last.end.users))
        if self._addend(add, last.end) is not projection.end or len(projection.end.users) != 1:
            return None
        convs = [self._module(u.conv) for u in chain]
        if _output_sizes(convs) != _output_sizes([self._module(projection.conv)]):
            return None
        nodes = dict.fromkeys(n for u in (*chain, projection) for n in u.nodes)
        x = chain[0].activation.x
        in_place = _is_in_place(add)
        return Block(tuple(chain), projection.conv, True, in_place, x, add, (*nodes, add))

    def _keeps_shape(self, chain: list[Unit]) -> bool:
        if not all(map(self._is_stage_conv, chain)):
            return False
        convs: list[Any] = [self._module(u.conv) for u in chain]
        channels, *sizes = _output_sizes(convs)
        return channels == convs[0].in_channels and all(s == list(_SIZES) for s in sizes)

    def _joined(self, found: list[Match]) -> list[Match]:
        """Runs of residual blocks, joined where one reads nothing but the other's output.

        A block with a projection begins a run, as it begins a stage of a network.
        """
        joined: list[Match] = []
        for m in sorted(found, key=lambda m: self._order[m.end]):
            last = joined[-1] if joined else None
            if isinstance(last, Run) and isinstance(m, Run) and m.x is last.end:
                first = m.blocks[0]
                is_next = first.is_residual and first.projection is None
                is_next = is_next and all(b.is_residual for b in last.blocks)
                if is_next and set(last.end.users) <= set(first.nodes):
                    joined[-1] = Run(last.blocks + m.blocks)
                    continue
            joined.append(m)
        return joined

    def _is_changed_later(self, m: Match) -> TypeGuard[Run]:
        """Whether it is a run, which may keep its output, and a later node may change that."""
        if not isinstance(m, Run):
            return False
        readers = {user for n in aliases(self._modules, m.end) for user in n.users}
        return any(changes_input(self._modules, n) for n in readers)

    def _is_input_changed_later(self, m: Match) -> bool:
        """Whether a node behind `m` changes its input: fused, `m` may keep it where it did not."""
        same, last = aliases(self._modules, m.x), self._order[m.end]
        return any(
            self._order[n] > last
            and n.op != "call_module"
            and not same.isdisjoint(changed_inputs(n))
            for n in self._changes
        )

    def _is_changed_within(self, m: Match) -> bool:
        """Whether another node may change an input of `m` before `m` would read it."""
        first, last, own = min(self._order[n] for n in m.nodes), self._order[m.end], set(m.nodes)
        return any(first < self._order[n] < last and n not in own for n in self._changes)


def _input(node: fx.Node) -> fx.Node:
    return next(iter(node.all_input_nodes), node)


def _is_in_place(add: fx.Node) -> bool:
    return add.target in (operator.iadd, "add_")


def _output_sizes(convs: Sequence[Any]) -> list:
    """Channels of the output, then its heights and widths, for images of many sizes."""
    shapes = [[1, convs[0].in_channels, size, size] for size in _SIZES]
    for conv in convs:
        geometry: Conv = geometry_of(conv)
        shapes = [geometry.output_shape(s, conv.weight.shape) for s in shapes]
    return [shapes[0][1], [s[2] for s in shapes], [s[3] for s in shapes]]
