"""Writes the forward of a converted module: the traced graph with its matches replaced."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from preact_kernels.conversion import fused_calls
from preact_kernels.conversion.matching import Activation, Block, Match, Run, SingleUnit
from preact_kernels.conversion.memory_format import keep_channels_last
from preact_kernels.conversion.tracing import IN_PLACE_OPERATORS


def rewrite(module: nn.Module, graph: fx.Graph, matches: Sequence[Match]) -> Callable[..., Tensor]:
    """Replaces the matches in the `graph` of a module, and returns its forward.

    Returns:
        A function of the module, given twice, and of its inputs. Equal graphs give the same
        function, so that `torch.compile` traces it once.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(iter(graph.nodes))):
        root = graph.placeholder("preact_root")
    calls: dict[fx.Node, fx.Node] = {}  # by the node that each replaces
    for m in matches:
        with graph.inserting_before(m.end):
            call = _call(graph, root, m, calls)
        m.end.replace_all_uses_with(call)
        calls[m.end] = call
    replaced = {node for m in matches for node in m.nodes}
    for node in reversed(graph.nodes):
        if node in replaced:
            graph.erase_node(node)
    conv = next((path(c) for m in matches for c in _convs(m)), None)
    if conv is not None:
        keep_channels_last(dict(module.named_modules()), graph, inputs, conv)
    for node in graph.nodes:
        node.target = _IN_PLACE_CALLS.get(node.target, node.target)
    code = graph.python_code("self")
    return _function(code.src, tuple(sorted(code.globals.items(), key=lambda item: item[0])))


def _calling(operation: Callable) -> Callable:
    def call(a: Any, b: Any) -> Any:
        return operation(a, b)

    call.__name__ = f"call_{operation.__name__}"
    return call


# For these operators fx writes statements as `n *= 2`, which change the variable of a number.
_IN_PLACE_CALLS = {operation: _calling(operation) for operation in IN_PLACE_OPERATORS.values()}


@functools.lru_cache(maxsize=1024)
def _function(source: str, names: tuple) -> Callable[..., Tensor]:
    scope = dict(names)
    exec(source, scope)
    return scope["forward"]


def _call(graph: fx.Graph, root: fx.Node, m: Match, calls: Mapping[fx.Node, fx.Node]) -> fx.Node:
    x = calls.get(m.x, m.x)
    if isinstance(m, Run):
        norm = path(m.activations[0].bn)
        owner, _, name = norm.rpartition(".")
        blocks = tuple(_block(graph, root, b) for b in m.blocks)
        y = graph.call_function(fused_calls.stage, (x, blocks, _module(graph, root, owner), name))
        return graph.call_method("clone", (y,)) if m.is_changed_later else y
    if isinstance(m, SingleUnit):
        bn, conv = m.unit.activation, m.unit.conv
        parent = common_parent((bn.bn, conv))
        names = (_norm_name(bn, parent), _name(conv, parent))
        residual = m.residual and calls.get(m.residual, m.residual)
        return graph.call_function(
            fused_calls.unit,
            (x, _module(graph, root, parent), names, m.unit.padding, residual, m.is_in_place),
        )
    parent = common_parent((m.activation.bn,))
    arguments = (x, _module(graph, root, parent), _norm_name(m.activation, parent))
    return graph.call_function(fused_calls.bn_relu, arguments)


def _convs(m: Match) -> list[fx.Node]:
    if isinstance(m, Run):
        return [u.conv for b in m.blocks for u in b.units]
    return [m.unit.conv] if isinstance(m, SingleUnit) else []


def _block(graph: fx.Graph, root: fx.Node, block: Block) -> tuple:
    projection = block.projection
    nodes = [n for u in block.units for n in (u.activation.bn, u.conv)]
    parent = common_parent(nodes + ([projection] if projection else []))
    units = tuple((_norm_name(u.activation, parent), _name(u.conv, parent)) for u in block.units)
    shortcut = _name(projection, parent) if projection else None
    names = (units, shortcut, block.is_residual, block.is_in_place)
    return _module(graph, root, parent), names


def path(node: fx.Node) -> str:
    """Where the module that `node` calls is, below the root."""
    return str(node.target)


def common_parent(nodes: Iterable[fx.Node]) -> str:
    """The path of the smallest module that holds the modules of some nodes."""
    parents = [path(node).split(".")[:-1] for node in nodes]
    levels = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))
    return ".".join(names[0] for names in levels)


def _name(node: fx.Node, parent: str) -> str:
    return path(node).removeprefix(f"{parent}." if parent else "")


def _norm_name(activation: Activation, parent: str) -> tuple[str, bool]:
    return _name(activation.bn, parent), activation.relu is activation.bn


def _module(graph: fx.Graph, root: fx.Node, path: str) -> fx.Node:
    return graph.get_attr(path) if path else root
