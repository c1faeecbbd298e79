"""Which nodes of a graph change a tensor in place, and whether another node could see it."""

import inspect
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from preact_kernels import torch_compat
from preact_kernels.conversion import fused_calls
from preact_kernels.conversion.tracing import IN_PLACE_OPERATORS
from preact_kernels.modules.norm_act import has_activation, is_norm_act

# Their results share no memory with an input, unless they work in place.
_ALLOCATING_FUNCTIONS = {
    fused_calls.bn_relu,
    fused_calls.stage,
    fused_calls.unit,
    F.avg_pool2d,
    F.batch_norm,
    F.conv2d,
    F.linear,
    F.max_pool2d,
    F.relu,
    operator.add,
    operator.mul,
    operator.sub,
    torch.add,
    torch.cat,
    torch.mul,
    torch.relu,
}
_ALLOCATING_METHODS = {"clone", "dim", "numel", "size"}
_ATTRIBUTES = {"device", "dtype", "ndim", "shape"}  # which share no memory
_ALLOCATING_MODULES = (
    nn.AvgPool2d,
    nn.BatchNorm2d,
    nn.Conv2d,
    nn.Linear,
    nn.MaxPool2d,
    nn.SyncBatchNorm,
)
_IN_PLACE_OPERATORS = set(IN_PLACE_OPERATORS.values())


def changes_input(modules: dict[str, nn.Module], node: fx.Node) -> bool:
    """Whether `node` may change one of its inputs in place.

    Args:
        modules: those of the graph, by path.
        node: of the graph.
    """
    if node.kwargs.get("out") is not None:
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op == "call_module":
        module = modules[str(node.target)]
        if has_activation(module):  # which may change the result of the batch norm
            return False
        return any(getattr(m, "inplace", False) or not _is_of_torch(m) for m in module.modules())
    if node.op != "call_function":
        return False
    if torch_compat.is_mutable_operator(node.target):
        return True
    name = getattr(node.target, "__name__", "")
    if node.target in _IN_PLACE_OPERATORS or name == "setitem":
        return True
    return (name.endswith("_") and not name.endswith("__")) or _has_inplace_argument(node)


def is_seen(modules: dict[str, nn.Module], node: fx.Node) -> bool:
    """Whether another node could see that `node` changes its inputs: it may be read elsewhere."""
    return not all(len(i.users) == 1 and _allocates(modules, i) for i in changed_inputs(node))


def aliases(modules: dict[str, nn.Module], node: fx.Node) -> set[fx.Node]:
    """`node`, and the nodes whose results may share memory with its result."""
    found, waiting = {node}, [node]
    while waiting:
        last = waiting.pop()
        users = [u for u in last.users if u not in found and _may_share(modules, last, u)]
        found.update(users)
        waiting += users
    return found


def _may_share(modules: dict[str, nn.Module], node: fx.Node, user: fx.Node) -> bool:
    """Whether the result of `user` may share memory with that of `node`."""
    if changes_input(modules, user) and node not in changed_inputs(user):
        return False
    return not _allocates(modules, user)


def changed_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that `node` may change in place, if `changes_input`."""
    if node.kwargs.get("out") is not None or node.op == "call_module":
        return node.all_input_nodes
    return node.all_input_nodes[:1]


def _allocates(modules: dict[str, nn.Module], node: fx.Node) -> bool:
    """Whether nothing but the result of `node` shares its memory."""
    if changes_input(modules, node):
        return not is_seen(modules, node)
    if node.op == "call_method":
        return node.target in _ALLOCATING_METHODS
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) in _ALLOCATING_MODULES or is_norm_act(module)
    if node.op != "call_function" or node.kwargs.get("out") is not None:
        return False
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    return node.target in _ALLOCATING_FUNCTIONS and not _has_inplace_argument(node)


def _has_inplace_argument(node: fx.Node) -> bool:
    """Whether a function of torch.nn.functional is called with `inplace=True`."""
    target: Any = node.target
    if node.kwargs.get("inplace"):
        return True
    if not getattr(target, "__module__", "").startswith("torch.nn"):
        return False
    try:
        given = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bool(given.arguments.get("inplace"))


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.nn.", "preact_kernels."))
