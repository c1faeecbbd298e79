"""Finds recorded nodes that can run fused: units, residual blocks, runs of blocks."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from preact_kernels.activations import ACTIVATIONS, IDENTITY, RELU, Activation
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
from preact_kernels.kernels.contract import Conv, Unit, samples_of
from preact_kernels.kernels.pytorch_conv import unserved
from preact_kernels.norms import BatchNorm
from preact_kernels.ops import dispatch
from preact_kernels.ops.arguments import NO_SCALE_SHIFT, ConvArguments, ScaleShift, UnitArguments
from preact_kernels.ops.block_arguments import BlockArguments
from preact_kernels.ops.preact_stage import PreparedStage
from preact_kernels.ops.unit import PreparedUnit


class UnitNodes(NamedTuple):
    """The nodes of a unit: a norm, and what runs fused with it."""

    norm: Node
    scale: Node | None = None
    shift: Node | None = None
    add: Node | None = None  # addition of a residual before the activation, without a convolution
    activation: Node | None = None
    dropout: Node | None = None
    pads: tuple[Node, ...] = ()
    padding: tuple[int, ...] = ()  # pixels that `pads` add at both sides of each axis
    conv: Node | None = None
    bias: Node | None = None  # addition of a bias after a convolution without a bias

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order."""
        first = self.norm, self.scale, self.shift, self.add, self.activation, self.dropout
        return tuple([n for n in (*first, *self.pads, self.conv, self.bias) if n is not None])

    @property
    def end(self) -> Node:
        last = self.bias or self.conv or self.activation or self.add
        return last or self.shift or self.scale or self.norm

    @property
    def fits_stage(self) -> bool:
        """Whether this is a BN-ReLU-Conv unit that a `BlockArguments` can contain."""
        conv, activation = self.conv, self.activation
        if conv is None or activation is None or activation.settings.name != "relu":
            return False
        parts = self.scale, self.shift, self.dropout, self.bias
        has_others = any(n is not None for n in parts) or bool(self.pads) or len(conv.inputs) > 2
        return (
            not has_others
            and type(self.norm.settings.norm) is BatchNorm
            and len(conv.shape) == 4
            and conv.dtype == self.norm.dtype
        )

    @property
    def name(self) -> str:
        parts = [self.norm.settings.norm.title]
        before = ("Scale", self.scale), ("Shift", self.shift), ("Add", self.add)
        parts += [name for name, node in before if node is not None]
        if self.activation is not None:
            parts.append(ACTIVATIONS[self.activation.settings.name].title)
        after = ("Dropout", self.dropout), ("Conv", self.conv)
        parts += [name for name, node in after if node is not None]
        return "-".join(parts)

    @property
    def residual(self) -> Node | Tensor:
        """What `add` adds."""
        first, second = cast(Node, self.add).inputs
        return second if first is self.norm else first

    def arguments(self, x: Tensor | None = None) -> UnitArguments:
        """The arguments of the unit for its input; scale and shift need `x`."""
        conv = None
        if self.conv is not None:
            weight, *bias = cast(Sequence[Tensor], self.conv.inputs[1:])
            if self.bias is not None:  # its dtype converts to the result's without rounding
                bias = [cast(Tensor, self.bias.inputs[1]).flatten().to(weight.dtype)]
            conv = ConvArguments(weight, bias[0] if bias else None, *self._geometry())
        return UnitArguments(
            self.norm.settings.arguments(self.norm.inputs[1:]),
            self._activation(),
            conv,
            NO_SCALE_SHIFT if x is None else self._scale_shift(x),
            mask=None if self.dropout is None else self.dropout.settings,
        )

    def refusal(self) -> Callable[[], str]:
        """Returns a function that says why the convolution runs in PyTorch; see `Site.refusal`."""
        x, conv, context = self.norm.inputs[0], cast(Node, self.conv), self.norm.context
        groups = self.norm.settings.norm.groups
        return functools.partial(  # without nodes, which it would keep alive
            _refusal,
            backend=context.backend,
            device=context.device,
            x_shape=x.shape,
            x_dtype=x.dtype,
            weight_shape=conv.inputs[1].shape,
            dtype=conv.dtype,
            conv=self._geometry(),
            activation=self._activation(),
            has_rows=groups is not None or (self.scale or self.shift) is not None,
            has_dropout=self.dropout is not None,
        )

    def _activation(self) -> Activation:
        return IDENTITY if self.activation is None else self.activation.settings

    def _geometry(self) -> Conv:
        conv: Conv = cast(Node, self.conv).settings.conv
        if not self.pads:
            return conv
        padding = tuple(a + b for a, b in zip(conv.padding, self.padding, strict=True))
        return conv._replace(padding=padding)

    def _scale_shift(self, x: Tensor) -> ScaleShift:
        def rows(node: Node | None) -> Tensor | None:
            if node is None:
                return None
            t = cast(Tensor, node.inputs[1])
            dtype = torch.promote_types(x.dtype, t.dtype)
            return t.expand(x.shape[0], *t.shape[1:]).flatten(1).to(dtype)

        if self.scale is None and self.shift is None:
            return NO_SCALE_SHIFT
        return ScaleShift(shift=rows(self.shift), factor=rows(self.scale))


