"""Finds recorded nodes that can run fused: units, residual blocks, runs of blocks."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from preact_kernels.activations import ACTIVATIONS
from preact_kernels.conversion.deferred import Node
from preact_kernels.conversion.operations import (
    ACTIVATION,
    ADD,
    CONV,
    DROPOUT,
    NORM,
    PAD,
    SCALE,
    SHIFT,
    function_name,
    tracked_statistics,
)
from preact_kernels.norms import BatchNorm


class Activated(NamedTuple):
    """A norm, and optionally a scale, a shift and an activation."""

    norm: Node
    scale: Node | None = None
    shift: Node | None = None
    activation: Node | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(n for n in self if n is not None)

    @property
    def end(self) -> Node:
        return self.activation or self.shift or self.scale or self.norm

    @property
    def is_batch_norm_relu(self) -> bool:
        """Whether this is a batch norm and a ReLU without scale and shift."""
        activation = self.activation
        return (
            activation is not None
            and activation.settings.name == "relu"
            and self.scale is None
            and self.shift is None
            and type(self.norm.settings.norm) is BatchNorm
        )

    @property
    def name(self) -> str:
        parts = [self.norm.settings.norm.title]
        if self.scale is not None:
            parts.append("Scale")
        if self.shift is not None:
            parts.append("Shift")
        if self.activation is not None:
            parts.append(ACTIVATIONS[self.activation.settings.name].title)
        return "-".join(parts)


class Unit(NamedTuple):
    """A norm, activation, dropout, zero padding and convolution."""

    activated: Activated
    dropout: Node | None
    pads: tuple[Node, ...]
    padding: tuple[int, ...]  # pixels that `pads` add at both sides of each axis
    conv: Node
    bias: Node | None  # addition of a bias after a convolution without a bias

    @property
    def norm(self) -> Node:
        return self.activated.norm

    @property
    def end(self) -> Node:
        return self.bias or self.conv

    @property
    def nodes(self) -> tuple[Node, ...]:
        others = (self.dropout, *self.pads, self.conv, self.bias)
        return (*self.activated.nodes, *(n for n in others if n is not None))

    @property
    def fits_stage(self) -> bool:
        conv = self.conv
        has_bias = self.bias is not None or len(conv.inputs) > 2
        if has_bias or self.pads or self.dropout is not None:
            return False
        if len(conv.shape) != 4 or conv.dtype != self.norm.dtype:
            return False
        return self.activated.is_batch_norm_relu

    @property
    def name(self) -> str:
        return f"{self.activated.name}{'' if self.dropout is None else '-Dropout'}-Conv"


class Block(NamedTuple):
    """Consecutive units, with a shortcut if `add` is not None."""

    units: tuple[Unit, ...]
    projection: Unit | None
    add: Node | None


class Match(NamedTuple):
    """Nodes that run fused, or one node that runs plain.

    Attributes:
        name: name in the report; empty if the node runs plain.
        nodes: all nodes; if they run fused, the first node is a norm.
        end: the node of the output.
        inputs: images that the match reads.
        units: all units, including projections; empty for a norm and activation alone.
        blocks: consecutive blocks in one autograd node; empty for a unit, or a norm and activation.
        activated: a norm and activation alone.
        reason: why `activated` runs without a convolution; empty: because of `execute`'s reader.
    """

    name: str
    nodes: tuple[Node, ...]
    end: Node
    inputs: tuple[Node | Tensor, ...]
    units: tuple[Unit, ...] = ()
    blocks: tuple[Block, ...] = ()
    activated: Activated | None = None
    reason: str = ""


def _block_match(*blocks: Block) -> Match:
    """Returns the match of a residual block, or of units as blocks without a shortcut."""
    projections = tuple(b.projection for b in blocks if b.projection is not None)
    units = (*(u for b in blocks for u in b.units), *projections)
    end = blocks[-1].add or blocks[-1].units[-1].end
    nodes = tuple(dict.fromkeys([*(n for u in units for n in u.nodes), end]))
    name = f"BN-ReLU-Conv, {len(units)} in a row"
    return Match(name, nodes, end, (nodes[0].inputs[0],), units, blocks)


def _joined_match(matches: Sequence[Match]) -> Match:
    """Joins matches of blocks that each read the output of the previous block."""
    first = matches[0]
    if not first.blocks or first.blocks[0].add is None:
        return first
    blocks = tuple(b for m in matches for b in m.blocks)
    nodes = tuple(n for m in matches for n in m.nodes)
    units = tuple(u for m in matches for u in m.units)
    name = f"run of {len(blocks)} residual blocks" if len(blocks) > 1 else "residual block"
    return Match(name, nodes, matches[-1].end, first.inputs, units, blocks)


def _row_matches(units: list[Unit]) -> list[Match]:
    """Returns the match of consecutive units without a shortcut."""
    if len(units) > 1:
        return [_block_match(*(Block((u,), None, None) for u in units))]
    return [Match(u.name, u.nodes, u.end, (u.norm.inputs[0],), (u,)) for u in units]


def _is_wanted(node: Node) -> bool:
    """Whether a node that is pending elsewhere may still be computed."""
    return node.user is not None or node.is_held or bool(tracked_statistics(node))


class Matcher:
    """Finds the nodes that run fused; `nodes` are in the order of recording."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {n: i for i, n in enumerate(nodes)}
        self._activated: dict[Node, Activated] = {}  # candidates for fusion, by norm
        self._refused: dict[Node, str] = {}
        self._added: set[Node] = set()  # additions that are part of a match

    def match(self) -> tuple[list[Match], dict[Node, str]]:
        """Returns the matches, and for each other norm why it is not in a match."""
        for node in self._order:
            if node.operation is NORM:
                activated = self._activated_by(node)
                if isinstance(activated, str):
                    self._refused[node] = activated
                else:
                    self._activated[node] = activated
        matches: list[Match] = []
        taken: set[Node] = set()
        for norm in self._activated:
            if norm not in taken:
                new = self._matches_from(norm)
                matches += new
                taken.update(n for m in new for n in m.nodes if n.operation is NORM)
                self._added.update(m.end for m in new if m.end.operation is ADD)
        return self._joined(matches), self._refused

    def _readers(self, node: Node) -> tuple[Node, ...]:
        """Returns the nodes that may read the result of `node`."""
        if not node.other_users:
            return node.users
        return tuple(u for u in node.users if u in self._order or _is_wanted(u))

    def _only_reader(self, node: Node) -> Node | None:
        """Returns the only node that reads the result of `node`, if nothing else can read it."""
        readers = self._readers(node)
        if len(readers) != 1 or node.is_held or readers[0] not in self._order:
            return None
        return readers[0]

    def _activated_by(self, norm: Node) -> Activated | str:
        """Returns the nodes that can run fused with a norm, or why there are none."""
        found = Activated(norm)
        reader = self._only_reader(norm)
        if reader is None:
            return "its output is used more than once" if len(self._readers(norm)) > 1 else ""
        if reader.operation is SCALE:
            found, reader = found._replace(scale=reader), self._only_reader(reader)
        if reader is not None and reader.operation is SHIFT and reader.inputs[0] is found.end:
            found, reader = found._replace(shift=reader), self._only_reader(reader)
        if reader is not None and reader.operation is ACTIVATION:
            found = found._replace(activation=reader)
        elif found.scale is None and (reader is None or not self._leads_to_conv(reader)):
            after = reader if reader is not None else found.end
            return f"no activation follows ({function_name(after)})"
        needed = [i.needs_grad if isinstance(i, Node) else i.requires_grad for i in norm.inputs]
        if norm.context.has_grad and not any(needed) and self._leads_to_gradient(found.end):
            return "it is frozen, and plain PyTorch saves nothing for it"
        return found

    def _leads_to_conv(self, node: Node) -> bool:
        """Whether a node is a convolution, or leads to one through padding and dropout."""
        found: Node | None = node
        while found is not None and found.operation in (PAD, DROPOUT):
            found = self._only_reader(found)
        return found is not None and found.operation is CONV

    def _leads_to_gradient(self, node: Node) -> bool:
        """Whether a reader of an activation needs a gradient, perhaps after padding or dropout."""
        return any(
            u.needs_grad or (u.operation in (PAD, DROPOUT) and self._leads_to_gradient(u))
            for u in self._readers(node)
        )

    def _units(self, norm: Node) -> list[Unit] | str:
        """Returns a unit per reader of the activation, or why a reader cannot be in a unit.

        The reason is empty if only the program reads the activation.
        """
        activated = self._activated[norm]
        end = activated.end
        readers = self._readers(end)
        if end.is_held:
            return "the program holds its activation" if readers else ""
        units = []
        for user in readers:
            if user not in self._order:
                return "its activation is read again later"
            node, reads, dropout, pads = user, end, None, []
            padding = (0,) * (len(norm.shape) - 2)
            while node.operation is PAD or (node.operation is DROPOUT and reads is end):
                following = self._only_reader(node)
                if node.operation is DROPOUT:
                    dropout = node
                else:
                    sizes = node.settings[::-1]  # (end, start) of each axis, first axis first
                    if sizes[::2] != sizes[1::2]:
                        return "the padding differs between two sides"
                    pads.append(node)
                    padding = tuple(a + b for a, b in zip(padding, sizes[::2], strict=True))
                if following is None:
                    kind = "dropped" if node is dropout else "padded"
                    return f"its {kind} activation is used more than once"
                reads, node = node, following
            if node.operation is not CONV or node.inputs[0] is not reads:
                return f"no convolution follows ({function_name(node)})"
            bias = self._bias_after(node)
            units.append(Unit(activated, dropout, tuple(pads), padding, node, bias))
        return units or "nothing reads its activation"

    def _bias_after(self, conv: Node) -> Node | None:
        """Returns an addition that the convolution can do as its bias, or None."""
        reader = self._only_reader(conv) if len(conv.inputs) == 2 else None
        if reader is None or reader.operation is not SHIFT or reader.inputs[0] is not conv:
            return None
        return reader if reader.inputs[1].shape[0] == 1 else None

    def _chain(self, unit: Unit) -> list[Unit]:
        """Returns `unit` and following units, if each alone reads the output of the previous."""
        chain = [unit]
        while chain[-1].fits_stage:
            reader = self._only_reader(chain[-1].conv)
            units = self._units(reader) if reader in self._activated else ""
            if isinstance(units, str) or len(units) != 1 or not units[0].fits_stage:
                break
            chain += units
        return chain

    def _matches_from(self, norm: Node) -> list[Match]:
        """Returns the matches of a norm, its activation and the units after them."""
        units, x = self._units(norm), norm.inputs[0]
        if len(units) == 2 and not isinstance(units, str):
            for unit, projection in (units, units[::-1]):
                if block := self._projecting_block(self._chain(unit), projection):
                    return [_block_match(block)]
        if isinstance(units, str) or len(units) != 1:
            reason = units if isinstance(units, str) else "several convolutions read its activation"
            found = self._activated[norm]
            if found.activation is None and found.scale is None:
                self._refused[norm] = reason
                return []
            name, nodes = found.name, found.nodes
            return [Match(name, nodes, found.end, (x,), activated=found, reason=reason)]
        chain = self._chain(units[0])
        last = chain[-1].end
        add = self._only_reader(last)
        is_sum = add is not None and add.operation is ADD and add not in self._added
        if add is None or not is_sum or add.inputs[0] is add.inputs[1]:
            return _row_matches(chain)
        other = add.inputs[1] if add.inputs[0] is last else add.inputs[0]
        if other is x and all(u.fits_stage for u in chain) and x.dtype == last.dtype:
            return [_block_match(Block(tuple(chain), None, add))]
        if other.dtype != last.dtype:
            return _row_matches(chain)
        unit = chain[-1]
        nodes, inputs = (*unit.nodes, add), (unit.norm.inputs[0], other)
        last_match = Match(f"{unit.name} and residual add", nodes, add, inputs, (unit,))
        return [*_row_matches(chain[:-1]), last_match]

    def _projecting_block(self, chain: list[Unit], projection: Unit) -> Block | None:
        last = chain[-1].conv
        add = self._only_reader(last)
        if add is None or add.operation is not ADD or add in self._added:
            return None
        if not projection.fits_stage or self._only_reader(projection.conv) is not add:
            return None
        if set(add.inputs) != {last, projection.conv} or not all(u.fits_stage for u in chain):
            return None
        return Block(tuple(chain), projection, add)

    def _joined(self, found: list[Match]) -> list[Match]:
        """Joins residual blocks to runs if each alone reads the output of the previous block.

        A block with a projection begins a run, as it begins a stage of a network.
        """
        runs: list[list[Match]] = []
        for m in sorted(found, key=lambda m: self._order[m.end]):
            if runs and self._continues(runs[-1][-1], m):
                runs[-1].append(m)
            else:
                runs.append([m])
        return [_joined_match(run) for run in runs]

    def _continues(self, before: Match, m: Match) -> bool:
        """Whether a residual block continues the run that ends with `before`."""
        if not (before.blocks and m.blocks) or m.inputs[0] is not before.end:
            return False
        block = m.blocks[0]
        return (
            before.blocks[0].add is not None
            and block.add is not None
            and block.projection is None
            and m.nodes[0].memory == before.nodes[0].memory
            and not before.end.is_held
            and all(reader in m.nodes for reader in before.end.users)
        )
