"""Keeps images in channels_last order within a converted forward, as the kernels take them.

Plain PyTorch keeps the memory format of its input from layer to layer. If that is NCHW, each fused
call would convert its input, and its result back. So the graph converts its inputs once, and a
tensor goes back to NCHW only where its strides could be seen: by views, by modules of other
libraries, and by the caller.
"""

import operator
from collections.abc import Container, Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from preact_kernels.conversion import fused_calls
from preact_kernels.conversion.aliasing import changes_input, is_seen
from preact_kernels.modules.batch_norm import has_hooks
from preact_kernels.ops import layout

# They compute the same for any strides, and their results keep the memory format. Dropout is not
# among them: it draws numbers in the order of memory.
_MODULES = {
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.BatchNorm2d,
    nn.Conv2d,
    nn.GELU,
    nn.MaxPool2d,
    nn.ReLU,
    nn.SiLU,
    nn.SyncBatchNorm,
}
_FUNCTIONS = {
    F.adaptive_avg_pool2d,
    F.avg_pool2d,
    F.max_pool2d,
    F.relu,
    F.silu,
    torch.cat,
    torch.relu,
    torch.sigmoid,
}
_METHODS = {"relu", "relu_", "sigmoid"}
_FUSED_CALLS = {fused_calls.bn_relu, fused_calls.stage, fused_calls.unit}
# The first operand decides the strides of their results, unless it is broadcast.
_BY_FIRST_OPERAND = _FUSED_CALLS | {
    *("add", "add_", "mul", "mul_"),
    *(operator.add, operator.iadd, operator.mul, operator.imul, torch.add, torch.mul),
}
# Their results do not depend on strides: shapes, and reductions, which return NCHW.
_STRIDELESS_ATTRIBUTES = {"device", "dtype", "ndim", "shape"}
_STRIDELESS_METHODS = {"amax", "amin", "dim", "mean", "size", "sum"}
_STRIDELESS_FUNCTIONS = {torch.amax, torch.amin, torch.mean, torch.sum}


def keep_channels_last(
    modules: dict[str, nn.Module], graph: fx.Graph, inputs: Sequence[fx.Node], conv: str
) -> None:
    """Adds the conversions to a graph with fused calls.

    Leaves the graph as it is if a tensor changes in place that others read, as conversions copy,
    and if it would take more conversions than the inputs and outputs of the fused calls.

    Args:
        modules: those that the graph calls, by path.
        graph: changed in place.
        inputs: the placeholders of the module's arguments.
        conv: the path of a convolution whose weight has the memory format of the model.
    """
    if any(changes_input(modules, n) and is_seen(modules, n) for n in graph.nodes):
        return
    converted, back = set(inputs), set()
    for node in graph.nodes:
        if node in converted or not any(n in converted for n in node.all_input_nodes):
            continue
        if _keeps_format(modules, node, converted):
            converted.add(node)
        else:
            back |= {n for n in node.all_input_nodes if not _is_strideless(node, n)}
    converted.difference_update(inputs)
    ends = [n for n in graph.nodes if n in back and n in converted]
    again = sum(any(u in converted for u in n.users) for n in ends)
    calls = sum(n.target in _FUSED_CALLS for n in graph.nodes)
    if len(inputs) + len(ends) + again > 2 * calls:
        return
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        is_nchw = graph.call_function(are_contiguous, (graph.get_attr(conv), *inputs))
        starts = [graph.call_function(to_channels_last, (x, is_nchw)) for x in inputs]
    for x, start in zip(inputs, starts, strict=True):
        x.replace_all_uses_with(start, delete_user_cb=converted.__contains__)
    for n in ends:  # the copy replaces it for all readers: gradients may be taken by it
        with graph.inserting_after(n):
            copy = graph.call_function(to_contiguous, (n, is_nchw))
        n.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _keeps_format(
    modules: dict[str, nn.Module], node: fx.Node, converted: Container[fx.Node]
) -> bool:
    if node.op == "call_module":
        module = modules[str(node.target)]
        gives_indices = getattr(module, "return_indices", False)
        return type(module) in _MODULES and not gives_indices and not has_hooks(module)
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in _BY_FIRST_OPERAND:
        return node.all_input_nodes[0] in converted
    if node.op == "call_method":
        return node.target in _METHODS
    return node.target in _FUNCTIONS and not node.kwargs.get("return_indices")


def _is_strideless(node: fx.Node, x: fx.Node) -> bool:
    """Whether the strides of `x` do not matter to `node`."""
    if node.target is getattr:
        return node.args[1] in _STRIDELESS_ATTRIBUTES
    if node.op == "call_method" and node.target == "expand_as":
        return node.args[0] is not x
    if node.op == "call_method":
        return node.target in _STRIDELESS_METHODS
    return node.op == "call_function" and node.target in _STRIDELESS_FUNCTIONS


def are_contiguous(conv: nn.Module, *inputs: Tensor) -> bool:
    """Whether a model runs in NCHW: inputs, and the weight of one convolution."""
    weight = conv._parameters.get("weight")
    tensors = inputs if weight is None else (weight, *inputs)
    return all(t.is_contiguous() and not layout.is_channels_last(t) for t in tensors)


def to_channels_last(x: Tensor, is_nchw: bool) -> Tensor:
    """`x` in channels_last order, where the model runs in NCHW."""
    return layout.nhwc(x) if is_nchw and x.dim() == 4 else x


def to_contiguous(x: Tensor, is_nchw: bool) -> Tensor:
    """`x` with the strides that it has in a model that runs in NCHW."""
    if not is_nchw or x.dim() < 4:
        return x
    strides = [1]
    for size in x.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return x if x.stride() == (*strides,) else x.clone(memory_format=torch.contiguous_format)