def _refusal(
    *,
    backend: str,
    device: torch.device,
    x_shape: Sequence[int],
    x_dtype: torch.dtype,
    weight_shape: Sequence[int],
    dtype: torch.dtype,
    conv: Conv,
    activation: Activation,
    has_rows: bool,
    has_dropout: bool,
) -> str:
    """Why a backend runs PyTorch's convolution for a unit, or an empty string."""
    if has_dropout:
        return unserved("dropout", "none", "a mask")
    if len(x_shape) == 5:
        return unserved("x", "images and sequences", "volumes")
    if len(x_shape) == 3:
        weight_shape, conv = (*weight_shape[:2], 1, weight_shape[2]), conv.of_rows()
    unit = Unit(
        torch.Size(weight_shape),
        conv,
        device,
        dtype=dtype,
        x_dtype=x_dtype,
        y_dtype=dtype,  # the backend serves the unit after it casts the weight,
        weight_dtype=dtype,  # and adds a residual of another dtype afterwards
        activation=activation,
        has_rows=has_rows,
    )
    return dispatch.conv_refusal(backend, unit, samples_of(x_shape))


class Match(NamedTuple):
    """Nodes that run fused, or one node that runs plain.

    Attributes:
        name: name in the report; empty if the node runs plain.
        nodes: all nodes; if they run fused, the first node is a norm.
        end: the node of the output.
        inputs: images that the match reads.
        units: all units, including projections.
        blocks: consecutive blocks in one autograd node; empty for a single unit.
        reason: why no convolution runs fused; empty: because of `execute`'s reader.
        prepared: the arguments of the unit or of the blocks, if they are known.
    """

    name: str
    nodes: tuple[Node, ...]
    end: Node
    inputs: tuple[Node | Tensor, ...]
    units: tuple[UnitNodes, ...] = ()
    blocks: tuple[BlockArguments, ...] = ()
    reason: str = ""
    prepared: PreparedUnit | PreparedStage | None = None

    @property
    def is_sum(self) -> bool:
        """Whether this is a norm, the addition of a residual, and perhaps an activation."""
        return bool(self.units) and self.units[0].add is not None

    @property
    def has_conv(self) -> bool:
        """Whether a convolution runs fused."""
        return bool(self.units) and self.units[0].conv is not None


def _match(
    name: str, units: Sequence[UnitNodes], blocks: Sequence[BlockArguments], end: Node
) -> Match:
    nodes = tuple(dict.fromkeys([*(n for u in units for n in u.nodes), end]))
    return Match(name, nodes, end, (nodes[0].inputs[0],), tuple(units), tuple(blocks))


def _block_match(units: Sequence[UnitNodes], projection: UnitNodes | None, add: Node) -> Match:
    """Returns the match of a residual block."""
    shortcut = None if projection is None else projection.arguments().conv
    block = BlockArguments([u.arguments() for u in units], shortcut)
    everything = units if projection is None else [*units, projection]
    return _match("residual block", everything, [block], add)


