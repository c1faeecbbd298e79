"""Finds what can run fused among recorded nodes: units, residual blocks, runs of blocks."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from preact_kernels.conversion.deferred import Node
from preact_kernels.conversion.operations import ADD, CONV, NORM, PAD, RELU


class Activation(NamedTuple):
    """A batch norm and its ReLU."""

    bn: Node
    relu: Node

    @property
    def x(self) -> Node | Tensor:
        """The input."""
        return self.bn.inputs[0]


class Unit(NamedTuple):
    """A BN-ReLU-Conv, and zero padding before the convolution."""

    activation: Activation
    pads: tuple[Node, ...]
    padding: tuple[int, int]  # of `pads`: height, width
    conv: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that it replaces."""
        return (*self.activation, *self.pads, self.conv)

    @property
    def fits_stage(self) -> bool:
        """Whether a stage may run it."""
        has_bias = len(self.conv.inputs) > 2
        return not (self.pads or has_bias) and self.conv.dtype == self.activation.bn.dtype


class Block(NamedTuple):
    """Units in a row, with a shortcut (`add` is given) or without."""

    units: tuple[Unit, ...]
    projection: Unit | None
    add: Node | None

    @property
    def x(self) -> Node | Tensor:
        """The input."""
        return self.units[0].activation.x

    @property
    def end(self) -> Node:
        """The output."""
        return self.add or self.units[-1].conv

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that it replaces."""
        projection = self.projection.nodes if self.projection else ()
        add = (self.add,) if self.add else ()
        return (*(n for u in self.units for n in u.nodes), *projection, *add)


class Run(NamedTuple):
    """Blocks in a row, which become one autograd node."""

    blocks: tuple[Block, ...]

    @property
    def x(self) -> Node | Tensor:
        """The input of the first block."""
        return self.blocks[0].x

    @property
    def end(self) -> Node:
        """The output of the last block."""
        return self.blocks[-1].end

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that it replaces."""
        return tuple(n for b in self.blocks for n in b.nodes)

    @property
    def inputs(self) -> tuple[Node | Tensor, ...]:
        """What it reads, without parameters."""
        return (self.x,)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units, and the projections."""
        return tuple(u for b in self.blocks for u in (*b.units, b.projection) if u is not None)

    @property
    def name(self) -> str:
        """For the report."""
        first = self.blocks[0]
        if first.add is None:
            return f"BN-ReLU-Conv, {len(first.units)} in a row"
        return f"run of {len(self.blocks)} residual blocks"


class SingleUnit(NamedTuple):
    """A unit on its own, and the addition of `residual` to its output."""

    unit: Unit
    residual: "Node | Tensor | None" = None
    add: Node | None = None

    @property
    def end(self) -> Node:
        """The output."""
        return self.add or self.unit.conv

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that it replaces."""
        return (*self.unit.nodes, *((self.add,) if self.add else ()))

    @property
    def inputs(self) -> tuple[Node | Tensor, ...]:
        """What it reads, without parameters."""
        x = self.unit.activation.x
        return (x,) if self.residual is None else (x, self.residual)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that it runs."""
        return (self.unit,)

    @property
    def name(self) -> str:
        """For the report."""
        return "BN-ReLU-Conv" + (" and residual add" if self.add else "")


class BNReLU(NamedTuple):
    """A batch norm and a ReLU that no convolution follows, or several things."""

    activation: Activation

    @property
    def end(self) -> Node:
        """The output."""
        return self.activation.relu

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that it replaces."""
        return tuple(self.activation)

    @property
    def inputs(self) -> tuple[Node | Tensor, ...]:
        """What it reads, without parameters."""
        return (self.activation.x,)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that it runs: it has no convolution."""
        return ()

    @property
    def name(self) -> str:
        """For the report."""
        return "BN-ReLU"


Match = Run | SingleUnit | BNReLU


def match(nodes: Sequence[Node]) -> tuple[list[Match], dict[Node, str]]:
    """Finds what runs fused when `nodes` are computed.

    Args:
        nodes: in the order in which they were recorded.

    Returns:
        The matches, and why each other batch norm is not part of one.
    """
    return _Matcher(nodes).match()


class _Matcher:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {n: i for i, n in enumerate(nodes)}
        self._activations: dict[Node, Activation] = {}  # by batch norm
        self._refused: dict[Node, str] = {}
        self._added: set[Node] = set()  # additions that are part of a match

    def match(self) -> tuple[list[Match], dict[Node, str]]:
        for node in self._order:
            if node.operation is NORM:
                found = self._activation(node)
                if isinstance(found, str):
                    self._refused[node] = found
                else:
                    self._activations[node] = found
        matches: list[Match] = []
        taken: set[Node] = set()
        for bn, activation in self._activations.items():
            if bn not in taken:
                new = self._matches_from(activation)
                matches += new
                taken.update(n for m in new for n in m.nodes if n.operation is NORM)
                self._added.update(m.end for m in new if m.end.operation is ADD)
        return self._joined(matches), self._refused

    def _only_reader(self, node: Node) -> Node | None:
        """The one node that reads the result of `node`, if nothing else does or can."""
        user = node.user
        if user is None or node.other_users or node.is_held or user not in self._order:
            return None
        return user

    def _activation(self, bn: Node) -> Activation | str:
        needed = [i.needs_grad if isinstance(i, Node) else i.requires_grad for i in bn.inputs]
        reader = self._only_reader(bn)
        if reader is None:
            return "its output is used more than once" if len(bn.users) > 1 else ""
        if reader.operation is not RELU:
            return f"no ReLU follows ({reader.operation.name})"
        is_frozen = bn.context.has_grad and not any(needed)
        if is_frozen and any(u.needs_grad for u in reader.users):
            return "it is frozen, and plain PyTorch saves nothing for it"
        return Activation(bn, reader)

    def _units(self, activation: Activation) -> list[Unit]:
        """A unit for each convolution that reads the activation; none if anything else does."""
        relu = activation.relu
        if relu.is_held:
            return []
        units = []
        for user in relu.users:
            if user not in self._order:
                return []
            node, pads, padding = user, [], (0, 0)
            while node.operation is PAD:
                left, right, top, bottom = node.settings
                following = self._only_reader(node)
                if left != right or top != bottom or following is None:
                    return []
                pads.append(node)
                padding, node = (padding[0] + top, padding[1] + left), following
            reads = pads[-1] if pads else relu
            if node.operation is not CONV or node.inputs[0] is not reads:
                return []
            units.append(Unit(activation, tuple(pads), padding, node))
        return units

    def _chain(self, unit: Unit) -> list[Unit]:
        """`unit`, and those behind it that read nothing but the output of the one before."""
        chain = [unit]
        while chain[-1].fits_stage:
            reader = self._only_reader(chain[-1].conv)
            activation = self._activations.get(reader) if reader else None
            units = self._units(activation) if activation else []
            if len(units) != 1 or not units[0].fits_stage:
                break
            chain += units
        return chain

    def _matches_from(self, activation: Activation) -> list[Match]:
        units = self._units(activation)
        if len(units) == 2:
            for unit, projection in (units, units[::-1]):
                if block := self._projecting_block(self._chain(unit), projection):
                    return [Run((block,))]
        if len(units) != 1:
            return [BNReLU(activation)]
        chain = self._chain(units[0])
        last = chain[-1].conv
        add = self._only_reader(last)
        is_sum = add is not None and add.operation is ADD and add not in self._added
        if add is None or not is_sum or add.inputs[0] is add.inputs[1]:
            return self._unit_run(chain)
        other = add.inputs[1] if add.inputs[0] is last else add.inputs[0]
        x = activation.x
        if other is x and all(u.fits_stage for u in chain) and x.dtype == last.dtype:
            return [Run((Block(tuple(chain), None, add),))]
        if other.dtype != last.dtype:
            return self._unit_run(chain)
        return [*self._unit_run(chain[:-1]), SingleUnit(chain[-1], other, add)]

    def _unit_run(self, chain: list[Unit]) -> list[Match]:
        """Units in a row, without a shortcut."""
        if not chain:
            return []
        if len(chain) == 1:
            return [SingleUnit(chain[0])]
        return [Run((Block(tuple(chain), None, None),))]

    def _projecting_block(self, chain: list[Unit], projection: Unit) -> Block | None:
        last = chain[-1].conv
        add = self._only_reader(last)
        if add is None or add.operation is not ADD or add in self._added:
            return None
        if not projection.fits_stage:
            return None
        if set(add.inputs) != {last, projection.conv} or not all(u.fits_stage for u in chain):
            return None
        if self._only_reader(projection.conv) is not add:
            return None
        return Block(tuple(chain), projection, add)

    def _joined(self, found: list[Match]) -> list[Match]:
        """Runs of residual blocks, joined where one reads nothing but the other's output.

        A block with a projection begins a run, as it begins a stage of a network.
        """
        joined: list[Match] = []
        for m in sorted(found, key=lambda m: self._order[m.end]):
            last = joined[-1] if joined else None
            if isinstance(last, Run) and isinstance(m, Run) and m.x is last.end:
                first = m.blocks[0]
                is_next = first.add is not None and first.projection is None
                is_next = is_next and all(b.add is not None for b in last.blocks)
                is_next = is_next and _first_norm(m).memory == _first_norm(last).memory
                readers = last.end.users
                if is_next and not last.end.is_held and set(readers) <= set(first.nodes):
                    joined[-1] = Run(last.blocks + m.blocks)
                    continue
            joined.append(m)
        return joined


def _first_norm(run: Run) -> Node:
    return run.blocks[0].units[0].activation.bn
