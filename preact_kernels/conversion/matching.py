"""Finds recorded nodes that can run fused: units, residual blocks, runs of blocks."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from preact_kernels.conversion.deferred import Node
from preact_kernels.conversion.operations import ADD, CONV, NORM, PAD, RELU


class Unit(NamedTuple):
    """A BN-ReLU-Conv, with zero padding before the convolution."""

    bn: Node
    relu: Node
    pads: tuple[Node, ...]
    padding: tuple[int, int]  # height and width that `pads` add at each side
    conv: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.bn, self.relu, *self.pads, self.conv)

    @property
    def fits_stage(self) -> bool:
        """Whether a stage can run the unit."""
        has_bias = len(self.conv.inputs) > 2
        return not (self.pads or has_bias) and self.conv.dtype == self.bn.dtype


class Block(NamedTuple):
    """Consecutive units, with a shortcut (`add` is not None) or without."""

    units: tuple[Unit, ...]
    projection: Unit | None
    add: Node | None


class Match(NamedTuple):
    """Nodes that run fused, or one node that runs plain.

    Attributes:
        name: name in the report; empty: the node runs plain.
        nodes: all nodes; if they run fused, the first one is a batch norm.
        end: the node of the output.
        inputs: images that the match reads.
        units: all units, projections included; empty for a BN-ReLU alone.
        blocks: consecutive blocks in one autograd node; empty for a unit or a BN-ReLU alone.
        reason: why a BN-ReLU runs without a convolution; empty: the reader of `execute` reads it.
    """

    name: str
    nodes: tuple[Node, ...]
    end: Node
    inputs: tuple[Node | Tensor, ...]
    units: tuple[Unit, ...] = ()
    blocks: tuple[Block, ...] = ()
    reason: str = ""


def _block_match(*blocks: Block) -> Match:
    """Returns the match of a residual block, or of units as blocks without a shortcut."""
    projections = tuple(b.projection for b in blocks if b.projection is not None)
    units = (*(u for b in blocks for u in b.units), *projections)
    end = blocks[-1].add or blocks[-1].units[-1].conv
    nodes = tuple(dict.fromkeys([*(n for u in units for n in u.nodes), end]))
    name = f"BN-ReLU-Conv, {len(units)} in a row"
    return Match(name, nodes, end, (nodes[0].inputs[0],), units, blocks)


def _joined_match(matches: Sequence[Match]) -> Match:
    """Returns one match for a run of blocks; each block reads the output of the previous one."""
    first = matches[0]
    if not first.blocks or first.blocks[0].add is None:
        return first
    blocks = tuple(b for m in matches for b in m.blocks)
    nodes = tuple(n for m in matches for n in m.nodes)
    units = tuple(u for m in matches for u in m.units)
    name = f"run of {len(blocks)} residual blocks"
    return Match(name, nodes, matches[-1].end, first.inputs, units, blocks)


def _row_matches(units: list[Unit]) -> list[Match]:
    """Returns the match of consecutive units without a shortcut."""
    if len(units) > 1:
        return [_block_match(*(Block((u,), None, None) for u in units))]
    return [Match("BN-ReLU-Conv", u.nodes, u.conv, (u.bn.inputs[0],), (u,)) for u in units]


class Matcher:
    """Finds which of `nodes`, in the order of their recording, run fused."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {n: i for i, n in enumerate(nodes)}
        self._relus: dict[Node, Node] = {}  # batch norm -> ReLU, if both run fused
        self._refused: dict[Node, str] = {}
        self._added: set[Node] = set()  # additions that are part of a match

    def match(self) -> tuple[list[Match], dict[Node, str]]:
        """Returns the matches, and for each other batch norm the reason why it is in no match."""
        for node in self._order:
            if node.operation is NORM:
                relu = self._relu(node)
                if isinstance(relu, str):
                    self._refused[node] = relu
                else:
                    self._relus[node] = relu
        matches: list[Match] = []
        taken: set[Node] = set()
        for bn in self._relus:
            if bn not in taken:
                new = self._matches_from(bn)
                matches += new
                taken.update(n for m in new for n in m.nodes if n.operation is NORM)
                self._added.update(m.end for m in new if m.end.operation is ADD)
        return self._joined(matches), self._refused

    def _only_reader(self, node: Node) -> Node | None:
        """Returns the only node that reads the result of `node`, if nothing else can read it."""
        user = node.user
        if user is None or node.other_users or node.is_held or user not in self._order:
            return None
        return user

    def _relu(self, bn: Node) -> Node | str:
        """Returns the ReLU that runs fused with a batch norm, or the reason why there is none."""
        needed = [i.needs_grad if isinstance(i, Node) else i.requires_grad for i in bn.inputs]
        reader = self._only_reader(bn)
        if reader is None:
            return "its output is used more than once" if len(bn.users) > 1 else ""
        if reader.operation is not RELU:
            return f"no ReLU follows ({reader.operation.name})"
        is_frozen = bn.context.has_grad and not any(needed)
        if is_frozen and any(u.needs_grad for u in reader.users):
            return "it is frozen, and plain PyTorch saves nothing for it"
        return reader

    def _units(self, bn: Node) -> list[Unit] | str:
        """Returns a unit per reader of the activation, or the reason why one is no convolution.

        The reason is empty if only the program reads the activation.
        """
        relu = self._relus[bn]
        if relu.is_held:
            return "the program holds its activation" if relu.users else ""
        units = []
        for user in relu.users:
            if user not in self._order:
                return "its activation is read again later"
            node, pads, padding = user, [], (0, 0)
            while node.operation is PAD:
                left, right, top, bottom = node.settings
                following = self._only_reader(node)
                if left != right or top != bottom:
                    return "the padding differs between two sides"
                if following is None:
                    return "its padded activation is used more than once"
                pads.append(node)
                padding, node = (padding[0] + top, padding[1] + left), following
            reads = pads[-1] if pads else relu
            if node.operation is not CONV or node.inputs[0] is not reads:
                return f"no convolution follows ({node.operation.name})"
            units.append(Unit(bn, relu, tuple(pads), padding, node))
        return units or "nothing reads its activation"

    def _chain(self, unit: Unit) -> list[Unit]:
        """Returns `unit` and the units after it; each reads only the output of the previous one."""
        chain = [unit]
        while chain[-1].fits_stage:
            reader = self._only_reader(chain[-1].conv)
            units = self._units(reader) if reader in self._relus else ""
            if isinstance(units, str) or len(units) != 1 or not units[0].fits_stage:
                break
            chain += units
        return chain

    def _matches_from(self, bn: Node) -> list[Match]:
        """Returns the matches of a batch norm, its ReLU and the units after them."""
        units, x = self._units(bn), bn.inputs[0]
        if len(units) == 2 and not isinstance(units, str):
            for unit, projection in (units, units[::-1]):
                if block := self._projecting_block(self._chain(unit), projection):
                    return [_block_match(block)]
        if isinstance(units, str) or len(units) != 1:
            reason = units if isinstance(units, str) else "several convolutions read its activation"
            relu = self._relus[bn]
            return [Match("BN-ReLU", (bn, relu), relu, (x,), reason=reason)]
        chain = self._chain(units[0])
        last = chain[-1].conv
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
        nodes, inputs = (*unit.nodes, add), (unit.bn.inputs[0], other)
        last_match = Match("BN-ReLU-Conv and residual add", nodes, add, inputs, (unit,))
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
        """Joins residual blocks to runs if each reads only the output of the previous one.

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
        """Whether a residual block continues the run that `before` ends."""
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