def _consecutive_matches(units: list[UnitNodes]) -> list[Match]:
    """Returns the matches of consecutive units without a shortcut.

    One node saves all their inputs, so modes that save less run each unit alone.
    """
    if len(units) < 2 or _saves_less(units[0].norm):
        return [_match(u.name, [u], (), u.end) for u in units]
    blocks = [BlockArguments([u.arguments()], None, is_residual=False) for u in units]
    return [_match(f"BN-ReLU-Conv, {len(units)} in a row", units, blocks, units[-1].end)]


def _saves_less(norm: Node) -> bool:
    """Whether a memory mode decides what the nodes after a norm save."""
    return norm.memory != "store" and norm.context.has_grad and not norm.region.is_traced


def _joined_match(matches: Sequence[Match]) -> Match:
    """Joins matches of blocks that each read the output of the previous block."""
    first = matches[0]
    if len(matches) == 1:
        return first
    name = f"run of {len(matches)} residual blocks"
    nodes = tuple(n for m in matches for n in m.nodes)
    units = tuple(u for m in matches for u in m.units)
    blocks = tuple(b for m in matches for b in m.blocks)
    return Match(name, nodes, matches[-1].end, first.inputs, units, blocks)


def _is_wanted(node: Node) -> bool:
    """Whether a node that is pending elsewhere may still be computed."""
    return node.user is not None or node.is_held or bool(tracked_statistics(node))


class Matcher:
    """Finds the nodes that run fused; `nodes` are in the order of recording."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {n: i for i, n in enumerate(nodes)}
        self._candidates: dict[Node, UnitNodes] = {}  # up to the activation, by norm
        self._refused: dict[Node, str] = {}
        self._added: set[Node] = set()  # additions that are part of a match

    def match(self) -> tuple[list[Match], dict[Node, str]]:
        """Returns the matches, and for each other norm why it is not in a match."""
        for node in self._order:
            if node.operation is NORM:
                found = self._nodes_from(node)
                if isinstance(found, str):
                    self._refused[node] = found
                else:
                    self._candidates[node] = found
        matches: list[Match] = []
        taken: set[Node] = set()
        for norm in self._candidates:
            if norm not in taken:
                new = self._matches_from(norm)
                matches += new
                taken.update(n for m in new for n in m.nodes if n.operation is NORM)
                self._added.update(n for m in new for n in m.nodes if n.operation is ADD)
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

    def _nodes_from(self, norm: Node) -> UnitNodes | str:
        """Returns the nodes up to the activation that run fused with a norm, or why none do."""
        found = UnitNodes(norm)
        reader = self._only_reader(norm)
        if reader is None:
            return "its output is used more than once" if len(self._readers(norm)) > 1 else ""
        if reader.operation is SCALE:
            found, reader = found._replace(scale=reader), self._only_reader(reader)
        if reader is not None and reader.operation is SHIFT and reader.inputs[0] is found.end:
            found, reader = found._replace(shift=reader), self._only_reader(reader)
        if found.end is norm and reader is not None and self._is_sum(reader):
            found, after = found._replace(add=reader), self._only_reader(reader)
            if after is not None and after.operation is ACTIVATION and after.settings == RELU:
                found = found._replace(activation=after)
        elif reader is not None and reader.operation is ACTIVATION:
            found = found._replace(activation=reader)
        elif found.scale is None and (reader is None or not self._leads_to_conv(reader)):
            after = reader if reader is not None else found.end
            return f"no activation follows ({function_name(after)})"
        needed = [i.needs_grad if isinstance(i, Node) else i.requires_grad for i in norm.inputs]
        if norm.context.has_grad and not any(needed) and self._saves_for(found):
            return "it is frozen, and plain PyTorch saves nothing for it"
        return found

    def _saves_for(self, found: UnitNodes) -> bool:
        """Whether autograd records what runs after a norm."""
        if found.add is not None:
            return found.add.needs_grad
        return self._leads_to_gradient(found.end)

    @staticmethod
    def _is_sum(node: Node) -> bool:
        """Whether a node adds two tensors of its dtype."""
        return node.operation is ADD and all(i.dtype == node.dtype for i in node.inputs)

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

    def _units(self, norm: Node) -> list[UnitNodes] | str:
        """Returns a unit per reader of the activation, or why a reader cannot be in a unit.

        The reason is empty if only the program reads the activation.
        """
        found = self._candidates[norm]
        if found.add is not None:
            return "a residual is added"
        end = found.end
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
            unit = found._replace(dropout=dropout, pads=tuple(pads), padding=padding)
            units.append(unit._replace(conv=node, bias=self._bias_after(node)))
        return units or "nothing reads its activation"

    def _bias_after(self, conv: Node) -> Node | None:
        """Returns an addition that the convolution can do as its bias, or None."""
        reader = self._only_reader(conv) if len(conv.inputs) == 2 else None
        if reader is None or reader.operation is not SHIFT or reader.inputs[0] is not conv:
            return None
        return reader if reader.inputs[1].shape[0] == 1 else None

    def _consecutive(self, unit: UnitNodes) -> list[UnitNodes]:
        """Returns `unit` and following units, if each alone reads the output of the previous."""
        found = [unit]
        while found[-1].fits_stage:
            reader = self._only_reader(found[-1].end)
            units = self._units(reader) if reader in self._candidates else ""
            if isinstance(units, str) or len(units) != 1 or not units[0].fits_stage:
                break
            found += units
        return found

    def _matches_from(self, norm: Node) -> list[Match]:
        """Returns the matches of a norm, its activation and the units after them."""
        if self._candidates[norm].add is not None:
            return self._sum_from(norm)
        units, x = self._units(norm), norm.inputs[0]
        if len(units) == 2 and not isinstance(units, str):
            for unit, projection in (units, units[::-1]):
                if block := self._projecting_block(self._consecutive(unit), projection):
                    return [block]
        if isinstance(units, str) or len(units) != 1:
            reason = units if isinstance(units, str) else "several convolutions read its activation"
            found = self._candidates[norm]
            if found.activation is None and found.scale is None:
                self._refused[norm] = reason
                return []
            return [_match(found.name, [found], (), found.end)._replace(reason=reason)]
        units = self._consecutive(units[0])
        last = units[-1].end
        add = self._only_reader(last)
        is_sum = add is not None and add.operation is ADD and add not in self._added
        if add is None or not is_sum or add.inputs[0] is add.inputs[1]:
            return _consecutive_matches(units)
        other = add.inputs[1] if add.inputs[0] is last else add.inputs[0]
        if other is x and all(u.fits_stage for u in units) and x.dtype == last.dtype:
            return [_block_match(units, None, add)]
        if other.dtype != last.dtype:
            return _consecutive_matches(units)
        last_match = _match(f"{units[-1].name} and residual add", units[-1:], (), add)
        last_match = last_match._replace(inputs=(*last_match.inputs, other))
        return [*_consecutive_matches(units[:-1]), last_match]

    def _sum_from(self, norm: Node) -> list[Match]:
        """Returns the match of a norm whose result is added to another tensor."""
        found = self._candidates[norm]
        if found.add in self._added:
            self._refused[norm] = "another operation runs fused with the sum of its result"
            return []
        alone = _match(found.name, [found], (), found.end)
        return [
            alone._replace(inputs=(*alone.inputs, found.residual), reason="a residual is added")
        ]

    def _projecting_block(self, units: list[UnitNodes], projection: UnitNodes) -> Match | None:
        last = units[-1].end
        add = self._only_reader(last)
        if add is None or add.operation is not ADD or add in self._added:
            return None
        if not projection.fits_stage or self._only_reader(projection.end) is not add:
            return None
        if set(add.inputs) != {last, projection.end} or not all(u.fits_stage for u in units):
            return None
        return _block_match(units, projection, add)

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
        return (
            before.blocks[0].is_residual
            and m.blocks[0].is_residual
            and m.blocks[0].projection is None
            and m.nodes[0].memory == before.nodes[0].memory
            and not before.end.is_held
            and all(reader in m.nodes for reader in before.end.users)
        )
